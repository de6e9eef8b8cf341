"""One thread per device: the only place from which bytes are moved.

The laws: a load overtakes every store that it finds, between two chunks; a job that was cancelled or is past its
deadline begins no further chunk; every job is completed exactly once, and only after its last byte has landed, so
whoever waits for the completion may re-use its blocks, its slots and its mappings.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from queue import SimpleQueue

from kvist.device.base import Device
from kvist.errors import Overloaded
from kvist.model.transfer import CopyPlan, Direction
from kvist.transfer.governor import Governor

logger = logging.getLogger(__name__)


@dataclass(slots=True, eq=False)
class Job:
    """One plan on its way. Filled in by the executor's thread, read by others after ``on_done``."""

    plan: CopyPlan
    bases: Sequence[int]
    on_done: Callable[[Job], None]
    """Called on the executor's thread, once."""
    checksums: list[bytes] = field(default_factory=list)
    """Of each chunk: expected ones for a scatter, found ones after a gather."""
    positions: Sequence[int] = ()
    """Which of the request's chunks these are."""
    request_id: int = 0
    """Of the request that is answered when this is done."""
    deadline: float | None = None
    """On ``time.monotonic()``."""
    fence: object | None = None
    """What the device waits for before it touches a block, in its own terms."""
    submitted_at: float = 0.0
    is_cancelled: bool = False
    """May be set by any thread at any time."""
    num_done: int = 0
    """Chunks whose copy was carried out, from the first."""
    failed: list[int] = field(default_factory=list)
    """Of those, the ones that do not match their checksums (scatter)."""


class Executor:
    """Runs jobs and calls on one device, in a thread of its own."""

    def __init__(self, device: Device, *, queue_max: int, governor: Governor | None = None) -> None:
        """Start the thread; a ``governor`` spaces the chunks of its stores, and lets steps in between all slices.

        Loads are not spaced: somebody waits for them, and spaced they would cost the steps as much.
        """
        self._device = device
        self._governor = governor
        self._closing = threading.Event()
        self._queue_max = queue_max
        self._calls: deque[Callable[[], None]] = deque()
        self._loads: deque[Job] = deque()
        self._stores: deque[Job] = deque()
        self._wake: SimpleQueue[None] = SimpleQueue()
        """One token for whatever was submitted: a thread that has nothing to do waits for one, and looks again."""
        self._gate = threading.Lock()
        """Behind it nothing is submitted once this is closing, and no more than the queue takes."""
        self._is_closing = False
        self._thread = threading.Thread(target=self._run, name=f"kvist-{device.kind}")
        self._thread.start()

    def check_takes_work(self) -> None:
        """Make sure that the next ``submit`` has a place: the queue gets longer only by this caller's own jobs.

        Raises:
            Overloaded: ``queue_max`` jobs are queued already.
        """
        if len(self._loads) + len(self._stores) >= self._queue_max:
            raise Overloaded(f"{self._queue_max} copies are queued on device {self._device.kind!r}")

    def submit(self, job: Job) -> None:
        """Queue a job.

        Raises:
            Overloaded: ``queue_max`` jobs are queued already.
        """
        with self._gate:
            assert not self._is_closing
            self.check_takes_work()
            queue = self._loads if job.plan.direction is Direction.SCATTER else self._stores
            queue.append(job)
        self._wake.put(None)

    def call(self, function: Callable[[], None]) -> None:
        """Run ``function`` on the device's thread before any further chunk. It must not raise."""
        with self._gate:
            assert not self._is_closing
            self._calls.append(function)
        self._wake.put(None)

    def close(self) -> None:
        """Finish everything queued, without spacing it any more, then stop the thread. Idempotent."""
        self._closing.set()
        with self._gate:
            self._is_closing = True
        self._wake.put(None)
        self._thread.join()

    def _run(self) -> None:
        while True:
            if self._calls:
                self._carry_out(self._calls.popleft())
            elif queue := self._loads or self._stores:
                self._advance(queue[0], queue)
            elif self._is_closing and not (self._calls or self._loads or self._stores):
                return
            else:
                self._wake.get()

    def _carry_out(self, call: Callable[[], None]) -> None:
        try:
            call()
        except Exception:  # The thread's boundary for calls: what failed is lost, the thread goes on.
            logger.exception("call failed device=%s", self._device.kind)

    def _advance(self, job: Job, queue: deque[Job]) -> None:
        """Copy as much of a job as may be copied now; complete it if that was the rest."""
        is_over = _is_over(job)
        if not is_over:
            try:
                self._copy(job)
            except Exception:  # The thread's one boundary: a job that fails is incomplete, the thread goes on.
                logger.exception("copy failed direction=%s chunks=%d", job.plan.direction.value, job.plan.num_chunks)
                is_over = True
        if is_over or job.num_done == job.plan.num_chunks:
            queue.remove(job)
            job.on_done(job)

    def _copy(self, job: Job) -> None:
        plan = job.plan
        if job.fence is not None and not job.num_done:
            self._device.wait_for(plan.direction, job.fence)
        chunks = range(job.num_done, plan.num_chunks)
        if plan.direction is Direction.GATHER:
            checksums = self._device.gather(plan, job.bases, chunks, lambda: self._may_go_on(job), self._is_shared)
            job.checksums += checksums
            job.num_done += len(checksums)
            return
        expected = job.checksums[chunks.start :]
        is_right = self._device.scatter(
            plan, job.bases, chunks, expected, lambda: self._may_go_on(job), self._is_shared
        )
        job.failed += [chunk for chunk, right in zip(chunks, is_right, strict=False) if not right]
        job.num_done += len(is_right)

    def _may_go_on(self, job: Job) -> bool:
        """Return whether a job's next chunk may be copied, when its turn has come."""
        if self._must_pause(job):
            return False
        is_load = job.plan.direction is Direction.SCATTER
        if self._governor is None or is_load or self._closing.is_set():
            return True
        wait_s = self._governor.turn(time.monotonic(), job.plan.chunk_nbytes)
        if wait_s <= 0:
            return True
        self._closing.wait(wait_s)
        return not self._must_pause(job)

    def _is_shared(self) -> bool:
        return self._governor is not None and self._governor.is_computing

    def _must_pause(self, job: Job) -> bool:
        has_load_to_do = job.plan.direction is Direction.GATHER and bool(self._loads)
        return _is_over(job) or bool(self._calls) or has_load_to_do


def _is_over(job: Job) -> bool:
    return job.is_cancelled or (job.deadline is not None and time.monotonic() > job.deadline)
