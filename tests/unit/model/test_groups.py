"""Layer groups keep what their kind needs of a chunk, in one order, and can be cut by heads."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvist.errors import LayoutError
from kvist.model.layout import GroupKind, LayerGroup, LayerPlane, slice_heads
from kvist.model.rows import Row, RowMemory, row_memory
from tests.support.layouts import SAME_BYTES, ChunkMap, Laid, Shape, chunk_bytes, nhd, opaque

BLOCKS = LayerPlane(0, 0, num_blocks=4, block_stride=4096, row_nbytes=16)


@pytest.mark.parametrize(
    ("kind", "block_tokens", "window", "chunk_tokens", "stored"),
    [
        (GroupKind.FULL, 16, None, 256, 16),
        (GroupKind.WINDOW, 32, 1024, 256, 8),
        (GroupKind.WINDOW, 32, 256, 256, 8),
        (GroupKind.WINDOW, 32, 300, 256, 8),
        (GroupKind.WINDOW, 32, 128, 256, 4),
        (GroupKind.WINDOW, 32, 64, 128, 2),
        (GroupKind.CHUNKED, 16, 64, 256, 16),
        (GroupKind.RECURRENT, 256, None, 256, 1),
        (GroupKind.RECURRENT, 16, None, 256, 1),
    ],
    ids=str,
)
def test_a_chunk_keeps_the_blocks_that_can_be_needed(
    kind: GroupKind, block_tokens: int, window: int | None, chunk_tokens: int, stored: int
):
    """A window that is shorter than a chunk keeps its last blocks, a state one block, and everything else all."""
    group = LayerGroup(kind, block_tokens, (BLOCKS,), window=window)
    assert group.blocks_per_chunk(chunk_tokens) == chunk_tokens // block_tokens
    assert group.stored_blocks_per_chunk(chunk_tokens) == stored


@pytest.mark.parametrize(
    ("kind", "block_tokens", "window", "chunk_tokens", "named"),
    [
        (GroupKind.WINDOW, 32, 100, 256, "a window of 100 tokens in chunks of 256 is no multiple .* 32 tokens"),
        (GroupKind.FULL, 16, None, 100, "chunk_tokens 100 is no multiple of the engine's block of 16"),
        (GroupKind.RECURRENT, 48, None, 256, "chunk_tokens 256 is no multiple of the engine's block of 48"),
    ],
    ids=str,
)
def test_chunks_that_do_not_fit_a_group_are_refused(
    kind: GroupKind, block_tokens: int, window: int | None, chunk_tokens: int, named: str
):
    """A window or a chunk that ends inside a block is refused with the numbers."""
    with pytest.raises(LayoutError, match=named):
        LayerGroup(kind, block_tokens, (BLOCKS,), window=window).stored_blocks_per_chunk(chunk_tokens)


@pytest.mark.parametrize(
    ("kind", "window"),
    [
        (GroupKind.FULL, 16), (GroupKind.RECURRENT, 16), (GroupKind.WINDOW, None), (GroupKind.WINDOW, 0),
        (GroupKind.WINDOW, -1), (GroupKind.CHUNKED, None), (GroupKind.CHUNKED, 0), (GroupKind.FULL, 0),
    ],
)  # fmt: skip
def test_windows_go_with_kinds_that_have_one(kind: GroupKind, window: int | None):
    """A window of no tokens, a missing one, and one of a kind that has none are refused."""
    with pytest.raises(LayoutError, match=rf"kind '{kind.value}' with a window of {window} tokens"):
        LayerGroup(kind, 16, (BLOCKS,), window=window)


def test_slots_that_pack_several_tokens_are_planes_with_fewer_tokens():
    """Compressed latent KV, 4 tokens a slot, its indexer and a tail of 2 slots: the bytes of a chunk are their sum."""
    latent = LayerPlane(0, 0, 8, 73_728, 1152, num_tokens=64, token_stride=1152)
    indexer = LayerPlane(1, 0, 8, 20_000, 132, num_tokens=64, token_stride=132)
    tail = LayerPlane(2, 0, 8, 2304, 1152, num_tokens=2, token_stride=1152)
    assert [plane.page_nbytes for plane in (latent, indexer, tail)] == [73_728, 8448, 2304]
    group = LayerGroup(GroupKind.FULL, 256, (latent, indexer, tail))
    assert group.block_nbytes * group.stored_blocks_per_chunk(256) == 84_480 == 330 * 256
    with pytest.raises(LayoutError, match="a block of 24 tokens in 16 slots"):
        LayerGroup(GroupKind.FULL, 24, (replace(latent, num_tokens=16),))


@pytest.mark.parametrize(
    ("layers", "chunk_nbytes"),
    [
        ([(GroupKind.FULL, None, 16, 8, 4)], [2_097_152]),
        ([(GroupKind.FULL, None, 16, 8, 2), (GroupKind.FULL, None, 16, 4, 1)], [1_048_576, 262_144]),
        ([(GroupKind.FULL, None, 16, 8, 2), (GroupKind.WINDOW, 1024, 32, 4, 2)], [1_048_576, 524_288]),
        ([(GroupKind.FULL, None, 16, 8, 2), (GroupKind.WINDOW, 128, 32, 4, 2)], [1_048_576, 262_144]),
    ],
    ids=["one", "mixed heads", "window of 1024", "window of 128"],
)
def test_bytes_of_chunks(layers: list[tuple], chunk_nbytes: list[int]):
    """Worked numbers: bf16, head size 64, chunks of 256 tokens."""
    found = []
    for kind, window, block_tokens, num_heads, num_layers in layers:
        token = num_heads * 128
        planes = tuple(
            LayerPlane(layer, 0, 10, 2 * block_tokens * token, 128, 2, block_tokens * token, block_tokens, token,
                       num_heads, 128)
            for layer in range(num_layers)
        )  # fmt: skip
        group = LayerGroup(kind, block_tokens, planes, window=window)
        found.append(group.block_nbytes * group.stored_blocks_per_chunk(256))
    assert found == chunk_nbytes


def test_what_decides_what_bytes_mean_is_in_the_fingerprint():
    """Kind, window, tokens of an opaque page and tokens of a slot give fingerprints of their own."""
    page = LayerPlane(0, 0, 4, 4096, 4096)
    slots = LayerPlane(0, 0, 4, 4096, 64, num_tokens=64, token_stride=64)
    groups = [
        LayerGroup(GroupKind.FULL, 256, (page,)),
        LayerGroup(GroupKind.FULL, 128, (page,)),
        LayerGroup(GroupKind.RECURRENT, 256, (page,)),
        LayerGroup(GroupKind.WINDOW, 256, (page,), window=256),
        LayerGroup(GroupKind.WINDOW, 256, (page,), window=512),
        LayerGroup(GroupKind.CHUNKED, 256, (page,), window=512),
        LayerGroup(GroupKind.FULL, 256, (slots,)),
        LayerGroup(GroupKind.FULL, 128, (slots,)),
        LayerGroup(GroupKind.FULL, 64, (slots,)),
    ]
    assert len({group.fingerprint("bf16") for group in groups}) == len(groups)
    same = replace(slots, num_tokens=32, block_stride=2048, num_blocks=8)
    assert LayerGroup(GroupKind.FULL, 128, (same,)).fingerprint("bf16") == groups[6].fingerprint("bf16")


@given(st.sampled_from(sorted(SAME_BYTES)), st.integers(0, 3), st.integers(1, 4), st.integers(0, 1000))
def test_a_slice_of_heads_is_what_a_worker_with_these_heads_holds(lay: str, first: int, count: int, seed: int):
    """Chunks of a slice are, in any layout, the canonical bytes of its heads; others' heads are never written."""
    count = min(count, 4 - first)
    shape, chance = Shape(num_heads=4), np.random.default_rng(seed)
    whole, part = SAME_BYTES[lay](shape), nhd(replace(shape, num_heads=count))
    sliced = slice_heads(whole.group, first, count)
    assert sliced.fingerprint("bf16") == part.group.fingerprint("bf16")
    memory = [chance.integers(0, 256, nbytes, dtype=np.uint8) for nbytes in whole.memory_nbytes]
    blocks = [5, 0, 3]
    axes = (shape.num_layers, 2, len(blocks), shape.block_tokens, 4, shape.row_nbytes)
    heads = np.frombuffer(chunk_bytes(whole.group, blocks, memory), dtype=np.uint8).reshape(axes).copy()
    assert chunk_bytes(sliced, blocks, memory) == heads[..., first : first + count, :].tobytes()
    new = chance.integers(0, 256, heads[..., first : first + count, :].shape, dtype=np.uint8)
    heads[..., first : first + count, :] = new
    ChunkMap(Laid(sliced, whole.memory_nbytes), len(blocks)).write(memory, blocks, new.tobytes())
    assert chunk_bytes(whole.group, blocks, memory) == heads.tobytes()


