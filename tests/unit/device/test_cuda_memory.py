"""Memory of one process, exported, is the same memory in another: opened once, counted, closed with its last user."""

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import pytest

from kvist.device.cuda.driver import Context
from kvist.device.cuda.export import Exported, device_of
from kvist.device.cuda.memory import OpenedMemory
from kvist.errors import DeviceError, LayoutError
from kvist.model.handles import CUDA_IPC, CUDA_VMM
from kvist.units import MIB
from tests.support.fake_cuda import GPU, Machine
from tests.support.fake_engine import FakeEngine
from tests.support.fake_memory import SEGMENT_NBYTES
from tests.support.memory import num_fds, stamp

OTHER_GPU = "5d1f6a3e-8c0b-4a54-9f3e-1b2c3d4e5f60"
KINDS = [CUDA_IPC, CUDA_VMM]


@dataclass
class Two:
    """An engine, and a daemon with a context of its own, on the second of two GPUs."""

    machine: Machine
    engine: FakeEngine
    context: Context
    opened: OpenedMemory

    def open(self, one: Exported, nbytes: int | None = None) -> int:
        handle = one.handle if nbytes is None else replace(one.handle, nbytes=nbytes)
        return self.opened.open(handle, one.fds, self.context.device)

    def allocate(self, kind: str, nbytes: int = 3 * SEGMENT_NBYTES) -> int:
        if kind == CUDA_IPC:
            return self.engine.allocate(nbytes)
        return self.engine.allocate_virtual([SEGMENT_NBYTES, nbytes - SEGMENT_NBYTES])

    def export(self, address: int, nbytes: int) -> Exported:
        (one,), _ = self.engine.export((address, nbytes))
        return one

    def here(self, address: int, nbytes: int) -> bytes:
        return self.machine.daemon.bytes_at(address, nbytes).tobytes()

    def there(self, address: int, nbytes: int) -> bytes:
        return self.engine.process.bytes_at(address, nbytes).tobytes()

    def write_there(self, address: int, data: bytes) -> None:
        self.engine.process.bytes_at(address, len(data))[:] = list(data)

    def write_here(self, address: int, data: bytes) -> None:
        self.machine.daemon.bytes_at(address, len(data))[:] = list(data)


@pytest.fixture
def two() -> Iterator[Two]:
    with Machine(uuids=(OTHER_GPU, GPU)).installed() as machine:
        engine = FakeEngine(machine, 1)
        context = Context(GPU)
        context.use()
        yield Two(machine, engine, context, OpenedMemory())
        context.close()
        assert machine.daemon.left() == machine.daemon.lost == []
        engine.end()


def only_context(two: Two) -> bool:
    """Whether the daemon has nothing but its context."""
    return two.machine.daemon.left() == ["context of GPU 1"]


def close_fds(exported: Sequence[Exported]) -> None:
    for one in exported:
        one.close()


@pytest.mark.parametrize("kind", KINDS)
def test_it_is_the_same_memory(two: Two, kind: str):
    """What is written on either side is read on the other, from the first byte to the last."""
    nbytes = 3 * SEGMENT_NBYTES
    address = two.allocate(kind, nbytes)
    one = two.export(address, nbytes)
    assert (one.base, one.handle.kind, one.handle.nbytes, one.handle.device) == (address, kind, nbytes, GPU)
    base = two.open(one)
    one.close()
    for at in (0, SEGMENT_NBYTES - 8, nbytes - 16):
        two.write_there(address + at, stamp(b"there", 16))
        assert two.here(base + at, 16) == stamp(b"there", 16)
        two.write_here(base + at, stamp(b"here", 16))
        assert two.there(address + at, 16) == stamp(b"here", 16)
    assert two.opened.close(base)
    assert only_context(two)


