"""Which part of the pool belongs to whom.

The pool is cut into *extents*, each extent into equal *slots* of one size class; an extent whose slots are all free
may become another class. The law: the free lists are the only truth; live slots are disjoint and inside the pool, and
freeing what is not taken is a programmer's error.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

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
    free: list[int] = field(default_factory=list)
    num_used: int = 0


class SlotAllocator:
    """Hands out slots of a pool of ``pool_nbytes``, as offsets."""

    def __init__(self, pool_nbytes: int) -> None:
        assert pool_nbytes >= SLOT_ALIGNMENT
        nbytes = max(pool_nbytes // _EXTENTS_USUAL, min(pool_nbytes // _EXTENTS_MIN, _EXTENT_NBYTES_USUAL), 1)
        nbytes = min(_EXTENT_NBYTES_MAX, align_up(nbytes, SLOT_ALIGNMENT))
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
        offset = extent.free.pop()
        extent.num_used += 1
        self._used_nbytes += slot_nbytes
        if not extent.free:
            del partial[extent.start]
        return offset

    def free(self, offset: int, nbytes: int) -> None:
        """Take a slot back."""
        extent = self._extents[offset // self.extent_nbytes]
        assert extent.slot_nbytes == align_up(nbytes, SLOT_ALIGNMENT), "freed under another size than allocated"
        assert (offset - extent.start) % extent.slot_nbytes == 0
        assert extent.num_used > 0
        assert offset not in extent.free, f"slot at {offset} freed twice"
        extent.free.append(offset)
        extent.num_used -= 1
        self._used_nbytes -= extent.slot_nbytes
        partial = self._partial[extent.slot_nbytes]
        if extent.num_used:
            partial[extent.start] = extent
            return
        partial.pop(extent.start, None)
        extent.slot_nbytes = 0
        extent.free = []
        self._unclaimed.append(extent)

    def _claim(self, slot_nbytes: int) -> _Extent | None:
        for index, extent in enumerate(reversed(self._unclaimed)):
            if extent.nbytes >= slot_nbytes:
                del self._unclaimed[len(self._unclaimed) - 1 - index]
                extent.slot_nbytes = slot_nbytes
                num_slots = extent.nbytes // slot_nbytes
                extent.free = [extent.start + number * slot_nbytes for number in reversed(range(num_slots))]
                self._partial[slot_nbytes][extent.start] = extent
                return extent
        return None
