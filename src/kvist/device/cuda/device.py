"""A Device over one GPU: engines' blocks by kernel, the pool by DMA, checksums on the way.

The laws: nothing of CUDA exists here while no engine's memory is open: the context, its streams and the pinned view of
the pool come with the first allocation and go with the last. What was scattered is checked before it is called right;
unlike on the host, bytes that turn out wrong have been written by then, and their chunk is named.
"""

from __future__ import annotations

import ctypes
import logging
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, cast

import numpy as np

from kvist.device import libc
from kvist.device.base import GoOn, IsShared, never
from kvist.device.cuda.driver import (
    HOST_REGISTER_PORTABLE,
    IPC_HANDLE_NBYTES,
    LEGACY_STREAM,
    Context,
    api,
    call,
    take,
)
from kvist.device.cuda.memory import OpenedMemory
from kvist.device.cuda.pipe import Pipe, PlacedTiles, Turns, as_checksums, which_match
from kvist.device.cuda.tiles import Tiles, chunk_tiles
from kvist.device.kernels import NAMES, compile_kernels
from kvist.device.runs import shortest_run
from kvist.errors import DeviceError, FenceError, LayoutError
from kvist.model.handles import CUDA_IPC, CUDA_VMM, MemoryHandle
from kvist.model.layout import LayerGroup
from kvist.model.transfer import CopyPlan, Direction

logger = logging.getLogger(__name__)

_TableKey = tuple[int, int, tuple[int, ...]]


@dataclass(frozen=True, slots=True)
class PoolFile:
    """The pool, as something that can be mapped."""

    fd: int
    nbytes: int


class CudaDevice:
    """One GPU, by UUID. Gathers may run beside scatters, each on one thread at a time."""

    def __init__(self, device_uuid: str, pool: PoolFile) -> None:
        """Describe the device; nothing is opened yet. ``pool.fd`` stays the caller's and outlives the device."""
        self._uuid = device_uuid
        self._pool = pool
        self._gpu: _Gpu | None = None
        self._is_held = False

    @property
    def kind(self) -> str:
        return f"cuda:{self._uuid}"

    def open_memory(self, handle: MemoryHandle, fds: Sequence[int]) -> int:
        if handle.kind not in (CUDA_IPC, CUDA_VMM) or handle.device != self._uuid:
            raise LayoutError(f"memory of kind {handle.kind!r} on {handle.device!r} is not served by {self.kind}")
        try:
            gpu = self._open_gpu()
            return gpu.opened.open(handle, fds, gpu.context.device)
        except DeviceError as error:
            raise LayoutError(str(error)) from error
        finally:
            self._close_if_unused()

    def close_memory(self, address: int, nbytes: int) -> None:
        """Unmap it; failures are logged."""
        assert self._gpu is not None, nbytes
        with _logged("use"):
            self._gpu.context.use()
        if self._gpu.opened.close(address):  # Other users' copies may be reading the tables.
            self._gpu.forget_tiles(address)
        self._close_if_unused()

    def gather(
        self, plan: CopyPlan, bases: Sequence[int], chunks: range, go_on: GoOn, is_shared: IsShared = never
    ) -> list[bytes]:
        return as_checksums(self._copy(plan, bases, chunks, Turns(go_on, is_shared)))

    def scatter(
        self,
        plan: CopyPlan,
        bases: Sequence[int],
        chunks: range,
        checksums: Sequence[bytes],
        go_on: GoOn,
        is_shared: IsShared = never,
    ) -> list[bool]:
        return which_match(self._copy(plan, bases, chunks, Turns(go_on, is_shared)), checksums)

    def prepare(self, group: LayerGroup, blocks_per_chunk: int, bases: Sequence[int]) -> None:
        assert self._gpu is not None, len(bases)
        try:
            self._gpu.context.use()
            self._gpu.find_tiles(group, blocks_per_chunk, tuple(bases))
        except DeviceError as error:
            raise LayoutError(f"the GPU cannot be prepared for {len(group.planes)} layers: {error}") from error

    def open_fence(self, payload: bytes) -> object:
        if len(payload) != IPC_HANDLE_NBYTES:
            raise FenceError(f"an event handle of {len(payload)} bytes; CUDA's has {IPC_HANDLE_NBYTES}")
        try:
            self._open_gpu()
            raw = api().CUipcEventHandle()
            ctypes.memmove(int(raw.getPtr()), payload, IPC_HANDLE_NBYTES)
            return cast("object", call("cuIpcOpenEventHandle", raw))
        except DeviceError as error:
            self._close_if_unused()
            raise FenceError(f"the engine's event cannot be opened: {error}") from error

    def close_fence(self, fence: object) -> None:
        """Give it up; failures are logged."""
        assert self._gpu is not None
        with _logged("close_fence"):
            self._gpu.context.use()
            call("cuEventDestroy", fence)

    def wait_for(self, direction: Direction, fence: object) -> None:
        assert self._gpu is not None
        self._gpu.context.use()
        call("cuStreamWaitEvent", self._gpu.pipes[direction].kernels, fence, 0)

    def hold(self) -> None:
        """Open the GPU and keep it until ``close``: for memory of this very process, which needs no opening.

        Raises:
            DeviceError: the GPU cannot be used.
        """
        self._open_gpu()
        self._is_held = True

    def close(self) -> None:
        """Close what is open; failures are logged. No copy may be running. Idempotent."""
        self._is_held = False
        gpu, self._gpu = self._gpu, None
        if gpu is not None:
            gpu.close()

    def _copy(self, plan: CopyPlan, bases: Sequence[int], chunks: range, turns: Turns) -> Any:
        assert self._gpu is not None
        self._gpu.context.use()
        placed = self._gpu.find_tiles(plan.group, int(plan.block_ids.shape[1]), tuple(bases))
        # Kernels of another process are never let in beside the engine's; its own are, and do no harm while it idles.
        spares_kernels = not self._is_held or turns.is_shared()
        return self._gpu.pipes[plan.direction].copy(plan, placed, chunks, turns, spares_kernels=spares_kernels)

    def _open_gpu(self) -> _Gpu:
        if self._gpu is None:
            self._gpu = _Gpu(self._uuid, self._pool)
        self._gpu.context.use()
        return self._gpu

    def _close_if_unused(self) -> None:
        if self._gpu is not None and not self._is_held and not len(self._gpu.opened):
            self.close()


