"""Memory of one process, exported, is the same memory in another: every kind of allocation, from every place in it."""

import os
from base64 import b64decode
from collections.abc import Iterator

import numpy as np
import pytest

from kvist.device.cuda.device import CudaDevice, PoolFile
from kvist.device.dlpack import CUDA, MemoryTensor
from kvist.errors import LayoutError
from kvist.model.handles import CUDA_IPC, CUDA_VMM, MemoryHandle
from kvist.model.layout import GroupKind, LayerGroup, LayerPlane
from kvist.model.transfer import CopyPlan, Direction
from kvist.units import KIB, MIB
from tests.support.gpu_worker import GpuWorker
from tests.support.memory import SharedMemory, num_fds, stamp
from tests.support.simulated import always
from tests.support.waiting import wait_until

POOL_NBYTES = 64 * MIB
PAGE_NBYTES = 64 * KIB
SEGMENT_NBYTES = 2 * MIB


@pytest.fixture
def worker() -> Iterator[GpuWorker]:
    worker = GpuWorker()
    yield worker
    worker.close()


@pytest.fixture
def observer() -> Iterator[GpuWorker]:
    """A process that sees how much memory of the GPU is free."""
    worker = GpuWorker()
    yield worker
    worker.close()


class Daemon:
    """A device over a pool, and what it has open."""

    def __init__(self, gpu: str) -> None:
        self.pool = SharedMemory(POOL_NBYTES, name="kvist-rig")
        self.device = CudaDevice(gpu, PoolFile(self.pool.fd, POOL_NBYTES))

    def read(self, base: int, offset: int, nbytes: int) -> bytes:
        """Gather pages into the pool, and return them."""
        plan = self._plan(Direction.GATHER, offset, nbytes)
        self.device.gather(plan, [base], range(plan.num_chunks), always)
        return self.pool.bytes[:nbytes].tobytes()

    def write(self, base: int, offset: int, data: bytes) -> None:
        """Scatter ``data`` into pages."""
        self.pool.bytes[: len(data)] = np.frombuffer(data, dtype=np.uint8)
        plan = self._plan(Direction.SCATTER, offset, len(data))
        self.device.scatter(plan, [base], range(plan.num_chunks), [b""] * plan.num_chunks, always)

    def _plan(self, direction: Direction, offset: int, nbytes: int) -> CopyPlan:
        num_blocks = nbytes // PAGE_NBYTES
        plane = LayerPlane(0, offset, num_blocks, PAGE_NBYTES, PAGE_NBYTES)
        group = LayerGroup(GroupKind.FULL, 16, (plane,))
        ids = np.arange(num_blocks, dtype=np.int64)
        return CopyPlan(direction, group, ids[:, None], ids * PAGE_NBYTES, 0)


@pytest.fixture
def daemon(gpu: str) -> Iterator[Daemon]:
    daemon = Daemon(gpu)
    yield daemon
    daemon.device.close()
    daemon.pool.close()


def open_all(daemon: Daemon, handles: list[MemoryHandle], fds: list[list[int]]) -> list[int]:
    return [daemon.device.open_memory(handle, own) for handle, own in zip(handles, fds, strict=True)]


def check_both_ways(daemon: Daemon, worker: GpuWorker, spans: list[tuple[int, int]], kind: str) -> None:
    """Every span, stamped over there, is read here; written here, it is read over there."""
    for number, (address, nbytes) in enumerate(spans):
        worker.ask("stamp", address=address, nbytes=nbytes, name=f"span{number}")
    handles, fds, places = worker.export(spans)
    assert {handle.kind for handle in handles} == {kind}
    bases = open_all(daemon, handles, fds)
    for number, ((address, nbytes), (memory, offset)) in enumerate(zip(spans, places, strict=True)):
        assert daemon.read(bases[memory], offset, nbytes) == stamp(f"span{number}".encode(), nbytes)
        data = stamp(f"back{number}".encode(), nbytes)
        daemon.write(bases[memory], offset, data)
        assert b64decode(worker.ask("read", address=address, nbytes=nbytes)) == data
    for base, handle in zip(bases, handles, strict=True):
        daemon.device.close_memory(base, handle.nbytes)


def test_one_tensor_an_allocation(daemon: Daemon, worker: GpuWorker):
    """Allocations of their own: one handle each."""
    spans = [(worker.ask("allocate", nbytes=n * MIB), n * MIB) for n in (2, 8, 3)]
    check_both_ways(daemon, worker, spans, CUDA_IPC)


