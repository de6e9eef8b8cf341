"""An engine's layout and memory as they travel. ``server.parsing`` reads them back."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields

import msgspec

from kvist.model.coverage import Need
from kvist.model.handles import MemoryHandle
from kvist.model.keys import Namespace
from kvist.model.rows import RowMemory
from kvist.wire.specs import GroupSpec, MemorySpec, NamespaceSpec, NeedSpec, PlaneSpec


def describe_row(held: RowMemory) -> GroupSpec:
    """Return a worker's row as it travels."""
    group = held.group
    planes = [
        PlaneSpec(
            plane.memory, plane.offset, plane.num_blocks, plane.block_stride, plane.row_nbytes, plane.num_kv,
            plane.kv_stride, plane.num_tokens, plane.token_stride, plane.num_heads, plane.head_stride,
        )
        for plane in group.planes
    ]  # fmt: skip
    return GroupSpec(
        group.kind.value, group.block_tokens, planes, group.null_block, group.window, held.row.group, held.row.shard
    )


def describe_needs(needs: Sequence[Need]) -> tuple[NeedSpec, ...]:
    """Return what layer groups need, by their numbers, as it travels."""
    return tuple(NeedSpec(need.kind.value, need.span, need.num_shards, need.num_readers) for need in needs)


def describe_namespace(namespace: Namespace) -> NamespaceSpec:
    """Return what an engine's keys begin with as it travels."""
    return NamespaceSpec(**{field.name: getattr(namespace, field.name) for field in fields(Namespace)})


def parse_namespace(spec: NamespaceSpec) -> Namespace:
    """Return what has travelled.

    Raises:
        KeyInvalid: a field cannot be part of a key.
    """
    return Namespace(**msgspec.structs.asdict(spec))


def describe_memory(handles: Sequence[MemoryHandle]) -> list[MemorySpec]:
    """Return allocations as they travel; their descriptors go beside the message."""
    return [
        MemorySpec(handle.kind, handle.nbytes, handle.device, handle.payload, list(handle.part_nbytes))
        for handle in handles
    ]