class _Gpu:
    """Everything of CUDA: a context, pipes, the pinned pool, opened memory."""

    def __init__(self, device_uuid: str, pool: PoolFile) -> None:
        begin = time.monotonic()
        self.opened = OpenedMemory()
        self._tables: dict[_TableKey, tuple[LayerGroup, Any, PlacedTiles]] = {}
        self._tables_lock = threading.Lock()
        """Both directions look tables up, each on a thread of its own."""
        with ExitStack() as stack:
            self.context = Context(device_uuid)
            stack.callback(self.context.close)
            self.context.use()
            module = take(stack, "cuModuleUnload", "cuModuleLoadData", compile_kernels(self.context.arch()))
            slots_address = _map_pool(pool, stack)
            self.pipes: dict[Direction, Pipe] = {}
            kernels = {name: call("cuModuleGetFunction", module, name.encode()) for name in NAMES}
            for direction in Direction:
                self.pipes[direction] = Pipe(direction, kernels, slots_address)
                stack.callback(self.pipes[direction].close)
            stack.callback(self._free_tables, self._tables)
            self._held = stack.pop_all()
        logger.info("GPU opened device=%s seconds=%.2f", device_uuid, time.monotonic() - begin)

    def find_tiles(self, group: LayerGroup, blocks_per_chunk: int, bases: tuple[int, ...]) -> PlacedTiles:
        """Return a group's tiles on the GPU; uploaded when they are first asked for."""
        key = (id(group), blocks_per_chunk, bases)
        with self._tables_lock:
            if key not in self._tables:
                tiles = chunk_tiles(group, blocks_per_chunk)
                table = _upload(tiles.at(np.array(bases, dtype=np.uint64)))
                placed = PlacedTiles(tiles, int(table), bases, shortest_run(group, blocks_per_chunk))
                self._tables[key] = (group, table, placed)  # Holds the group, so that its id stays its own.
            return self._tables[key][2]

    def forget_tiles(self, base: int) -> None:
        """Drop the tables of an engine one of whose allocations lies at ``base``. Failures are logged."""
        with self._tables_lock:
            self._free_tables([key for key in self._tables if base in key[2]])

    def _free_tables(self, keys: Iterable[_TableKey]) -> None:
        for key in list(keys):
            with _logged("forget_tiles"):
                call("cuMemFree", self._tables.pop(key)[1])

    def close(self) -> None:
        """Give everything back; the context ends with it unless somebody else in this process has it.

        Failures are logged; whatever fails, the rest is done.
        """
        with _logged("close"), self._held:
            self.context.use()


def _map_pool(pool: PoolFile, stack: ExitStack) -> int:
    """Map and pin the pool until ``stack`` ends, and return its address."""
    try:
        address = libc.map_shared(pool.fd, pool.nbytes)
    except OSError as error:
        raise DeviceError(f"the pool cannot be mapped for the GPU: {error}") from error
    stack.callback(libc.unmap, address, pool.nbytes)
    call("cuMemHostRegister", address, pool.nbytes, HOST_REGISTER_PORTABLE)
    stack.callback(call, "cuMemHostUnregister", address)
    return address


def _upload(placed: Tiles) -> Any:
    with ExitStack() as stack:
        table = take(stack, "cuMemFree", "cuMemAlloc", placed.nbytes)
        call("cuMemcpyHtoD", table, placed.ctypes.data, placed.nbytes)
        # From pageable memory, that returns before the bytes have landed, and our streams do not wait for its stream
        # (CUDA driver API, API synchronization behavior).
        call("cuStreamSynchronize", LEGACY_STREAM)
        stack.pop_all()
    return table


@contextmanager
def _logged(action: str) -> Iterator[None]:
    """Log what fails while something is given up: nobody could do anything about it."""
    try:
        yield
    except DeviceError:
        logger.exception("GPU not given back in order action=%s", action)
