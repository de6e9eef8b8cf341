"""An engine with memory on a fake GPU, in a process of its own, and a daemon's device beside it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest

from kvist.device.cuda import driver, pipe
from kvist.device.cuda.device import CudaDevice, PoolFile
from kvist.device.cuda.export import Exported, export_memory
from kvist.model.handles import MemoryHandle
from kvist.units import KIB
from tests.contract.test_device import POOL_NBYTES
from tests.support.fake_cuda import GPU, Machine, Process
from tests.support.layouts import Bytes
from tests.support.memory import SharedMemory


@contextmanager
def small_buffers() -> Iterator[None]:
    """Let a pipe's buffers be so small that a chunk of a megabyte takes all of them, several times."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pipe, "SLICE_NBYTES_MAX", 64 * KIB)
        patch.setattr(pipe, "SHARED_NBYTES_MAX", 48 * KIB)
        patch.setattr(pipe, "_FIRST_NBYTES", 40 * KIB)
        yield


@dataclass
class EngineMemory:
    """One allocation, exported."""

    engine: FakeEngine
    exported: Exported
    bytes: Bytes = field(init=False)

    def __post_init__(self) -> None:
        self.bytes = self.engine.process.bytes_at(self.exported.base, self.exported.handle.nbytes)

    @property
    def handle(self) -> MemoryHandle:
        return self.exported.handle

    @property
    def fds(self) -> Sequence[int]:
        return self.exported.fds

    def close(self) -> None:
        del self.bytes
        self.engine.call("cuMemFree", self.exported.base)


class FakeEngine:
    """A process whose context is current on the thread that made it."""

    def __init__(self, machine: Machine, ordinal: int = 0, *, process: Process | None = None) -> None:
        self.machine = machine
        self.process = process or Process(machine)
        self._context = self.call("cuDevicePrimaryCtxRetain", self.call("cuDeviceGet", ordinal))
        self.call("cuCtxSetCurrent", self._context)
        self._ordinal = ordinal

    def call(self, name: str, *arguments: Any) -> Any:
        """Call the driver in this process."""
        with self.machine.running(self.process):
            return driver.call(name, *arguments)

    def allocate(self, nbytes: int) -> int:
        return int(self.call("cuMemAlloc", nbytes))

    def allocate_virtual(self, segments: Sequence[int], *, is_exportable: bool = True) -> int:
        """Map physical segments behind one another, and keep no handle of them."""
        names = self.process
        prop = names.CUmemAllocationProp()
        prop.type = names.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
        prop.location.type = names.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
        prop.location.id = self._ordinal
        if is_exportable:
            prop.requestedHandleTypes = names.CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR
        address = at = int(self.call("cuMemAddressReserve", sum(segments), 0, 0, 0))
        for nbytes in segments:
            handle = self.call("cuMemCreate", nbytes, prop, 0)
            self.call("cuMemMap", at, nbytes, 0, handle, 0)
            self.call("cuMemRelease", handle)
            at += nbytes
        access = names.CUmemAccessDesc()
        access.location = prop.location
        access.flags = names.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
        self.call("cuMemSetAccess", address, sum(segments), [access], 1)
        return address

    def export(self, *spans: tuple[int, int]) -> tuple[list[Exported], list[tuple[int, int]]]:
        """Call ``export_memory`` in this process."""
        with self.machine.running(self.process):
            return export_memory(spans)

    def export_all(self, address: int, nbytes: int) -> EngineMemory:
        """Export one allocation."""
        exported, _ = self.export((address, nbytes))
        return EngineMemory(self, exported[0])

    def new_stream(self) -> Any:
        return self.call("cuStreamCreateWithPriority", driver.STREAM_NON_BLOCKING, 0)

    def end(self) -> None:
        """Let go of the context, and with it of all that is in it."""
        self.call("cuDevicePrimaryCtxRelease", self._ordinal)


class FakeRig:
    """A ``CudaDevice`` on a fake machine, over a pool of its own."""

    writes_only_what_is_right = False

    def __init__(self, machine: Machine) -> None:
        self.machine = machine
        self.memory = SharedMemory(POOL_NBYTES, name="kvist-rig")
        self.pool = self.memory.bytes
        self.device = CudaDevice(GPU, PoolFile(self.memory.fd, POOL_NBYTES))
        self.engine = FakeEngine(machine)

    def allocate(self, nbytes: int) -> EngineMemory:
        return self.engine.export_all(self.engine.allocate(nbytes), nbytes)

    def close(self) -> None:
        self.device.close()
        self.engine.end()
        del self.pool
        self.memory.close()


@contextmanager
def fake_rig(**options: Any) -> Iterator[FakeRig]:
    """Run the product on a fake machine; nothing may be left of it."""
    with Machine(**options).installed() as machine, small_buffers():
        rig = FakeRig(machine)
        yield rig
        rig.close()
        assert machine.daemon.left() == machine.daemon.lost == []
