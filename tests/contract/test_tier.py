"""What every tier does. The suite is a class; a tier is a subclass that opens one."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from kvist.model.owners import NOBODY, Owner, owned_by
from kvist.storage.base import Tier
from kvist.storage.disk.tier import DiskTier
from kvist.units import MIB
from tests.support.dict_tier import DictTier
from tests.support.simulated_files import SimulatedFiles
from tests.support.tiers import Done, aligned, fetch, found, key_of, make_chunk, store
from tests.support.waiting import wait_until

SLOT = 32 * 1024
OWNERS = (Owner("one", "small"), Owner("one", "large"), NOBODY, Owner("t\u00e9n" * 80, "large"))
NUM_SLOTS_MIN = 12
"""How many slots any of the tiers has at least."""


class TierContract:
    @pytest.fixture
    def tier(self, tmp_path: Path) -> Iterator[Tier]:
        tier = self.open(tmp_path)
        yield tier
        tier.close()

    def open(self, folder: Path) -> Tier:
        raise NotImplementedError

    @pytest.mark.parametrize("nbytes", [1, 4095, 4096, 4097, SLOT - 1, SLOT])
    def test_what_comes_back_is_what_was_given(self, tier: Tier, nbytes: int):
        """Bytes, lengths, parent and the device's checksum are those that were offered."""
        assert store(tier, "above")
        chunk, payload = make_chunk("a", "above", nbytes=nbytes, slot_nbytes=SLOT)
        assert store(tier, "a", "above", nbytes=nbytes, slot_nbytes=SLOT)
        assert tier.find([chunk.key]) == [SLOT]
        assert fetch(tier, "a") == (chunk, payload)

    def test_what_is_not_there_is_not_found(self, tier: Tier):
        """An unknown key is found by nobody; a fetch of it ends with None, once."""
        assert found(tier, "a") == [False]
        assert fetch(tier, "a") == (None, b"")

    def test_a_fetch_leaves_what_is_behind_the_bytes(self, tier: Tier):
        """Of the target only as many bytes are touched as the chunk has."""
        chunk, payload = make_chunk("a", nbytes=5000, slot_nbytes=SLOT)
        assert store(tier, "a", nbytes=5000, slot_nbytes=SLOT)
        target, done = aligned(b"\xa5" * SLOT), Done()
        tier.fetch(chunk.key, target, done)
        assert done.wait() == chunk
        assert bytes(target) == payload + b"\xa5" * (SLOT - 5000)

    def test_a_chunk_is_taken_once(self, tier: Tier):
        """The same key again is refused at once, and the first bytes stay."""
        assert store(tier, "a")
        assert not store(tier, "a", version=1)
        assert fetch(tier, "a") == make_chunk("a")

    def test_a_chunk_needs_its_parent(self, tier: Tier):
        """Without its parent a chunk is refused at once; with it, it is taken, also while that is being written."""
        assert not store(tier, "a1", "a0")
        (first, first_bytes), (second, second_bytes) = make_chunk("a0"), make_chunk("a1", "a0")
        one, two = Done(), Done()
        assert tier.offer(first, aligned(first_bytes), one)
        assert tier.offer(second, aligned(second_bytes), two)
        assert one.wait()
        assert two.wait()
        assert found(tier, "a0", "a1") == [True, True]

    def test_a_drop_takes_what_builds_on_it(self, tier: Tier):
        """Dropped chunks and all below them are not found any more, but can be stored again; what is above stays."""
        for name, parent in (("a0", None), ("a1", "a0"), ("a2", "a1"), ("b2", "a1"), ("c0", None)):
            assert store(tier, name, parent)
        tier.drop([key_of("a1"), key_of("unknown")])
        assert found(tier, "a0", "a1", "a2", "b2", "c0") == [True, False, False, False, True]
        assert store(tier, "a1", "a0", version=1)
        assert fetch(tier, "a1") == make_chunk("a1", "a0", version=1)

    def test_an_owner_is_kept(self, tier: Tier):
        """Whose a chunk is is known as long as it is held, and comes back with its bytes."""
        for number, owner in enumerate(OWNERS):
            assert store(tier, f"a{number}", owner=owner)
        for number, owner in enumerate(OWNERS):
            assert tier.owner(key_of(f"a{number}")) == owner
            assert fetch(tier, f"a{number}") == make_chunk(f"a{number}", owner=owner)
        assert tier.owner(key_of("unknown")) is None

    def test_a_purge_takes_what_is_owned_and_what_builds_on_it(self, tier: Tier):
        """What the chosen owners have is not found any more, nor what hangs below it; all else is. It is counted."""
        for prompt, owner in zip("abcd", OWNERS, strict=True):
            for depth in range(2):
                assert store(tier, f"{prompt}{depth}", f"{prompt}{depth - 1}" if depth else None, owner=owner)
        assert store(tier, "b2", "b1", owner=OWNERS[3])
        assert sum(tier.purge(owned_by("one", None))) == 5
        assert found(tier, "a0", "a1", "b0", "b1", "b2", "c0", "c1", "d0", "d1") == [False] * 5 + [True] * 4
        assert sum(tier.purge(owned_by("one", None))) == 0
        assert store(tier, "a0", owner=OWNERS[0], version=1)
        assert fetch(tier, "a0") == make_chunk("a0", owner=OWNERS[0], version=1)
        assert sum(tier.purge(owned_by(None, "large"))) == 2
        assert found(tier, "a0", "c0", "c1", "d0", "d1") == [True, True, True, False, False]
        assert sum(tier.purge(owned_by(None, None))) == 3
        assert tier.stats().num_chunks == 0

    def test_a_purge_takes_what_is_being_written_and_read(self, tier: Tier):
        """A write that is under way is purged or done; a read ends with the right chunk or with None, once."""
        assert store(tier, "a0", owner=OWNERS[0])
        writes, reads = [], []
        for depth in range(1, NUM_SLOTS_MIN // 2):
            chunk, payload = make_chunk(f"a{depth}", f"a{depth - 1}", owner=OWNERS[0])
            writes.append(Done())
            assert tier.offer(chunk, aligned(payload), writes[-1])
            reads.append(Done())
            tier.fetch(key_of("a0"), aligned(b"", 8192), reads[-1])
        assert 1 <= sum(tier.purge(owned_by("one", None))) <= NUM_SLOTS_MIN // 2
        assert not any(found(tier, *(f"a{depth}" for depth in range(NUM_SLOTS_MIN))))
        assert all(isinstance(done.wait(), bool) for done in writes)
        assert {done.wait() for done in reads} <= {None, make_chunk("a0", owner=OWNERS[0])[0]}
        assert not any(found(tier, *(f"a{depth}" for depth in range(NUM_SLOTS_MIN))))

    def test_the_longest_unused_goes_first_from_its_end(self, tier: Tier):
        """Capacity is kept; what goes are ends of prompts, and of the prompts the one that was not used for longest."""
        for prompt in "ab":
            for depth in range(3):
                assert store(tier, f"{prompt}{depth}", f"{prompt}{depth - 1}" if depth else None, slot_nbytes=SLOT)
        tier.touch([key_of(f"a{depth}") for depth in range(3)])
        kept, num = [True] * 6, 0
        while any(kept):
            assert store(tier, f"new{num}", slot_nbytes=SLOT)
            assert found(tier, f"new{num}") == [True]
            num += 1
            kept = found(tier, "b2", "b1", "b0", "a2", "a1", "a0")
            assert kept == sorted(kept), "one went before its turn"
            assert tier.stats().used_nbytes <= tier.stats().capacity_nbytes
            assert num < 100

    def test_what_is_larger_than_the_tier_is_refused(self, tier: Tier):
        """A chunk that can never fit is refused at once, and takes nothing else's place."""
        assert store(tier, "a")
        assert not store(tier, "huge", nbytes=5000, slot_nbytes=64 * MIB)
        assert found(tier, "a") == [True]

    def test_figures_say_what_is_held(self, tier: Tier):
        """Chunks and bytes are those that are held, at most the capacity; nothing is queued when all is done."""
        for number in range(4):
            assert store(tier, f"a{number}", slot_nbytes=SLOT)
        stats = tier.stats()
        assert stats.num_chunks == 4
        assert 4 * SLOT <= stats.used_nbytes <= stats.capacity_nbytes
        assert (stats.num_queued_reads, stats.num_queued_writes, stats.off_reason) == (0, 0, "")
        assert tier.read_seconds(1 << 20) >= 0
        tier.drop([key_of("a0")])
        wait_until(lambda: tier.stats().used_nbytes < stats.used_nbytes)

    def test_many_at_once_end_once_each(self, tier: Tier):
        """Each of many reads and writes under way ends once, with its own bytes."""
        names = [f"n{number}" for number in range(NUM_SLOTS_MIN)]
        assert all(store(tier, name, slot_nbytes=SLOT) for name in names)
        targets = [(name, aligned(b"", SLOT), Done()) for name in names * 8]
        for name, target, done in targets:
            tier.fetch(key_of(name), target, done)
        for name, target, done in targets:
            chunk, payload = make_chunk(name, slot_nbytes=SLOT)
            assert done.wait() == chunk
            assert bytes(target[:5000]) == payload

    def test_a_closed_tier_has_and_takes_nothing(self, tier: Tier):
        """After a close nothing is found or taken, a fetch ends with None, and closing again does nothing."""
        assert store(tier, "a")
        tier.close()
        tier.close()
        assert found(tier, "a") == [False]
        assert not store(tier, "b")
        assert fetch(tier, "a") == (None, b"")


class TestDictTier(TierContract):
    def open(self, folder: Path) -> Tier:
        return DictTier(NUM_SLOTS_MIN * SLOT)


class TestDiskTier(TierContract):
    def open(self, folder: Path) -> Tier:
        return DiskTier([folder / "disk"], MIB, queue_s=1e9)


class TestDiskTierOnTwoDrives(TierContract):
    def open(self, folder: Path) -> Tier:
        return DiskTier([folder / "one", folder / "two"], 2 * MIB, queue_s=1e9)


class TestDiskTierThatDoesPagesAtATime(TierContract):
    """A file system that offers no direct I/O, and whose writes and reads are short."""

    def open(self, folder: Path) -> Tier:
        files = SimulatedFiles()
        files.short = True
        files.offers_direct = False
        return DiskTier([folder], MIB, num_threads=1, files=files, queue_s=1e9)
