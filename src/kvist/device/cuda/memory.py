"""Another process's GPU memory, opened: each allocation once, counted, and closed with its last user.

The law: what is open is closed exactly once, after the caller has seen its last copy land; a handle that does not name
memory of the size that it claims leaves nothing mapped.
"""

from __future__ import annotations

import ctypes
import logging
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from kvist.device.cuda.driver import IPC_HANDLE_NBYTES, LAZY_PEER_ACCESS, api, call
from kvist.errors import DeviceError, LayoutError
from kvist.model.handles import CUDA_IPC, MemoryHandle

logger = logging.getLogger(__name__)


@dataclass(slots=True, eq=False)
class _Opened:
    address: int
    handle: MemoryHandle
    num_users: int = 1
    segments: list[Any] = field(default_factory=list)
    """Handles of physical memory, ``cuda_vmm`` only."""


class OpenedMemory:
    """What one context has open. All calls need that context to be current."""

    def __init__(self) -> None:
        self._opened: dict[int, _Opened] = {}

    def __len__(self) -> int:
        """Return how many allocations are open."""
        return len(self._opened)

    def open(self, handle: MemoryHandle, fds: Sequence[int], device: Any) -> int:
        """Map an allocation and return its address; the caller keeps and closes ``fds``.

        Raises:
            LayoutError: it cannot be opened, or is smaller than it claims. Nothing stays mapped.
        """
        if handle.kind == CUDA_IPC:
            for opened in self._opened.values():
                # CUDA opens a handle once in a context. Descriptors have no such identity, and can be mapped again.
                if opened.handle == handle:
                    opened.num_users += 1
                    return opened.address
        try:
            opened = _open_ipc(handle) if handle.kind == CUDA_IPC else _map_segments(handle, fds, device)
        except DeviceError as error:
            raise LayoutError(f"GPU memory of {handle.nbytes} bytes cannot be opened: {error}") from error
        self._opened[opened.address] = opened
        return opened.address

    def close(self, address: int) -> None:
        """Give one use of an allocation up; the last one unmaps it. Failures are logged."""
        opened = self._opened[address]
        opened.num_users -= 1
        if opened.num_users:
            return
        del self._opened[address]
        try:
            if opened.handle.kind == CUDA_IPC:
                call("cuIpcCloseMemHandle", address)
            else:
                _unmap_segments(opened)
        except DeviceError:
            logger.exception("GPU memory not unmapped nbytes=%d", opened.handle.nbytes)


def _open_ipc(handle: MemoryHandle) -> _Opened:
    raw = api().CUipcMemHandle()
    ctypes.memmove(int(raw.getPtr()), handle.payload, IPC_HANDLE_NBYTES)
    address = int(call("cuIpcOpenMemHandle", raw, LAZY_PEER_ACCESS))
    try:
        _, size = call("cuMemGetAddressRange", address)
        if int(size) < handle.nbytes:
            raise LayoutError(f"GPU memory is declared with {handle.nbytes} bytes and has {int(size)}")
    except (DeviceError, LayoutError):
        call("cuIpcCloseMemHandle", address)
        raise
    return _Opened(address, handle)


def _map_segments(handle: MemoryHandle, fds: Sequence[int], device: Any) -> _Opened:
    driver = api()
    kind = driver.CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR
    opened = _Opened(int(call("cuMemAddressReserve", handle.nbytes, 0, 0, 0)), handle)
    mapped = 0
    try:
        for fd, nbytes in zip(fds, handle.part_nbytes, strict=True):
            segment = call("cuMemImportFromShareableHandle", fd, kind)
            opened.segments.append(segment)
            call("cuMemMap", opened.address + mapped, nbytes, 0, segment, 0)
            mapped += nbytes
        access = driver.CUmemAccessDesc()
        access.location.type = driver.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
        access.location.id = int(device)
        access.flags = driver.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
        call("cuMemSetAccess", opened.address, handle.nbytes, [access], 1)
    except DeviceError:
        _unmap_segments(opened, mapped)
        raise
    return opened


def _unmap_segments(opened: _Opened, nbytes: int | None = None) -> None:
    mapped = opened.handle.nbytes if nbytes is None else nbytes
    at = opened.address
    for size in opened.handle.part_nbytes:
        if at < opened.address + mapped:
            call("cuMemUnmap", at, size)
        at += size
    for segment in opened.segments:
        call("cuMemRelease", segment)
    call("cuMemAddressFree", opened.address, opened.handle.nbytes)
