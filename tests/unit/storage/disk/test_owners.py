"""Whose chunks are is kept on disk: over stops, in several directories, and within the log's share."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from kvist.model.owners import NOBODY, Owner, owned_by
from kvist.storage.disk.files import OsFiles
from kvist.storage.disk.format import ENTRY, encode_names, num_name_entries, parse_names
from kvist.storage.disk.inspection import purge_owned
from kvist.storage.disk.tier import DiskTier
from kvist.units import MIB
from tests.support.tiers import fetch, found, key_of, make_chunk, store

names = st.text(st.characters(exclude_categories=["Cs"]), max_size=100).filter(lambda name: name != "*")
OWNERS = [Owner("one", "m"), NOBODY, Owner("two", "a model of a longer name " * 8), Owner("", "m")]
LONG = "m" * 700


@given(st.dictionaries(st.integers(1, 4095), st.builds(Owner, names, names), max_size=5), st.integers(0, 30))
def test_names_are_read_as_written(owners: dict[int, Owner], at: int):
    """Names of any length come back by their numbers; entries that are cut off name nobody else."""
    raw = encode_names(owners)
    assert len(raw) == ENTRY.itemsize * sum(map(num_name_entries, owners.values()))
    entries = np.frombuffer(raw, dtype=ENTRY)
    assert parse_names(entries) == owners
    assert parse_names(entries[:at]).items() <= owners.items()


def fill(tier: DiskTier) -> None:
    for number, owner in enumerate(OWNERS):
        for depth in range(2):
            assert store(tier, f"{number}{depth}", f"{number}0" if depth else None, owner=owner)


def check(tier: DiskTier, *numbers: int) -> None:
    for number, owner in enumerate(OWNERS):
        assert found(tier, f"{number}0", f"{number}1") == [number in numbers] * 2
        if number in numbers:
            assert tier.owner(key_of(f"{number}1")) == owner
            assert fetch(tier, f"{number}1") == make_chunk(f"{number}1", f"{number}0", owner=owner)


def test_owners_outlive_a_stop(tmp_path: Path):
    """In one directory and in two, over several starts, with purges between them."""
    for folders in ([tmp_path / "one"], [tmp_path / "two", tmp_path / "three"]):
        tier = DiskTier(folders, 2 * MIB, queue_s=1e9)
        fill(tier)
        tier.close()
        tier = DiskTier(folders, 2 * MIB, queue_s=1e9)
        check(tier, 0, 1, 2, 3)
        assert sum(tier.purge(owned_by(None, "m"))) == 4
        tier.close()
        tier = DiskTier(folders, 2 * MIB, queue_s=1e9)
        check(tier, 1, 2)
        assert store(tier, "new", owner=Owner("new", ""))
        tier.close()
        tier = DiskTier(folders, 2 * MIB, queue_s=1e9)
        check(tier, 1, 2)
        assert tier.owner(key_of("new")) == Owner("new", "")
        tier.close()


def test_a_stopped_directory_is_purged_by_owner(tmp_path: Path):
    """What the owner has goes from the log; all else is there at the next start, and whose it is."""
    tier = DiskTier([tmp_path], MIB, queue_s=1e9)
    fill(tier)
    tier.close()
    assert purge_owned(OsFiles(), tmp_path, owned_by("two", None)) == 2
    assert purge_owned(OsFiles(), tmp_path, owned_by("two", None)) == 0
    assert purge_owned(OsFiles(), tmp_path, owned_by("", "")) == 2
    tier = DiskTier([tmp_path], MIB, queue_s=1e9)
    check(tier, 0, 3)
    assert tier.stats().counters["chunks_lost"] == 0
    tier.close()


def test_names_take_a_small_part_of_the_log(tmp_path: Path):
    """When their part is full, chunks of further owners are refused and counted; those that are known are taken."""
    tier = DiskTier([tmp_path], MIB, queue_s=1e9)
    kept = [store(tier, f"x{number}", owner=Owner(f"tenant {number}", LONG)) for number in range(40)]
    num_kept = sum(kept)
    assert kept == [True] * num_kept + [False] * (40 - num_kept)
    assert 2 < num_kept < 10
    assert tier.stats().counters["refused_owners"] == 40 - num_kept
    assert store(tier, "y", owner=Owner("tenant 0", LONG))
    tier.close()
    tier = DiskTier([tmp_path], MIB, queue_s=1e9)
    assert tier.owner(key_of("y")) == Owner("tenant 0", LONG)
    assert sum(tier.purge(owned_by(None, LONG))) == num_kept + 1
    tier.close()
    tier = DiskTier([tmp_path], MIB, queue_s=1e9)
    assert store(tier, "z", owner=Owner("tenant 39", LONG))
    tier.close()
