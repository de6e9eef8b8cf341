"""An engine's layout and memory as they travel. ``server.parsing`` reads them back."""

from __future__ import annotations

from collections.abc import Sequence

from kvist.model.coverage import Need
from kvist.model.handles import MemoryHandle
from kvist.model.rows import RowMemory
from kvist.wire.messages import GroupSpec, MemorySpec, NeedSpec, PlaneSpec


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


def describe_memory(handles: Sequence[MemoryHandle]) -> list[MemorySpec]:
    """Return allocations as they travel; their descriptors go beside the message."""
    return [
        MemorySpec(handle.kind, handle.nbytes, handle.device, handle.payload, list(handle.part_nbytes))
        for handle in handles
    ]
