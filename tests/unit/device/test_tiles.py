"""Tiles, moved as the kernels move them, are the chunk; slices cover every tile once and fit into their buffers."""

import re
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvist.device.checksum import vector_checksum
from kvist.device.cuda.tiles import (
    TILE,
    TILE_NBYTES,
    VECTOR_NBYTES,
    ChunkTiles,
    Slice,
    chunk_tiles,
    cut_into_slices,
)
from kvist.device.kernels import SOURCE
from kvist.model.layout import GroupKind, LayerGroup, LayerPlane
from kvist.units import KIB, MIB
from tests.support.layouts import SAME_BYTES, Laid, Shape, chunk_bytes, chunk_places, nhd, opaque, row_starts
from tests.support.memory import GUARD, stamp
from tests.support.strategies import random_layouts
from tests.support.tiles import Space, checksum, gather, scaled, scatter, strided_chunk

LAYS = [*SAME_BYTES.values(), opaque]
ALIGNED = ("base", "block_stride", "outer_stride", "inner_stride", "slot_offset", "start", "nbytes", "run_nbytes")
FIRST_MIN = TILE_NBYTES + VECTOR_NBYTES
TYPES = {"u32": "<u4", "u64": "<u8", "i64": "<i8"}


def pages(pages_nbytes: Sequence[int], num_blocks: int = 3) -> Laid:
    """Return layers of one page a block each, whatever their sizes."""
    planes = tuple(LayerPlane(number, 0, num_blocks, nbytes, nbytes) for number, nbytes in enumerate(pages_nbytes))
    return Laid(LayerGroup(GroupKind.FULL, 1, planes), tuple(num_blocks * nbytes for nbytes in pages_nbytes))


any_layouts = st.one_of(
    st.lists(st.sampled_from([1, 3, 4, 12, 16, 20, 48]), min_size=2, max_size=4).map(pages),
    random_layouts(),
    random_layouts(num_blocks_max=4).map(lambda laid: scaled(laid, 4)),
    random_layouts(num_blocks_max=3).map(lambda laid: scaled(laid, 16)),
    st.builds(
        lambda lay, *counts: lay(Shape(*counts)),
        st.sampled_from(LAYS), st.integers(1, 2), st.just(4), st.integers(1, 4), st.integers(1, 3), st.integers(1, 40),
    ),
)  # fmt: skip
gaps = st.one_of(st.integers(0, 40), st.integers(0, 4).map(lambda vectors: 16 * vectors))


def draw_case(data: st.DataObject) -> tuple[Laid, Space, list[int], ChunkTiles]:
    """Draw a layout, stamped memory for it at any addresses, and a chunk."""
    laid = data.draw(any_layouts)
    space = Space(laid.memory_nbytes, [data.draw(gaps) for _ in laid.memory_nbytes])
    space.bytes[:] = np.frombuffer(stamp(b"space", len(space.bytes)), dtype=np.uint8)
    blocks = data.draw(st.permutations(range(laid.group.num_blocks)))[: data.draw(st.integers(1, 3))]
    return laid, space, blocks, chunk_tiles(laid.group, len(blocks))


def check_tiles(tiles: ChunkTiles, chunk_nbytes: int) -> None:
    """Check that tiles follow one another without gaps up to the chunk's end, none too large, none empty."""
    ends = (tiles.tiles["slot_offset"] + tiles.tiles["nbytes"]).tolist()
    assert tiles.tiles["slot_offset"].tolist() == [0, *ends[:-1]]
    assert tiles.ends.tolist() == ends
    assert ends[-1] == chunk_nbytes
    assert 0 < tiles.tiles["nbytes"].min() <= tiles.tiles["nbytes"].max() <= TILE_NBYTES


def spelled_out(starts: Sequence[int], nbytes: int) -> list[int]:
    return [start + byte for start in starts for byte in range(nbytes)]


def test_a_tile_is_what_the_kernels_read():
    """``TILE`` has the fields of the kernels' ``struct Tile``, in order and without holes: 64 bytes."""
    fields = re.findall(r"(\w+) (\w+);", SOURCE.split("struct Tile {")[1].split("};")[0])
    assert [(name, np.dtype(TYPES[kind])) for kind, name in fields] == [(name, TILE[name]) for name in TILE.names]
    assert TILE.itemsize == 64 == sum(TILE[name].itemsize for name in TILE.names)


