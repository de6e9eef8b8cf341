"""Copies that an engine's own process carries out, by the daemon's order.

The daemon reserves, pins and plans; the engine copies and says so; the daemon seals. The law: a slot that an order
names is out of the daemon's hands until the engine has answered the order or its process has ended; a closed socket is
not enough, because what a killed process has given to its GPU may still be written. Only a daemon that stops gives
orders up before that, since it uses no slot again.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt

from kvist.errors import Malformed, Overloaded
from kvist.index.chunk_index import Chunk
from kvist.index.leases import Held
from kvist.model.rows import Row
from kvist.model.transfer import CHECKSUM_NBYTES, Direction, split_checksums
from kvist.transfer.executor import Job
from kvist.wire import messages as wire


class SupportsWatch(Protocol):
    """A process that can be waited for."""

    def when_ended(self, callback: Callable[[], None]) -> None:
        """Call back on the loop, once, when the process has ended; soon, if it has ended already."""
        ...

    def close(self) -> None:
        """Wait no more. Idempotent."""
        ...


class Orders:
    """The orders of one session. Has the face of an executor."""

    def __init__(self, process: SupportsWatch, send: Callable[[wire.CopyOrder], None], *, queue_max: int) -> None:
        """Send orders to an engine with ``send``, which may end its session; own the watch over its process."""
        self._process = process
        self._send = send
        self._queue_max = queue_max
        self._orders: dict[int, Job] = {}

    def executor(self, direction: Direction) -> Orders:
        """Return itself: an engine orders its copies as it likes."""
        assert direction in Direction
        return self

    def check_takes_work(self) -> None:
        """Make sure that the next ``submit`` has a place.

        Raises:
            Overloaded: the engine has not carried out what it was sent.
        """
        if len(self._orders) >= self._queue_max:
            raise Overloaded(f"{len(self._orders)} copies are ordered from the engine")

    def check_is_new(self, request_id: int) -> None:
        """Make sure that a request can be told from those whose orders are open.

        Raises:
            Malformed: it has the id of one of them.
        """
        if request_id in self._orders:
            raise Malformed(f"request id {request_id} is that of an open order")

    def submit(self, job: Job) -> None:
        """Send an order that was checked as above; ``job.on_done`` is called when it is over."""
        assert len(self._orders) < self._queue_max
        assert job.request_id not in self._orders
        self._orders[job.request_id] = job
        slots = job.plan.slot_offsets.astype("<i8").tobytes()
        positions = np.asarray(job.positions, dtype="<i4").tobytes()
        self._send(wire.CopyOrder(job.request_id, slots, positions, b"".join(job.checksums)))

    def finish(self, done: wire.CopyDone) -> None:
        """Take an order's answer in.

        Raises:
            Malformed: there is no such order, or the answer contradicts it; nothing has changed.
        """
        job = self._orders.get(done.order)
        if job is None:
            raise Malformed(f"there is no order {done.order}; {len(self._orders)} are open")
        is_gather = job.plan.direction is Direction.GATHER
        if is_gather and done.failed:
            raise Malformed(f"{len(done.failed)} chunks of a store do not match checksums that it makes itself")
        if not 0 <= done.num_done <= job.plan.num_chunks or not set(done.failed) <= set(range(done.num_done)):
            raise Malformed(f"{done.num_done} of {job.plan.num_chunks} chunks copied, of which {done.failed} failed")
        if len(done.checksums) != (done.num_done * CHECKSUM_NBYTES if is_gather else 0):
            raise Malformed(f"{len(done.checksums)} bytes of checksums of {done.num_done} chunks")
        if is_gather:
            job.checksums = split_checksums(done.checksums)
        job.num_done, job.failed, job.request_id = done.num_done, sorted(set(done.failed)), done.id
        del self._orders[done.order]
        job.on_done(job)

    def end_with_process(self) -> None:
        """Give every open order up when the process has ended."""
        if self._orders:
            self._process.when_ended(self.give_up)
        else:
            self._process.close()

    def give_up(self) -> None:
        """Call every open order over, as far as nobody knows carried out. Idempotent.

        The process has ended, or the daemon is stopping.
        """
        self._process.close()
        while self._orders:
            _, job = self._orders.popitem()
            job.on_done(job)


def places_of(rows: Mapping[Row, Held]) -> tuple[wire.RowPlaces, ...]:
    """Return where the chunks of a lease lie, but for rows whose checksums are not those of an engine that copies."""
    places = []
    for row, held in rows.items():
        checksums = b"".join([chunk.checksum for chunk in held.chunks])
        if held.chunks and len(checksums) == CHECKSUM_NBYTES * len(held.chunks):
            slots = slot_offsets(held.chunks).astype("<i8").tobytes()
            places.append(wire.RowPlaces(row.group, row.shard, held.first_chunk, slots, checksums))
    return tuple(places)


def slot_offsets(chunks: Sequence[Chunk]) -> npt.NDArray[np.int64]:
    """Return where chunks lie in the pool, shape ``[n]``."""
    return np.array([chunk.slot_offset for chunk in chunks], dtype=np.int64)
