"""Rows: the unit in which KV is kept, found, held and copied.

A *row* is one layer group on one shard. The law: a worker's rows are distinct, and what a request names is always one
row of its worker. A worker may hold several: each of its groups, each slice of heads that other workers would hold
alone, or the same row as another worker where KV is replicated.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Final, NamedTuple

from kvist.errors import LayoutError
from kvist.model.layout import GroupKind, LayerGroup

ROWS_MAX: Final = 4096
"""Most rows of one prefix; groups and shards are numbered below it."""


class Row(NamedTuple):
    """One layer group on one shard."""

    group: int
    shard: int

    def __str__(self) -> str:  # type: ignore[explicit-override] # ``typing.override`` came with Python 3.12
        """Name it for people."""
        return f"group {self.group} on shard {self.shard}"


@dataclass(frozen=True, slots=True)
class RowMemory:
    """Where a worker holds a row, and how much of each chunk is kept."""

    row: Row
    group: LayerGroup
    """Where the blocks lie."""
    blocks_per_chunk: int
    """Blocks that a request names for each chunk: the stored ones."""

    def __post_init__(self) -> None:
        if not (0 <= self.row.group < ROWS_MAX and 0 <= self.row.shard < ROWS_MAX):
            raise LayoutError(f"{self.row}; both numbers lie in [0, {ROWS_MAX})")
        if self.blocks_per_chunk < 1:
            raise LayoutError(f"{self.blocks_per_chunk} blocks in a chunk of group {self.row.group}")

    def tail(self, num_blocks: int) -> RowMemory:
        """Return the row as it is for tails of so many blocks; itself for 0.

        Raises:
            LayoutError: this row has no such tails.
        """
        if not num_blocks:
            return self
        if self.group.kind is not GroupKind.FULL or not 0 < num_blocks < self.blocks_per_chunk:
            raise LayoutError(
                f"a tail of {num_blocks} blocks in a row of kind {self.group.kind.value!r}, whose chunks have "
                f"{self.blocks_per_chunk}; only rows of kind 'full' have tails, which are shorter than chunks"
            )
        return replace(self, blocks_per_chunk=num_blocks)

    @property
    def chunk_nbytes(self) -> int:
        """Bytes of one chunk."""
        return self.group.block_nbytes * self.blocks_per_chunk


def row_memory(row: Row, group: LayerGroup, chunk_tokens: int) -> RowMemory:
    """Return what a worker holds of a row in chunks of ``chunk_tokens``.

    Raises:
        LayoutError: such a group cannot be cut into such chunks.
    """
    return RowMemory(row, group, group.stored_blocks_per_chunk(chunk_tokens))
