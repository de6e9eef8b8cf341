"""Which part of the pool, or of a slab on disk, belongs to whom.

Either is cut into *extents*, each extent into equal *slots* of one size class; an extent whose slots are all free
may become another class. The law: the free lists are the only truth; live slots are disjoint and inside the pool, and
freeing what is not taken is a programmer's error.
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field
from typing import Final

import numpy as np
import numpy.typing as npt

from kvist.errors import LayoutError
from kvist.units import GIB, MIB, align_up, format_nbytes

SLOT_ALIGNMENT: Final = 4096
"""What direct I/O and page-wise protection ask for."""
_EXTENT_NBYTES_MAX: Final = GIB
_EXTENTS_MIN: Final = 8
_EXTENTS_USUAL: Final = 32
"""Many, so that chunks of several sizes have what they need; few enough for each to hold several of the largest."""
_EXTENT_NBYTES_USUAL: Final = 32 * MIB
"""Smaller ones would be cut for the sake of their number alone."""


@dataclass(slots=True, eq=False)
class _Extent:
    start: int
    nbytes: int
    slot_nbytes: int = 0
    free: array[int] = field(default_factory=lambda: array("I"))
    """Numbers of slots, the next one last."""
    is_used: bytearray = field(default_factory=bytearray)
    """Of each slot: 1 if it is taken."""
    num_used: int = 0


def _usual_extent_nbytes(pool_nbytes: int) -> int:
    """Return into how large extents a pool is cut: many, but none that is small for the sake of their number."""
    nbytes = max(pool_nbytes // _EXTENTS_USUAL, min(pool_nbytes // _EXTENTS_MIN, _EXTENT_NBYTES_USUAL), 1)
    return min(_EXTENT_NBYTES_MAX, align_up(nbytes, SLOT_ALIGNMENT))


class SlotAllocator:
    """Hands out slots of a pool of ``pool_nbytes``, as offsets."""

    def __init__(self, pool_nbytes: int, *, extent_nbytes: int | None = None) -> None:
        """Begin with nothing taken, in extents of the usual size unless it is said otherwise."""
        assert pool_nbytes >= SLOT_ALIGNMENT
        nbytes = extent_nbytes or _usual_extent_nbytes(pool_nbytes)
        assert nbytes % SLOT_ALIGNMENT == 0
        self.nbytes = pool_nbytes
        self.extent_nbytes = nbytes
        starts = range(0, pool_nbytes - SLOT_ALIGNMENT + 1, nbytes)
        self._extents = [_Extent(start, min(nbytes, pool_nbytes - start)) for start in starts]
        self._unclaimed = self._extents[::-1]
        self._partial: dict[int, dict[int, _Extent]] = {}
        self._used_nbytes = 0

    @property
    def used_nbytes(self) -> int:
        """Bytes in live slots, rounded up to their size class."""
        return self._used_nbytes

    @property
    def num_used(self) -> int:
        """Live slots. Costs a look at each extent."""
        return sum(extent.num_used for extent in self._extents)

    def check_fits(self, nbytes: int) -> None:
        """Refuse chunks that no extent can hold.

        Raises:
            LayoutError: with the sizes, and what to change.
        """
        slot_nbytes = align_up(nbytes, SLOT_ALIGNMENT)
        if slot_nbytes > self.extent_nbytes:
            num_extents = _EXTENTS_MIN if slot_nbytes <= _EXTENT_NBYTES_USUAL else _EXTENTS_USUAL
            raise LayoutError(
                f"a chunk of {format_nbytes(nbytes)} does not fit into an extent of "
                f"{format_nbytes(self.extent_nbytes)}; use a pool of at least "
                f"{format_nbytes(num_extents * slot_nbytes)} or smaller chunks"
            )

    def allocate(self, nbytes: int) -> int | None:
        """Return the offset of a free slot for ``nbytes``; None if there is none."""
        slot_nbytes = align_up(nbytes, SLOT_ALIGNMENT)
        partial = self._partial.setdefault(slot_nbytes, {})
        extent = next(iter(partial.values()), None) or self._claim(slot_nbytes)
        if extent is None:
            return None
        number = extent.free.pop()
        extent.is_used[number] = 1
        extent.num_used += 1
        self._used_nbytes += slot_nbytes
        if not extent.free:
            del partial[extent.start]
        return extent.start + number * slot_nbytes

    def free(self, offset: int, nbytes: int) -> None:
        """Take a slot back."""
        extent = self._extents[offset // self.extent_nbytes]
        assert extent.slot_nbytes == align_up(nbytes, SLOT_ALIGNMENT), "freed under another size than allocated"
        number, rest = divmod(offset - extent.start, extent.slot_nbytes)
        assert rest == 0
        assert extent.is_used[number], f"slot at {offset} freed twice"
        extent.is_used[number] = 0
        extent.free.append(number)
        extent.num_used -= 1
        self._used_nbytes -= extent.slot_nbytes
        partial = self._partial[extent.slot_nbytes]
        if extent.num_used:
            partial[extent.start] = extent
            return
        partial.pop(extent.start, None)
        extent.slot_nbytes = 0
        extent.free = array("I")
        extent.is_used = bytearray()
        self._unclaimed.append(extent)

    def take(self, offsets: npt.NDArray[np.int64], nbytes: npt.NDArray[np.int64]) -> npt.NDArray[np.bool_]:
        """Claim slots that were taken in an earlier life, shape ``[n]``; return which of them are ours now.

        Nothing may be taken yet. Refused is what lies outside, off its size's places, or on what comes before it.
        """
        assert self._used_nbytes == 0
        slot_nbytes = -(-nbytes // SLOT_ALIGNMENT) * SLOT_ALIGNMENT
        ends = np.array([extent.start + extent.nbytes for extent in self._extents])
        where = np.minimum(np.maximum(offsets, 0) // self.extent_nbytes, len(self._extents) - 1)
        inside = offsets - where * self.extent_nbytes
        is_ours: npt.NDArray[np.bool_] = (offsets >= 0) & (slot_nbytes > 0) & (offsets + slot_nbytes <= ends[where])
        is_ours[is_ours] = inside[is_ours] % slot_nbytes[is_ours] == 0
        order = np.argsort(where, kind="stable")
        bounds = np.searchsorted(where[order], np.arange(len(self._extents) + 1))
        for extent, begin, end in zip(self._extents, bounds[:-1].tolist(), bounds[1:].tolist(), strict=True):
            rows = order[begin:end]
            rows = rows[is_ours[rows]]
            if len(rows):
                is_right = self._take(extent, inside[rows], slot_nbytes[rows])
                is_ours[rows[~is_right]] = False
        self._unclaimed = [extent for extent in self._unclaimed if not extent.slot_nbytes]
        return is_ours

    def _take(
        self, extent: _Extent, offsets: npt.NDArray[np.int64], nbytes: npt.NDArray[np.int64]
    ) -> npt.NDArray[np.bool_]:
        slot_nbytes = int(nbytes[0])
        numbers = offsets // slot_nbytes
        is_right: npt.NDArray[np.bool_] = nbytes == slot_nbytes
        firsts = np.zeros(len(numbers), dtype=np.bool_)
        firsts[np.unique(np.where(is_right, numbers, numbers[0]), return_index=True)[1]] = True
        is_right &= firsts
        used = np.zeros(extent.nbytes // slot_nbytes, dtype=np.uint8)
        used[numbers[is_right]] = 1
        extent.slot_nbytes = slot_nbytes
        extent.is_used = bytearray(used.tobytes())
        extent.free = array("I", np.flatnonzero(used == 0)[::-1].astype(np.uint32).tobytes())
        extent.num_used = int(used.sum())
        self._used_nbytes += extent.num_used * slot_nbytes
        partial = self._partial.setdefault(slot_nbytes, {})
        if extent.free:
            partial[extent.start] = extent
        return is_right

    def _claim(self, slot_nbytes: int) -> _Extent | None:
        for index, extent in enumerate(reversed(self._unclaimed)):
            if extent.nbytes >= slot_nbytes:
                del self._unclaimed[len(self._unclaimed) - 1 - index]
                extent.slot_nbytes = slot_nbytes
                num_slots = extent.nbytes // slot_nbytes
                extent.free = array("I", range(num_slots - 1, -1, -1))
                extent.is_used = bytearray(num_slots)
                self._partial[slot_nbytes][extent.start] = extent
                return extent
        return None
