"""The copy kernels on a fake GPU: ``tests.support.tiles`` at addresses, every one of them checked."""

from __future__ import annotations

import ctypes

import numpy as np
import numpy.typing as npt

from kvist.device.cuda.pipe import _SliceArguments
from kvist.device.cuda.tiles import TILE
from tests.support.fake_memory import ON_DEVICE, AddressSpace
from tests.support.fake_names import CUresult, check
from tests.support.tiles import SOURCE_MULTIPLIERS, SOURCE_WEIGHTS, access_addresses

Bytes = npt.NDArray[np.uint8]

_MULTIPLIERS = np.array(SOURCE_MULTIPLIERS, dtype=np.uint64)


def read_arguments(kernel_parameters: int) -> _SliceArguments:
    """Return a copy of the one argument that the kernels take."""
    (pointer,) = (ctypes.c_void_p * 1).from_address(kernel_parameters)
    return _SliceArguments.from_buffer_copy(ctypes.string_at(pointer, ctypes.sizeof(_SliceArguments)))


def run(name: str, space: AddressSpace, part: _SliceArguments, num_tiles: int, num_chunks: int) -> None:
    """Do what a launch of ``gather``, ``scatter`` or ``check`` does.

    Raises:
        Failed: it touches what it may not.
    """
    tiles = space.bytes_at(part.tiles, num_tiles * TILE.itemsize, ON_DEVICE).view(TILE).copy()
    end_chunk = part.first_chunk + num_chunks
    ids = space.bytes_at(part.block_ids, 4 * end_chunk * part.blocks_per_chunk, ON_DEVICE).view("<i4")
    sums = space.bytes_at(part.checksums, 8 * end_chunk, ON_DEVICE).view("<u8")
    for number in range(num_chunks):
        chunk = part.first_chunk + number
        for tile in tiles:
            offset = number * part.chunk_stride + int(tile["slot_offset"]) - part.start
            block = int(ids[chunk * part.blocks_per_chunk + int(tile["position"])])
            accesses, places = _engine_accesses(space, tile, block)
            if name == "check":
                sums[chunk : chunk + 1] += tile_checksum(tile, accesses[places].view(np.uint8))
                continue
            packed = space.bytes_at(part.staging + offset, int(tile["nbytes"]), ON_DEVICE)
            check((part.staging + offset) % accesses.itemsize == 0, CUresult.CUDA_ERROR_MISALIGNED_ADDRESS)
            if name == "gather":
                packed[:] = accesses[places].view(np.uint8)
            elif chunk > 0 or tile["position"] >= part.num_skipped_blocks:
                accesses[places] = packed.view(accesses.dtype)
            sums[chunk : chunk + 1] += tile_checksum(tile, packed)


def tile_checksum(tile: np.void, packed: Bytes) -> np.uint64:
    """Return the sum of ``checksum_of`` over a tile's accesses."""
    nbytes = int(tile["access_nbytes"])
    words = (packed if nbytes == 1 else packed.view("<u4")).astype(np.uint64)
    step = 1 if nbytes == 1 else 4
    offsets = np.uint64(tile["slot_offset"]) + np.arange(len(words), dtype=np.uint64) * np.uint64(step)
    if step == 1:
        words <<= np.uint64(8) * (offsets & np.uint64(3))
    with np.errstate(over="ignore"):
        products = words * _MULTIPLIERS[((offsets >> np.uint64(2)) & np.uint64(3)).astype(np.int64)]
        return np.uint64((products * _weights(offsets >> np.uint64(4))).sum(dtype=np.uint64))


def _weights(index: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    mixed = (index + np.uint64(1)) * np.uint64(SOURCE_WEIGHTS[0])
    mixed ^= mixed >> np.uint64(32)
    mixed *= np.uint64(SOURCE_WEIGHTS[1])
    mixed ^= mixed >> np.uint64(32)
    return mixed | np.uint64(1)


def _engine_accesses(
    space: AddressSpace, tile: np.void, block: int
) -> tuple[npt.NDArray[np.void], npt.NDArray[np.int64]]:
    """Return the engine's memory around a tile as accesses, and which of them are the tile's, in order."""
    nbytes = int(tile["access_nbytes"])
    addresses = access_addresses(tile, block)
    check(not (addresses % nbytes).any(), CUresult.CUDA_ERROR_MISALIGNED_ADDRESS)
    first = int(addresses.min())
    span = space.bytes_at(first, int(addresses.max()) + nbytes - first)
    return span.view(f"V{nbytes}"), (addresses - first) // nbytes
