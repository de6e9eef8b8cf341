"""The engine lane: threads of ours in the engine's process, which talk to the daemon and copy to and from its pool.

The laws: the engine's own thread hands requests over and never waits. A slot is touched only between the daemon's order
and our answer to it, and every order is answered for as long as its connection stands; but a load may read the slots
that its lease says ahead of the order, and counts if the order then says the same. A request is over only when
nothing of ours can touch its blocks any more: its copy has landed, or was never begun. The lane's thread waits for no
copy and for no device, until it ends.
"""

from __future__ import annotations

import contextlib
import logging
import os
import select
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Final, Protocol

import numpy as np

from kvist.client.client import Build, Client, Pending
from kvist.client.planning import Places, plan_load, plan_order, reply_to, request_blocks
from kvist.client.pool import LaneMemory, MakeDevice, OpenPool
from kvist.errors import KvistError, LayoutError, Unreachable, refusal
from kvist.model.layout import Int64s
from kvist.model.rows import RowMemory
from kvist.model.transfer import CopyPlan, Direction, split_checksums
from kvist.transfer.executor import Job
from kvist.transfer.governor import Governor
from kvist.wire import messages as wire

logger = logging.getLogger(__name__)

_SUBMITTED_MAX: Final = 1024
"""Requests that the lane's thread has not taken yet."""
_UNSENT_MS: Final = 100
"""How often what the daemon did not read at once is sent again, and how exactly deadlines are kept."""
_IDLE_MS: Final = 1000
"""How often an idle lane looks whether its process is about to exit."""


class Fences(Protocol):
    """Marks the work that the engine has given to its accelerator so far."""

    def record(self) -> object:
        """Return a mark that stands behind everything given until now, on the calling thread's stream."""
        ...

    def give_back(self, fence: object) -> None:
        """Use a mark again for something else. May be called from any thread."""
        ...


@dataclass(slots=True, eq=False)
class _Task:
    """One request on its way. Only the lane's thread writes to it, once it was handed over."""

    build: Build
    outer: Pending
    """What the engine's thread looks at."""
    fence: object | None
    request: wire.Request | None = None
    block_ids: Int64s | None = None
    """Those of the request, checked."""
    inner: Pending | None = None
    """What was sent last for it; None when there is nothing left to do."""
    job: Job | None = None
    """The copy that is running."""
    places: Places | None = None
    """What a copy was begun with that no order has confirmed yet."""
    landed: Job | None = None
    """The copy, when it is over. The device's thread writes it."""
    connection: int = 0
    """Which one its order came over."""
    answer: Callable[[int], wire.CopyDone] | None = None
    """What the daemon is told of its order."""
    is_faulty: bool = False


