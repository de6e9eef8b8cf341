"""Jobs run on one thread, chunk by chunk: loads first, nothing after a cancel or a deadline, each done exactly once."""

import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvist.device.base import GoOn, IsShared, never
from kvist.errors import Overloaded
from kvist.model.handles import MemoryHandle
from kvist.model.layout import GroupKind, LayerGroup, LayerPlane
from kvist.model.transfer import CopyPlan, Direction
from kvist.transfer.executor import Executor, Job
from kvist.transfer.governor import Governor
from tests.support.waiting import wait_until

DEADLINE_S = 20.0
GROUP = LayerGroup(GroupKind.FULL, 4, (LayerPlane(0, 0, num_blocks=64, block_stride=16, row_nbytes=16),))


class ScriptedDevice:
    """Copies nothing; notes every step, and takes each only when it is let."""

    kind = "scripted"

    def __init__(self, *, is_open: bool = False) -> None:
        self.steps: list[tuple[str, int]] = []
        """(job, chunk)"""
        self.threads: set[str] = set()
        self.is_shared: list[bool] = []
        """What each copy found when it began."""
        self.broken: set[tuple[str, int]] = set()
        """Steps that fail: (job, first chunk)."""
        self.wrong: set[tuple[str, int]] = set()
        """Chunks that a scatter finds corrupt: (job, chunk)."""
        self._is_open = is_open
        self._permits = threading.Semaphore(0)
        self._begun = threading.Semaphore(0)

    def open_memory(self, handle: MemoryHandle, fds: Sequence[int]) -> int:
        raise NotImplementedError

    def close_memory(self, address: int, nbytes: int) -> None:
        raise NotImplementedError

    def gather(
        self, plan: CopyPlan, bases: Sequence[int], chunks: range, go_on: GoOn, is_shared: IsShared = never
    ) -> list[bytes]:
        self.is_shared.append(is_shared())
        return [f"{name}{chunk}".encode() for name, chunk in self._steps(bases, chunks, go_on)]

    def scatter(
        self,
        plan: CopyPlan,
        bases: Sequence[int],
        chunks: range,
        checksums: Sequence[bytes],
        go_on: GoOn,
        is_shared: IsShared = never,
    ) -> list[bool]:
        self.is_shared.append(is_shared())
        assert list(checksums) == [f"sum{chunk}".encode() for chunk in chunks]
        return [step not in self.wrong for step in self._steps(bases, chunks, go_on)]

    def wait_begun(self) -> None:
        """Return when the executor has entered one more step."""
        assert self._begun.acquire(timeout=DEADLINE_S)

    def let(self, num_steps: int) -> None:
        """Let steps be finished."""
        self._permits.release(num_steps)

    def _steps(self, bases: Sequence[int], chunks: range, go_on: GoOn) -> Iterator[tuple[str, int]]:
        for step in ((chr(bases[0]), chunk) for chunk in chunks):
            if not go_on():
                return
            self.threads.add(threading.current_thread().name)
            self.steps.append(step)
            self._begun.release()
            if not self._is_open:
                assert self._permits.acquire(timeout=DEADLINE_S)
            if step in self.broken:
                raise OSError(5, "the device broke")
            yield step


@dataclass
class Done:
    """What became of the jobs."""

    jobs: list[Job] = field(default_factory=list)
    threads: set[str] = field(default_factory=set)

    def __call__(self, job: Job) -> None:
        self.threads.add(threading.current_thread().name)
        self.jobs.append(job)


@pytest.fixture
def device() -> ScriptedDevice:
    return ScriptedDevice()


@pytest.fixture
def executor(device: ScriptedDevice) -> Iterator[Executor]:
    executor = Executor(device, queue_max=4)
    yield executor
    device.let(1000)
    executor.close()


def make_job(name: str, direction: Direction, num_chunks: int, done: Done, **more) -> Job:
    plan = CopyPlan(direction, GROUP, np.zeros((num_chunks, 1), np.int64), np.zeros(num_chunks, np.int64), 0)
    sums = [f"sum{chunk}".encode() for chunk in range(num_chunks)] if direction is Direction.SCATTER else []
    return Job(plan, [ord(name)], done, checksums=sums, **more)


def test_loads_overtake_stores_between_chunks(device: ScriptedDevice, executor: Executor):
    """A load that comes while a store is running waits for one chunk of it, and for no other store."""
    done = Done()
    executor.submit(make_job("s", Direction.GATHER, 3, done))
    executor.submit(make_job("t", Direction.GATHER, 1, done))
    device.wait_begun()
    executor.submit(make_job("a", Direction.SCATTER, 2, done))
    executor.submit(make_job("b", Direction.SCATTER, 1, done))
    device.let(100)
    wait_until(lambda: len(done.jobs) == 4)
    assert device.steps == [
        ("s", 0), ("a", 0), ("a", 1), ("b", 0), ("s", 1), ("s", 2), ("t", 0),
    ]  # fmt: skip


