"""What is found: a kind, which is documented, and what was seen, in numbers.

The law: whoever reads a finding that is worse than fine learns why it matters and the one thing to change.
"""

from __future__ import annotations

import enum
import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

_CODE: Final = re.compile(r"[a-z]+\.[a-z-]+")


class Level(enum.Enum):
    """How bad it is, the least first."""

    OK = "ok"
    NOTE = "note"
    """Worth to know; works, and helps."""
    WARNING = "warning"
    """Works, and helps less than it could, or not at all."""
    PROBLEM = "problem"
    """Does not work, or does harm."""


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that was looked at."""

    code: str
    """What was looked at, a dot, and what was found."""
    level: Level
    what: str
    """What was seen."""
    why: str = ""
    """Why that matters; empty if all is well."""
    change: str = ""
    """The one thing to change; empty if all is well."""

    def __post_init__(self) -> None:
        assert _CODE.fullmatch(self.code), self.code
        assert self.what, self.code
        assert bool(self.why) == bool(self.change) == (self.level is not Level.OK), self


@dataclass(frozen=True, slots=True)
class Kind:
    """A finding before anything was seen, as it is documented."""

    code: str
    level: Level
    title: str
    """In general what was seen."""
    why: str
    change: str
    """With the names of what ``found`` fills in, in braces."""

    def found(self, what: str, **named: object) -> Finding:
        """Return a finding of this kind; ``named`` goes into the change."""
        return Finding(self.code, self.level, what, self.why, self.change.format(**named))


def fine(topic: str, what: str) -> Finding:
    """Return that all is well with a topic."""
    return Finding(f"{topic}.ok", Level.OK, what)


def is_clean(findings: Iterable[Finding]) -> bool:
    """Return whether nothing is worse than a note."""
    return all(finding.level in (Level.OK, Level.NOTE) for finding in findings)
