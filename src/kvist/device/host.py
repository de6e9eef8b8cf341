"""A Device over shared host memory: CPU engines, and every test that has no GPU.

The laws: a slot is checksummed piece by piece, each right after it was gathered and right before it is scattered, while
it is in the cache; so checking costs a fraction of copying, and *no byte that is not verified is written into an
engine's block*. Memory is mapped only if its owner can no longer take it away (a sealed memfd), so that no peer can
kill the daemon with SIGBUS.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from functools import lru_cache
from itertools import takewhile
from typing import Final, NamedTuple, TypeVar

import numpy as np
from xxhash import xxh3_64_digest

from kvist.device import libc
from kvist.device.base import GoOn
from kvist.device.libc import copy_memory
from kvist.device.runs import chunk_pattern
from kvist.errors import LayoutError
from kvist.model.handles import HOST, MemoryHandle
from kvist.model.layout import LayerGroup
from kvist.model.transfer import CopyPlan, Direction
from kvist.units import KIB

_SEALS_NEEDED: Final = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW
_PIECE_NBYTES: Final = 192 * KIB
"""Source and target fit into a usual L2 cache together; large enough for xxhash to let go of the interpreter lock."""
_DIGEST_NBYTES: Final = 8

_Result = TypeVar("_Result")


class HostDevice:
    """Copies with ``memmove`` between shared memory and the pool, on a few threads."""

    def __init__(self, pool: memoryview, pool_address: int, *, num_threads: int) -> None:
        """Serve the pool that is mapped at ``pool_address`` and seen through ``pool``; both outlive the device."""
        assert num_threads > 0
        self._pool = pool
        self._pool_address = pool_address
        self._num_helpers = num_threads - 1
        self._threads = (
            ThreadPoolExecutor(self._num_helpers, thread_name_prefix="kvist-copy") if num_threads > 1 else None
        )

    @property
    def kind(self) -> str:
        return HOST

    def open_memory(self, handle: MemoryHandle, fds: Sequence[int]) -> int:
        if handle.kind != HOST:
            raise LayoutError(f"memory of kind {handle.kind!r} is not served; this device serves {HOST!r}")
        (fd,) = fds
        try:
            seals = fcntl.fcntl(fd, fcntl.F_GET_SEALS)
            file_nbytes = os.fstat(fd).st_size
        except OSError as error:
            raise LayoutError(f"KV memory must be a sealed memfd: {error}") from error
        if seals & _SEALS_NEEDED != _SEALS_NEEDED:
            raise LayoutError(f"KV memory must be sealed against shrinking and growing; its seals are {seals:#x}")
        if file_nbytes < handle.nbytes:
            raise LayoutError(f"KV memory is declared with {handle.nbytes} bytes and has {file_nbytes}")
        try:
            return libc.map_shared(fd, handle.nbytes)
        except OSError as error:
            raise LayoutError(f"KV memory cannot be mapped: {error}") from error

    def close_memory(self, address: int, nbytes: int) -> None:
        libc.unmap(address, nbytes)

    def prepare(self, group: LayerGroup, blocks_per_chunk: int, bases: Sequence[int]) -> None:
        chunk_pattern(group, blocks_per_chunk)
        cut_into_pieces(group, blocks_per_chunk)

    def open_fence(self, payload: bytes) -> object:
        raise LayoutError(f"host memory has no events, and one of {len(payload)} bytes was registered")

    def close_fence(self, fence: object) -> None:
        raise LayoutError(f"host memory has no events to close: {fence!r}")

    def wait_for(self, direction: Direction, fence: object) -> None:
        raise LayoutError(f"host memory has no events to wait for: {direction.value}, {fence!r}")

    def gather(self, plan: CopyPlan, bases: Sequence[int], chunks: range, go_on: GoOn) -> list[bytes]:
        pieces, addresses = _spell_out(plan, bases, chunks)
        slots = plan.slot_offsets[chunks.start : chunks.stop].tolist()
        return self._map(lambda index: self._gather_chunk(slots[index], pieces, addresses[index]), len(chunks), go_on)

    def scatter(
        self, plan: CopyPlan, bases: Sequence[int], chunks: range, checksums: Sequence[bytes], go_on: GoOn
    ) -> list[bool]:
        pieces, addresses = _spell_out(plan, bases, chunks)
        slots = plan.slot_offsets[chunks.start : chunks.stop].tolist()

        def copy(index: int) -> bool:
            num_skipped_blocks = plan.num_skipped_blocks if chunks[index] == 0 else 0
            return self._scatter_chunk(slots[index], pieces, addresses[index], checksums[index], num_skipped_blocks)

        return self._map(copy, len(chunks), go_on)

    def close(self) -> None:
        """Join the copy threads."""
        if self._threads is not None:
            self._threads.shutdown()

    def _map(self, copy: Callable[[int], _Result], num_chunks: int, go_on: GoOn) -> list[_Result]:
        """Copy chunks on this thread and the others, each taking the next one when it is done with one."""
        results: dict[int, _Result] = {}
        numbers = iter(range(num_chunks))  # Taking from it is one step under the interpreter lock.

        def work() -> None:
            for index in takewhile(lambda _: go_on(), numbers):
                results[index] = copy(index)

        helpers = [self._threads.submit(work) for _ in range(self._num_helpers)] if self._threads else []
        try:
            work()
        finally:
            wait(helpers)  # No byte may move after this call, whatever failed.
        for helper in helpers:
            helper.result()
        return [results[index] for index in takewhile(results.__contains__, range(num_chunks))]

    def _gather_chunk(self, slot: int, pieces: Sequence[Piece], addresses: Sequence[int]) -> bytes:
        slot_address = self._pool_address + slot
        checksum = []
        for piece in pieces:
            for part in piece.parts:
                copy_memory(slot_address + part.slot_offset, addresses[part.run] + part.start, part.nbytes)
            checksum.append(xxh3_64_digest(self._pool[slot + piece.slot_offset : slot + piece.slot_end]))
        return b"".join(checksum)

    def _scatter_chunk(
        self, slot: int, pieces: Sequence[Piece], addresses: Sequence[int], checksum: bytes, num_skipped_blocks: int
    ) -> bool:
        slot_address = self._pool_address + slot
        for number, piece in enumerate(pieces):
            found = xxh3_64_digest(self._pool[slot + piece.slot_offset : slot + piece.slot_end])
            if found != checksum[number * _DIGEST_NBYTES : (number + 1) * _DIGEST_NBYTES]:
                return False
            for part in piece.parts:
                if part.position >= num_skipped_blocks:
                    copy_memory(addresses[part.run] + part.start, slot_address + part.slot_offset, part.nbytes)
        return True


class Part(NamedTuple):
    """Some bytes of one run."""

    run: int
    position: int
    """Which of the chunk's blocks it lies in."""
    start: int
    """Offset from the run's start."""
    slot_offset: int
    nbytes: int


