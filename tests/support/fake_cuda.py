# ruff: noqa: N802 -- functions are named as in ``cuda.bindings.driver``
"""``cuda.bindings.driver`` over host memory, for machines without a GPU: as strict as CUDA, and slower where it may be.

The laws: a call needs a context that is current on its thread; what is used exists, and is destroyed once; what a copy
or a kernel touches is allocated, opened or registered. A stream's work is done when somebody waits for it, or at a
moment of chance's choosing, so that bytes are wrong where a wait is missing. Any call can be made to fail.
"""

from __future__ import annotations

import itertools
import os
import threading
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest

from kvist.device.cuda import device, driver, export, memory
from tests.support import fake_names
from tests.support.fake_calls import Context, entry, find
from tests.support.fake_kernels import Bytes
from tests.support.fake_memory import ON_DEVICE, SEGMENT_NBYTES, Kind, Physical, Range, release, reserve
from tests.support.fake_names import CUipcEventHandle, CUipcMemHandle, CUresult, Failed, Handle, check
from tests.support.fake_streams import Event, Record, Scheduler
from tests.support.fake_work import Work

GPU = "c7bd7de2-1b3f-4c46-9d1e-6a2f5f0e9a11"
_FILE_DESCRIPTOR = fake_names.CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR


@dataclass(slots=True, eq=False)
class _Segment:
    """One process's handle of physical memory."""

    physical: Physical
    num_uses: int = 1


class Machine:
    """GPUs, and the processes that use them."""

    def __init__(self, *, uuids: tuple[str, ...] = (GPU,), seed: int = 0, liveliness: float = 0.3) -> None:
        """With a ``liveliness`` of 0, no work is done before somebody waits for it."""
        self.uuids = uuids
        self.lock = threading.RLock()
        self.scheduler = Scheduler(seed, liveliness)
        self.numbers = itertools.count(0x1000)
        self.exported: dict[bytes, tuple[Process, Physical | Event]] = {}
        self.physicals: dict[tuple[int, int], Physical] = {}
        self.daemon = Process(self)
        """The process that runs by itself."""
        self._running = threading.local()

    @contextmanager
    def installed(self) -> Iterator[Machine]:
        """Let the product call this machine's driver."""
        with pytest.MonkeyPatch.context() as patch:
            for module in (driver, memory, export, device):
                patch.setattr(module, "api", lambda: getattr(self._running, "process", self.daemon))
            patch.setattr(device, "compile_kernels", lambda arch: b"fake cubin for " + arch.encode())
            yield self

    @contextmanager
    def running(self, process: Process) -> Iterator[Process]:
        """Let the calling thread be one of another process for a while."""
        before = getattr(self._running, "process", self.daemon)
        self._running.process = process
        try:
            yield process
        finally:
            self._running.process = before


