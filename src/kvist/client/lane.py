"""The engine lane: threads of ours in the engine's process, which talk to the daemon and copy to and from its pool.

The laws: the engine's own thread hands requests over and never waits. A slot is touched only between the daemon's order
and our answer to it. A request is over only when nothing of ours can touch its blocks any more: its copy has landed, or
was never begun.
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
from dataclasses import dataclass
from typing import Final, Protocol

import numpy as np

from kvist.client.client import Build, Client, Pending
from kvist.device.base import Device
from kvist.errors import KvistError, LayoutError, Unreachable
from kvist.model.layout import LayerGroup
from kvist.model.transfer import Direction
from kvist.transfer.executor import Executor, Job
from kvist.transfer.governor import Governor
from kvist.transfer.plan import parse_block_ids, plan_copy
from kvist.wire import messages as wire

logger = logging.getLogger(__name__)

_CHECKSUM_NBYTES: Final = 8
_QUEUE_MAX: Final = 1024
_UNSENT_MS: Final = 100
"""How often what the daemon did not read at once is sent again."""


class LaneDevice(Device, Protocol):
    """A device that copies between this process's own memory and the pool."""

    def hold(self) -> None:
        """Get ready.

        Raises:
            DeviceError: it cannot be used.
        """
        ...


class Fences(Protocol):
    """Marks the work that the engine has given to its accelerator so far."""

    def record(self) -> object:
        """Return a mark that stands behind everything given until now, on the calling thread's stream."""
        ...

    def give_back(self, fence: object) -> None:
        """Use a mark again for something else. May be called from any thread."""
        ...


@dataclass(frozen=True, slots=True)
class LaneMemory:
    """What this process copies from and to."""

    group: LayerGroup
    bases: Sequence[int]
    """Address of each allocation that the group's planes name."""
    blocks_per_chunk: int


@dataclass(slots=True, eq=False)
class _Task:
    """One request on its way."""

    build: Build
    outer: Pending
    """What the engine's thread looks at."""
    fence: object | None
    request: wire.Request | None = None
    inner: Pending | None = None
    job: Job | None = None


