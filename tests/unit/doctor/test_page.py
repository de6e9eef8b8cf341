"""The page on findings is the catalogue, word by word."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from kvist.doctor.catalogue import KINDS
from kvist.doctor.findings import Finding, Level

PAGE = Path(__file__).parents[3] / "docs" / "doctor.md"


def test_the_page_lists_all_kinds_and_no_others():
    """Each kind has one row, in the order of the catalogue, with its level, what, why and change."""
    rows = [line for line in PAGE.read_text().splitlines() if re.match(r"\| `[a-z]+\.[a-z-]+` \|", line)]
    assert rows == [
        f"| `{kind.code}` | {kind.level.value} | {kind.title} | {kind.why} | {kind.change} |" for kind in KINDS
    ]
    assert len(rows) >= 25


def test_a_finding_says_what_to_change():
    """What is worse than fine cannot be said without a why and a change, and what is fine has neither."""
    for level, why, change in (
        (Level.OK, "why", ""), (Level.OK, "", "change"), (Level.NOTE, "", ""), (Level.PROBLEM, "why", ""),
    ):  # fmt: skip
        with pytest.raises(AssertionError):
            Finding("topic.code", level, "what", why, change)
    with pytest.raises(AssertionError, match="Topic"):
        Finding("Topic", Level.OK, "what")
