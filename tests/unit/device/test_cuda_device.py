"""``CudaDevice`` over a fake driver keeps the contract of every device, whatever order streams are worked off in."""

import itertools
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvist.device.checksum import vector_checksum
from kvist.device.cuda import pipe
from kvist.device.cuda.device import CudaDevice, PoolFile
from kvist.device.runs import chunk_pattern
from kvist.errors import DeviceError, LayoutError
from kvist.model.transfer import CopyPlan, Direction
from kvist.units import KIB, MIB
from tests.contract.test_device import POOL_NBYTES, Case, DeviceContract, drawn_case, opened
from tests.support.fake_cuda import GPU
from tests.support.fake_engine import FakeEngine, FakeRig, fake_rig
from tests.support.layouts import Shape, hnd, kv_apart, nhd, opaque
from tests.support.memory import GUARD, SharedMemory
from tests.support.simulated import always
from tests.support.tiles import strided_chunk


class TestCudaDevice(DeviceContract):
    @pytest.fixture(scope="class")
    @classmethod
    def rig(cls) -> Iterator[FakeRig]:
        with fake_rig(seed=1) as rig:
            yield rig

    @settings(max_examples=30)
    @given(st.data())
    def test_its_checksums_are_those_of_numpy(self, rig: FakeRig, data: st.DataObject):
        """The kernels' checksum of a chunk is ``vector_checksum`` of its canonical bytes."""
        with drawn_case(rig, data) as case:
            case.engine.stamp(b"twin")
            sums = rig.device.gather(case.plan(Direction.GATHER), case.engine.bases, range(len(case.chunks)), always)
            wanted = [vector_checksum(case.engine.chunk(blocks)) for blocks in case.chunks]
            assert sums == [value.to_bytes(8, "little") for value in wanted]

    def test_the_last_close_leaves_nothing(self, rig: FakeRig):
        """After the last allocation is closed no context is left, and whatever was in it was given back before."""
        with opened(rig, nhd(Shape())) as engine:
            case = Case(engine, [[2, 3]], [0])
            rig.device.gather(case.plan(Direction.GATHER), engine.bases, range(1), always)
            assert rig.machine.daemon.left()
        assert rig.machine.daemon.left() == rig.machine.daemon.lost == []


class TestDirectCopies(DeviceContract):
    """The same, where the copy engine moves every run by itself."""

    @pytest.fixture(scope="class")
    @classmethod
    def rig(cls) -> Iterator[FakeRig]:
        with pytest.MonkeyPatch.context() as patch, fake_rig(seed=2) as rig:
            patch.setattr(pipe, "DIRECT_NBYTES_MIN", 1)
            yield rig

    @settings(max_examples=30)
    @given(st.data())
    def test_its_checksums_are_those_of_numpy(self, rig: FakeRig, data: st.DataObject):
        """The checksum of blocks that a kernel only reads is ``vector_checksum`` of the chunk's canonical bytes."""
        with drawn_case(rig, data) as case:
            case.engine.stamp(b"twin")
            before = rig.machine.daemon.calls.count("cuMemcpyDtoHAsync")
            sums = rig.device.gather(case.plan(Direction.GATHER), case.engine.bases, range(len(case.chunks)), always)
            wanted = [vector_checksum(case.engine.chunk(blocks)) for blocks in case.chunks]
            assert sums == [value.to_bytes(8, "little") for value in wanted]
            num_runs = len(chunk_pattern(case.engine.laid.group, len(case.chunks[0])).run_nbytes)
            assert rig.machine.daemon.calls.count("cuMemcpyDtoHAsync") == before + num_runs * len(case.chunks) + 1