@pytest.mark.parametrize(
    ("group", "first", "count", "named"),
    [
        (opaque(Shape()).group, 0, 1, r"heads \[0, 1\) cannot be told apart"),
        (nhd(Shape(num_heads=1)).group, 0, 1, r"cannot be told apart"),
        (nhd(Shape(num_heads=4)).group, 3, 2, r"heads \[3, 5\) of 4"),
        (nhd(Shape(num_heads=4)).group, -1, 2, r"heads \[-1, 1\) of 4"),
        (nhd(Shape(num_heads=4)).group, 0, 0, r"heads \[0, 0\) of 4"),
    ],
    ids=["opaque", "one head", "behind", "before", "none"],
)
def test_heads_that_are_no_step_are_not_sliced(group: LayerGroup, first: int, count: int, named: str):
    """Where a row holds all heads, or where there are no such heads, the refusal says so."""
    with pytest.raises(LayoutError, match=named):
        slice_heads(group, first, count)


def test_layers_with_other_heads_are_not_sliced_together():
    """A slice of layers that have different numbers of heads would be another part of each."""
    one, other = (nhd(Shape(num_layers=1, num_heads=num)).group.planes[0] for num in (2, 4))
    group = LayerGroup(GroupKind.FULL, 4, (one, replace(other, memory=1)))
    with pytest.raises(LayoutError, match=r"layers with \[2, 4\] heads"):
        slice_heads(group, 0, 1)


@pytest.mark.parametrize(("group", "shard"), [(4096, 0), (0, 4096), (-1, 0), (0, -1)])
def test_rows_have_numbers_that_a_key_can_hold(group: int, shard: int):
    """Numbers of groups and shards are refused outside of what keys and lookups take."""
    with pytest.raises(LayoutError, match=rf"group {group} on shard {shard}; both numbers lie in \[0, 4096\)"):
        row_memory(Row(group, shard), nhd(Shape()).group, 4)
    with pytest.raises(LayoutError, match="0 blocks in a chunk of group 1"):
        RowMemory(Row(1, 0), nhd(Shape()).group, 0)
    assert row_memory(Row(4095, 4095), nhd(Shape()).group, 8).chunk_nbytes == 2 * nhd(Shape()).group.block_nbytes
