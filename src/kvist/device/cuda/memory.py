"""Another process's GPU memory, opened: each allocation once, counted, and closed with its last user.

The law: what is open is closed exactly once, after the caller has seen its last copy land; a handle that does not name
memory of the size that it claims leaves nothing mapped.
"""

from __future__ import annotations

import ctypes
import logging
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

from kvist.device.cuda.driver import IPC_HANDLE_NBYTES, LAZY_PEER_ACCESS, api, call, take
from kvist.errors import DeviceError, LayoutError
from kvist.model.handles import CUDA_IPC, MemoryHandle

logger = logging.getLogger(__name__)


@dataclass(slots=True, eq=False)
class _Opened:
    address: int
    handle: MemoryHandle
    held: ExitStack
    """Unmaps it; whatever of that fails, the rest is done."""
    num_users: int = 1


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

    def close(self, address: int) -> bool:
        """Give one use of an allocation up; return whether it was the last, which unmaps it. Failures are logged."""
        opened = self._opened[address]
        opened.num_users -= 1
        if opened.num_users:
            return False
        del self._opened[address]
        try:
            opened.held.close()
        except DeviceError:
            logger.exception("GPU memory not unmapped nbytes=%d", opened.handle.nbytes)
        return True


def _open_ipc(handle: MemoryHandle) -> _Opened:
    raw = api().CUipcMemHandle()
    ctypes.memmove(int(raw.getPtr()), handle.payload, IPC_HANDLE_NBYTES)
    with ExitStack() as stack:
        address = int(take(stack, "cuIpcCloseMemHandle", "cuIpcOpenMemHandle", raw, LAZY_PEER_ACCESS))
        _, size = call("cuMemGetAddressRange", address)
        if int(size) < handle.nbytes:
            raise LayoutError(f"GPU memory is declared with {handle.nbytes} bytes and has {int(size)}")
        return _Opened(address, handle, stack.pop_all())


def _map_segments(handle: MemoryHandle, fds: Sequence[int], device: Any) -> _Opened:
    driver = api()
    kind = driver.CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR
    with ExitStack() as stack:
        address = at = int(call("cuMemAddressReserve", handle.nbytes, 0, 0, 0))
        stack.callback(call, "cuMemAddressFree", address, handle.nbytes)
        for fd, nbytes in zip(fds, handle.part_nbytes, strict=True):
            segment = take(stack, "cuMemRelease", "cuMemImportFromShareableHandle", fd, kind)
            call("cuMemMap", at, nbytes, 0, segment, 0)
            stack.callback(call, "cuMemUnmap", at, nbytes)
            at += nbytes
        access = driver.CUmemAccessDesc()
        access.location.type = driver.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
        access.location.id = int(device)
        access.flags = driver.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
        call("cuMemSetAccess", address, handle.nbytes, [access], 1)
        return _Opened(address, handle, stack.pop_all())
