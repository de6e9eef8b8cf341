"""Copy plans: pure arithmetic from block ids and slots to a checked value, in numpy.

The law: what a plan names has been checked. Block ids are inside the registered blocks, appear once and are never the
null block, but where a block is skipped and so neither read nor written; so, with a layout that checks itself, no run
leaves the engine's memory, no two runs of a scatter write the same byte, and every run has its own place in a slot.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from kvist.errors import InvalidBlocks
from kvist.model.layout import Int64s, LayerGroup
from kvist.model.transfer import CopyPlan, Direction


def stored_block_ids(block_ids: Sequence[int], *, blocks_per_chunk: int, num_stored: int) -> list[int]:
    """Return the block ids of whole chunks that are kept: the last ``num_stored`` of each chunk's.

    Raises:
        InvalidBlocks: no whole number of chunks, or a chunk does not have so many blocks.
    """
    if not 1 <= num_stored <= blocks_per_chunk:
        raise InvalidBlocks(f"{num_stored} blocks to keep of a chunk of {blocks_per_chunk}")
    if len(block_ids) % blocks_per_chunk:
        raise InvalidBlocks(f"{len(block_ids)} block ids are no whole number of chunks of {blocks_per_chunk} blocks")
    first = blocks_per_chunk - num_stored
    return [block_ids[at] for at in range(len(block_ids)) if at % blocks_per_chunk >= first]


def stored_blocks_to_skip(num_skipped: int, *, blocks_per_chunk: int, num_stored: int) -> int:
    """Return how many of the stored blocks lie among the first ``num_skipped`` of all blocks of whole chunks.

    Raises:
        InvalidBlocks: a number below zero, or a chunk does not have so many blocks.
    """
    if num_skipped < 0 or not 1 <= num_stored <= blocks_per_chunk:
        raise InvalidBlocks(f"{num_skipped} blocks to skip, {num_stored} to keep of a chunk of {blocks_per_chunk}")
    chunks, rest = divmod(num_skipped, blocks_per_chunk)
    return chunks * num_stored + max(0, rest - (blocks_per_chunk - num_stored))


def parse_block_ids(
    packed: bytes, group: LayerGroup, *, num_chunks: int, blocks_per_chunk: int, num_skipped_blocks: int = 0
) -> Int64s:
    """Read block ids off the wire; return them as ``[num_chunks, blocks_per_chunk]``.

    The first ``num_skipped_blocks`` may be the null block, as often as they like.

    Raises:
        InvalidBlocks: too few or too many, out of range, twice the same, or the null block.
    """
    if len(packed) % 4:
        raise InvalidBlocks(f"{len(packed)} bytes are no whole number of int32 block ids")
    ids = np.frombuffer(packed, dtype="<i4")
    if len(ids) != num_chunks * blocks_per_chunk:
        raise InvalidBlocks(
            f"{len(ids)} block ids for {num_chunks} chunks of {blocks_per_chunk} blocks; "
            f"{num_chunks * blocks_per_chunk} are needed"
        )
    if ids.size:
        if int(ids.view("<u4").max()) >= group.num_blocks:  # As unsigned, a negative id is the largest of all.
            wrong = int(ids.min()) if int(ids.min()) < 0 else int(ids.max())
            raise InvalidBlocks(f"block id {wrong} is outside [0, {group.num_blocks})")
        named = ids
        if group.null_block is not None and num_skipped_blocks > 0:
            is_passed_over = ids == group.null_block
            is_passed_over[num_skipped_blocks:] = False
            named = ids[~is_passed_over]
        is_named = np.zeros(group.num_blocks, dtype=np.bool_)
        is_named[named] = True
        if group.null_block is not None and group.null_block in range(group.num_blocks) and is_named[group.null_block]:
            raise InvalidBlocks(f"block id {group.null_block} is the engine's null block")
        if np.count_nonzero(is_named) != len(named):
            values, counts = np.unique(named, return_counts=True)
            raise InvalidBlocks(f"block id {int(values[counts.argmax()])} appears {int(counts.max())} times")
    return ids.astype(np.int64).reshape(num_chunks, blocks_per_chunk)


def plan_copy(
    direction: Direction, group: LayerGroup, block_ids: Int64s, slot_offsets: Int64s, *, num_skipped_blocks: int = 0
) -> CopyPlan:
    """Pair each row of checked ``block_ids``, shape ``[num_chunks, blocks_per_chunk]``, with a slot.

    Raises:
        InvalidBlocks: more blocks are to be skipped than one chunk has.
    """
    assert block_ids.ndim == 2
    assert len(block_ids) == len(slot_offsets)
    if not 0 <= num_skipped_blocks < max(block_ids.shape[1], 1):
        raise InvalidBlocks(f"{num_skipped_blocks} blocks to skip in a chunk of {block_ids.shape[1]}")
    return CopyPlan(direction, group, block_ids, slot_offsets, num_skipped_blocks)
