"""Layouts that nobody has thought of."""

from __future__ import annotations

from hypothesis import strategies as st

from kvist.model.layout import GroupKind, LayerGroup, LayerPlane
from tests.support.layouts import Laid


@st.composite
def random_layouts(draw: st.DrawFn, *, num_blocks_max: int = 7) -> Laid:
    """Any nesting of block, kv, token and head, with any gaps, layers in one allocation or in several."""
    num_blocks = draw(st.integers(2, num_blocks_max))
    block_tokens = draw(st.integers(1, 4))
    is_opaque = draw(st.booleans())
    num_layers = draw(st.integers(1, 3))
    is_interleaved = draw(st.booleans())
    extents = [0] * (1 if is_interleaved or draw(st.booleans()) else num_layers)
    drafts = []
    for layer in range(num_layers):
        counts = {
            "block": num_blocks,
            "kv": 1 if is_opaque else draw(st.integers(1, 2)),
            "token": 1 if is_opaque else block_tokens,
            "head": 1 if is_opaque else draw(st.integers(1, 3)),
        }
        order = draw(st.permutations(["kv", "token", "head"]))
        order = [*order, "block"] if is_interleaved else draw(st.permutations([*order, "block"]))
        extent = row_nbytes = draw(st.integers(1, 9))
        strides = {}
        for axis in order:
            if axis == "block" and is_interleaved:
                continue
            strides[axis] = extent + draw(st.integers(0, 3))
            extent += (counts[axis] - 1) * strides[axis]
        memory = layer % len(extents)
        offset = extents[memory] + draw(st.integers(0, 5))
        extents[memory] = offset + extent
        drafts.append((memory, offset, row_nbytes, counts, strides))
    block_stride = extents[0] + draw(st.integers(0, 3))
    planes = tuple(
        LayerPlane(
            memory, offset, num_blocks, strides.get("block", block_stride), row_nbytes, counts["kv"], strides["kv"],
            counts["token"], strides["token"], counts["head"], strides["head"],
        )
        for memory, offset, row_nbytes, counts, strides in drafts
    )  # fmt: skip
    if is_interleaved:
        extents[0] += (num_blocks - 1) * block_stride
    group = LayerGroup(GroupKind.FULL, block_tokens, planes)
    return Laid(group, tuple(extent + draw(st.integers(0, 4)) for extent in extents))
