"""Slots for new chunks: what is there already, what gets a slot, what gets none, and why.

The law: a chunk of a group that needs whole prefixes gets a slot only behind its parent; a slot is made free by
evicting leaves, never the chain that the new chunk hangs on; of its owner's first, where the tenant has a quota and has
reached it. Chunks of other groups stand alone: a hole before them is no obstacle.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass

from kvist.index.chunk_index import Chunk, ChunkIndex, ChunkState
from kvist.model.keys import Digest, chunk_keys
from kvist.model.layout import GroupKind
from kvist.model.owners import Owner
from kvist.model.rows import RowMemory
from kvist.storage.slots import SLOT_ALIGNMENT, SlotAllocator
from kvist.units import align_up


class NoSlot(enum.Enum):
    """Why a chunk gets none."""

    POOL_FULL = "pool full"
    TENANT_QUOTA = "tenant quota"


@dataclass(frozen=True, slots=True)
class Reservation:
    """What became of the chunks of one store."""

    reserved: list[tuple[int, Chunk]]
    """(position in the request, chunk)"""
    present: list[Chunk]
    """Those that were there already, sealed or not."""
    num_refused: int
    reason: str


class Reserver:
    """Composes an index and its slots."""

    def __init__(self, index: ChunkIndex, slots: SlotAllocator) -> None:
        self._index = index
        self._slots = slots

    def fits(self, nbytes: int) -> bool:
        """Return whether the pool has extents for chunks of this size."""
        return align_up(nbytes, SLOT_ALIGNMENT) <= self._slots.extent_nbytes

    def reserve(
        self, held: RowMemory, parent_digests: Sequence[Digest], digests: Sequence[Digest], *, slot_nbytes: int,
        owner: Owner,
    ) -> Reservation:  # fmt: skip
        """Reserve a slot for every chunk that is not there yet, evicting as needed, until one cannot be had.

        ``slot_nbytes`` is the size of the row's slots, also for its tails: with slots of their own sizes, these would
        cut the pool up.
        """
        is_chained, chunk_nbytes = held.group.kind is GroupKind.FULL, held.chunk_nbytes
        parent_keys = chunk_keys(parent_digests, group=held.row.group, shard=held.row.shard)
        parent = self._index.get(parent_keys[0]) if parent_keys else None
        if parent_keys and parent is None:
            return Reservation([], [], len(digests), "no parent")
        reserved: list[tuple[int, Chunk]] = []
        present: list[Chunk] = []
        for number, key in enumerate(chunk_keys(digests, group=held.row.group, shard=held.row.shard)):
            chunk = self._index.get(key)
            if chunk is not None:
                present.append(chunk)
            else:
                slot_offset = self.allocate(slot_nbytes, below=parent, owner=owner)
                if isinstance(slot_offset, NoSlot):
                    return Reservation(reserved, present, len(digests) - number, slot_offset.value)
                chunk = self._index.reserve(key, parent, slot_offset, chunk_nbytes, slot_nbytes, owner=owner)
                reserved.append((number, chunk))
            parent = chunk if is_chained else None
        return Reservation(reserved, present, 0, "")

    def allocate(self, nbytes: int, *, below: Chunk | None, owner: Owner) -> int | NoSlot:
        """Return a slot for an owner, evicting leaves as needed, but never the chunk that the new one will hang below.

        If no extent, or no quota, is so large, nothing is evicted for it.
        """
        if not self.fits(nbytes):
            return NoSlot.POOL_FULL
        pinned = below if below is not None and below.state is ChunkState.SEALED else None
        if pinned is not None:
            self._index.pin(pinned)
        try:
            if not self._index.make_room(owner.tenant, nbytes):
                return NoSlot.TENANT_QUOTA
            while (slot_offset := self._slots.allocate(nbytes)) is None:
                if self._index.evict() is None:
                    return NoSlot.POOL_FULL
            return slot_offset
        finally:
            if pinned is not None:
                self._index.unpin(pinned)