@given(any_layouts)
def test_joined_rows_are_the_rows(laid: Laid):
    """Spelled out byte by byte, the runs of K and of V are the rows in canonical order; what is no step has no stride.

    The first run is as long as it can be.
    """
    for plane in laid.group.planes:
        nbytes, (num_outer, outer), (num_inner, inner) = plane.joined_rows()
        runs = [first * outer + second * inner for first in range(num_outer) for second in range(num_inner)]
        rows = [start - plane.offset for kv, start in row_starts(plane, 0) if kv == 0]
        assert spelled_out(runs, nbytes) == spelled_out(rows, plane.row_nbytes)
        assert all((stride == 0) == (count == 1) for count, stride in ((num_outer, outer), (num_inner, inner)))
        assert num_inner == 1 or inner > nbytes
        assert len(runs) == 1 or runs[1] != nbytes


@given(st.data())
def test_gathered_tiles_are_the_chunk(data: st.DataObject):
    """Whatever the layout, the blocks and the addresses: what the kernel packs is the chunk, byte for byte."""
    laid, space, blocks, tiles = draw_case(data)
    expected = chunk_bytes(laid.group, blocks, space.memory)
    assert gather(tiles.at(space.bases), space, blocks) == expected
    assert strided_chunk(laid.group.planes, blocks, space.memory) == expected
    check_tiles(tiles, len(expected))


@given(st.data())
def test_scattered_tiles_fill_exactly_their_blocks(data: st.DataObject):
    """A chunk lands on the bytes that the oracle names, skipped blocks left out; nothing else changes."""
    laid, space, blocks, tiles = draw_case(data)
    num_skipped = data.draw(st.integers(0, len(blocks)))
    chunk = stamp(b"chunk", laid.group.block_nbytes * len(blocks))
    space.bytes[:] = GUARD
    expected = space.bytes.copy()
    for (memory, offset, position), value in zip(chunk_places(laid.group, blocks), chunk, strict=True):
        if position >= num_skipped:
            expected[int(space.bases[memory]) + offset] = value
    scatter(tiles.at(space.bases), space, blocks, chunk, num_skipped)
    assert np.array_equal(space.bytes, expected)


@settings(max_examples=40)
@given(st.data())
def test_checksums_of_tiles_add_up(data: st.DataObject):
    """Added up access by access, 16, 4 or 1 bytes at once, a chunk's checksum is the one of its bytes alone."""
    laid, space, blocks, tiles = draw_case(data)
    chunk = stamp(b"sum", laid.group.block_nbytes * len(blocks))
    assert checksum(tiles.at(space.bases), chunk) == vector_checksum(chunk)


@given(st.data())
def test_accesses_are_as_wide_as_they_can_be(data: st.DataObject):
    """An access is the largest of 16, 4 and 1 bytes that divides every offset, stride and size of its tile.

    At an address it is the largest that divides that as well.
    """
    _, space, _, tiles = draw_case(data)
    before = tiles.tiles.copy()
    placed = tiles.at(space.bases)
    for relative, tile, memory in zip(tiles.tiles, placed, tiles.memory, strict=True):
        widths = [width for width in (16, 4, 1) if not any(int(relative[name]) % width for name in ALIGNED)]
        assert relative["access_nbytes"] == widths[0]
        assert tile["base"] == relative["base"] + space.bases[memory]
        assert tile["access_nbytes"] == next(width for width in widths if not int(tile["base"]) % width)
    unchanged = [name for name in TILE.names if name not in ("base", "access_nbytes")]
    assert np.array_equal(placed[unchanged], before[unchanged])
    assert np.array_equal(tiles.tiles, before)


@pytest.mark.parametrize(
    ("base", "widest"),
    [(0, 16), (16, 16), (2**47, 16), (8, 4), (4, 4), (12, 4), (2, 1), (1, 1), (15, 1), (2**47 + 1, 1)],
)
def test_odd_addresses_narrow_the_access(base: int, widest: int):
    """An allocation at an address that is no multiple of 16 is accessed by 4 bytes or by single ones."""
    laid = nhd(Shape(num_layers=2, row_nbytes=32))
    placed = chunk_tiles(laid.group, 2).at(np.array([base, 32], dtype=np.uint64))
    is_first = chunk_tiles(laid.group, 2).memory == 0
    assert set(placed["access_nbytes"][is_first].tolist()) == {widest}
    assert set(placed["access_nbytes"][~is_first].tolist()) == {16}