def test_tensors_inside_an_allocation(daemon: Daemon, worker: GpuWorker):
    """Two tensors at different places of one allocation, neither at its start: one handle, each at its own offset."""
    address = worker.ask("allocate", nbytes=8 * MIB)
    spans = [(address + 1 * MIB, 2 * MIB), (address + 4 * MIB + PAGE_NBYTES, 1 * MIB)]
    assert len(worker.export(spans)[0]) == 1
    check_both_ways(daemon, worker, spans, CUDA_IPC)


@pytest.mark.parametrize(
    ("config", "kind"), [("", CUDA_IPC), ("expandable_segments:True", CUDA_VMM)], ids=["caching", "expandable"]
)
def test_tensors_of_torch(daemon: Daemon, config: str, kind: str):
    """Tensors of torch's allocator, in segments that they share or in expandable ones."""
    pytest.importorskip("torch")
    worker = GpuWorker(PYTORCH_CUDA_ALLOC_CONF=config, PYTORCH_ALLOC_CONF=config)
    try:
        sizes = [256 * KIB, 512 * KIB, 30 * MIB]
        addresses = worker.ask("torch_tensors", sizes=sizes)
        check_both_ways(daemon, worker, list(zip(addresses, sizes, strict=True)), kind)
    finally:
        worker.close()


def test_virtual_memory_in_segments(daemon: Daemon, worker: GpuWorker):
    """Tensors that span physical segments, or lie inside the second one: one range here, all bytes in their order."""
    segments = [SEGMENT_NBYTES, 3 * SEGMENT_NBYTES, SEGMENT_NBYTES]
    address = worker.ask("allocate_virtual", segments=segments, is_exportable=True)
    check_both_ways(daemon, worker, [(address, sum(segments))], CUDA_VMM)
    check_both_ways(daemon, worker, [(address + 3 * MIB, 4 * MIB)], CUDA_VMM)


def test_more_segments_than_one_message_carries(daemon: Daemon, worker: GpuWorker):
    """Exporting and opening are not bound by the descriptors of one message."""
    segments = [SEGMENT_NBYTES] * 20
    address = worker.ask("allocate_virtual", segments=segments, is_exportable=True)
    check_both_ways(daemon, worker, [(address, sum(segments))], CUDA_VMM)


def test_memory_that_is_not_exportable_is_refused(worker: GpuWorker):
    """Memory as sleep mode makes it is refused on export, with the option to change; no descriptor is left."""
    address = worker.ask("allocate_virtual", segments=[SEGMENT_NBYTES], is_exportable=False)
    before = num_fds(worker.process.pid)
    with pytest.raises(RuntimeError, match=r"LayoutError: .*--enable-sleep-mode"):
        worker.export([(address, SEGMENT_NBYTES)])
    assert num_fds(worker.process.pid) == before


def test_managed_memory_is_refused(worker: GpuWorker):
    """Managed memory has no handle: refused by name."""
    address = worker.ask("allocate_managed", nbytes=1 * MIB)
    with pytest.raises(RuntimeError, match="LayoutError: managed memory"):
        worker.export([(address, 1 * MIB)])


def test_an_allocation_is_opened_once(daemon: Daemon, worker: GpuWorker):
    """The same handle, opened for several users, is one mapping, which the last user unmaps."""
    address = worker.ask("allocate", nbytes=4 * MIB)
    worker.ask("stamp", address=address, nbytes=4 * MIB, name="shared")
    (handle,), _, _ = worker.export([(address, 4 * MIB)])
    bases = [daemon.device.open_memory(handle, []) for _ in range(3)]
    assert len(set(bases)) == 1
    for _ in range(2):
        daemon.device.close_memory(bases[0], handle.nbytes)
    assert daemon.read(bases[0], 0, 1 * MIB) == stamp(b"shared", 1 * MIB)
    daemon.device.close_memory(bases[0], handle.nbytes)


def test_a_handle_that_lies_is_refused(daemon: Daemon, worker: GpuWorker):
    """More bytes than the allocation has, a handle of nothing, another GPU: refused with what was seen."""
    address = worker.ask("allocate", nbytes=4 * MIB)
    (handle,), _, _ = worker.export([(address, 4 * MIB)])
    with pytest.raises(LayoutError, match=f"declared with {64 * MIB} bytes and has {4 * MIB}"):
        daemon.device.open_memory(MemoryHandle(CUDA_IPC, 64 * MIB, handle.device, handle.payload), [])
    with pytest.raises(LayoutError, match="cuIpcOpenMemHandle returned"):
        daemon.device.open_memory(MemoryHandle(CUDA_IPC, 4 * MIB, handle.device, bytes(64)), [])
    other = "00000000-0000-0000-0000-000000000000"
    with pytest.raises(LayoutError, match=other):
        daemon.device.open_memory(MemoryHandle(CUDA_IPC, 4 * MIB, other, handle.payload), [])
    unknown = CudaDevice(other, PoolFile(daemon.pool.fd, POOL_NBYTES))
    with pytest.raises(LayoutError, match=f"{other} is not visible to this process, which sees .*{handle.device}"):
        unknown.open_memory(MemoryHandle(CUDA_IPC, 4 * MIB, other, handle.payload), [])
    assert daemon.device._gpu is None


