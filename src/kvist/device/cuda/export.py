"""GPU memory as handles that another process can open. Runs in the engine, takes pointers and sizes, needs no torch.

The law: what is exported is the allocation under a pointer, once, from its base; where a tensor lies in it is an
offset. Memory that was not made to be exported is refused with the option that changes that.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import uuid
from collections.abc import Sequence
from dataclasses import dataclass

from kvist.device.cuda.driver import IPC_HANDLE_NBYTES, api, call, take
from kvist.errors import DeviceError, LayoutError
from kvist.model.handles import CUDA_IPC, CUDA_VMM, MemoryHandle


@dataclass(frozen=True, slots=True)
class Exported:
    """One allocation, ready to be sent. The descriptors are the caller's, who closes them when they are sent."""

    base: int
    """Address in this process."""
    handle: MemoryHandle
    fds: tuple[int, ...] = ()

    def close(self) -> None:
        """Close the descriptors."""
        for fd in self.fds:
            os.close(fd)


def device_of(address: int) -> str:
    """Return the UUID of the GPU whose memory lies at ``address``.

    Raises:
        DeviceError: it is no device memory of this process.
    """
    attribute = api().CUpointer_attribute.CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL
    ordinal = call("cuPointerGetAttribute", attribute, address)
    device = call("cuDeviceGet", int(ordinal))
    return str(uuid.UUID(bytes=bytes(call("cuDeviceGetUuid", device).bytes)))


def export_memory(spans: Sequence[tuple[int, int]]) -> tuple[list[Exported], list[tuple[int, int]]]:
    """Export what lies under ``(address, nbytes)`` spans, each allocation once.

    Returns the allocations, and for each span the number of its allocation and its offset in it. Needs a current
    context, as a thread that has made such memory has.

    Raises:
        LayoutError: memory that cannot be exported: managed, or not made exportable; says what to change.
        DeviceError: CUDA fails.
    """
    exported: list[Exported] = []
    places = []
    try:
        for address, nbytes in spans:
            number = next((n for n, one in enumerate(exported) if _holds(one, address, nbytes)), None)
            if number is None:
                number = len(exported)
                exported.append(_export(address, nbytes))
            places.append((number, address - exported[number].base))
    except (LayoutError, DeviceError):
        for one in exported:
            one.close()
        raise
    return exported, places


def _holds(one: Exported, address: int, nbytes: int) -> bool:
    return one.base <= address and address + nbytes <= one.base + one.handle.nbytes


def _export(address: int, nbytes: int) -> Exported:
    attributes = api().CUpointer_attribute
    with contextlib.suppress(DeviceError):
        if call("cuPointerGetAttribute", attributes.CU_POINTER_ATTRIBUTE_IS_MANAGED, address):
            raise LayoutError(f"managed memory at {address:#x} cannot be exported; allocate KV memory with cudaMalloc")
    device = device_of(address)
    base, size = (int(value) for value in call("cuMemGetAddressRange", address))
    try:
        handle = call("cuIpcGetMemHandle", base)
    except DeviceError as error:
        return _export_virtual((address, nbytes), base, device, error)
    if address + nbytes > base + size:
        raise LayoutError(f"{nbytes} bytes at {address:#x} leave their allocation of {size} at {base:#x}")
    raw = ctypes.string_at(int(handle.getPtr()), IPC_HANDLE_NBYTES)
    return Exported(base, MemoryHandle(CUDA_IPC, size, device=device, payload=raw))


def _export_virtual(span: tuple[int, int], base: int, device: str, refusal: DeviceError) -> Exported:
    """Export every physical segment under a span of virtual memory, whose reserved range others may share."""
    address, nbytes = span
    driver = api()
    kind = driver.CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR
    fds: list[int] = []
    sizes: list[int] = []
    at = base
    try:
        while at < address + nbytes:
            start, size = (int(value) for value in call("cuMemGetAddressRange", at))
            with contextlib.ExitStack() as stack:
                segment = take(stack, "cuMemRelease", "cuMemRetainAllocationHandle", start)
                fds.append(int(call("cuMemExportToShareableHandle", segment, kind, 0)))
            sizes.append(size)
            at = start + size
    except DeviceError as error:
        for fd in fds:
            os.close(fd)
        raise LayoutError(
            f"KV memory at {address:#x} cannot be shared with another process ({refusal}; {error}). "
            f"Its allocator does not make memory exportable, as that of vLLM's sleep mode: start without "
            f"--enable-sleep-mode"
        ) from error
    return Exported(base, MemoryHandle(CUDA_VMM, sum(sizes), device=device, part_nbytes=tuple(sizes)), tuple(fds))