class Piece(NamedTuple):
    """What is copied and checksummed at once: neighbours in a slot."""

    slot_offset: int
    slot_end: int
    parts: list[Part]


@lru_cache(maxsize=256)
def cut_into_pieces(group: LayerGroup, blocks_per_chunk: int) -> list[Piece]:
    """Cut a slot every ``_PIECE_NBYTES``, wherever its runs end: all layouts of the same bytes are checked alike."""
    pattern = chunk_pattern(group, blocks_per_chunk)
    chunk_nbytes = group.block_nbytes * blocks_per_chunk
    starts = range(0, chunk_nbytes, _PIECE_NBYTES)
    pieces = [Piece(start, min(start + _PIECE_NBYTES, chunk_nbytes), []) for start in starts]
    columns = (pattern.position, pattern.slot_offsets, pattern.run_nbytes)
    for run, (position, offset, nbytes) in enumerate(zip(*(column.tolist() for column in columns), strict=True)):
        at = offset
        while at < offset + nbytes:
            piece = pieces[at // _PIECE_NBYTES]
            end = min(offset + nbytes, piece.slot_end)
            piece.parts.append(Part(run, position, at - offset, at, end - at))
            at = end
    return pieces


def _spell_out(plan: CopyPlan, bases: Sequence[int], chunks: range) -> tuple[list[Piece], list[list[int]]]:
    """Return the pieces of any chunk, and the address of each run of each of ``chunks``."""
    block_ids = plan.block_ids[chunks.start : chunks.stop]
    pattern = chunk_pattern(plan.group, plan.block_ids.shape[1])
    addresses = pattern.addresses(block_ids, np.asarray(bases, dtype=np.uint64))
    return cut_into_pieces(plan.group, plan.block_ids.shape[1]), addresses.tolist()