@pytest.mark.parametrize("row_nbytes", [2601, 2604, 2608, 40_000])
@pytest.mark.parametrize("lay", LAYS, ids=lambda lay: lay.__name__)
def test_large_pages_are_cut(lay, row_nbytes: int):
    """Pages larger than a tile are cut anywhere, also inside a row, and still are the chunk, there and back."""
    laid = lay(Shape(num_layers=2, num_blocks=3, block_tokens=5, num_heads=3, row_nbytes=row_nbytes))
    space = Space(laid.memory_nbytes, [16] + [0] * (len(laid.memory_nbytes) - 1))
    space.bytes[:] = np.frombuffer(stamp(b"large", len(space.bytes)), dtype=np.uint8)
    tiles = chunk_tiles(laid.group, 2)
    expected = strided_chunk(laid.group.planes, [2, 0], space.memory)
    placed = tiles.at(space.bases)
    assert gather(placed, space, [2, 0]) == expected
    check_tiles(tiles, len(expected))
    plane = laid.group.planes[0]
    pages = plane.num_kv * 2 * len(laid.group.planes)
    assert len(placed) == pages * -(-plane.page_nbytes // plane.num_kv // TILE_NBYTES)
    space.bytes[:] = 0
    scatter(placed, space, [1, 2], expected, 0)
    assert strided_chunk(laid.group.planes, [1, 2], space.memory) == expected


LLAMA = Shape(num_layers=32, num_blocks=24, block_tokens=16, num_heads=8, row_nbytes=256)


@pytest.mark.parametrize("lay", SAME_BYTES.values(), ids=lambda lay: lay.__name__)
def test_llama_8b(lay):
    """A chunk of 256 tokens of Llama 8B: 1,024 whole tiles, 16 bytes an access, in any layout the same 32 MiB."""
    laid = lay(LLAMA)
    blocks = [5, 23, *range(6, 18), 0, 1]
    tiles = chunk_tiles(laid.group, 16)
    check_tiles(tiles, 32 * MIB)
    placed = tiles.at(np.arange(len(laid.memory_nbytes), dtype=np.uint64) * np.uint64(2**32) + np.uint64(2**46))
    assert len(placed) == 32 * 2 * 16
    assert set(placed["nbytes"].tolist()) == {32 * KIB}
    assert set(placed["access_nbytes"].tolist()) == {16}
    assert placed["position"].tolist() == [*range(16)] * 64
    space = Space(laid.memory_nbytes, [0] * len(laid.memory_nbytes))
    words = space.bytes.view("<u4")
    words[:] = np.arange(len(words), dtype=np.uint32)
    assert gather(tiles.at(space.bases), space, blocks) == strided_chunk(laid.group.planes, blocks, space.memory)


@pytest.mark.parametrize(("block_tokens", "per_block"), [(16, [18_432]), (64, [32_768, 32_768, 8_192])], ids=str)
def test_latent_rows(block_tokens: int, per_block: list[int]):
    """Latent attention: 61 layers, one row of 1,152 bytes a token; a block is one run, cut where a tile is full."""
    page = block_tokens * 576 * 2
    planes = tuple(
        LayerPlane(layer, 0, 1000, page, 576 * 2, num_tokens=block_tokens, token_stride=576 * 2) for layer in range(61)
    )
    num_blocks = 256 // block_tokens
    tiles = chunk_tiles(LayerGroup(GroupKind.FULL, block_tokens, planes), num_blocks)
    check_tiles(tiles, 61 * 256 * 1152)
    placed = tiles.at(np.arange(61, dtype=np.uint64) * np.uint64(2**30))
    assert placed["nbytes"].tolist() == per_block * num_blocks * 61
    assert placed["start"].tolist() == [0, 32_768, 65_536][: len(per_block)] * num_blocks * 61
    assert set(placed["run_nbytes"].tolist()) == {page}
    assert set(placed["access_nbytes"].tolist()) == {16}


def test_pages_that_only_the_engine_understands():
    """A page of 2 MiB for all layers is 64 tiles, one behind another in the engine's memory."""
    group = LayerGroup(GroupKind.FULL, 16, (LayerPlane(0, 4096, 20_000, 2 * MIB, 2 * MIB),))
    tiles = chunk_tiles(group, 16)
    check_tiles(tiles, 32 * MIB)
    placed = tiles.at(np.array([2**46], dtype=np.uint64))
    assert placed["start"].tolist() == [*range(0, 2 * MIB, 32 * KIB)] * 16
    assert set(placed["base"].tolist()) == {2**46 + 4096}
    assert placed["position"].tolist() == np.repeat(np.arange(16), 64).tolist()
    assert set(placed["access_nbytes"].tolist()) == {16}


def check_slices(tiles: ChunkTiles, num_chunks: int, first_nbytes: int, nbytes_max: int) -> list[Slice]:
    """Check every law of slices; return them."""
    slices = list(cut_into_slices(tiles, num_chunks, first_nbytes=first_nbytes, nbytes_max=nbytes_max))
    num_tiles, chunk_nbytes = len(tiles.ends), int(tiles.ends[-1])
    covered = [
        (part.first_chunk + chunk, part.first_tile + tile)
        for part in slices
        for chunk in range(part.num_chunks)
        for tile in range(part.num_tiles)
    ]
    assert covered == [(chunk, tile) for chunk in range(num_chunks) for tile in range(num_tiles)]
    for number, part in enumerate(slices):
        end_tile = part.first_tile + part.num_tiles
        assert part.start == tiles.tiles["slot_offset"][part.first_tile]
        assert part.start + part.nbytes == tiles.ends[end_tile - 1]
        assert part.is_last == (end_tile == num_tiles)
        assert part.num_chunks == 1 or (part.first_tile, part.num_tiles) == (0, num_tiles)
        assert 0 <= part.padding < VECTOR_NBYTES
        assert (part.start - part.padding) % VECTOR_NBYTES == 0
        assert part.chunk_stride == -(-chunk_nbytes // VECTOR_NBYTES) * VECTOR_NBYTES
        extent = part.padding + part.chunk_stride * (part.num_chunks - 1) + part.nbytes
        assert extent <= min(first_nbytes << number, nbytes_max)
    return slices


@given(
    st.lists(st.integers(1, 100_000), min_size=1, max_size=4), st.integers(1, 4), st.integers(0, 12),
    st.integers(FIRST_MIN, 100_000), st.integers(0, 600_000),
)  # fmt: skip
def test_slices_cover_every_tile_once_and_fit(
    pages_nbytes: list[int], blocks_per_chunk: int, num_chunks: int, first_nbytes: int, more_nbytes: int
):
    """Slices hold every tile of every chunk once, in order, and each fits into what it may take of a buffer.

    The first takes no more than ``first_nbytes``; each that follows at most twice as much, up to a buffer.
    """
    tiles = chunk_tiles(pages(pages_nbytes).group, blocks_per_chunk)
    check_slices(tiles, num_chunks, first_nbytes, first_nbytes + more_nbytes)


@given(st.integers(1, 5_000), st.integers(0, 200), st.integers(FIRST_MIN, 100_000), st.integers(0, 600_000))
def test_small_chunks_share_slices(page_nbytes: int, num_chunks: int, first_nbytes: int, more_nbytes: int):
    """Of chunks smaller than a slice, a slice holds as many as fit."""
    slices = check_slices(
        chunk_tiles(pages([page_nbytes]).group, 1), num_chunks, first_nbytes, first_nbytes + more_nbytes
    )
    for number, part in enumerate(slices[:-1]):
        limit = min(first_nbytes << number, first_nbytes + more_nbytes)
        assert (part.num_chunks + 1) * part.chunk_stride > limit


@given(
    st.lists(st.integers(1, 300_000), min_size=1, max_size=3), st.integers(FIRST_MIN, 100_000), st.integers(0, 10**6)
)
def test_a_chunk_is_cut_evenly(pages_nbytes: list[int], first_nbytes: int, more_nbytes: int):
    """A slice that does not end its chunk holds its even share of what is left, or as much as it may."""
    tiles = chunk_tiles(pages(pages_nbytes).group, 2)
    slices = check_slices(tiles, 3, first_nbytes, first_nbytes + more_nbytes)
    for number, part in enumerate(slices):
        if not part.is_last:
            limit = min(first_nbytes << number, first_nbytes + more_nbytes)
            left = int(tiles.ends[-1]) - part.start
            share = left / -(-left // (first_nbytes + more_nbytes))
            assert part.padding + tiles.ends[part.first_tile + part.num_tiles] - part.start > min(limit, share)


@pytest.mark.parametrize("first_nbytes", [FIRST_MIN - 1, 1 * MIB + 1], ids=["no tile", "no buffer"])
def test_slices_too_small_for_a_tile_are_refused(first_nbytes: int):
    """A first slice that could not hold any tile, wherever it starts, or is larger than the rest, is a mistake."""
    with pytest.raises(AssertionError):
        next(cut_into_slices(chunk_tiles(pages([1]).group, 1), 1, first_nbytes=first_nbytes, nbytes_max=1 * MIB))


def test_slices_of_large_chunks():
    """64 chunks of Llama 8B, 2 GiB: slices of 2, 4, 8 MiB, the rest of the chunk in two, then 16 MiB each."""
    tiles = chunk_tiles(nhd(LLAMA).group, 16)
    slices = check_slices(tiles, 64, 2 * MIB, 16 * MIB)
    assert [part.num_tiles for part in slices[:6]] == [64, 128, 256, 289, 287, 512]
    assert sum(part.nbytes * part.num_chunks for part in slices) == 64 * 32 * MIB
