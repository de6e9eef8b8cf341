"""A Device over shared host memory: CPU engines, and every test that has no GPU.

The laws: a chunk's checksum is taken over its slot, after its bytes were gathered and before any of them is
scattered, so *no byte that is not verified is written into an engine's block*. Memory is mapped only if its owner can
no longer take it away (a sealed memfd), so that no peer can kill the daemon with SIGBUS.
"""

from __future__ import annotations

import ctypes
import fcntl
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Final, TypeVar

import numpy as np
import xxhash

from kvist.device import libc
from kvist.device.runs import Runs, expand
from kvist.errors import LayoutError
from kvist.model.handles import DEVICE_KIND_HOST, MemoryHandle
from kvist.model.transfer import CopyPlan
from kvist.units import KIB

_SEALS_NEEDED: Final = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW
_PIECE_NBYTES: Final = 256 * KIB
"""Bytes copied or hashed at once: half of a usual L2 cache, and enough for xxhash to let go of the interpreter lock."""

_Result = TypeVar("_Result")


class HostDevice:
    """Copies with ``memmove`` between shared memory and the pool, on a few threads."""

    def __init__(self, pool: memoryview, pool_address: int, *, num_threads: int) -> None:
        """Serve the pool that is mapped at ``pool_address`` and seen through ``pool``; both outlive the device."""
        assert num_threads > 0
        self._pool = pool
        self._pool_address = pool_address
        self._num_threads = num_threads
        self._threads = ThreadPoolExecutor(num_threads, thread_name_prefix="kvist-copy") if num_threads > 1 else None

    @property
    def kind(self) -> str:
        return DEVICE_KIND_HOST

    def open_memory(self, handle: MemoryHandle, fd: int) -> int:
        if handle.kind != DEVICE_KIND_HOST:
            raise LayoutError(f"memory of kind {handle.kind!r} is not served; known kinds: [{DEVICE_KIND_HOST!r}]")
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

    def gather(self, plan: CopyPlan, bases: Sequence[int], chunks: range) -> list[int]:
        runs = expand(plan, np.asarray(bases, dtype=np.uint64))
        return self._map(lambda chunk: self._gather_chunk(plan, runs, chunk), chunks)

    def scatter(self, plan: CopyPlan, bases: Sequence[int], chunks: range, checksums: Sequence[int]) -> list[bool]:
        runs = expand(plan, np.asarray(bases, dtype=np.uint64))
        expected = dict(zip(chunks, checksums, strict=True))
        return self._map(lambda chunk: self._scatter_chunk(plan, runs, chunk, expected[chunk]), chunks)

    def close(self) -> None:
        """Join the copy threads."""
        if self._threads is not None:
            self._threads.shutdown()

    def _map(self, copy: Callable[[int], _Result], chunks: range) -> list[_Result]:
        if self._threads is None or len(chunks) < 2:
            return [copy(chunk) for chunk in chunks]
        return list(self._threads.map(copy, chunks))

    def _gather_chunk(self, plan: CopyPlan, runs: Runs, chunk: int) -> int:
        slot = int(plan.slot_offsets[chunk])
        hasher = xxhash.xxh3_64()
        hashed = 0
        sources = runs.device_addresses[chunk].tolist()
        for source, offset, nbytes in zip(sources, runs.slot_offsets.tolist(), runs.run_nbytes.tolist(), strict=True):
            for start in range(0, nbytes, _PIECE_NBYTES):
                piece = min(_PIECE_NBYTES, nbytes - start)
                ctypes.memmove(self._pool_address + slot + offset + start, source + start, piece)
                done = offset + start + piece
                if done - hashed >= _PIECE_NBYTES // 2:
                    hasher.update(self._pool[slot + hashed : slot + done])
                    hashed = done
        hasher.update(self._pool[slot + hashed : slot + plan.chunk_nbytes])
        return hasher.intdigest()

    def _scatter_chunk(self, plan: CopyPlan, runs: Runs, chunk: int, checksum: int) -> bool:
        slot = int(plan.slot_offsets[chunk])
        if xxhash.xxh3_64_intdigest(self._pool[slot : slot + plan.chunk_nbytes]) != checksum:
            return False
        is_kept = ~runs.is_skipped if chunk == 0 else slice(None)
        targets = runs.device_addresses[chunk][is_kept].tolist()
        offsets = runs.slot_offsets[is_kept].tolist()
        for target, offset, nbytes in zip(targets, offsets, runs.run_nbytes[is_kept].tolist(), strict=True):
            ctypes.memmove(target, self._pool_address + slot + offset, nbytes)
        return True
