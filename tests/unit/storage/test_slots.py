"""Live slots are disjoint and inside the pool; a slot is refused only where there is none; the books are exact."""

import random

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kvist.errors import LayoutError
from kvist.storage.slots import SLOT_ALIGNMENT, SlotAllocator
from kvist.units import GIB

SIZES = [1, SLOT_ALIGNMENT, SLOT_ALIGNMENT + 1, 3 * SLOT_ALIGNMENT - 5, 5 * SLOT_ALIGNMENT]


def rounded(nbytes: int) -> int:
    return -(-nbytes // SLOT_ALIGNMENT) * SLOT_ALIGNMENT


class Slots(RuleBasedStateMachine):
    """Drives an allocator and a plain list of live slots side by side."""

    @initialize(num_pages=st.integers(1, 60), rest=st.integers(0, SLOT_ALIGNMENT - 1))
    def begin(self, num_pages: int, rest: int) -> None:
        self.pool_nbytes = num_pages * SLOT_ALIGNMENT + rest
        self.slots = SlotAllocator(self.pool_nbytes)
        self.live: dict[int, int] = {}

    @rule(nbytes=st.sampled_from(SIZES))
    def allocate(self, nbytes: int) -> None:
        has_place = self.has_place(rounded(nbytes))
        offset = self.slots.allocate(nbytes)
        assert (offset is not None) is has_place
        if offset is not None:
            assert offset % SLOT_ALIGNMENT == 0
            assert offset not in self.live
            self.live[offset] = nbytes

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def free(self, data: st.DataObject) -> None:
        offset = data.draw(st.sampled_from(sorted(self.live)))
        self.slots.free(offset, self.live.pop(offset))

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def free_wrongly(self, data: st.DataObject) -> None:
        offset = data.draw(st.sampled_from(sorted(self.live)))
        nbytes = self.live[offset]
        for wrong in ((offset, nbytes + SLOT_ALIGNMENT), (offset + 1, nbytes)):
            with pytest.raises((AssertionError, IndexError)):
                self.slots.free(*wrong)
        if data.draw(st.booleans()):
            self.slots.free(offset, self.live.pop(offset))
            with pytest.raises(AssertionError):
                self.slots.free(offset, nbytes)

    @invariant()
    def live_slots_are_apart_and_counted(self) -> None:
        end = 0
        for offset, nbytes in sorted(self.live.items()):
            assert offset >= end
            end = offset + rounded(nbytes)
        assert end <= self.pool_nbytes
        assert self.slots.used_nbytes == sum(map(rounded, self.live.values()))

    def teardown(self) -> None:
        """An empty allocator holds as many slots of any size as a new one."""
        if not hasattr(self, "live"):
            return
        for offset, nbytes in self.live.items():
            self.slots.free(offset, nbytes)
        for nbytes in SIZES:
            assert fill(self.slots, nbytes) == fill(SlotAllocator(self.pool_nbytes), nbytes)

    def has_place(self, slot_nbytes: int) -> bool:
        """Say whether any extent is free and large enough, or of this size and not full."""
        extent_nbytes = self.slots.extent_nbytes
        for start in range(0, self.pool_nbytes - SLOT_ALIGNMENT + 1, extent_nbytes):
            inside = [rounded(self.live[offset]) for offset in self.live if start <= offset < start + extent_nbytes]
            num_places = min(extent_nbytes, self.pool_nbytes - start) // slot_nbytes
            if set(inside) <= {slot_nbytes} and len(inside) < num_places:
                return True
        return False


TestSlots = Slots.TestCase
TestSlots.settings = settings(max_examples=80, stateful_step_count=40)


def fill(slots: SlotAllocator, nbytes: int) -> int:
    """Return how many slots there are, and free them again."""
    taken = []
    while (offset := slots.allocate(nbytes)) is not None:
        taken.append(offset)
    for offset in taken:
        slots.free(offset, nbytes)
    return len(taken)


def test_an_empty_extent_may_become_another_size():
    """A pool that was full of small slots takes large ones when these are gone, and the other way round."""
    slots = SlotAllocator(64 * SLOT_ALIGNMENT)
    for nbytes in (1, 8 * SLOT_ALIGNMENT, 3 * SLOT_ALIGNMENT, 1):
        num = fill(slots, nbytes)
        assert num == 8 * (8 * SLOT_ALIGNMENT // rounded(nbytes))
    assert slots.used_nbytes == 0


def test_a_double_free_is_refused_and_changes_nothing():
    """The second free is refused, and the next two slots are two."""
    slots = SlotAllocator(64 * SLOT_ALIGNMENT)
    first, second = slots.allocate(1), slots.allocate(1)
    assert first is not None
    assert second is not None
    slots.free(first, 1)
    with pytest.raises(AssertionError, match=f"slot at {first} freed twice"):
        slots.free(first, 1)
    assert slots.used_nbytes == SLOT_ALIGNMENT
    assert len({slots.allocate(1), slots.allocate(1), second}) == 3


@pytest.mark.parametrize("pool_nbytes", [1 << 20, 64 * GIB], ids=["1 MiB", "64 GiB"])
def test_chunks_that_no_extent_can_hold_are_refused(pool_nbytes: int):
    """What fits passes the check and is allocated; one byte more is refused with the sizes and a pool that would do."""
    slots = SlotAllocator(pool_nbytes)
    slots.check_fits(slots.extent_nbytes)
    assert slots.allocate(slots.extent_nbytes) is not None
    with pytest.raises(LayoutError, match=r"does not fit into an extent of .*iB; use a pool of at least .*iB"):
        slots.check_fits(slots.extent_nbytes + 1)


def test_many_operations_leave_nothing_behind():
    """After 20 000 allocations and frees of all sizes the pool is empty, and whole again."""
    chance = random.Random(7)
    slots = SlotAllocator(256 * SLOT_ALIGNMENT)
    live: list[tuple[int, int]] = []
    for _ in range(20_000):
        if live and chance.random() < 0.5:
            slots.free(*live.pop(chance.randrange(len(live))))
        else:
            nbytes = chance.choice(SIZES)
            offset = slots.allocate(nbytes)
            if offset is not None:
                live.append((offset, nbytes))
    for offset, nbytes in live:
        slots.free(offset, nbytes)
    assert slots.used_nbytes == 0
    assert fill(slots, 1) == 256


class TestTaking:
    def test_slots_of_an_earlier_life_are_taken_again(self):
        """What one allocator had out, in any order, another one takes, and then both hand out and free the same."""
        chance = random.Random(3)
        for num_pages in (64, 100, 257):
            first = SlotAllocator(num_pages * SLOT_ALIGNMENT)
            live: dict[int, int] = {}
            for _ in range(200):
                nbytes = chance.choice(SIZES)
                offset = first.allocate(nbytes)
                if offset is not None:
                    live[offset] = nbytes
                elif live:
                    offset = chance.choice(list(live))
                    first.free(offset, live.pop(offset))
            second = SlotAllocator(num_pages * SLOT_ALIGNMENT)
            offsets = chance.sample(sorted(live), len(live))
            is_ours = second.take(np.array(offsets, dtype=np.int64), np.array([live[at] for at in offsets]))
            assert is_ours.all()
            assert (second.used_nbytes, second.num_used) == (first.used_nbytes, len(live))
            for nbytes in SIZES:
                assert fill(second, nbytes) == fill(first, nbytes)
            for offset, nbytes in live.items():
                second.free(offset, nbytes)
            assert second.used_nbytes == 0

    @pytest.mark.parametrize(
        ("offset", "nbytes"),
        [
            (-SLOT_ALIGNMENT, SLOT_ALIGNMENT), (64 * SLOT_ALIGNMENT, SLOT_ALIGNMENT), (1 << 50, SLOT_ALIGNMENT),
            (SLOT_ALIGNMENT, 2 * SLOT_ALIGNMENT), (7 * SLOT_ALIGNMENT, 2 * SLOT_ALIGNMENT), (0, 9 * SLOT_ALIGNMENT),
            (SLOT_ALIGNMENT + 1, SLOT_ALIGNMENT), (SLOT_ALIGNMENT, 0), (4 * SLOT_ALIGNMENT, 2 * SLOT_ALIGNMENT),
            (0, SLOT_ALIGNMENT),
        ],
    )  # fmt: skip
    def test_what_cannot_be_is_not_taken(self, offset: int, nbytes: int):
        """Places outside, across extents, off their size's places, or of two chunks: only the first is taken."""
        slots = SlotAllocator(64 * SLOT_ALIGNMENT)
        first = (0, SLOT_ALIGNMENT)
        is_ours = slots.take(np.array([first[0], offset]), np.array([first[1], nbytes]))
        assert is_ours.tolist() == [True, False]
        assert slots.used_nbytes == SLOT_ALIGNMENT