@pytest.mark.parametrize("direction", Direction, ids=lambda direction: direction.value)
def test_a_cancelled_job_begins_no_further_chunk(device: ScriptedDevice, executor: Executor, direction: Direction):
    """What has begun is finished, nothing more is copied, and the job is done, as far as it came."""
    done = Done()
    job = make_job("x", direction, 3, done)
    executor.submit(job)
    device.wait_begun()
    job.is_cancelled = True
    assert not done.jobs
    device.let(100)
    wait_until(lambda: done.jobs)
    assert device.steps == [("x", 0)]
    assert job.num_done == 1


def test_a_job_past_its_deadline_begins_no_chunk(device: ScriptedDevice, executor: Executor):
    """A late load writes nothing; one whose deadline is far away writes all."""
    done = Done()
    device.let(100)
    executor.submit(make_job("x", Direction.SCATTER, 2, done, deadline=time.monotonic() - 1e-3))
    executor.submit(make_job("y", Direction.SCATTER, 2, done, deadline=time.monotonic() + 1e3))
    wait_until(lambda: len(done.jobs) == 2)
    assert device.steps == [("y", 0), ("y", 1)]
    assert [job.num_done for job in done.jobs] == [0, 2]


def test_a_deadline_ends_a_job_between_chunks(device: ScriptedDevice, executor: Executor):
    """A deadline that passes during a chunk lets that chunk land, and no other begin."""
    done = Done()
    job = make_job("x", Direction.SCATTER, 2, done, deadline=time.monotonic() + 0.02)
    executor.submit(job)
    device.wait_begun()
    wait_until(lambda: time.monotonic() > (job.deadline or 0))
    device.let(100)
    wait_until(lambda: done.jobs)
    assert (device.steps, job.num_done) == ([("x", 0)], 1)


def test_a_full_queue_refuses(device: ScriptedDevice, executor: Executor):
    """The job behind the last place is refused with the bound; it is taken when a place is free again."""
    done = Done()
    for name in "abcd":
        executor.submit(make_job(name, Direction.GATHER, 1, done))
    refused = make_job("e", Direction.SCATTER, 1, done)
    with pytest.raises(Overloaded, match="4 copies are queued on device 'scripted'"):
        executor.submit(refused)
    device.let(1)
    wait_until(lambda: done.jobs)
    executor.submit(refused)
    device.let(100)
    wait_until(lambda: len(done.jobs) == 5)
    assert sorted(chr(job.bases[0]) for job in done.jobs) == ["a", "b", "c", "d", "e"]


def test_a_device_that_fails_ends_one_job(device: ScriptedDevice, executor: Executor):
    """A job whose copy raises is done and counts as not copied since its last pause; the next job runs."""
    done = Done()
    device.broken = {("x", 1), ("y", 0)}
    device.let(100)
    executor.submit(make_job("x", Direction.GATHER, 3, done))
    executor.submit(make_job("y", Direction.SCATTER, 1, done))
    executor.submit(make_job("z", Direction.GATHER, 2, done))
    wait_until(lambda: len(done.jobs) == 3)
    found = {chr(job.bases[0]): (job.num_done, job.failed) for job in done.jobs}
    assert found == {"x": (0, []), "y": (0, []), "z": (2, [])}
    sums = {chr(job.bases[0]): job.checksums for job in done.jobs}
    assert (sums["x"], sums["z"]) == ([], [b"z0", b"z1"])


def test_wrong_chunks_are_named_exactly(device: ScriptedDevice, executor: Executor):
    """A load names the chunks that do not match, counted from its first."""
    done = Done()
    device.wrong = {("x", 0), ("x", 2)}
    device.let(100)
    executor.submit(make_job("x", Direction.SCATTER, 4, done))
    wait_until(lambda: done.jobs)
    assert (done.jobs[0].failed, done.jobs[0].num_done) == ([0, 2], 4)


def test_calls_run_before_further_chunks(device: ScriptedDevice, executor: Executor):
    """A call waits for the chunk that is running, and for nothing else."""
    done = Done()
    executor.submit(make_job("x", Direction.SCATTER, 2, done))
    device.wait_begun()
    executor.call(lambda: device.steps.append((threading.current_thread().name, 0)))
    device.let(100)
    wait_until(lambda: done.jobs)
    assert device.steps == [("x", 0), ("kvist-scripted", 0), ("x", 1)]


