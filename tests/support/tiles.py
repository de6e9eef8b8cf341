"""The copy kernels in numpy, access by access as ``paged_copy.cu`` does them, and addresses to let them loose on.

Constants come from the kernels' own text. The checksum is in plain integers, so that nothing here shares arithmetic
with the product's.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

import numpy as np
import numpy.typing as npt

from kvist.device.cuda.tiles import Tiles
from kvist.device.kernels import SOURCE
from kvist.model.layout import LayerPlane
from tests.support.layouts import Bytes, Laid

MASK = 2**64 - 1


def source_constants(before: str, after: str) -> list[int]:
    """Return the 64-bit constants that lie between two pieces of the kernels' text."""
    text = SOURCE.split(before, 1)[1].split(after, 1)[0]
    return [int(constant, 16) for constant in re.findall(r"0x([0-9A-F]{16})ull", text)]


SOURCE_MULTIPLIERS = source_constants("MULTIPLIERS[4] =", ";")
SOURCE_WEIGHTS = source_constants("u64 weight(", "return")


def slow_weight(index: int) -> int:
    """Return the factor of a vector, as the kernels work it out."""
    mixed = (index + 1) * SOURCE_WEIGHTS[0] & MASK
    mixed ^= mixed >> 32
    mixed = mixed * SOURCE_WEIGHTS[1] & MASK
    mixed ^= mixed >> 32
    return mixed | 1


def access_checksum(value: bytes, offset: int) -> int:
    """Return ``checksum_of`` for an access of 16, 4 or 1 bytes that lies ``offset`` behind its chunk's start."""
    words = [int.from_bytes(value[start : start + 4], "little") for start in range(0, len(value), 4)]
    if len(value) == 1:
        words[0] <<= 8 * (offset & 3)
    first = (offset >> 2) & 3
    return sum(word * SOURCE_MULTIPLIERS[first + k] for k, word in enumerate(words)) * slow_weight(offset >> 4) & MASK


class Space:
    """One range of addresses with allocations in it, each behind a gap."""

    def __init__(self, memory_nbytes: Sequence[int], gaps: Sequence[int]) -> None:
        bases = []
        end = 0
        for nbytes, gap in zip(memory_nbytes, gaps, strict=True):
            bases.append(end + gap)
            end += gap + nbytes
        self.bases = np.array(bases, dtype=np.uint64)
        self.bytes: Bytes = np.zeros(-(-end // 16) * 16, dtype=np.uint8)
        self.memory = [self.bytes[base : base + nbytes] for base, nbytes in zip(bases, memory_nbytes, strict=True)]


def access_addresses(tile: np.void, block: int) -> npt.NDArray[np.int64]:
    """Return where one tile's accesses go, as ``move`` works it out."""
    name = {name: int(tile[name]) for name in tile.dtype.names}
    nbytes = name["access_nbytes"]
    count, start, run = (name[field] // nbytes for field in ("nbytes", "start", "run_nbytes"))
    places = np.arange(start, start + count, dtype=np.int64)
    at = places * nbytes
    if start + count > run:
        number = places // run
        outer, inner = number // name["num_inner"], number % name["num_inner"]
        at = outer * name["outer_stride"] + inner * name["inner_stride"] + places % run * nbytes
    return name["base"] + block * name["block_stride"] + at


def gather(tiles: Tiles, space: Space, blocks: Sequence[int]) -> bytes:
    """Return a chunk, as the ``gather`` kernel packs it."""
    chunk = np.zeros(int(tiles[-1]["slot_offset"]) + int(tiles[-1]["nbytes"]), dtype=np.uint8)
    for tile, packed in _packed(tiles, chunk):
        packed[:] = _accesses(space, tile)[_numbers(tile, blocks)].view(np.uint8)
    return chunk.tobytes()


def scatter(tiles: Tiles, space: Space, blocks: Sequence[int], chunk: bytes, num_skipped: int) -> None:
    """Put a chunk into blocks, as the ``scatter`` kernel does with a copy's first chunk."""
    for tile, packed in _packed(tiles, np.frombuffer(chunk, dtype=np.uint8)):
        if tile["position"] >= num_skipped:
            accesses = _accesses(space, tile)
            accesses[_numbers(tile, blocks)] = packed.view(accesses.dtype)


def checksum(tiles: Tiles, chunk: bytes) -> int:
    """Return a chunk's checksum, as all kernels add it up: tile by tile, access by access."""
    offsets = [
        (offset, int(tile["access_nbytes"]))
        for tile in tiles
        for offset in range(
            int(tile["slot_offset"]), int(tile["slot_offset"]) + int(tile["nbytes"]), int(tile["access_nbytes"])
        )
    ]
    return sum(access_checksum(chunk[offset : offset + nbytes], offset) for offset, nbytes in offsets) & MASK


def strided_chunk(planes: Sequence[LayerPlane], blocks: Sequence[int], memory: Sequence[Bytes]) -> bytes:
    """Return a chunk's canonical bytes by numpy's strides: for chunks too large for the byte-by-byte oracle."""
    parts = []
    for plane in planes:
        shape = (plane.num_blocks, plane.num_kv, plane.num_tokens, plane.num_heads, plane.row_nbytes)
        strides = (plane.block_stride, plane.kv_stride, plane.token_stride, plane.head_stride, 1)
        rows = np.ndarray(shape, np.uint8, memory[plane.memory], plane.offset, strides)
        parts.append(rows[list(blocks)].swapaxes(0, 1).tobytes())
    return b"".join(parts)


def scaled(laid: Laid, factor: int) -> Laid:
    """Return a layout all of whose addresses and sizes are ``factor`` times as large."""
    fields = ("offset", "block_stride", "row_nbytes", "kv_stride", "token_stride", "head_stride")
    planes = tuple(
        LayerPlane(**{
            field: getattr(plane, field) * (factor if field in fields else 1) for field in LayerPlane.__match_args__
        })
        for plane in laid.group.planes
    )  # fmt: skip
    group = type(laid.group)(laid.group.kind, laid.group.block_tokens, planes)
    return Laid(group, tuple(factor * nbytes for nbytes in laid.memory_nbytes))


def _packed(tiles: Tiles, chunk: Bytes) -> Iterator[tuple[np.void, Bytes]]:
    for tile in tiles:
        start = int(tile["slot_offset"])
        yield tile, chunk[start : start + int(tile["nbytes"])]


def _accesses(space: Space, tile: np.void) -> npt.NDArray[np.void]:
    return space.bytes.view(f"V{tile['access_nbytes']}")


def _numbers(tile: np.void, blocks: Sequence[int]) -> npt.NDArray[np.int64]:
    addresses = access_addresses(tile, blocks[tile["position"]])
    numbers, rest = np.divmod(addresses, int(tile["access_nbytes"]))
    assert not rest.any()
    return numbers