def test_memory_returns_to_the_driver(daemon: Daemon, worker: GpuWorker, observer: GpuWorker):
    """After an engine was killed and its memory closed, nothing of it and no context of ours is left on the GPU."""
    observer.ask("free_nbytes")
    address = worker.ask("allocate", nbytes=512 * MIB)
    worker.ask("stamp", address=address, nbytes=64 * KIB, name="x")
    with_engine = observer.ask("free_nbytes")
    (handle,), _, _ = worker.export([(address, 512 * MIB)])
    base = daemon.device.open_memory(handle, [])
    worker.close()
    assert observer.ask("free_nbytes") < with_engine, "the mapping keeps the memory"
    daemon.device.close_memory(base, handle.nbytes)
    wait_until(lambda: observer.ask("free_nbytes") >= with_engine + 512 * MIB)


@pytest.mark.parametrize("kind", [CUDA_IPC, CUDA_VMM])
def test_opening_again_and_again_uses_nothing_up(daemon: Daemon, worker: GpuWorker, observer: GpuWorker, kind: str):
    """Open, close, and open anew: memory, descriptors and mappings are as before."""
    if kind == CUDA_IPC:
        address = worker.ask("allocate", nbytes=2 * SEGMENT_NBYTES)
    else:
        address = worker.ask("allocate_virtual", segments=[SEGMENT_NBYTES] * 2, is_exportable=True)
    daemon.device.hold()
    handles, fds, _ = worker.export([(address, 2 * SEGMENT_NBYTES)])
    free, num = observer.ask("free_nbytes"), num_fds(os.getpid())
    for _ in range(20):
        (base,) = open_all(daemon, handles, fds)
        daemon.device.close_memory(base, handles[0].nbytes)
    assert observer.ask("free_nbytes") == free
    assert num_fds(os.getpid()) == num


@pytest.mark.parametrize("dtype", ["bfloat16", "float8_e4m3fn", "float16", "uint8"])
def test_opened_memory_is_a_tensor(daemon: Daemon, worker: GpuWorker, dtype: str):
    """What another process allocated is a tensor of torch and of CuPy here: type, shape, strides, offset; no copy."""
    torch = pytest.importorskip("torch")
    address = worker.ask("allocate", nbytes=4 * MIB)
    worker.ask("stamp", address=address, nbytes=4 * MIB, name="tensor")
    (handle,), _, _ = worker.export([(address, 4 * MIB)])
    base = daemon.device.open_memory(handle, [])
    shape, strides, offset = (3, 5, 8), (640, 64, 2), 24
    view = MemoryTensor(base, dtype, shape, strides, offset, 4 * MIB, CUDA, 0, daemon)
    tensor = torch.from_dlpack(view)
    assert (str(tensor.dtype), tuple(tensor.shape), tensor.stride()) == (f"torch.{dtype}", shape, strides)
    size = tensor.element_size()
    assert tensor.data_ptr() == base + offset * size
    data = torch.frombuffer(bytearray(stamp(b"tensor", 4 * MIB)), dtype=tensor.dtype)
    expected = data.as_strided(shape, strides, offset).contiguous().view(torch.uint8)
    assert torch.equal(tensor.contiguous().view(torch.uint8).cpu(), expected)
    if dtype in ("float16", "uint8"):
        cupy = pytest.importorskip("cupy")
        array = cupy.from_dlpack(view)
        assert (array.data.ptr, array.shape, array.strides) == (
            base + offset * size,
            shape,
            tuple(stride * size for stride in strides),
        )
        array[0, 0, 0] = 7
        cupy.cuda.get_current_stream().synchronize()
        seven = data.new_tensor([7]).view(torch.uint8).numpy().tobytes()
        assert b64decode(worker.ask("read", address=address + offset * size, nbytes=size)) == seven
        del array
    del tensor
    daemon.device.close_memory(base, handle.nbytes)
