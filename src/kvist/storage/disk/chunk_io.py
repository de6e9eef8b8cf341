"""One chunk to its slot and back, past the page cache.

The law: what a read hands out is a chunk that was written whole, under this key and with these lengths; anything else
that the slot holds is None.
"""

from __future__ import annotations

import ctypes
import mmap

import numpy as np
from xxhash import xxh3_64_intdigest

from kvist.storage.base import StoredChunk
from kvist.storage.disk.files import Files, read_all, write_all
from kvist.storage.disk.format import PAGE_NBYTES, encode_chunk_header, parse_chunk_header
from kvist.units import align_up


class Scratch:
    """Aligned memory of one thread, for what cannot be read or written where it belongs."""

    def __init__(self) -> None:
        self._view = _aligned(2 * PAGE_NBYTES)

    def take(self, nbytes: int) -> memoryview:
        """Return aligned memory, valid until the next call."""
        if len(self._view) < nbytes:
            self._view = _aligned(nbytes)
        return self._view[:nbytes]


def write_chunk(files: Files, fd: int, offset: int, chunk: StoredChunk, source: memoryview, scratch: Scratch) -> None:
    """Write a chunk into the slot at ``offset``: one write, unless the disk takes less.

    Raises:
        OSError: the slot may hold anything.
    """
    source = source[: chunk.nbytes]
    header = encode_chunk_header(chunk, xxh3_64_intdigest(source))
    num_direct = chunk.nbytes // PAGE_NBYTES * PAGE_NBYTES if _is_aligned(source) else 0
    rest_nbytes = align_up(chunk.nbytes - num_direct, PAGE_NBYTES)
    memory = scratch.take(len(header) + rest_nbytes)
    memory[: len(header)] = header
    rest = memory[len(header) :]
    num_rest = chunk.nbytes - num_direct
    rest[:num_rest] = source[num_direct:]
    rest[num_rest:] = bytes(rest_nbytes - num_rest)
    buffers = [memory[: len(header)], source[:num_direct], rest]
    write_all(files, fd, [buffer for buffer in buffers if len(buffer)], offset)


def read_chunk(
    files: Files, fd: int, offset: int, header_nbytes: int, target: memoryview, scratch: Scratch
) -> StoredChunk | None:
    """Read the chunk in the slot at ``offset``, whose payload fills ``target``; None if it is not right.

    The caller compares what is returned with what it expects.

    Raises:
        OSError: the disk fails.
    """
    nbytes = len(target)
    num_direct = nbytes // PAGE_NBYTES * PAGE_NBYTES if _is_aligned(target) else 0
    memory = scratch.take(header_nbytes + align_up(nbytes - num_direct, PAGE_NBYTES))
    rest = memory[header_nbytes:]
    buffers = [memory[:header_nbytes], target[:num_direct], rest]
    if not read_all(files, fd, [buffer for buffer in buffers if len(buffer)], offset):
        return None
    header = parse_chunk_header(memory[:header_nbytes])
    if header is None or header.header_nbytes != header_nbytes or header.chunk.nbytes != nbytes:
        return None
    target[num_direct:] = rest[: nbytes - num_direct]
    return header.chunk if xxh3_64_intdigest(target) == header.payload_sum else None


def _aligned(nbytes: int) -> memoryview:
    return memoryview(mmap.mmap(-1, align_up(nbytes, PAGE_NBYTES)))


def _is_aligned(view: memoryview) -> bool:
    if view.readonly:
        address: int = np.frombuffer(view, dtype=np.uint8).__array_interface__["data"][0]
    else:
        address = ctypes.addressof(ctypes.c_char.from_buffer(view))
    return address % PAGE_NBYTES == 0
