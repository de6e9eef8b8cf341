"""The longest prefix that can be served, and the chunks that it needs. Pure state.

The law: what is returned is exactly what ``model.coverage`` says of the chunks that are sealed. Rows that need all of a
prefix are looked at first and bound the others: behind their first gap nothing can be served.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

import numpy as np

from kvist.index.chunk_index import Chunk, ChunkIndex
from kvist.index.leases import Held
from kvist.model.coverage import Need, first_needed, servable_chunks
from kvist.model.keys import ChunkKey, Digest, chunk_keys
from kvist.model.layout import GroupKind
from kvist.model.rows import Row

T = TypeVar("T")


def find_prefix(index: ChunkIndex, digests: Sequence[Digest], needs: Sequence[Need]) -> tuple[int, dict[Row, Held]]:
    """Return how many chunks can be served, and what that needs of each row."""
    num_chunks, found = cover(index.match, index.find_sealed, digests, needs)
    return num_chunks, {row: _held(chunks, needs[row.group], num_chunks) for row, chunks in found.items()}


def cover(
    match: Callable[[Sequence[ChunkKey]], Sequence[T]],
    find: Callable[[Sequence[ChunkKey]], Sequence[T | None]],
    digests: Sequence[Digest],
    needs: Sequence[Need],
) -> tuple[int, dict[Row, Sequence[T | None]]]:
    """Return how many chunks can be served from what is found, and what was found of each row, by chunk.

    ``match`` returns what is there of the first keys, up to the first that is missing; ``find`` what is there of each.
    """
    whole = [group for group, need in enumerate(needs) if need.kind is GroupKind.FULL]
    parts = [group for group, need in enumerate(needs) if need.kind is not GroupKind.FULL]
    found: dict[Row, Sequence[T | None]] = {}
    num_chunks = len(digests)
    for group in whole:
        for shard in range(needs[group].num_shards):
            leading = match(chunk_keys(digests[:num_chunks], group=group, shard=shard))
            found[Row(group, shard)] = leading
            num_chunks = len(leading)
    if parts and num_chunks:
        for group in parts:
            for shard in range(needs[group].num_shards):
                found[Row(group, shard)] = find(chunk_keys(digests[:num_chunks], group=group, shard=shard))
        num_chunks = longest(found, needs, num_chunks, lambda chunk: chunk is not None, groups=parts)
    return num_chunks, found


def longest(
    found: Mapping[Row, Sequence[T | None]],
    needs: Sequence[Need],
    num_chunks: int,
    is_there: Callable[[T | None], bool],
    *,
    groups: Sequence[int] | None = None,
) -> int:
    """Return the longest prefix of at most so many chunks for which ``groups``, or all, have what they need."""
    groups = range(len(needs)) if groups is None else groups
    presence = [np.empty((needs[group].num_shards, num_chunks), dtype=np.bool_) for group in groups]
    for group, shards in zip(groups, presence, strict=True):
        for shard in range(needs[group].num_shards):
            shards[shard] = [is_there(chunk) for chunk in found[Row(group, shard)][:num_chunks]]
    return servable_chunks([needs[group] for group in groups], presence)


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