class Process(Work):
    """The driver as one process sees it."""

    CUpointer_attribute = fake_names.CUpointer_attribute
    CUdevice_attribute = fake_names.CUdevice_attribute
    CUmemAllocationHandleType = fake_names.CUmemAllocationHandleType
    CUmemAllocationType = fake_names.CUmemAllocationType
    CUmemLocationType = fake_names.CUmemLocationType
    CUmemAccess_flags = fake_names.CUmemAccess_flags
    CUmemAllocationProp = fake_names.CUmemAllocationProp
    CUmemAccessDesc = fake_names.CUmemAccessDesc
    CUipcMemHandle = CUipcMemHandle
    CUipcEventHandle = CUipcEventHandle

    def __init__(self, machine: Machine) -> None:
        super().__init__(machine.lock, machine.scheduler)
        self.machine = machine
        self.lost: list[str] = []
        """What was there when its context ended."""
        self._segments: dict[int, _Segment] = {}

    def left(self) -> list[str]:
        """Return what exists in this process, in words."""
        return [
            *(f"context of GPU {ordinal}" for ordinal in self.contexts),
            *(text for context in self.contexts.values() for text in context.parts()),
            *map(str, self.space.ranges.values()),
            *(f"{nbytes} bytes reserved" for nbytes in self.space.reservations.values()),
            *(f"segment of {segment.physical.nbytes} bytes" for segment in self._segments.values()),
        ]

    def bytes_at(self, address: int, nbytes: int) -> Bytes:
        """Return memory as kernels see it."""
        return self.space.bytes_at(address, nbytes)

    def new_number(self) -> int:
        return next(self.machine.numbers)

    # Devices and contexts

    def cuGetErrorString(self, code: CUresult) -> tuple[Any, ...]:
        return CUresult.CUDA_SUCCESS, code.name.removeprefix("CUDA_ERROR_").replace("_", " ").lower().encode()

    @entry(num_results=1, needs_context=False)
    def cuDeviceGetCount(self) -> int:
        return len(self.machine.uuids)

    @entry(num_results=1, needs_context=False)
    def cuDeviceGet(self, ordinal: int) -> Handle:
        check(0 <= ordinal < len(self.machine.uuids), CUresult.CUDA_ERROR_INVALID_DEVICE)
        return Handle(ordinal)

    @entry(num_results=1, needs_context=False)
    def cuDeviceGetUuid(self, dev: Handle) -> Any:
        return SimpleNamespace(bytes=uuid.UUID(self.machine.uuids[int(dev)]).bytes)

    @entry(num_results=1, needs_context=False)
    def cuDeviceGetAttribute(self, attribute: fake_names.CUdevice_attribute, dev: Handle) -> int:
        assert int(dev) < len(self.machine.uuids)
        majors = fake_names.CUdevice_attribute.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR
        return 9 if attribute is majors else 0

    @entry(num_results=1, needs_context=False)
    def cuDevicePrimaryCtxRetain(self, dev: Handle) -> Handle:
        if int(dev) not in self.contexts:
            self.contexts[int(dev)] = Context(int(dev), self.new_stream())
        context = self.contexts[int(dev)]
        context.num_users += 1
        return Handle(int(dev))

    @entry(needs_context=False)
    def cuDevicePrimaryCtxRelease(self, dev: Handle) -> None:
        context = find(self.contexts, dev, CUresult.CUDA_ERROR_INVALID_CONTEXT)
        context.num_users -= 1
        if context.num_users:
            return
        del self.contexts[int(dev)]
        context.is_destroyed = True
        self.lost += context.parts()
        for found in [found for found in self.space.ranges.values() if found.owner is context]:
            self.lost.append(str(found))
            self.space.unmap(found.address, found.kind)
        for stream in context.all_streams:
            self.machine.scheduler.streams.remove(stream)
            for work in stream.queue:
                if isinstance(work, Record):
                    work.is_done = True

    @entry(needs_context=False)
    def cuCtxSetCurrent(self, ctx: Handle) -> None:
        self.current.context = find(self.contexts, ctx, CUresult.CUDA_ERROR_INVALID_CONTEXT)

    @entry(num_results=2)
    def cuCtxGetStreamPriorityRange(self) -> tuple[int, int]:
        return 0, -5

    # Memory

    @entry(num_results=1)
    def cuMemAlloc(self, nbytes: int) -> Handle:
        check(nbytes > 0)
        return Handle(self.space.map(Physical(nbytes), Kind.DEVICE, self.context).address)

    @entry(num_results=1)
    def cuMemAllocManaged(self, nbytes: int, flags: int) -> Handle:
        check(nbytes > 0 and flags == 1)
        return Handle(self.space.map(Physical(nbytes), Kind.MANAGED, self.context).address)

    @entry()
    def cuMemFree(self, dptr: Handle | int) -> None:
        self.space.unmap(int(dptr), Kind.DEVICE, Kind.MANAGED)

    @entry(num_results=1)
    def cuMemHostAlloc(self, nbytes: int, flags: int) -> int:
        check(nbytes > 0 and flags in (0, 1))
        return self.space.map(Physical(nbytes), Kind.PINNED, self.context).address

    @entry()
    def cuMemFreeHost(self, address: int) -> None:
        self.space.unmap(address, Kind.PINNED)

    @entry()
    def cuMemHostRegister(self, address: int, nbytes: int, flags: int) -> None:
        check(nbytes > 0 and flags in (0, 1))
        self.space.register(address, nbytes, self.context)

    @entry()
    def cuMemHostUnregister(self, address: int) -> None:
        is_registered = address in self.space.ranges
        check(is_registered, CUresult.CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED)
        self.space.unmap(address, Kind.REGISTERED)

    @entry(num_results=2)
    def cuMemGetAddressRange(self, dptr: Handle | int) -> tuple[Handle, int]:
        found = self._find_on_device(dptr)
        return Handle(found.address), found.nbytes

    @entry(num_results=1)
    def cuPointerGetAttribute(self, attribute: fake_names.CUpointer_attribute, ptr: Handle | int) -> Any:
        found = self.space.find(int(ptr))
        if attribute is fake_names.CUpointer_attribute.CU_POINTER_ATTRIBUTE_IS_MANAGED:
            return found.kind is Kind.MANAGED
        return self.context.ordinal

    def _find_on_device(self, dptr: Handle | int) -> Range:
        found = self.space.find(int(dptr))
        check(found.kind in ON_DEVICE)
        return found

    # Memory between processes

    @entry(num_results=1)
    def cuIpcGetMemHandle(self, dptr: Handle | int) -> CUipcMemHandle:
        found = self._find_on_device(dptr)
        check(found.kind is Kind.DEVICE)
        # A handle names its allocation: the same one each time.
        for raw, (process, what) in self.machine.exported.items():
            if process is self and what is found.physical:
                return CUipcMemHandle.of(raw)
        assert found.physical is not None
        return CUipcMemHandle.of(self._export(found.physical))

    @entry(num_results=1)
    def cuIpcOpenMemHandle(self, handle: CUipcMemHandle, flags: int) -> Handle:
        check(flags == driver.LAZY_PEER_ACCESS)
        physical = self._import(handle.raw, Physical)
        check(physical.is_alive)
        is_open = any(found.token == handle.raw for found in self.space.ranges.values())
        check(not is_open, CUresult.CUDA_ERROR_ALREADY_MAPPED)
        return Handle(self.space.map(physical, Kind.OPENED, self.context, handle.raw).address)

    @entry()
    def cuIpcCloseMemHandle(self, dptr: Handle | int) -> None:
        self.space.unmap(int(dptr), Kind.OPENED)

    @entry(num_results=1)
    def cuIpcGetEventHandle(self, event: Handle) -> CUipcEventHandle:
        found = find(self.context.events, event)
        check(found.flags == driver.EVENT_DISABLE_TIMING | driver.EVENT_INTERPROCESS)
        return CUipcEventHandle.of(self._export(found))

    @entry(num_results=1)
    def cuIpcOpenEventHandle(self, handle: CUipcEventHandle) -> Handle:
        number = self.new_number()
        self.context.events[number] = self._import(handle.raw, Event)
        return Handle(number)

    def _export(self, what: Physical | Event) -> bytes:
        raw = self.new_number().to_bytes(8, "little") + os.urandom(56)
        self.machine.exported[raw] = (self, what)
        return raw

    def _import(self, raw: bytes, kind: type) -> Any:
        process, what = self.machine.exported.get(raw, (self, None))
        check(process is not self and isinstance(what, kind))
        return what

    # Virtual memory

    @entry(num_results=1)
    def cuMemAddressReserve(self, nbytes: int, alignment: int, address: int, flags: int) -> Handle:
        check(nbytes > 0 and nbytes % SEGMENT_NBYTES == 0 and (alignment, address, flags) == (0, 0, 0))
        found = reserve(nbytes + SEGMENT_NBYTES)
        self.space.reservations[found] = nbytes
        return Handle(found)

    @entry()
    def cuMemAddressFree(self, ptr: Handle | int, nbytes: int) -> None:
        address = int(ptr)
        check(self.space.reservations.get(address) == nbytes)
        check(not list(self.space.mapped_inside(address, nbytes)))
        del self.space.reservations[address]
        release(address, nbytes + SEGMENT_NBYTES)

    @entry(num_results=1)
    def cuMemCreate(self, nbytes: int, prop: fake_names.CUmemAllocationProp, flags: int) -> Handle:
        check(nbytes > 0 and nbytes % SEGMENT_NBYTES == 0 and flags == 0)
        check(prop.type is fake_names.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED)
        check(prop.location.type is fake_names.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE)
        is_exportable = prop.requestedHandleTypes is _FILE_DESCRIPTOR
        physical = Physical(nbytes, is_exportable=is_exportable)
        self.machine.physicals[physical.identity] = physical
        return self._take_segment(physical)

    @entry()
    def cuMemRelease(self, handle: Handle) -> None:
        segment = find(self._segments, handle, CUresult.CUDA_ERROR_INVALID_VALUE)
        segment.num_uses -= 1
        if not segment.num_uses:
            del self._segments[int(handle)]
            segment.physical.let_go()

    @entry()
    def cuMemMap(self, ptr: Handle | int, nbytes: int, offset: int, handle: Handle, flags: int) -> None:
        address = int(ptr)
        segment = find(self._segments, handle, CUresult.CUDA_ERROR_INVALID_VALUE)
        check(offset == 0 and flags == 0 and nbytes % SEGMENT_NBYTES == 0 and 0 < nbytes <= segment.physical.nbytes)
        is_inside = any(a <= address and address + nbytes <= a + n for a, n in self.space.reservations.items())
        check(is_inside and not list(self.space.mapped_inside(address, nbytes)))
        found = Range(address, nbytes, Kind.VIRTUAL, self, segment.physical, is_accessible=False)
        self.space.map_at(address, segment.physical, found)

    @entry()
    def cuMemUnmap(self, ptr: Handle | int, nbytes: int) -> None:
        found = self.space.ranges.get(int(ptr))
        check(found is not None and found.nbytes == nbytes)
        self.space.unmap(int(ptr), Kind.VIRTUAL)

    @entry()
    def cuMemSetAccess(self, ptr: Handle | int, nbytes: int, desc: list[Any], count: int) -> None:
        address = int(ptr)
        check(count == len(desc) == 1 and desc[0].location.id == self.context.ordinal)
        check(desc[0].location.type is fake_names.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE)
        check(desc[0].flags is fake_names.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE)
        segments = list(self.space.mapped_inside(address, nbytes))
        check(sum(segment.nbytes for segment in segments) == nbytes)
        for segment in segments:
            segment.is_accessible = True

    @entry(num_results=1)
    def cuMemRetainAllocationHandle(self, address: Handle | int) -> Handle:
        found = self.space.find(int(address))
        check(found.kind is Kind.VIRTUAL and found.physical is not None)
        for number, segment in self._segments.items():
            if segment.physical is found.physical:
                segment.num_uses += 1
                return Handle(number)
        return self._take_segment(found.physical)

    @entry(num_results=1)
    def cuMemExportToShareableHandle(self, handle: Handle, kind: object, flags: int) -> int:
        physical = find(self._segments, handle, CUresult.CUDA_ERROR_INVALID_VALUE).physical
        check(physical.is_exportable and kind is _FILE_DESCRIPTOR and flags == 0)
        return os.dup(physical.fd)

    @entry(num_results=1)
    def cuMemImportFromShareableHandle(self, fd: int, kind: object) -> Handle:
        check(kind is _FILE_DESCRIPTOR)
        try:
            status = os.fstat(fd)
        except OSError:
            raise Failed(CUresult.CUDA_ERROR_INVALID_VALUE) from None
        physical = self.machine.physicals.get((status.st_dev, status.st_ino))
        check(physical is not None and physical.is_alive)
        return self._take_segment(physical)

    def _take_segment(self, physical: Physical) -> Handle:
        number = self.new_number()
        physical.hold()
        self._segments[number] = _Segment(physical)
        return Handle(number)
