"""The disk tier on a disk that stops at any point: what is found afterwards is right, and what was promised is found.

One run is a seed. A tier lives on files in memory for some hundred steps; then the disk is cut at many places among its
changes, each time with other losses, and a new tier is opened on what is left.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from kvist.model.owners import NOBODY, Owner, owned_by
from kvist.storage.base import StoredChunk
from kvist.storage.disk.tier import DiskTier
from tests.support.simulated_files import Crashes, SimulatedFiles
from tests.support.tiers import Done, aligned, key_of, make_chunk

NBYTES = 1 << 20
CUTS = 25
STEPS = 250
NAMES = [f"{prompt}{depth}" for prompt in "abcdefgh" for depth in range(9)]
SIZES = {"a": (30_000, 32_768), "b": (32_768, 32_768), "c": (100, 65_536), "d": (65_536, 65_536)}
OWNERS = {"a": Owner("one", "m"), "b": Owner("one", "n" * 100), "c": Owner("two", "m"), "d": Owner("three", "")}
"""By the prompt; of those that are not here, nobody."""


def size_of(name: str) -> tuple[int, int]:
    return SIZES.get(name[0], (9_000, 12_288))


def parent_of(name: str) -> str | None:
    return f"{name[0]}{int(name[1:]) - 1}" if name[1:] != "0" else None


@dataclass
class History:
    """What a tier was given and said, by the number of changes that its disk had seen."""

    given: dict[str, list[tuple[int, StoredChunk, bytes]]] = field(default_factory=dict)
    found_since: dict[str, int] = field(default_factory=dict)
    spans: list[tuple[str, int, int]] = field(default_factory=list)
    """Name, and from which change up to which it was found."""
    settled: list[tuple[int, frozenset[str]]] = field(default_factory=list)
    """When nothing was left to do, and what was found then."""

    def look(self, tier: DiskTier, now: int) -> None:
        """Note what is found that was not before, and what is not any more."""
        sizes = tier.find([key_of(name) for name in NAMES])
        for name, size in zip(NAMES, sizes, strict=True):
            if size is not None:
                self.found_since.setdefault(name, now)
            elif name in self.found_since:
                self.spans.append((name, self.found_since.pop(name), now))

    def promised(self, now: int) -> set[str]:
        """Return what was found before a change, and was not to go."""
        kept = {name for name, since in self.found_since.items() if since <= now}
        return kept | {name for name, since, until in self.spans if since <= now < until}

    def undone(self, now: int) -> set[str]:
        """Return what was not there when all was done, and was not given again before a change."""
        quiet = [(at, names) for at, names in self.settled if at <= now]
        if not quiet:
            return set()
        at, names = quiet[-1]
        return {
            name
            for name in NAMES
            if name not in names and not any(at <= when <= now for when, _, _ in self.given.get(name, []))
        }


class Life:
    """A tier that is used, on one or two directories."""

    def __init__(self, files: SimulatedFiles, chance: random.Random, num_directories: int) -> None:
        self.files = files
        self.chance = chance
        self.history = History()
        self.paths = [Path(f"/disk{number}") for number in range(num_directories)]
        self.tier = open_tier(files, self.paths)
        self.pending: list[Done] = []

    def run(self, num_steps: int) -> None:
        for _ in range(num_steps):
            self.step()
            self.history.look(self.tier, len(self.files.changes))

    def step(self) -> None:
        roll = self.chance.random()
        name = self.chance.choice(NAMES)
        if roll < 0.35:
            self.offer(name)
        elif roll < 0.80:
            self.tier.advance(self.chance.randrange)
        elif roll < 0.85:
            self.tier.drop([key_of(name)])
        elif roll < 0.90:
            self.tier.touch([key_of(f"{name[0]}{depth}") for depth in range(int(name[1:]) + 1)])
        elif roll < 0.91:
            self.purge(OWNERS.get(name[0], NOBODY))
        elif roll < 0.98:
            self.tier.fetch(key_of(name), aligned(b"", size_of(name)[1]), Done())
        else:
            while self.tier.advance(self.chance.randrange):
                pass
            self.history.look(self.tier, len(self.files.changes))
            self.history.settled.append((len(self.files.changes), frozenset(self.history.found_since)))

    def purge(self, owner: Owner) -> None:
        """Purge a tenant or a model, now and then between other things that are done."""
        is_owner = owned_by(owner.tenant, None) if self.chance.random() < 0.5 else owned_by(None, owner.model)
        for _ in self.tier.purge(is_owner):
            self.history.look(self.tier, len(self.files.changes))
            self.tier.advance(self.chance.randrange)
            self.history.look(self.tier, len(self.files.changes))
        names = [name for name in NAMES if is_owner(OWNERS.get(name[0], NOBODY))]
        assert self.tier.find([key_of(name) for name in names]) == [None] * len(names)

    def offer(self, name: str) -> None:
        nbytes, slot_nbytes = size_of(name)
        versions = self.history.given.setdefault(name, [])
        chunk, payload = make_chunk(
            name, parent_of(name), nbytes=nbytes, slot_nbytes=slot_nbytes, version=len(versions),
            owner=OWNERS.get(name[0], NOBODY),
        )  # fmt: skip
        if self.tier.offer(chunk, aligned(payload), Done()):
            versions.append((len(self.files.changes), chunk, payload))


def open_tier(files: SimulatedFiles, paths: list[Path]) -> DiskTier:
    return DiskTier(paths, NBYTES * len(paths), num_threads=0, files=files, queue_s=1e9)


def check(tier: DiskTier, history: History, now: int) -> None:
    """Assert that every hit is what was given, that every promise is a hit, and that prefixes are whole."""
    sizes = tier.find([key_of(name) for name in NAMES])
    hits = {name for name, size in zip(NAMES, sizes, strict=True) if size is not None}
    assert history.promised(now) <= hits, "a chunk was found, and is lost"
    assert not history.undone(now) & hits, "a chunk was gone, and is back"
    for name in sorted(hits):
        parent = parent_of(name)
        assert parent is None or parent in hits
        assert tier.owner(key_of(name)) == OWNERS.get(name[0], NOBODY)
        target, done = aligned(b"", size_of(name)[1]), Done()
        tier.fetch(key_of(name), target, done)
        while tier.advance():
            pass
        chunk = done.wait()
        assert isinstance(chunk, StoredChunk), "a chunk was found, and is damaged"
        allowed = [(given, payload) for when, given, payload in history.given[name] if when <= now]
        assert (chunk, bytes(target[: chunk.nbytes])) in allowed, "wrong bytes"


def crash_often(seed: int, num_cuts: int) -> None:
    """Live one life, and check what is found after crashes at places among its changes."""
    chance = random.Random(seed)
    life = Life(SimulatedFiles(), chance, num_directories=chance.choice((1, 2)))
    life.run(STEPS)
    crashes = Crashes(life.files)
    for now in sorted(chance.choices(range(len(life.files.changes) + 1), k=num_cuts)):
        files = crashes.at(now, chance)
        tier = open_tier(files, life.paths)
        check(tier, life.history, now)
        if chance.random() < 0.2:
            check_again(tier, files, life, chance, now)


def check_again(tier: DiskTier, files: SimulatedFiles, life: Life, chance: random.Random, now: int) -> None:
    """Let the machine stop once more while it starts, and once after a stop in order."""
    second = Crashes(files).at(chance.randint(0, len(files.changes)), chance)
    check(open_tier(second, life.paths), life.history, now)
    tier.close()
    check(open_tier(SimulatedFiles(files.contents()), life.paths), life.history, now)


def test_after_a_crash_every_hit_is_right(request: pytest.FixtureRequest):
    """Wherever the disk stops, and whatever it loses of what was not synced, no hit is wrong, no promise broken."""
    num_crashes = request.config.getoption("--crashes")
    for seed in range(-(-num_crashes // CUTS)):
        try:
            crash_often(seed, CUTS)
        except AssertionError as error:
            raise AssertionError(f"seed {seed}: {error}") from error
