"""From a peer's fields to values of the model: what comes out is checked, what is wrong is refused with its value."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Final

import msgspec

from kvist.errors import InvalidBlocks, KeyInvalid, LayoutError, LayoutRefused, Malformed, ProtocolError
from kvist.model.coverage import Need
from kvist.model.handles import MemoryHandle
from kvist.model.keys import DIGEST_NBYTES, FIELD_NBYTES_MAX, Digest, split_digests
from kvist.model.layout import GroupKind, Int64s, KVLayout, LayerGroup, LayerPlane
from kvist.model.owners import Owner
from kvist.model.rows import ROWS_MAX, Row, RowMemory, row_memory
from kvist.transfer.plan import parse_block_ids
from kvist.wire import messages as wire

_KINDS = {kind.value: kind for kind in GroupKind}
_INT64_MAX = 2**63 - 1
KEYS_MAX: Final = 1 << 20
"""Most keys in one lookup: its digests, times the rows of all groups. As many again may be those of its tails."""
_TAILS_MAX: Final = KEYS_MAX // ROWS_MAX


def parse_digests(packed: bytes) -> list[Digest]:
    """Read packed digests.

    Raises:
        Malformed: no whole number of them, or more than ``CHUNKS_MAX``.
    """
    if len(packed) > wire.CHUNKS_MAX * DIGEST_NBYTES:
        raise Malformed(f"{len(packed) // DIGEST_NBYTES} digests are over the limit of {wire.CHUNKS_MAX}")
    try:
        return split_digests(packed)
    except KeyInvalid as error:
        raise Malformed(str(error)) from error


def parse_owner(tenant: str, model: str) -> Owner:
    """Read whose the chunks of a store are.

    Raises:
        Malformed: nobody can have such a name.
    """
    try:
        return Owner(tenant, model)
    except KeyInvalid as error:
        raise Malformed(str(error)) from error


def parse_needs(specs: Sequence[wire.NeedSpec], num_digests: int, *, keys_max: int = KEYS_MAX) -> list[Need]:
    """Read what layer groups need; refuse a question whose answer would keep the loop from everybody else.

    Raises:
        Malformed: no groups, shards or readers, or too many; a need that contradicts itself.
    """
    num_groups = len(specs)
    if not 1 <= num_groups <= ROWS_MAX:
        raise Malformed(f"{num_groups} groups; at least 1, and at most {ROWS_MAX}")
    try:
        needs = [Need(_parse_kind(need.kind), need.span, need.num_shards, need.num_readers) for need in specs]
    except LayoutError as error:
        raise Malformed(str(error)) from error
    num_rows = sum(need.num_shards for need in needs)
    if num_rows > ROWS_MAX or num_rows * num_digests > keys_max:
        raise Malformed(
            f"{num_digests} digests on the {num_rows} rows of {num_groups} groups; at most {ROWS_MAX} rows, and "
            f"{keys_max} keys in all"
        )
    return needs


def parse_tails(request: wire.Lookup, needs: Sequence[Need]) -> list[Digest]:
    """Read the tails that a lookup asks for.

    Raises:
        Malformed: no whole number of them, or too many, or some group is not of kind ``full``.
    """
    tails = parse_digests(request.tails)
    if len(tails) > _TAILS_MAX:
        raise Malformed(f"{len(tails)} tails; at most {_TAILS_MAX}")
    others = {need.kind.value for need in needs if need.kind is not GroupKind.FULL}
    if tails and others:
        raise Malformed(f"{len(tails)} tails behind groups of kinds {sorted(others)}; only kind 'full' has tails")
    return tails


def parse_chunk_s(request: wire.Lookup) -> float:
    """Read what computing one chunk takes the engine, in seconds; 0 if it does not know.

    Raises:
        Malformed: less than nothing.
    """
    if request.chunk_us < 0:
        raise Malformed(f"computing one chunk takes {request.chunk_us} us")
    return request.chunk_us / 1e6


def parse_tail(held: RowMemory, num_blocks: int) -> RowMemory:
    """Return the row as a request for a tail of so many blocks means it.

    Raises:
        Malformed: it has no such tails.
    """
    try:
        return held.tail(num_blocks)
    except LayoutError as error:
        raise Malformed(str(error)) from error


def parse_blocks(packed: bytes, held: RowMemory, num_chunks: int, *, num_skipped_blocks: int = 0) -> Int64s:
    """Read the block ids of so many chunks, a row a chunk; the skipped ones may be the null block.

    Raises:
        InvalidBlocks: more than ``BLOCKS_MAX``, or wrong for the registered blocks.
    """
    if len(packed) > wire.BLOCKS_MAX * 4:
        raise InvalidBlocks(f"{len(packed) // 4} block ids are over the limit of {wire.BLOCKS_MAX}")
    return parse_block_ids(
        packed, held.group, num_chunks=num_chunks, blocks_per_chunk=held.blocks_per_chunk,
        num_skipped_blocks=num_skipped_blocks,
    )  # fmt: skip


def parse_layout(request: wire.Register) -> tuple[tuple[RowMemory, ...], tuple[MemoryHandle, ...]]:
    """Read what a worker says of its memory, and of the rows that it holds there.

    Raises:
        LayoutRefused: it contradicts itself, leaves the memory, or overlaps; a row comes twice.
    """
    num_planes = sum(len(group.planes) for group in request.groups)
    if num_planes > wire.PLANES_MAX or len(request.memory) > wire.PLANES_MAX:
        raise LayoutRefused(f"{num_planes} planes in {len(request.memory)} allocations; at most {wire.PLANES_MAX}")
    try:
        handles = tuple(
            MemoryHandle(spec.kind, spec.nbytes, spec.device, spec.payload, tuple(spec.part_nbytes))
            for spec in request.memory
        )
        layout = KVLayout(tuple(handle.nbytes for handle in handles), tuple(map(_parse_group, request.groups)))
        rows = tuple(
            row_memory(Row(spec.group, spec.shard), group, request.chunk_tokens)
            for spec, group in zip(request.groups, layout.groups, strict=True)
        )
    except LayoutError as error:
        raise LayoutRefused(str(error)) from error
    if any(nbytes > _INT64_MAX for nbytes in layout.memory_nbytes):
        raise LayoutRefused(f"allocations of {layout.memory_nbytes} bytes")
    row, num_times = Counter(held.row for held in rows).most_common(1)[0]
    if num_times > 1:
        raise LayoutRefused(f"{row} appears {num_times} times in one registration")
    return rows, handles


def parse_texts(request: wire.Register) -> tuple[str, ...]:
    """Read what a registration says for people.

    Raises:
        Malformed: more texts than rows can have groups, or longer ones than anybody reads.
    """
    longest = max(map(len, request.texts), default=0)
    if len(request.texts) > ROWS_MAX or longest > wire.TEXT_CHARS_MAX:
        raise Malformed(
            f"{len(request.texts)} texts of up to {longest} characters; at most {ROWS_MAX} of {wire.TEXT_CHARS_MAX}"
        )
    return tuple(request.texts)


def check_hello(hello: wire.Hello) -> None:
    """Refuse a hello that says more of its process than is kept.

    Raises:
        ProtocolError: no engine id, or texts over their limits.
    """
    if max(len(hello.engine_id), len(hello.name)) > wire.NAME_CHARS_MAX or not hello.engine_id:
        raise ProtocolError(f"engine_id and name have at most {wire.NAME_CHARS_MAX} characters, engine_id at least 1")
    named = [] if hello.serves is None else [str(value) for value in msgspec.structs.astuple(hello.serves)]
    longest = max(map(len, named), default=0)
    num_chars = sum(len(key) + len(value) for key, value in hello.facts.items())
    if longest > FIELD_NBYTES_MAX or num_chars > FIELD_NBYTES_MAX or len(hello.needs) > ROWS_MAX:
        raise ProtocolError(
            f"a namespace with {longest} characters in one field, {num_chars} characters of facts, "
            f"{len(hello.needs)} groups; at most {FIELD_NBYTES_MAX}, {FIELD_NBYTES_MAX} and {ROWS_MAX}"
        )


def _parse_kind(kind: str) -> GroupKind:
    if kind not in _KINDS:
        raise LayoutError(f"unknown kind of layer group {kind!r}; known kinds: {sorted(_KINDS)}")
    return _KINDS[kind]


def _parse_group(spec: wire.GroupSpec) -> LayerGroup:
    planes = tuple(
        LayerPlane(
            memory=plane.memory, offset=plane.offset, num_blocks=plane.num_blocks, block_stride=plane.block_stride,
            row_nbytes=plane.row_nbytes, num_kv=plane.num_kv, kv_stride=plane.kv_stride, num_tokens=plane.num_tokens,
            token_stride=plane.token_stride, num_heads=plane.num_heads, head_stride=plane.head_stride,
        )
        for plane in spec.planes
    )  # fmt: skip
    return LayerGroup(_parse_kind(spec.kind), spec.block_tokens, planes, spec.null_block, spec.window)


def duplicate_all(fds: Sequence[int]) -> list[int]:
    """Return duplicates of ``fds``, owned by the caller.

    Raises:
        OSError: this process has no room for them; none is left.
    """
    copies: list[int] = []
    try:
        for fd in fds:
            copies.append(os.dup(fd))  # noqa: PERF401 -- what was duplicated before a failure must be closed
    except OSError:
        close_all(copies)
        raise
    return copies


def close_all(fds: Iterable[int]) -> None:
    """Close every descriptor."""
    for fd in fds:
        os.close(fd)