class EngineLane:
    """Has the face of a ``Client``; carries the daemon's copy orders out."""

    def __init__(
        self, client: Client, memory: LaneMemory, make_device: MakeDevice, fences: Fences,
        governor: Governor | None = None,
    ) -> None:  # fmt: skip
        """Start. ``client`` is this lane's from now on; ``make_device`` runs on a thread of the lane.

        A ``governor`` spaces stores.
        """
        self._client = client
        self._governor = governor
        self._memory = memory
        self._make_device = make_device
        self._fences = fences
        self._submitted: deque[_Task] = deque()
        self._copied: deque[_Task] = deque()
        self._tasks: list[_Task] = []
        self._registered: wire.Registered | wire.Error | None = None
        """The registration that ``_pool``, or ``_opening``, belongs to."""
        self._pool: OpenPool | None = None
        self._opening: Future[OpenPool] | None = None
        self._opener = ThreadPoolExecutor(1, thread_name_prefix="kvist-pool")
        """Opens and closes pools, one after another: to pin one takes long, and to close one is to wait for copies."""
        self._outcome: wire.Registered | KvistError | None = None
        """What became of the registration: a pool that is open, or why there is none."""
        self._changed = threading.Event()
        self._gate = threading.Lock()
        """Guards ``_is_closing``: behind it nothing is submitted and ``_wake_fd`` is not used any more."""
        self._is_closing = False
        self._wake_fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._thread = threading.Thread(target=self._run, name="kvist-lane")
        self._thread.start()

    # ── called by the engine's thread ───────────────────────────────────────────────────────────────────────────

    def submit(self, build: Build) -> Pending:
        """Hand a request over; its copy waits for what the calling thread's stream has been given."""
        return self._hand_over(build, None)

    def load(self, build: Build, places: Places) -> Pending:
        """Hand a retrieve over and begin it at once, since its lease has told where the chunks lie."""
        return self._hand_over(build, places)

    def _hand_over(self, build: Build, places: Places | None) -> Pending:
        with self._gate:
            if self._is_closing or len(self._submitted) >= _SUBMITTED_MAX:
                return Pending(0, time.monotonic(), is_lost=True)
            task = _Task(build, Pending(0, time.monotonic()), self._fences.record())
            if places is not None and self._pool is not None:
                self._copy_ahead(task, places, self._pool)
            self._submitted.append(task)
            self._wake()
        return task.outer

    def _copy_ahead(self, task: _Task, places: Places, pool: OpenPool) -> None:
        """Begin a load before it is ordered: its lease holds the chunks, and the order will say where they lie."""
        request = task.build(0)
        assert isinstance(request, wire.Retrieve), request
        task.request = request
        try:
            plan = plan_load(request, places, self._held(request), pool.nbytes)
            # Set before the copy begins, for it may land before ``submit`` returns, and must not count by itself.
            task.job = self._job(task, request, plan, range(plan.num_chunks), places.checksums)
            task.places = places
            pool.submit(task.job)
        except KvistError as error:
            logger.warning("copy not begun ahead of its order: %s", error)
            task.job = task.places = None

    def poll(self, timeout_s: float = 0.0) -> None:
        """Return when something has ended, or after ``timeout_s``. Requests end without it."""
        if timeout_s > 0:
            self._changed.wait(timeout_s)
        self._changed.clear()

    def register(self, deadline_s: float) -> wire.Registered:
        """Return the daemon's answer to the registration.

        Raises:
            Refused: the daemon will not have it; says why.
            LayoutError: the device cannot copy such memory.
            DeviceError: the device cannot be used.
            Unreachable: no daemon, or no answer in time. The lane goes on trying when there is something to send.
        """
        ping = self.submit(wire.Ping)
        end = time.monotonic() + deadline_s
        while self._outcome is None and not ping.is_lost and (left := end - time.monotonic()) > 0:
            self.poll(left)
        outcome = self._outcome
        if isinstance(outcome, KvistError):
            raise outcome
        if outcome is None:
            late = f"the kvist daemon at {self._client.path} has not answered the registration in time"
            raise Unreachable(self._client.failure or late)
        return outcome

    def close(self) -> None:
        """Finish the chunks that are being copied, leave the daemon, and end the threads. Idempotent.

        Takes as long as the copies, and at most the client's deadline longer.
        """
        with self._gate:
            if not self._is_closing:
                self._is_closing = True
                self._wake()
        self._thread.join()

    # ── the lane's thread ───────────────────────────────────────────────────────────────────────────────────────

    def _run(self) -> None:
        try:
            # An engine that exits without a word must not wait for this thread.
            while not self._is_closing and threading.main_thread().is_alive():
                self._wait()
                self._step()
        finally:
            self._leave()

    def _wait(self) -> None:
        """Return when there is something to do."""
        poll = select.poll()
        poll.register(self._wake_fd, select.POLLIN)
        if (fd := self._client.fileno) >= 0:
            poll.register(fd, select.POLLIN)
        poll.poll(_UNSENT_MS if self._tasks else _IDLE_MS)
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self._wake_fd)

    def _step(self) -> None:
        num_copied = len(self._copied)
        with self._gate:  # A copy that was begun ahead may land before its request is handed over.
            pass
        try:
            while self._submitted:
                self._guard(self._begin, self._submitted.popleft())
            self._client.poll()
            self._take_registration()
        except Exception:  # The thread's boundary: a connection that meets a fault is given up, the lane goes on.
            logger.exception("fault in the engine lane")
            self._client.close()
        for _ in range(num_copied):
            self._guard(self._report, self._copied.popleft())
        for task in self._tasks:
            self._guard(self._advance, task)
        self._tasks = [task for task in self._tasks if task.inner is not None or task.job is not None]

    def _guard(self, act: Callable[[_Task], None], task: _Task) -> None:
        try:
            act(task)
        except Exception:  # The boundary of one request: it is lost, the others go on. An order of it is declined.
            logger.exception("fault in the engine lane")
            if task.job is not None:  # It is over when that has landed.
                task.job.is_cancelled, task.inner = True, None
                return
            if task.is_faulty:
                task.inner = None
            task.is_faulty = True
            self._end(task, None)

    def _begin(self, task: _Task) -> None:
        def build(number: int) -> wire.Request:
            task.request = task.build(number)
            return task.request

        self._tasks.append(task)
        task.inner = self._client.submit(build)
        if task.job is None and isinstance(task.request, wire.Retrieve | wire.Store):  # While the order is on its way.
            with contextlib.suppress(KvistError):  # Met again when it has come, and declined.
                task.block_ids = request_blocks(task.request, self._held(task.request))

    def _advance(self, task: _Task) -> None:
        """Do what the daemon's answer asks for; nothing while a copy is running that was ordered."""
        if task.places is not None:
            self._confirm(task, task.places)
        if task.job is not None or task.inner is None:
            return
        if not task.inner.is_over:
            self._end_if_late(task)
        elif isinstance(task.inner.reply, wire.CopyOrder):
            self._take_order(task, task.inner.connection, task.inner.reply)
        elif task.inner.is_lost and task.answer is not None and task.connection == self._client.connection:
            self._send_answer(task)  # It could not be sent, and without it the daemon would keep the slots.
        else:
            reply, task.inner = task.inner.reply, None
            self._end(task, reply)

    def _confirm(self, task: _Task, places: Places) -> None:
        """Let a copy that was begun ahead count, if its order has come and says the same.

        Any other answer cancels it, and is taken when it has landed, as if there had been no copy.
        """
        inner = task.inner
        if inner is None or not inner.is_over:
            return
        order, is_current = inner.reply, inner.connection == self._client.connection
        is_wanted = is_current and not task.outer.is_over
        if is_wanted and isinstance(order, wire.CopyOrder) and places.is_order(order):
            task.connection, task.places = inner.connection, None
            if task.landed is not None:
                self._tell(task, task.landed)
                if task.job is None:
                    self._answer_copied(task, task.landed)
        elif task.job is not None:
            task.job.is_cancelled = True
        else:
            task.places = task.landed = None

    def _end_if_late(self, task: _Task) -> None:
        """Nobody has touched the blocks of a request without an order; after its deadline nobody will."""
        if time.monotonic() - task.outer.sent_at > self._client.deadline_s:
            self._end(task, None)

    def _take_order(self, task: _Task, connection: int, order: wire.CopyOrder) -> None:
        task.connection = connection
        if connection != self._client.connection:
            task.inner = None  # Its slots lie in a pool that this is no longer, and nobody hears an answer.
            self._end(task, None)
        elif task.outer.is_over:
            self._answer(task, lambda number: wire.CopyDone(number, order.id, 0))
        elif self._opening is not None:
            self._end_if_late(task)
        else:
            self._copy(task, order)

    def _copy(self, task: _Task, order: wire.CopyOrder) -> None:
        """Give an order to the device; answer at once that nothing of it was copied if that cannot be."""
        try:
            if self._pool is None:
                raise Unreachable(f"the pool of order {order.id} is not open")
            request = task.request
            assert isinstance(request, wire.Retrieve | wire.Store), request
            held, block_ids = self._held(request), task.block_ids
            if block_ids is None:
                block_ids = request_blocks(request, held)
            plan = plan_order(request, block_ids, order, held, self._pool.nbytes)
            positions = np.frombuffer(order.positions, dtype="<i4").tolist()
            self._pool.submit(job := self._job(task, request, plan, positions, order.checksums))
            task.job = job  # Its landing is reported on this thread.
        except KvistError as error:
            logger.warning("copy not begun: %s", error)
            self._answer(task, lambda number: wire.CopyDone(number, order.id, 0))

    def _job(
        self, task: _Task, request: wire.Retrieve | wire.Store, plan: CopyPlan, positions: Sequence[int],
        checksums: bytes,
    ) -> Job:  # fmt: skip
        deadline = None
        if isinstance(request, wire.Retrieve) and request.deadline_ms:
            deadline = task.outer.sent_at + request.deadline_ms / 1e3
        return Job(
            plan, self._memory.bases, on_done=lambda job: self._copied_by_device(task, job), deadline=deadline,
            positions=positions, fence=task.fence, checksums=split_checksums(checksums),
        )  # fmt: skip

    def _held(self, request: wire.Retrieve | wire.Store) -> RowMemory:
        """Return the row, or its tails, that a request names: the daemon orders no copy of one that there is not."""
        return self._memory.rows[request.row].tail(request.tail_blocks)

    def _copied_by_device(self, task: _Task, job: Job) -> None:
        """Run on the device's thread when a copy has landed: the engine need not wait for the daemon to hear of it."""
        task.landed = job
        if task.places is None:  # Else the lane's thread tells, which looks at ``landed`` after it has set this.
            self._tell(task, job)
        self._copied.append(task)
        self._wake()

    def _tell(self, task: _Task, job: Job) -> None:
        """Tell the engine what became of a copy that was ordered."""
        assert isinstance(task.request, wire.Retrieve | wire.Store), task.request
        task.outer.reply = reply_to(task.request, self._held(task.request), job)
        self._changed.set()

    def _report(self, task: _Task) -> None:
        """Tell the daemon what became of an order, unless it has not come yet, or nobody waits for its answer."""
        job, task.job = task.job, None
        assert job is not None
        if task.inner is None:
            self._end(task, None)
        elif task.places is None:
            self._answer_copied(task, job)

    def _answer_copied(self, task: _Task, job: Job) -> None:
        assert task.request is not None
        is_load = job.plan.direction is Direction.SCATTER
        order, checksums = task.request.id, b"" if is_load else b"".join(job.checksums)
        failed = job.failed if is_load else []
        self._answer(task, lambda number: wire.CopyDone(number, order, job.num_done, checksums, failed))
        self._give_fence_back(task)

    def _answer(self, task: _Task, answer: Callable[[int], wire.CopyDone]) -> None:
        task.answer = answer
        self._send_answer(task)

    def _send_answer(self, task: _Task) -> None:
        assert task.answer is not None
        task.inner = self._client.submit(task.answer, even_if_late=True, connection=task.connection)

    def _give_fence_back(self, task: _Task) -> None:
        fence, task.fence = task.fence, None
        if fence is not None:
            self._fences.give_back(fence)

    def _end(self, task: _Task, reply: wire.Reply | None) -> None:
        """Call a request over that no copy is running for; answered, unless ``reply`` is None."""
        if not task.outer.is_over:
            task.outer.reply = reply
            task.outer.is_lost = reply is None
            self._changed.set()
        self._give_fence_back(task)

    # ── the pool ────────────────────────────────────────────────────────────────────────────────────────────────

    def _take_registration(self) -> None:
        """Open the pool of a daemon that has registered this process; close that of a connection that is over."""
        registered = self._client.registration
        if registered is not self._registered:
            self._retire_pool()
            self._registered = registered
            if isinstance(registered, wire.Error):
                self._outcome = refusal(registered.code, registered.detail)
            elif registered is not None:
                fds, nbytes = self._client.take_fds(), registered.pool_nbytes
                self._opening = self._opener.submit(
                    OpenPool, fds, nbytes, self._make_device, self._memory, self._governor
                )
                self._opening.add_done_callback(lambda _: self._wake())
            self._changed.set()
        if self._opening is not None and self._opening.done():
            opening, self._opening = self._opening, None
            self._take_pool(opening)

    def _take_pool(self, opening: Future[OpenPool]) -> None:
        error = opening.exception()
        if error is None:
            self._pool = opening.result()
            assert isinstance(self._registered, wire.Registered)
            self._outcome = self._registered
        elif isinstance(error, KvistError):
            self._outcome = type(error)(str(error))  # Without a traceback, whose frames hold the device.
            logger.warning("pool not opened: %s", self._outcome)
        else:
            self._outcome = LayoutError(f"fault while the pool was opened: {error!r}")
            logger.error("fault while opening the pool", exc_info=error)
        self._changed.set()

    def _retire_pool(self) -> None:
        """Let the chunks that are being copied land, and then give the pool back."""
        self._cancel_copies()
        with self._gate:  # The engine's thread submits to it.
            pool, self._pool = self._pool, None
        if pool is not None or self._opening is not None:
            self._opener.submit(_close_pool, pool, self._opening)
        self._opening = self._outcome = None

    def _cancel_copies(self) -> None:
        for task in self._tasks:
            if task.job is not None:
                task.job.is_cancelled = True

    # ── the end ─────────────────────────────────────────────────────────────────────────────────────────────────

    def _leave(self) -> None:
        with ExitStack() as stack:
            stack.callback(self._end_everything)
            stack.callback(self._client.close)
            stack.callback(self._close_pools)
            with self._gate:
                self._is_closing = True
            self._drain()

    def _drain(self) -> None:
        """Answer every order: that of a copy when it has landed, and those that are still to come."""
        for task in [*self._tasks, *self._submitted]:
            if task.job is None:
                self._guard(lambda task: self._end(task, None), task)
        self._tasks += [task for task in self._submitted if task.job is not None]
        self._submitted.clear()
        self._cancel_copies()
        end = None
        while self._tasks:
            if end is None and all(task.job is None for task in self._tasks):
                end = time.monotonic() + self._client.deadline_s
            if end is not None and time.monotonic() > end:
                logger.warning("left a daemon that does not answer path=%s", self._client.path)
                return
            self._step()
            if self._tasks:
                self._wait()

    def _close_pools(self) -> None:
        self._opener.shutdown()
        _close_pool(self._pool, self._opening)

    def _end_everything(self) -> None:
        for task in [*self._tasks, *self._submitted]:
            self._guard(lambda task: self._end(task, None), task)
        os.close(self._wake_fd)

    def _wake(self) -> None:
        with contextlib.suppress(BlockingIOError):
            os.eventfd_write(self._wake_fd, 1)


def _close_pool(pool: OpenPool | None, opening: Future[OpenPool] | None) -> None:
    """Close a pool that is open, or whose opening has ended."""
    if opening is not None and opening.exception() is None:
        pool = opening.result()
    try:
        if pool is not None:
            pool.close()
    except Exception:  # The boundary of the thread that closes pools: nobody else hears of it.
        logger.exception("pool not closed in order")
