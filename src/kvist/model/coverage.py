"""Which prefix a set of present chunks can serve.

The law: a prefix is servable only if *every* layer group on *every* shard of its own can go on from its end. What a
group needs for that depends on its kind: all chunks before the end, the last ones, those of the attention chunk that
the end lies in, or exactly the last one. A hole where nothing is needed is no obstacle, so the answer is the longest
such prefix, and not the first gap.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from kvist.errors import LayoutError
from kvist.model.layout import GroupKind, Int64s, LayerGroup
from kvist.model.rows import ROWS_MAX
from kvist.units import ceil_div

_Length = TypeVar("_Length", int, Int64s)

Presence = npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class Need:
    """What one layer group needs of a prefix in order to go on from its end: in chunks, and on how many shards."""

    kind: GroupKind
    span: int | None = None
    """Of ``WINDOW``: how many of the last chunks; of ``CHUNKED``: chunks of one attention chunk."""
    num_shards: int = 1
    """The group's own: heads that are replicated give fewer of them than states that are cut over all workers."""
    num_readers: int = 1
    """Workers that will read each of its rows: more than one where KV is replicated."""

    def __post_init__(self) -> None:
        if (self.span is not None) is not self.kind.has_window or (self.span is not None and self.span < 1):
            raise LayoutError(
                f"a group of kind {self.kind.value!r} that needs a span of {self.span} chunks; groups of kind 'window' "
                f"and 'chunked' have one of 1 or more, the others have none"
            )
        if not (1 <= self.num_shards <= ROWS_MAX and 1 <= self.num_readers <= ROWS_MAX):
            raise LayoutError(
                f"a group of kind {self.kind.value!r} on {self.num_shards} shards with {self.num_readers} readers "
                f"each; both lie in [1, {ROWS_MAX}]"
            )


def need_of(group: LayerGroup, chunk_tokens: int, *, num_shards: int = 1, num_readers: int = 1) -> Need:
    """Return what a group needs in chunks of ``chunk_tokens``.

    Raises:
        LayoutError: attention chunks do not end where chunks do.
    """
    if group.window is None:
        return Need(group.kind, None, num_shards, num_readers)
    span = ceil_div(group.window, chunk_tokens)
    if group.kind is GroupKind.CHUNKED and group.window % chunk_tokens and chunk_tokens % group.window:
        raise LayoutError(
            f"attention chunks of {group.window} tokens do not end where chunks of {chunk_tokens} do; set chunk_tokens "
            f"to a divisor or a multiple of {group.window}"
        )
    return Need(group.kind, span, num_shards, num_readers)


def first_needed(need: Need, num_chunks: int) -> int:
    """Return where the chunks begin that are needed of a prefix of ``num_chunks``; they end with it."""
    return max(0, _start(need, num_chunks))


def servable_chunks(needs: Sequence[Need], presence: Sequence[Presence]) -> int:
    """Return the longest prefix, in chunks, that all rows can serve.

    ``presence`` says of each need which chunks are there: its shape is ``[need.num_shards, num_chunks]``. Costs a few
    operations on arrays of ``num_chunks`` for each group.
    """
    if not needs:
        return 0
    num_chunks = presence[0].shape[1]
    lengths = np.arange(num_chunks + 1, dtype=np.int64)
    is_servable = np.ones(num_chunks + 1, dtype=np.bool_)
    for need, shards in zip(needs, presence, strict=True):
        assert shards.shape == (need.num_shards, num_chunks)
        is_there = shards.all(axis=0)
        # For each length: the last chunk before its end that is missing, -1 where none is.
        last_missing = np.full(num_chunks + 1, -1, dtype=np.int64)
        np.maximum.accumulate(np.where(is_there, -1, lengths[:-1]), out=last_missing[1:])
        is_servable &= (last_missing < 0) | (last_missing < _start(need, lengths))
    return int(np.flatnonzero(is_servable)[-1])


def _start(need: Need, length: _Length) -> _Length:
    """Return where the needed chunks begin, or a number below zero where they are all."""
    match need.kind:
        case GroupKind.FULL:
            return length * 0
        case GroupKind.WINDOW | GroupKind.RECURRENT:
            return length - (need.span or 1)
        case GroupKind.CHUNKED:
            assert need.span is not None
            return length - length % need.span
