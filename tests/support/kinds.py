"""The engines of the simulation: which rows their workers hold, and how each lays its blocks out."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property

from kvist.model.coverage import Need, first_needed, need_of
from kvist.model.layout import GroupKind
from kvist.model.rows import Row
from tests.support.layouts import Laid, Shape, block_outermost, hnd, kv_apart, nhd
from tests.support.memory import stamp

CHUNK_TOKENS = 6
SHAPE = Shape(num_layers=2, num_blocks=21, block_tokens=2, num_heads=2, row_nbytes=8)
TAILS = range(1, CHUNK_TOKENS // SHAPE.block_tokens)
"""How many blocks a tail may have."""

CHUNKS_MAX = 6
PROMPTS = [
    [f"{start}{'a' * min(length, fork)}{branch * max(0, length - fork)}" for length in range(1, CHUNKS_MAX + 1)]
    for start in "mno"
    for fork, branch in ((3, "b"), (3, "c"), (1, "d"))
]
"""Chains of names; those of one start share their first chunks."""

Way = Callable[[Shape], Laid]
"""How a worker lays out a row's blocks."""


def of_kind(kind: GroupKind, lay: Way, window: int | None = None) -> Way:
    """Lay blocks out for a group that does not need whole prefixes."""

    def lay_so(shape: Shape) -> Laid:
        laid = lay(shape)
        return replace(laid, group=replace(laid.group, kind=kind, window=window))

    return lay_so


def window(lay: Way) -> Way:
    """Lay out blocks of a group that needs the last two chunks."""
    return of_kind(GroupKind.WINDOW, lay, 2 * CHUNK_TOKENS - 1)


def short(lay: Way) -> Way:
    """Lay out blocks of a group that needs the last block."""
    return of_kind(GroupKind.WINDOW, lay, SHAPE.block_tokens)


def chunked(lay: Way) -> Way:
    """Lay out blocks of a group that needs its attention chunk, which is three chunks long."""
    return of_kind(GroupKind.CHUNKED, lay, 3 * CHUNK_TOKENS)


def recurrent(lay: Way) -> Way:
    """Lay out states."""
    return of_kind(GroupKind.RECURRENT, lay)


Worker = tuple[tuple[Row, Way], ...]
"""The rows of one worker; the first is of group 0."""


def holding(*places: tuple[int, int, Way]) -> Worker:
    """Return a worker that holds these: group, shard and way."""
    return tuple((Row(group, shard), way) for group, shard, way in places)


def alone(*ways: Way, shard: int = 0) -> Worker:
    """Return a worker that holds one shard of all groups."""
    return holding(*((group, shard, way) for group, way in enumerate(ways)))


@dataclass(frozen=True)
class Kind:
    """Engines of one id, whose keys are their own where their layouts are."""

    engine_id: str
    space: str
    workers: tuple[Worker, ...]
    copiers: frozenset[int] = frozenset()
    """Those of its workers that copy for themselves. Who shares a space with them does so too."""

    @property
    def ways(self) -> dict[Row, Way]:
        """All of its rows."""
        return {row: way for worker in self.workers for row, way in worker}

    @cached_property
    def needs(self) -> list[Need]:
        """Of each of its layer groups, on as many shards as it has; a row's readers are the workers that hold it."""
        num_holders = Counter(row for worker in self.workers for row, _ in worker)
        needs = []
        for group in sorted({row.group for row in self.ways}):
            shards = [row for row in self.ways if row.group == group]
            (num_readers,) = {num_holders[row] for row in shards}
            laid = self.ways[Row(group, 0)](SHAPE)
            needs.append(need_of(laid.group, CHUNK_TOKENS, num_shards=len(shards), num_readers=num_readers))
        return needs

    @property
    def has_tails(self) -> bool:
        """Say whether a lookup of its may name tails."""
        return all(need.kind is GroupKind.FULL for need in self.needs)

    @property
    def is_uneven(self) -> bool:
        """Say whether its groups have different numbers of shards or readers."""
        return len({(need.num_shards, need.num_readers) for need in self.needs}) > 1


KINDS = [
    Kind("one", "shared", (alone(nhd),)),
    Kind("two", "shared", (alone(hnd),)),
    Kind("three", "tp2", (alone(kv_apart), alone(block_outermost, shard=1))),
    Kind("four", "copied", (alone(nhd),), frozenset({0})),
    Kind("five", "copied", (alone(hnd),), frozenset({0})),
    Kind("six", "mixed", (alone(nhd), alone(kv_apart, shard=1)), frozenset({1})),
]
"""Engines of one layer group."""

_HYBRID = (nhd, window(hnd), recurrent(nhd))
KINDS_OF_ROWS = [
    Kind("seven", "hybrid", (alone(*_HYBRID),)),
    Kind("eight", "hybrid", (alone(hnd, window(kv_apart), recurrent(nhd)),)),
    Kind("nine", "hybrid tp2", (alone(*_HYBRID), alone(*_HYBRID, shard=1))),
    Kind("ten", "hybrid tp2", (alone(*_HYBRID) + alone(*_HYBRID, shard=1),)),
    Kind("eleven", "replicas", (alone(nhd, short(nhd)), alone(hnd, short(kv_apart)))),
    Kind("twelve", "hybrid copied", (alone(nhd, chunked(nhd), short(hnd)),), frozenset({0})),
    Kind("thirteen", "windows", (alone(window(nhd), chunked(hnd)),)),
    Kind("seventeen", "full groups", (alone(nhd, hnd), alone(hnd, kv_apart))),
    Kind("fourteen", "uneven", tuple(holding((0, rank // 2, nhd), (1, rank, recurrent(nhd))) for rank in range(4))),
    Kind("fifteen", "uneven", tuple(
        holding((0, rank, hnd), (1, 2 * rank, recurrent(nhd)), (1, 2 * rank + 1, recurrent(nhd))) for rank in range(2)
    )),
    Kind("sixteen", "uneven windows", tuple(
        holding((0, 0, nhd), (1, rank, window(hnd)), (2, 0, chunked(nhd))) for rank in range(2)
    )),
]  # fmt: skip
"""Engines of several groups: on one shard and on two, workers that hold two shards, rows that two workers hold.

Seventeen has tails: its groups are all full.

The last three have groups that are cut differently: two shards of heads, on two workers each, beside four of states;
the same chunks on half of the workers; a row that is held by both workers beside one that each holds a shard of.
"""


def needed(need: Need, num_chunks: int) -> range:
    """Return which chunks of a prefix a group needs."""
    return range(first_needed(need, num_chunks), num_chunks)


def content(key: bytes, row: Row, nbytes: int) -> bytes:
    """Return what a row's chunk of this digest must hold."""
    return stamp(key + bytes(row), nbytes)


def tail(names: list[str], num_blocks: int) -> str:
    """Return the name of the tail of so many blocks behind chunks of a prompt; none is where the prompt begins."""
    return f"{''.join(names[-1:])}+{num_blocks}"


def digest(space: str, name: str) -> bytes:
    return hashlib.sha256(f"{space}/{name}".encode()).digest()[:16]
