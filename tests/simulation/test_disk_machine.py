"""The disk tier against a model, in any order: stores, reads, drops, evictions, crashes, stops and starts."""

from __future__ import annotations

import random

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from kvist.model.owners import NOBODY
from kvist.storage.base import StoredChunk
from tests.simulation.test_disk_crash import NAMES, OWNERS, Life, parent_of, size_of
from tests.support.simulated_files import Crashes, SimulatedFiles
from tests.support.tiers import Done, aligned, key_of


class DiskMachine(RuleBasedStateMachine):
    """The model is what was given: a hit is one of a key's versions, whole, with all that is above it."""

    @initialize(seed=st.integers(0, 2**32), num_directories=st.sampled_from([1, 2]))
    def begin(self, seed: int, num_directories: int) -> None:
        self.life = Life(SimulatedFiles(), random.Random(seed), num_directories)

    def hits(self) -> set[str]:
        sizes = self.life.tier.find([key_of(name) for name in NAMES])
        assert all(size in (None, size_of(name)[1]) for name, size in zip(NAMES, sizes, strict=True))
        return {name for name, size in zip(NAMES, sizes, strict=True) if size is not None}

    def do_all(self) -> None:
        while self.life.tier.advance(self.life.chance.randrange):
            pass

    @rule(name=st.sampled_from(NAMES))
    def offer(self, name: str) -> None:
        for depth in range(int(name[1:]) + 1):
            self.life.offer(f"{name[0]}{depth}")

    @rule(num=st.integers(1, 9))
    def advance(self, num: int) -> None:
        for _ in range(num):
            self.life.tier.advance(self.life.chance.randrange)

    @rule(name=st.sampled_from(NAMES))
    def fetch(self, name: str) -> None:
        was_hit = name in self.hits()
        target, done = aligned(b"", size_of(name)[1]), Done()
        self.life.tier.fetch(key_of(name), target, done)
        self.do_all()
        chunk = done.wait()
        assert isinstance(chunk, StoredChunk) is was_hit
        if isinstance(chunk, StoredChunk):
            given = [(chunk, payload) for _, chunk, payload in self.life.history.given[name]]
            assert (chunk, bytes(target[: chunk.nbytes])) in given

    @rule(name=st.sampled_from(NAMES), is_done=st.booleans())
    def drop(self, name: str, is_done: bool) -> None:
        self.life.tier.drop([key_of(name)])
        assert name not in self.hits()
        if is_done:
            self.do_all()
            assert name not in self.hits()

    @rule(name=st.sampled_from(NAMES), is_done=st.booleans())
    def purge(self, name: str, is_done: bool) -> None:
        self.life.purge(OWNERS.get(name[0], NOBODY))
        assert name not in self.hits()
        if is_done:
            self.do_all()
            assert name not in self.hits()

    @rule(name=st.sampled_from(NAMES))
    def touch(self, name: str) -> None:
        self.life.tier.touch([key_of(f"{name[0]}{depth}") for depth in range(int(name[1:]) + 1)])

    @rule(is_whole=st.booleans())
    def crash(self, is_whole: bool) -> None:
        """The machine stops, with everything done or not; what was found is found again."""
        if is_whole:
            self.do_all()
        promised = self.hits()
        files = Crashes(self.life.files).at(len(self.life.files.changes), self.life.chance)
        self.reopen(files)
        assert promised <= self.hits()
        assert not is_whole or promised == self.hits()

    @rule()
    def stop(self) -> None:
        """A stop in order ends everything, and keeps exactly what was found and what was on its way."""
        promised = self.hits()
        self.life.tier.close()
        assert self.hits() == set()
        self.reopen(SimulatedFiles(self.life.files.contents()))
        assert promised <= self.hits()

    def reopen(self, files: SimulatedFiles) -> None:
        history = self.life.history
        self.life = Life(files, self.life.chance, len(self.life.paths))
        self.life.history = history

    @invariant()
    def prefixes_are_whole_and_slots_apart(self) -> None:
        if hasattr(self, "life"):
            hits = self.hits()
            assert all(parent_of(name) is None or parent_of(name) in hits for name in hits)
            tier = self.life.tier
            tier._state.catalogue.check_invariants()
            stats = tier.stats()
            assert stats.used_nbytes <= stats.capacity_nbytes


TestDisk = DiskMachine.TestCase
TestDisk.settings = settings(max_examples=30, stateful_step_count=30)
