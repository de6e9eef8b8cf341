"""A copy waits for the engine's work so far, and the fake driver shows it where it does not."""

from typing import Any

import pytest

from kvist.device.cuda import driver, pipe
from kvist.device.cuda.fences import SharedFence, StreamFences
from kvist.errors import DeviceError, FenceError
from kvist.model.transfer import Direction
from tests.contract.test_device import Case, opened
from tests.support.fake_engine import FakeEngine, FakeRig, fake_rig
from tests.support.layouts import Shape, nhd
from tests.support.simulated import always


@pytest.fixture(params=[pipe.DIRECT_NBYTES_MIN, 1], ids=["staged", "direct"], autouse=True)
def shortest_run(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Copies pass through staging buffers, or are the copy engine's own."""
    monkeypatch.setattr(pipe, "DIRECT_NBYTES_MIN", request.param)


def new_fence(rig: FakeRig, stream: Any) -> SharedFence:
    with rig.machine.running(rig.engine.process):
        return SharedFence(lambda: int(stream))


def record(rig: FakeRig, fence: SharedFence) -> None:
    with rig.machine.running(rig.engine.process):
        fence.record()


def gather(rig: FakeRig, case: Case) -> bytes:
    rig.device.gather(case.plan(Direction.GATHER), case.engine.bases, range(1), always)
    return rig.pool[case.slots[0] : case.slots[0] + case.chunk_nbytes].tobytes()


@pytest.mark.parametrize("waits", [True, False])
def test_a_gather_stores_what_the_engine_wrote_before_its_event(waits: bool):
    """Bytes of a kernel that the engine has queued, and not run, are what is stored; without the wait they are not."""
    with fake_rig(liveliness=0) as rig, opened(rig, nhd(Shape())) as memory:
        stream = rig.engine.new_stream()
        fence = new_fence(rig, stream)
        opened_fence = rig.device.open_fence(fence.handle)
        case = Case(memory, [[1, 4]], [0])
        memory.stamp(b"before")
        for name in (b"first", b"second"):
            rig.engine.process.enqueue(stream, lambda name=name: memory.stamp(name))
            record(rig, fence)
            if waits:
                rig.device.wait_for(Direction.GATHER, opened_fence)
            found = gather(rig, case)
            assert (found == case.engine.chunk([1, 4])) is True
            before = case.engine.chunk([1, 4])
            rig.engine.call("cuStreamSynchronize", stream)
            assert (case.engine.chunk([1, 4]) == before) is waits
        rig.device.close_fence(opened_fence)


def test_a_scatter_waits_before_it_writes():
    """What the engine has queued happens before blocks are filled, though their bytes may be on their way already."""
    with fake_rig(liveliness=0) as rig, opened(rig, nhd(Shape())) as memory:
        stream = rig.engine.new_stream()
        fence = new_fence(rig, stream)
        opened_fence = rig.device.open_fence(fence.handle)
        case = Case(memory, [[1, 4]], [0])
        memory.stamp(b"stored")
        stored = gather(rig, case)
        rig.engine.process.enqueue(stream, lambda: memory.fill(0))
        record(rig, fence)
        rig.device.wait_for(Direction.SCATTER, opened_fence)
        rig.device.scatter(case.plan(Direction.SCATTER), memory.bases, range(1), [b""], always)
        rig.engine.call("cuStreamSynchronize", stream)
        assert case.engine.chunk([1, 4]) == stored
        rig.device.close_fence(opened_fence)


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize("direction", Direction, ids=lambda direction: direction.value)
def test_every_stream_waits(direction: Direction, seed: int):
    """More chunks than may be under way at once: whatever stream is worked off first waits for the engine too."""
    with fake_rig(liveliness=0.6 if seed else 0, seed=seed) as rig, opened(rig, nhd(Shape(num_blocks=8))) as memory:
        stream = rig.engine.new_stream()
        fence = new_fence(rig, stream)
        opened_fence = rig.device.open_fence(fence.handle)
        chunks = [[number] for number in range(8)]
        case = Case(memory, chunks, [4096 * number for number in range(8)])
        memory.stamp(b"stored")
        sums = rig.device.gather(case.plan(Direction.GATHER), memory.bases, range(8), always)
        stored = [case.engine.chunk(blocks) for blocks in chunks]
        rig.engine.process.enqueue(stream, lambda: memory.stamp(b"later"))
        record(rig, fence)
        rig.device.wait_for(direction, opened_fence)
        if direction is Direction.GATHER:
            rig.device.gather(case.plan(direction), memory.bases, range(8), always)
            found = [rig.pool[slot : slot + case.chunk_nbytes].tobytes() for slot in case.slots]
            rig.engine.call("cuStreamSynchronize", stream)
            assert found == [case.engine.chunk(blocks) for blocks in chunks] != stored
        else:
            assert rig.device.scatter(case.plan(direction), memory.bases, range(8), sums, always) == [True] * 8
            rig.engine.call("cuStreamSynchronize", stream)
            assert [case.engine.chunk(blocks) for blocks in chunks] == stored
        rig.device.close_fence(opened_fence)


def test_a_fence_whose_engine_is_gone_holds_nothing_up():
    """Waiting for the event of a process that has ended ends."""
    with fake_rig(liveliness=0) as rig, opened(rig, nhd(Shape())) as memory:
        other = FakeEngine(rig.machine)
        stream = other.new_stream()
        other.process.enqueue(stream, lambda: memory.stamp(b"never"))
        with rig.machine.running(other.process):
            fence = SharedFence(lambda: int(stream))
        opened_fence = rig.device.open_fence(fence.handle)
        other.end()
        memory.stamp(b"mine")
        rig.device.wait_for(Direction.GATHER, opened_fence)
        case = Case(memory, [[1, 4]], [0])
        assert gather(rig, case) == case.engine.chunk([1, 4])
        rig.device.close_fence(opened_fence)


def test_copies_of_the_same_process_wait_for_a_stream():
    """``StreamFences`` stand for the work so far; given back, an event is used again and is not waited for too long."""
    with fake_rig(liveliness=0) as rig:
        engine = FakeEngine(rig.machine, process=rig.machine.daemon)
        rig.device.hold()
        laid = nhd(Shape())
        bases = [engine.allocate(nbytes) for nbytes in laid.memory_nbytes]
        arrays = [engine.process.bytes_at(base, n) for base, n in zip(bases, laid.memory_nbytes, strict=True)]
        stream = engine.new_stream()
        fences = StreamFences(lambda: int(stream))
        case = Case(None, [[2]], [0])  # type: ignore[arg-type]
        num_before = engine.process.calls.count("cuEventCreate")
        for value in (1, 2):
            for array in arrays:
                engine.process.enqueue(stream, lambda array=array, value=value: array.fill(value))
            fence = fences.record()
            rig.device.wait_for(Direction.GATHER, fence)
            case.engine = _Placed(laid, bases)  # type: ignore[assignment]
            assert set(gather(rig, case)) == {value}
            fences.give_back(fence)
        assert engine.process.calls.count("cuEventCreate") == num_before + 1
        engine.call("cuEventDestroy", fence)
        engine.call("cuStreamDestroy", stream)
        for base in bases:
            engine.call("cuMemFree", base)
        engine.end()


class _Placed:
    """A layout at addresses of this process's own."""

    def __init__(self, laid: Any, bases: list[int]) -> None:
        self.laid, self.bases = laid, bases


def test_a_process_can_look_at_its_own_events():
    """A fence is done when all that was given to its stream before it is, and no sooner."""
    with fake_rig(liveliness=0) as rig, rig.machine.running(rig.engine.process):
        stream = rig.engine.new_stream()
        fences = StreamFences(lambda: int(stream))
        done: list[int] = []
        rig.engine.process.enqueue(stream, lambda: done.append(1))
        fence = fences.record()
        assert (fences.is_done(fence), done) == (False, [])
        rig.engine.call("cuStreamSynchronize", stream)
        assert (fences.is_done(fence), done) == (True, [1])
        rig.engine.call("cuEventDestroy", fence)
        with pytest.raises(DeviceError, match="cuEventQuery returned 400"):
            fences.is_done(fence)


def test_an_event_that_cannot_be_shared_is_told():
    """Where CUDA makes no event for other processes, that is an error of its own kind."""
    with fake_rig() as rig, rig.machine.running(rig.engine.process):
        stream = rig.engine.new_stream()
        rig.engine.process.fail_call(0)
        with pytest.raises(FenceError, match="cannot be shared: cuEventCreate returned 999"):
            SharedFence(lambda: int(stream))


def test_an_event_that_cannot_be_opened_is_refused():
    """A handle of another length, of nothing, or of memory, is refused with what was seen, and opens no GPU."""
    with fake_rig() as rig:
        peer = rig.allocate(4096)
        with pytest.raises(FenceError, match="an event handle of 63 bytes; CUDA's has 64"):
            rig.device.open_fence(bytes(63))
        for payload in (bytes(64), peer.handle.payload):
            with pytest.raises(FenceError, match="event cannot be opened: cuIpcOpenEventHandle returned 1: CUDA_"):
                rig.device.open_fence(payload)
        assert rig.machine.daemon.left() == rig.machine.daemon.lost == []


def test_a_fence_that_cannot_be_closed_does_not_keep_memory_open():
    """Where CUDA refuses to end an event, that is logged, and closing goes on to the memory."""
    for number in range(2):
        with fake_rig() as rig:
            daemon = rig.machine.daemon
            with opened(rig, nhd(Shape())):
                fence = rig.device.open_fence(new_fence(rig, rig.engine.new_stream()).handle)
                daemon.fail_call(number)
                rig.device.close_fence(fence)
            assert daemon.left() == []
            assert daemon.lost == ["event"]
            daemon.lost.clear()


def test_waiting_reports_what_fails():
    """A wait that CUDA refuses is an error with its words: the copy must not begin."""
    with fake_rig() as rig, opened(rig, nhd(Shape())):
        fence = rig.device.open_fence(new_fence(rig, rig.engine.new_stream()).handle)
        rig.machine.daemon.fail_call(1)
        with pytest.raises(DeviceError, match="cuStreamWaitEvent returned 999: CUDA_ERROR_UNKNOWN"):
            rig.device.wait_for(Direction.GATHER, fence)
        rig.device.close_fence(fence)
    with pytest.raises(DeviceError), fake_rig() as rig, rig.machine.running(rig.engine.process):
        driver.call("cuStreamWaitEvent", 1, 1, 0)