@pytest.mark.parametrize("kind", KINDS)
def test_spans_lie_where_their_places_say(two: Two, kind: str):
    """Several tensors in one allocation, none at its start, are one handle and an offset each."""
    first, second = two.allocate(kind, 8 * MIB), two.allocate(kind, 4 * MIB)
    spans = [(first, 8 * MIB), (first + 1 * MIB, 2 * MIB), (second + 3 * MIB, 1 * MIB), (first + 5 * MIB, 64)]
    if kind == CUDA_VMM:
        spans[2] = (second, 4 * MIB)
    exported, places = two.engine.export(*spans)
    assert len(exported) == 2
    bases = [two.open(one) for one in exported]
    for number, ((address, _), (memory, offset)) in enumerate(zip(spans, places, strict=True)):
        two.write_there(address, stamp(b"%d" % number, 64))
        assert two.here(bases[memory] + offset, 64) == stamp(b"%d" % number, 64)
    for base in bases:
        two.opened.close(base)
    close_fds(exported)


def test_a_span_may_begin_in_a_later_segment(two: Two):
    """Of virtual memory, the segments under a span are exported, and no others."""
    address = two.engine.allocate_virtual([SEGMENT_NBYTES, 3 * SEGMENT_NBYTES, SEGMENT_NBYTES, SEGMENT_NBYTES])
    exported, places = two.engine.export((address + 3 * SEGMENT_NBYTES, 2 * SEGMENT_NBYTES))
    assert exported[0].handle.part_nbytes == (3 * SEGMENT_NBYTES, SEGMENT_NBYTES)
    assert places == [(0, 2 * SEGMENT_NBYTES)]
    base = two.open(exported[0])
    two.write_there(address + 4 * SEGMENT_NBYTES, stamp(b"late", 64))
    assert two.here(base + 3 * SEGMENT_NBYTES, 64) == stamp(b"late", 64)
    two.opened.close(base)
    close_fds(exported)


def test_an_allocation_is_opened_once(two: Two):
    """The same handle, opened for several users, is one mapping, which the last user unmaps."""
    one = two.export(two.allocate(CUDA_IPC), 3 * SEGMENT_NBYTES)
    bases = {two.open(one) for _ in range(3)}
    assert len(bases) == len(two.opened) == 1
    (base,) = bases
    assert [two.opened.close(base) for _ in range(2)] == [False, False]
    assert two.here(base, 1)
    assert two.opened.close(base)
    assert len(two.opened) == 0
    assert only_context(two)


def test_descriptors_are_mapped_each_time(two: Two):
    """Virtual memory of equal shape may be other memory: each open maps it anew, and each close unmaps its own."""
    address, other = two.allocate(CUDA_VMM), two.allocate(CUDA_VMM)
    exported = [two.export(at, 3 * SEGMENT_NBYTES) for at in (address, other)]
    assert exported[0].handle == exported[1].handle
    first, second = (two.open(one) for one in exported)
    two.write_there(other, stamp(b"other", 64))
    assert two.here(second, 64) == stamp(b"other", 64) != two.here(first, 64)
    two.opened.close(first)
    assert two.here(second, 64) == stamp(b"other", 64)
    two.opened.close(second)
    close_fds(exported)


@pytest.mark.parametrize("kind", KINDS)
def test_memory_outlives_its_process(two: Two, kind: str):
    """What is open stays readable after its owner has ended, and goes with its close."""
    other = FakeEngine(two.machine, 1)
    address = other.allocate(SEGMENT_NBYTES) if kind == CUDA_IPC else other.allocate_virtual([SEGMENT_NBYTES])
    exported, _ = other.export((address, SEGMENT_NBYTES))
    other.process.bytes_at(address, 64)[:] = 7
    base = two.open(exported[0])
    other.end()
    assert two.here(base, 64) == bytes([7]) * 64
    two.opened.close(base)
    close_fds(exported)


