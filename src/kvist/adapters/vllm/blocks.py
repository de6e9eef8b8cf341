"""Which of a request's blocks a load writes and a store reads: arithmetic on block tables, for every kind of group.

The law: what is named is there, belongs to the request, and is exactly what its group needs. In a block table of vLLM's
the null block stands for a block that there is not: outside a window, or let go of. A load passes over such blocks at
its front, and over those that the engine has itself; a store passes over the chunk.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from kvist.adapters.vllm.groups import EngineGroup
from kvist.adapters.vllm.layout import NULL_BLOCK
from kvist.adapters.vllm.metadata import LoadPart, StorePart
from kvist.adapters.vllm.tracking import Tracked
from kvist.client.planning import Places
from kvist.errors import InvalidBlocks
from kvist.model.coverage import first_needed
from kvist.model.layout import GroupKind
from kvist.model.transfer import CHECKSUM_NBYTES
from kvist.transfer.plan import stored_block_ids, stored_blocks_to_skip
from kvist.wire.messages import RowPlaces


def first_loaded(group: EngineGroup, *, num_chunks: int, num_local_chunks: int) -> int:
    """Return where the chunks begin that a group needs of a prefix and the engine does not have; they end with it."""
    return max(first_needed(group.need, num_chunks), num_local_chunks)


def plan_load(
    group: EngineGroup, table: Sequence[int], *, num_chunks: int, chunk_tokens: int, num_local_tokens: int
) -> LoadPart | None:
    """Return what is to be loaded into a group's blocks for a prefix of ``num_chunks``; None if it needs nothing.

    Raises:
        InvalidBlocks: a block that the group needs is not there.
    """
    first = first_loaded(group, num_chunks=num_chunks, num_local_chunks=num_local_tokens // chunk_tokens)
    if first >= num_chunks:
        return None
    per_chunk, num_stored = group.blocks_per_chunk, group.stored_blocks_per_chunk
    block_ids = stored_block_ids(
        table[first * per_chunk : num_chunks * per_chunk], blocks_per_chunk=per_chunk, num_stored=num_stored
    )
    num_local_blocks = max(0, num_local_tokens // group.block_tokens - first * per_chunk)
    num_skipped = stored_blocks_to_skip(num_local_blocks, blocks_per_chunk=per_chunk, num_stored=num_stored)
    if group.kind.has_window:
        while num_skipped < len(block_ids) and block_ids[num_skipped] == NULL_BLOCK:
            num_skipped += 1
    missing = block_ids[num_skipped:].count(NULL_BLOCK)
    if missing or num_skipped >= len(block_ids) or len(block_ids) != (num_chunks - first) * num_stored:
        raise InvalidBlocks(
            f"{missing} of {len(block_ids)} blocks are not there, {num_skipped} are skipped, for chunks "
            f"[{first}, {num_chunks}) of group {group.number} with {num_stored} stored blocks each"
        )
    passed_over, num_skipped = divmod(num_skipped, num_stored)
    return LoadPart(group.number, first + passed_over, tuple(block_ids[passed_over * num_stored :]), num_skipped)


def plan_tail_load(group: EngineGroup, tables: Sequence[Sequence[int]], num_chunks: int, num_tokens: int) -> LoadPart:
    """Return what is to be loaded of a prefix's tail of ``num_tokens`` behind its ``num_chunks``.

    Raises:
        InvalidBlocks: a block of it is not there.
    """
    num_blocks, rest = divmod(num_tokens, group.block_tokens)
    first = num_chunks * group.blocks_per_chunk
    block_ids = tuple(tables[group.number][first : first + num_blocks])
    if rest or len(block_ids) < num_blocks or NULL_BLOCK in block_ids:
        raise InvalidBlocks(f"{block_ids} are not the {num_blocks} blocks of a tail of {num_tokens} tokens")
    return LoadPart(group.number, num_chunks, block_ids, 0, is_tail=True)


def find_places(part: LoadPart, num_chunks: int, rows: Sequence[RowPlaces], group: int) -> dict[int, Places]:
    """Return where the ``num_chunks`` chunks of a part lie, by shard; ``group`` is the daemon's number of its group."""
    found = {}
    for row in rows:
        first = part.first_chunk - row.first_chunk
        if row.group == group and 0 <= first <= first + num_chunks <= len(row.checksums) // CHECKSUM_NBYTES:
            window = slice(first * CHECKSUM_NBYTES, (first + num_chunks) * CHECKSUM_NBYTES)
            found[row.shard] = Places(row.slots[window], row.checksums[window])  # A slot is named by as many bytes.
    return found


def plan_store(tracked: Tracked, group: EngineGroup, chosen: Mapping[int, Sequence[int]]) -> StorePart:
    """Return a group's chosen chunks, by number, as they travel."""
    digests = b"".join(tracked.packed(chunk, chunk + 1) for chunk in chosen)
    first = min(chosen)
    parent = tracked.digest(first - 1) if first and group.kind is GroupKind.FULL else b""
    return StorePart(group.number, digests, parent, tuple(block_id for ids in chosen.values() for block_id in ids))


def stored_blocks(group: EngineGroup, table: Sequence[int], chunk: int) -> list[int] | None:
    """Return the blocks of a chunk that are kept; None if one of them is not there."""
    end = (chunk + 1) * group.blocks_per_chunk
    block_ids = list(table[end - group.stored_blocks_per_chunk : end])
    is_whole = len(block_ids) == group.stored_blocks_per_chunk and NULL_BLOCK not in block_ids
    return block_ids if is_whole else None
