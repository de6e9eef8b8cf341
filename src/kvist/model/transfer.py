"""A set of copies as a value: what moves where, decided and checked before anything moves."""

from __future__ import annotations

import enum
from dataclasses import dataclass

from kvist.model.layout import Int64s, LayerGroup

CHUNKS_MAX = 1 << 16
"""Most chunks of one copy."""
BLOCKS_MAX = 1 << 20
"""Most blocks of one copy."""
CHECKSUM_NBYTES = 8
"""Of one chunk, where checksums travel packed."""


def split_checksums(packed: bytes) -> list[bytes]:
    """Return packed checksums one by one."""
    return [packed[start : start + CHECKSUM_NBYTES] for start in range(0, len(packed), CHECKSUM_NBYTES)]


class Direction(enum.Enum):
    """``GATHER`` reads engine blocks into slots; ``SCATTER`` writes slots into engine blocks."""

    GATHER = "gather"
    SCATTER = "scatter"


@dataclass(frozen=True, slots=True)
class CopyPlan:
    """Whole chunks to copy between an engine's blocks and pool slots. Made by ``transfer.plan.plan_copy`` only."""

    direction: Direction
    group: LayerGroup
    block_ids: Int64s
    """shape ``[num_chunks, blocks_per_chunk]``; checked against the group"""
    slot_offsets: Int64s
    """shape ``[num_chunks]``: where each chunk starts in the pool, in bytes"""
    num_skipped_blocks: int
    """Leading blocks of the first chunk that are verified and not written: others may be reading them."""

    @property
    def num_chunks(self) -> int:
        """Chunks that this plan moves."""
        return len(self.slot_offsets)

    @property
    def chunk_nbytes(self) -> int:
        """Bytes of each chunk."""
        return self.group.block_nbytes * int(self.block_ids.shape[1])