class EngineLane:
    """Has the face of a ``Client``; carries the daemon's copy orders out."""

    def __init__(
        self, client: Client, memory: LaneMemory, make_device: Callable[[int, int], LaneDevice], fences: Fences,
        governor: Governor | None = None,
    ) -> None:  # fmt: skip
        """Start. ``client`` is this lane's from now on; ``make_device`` gets a pool's descriptor and its bytes.

        A ``governor`` spaces stores. Loads are not spaced: somebody waits for them, and they would cost decode as much.
        """
        self._governor = governor
        self._client = client
        self._memory = memory
        self._make_device = make_device
        self._fences = fences
        self._submitted: deque[_Task] = deque()
        self._copied: deque[_Task] = deque()
        self._tasks: list[_Task] = []
        self._registered: wire.Registered | wire.Error | None = None
        self._device: LaneDevice | None = None
        self._executors: dict[Direction, Executor] = {}
        self._pool_fd = -1
        self._pool_nbytes = 0
        self._failure = ""
        self._changed = threading.Event()
        self._is_closing = False
        self._wake_fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._thread = threading.Thread(target=self._run, name="kvist-lane", daemon=True)
        self._thread.start()

    # ── called by the engine's thread ───────────────────────────────────────────────────────────────────────────

    def submit(self, build: Build) -> Pending:
        """Hand a retrieve or a store over; its copy waits for what the calling thread's stream has been given."""
        task = _Task(build, Pending(0, time.monotonic()), self._fences.record())
        self._submitted.append(task)
        self._wake()
        return task.outer

    def poll(self, timeout_s: float = 0.0) -> None:
        """Return when something has ended, or after ``timeout_s``. Requests end without it."""
        if timeout_s > 0:
            self._changed.wait(timeout_s)
        self._changed.clear()

    def register(self, deadline_s: float) -> wire.Registered:
        """Return the daemon's answer to the registration.

        Raises:
            LayoutError: the daemon or the device refuses; says why.
            Unreachable: no answer in time. The lane goes on trying when there is something to send.
        """
        ping = self.submit(wire.Ping)
        end = time.monotonic() + deadline_s
        while self._is_waiting(ping) and (left := end - time.monotonic()) > 0:
            self.poll(left)
        if self._failure:
            raise LayoutError(self._failure)
        if self._device is None or not isinstance(self._registered, wire.Registered):
            raise Unreachable(f"the kvist daemon at {self._client.path} has not answered the registration in time")
        return self._registered

    def _is_waiting(self, ping: Pending) -> bool:
        return self._device is None and not self._failure and not ping.is_lost

    def close(self) -> None:
        """Finish the copies that have begun, leave the daemon, and end the threads. Idempotent."""
        self._is_closing = True
        self._wake()
        self._thread.join()

    # ── the lane's thread ───────────────────────────────────────────────────────────────────────────────────────

    def _run(self) -> None:
        poll = select.poll()
        poll.register(self._wake_fd, select.POLLIN)
        while not self._is_closing:
            fd = self._client.fileno
            if fd >= 0:
                poll.register(fd, select.POLLIN)
            poll.poll(_UNSENT_MS if self._tasks else None)
            if fd >= 0:
                poll.unregister(fd)
            with contextlib.suppress(BlockingIOError):
                os.eventfd_read(self._wake_fd)
            try:
                self._step()
            except Exception:  # The thread's one boundary: a request whose step fails is lost, the lane goes on.
                logger.exception("fault in the engine lane")
                self._give_up()
        self._close_device()
        while self._copied:
            self._report(self._copied.popleft())
        self._client.poll()  # Sends what is left to be sent: slots that nobody writes to any more.
        self._client.close()
        self._give_up()
        os.close(self._wake_fd)

    def _step(self) -> None:
        while self._submitted:
            self._begin(self._submitted.popleft())
        self._client.poll()
        self._take_registration()
        while self._copied:
            self._report(self._copied.popleft())
        for task in self._tasks:
            self._advance(task)
        self._tasks = [task for task in self._tasks if task.inner is not None]

    def _begin(self, task: _Task) -> None:
        def build(number: int) -> wire.Request:
            task.request = task.build(number)
            return task.request

        self._tasks.append(task)
        task.inner = self._client.submit(build)

    def _advance(self, task: _Task) -> None:
        """Do what the daemon's answer asks for; nothing while a copy is running."""
        if task.job is not None or task.inner is None:
            return
        if not task.inner.is_over:
            if time.monotonic() - task.outer.sent_at > self._client.deadline_s:
                self._end(task, None)  # Nobody has touched its blocks, and now nobody will.
            return
        reply = task.inner.reply
        if not isinstance(reply, wire.CopyOrder):
            self._end(task, reply)
            task.inner = None
        elif task.outer.is_over:
            self._decline(task, reply)
        else:
            self._copy(task, reply)

    def _copy(self, task: _Task, order: wire.CopyOrder) -> None:
        """Give an order to the device; answer at once that nothing of it was copied if that cannot be."""
        try:
            job = self._plan(task, order)
            if self._device is None:
                raise Unreachable(f"the pool of order {order.id} is gone")
            self._executors[job.plan.direction].submit(job)
        except KvistError as error:
            logger.warning("copy not begun: %s", error)
            self._decline(task, order)
        else:
            task.job = job

    def _decline(self, task: _Task, order: wire.CopyOrder) -> None:
        task.inner = self._client.submit(lambda number: wire.CopyDone(number, order.id, 0), even_if_late=True)

    def _plan(self, task: _Task, order: wire.CopyOrder) -> Job:
        request, memory = task.request, self._memory
        assert isinstance(request, wire.Retrieve | wire.Store), request
        num_chunks = len(request.block_ids) // (4 * memory.blocks_per_chunk)
        block_ids = parse_block_ids(
            request.block_ids, memory.group, num_chunks=num_chunks, blocks_per_chunk=memory.blocks_per_chunk
        )
        slots = np.frombuffer(order.slots, dtype="<i8").astype(np.int64)
        chunk_nbytes = memory.group.block_nbytes * memory.blocks_per_chunk
        if slots.size and not 0 <= slots.min() <= slots.max() <= self._pool_nbytes - chunk_nbytes:
            raise LayoutError(f"slots [{slots.min()}, {slots.max()}] outside a pool of {self._pool_nbytes} bytes")
        positions = np.frombuffer(order.positions, dtype="<i4")
        is_load = isinstance(request, wire.Retrieve)
        plan = plan_copy(
            Direction.SCATTER if is_load else Direction.GATHER, memory.group, block_ids[positions], slots,
            num_skipped_blocks=request.num_skipped_blocks if isinstance(request, wire.Retrieve) else 0,
        )  # fmt: skip
        deadline = None
        if isinstance(request, wire.Retrieve) and request.deadline_ms:
            deadline = task.outer.sent_at + request.deadline_ms / 1e3
        starts = range(0, len(order.checksums), _CHECKSUM_NBYTES)
        return Job(
            plan, memory.bases, on_done=lambda job: self._copied_by_device(task, job), deadline=deadline,
            checksums=[order.checksums[start : start + _CHECKSUM_NBYTES] for start in starts], fence=task.fence,
        )  # fmt: skip

    def _copied_by_device(self, task: _Task, job: Job) -> None:
        """Run on the device's thread when a copy has landed: the engine need not wait for the daemon to hear of it."""
        if job.plan.direction is Direction.SCATTER:
            failed = sorted({*job.failed, *range(job.num_done, job.plan.num_chunks)})
            task.outer.reply = wire.RetrieveReply(0, job.plan.num_chunks, failed)
        else:
            task.outer.reply = wire.StoreReply(0, job.num_done, 0, job.plan.num_chunks - job.num_done)
        self._changed.set()
        self._copied.append(task)
        self._wake()

    def _report(self, task: _Task) -> None:
        """Tell the daemon what became of an order."""
        job, request = task.job, task.request
        assert job is not None
        assert request is not None
        is_load = job.plan.direction is Direction.SCATTER
        checksums = b"" if is_load else b"".join(job.checksums)
        task.job = None
        task.inner = self._client.submit(
            lambda number: wire.CopyDone(number, request.id, job.num_done, checksums, job.failed if is_load else []),
            even_if_late=True,
        )
        self._give_fence_back(task)

    def _give_fence_back(self, task: _Task) -> None:
        if task.fence is not None:
            self._fences.give_back(task.fence)
            task.fence = None

    def _end(self, task: _Task, reply: wire.Reply | None) -> None:
        self._give_fence_back(task)
        if task.outer.is_over:
            return
        if reply is None:
            task.outer.is_lost = True
        else:
            task.outer.reply = reply
        self._changed.set()

    def _take_registration(self) -> None:
        """Open the pool of a daemon that has registered this process; close that of the one before."""
        registered = self._client.registration
        if registered is self._registered:
            return
        self._close_device()
        self._registered = registered
        if isinstance(registered, wire.Error):
            self._failure = f"{registered.code}: {registered.detail}"
        elif registered is not None:
            (self._pool_fd,) = self._client.take_fds()
            self._pool_nbytes = registered.pool_nbytes
            try:
                device = self._make_device(self._pool_fd, registered.pool_nbytes)
                device.hold()
            except KvistError as error:
                self._failure = str(error)
                self._client.close()
            else:
                self._executors = {
                    Direction.SCATTER: Executor(device, queue_max=_QUEUE_MAX),
                    Direction.GATHER: Executor(device, queue_max=_QUEUE_MAX, governor=self._governor),
                }
                self._device = device
        self._changed.set()

    def _close_device(self) -> None:
        """Let the copies that have begun land, and give the pool back."""
        executors, self._executors = self._executors, {}
        for task in self._tasks:
            if task.job is not None:
                task.job.is_cancelled = True
        for executor in executors.values():
            executor.close()
        if self._device is not None:
            self._device.close()
            self._device = None
        if self._pool_fd >= 0:
            os.close(self._pool_fd)
            self._pool_fd = -1

    def _give_up(self) -> None:
        """Call everything lost that no copy is running for."""
        for task in [*self._tasks, *self._submitted]:
            if task.job is None:
                self._end(task, None)
                task.inner = None

    def _wake(self) -> None:
        with contextlib.suppress(OSError, BlockingIOError):
            os.eventfd_write(self._wake_fd, 1)
