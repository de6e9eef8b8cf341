"""A chunk as contiguous pieces, for devices that copy piece by piece. Pure arithmetic, in numpy.

The law: the runs of a chunk, one behind another, are its canonical bytes; each lies inside the plane that it came from.
What is the same for all chunks of a group is worked out once; a plan then costs two operations on arrays.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from kvist.model.layout import Int64s, LayerGroup


@dataclass(frozen=True, slots=True, eq=False)
class ChunkPattern:
    """The runs of any chunk of one group. All arrays have the shape ``[num_runs]``."""

    memory: Int64s
    """Which registered allocation."""
    position: Int64s
    """Which of the chunk's blocks."""
    offsets: Int64s
    """From the allocation's start, for block id 0."""
    block_strides: Int64s
    run_nbytes: Int64s
    slot_offsets: Int64s
    """From the slot's start; ascending, without gaps."""

    def addresses(self, block_ids: Int64s, bases: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
        """Return where the runs start, ``[num_chunks, num_runs]``, for block ids ``[num_chunks, blocks_per_chunk]``.

        ``bases`` holds the address of each registered allocation.
        """
        offsets = block_ids[:, self.position] * self.block_strides + self.offsets
        return offsets.astype(np.uint64) + bases[self.memory]


@lru_cache(maxsize=256)
def chunk_pattern(group: LayerGroup, blocks_per_chunk: int) -> ChunkPattern:
    """Spell out a chunk's runs in canonical order, neighbours of one block joined."""
    columns: list[list[Int64s]] = [[], [], [], [], []]
    for plane in group.planes:
        inside, nbytes = plane.runs()
        shape = (inside.shape[0], blocks_per_chunk, inside.shape[1])  # kv, block, run: the canonical order
        offsets = np.broadcast_to(inside[:, None, :], shape).ravel() + plane.offset
        position = np.broadcast_to(np.arange(blocks_per_chunk)[None, :, None], shape).ravel()
        fixed = (plane.memory, plane.block_stride, nbytes)
        memory, stride, run_nbytes = (np.full(offsets.size, value, dtype=np.int64) for value in fixed)
        for column, values in zip(columns, (memory, position, offsets, stride, run_nbytes), strict=True):
            column.append(values)
    memory, position, offsets, stride, run_nbytes = (np.concatenate(column) for column in columns)
    is_joined = (offsets[:-1] + run_nbytes[:-1] == offsets[1:]) & (position[:-1] == position[1:])
    is_joined &= (memory[:-1] == memory[1:]) & (stride[:-1] == stride[1:])
    firsts = np.flatnonzero(np.concatenate([[True], ~is_joined]))
    lengths = np.add.reduceat(run_nbytes, firsts)
    slot_offsets = np.concatenate([[0], np.cumsum(lengths)[:-1]]).astype(np.int64)
    return ChunkPattern(memory[firsts], position[firsts], offsets[firsts], stride[firsts], lengths, slot_offsets)


@lru_cache(maxsize=256)
def shortest_run(group: LayerGroup, blocks_per_chunk: int) -> int:
    """Return the bytes of the shortest run of a chunk, without spelling out the chunk where it has many."""
    if blocks_per_chunk == 1:
        return int(chunk_pattern(group, 1).run_nbytes.min())
    return min(
        plane.joined_rows()[0] for plane in group.planes
    )  # Only a single block's planes, or K and V, may adjoin.
