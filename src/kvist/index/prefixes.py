"""The longest prefix that the index can serve, and the chunks that it needs. Pure state.

The law: what is returned is exactly what ``model.coverage`` says of the chunks that are sealed. Rows that need all of a
prefix are looked at first and bound the others: behind their first gap nothing can be served.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from kvist.index.chunk_index import Chunk, ChunkIndex
from kvist.index.leases import Held
from kvist.model.coverage import Need, first_needed, servable_chunks
from kvist.model.keys import Digest, chunk_keys
from kvist.model.layout import GroupKind
from kvist.model.rows import Row


def find_prefix(index: ChunkIndex, digests: Sequence[Digest], needs: Sequence[Need]) -> tuple[int, dict[Row, Held]]:
    """Return how many chunks can be served, and what that needs of each row."""
    whole = [group for group, need in enumerate(needs) if need.kind is GroupKind.FULL]
    parts = [group for group, need in enumerate(needs) if need.kind is not GroupKind.FULL]
    found: dict[Row, Sequence[Chunk | None]] = {}
    num_chunks = len(digests)
    for group in whole:
        for shard in range(needs[group].num_shards):
            leading = index.match(chunk_keys(digests[:num_chunks], group=group, shard=shard))
            found[Row(group, shard)] = leading
            num_chunks = len(leading)
    if parts and num_chunks:
        presence = [np.empty((needs[group].num_shards, num_chunks), dtype=np.bool_) for group in parts]
        for group, is_there in zip(parts, presence, strict=True):
            for shard in range(needs[group].num_shards):
                chunks = index.find_sealed(chunk_keys(digests[:num_chunks], group=group, shard=shard))
                found[Row(group, shard)] = chunks
                is_there[shard] = [chunk is not None for chunk in chunks]
        num_chunks = servable_chunks([needs[group] for group in parts], presence)
    return num_chunks, {row: _held(chunks, needs[row.group], num_chunks) for row, chunks in found.items()}


def add_tail(index: ChunkIndex, rows: dict[Row, Held], tails: Sequence[Digest]) -> int:
    """Let ``rows`` hold the last of some tails that all of them have; return which one, from 1, or 0 for none."""
    found = [index.find_sealed(chunk_keys(tails, group=row.group, shard=row.shard)) for row in rows]
    for number in range(len(tails), 0, -1):
        chunks = [chunk for there in found if (chunk := there[number - 1]) is not None]
        if len(chunks) == len(rows):
            for (row, held), chunk in zip(rows.items(), chunks, strict=True):
                rows[row] = held._replace(chunks=[*held.chunks, chunk], has_tail=True)
            return number
    return 0


def _held(chunks: Sequence[Chunk | None], need: Need, end: int) -> Held:
    first = first_needed(need, end)
    return Held(first, [chunk for chunk in chunks[first:end] if chunk is not None], need.num_readers)