def test_more_bytes_than_there_are_are_refused(two: Two):
    """A handle that claims more than its allocation has is refused, with both numbers where CUDA says them."""
    one = two.export(two.allocate(CUDA_IPC, 4 * MIB), 4 * MIB)
    with pytest.raises(LayoutError, match=f"declared with {64 * MIB} bytes and has {4 * MIB}"):
        two.open(one, 64 * MIB)
    one = two.export(two.allocate(CUDA_VMM), 3 * SEGMENT_NBYTES)
    larger = replace(one.handle, nbytes=64 * MIB, part_nbytes=(SEGMENT_NBYTES, 64 * MIB - SEGMENT_NBYTES))
    with pytest.raises(LayoutError, match=rf"{64 * MIB} bytes cannot be opened: cuMemMap returned 1: CUDA_ERROR_INV"):
        two.opened.open(larger, one.fds, two.context.device)
    one.close()
    assert only_context(two)


def test_a_handle_of_nothing_is_refused(two: Two):
    """Bytes that name no memory, and a descriptor of something else, are refused in CUDA's words."""
    one = two.export(two.allocate(CUDA_IPC), 64)
    with pytest.raises(LayoutError, match="cuIpcOpenMemHandle returned 1: CUDA_ERROR_INVALID_VALUE"):
        two.opened.open(replace(one.handle, payload=bytes(64)), [], two.context.device)
    virtual = two.export(two.allocate(CUDA_VMM), 3 * SEGMENT_NBYTES)
    null = os.open("/dev/null", os.O_RDONLY)
    for fds in ([virtual.fds[0], null], [virtual.fds[0], -1]):
        with pytest.raises(LayoutError, match="cuMemImportFromShareableHandle returned 1: CUDA_ERROR_INVALID_VALUE"):
            two.opened.open(virtual.handle, fds, two.context.device)
    os.close(null)
    virtual.close()
    assert only_context(two)


def test_managed_memory_is_refused(two: Two):
    """Managed memory has no handle: refused by name, with what to use instead."""
    address = int(two.engine.call("cuMemAllocManaged", 1 * MIB, 1))
    with pytest.raises(LayoutError, match=r"managed memory .* allocate KV memory with cudaMalloc"):
        two.engine.export((address, 1 * MIB))


def test_memory_that_is_not_exportable_is_refused(two: Two):
    """Memory as sleep mode makes it is refused with the option to change; what was exported before it is let go."""
    fine = two.allocate(CUDA_VMM)
    address = two.engine.allocate_virtual([SEGMENT_NBYTES], is_exportable=False)
    fds, left = num_fds(os.getpid()), two.engine.process.left()
    with pytest.raises(LayoutError, match=r"start without --enable-sleep-mode"):
        two.engine.export((fine, 3 * SEGMENT_NBYTES), (address, SEGMENT_NBYTES))
    assert (num_fds(os.getpid()), two.engine.process.left()) == (fds, left)


def test_a_tensor_that_leaves_its_memory_is_refused(two: Two):
    """A span that ends behind its allocation is refused with the numbers; so is one behind the last segment."""
    address = two.allocate(CUDA_IPC, 4096)
    with pytest.raises(LayoutError, match=f"4096 bytes at {address + 1:#x} leave their allocation of 4096"):
        two.engine.export((address + 1, 4096))
    address, fds = two.allocate(CUDA_VMM), num_fds(os.getpid())
    with pytest.raises(LayoutError, match="cuMemGetAddressRange returned 1"):
        two.engine.export((address + 1, 3 * SEGMENT_NBYTES))
    assert num_fds(os.getpid()) == fds


def test_memory_of_no_gpu_is_an_error(two: Two):
    """An address that CUDA does not know is an error in its words."""
    with pytest.raises(DeviceError, match="cuPointerGetAttribute returned 1"):
        two.engine.export((4096, 64))


def test_a_gpu_is_found_by_the_address(two: Two):
    """Memory is on the GPU of its context, whatever its ordinal."""
    address = two.engine.allocate(64)
    with two.machine.running(two.engine.process):
        assert device_of(address) == GPU