def test_a_governor_is_asked_before_every_chunk():
    """A chunk is copied when its turn has come, one turn for each; closing waits for no turn."""
    device = ScriptedDevice(is_open=True)
    turns: list[tuple[int, int]] = []

    class Slow(Governor):
        def turn(self, now: float, nbytes: int) -> float:
            turns.append((nbytes, len(device.steps)))
            return 0.001 if len(turns) < 3 else 1000.0

    executor = Executor(device, queue_max=10, governor=Slow(1.0))
    done = Done()
    executor.submit(make_job("x", Direction.GATHER, 6, done))
    wait_until(lambda: len(turns) == 3)
    assert device.steps == [("x", 0), ("x", 1)]
    executor.close()
    assert done.jobs[0].num_done == 6
    assert turns == [(16, 0), (16, 1), (16, 2)]


@pytest.mark.parametrize("direction", list(Direction))
def test_steps_are_let_in_while_the_engine_computes(direction: Direction):
    """A copy shares the link from the begin of a step that computes to that of one that does not; only stores wait."""
    device, governor = ScriptedDevice(is_open=True), Governor(1.0)
    turns: list[int] = []
    governor.turn = lambda now, nbytes: turns.append(nbytes) or 0.0  # type: ignore[method-assign, func-returns-value]
    executor = Executor(device, queue_max=10, governor=governor)
    done = Done()
    executor.submit(make_job("x", direction, 1, done))
    wait_until(lambda: done.jobs)
    for is_computing in (True, False):
        governor.begin_step(is_computing=is_computing)
        done = Done()
        executor.submit(make_job("x", direction, 2, done))
        wait_until(done.jobs.__len__)
    executor.close()
    assert device.is_shared == [False, True, False]
    assert len(turns) == (5 if direction is Direction.GATHER else 0)


def test_a_job_cancelled_while_it_waits_copies_no_more():
    """A turn that comes after the job's end is not taken."""
    device = ScriptedDevice(is_open=True)
    job: Job | None = None

    class CancelsMeanwhile(Governor):
        def turn(self, now: float, nbytes: int) -> float:
            if device.steps:
                assert job is not None
                job.is_cancelled = True
            return 0.001

    executor = Executor(device, queue_max=10, governor=CancelsMeanwhile(1.0))
    done = Done()
    job = make_job("x", Direction.GATHER, 6, done)
    executor.submit(job)
    wait_until(lambda: done.jobs)
    executor.close()
    assert job.num_done == 1


def test_close_finishes_what_is_queued(device: ScriptedDevice):
    """After ``close``, every job is done, on the device's own thread, and that thread is gone. Twice is harmless."""
    executor = Executor(device, queue_max=10)
    done = Done()
    for name in "abc":
        executor.submit(make_job(name, Direction.GATHER, 2, done))
    device.let(100)
    executor.close()
    executor.close()
    assert [job.num_done for job in done.jobs] == [2, 2, 2]
    assert device.threads == done.threads == {"kvist-scripted"}
    assert "kvist-scripted" not in {thread.name for thread in threading.enumerate()}
    with pytest.raises(AssertionError):
        executor.submit(make_job("d", Direction.GATHER, 1, done))


@settings(max_examples=30)
@given(
    st.lists(
        st.tuples(
            st.sampled_from(Direction),
            st.integers(1, 4),
            st.sampled_from(["", "cancelled", "late", "broken"]),
        ),
        max_size=12,
    )
)
def test_every_job_is_done_exactly_once(wishes: list[tuple[Direction, int, str]]):
    """Whatever is asked, cancelled, late or broken: one completion a job, and no chunk is copied twice."""
    device = ScriptedDevice(is_open=True)
    executor = Executor(device, queue_max=100)
    done = Done()
    jobs = {}
    for number, (direction, num_chunks, fate) in enumerate(wishes):
        name = chr(ord("A") + number)
        job = jobs[name] = make_job(name, direction, num_chunks, done, deadline=0.0 if fate == "late" else None)
        if fate == "broken":
            device.broken.add((name, num_chunks - 1))
        executor.submit(job)
        job.is_cancelled = fate == "cancelled"
    executor.close()
    assert sorted(chr(job.bases[0]) for job in done.jobs) == sorted(jobs)
    assert len(set(device.steps)) == len(device.steps)
    for (_, num_chunks, fate), (name, job) in zip(wishes, jobs.items(), strict=True):
        copied = sum(step[0] == name for step in device.steps)
        assert job.num_done == (0 if fate == "broken" else copied)
        assert fate != "" or copied == num_chunks
        assert fate != "late" or copied == 0
