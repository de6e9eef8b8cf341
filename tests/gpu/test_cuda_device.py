"""``CudaDevice`` keeps the contract of every device, and its kernels compute what numpy computes."""

import ctypes
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvist.device.checksum import vector_checksum
from kvist.device.cuda import driver, pipe
from kvist.device.cuda.device import CudaDevice, PoolFile
from kvist.model.handles import CUDA_IPC, MemoryHandle
from kvist.model.transfer import Direction
from kvist.units import MIB
from tests.contract.test_device import POOL_NBYTES, Case, DeviceContract, drawn_case, opened
from tests.support.layouts import Shape, hnd, kv_apart, nhd, opaque
from tests.support.memory import GUARD, SharedMemory
from tests.support.simulated import always


class OwnMemoryDevice(CudaDevice):
    """A device for memory of this very process: CUDA does not open a process's own handles."""

    def open_memory(self, handle: MemoryHandle, fds: Sequence[int]) -> int:
        if handle.kind != CUDA_IPC:
            return super().open_memory(handle, fds)
        return int.from_bytes(handle.payload[:8], "little")

    def close_memory(self, address: int, nbytes: int) -> None:
        assert self._gpu is not None
        self._gpu.context.use()
        self._gpu.forget_tiles(address)


class ComputingDevice(OwnMemoryDevice):
    """The same, while the engine computes: the copy engine moves what it can by itself."""

    def gather(self, *arguments: Any) -> list[bytes]:
        return super().gather(*arguments, always)

    def scatter(self, *arguments: Any) -> list[bool]:
        return super().scatter(*arguments, always)


class MappedMemory:
    """Pinned memory that kernels and tests reach at the same address."""

    fds = ()

    def __init__(self, gpu: str, nbytes: int) -> None:
        self._address = int(driver.call("cuMemHostAlloc", nbytes, 1))
        self.bytes = np.ctypeslib.as_array((ctypes.c_uint8 * nbytes).from_address(self._address))
        payload = self._address.to_bytes(8, "little") + bytes(56)
        self.handle = MemoryHandle(CUDA_IPC, nbytes, device=gpu, payload=payload)

    def close(self) -> None:
        driver.call("cuMemFreeHost", self._address)


class CudaRig:
    """A ``CudaDevice`` over a pool of its own."""

    writes_only_what_is_right = False

    def __init__(self, gpu: str, make_device: type[OwnMemoryDevice] = OwnMemoryDevice) -> None:
        self._gpu = gpu
        self._memory = SharedMemory(POOL_NBYTES, name="kvist-rig")
        self.pool = self._memory.bytes
        self.device = make_device(gpu, PoolFile(self._memory.fd, POOL_NBYTES))
        self.device.hold()

    def allocate(self, nbytes: int) -> MappedMemory:
        return MappedMemory(self._gpu, nbytes)


class TestCudaDevice(DeviceContract):
    @pytest.fixture(scope="class")
    @classmethod
    def rig(cls, gpu: str) -> Iterator[CudaRig]:
        rig = CudaRig(gpu)
        yield rig
        rig.device.close()

    @settings(max_examples=50)
    @given(st.data())
    def test_its_checksums_are_those_of_numpy(self, rig: CudaRig, data: st.DataObject):
        """The kernels' checksum of a chunk is ``vector_checksum`` of its canonical bytes."""
        with drawn_case(rig, data) as case:
            case.engine.stamp(b"twin")
            plan = case.plan(Direction.GATHER)
            sums = rig.device.gather(plan, case.engine.bases, range(len(case.chunks)), always)
            wanted = [vector_checksum(case.engine.chunk(blocks)) for blocks in case.chunks]
            assert sums == [value.to_bytes(8, "little") for value in wanted]

    @pytest.mark.parametrize("lay", [nhd, hnd, kv_apart, opaque], ids=lambda lay: lay.__name__)
    @pytest.mark.parametrize("row_nbytes", [256, 132, 3 * 1024, 71])
    def test_chunks_larger_than_a_staging_buffer(self, gpu: str, lay, row_nbytes: int):
        """A copy of many slices, each in part of a chunk, brings every byte there and back, and sums it rightly."""
        shape = Shape(num_layers=4, num_blocks=40, block_tokens=16, num_heads=8, row_nbytes=row_nbytes)
        laid = lay(shape)
        chunks = [list(range(20)), list(range(39, 19, -1))]
        chunk_nbytes = laid.group.block_nbytes * 20
        with SharedMemory(2 * chunk_nbytes + 8192, name="kvist-large") as memory:
            device = OwnMemoryDevice(gpu, PoolFile(memory.fd, memory.nbytes))
            device.hold()
            rig = CudaRig.__new__(CudaRig)
            rig._gpu, rig.pool, rig.device = gpu, memory.bytes, device
            slots = [0, -(-chunk_nbytes // 4096) * 4096]
            with opened(rig, laid) as engine:
                engine.stamp(b"slices")
                before = [array.copy() for array in engine.arrays]
                case = Case(engine, chunks, slots)
                sums = device.gather(case.plan(Direction.GATHER), engine.bases, range(2), always)
                found = [vector_checksum(memory.bytes[slot : slot + chunk_nbytes]) for slot in slots]
                assert sums == [value.to_bytes(8, "little") for value in found]
                engine.fill(GUARD)
                assert device.scatter(case.plan(Direction.SCATTER), engine.bases, range(2), sums, always) == [True] * 2
                assert all(map(np.array_equal, engine.arrays, before))
                memory.bytes[slots[1] + chunk_nbytes - 1] ^= 1
                found = device.scatter(case.plan(Direction.SCATTER), engine.bases, range(2), sums, always)
                assert found == [True, False]
            device.close()

    def test_both_directions_at_once(self, rig: CudaRig):
        """Gathers on one thread and scatters on another do not disturb each other."""
        laid = nhd(Shape(num_layers=4, num_blocks=64, block_tokens=16, num_heads=4, row_nbytes=64))
        with opened(rig, laid) as writer, opened(rig, laid) as reader, ThreadPoolExecutor(2) as threads:
            writer.stamp(b"writer")
            nbytes = laid.group.block_nbytes * 4
            out = Case(writer, [[0, 1, 2, 3], [9, 8, 7, 6]], [0, 1 * MIB])
            back = Case(reader, [[4, 5, 6, 7], [8, 9, 10, 11]], [2 * MIB, 3 * MIB])
            sums = rig.device.gather(out.plan(Direction.GATHER), writer.bases, range(2), always)
            for slot, source in zip(back.slots, out.slots, strict=True):
                rig.pool[slot : slot + nbytes] = rig.pool[source : source + nbytes]
            for _ in range(50):
                gathered = threads.submit(rig.device.gather, out.plan(Direction.GATHER), writer.bases, range(2), always)
                scattered = threads.submit(
                    rig.device.scatter, back.plan(Direction.SCATTER), reader.bases, range(2), sums, always
                )
                assert gathered.result(30) == sums
                assert scattered.result(30) == [True, True]
            assert [reader.chunk(blocks) for blocks in back.chunks] == [writer.chunk(blocks) for blocks in out.chunks]


class TestDirectCopies(DeviceContract):
    """The same, where the copy engine moves every run by itself."""

    @pytest.fixture(scope="class")
    @classmethod
    def rig(cls, gpu: str) -> Iterator[CudaRig]:
        rig = CudaRig(gpu, ComputingDevice)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(pipe, "DIRECT_NBYTES_MIN", 1)
            yield rig
        rig.device.close()