@pytest.mark.parametrize("page_nbytes", [pipe.DIRECT_NBYTES_MIN - 16, pipe.DIRECT_NBYTES_MIN])
def test_long_runs_need_no_staging(page_nbytes: int):
    """Runs of 256 KiB are moved without a kernel that writes; shorter ones pass through staging buffers."""
    laid = opaque(Shape(num_layers=1, num_blocks=6, block_tokens=1, num_heads=1, row_nbytes=page_nbytes // 2))
    with fake_rig(seed=3) as rig, opened(rig, laid) as engine:
        engine.stamp(b"long")
        both_ways(rig, Case(engine, [[4, 1], [0, 5]], [0, 1 * MIB]))
        kernels = set(rig.machine.daemon.launched)
        assert kernels == ({"check"} if page_nbytes >= pipe.DIRECT_NBYTES_MIN else {"gather", "scatter"})


@pytest.mark.parametrize("is_computing", [False, True], ids=["idle", "computing"])
def test_an_engines_own_kernels_move_long_runs_while_it_idles(is_computing: bool):
    """A process that copies its own blocks has the copy engine move long runs only where it computes meanwhile."""
    with fake_rig(seed=4) as rig:
        engine = FakeEngine(rig.machine, process=rig.machine.daemon)
        laid = opaque(Shape(num_layers=1, num_blocks=6, block_tokens=1, num_heads=1, row_nbytes=pipe.DIRECT_NBYTES_MIN))
        bases = [engine.allocate(nbytes) for nbytes in laid.memory_nbytes]
        rig.device.hold()
        plan = CopyPlan(Direction.GATHER, laid.group, np.array([[4, 1]], dtype=np.int64), np.zeros(1, np.int64), 0)
        rig.device.gather(plan, bases, range(1), always, lambda: is_computing)
        assert set(rig.machine.daemon.launched) == ({"check"} if is_computing else {"gather"})
        rig.device.close()
        for base in bases:
            engine.call("cuMemFree", base)
        engine.end()


@pytest.mark.parametrize("direct_nbytes_min", [1, pipe.DIRECT_NBYTES_MIN])
@pytest.mark.parametrize("liveliness", [0, 0.9])
def test_a_shared_link_rests_after_every_slice(
    monkeypatch: pytest.MonkeyPatch, direct_nbytes_min: int, liveliness: float
):
    """Where others need the link, it never carries more than a slice before it waits for another stream's work."""
    monkeypatch.setattr(pipe, "DIRECT_NBYTES_MIN", direct_nbytes_min)
    with fake_rig(liveliness=liveliness, seed=5) as rig, ExitStack() as stack:
        case = large_case(rig, stack, opaque)
        everything, before = range(len(case.chunks)), contents(case)
        calls = rig.machine.daemon.calls
        for direction, name in ((Direction.GATHER, "cuMemcpyDtoHAsync"), (Direction.SCATTER, "cuMemcpyHtoDAsync")):
            start = len(calls)
            if direction is Direction.GATHER:
                sums = rig.device.gather(case.plan(direction), case.engine.bases, everything, always, always)
            else:
                case.engine.fill(GUARD)
                plan = case.plan(direction)
                assert all(rig.device.scatter(plan, case.engine.bases, everything, sums, always, always))
            made = [call for call in calls[start:] if call in (name, "cuMemsetD8Async")]
            between = "".join("r" if call == name else "p" for call in made).strip("r").split("p")
            assert len(between) > len(case.chunks)
            run_nbytes = int(chunk_pattern(case.engine.laid.group, len(case.chunks[0])).run_nbytes.max())
            runs_max = max(1, -(-pipe.SHARED_NBYTES_MAX // run_nbytes)) if direct_nbytes_min == 1 else 1
            assert max(len(runs) for runs in between) <= runs_max
        assert contents(case) == before


def contents(case: Case) -> list[bytes]:
    """Return the canonical bytes that lie in a case's blocks."""
    arrays = case.engine.arrays
    return [strided_chunk(case.engine.laid.group.planes, blocks, arrays) for blocks in case.chunks]


def slots(rig: FakeRig, case: Case) -> list[bytes]:
    """Return what lies in a case's slots."""
    return [rig.pool[slot : slot + case.chunk_nbytes].tobytes() for slot in case.slots]


def both_ways(rig: FakeRig, case: Case) -> None:
    """Gather, wipe, scatter: every byte comes back."""
    everything = range(len(case.chunks))
    before = contents(case)
    sums = rig.device.gather(case.plan(Direction.GATHER), case.engine.bases, everything, always)
    assert sums == [vector_checksum(chunk).to_bytes(8, "little") for chunk in before]
    assert slots(rig, case) == before
    case.engine.fill(GUARD)
    found = rig.device.scatter(case.plan(Direction.SCATTER), case.engine.bases, everything, sums, always)
    assert found == [True] * len(found)
    assert contents(case) == before


def large_case(rig: FakeRig, stack: ExitStack, lay: Any = nhd, row_nbytes: int = 256, num_chunks: int = 2) -> Case:
    """Return chunks of many slices each."""
    laid = lay(Shape(num_layers=2, num_blocks=4 * num_chunks, block_tokens=16, num_heads=4, row_nbytes=row_nbytes))
    engine = stack.enter_context(opened(rig, laid))
    engine.stamp(b"slices")
    chunks = [list(range(4 * number, 4 * number + 4)) for number in range(num_chunks)]
    return Case(engine, chunks, [number * 1 * MIB for number in range(num_chunks)])


@pytest.mark.parametrize("lay", [nhd, hnd, kv_apart, opaque], ids=lambda lay: lay.__name__)
@pytest.mark.parametrize("liveliness", [0, 0.9])
@pytest.mark.parametrize("row_nbytes", [272, 84, 71])
def test_chunks_larger_than_a_staging_buffer(lay: Any, liveliness: float, row_nbytes: int):
    """A copy of more slices than there are buffers, each in part of a chunk, brings every byte there and back.

    So it does where no work is done before it must be, and where most is done at once.
    """
    with fake_rig(liveliness=liveliness, seed=row_nbytes) as rig, ExitStack() as stack:
        case = large_case(rig, stack, lay, row_nbytes)
        assert case.chunk_nbytes > 64 * KIB
        both_ways(rig, case)


@pytest.mark.parametrize("seed", range(4))
def test_any_order_of_the_streams_work_will_do(seed: int):
    """Whatever the streams' work is interleaved like, bytes and checksums are right."""
    with fake_rig(liveliness=0.5, seed=seed) as rig, ExitStack() as stack:
        both_ways(rig, large_case(rig, stack, num_chunks=4))


@pytest.mark.parametrize("num_allowed", [0, 1, 3])
def test_it_is_asked_before_each_chunk(num_allowed: int):
    """A copy asks once a chunk, before its first slice; a chunk that has begun is finished, and no other is begun."""
    with fake_rig() as rig, ExitStack() as stack:
        case = large_case(rig, stack, num_chunks=4)
        rig.pool[:] = GUARD
        answers = iter([True] * num_allowed + [False])
        plan = case.plan(Direction.GATHER)
        assert len(rig.device.gather(plan, case.engine.bases, range(4), lambda: next(answers))) == num_allowed
        assert next(answers, None) is None
        untouched = [bytes([GUARD]) * case.chunk_nbytes] * (4 - num_allowed)
        assert slots(rig, case) == contents(case)[:num_allowed] + untouched


@pytest.mark.parametrize("seed", range(3))
def test_both_directions_at_once(seed: int):
    """Gathers on one thread and scatters on another do not disturb each other."""
    with fake_rig(seed=seed) as rig, ExitStack() as stack:
        writer, reader = large_case(rig, stack), large_case(rig, stack)
        reader.slots = [2 * MIB, 3 * MIB]
        threads = stack.enter_context(ThreadPoolExecutor(2))
        sums = rig.device.gather(writer.plan(Direction.GATHER), writer.engine.bases, range(2), always)
        rig.pool[2 * MIB : 4 * MIB] = rig.pool[: 2 * MIB]
        reader.engine.fill(GUARD)
        rig.pool[: 2 * MIB] = GUARD
        out = [writer.plan(Direction.GATHER), writer.engine.bases, range(2)]
        back = [reader.plan(Direction.SCATTER), reader.engine.bases, range(2), sums]
        for _ in range(4):
            gathered = threads.submit(rig.device.gather, *out, always)
            scattered = threads.submit(rig.device.scatter, *back, always)
            assert gathered.result(30) == sums
            assert scattered.result(30) == [True, True]
        assert contents(reader) == slots(rig, writer) == contents(writer)


def test_two_first_copies_upload_one_table():
    """Copies of one engine that begin on both threads at the same time share its table, and none is left behind."""
    with fake_rig() as rig, ExitStack() as stack:
        case = large_case(rig, stack)
        before = rig.machine.daemon.left()
        both_here = threading.Barrier(2)

        def meet(name: str) -> None:
            if name == "cuMemAlloc":
                with suppress(threading.BrokenBarrierError):
                    both_here.wait(0.2)

        rig.machine.daemon.on_call = meet
        threads = stack.enter_context(ThreadPoolExecutor(2))
        bases, expected = case.engine.bases, [bytes(8)] * 2
        gathered = threads.submit(rig.device.gather, case.plan(Direction.GATHER), bases, range(2), always)
        scattered = threads.submit(rig.device.scatter, case.plan(Direction.SCATTER), bases, range(2), expected, always)
        assert len(gathered.result(30)) == len(scattered.result(30)) == 2
        rig.machine.daemon.on_call = str
        assert len(rig.machine.daemon.left()) == len(before) + 1


def test_another_user_of_the_memory_leaves_during_a_copy():
    """Closing memory that somebody else has open too takes nothing away from a copy that is running on it."""
    with fake_rig() as rig, ExitStack() as stack:
        case = large_case(rig, stack)
        for peer, base in zip(case.engine.memory, case.engine.bases, strict=True):
            assert rig.device.open_memory(peer.handle, peer.fds) == base
        num_asked = itertools.count()

        def leave() -> bool:
            if next(num_asked) == 1:
                for peer, base in zip(case.engine.memory, case.engine.bases, strict=True):
                    rig.device.close_memory(base, peer.handle.nbytes)
            return True

        rig.device.gather(case.plan(Direction.GATHER), case.engine.bases, range(2), leave)
        assert slots(rig, case) == contents(case)


def test_a_held_device_gives_its_tables_back():
    """A device that copies this very process's memory gives back all it has, though the context lives on."""
    with fake_rig() as rig:
        held_by_engine = FakeEngine(rig.machine, process=rig.machine.daemon)
        laid = nhd(Shape())
        bases = [held_by_engine.allocate(nbytes) for nbytes in laid.memory_nbytes]
        before = rig.machine.daemon.left()
        rig.device.hold()
        block_ids, offsets = np.array([[1, 2]], dtype=np.int64), np.zeros(1, dtype=np.int64)
        for direction in Direction:
            plan = CopyPlan(direction, laid.group, block_ids, offsets, 0)
            copy = rig.device.gather if direction is Direction.GATHER else rig.device.scatter
            assert copy(plan, bases, range(1), *[[bytes(8)]] * (direction is Direction.SCATTER), always)
        rig.device.close()
        assert rig.machine.daemon.left() == before
        for base in bases:
            held_by_engine.call("cuMemFree", base)
        held_by_engine.end()


def test_a_device_that_cannot_be_held_is_not():
    """After a failed ``hold`` the device is as it was: memory that is opened later ends it with its last close."""
    with fake_rig() as rig:
        rig.machine.daemon.fail_call(0)
        with pytest.raises(DeviceError, match="cuDeviceGetCount returned 999"):
            rig.device.hold()
        with opened(rig, nhd(Shape())):
            pass
        assert rig.machine.daemon.left() == []


def test_a_pool_that_cannot_be_mapped_is_refused():
    """A pool that is gone is an error with the system's words, and leaves nothing open."""
    with fake_rig() as rig:
        peer = rig.allocate(4096)
        with SharedMemory(POOL_NBYTES) as gone:
            device = CudaDevice(GPU, PoolFile(gone.fd, POOL_NBYTES))
        with pytest.raises(LayoutError, match=r"the pool cannot be mapped .*Bad file descriptor"):
            device.open_memory(peer.handle, peer.fds)
        assert rig.machine.daemon.left() == rig.machine.daemon.lost == []


def test_an_unknown_gpu_is_refused_with_both_lists():
    """A GPU that this process does not see is refused by its name and those of the ones that it sees."""
    other = "00000000-0000-0000-0000-000000000000"
    with fake_rig() as rig, SharedMemory(POOL_NBYTES) as pool:
        peer = rig.allocate(4096)
        unknown = CudaDevice(other, PoolFile(pool.fd, POOL_NBYTES))
        with pytest.raises(LayoutError, match=f"{other} is not visible to this process, which sees .*{GPU}"):
            unknown.open_memory(replace(peer.handle, device=other), peer.fds)
        with pytest.raises(LayoutError, match=f"on '{other}' is not served by cuda:{GPU}"):
            rig.device.open_memory(replace(peer.handle, device=other), peer.fds)
