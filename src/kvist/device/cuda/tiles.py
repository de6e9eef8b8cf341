"""What the copy kernels do, decided ahead: a chunk as tiles, a copy as slices. Pure arithmetic, in numpy.

The laws: the tiles of a chunk, one behind another, are its canonical bytes, and none is larger than ``TILE_NBYTES``; a
slice is a stretch of one chunk's tiles, or several whole chunks, that fits into a staging buffer.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from kvist.model.layout import Int64s, LayerGroup, LayerPlane
from kvist.units import KIB, align_up, ceil_div

TILE_NBYTES: Final = 32 * KIB
VECTOR_NBYTES: Final = 16
_ACCESSES: Final = (16, 4, 1)
_CHUNKS_OF_SLICE_MAX: Final = 65_535
"""The second dimension of a grid (CUDA C++ Programming Guide, Compute Capabilities)."""

TILE: Final = np.dtype(
    [
        ("base", "<u8"), ("block_stride", "<i8"), ("outer_stride", "<i8"), ("inner_stride", "<i8"),
        ("slot_offset", "<u8"), ("start", "<u4"), ("nbytes", "<u4"), ("run_nbytes", "<u4"), ("num_inner", "<u4"),
        ("position", "<u4"), ("access_nbytes", "<u4"),
    ]
)  # fmt: skip
"""``struct Tile`` of ``kernels/paged_copy.cu``."""

Tiles = npt.NDArray[Any]


@dataclass(frozen=True, slots=True, eq=False)
class ChunkTiles:
    """The tiles of any chunk of one group, addresses not yet added. All arrays have the shape ``[num_tiles]``."""

    tiles: Tiles
    """``TILE``; ``base`` counts from the start of its allocation."""
    memory: Int64s
    """Which registered allocation."""
    ends: Int64s
    """Offset in the chunk of the first byte behind each tile."""

    def at(self, bases: npt.NDArray[np.uint64]) -> Tiles:
        """Return the tiles of an engine whose allocations lie at ``bases``."""
        tiles = self.tiles.copy()
        tiles["base"] += bases[self.memory]
        alignment = np.gcd(tiles["access_nbytes"].astype(np.uint64), tiles["base"])
        tiles["access_nbytes"] = _largest_access(alignment.astype(np.int64))
        return tiles


@lru_cache(maxsize=64)
def chunk_tiles(group: LayerGroup, blocks_per_chunk: int) -> ChunkTiles:
    """Cut a chunk into tiles, in canonical order."""
    parts = []
    slot_offset = 0
    for plane in group.planes:
        parts.append(_plane_tiles(plane, blocks_per_chunk, slot_offset))
        slot_offset += plane.page_nbytes * blocks_per_chunk
    memory = np.repeat(
        np.array([plane.memory for plane in group.planes], dtype=np.int64), [len(part) for part in parts]
    )
    tiles = np.concatenate(parts)
    return ChunkTiles(tiles, memory, (tiles["slot_offset"] + tiles["nbytes"]).astype(np.int64))


def _plane_tiles(plane: LayerPlane, blocks_per_chunk: int, slot_offset: int) -> Tiles:
    run_nbytes, (_, outer_stride), (num_inner, inner_stride) = plane.joined_rows()
    nbytes = plane.page_nbytes // plane.num_kv
    starts = np.arange(0, nbytes, TILE_NBYTES, dtype=np.int64)
    shape = (plane.num_kv, blocks_per_chunk, len(starts))
    kv, position, piece = (index.ravel() for index in np.indices(shape))
    tiles = np.zeros(len(kv), dtype=TILE)
    tiles["base"] = plane.offset + kv * plane.kv_stride
    tiles["block_stride"] = plane.block_stride
    tiles["outer_stride"], tiles["inner_stride"] = outer_stride, inner_stride
    tiles["slot_offset"] = slot_offset + (kv * blocks_per_chunk + position) * nbytes + starts[piece]
    tiles["start"] = starts[piece]
    tiles["nbytes"] = np.minimum(TILE_NBYTES, nbytes - starts)[piece]
    tiles["run_nbytes"], tiles["num_inner"] = run_nbytes, num_inner
    tiles["position"] = position
    columns = ("base", "block_stride", "outer_stride", "inner_stride", "slot_offset", "start", "nbytes", "run_nbytes")
    alignment = np.gcd.reduce([tiles[column].astype(np.int64) for column in columns])
    tiles["access_nbytes"] = _largest_access(alignment)
    return tiles


def _largest_access(alignment: Int64s) -> npt.NDArray[np.uint32]:
    return np.select([alignment % access == 0 for access in _ACCESSES], _ACCESSES).astype(np.uint32)


@dataclass(frozen=True, slots=True)
class Slice:
    """What passes through one staging buffer at once."""

    first_chunk: int
    """Counted from the copy's first."""
    num_chunks: int
    first_tile: int
    num_tiles: int
    """Of each of the chunks."""
    start: int
    """Offset of the first tile from its chunk's start."""
    nbytes: int
    """Of each of the chunks."""
    chunk_stride: int
    """Between the chunks in the staging buffer."""
    is_last: bool
    """The last of its chunks ends here."""

    @property
    def padding(self) -> int:
        """Where the first tile lies in the buffer: at the same place inside a vector as in its chunk."""
        return self.start % VECTOR_NBYTES


@lru_cache(maxsize=256)
def cut_into_slices(tiles: ChunkTiles, num_chunks: int, *, first_nbytes: int, nbytes_max: int) -> Sequence[Slice]:
    """Cut a copy of whole chunks; slices grow from ``first_nbytes`` twofold, so that a pipeline fills quickly."""
    return tuple(_cut(tiles, num_chunks, first_nbytes, nbytes_max))


def _cut(tiles: ChunkTiles, num_chunks: int, first_nbytes: int, nbytes_max: int) -> Iterator[Slice]:
    assert TILE_NBYTES + VECTOR_NBYTES <= first_nbytes <= nbytes_max
    chunk_nbytes = int(tiles.ends[-1])
    chunk_stride = align_up(chunk_nbytes, VECTOR_NBYTES)
    chunk, nbytes = 0, first_nbytes
    while chunk < num_chunks:
        if chunk_stride <= nbytes:
            num = min(nbytes // chunk_stride, num_chunks - chunk, _CHUNKS_OF_SLICE_MAX)
            yield Slice(chunk, num, 0, len(tiles.ends), 0, chunk_nbytes, chunk_stride, is_last=True)
            nbytes = min(2 * nbytes, nbytes_max)
            chunk += num
            continue
        tile = 0
        while tile < len(tiles.ends):
            start = int(tiles.ends[tile - 1]) if tile else 0
            left = chunk_nbytes - start
            # What is left is cut evenly: a short rest would cost the link as much as a long slice.
            room = min(nbytes, ceil_div(left, ceil_div(left, nbytes_max)) + TILE_NBYTES)
            end_tile = int(np.searchsorted(tiles.ends, start - start % VECTOR_NBYTES + room, side="right"))
            end = int(tiles.ends[end_tile - 1])
            is_last = end_tile == len(tiles.ends)
            yield Slice(chunk, 1, tile, end_tile - tile, start, end - start, chunk_stride, is_last=is_last)
            nbytes = min(2 * nbytes, nbytes_max)
            tile = end_tile
        chunk += 1
