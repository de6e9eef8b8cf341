"""An engine's layout and memory as they travel. ``server.parsing`` reads them back."""

from __future__ import annotations

from collections.abc import Sequence

from kvist.model.handles import MemoryHandle
from kvist.model.layout import LayerGroup
from kvist.wire.messages import GroupSpec, MemorySpec, PlaneSpec


def describe_group(group: LayerGroup) -> GroupSpec:
    """Return a layer group as it travels."""
    planes = [
        PlaneSpec(
            plane.memory, plane.offset, plane.num_blocks, plane.block_stride, plane.row_nbytes, plane.num_kv,
            plane.kv_stride, plane.num_tokens, plane.token_stride, plane.num_heads, plane.head_stride,
        )
        for plane in group.planes
    ]  # fmt: skip
    return GroupSpec(group.kind.value, group.block_tokens, planes, group.null_block)


def describe_memory(handles: Sequence[MemoryHandle]) -> list[MemorySpec]:
    """Return allocations as they travel; their descriptors go beside the message."""
    return [
        MemorySpec(handle.kind, handle.nbytes, handle.device, handle.payload, list(handle.part_nbytes))
        for handle in handles
    ]
