"""How an engine's KV memory comes into the daemon's hands, and how it is let go.

The law: a registration is checked whole before anything is opened, and a refused one leaves nothing mapped, open or
watched. Memory is mapped and unmapped on its device's thread, once each. Descriptors that came ahead of a registration
are closed when it was carried out or refused, or when the session ends. An engine that copies for itself hands nothing
over: it is given the pool, and its process is watched from then on.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from kvist.errors import AlreadyRegistered, FenceError, FenceRefused, LayoutError, LayoutRefused, Malformed, PoolKept
from kvist.model.handles import ENGINE, MemoryHandle
from kvist.model.rows import RowMemory
from kvist.server.lanes import Lane
from kvist.server.orders import Orders
from kvist.server.parsing import close_all, duplicate_all, parse_layout, parse_texts
from kvist.server.runtime import Runtime
from kvist.server.sessions import Registration, Session
from kvist.storage.slots import SlotAllocator
from kvist.wire import messages as wire
from kvist.wire.codec import FDS_MAX, KEPT_FDS_MAX

logger = logging.getLogger(__name__)

_CHUNK_ROWS_MAX = 1 << 22
"""Most rows of one chunk: what a copy of it costs beyond its bytes."""
_BLOCK_NBYTES_MAX = 1 << 30
"""Most bytes of one block: devices count inside a block with 32 bits."""


class Registrar:
    """Registers sessions and lets go of what they have registered. Used by the loop alone."""

    def __init__(
        self, runtime: Runtime, slots: SlotAllocator, *, pool_nbytes: int, orders_max: int,
        on_over: Callable[[Session], None],
    ) -> None:  # fmt: skip
        """``on_over`` is told when the opening of a session's memory has ended, one way or the other."""
        self._runtime = runtime
        self._slots = slots
        self._pool_nbytes = pool_nbytes
        self._orders_max = orders_max
        self._on_over = on_over

    def keep(self, session: Session, request: wire.Descriptors, fds: Sequence[int]) -> wire.Received:
        """Keep duplicates of ``fds``, which stay the caller's, for the registration to come.

        Raises:
            AlreadyRegistered: the session has memory registered, or is about to.
            LayoutRefused: there would be more than ``KEPT_FDS_MAX``.
            Malformed: there are none.
            OSError: this process has no room for them.
        """
        _check_is_new(session)
        if not fds:
            raise Malformed(f"a request to keep descriptors, and none have come; {len(session.kept_fds)} are kept")
        if len(session.kept_fds) + len(fds) > KEPT_FDS_MAX:
            raise LayoutRefused(
                f"{len(session.kept_fds)} descriptors are kept and {len(fds)} have come; at most {KEPT_FDS_MAX} are "
                f"kept for one registration"
            )
        session.kept_fds += duplicate_all(fds)
        return wire.Received(request.id, len(session.kept_fds))

    def drop_kept(self, session: Session) -> None:
        """Close what is kept for a registration: one frame's worth now, the rest in turns with everybody's requests."""
        kept, session.kept_fds = session.kept_fds, []
        self._close_in_turns(kept)

    def register(self, session: Session, request: wire.Register, fds: Sequence[int]) -> None:
        """Check a registration and carry it out; the reply follows. ``fds`` stay the caller's.

        Descriptors that were kept are this method's when it returns, and the session's still if it raises.

        Raises:
            AlreadyRegistered: the session has memory registered, or is about to.
            LayoutRefused: the layout contradicts itself or its memory, or is not served.
            Malformed: descriptors are missing or too many.
            OSError: this process has no room for duplicates of ``fds``.
        """
        _check_is_new(session)
        rows, handles = parse_layout(request)
        lanes = {handle.lane for handle in handles}
        if len(lanes) != 1:
            raise LayoutRefused(f"memory on {sorted(lanes)}; one worker's memory lies on one device")
        lane = None if handles[0].kind == ENGINE else self._runtime.lanes[lanes.pop()]
        num_fds = sum(handle.num_fds for handle in handles)
        num_come = len(session.kept_fds) + len(fds)
        if num_come != num_fds:
            raise Malformed(f"{len(handles)} allocations with {num_fds} file descriptors, and {num_come} have come")
        for held in rows:
            self._check_chunks(held)
        opening = _Opening(rows, handles, parse_texts(request))
        if lane is None:
            self._register_engine(session, request, opening)
        else:
            self._open_memory(session, request, opening, (lane, fds))

    def let_go(self, session: Session, on_gone: Callable[[], None]) -> None:
        """Unmap what a session has registered, then call back. The caller knows that nothing copies there any more."""
        registration, session.registration = session.registration, None
        if registration is None or isinstance(registration.lane, Orders):
            on_gone()
            return
        lane = registration.lane

        def on_device_thread() -> None:
            if registration.fence is not None:
                lane.device.close_fence(registration.fence)
            for handle, base in zip(registration.handles, registration.bases, strict=True):
                lane.device.close_memory(base, handle.nbytes)
            self._runtime.post(on_gone)

        lane.loads.call(on_device_thread)

    def _close_in_turns(self, fds: list[int]) -> None:
        close_all(fds[:FDS_MAX])
        if len(fds) > FDS_MAX:
            self._runtime.post(lambda: self._close_in_turns(fds[FDS_MAX:]))

    def _check_chunks(self, held: RowMemory) -> None:
        """Refuse chunks that are not served."""
        try:
            self._slots.check_fits(held.chunk_nbytes)
        except LayoutError as error:
            raise LayoutRefused(str(error)) from error
        num_runs = held.group.num_rows * held.blocks_per_chunk
        if held.group.block_nbytes > _BLOCK_NBYTES_MAX:
            raise LayoutRefused(f"a block of {held.group.block_nbytes} bytes; at most {_BLOCK_NBYTES_MAX}")
        if num_runs > _CHUNK_ROWS_MAX:
            raise LayoutRefused(f"a chunk of {num_runs} rows is over the limit of {_CHUNK_ROWS_MAX}")

    def _register_engine(self, session: Session, request: wire.Register, opening: _Opening) -> None:
        """Let an engine copy for itself: it gets the pool, and the daemon its word."""
        if self._runtime.pool_fd is None:
            raise PoolKept(
                f"the worker of {opening.rows[0].row} wants to copy for itself, and this daemon gives no engine its "
                f"pool (--isolate); use the daemon lane"
            )
        process = self._runtime.watch(session.peer.pid)
        lane = Orders(process, session.send, queue_max=self._orders_max)
        registration = opening.registration((), lane, None)
        session.registration = registration
        _log_registered(session, registration)
        # Last, because a peer that is gone ends its session here.
        reply = wire.Registered(request.id, _chunk_nbytes(registration), self._pool_nbytes)
        session.send_with_fds(reply, [self._runtime.pool_fd])

    def _open_memory(
        self, session: Session, request: wire.Register, opening: _Opening, where: tuple[Lane, Sequence[int]]
    ) -> None:
        """Map the memory on its device's thread; the reply follows."""
        lane, own_fds = where[0], [*session.kept_fds, *duplicate_all(where[1])]
        session.kept_fds = []
        session.is_registering = True
        session.num_unanswered += 1

        def on_device_thread() -> None:
            bases: list[int] = []
            fence: object | None = None
            refusal: LayoutRefused | FenceRefused | None = None
            try:
                left = iter(own_fds)
                for handle in opening.handles:
                    fds_of_handle = list(itertools.islice(left, handle.num_fds))
                    bases.append(lane.device.open_memory(handle, fds_of_handle))
                for held in opening.rows:
                    lane.device.prepare(held.group, held.blocks_per_chunk, bases)
                fence = lane.device.open_fence(request.fence) if request.fence else None
            except LayoutError as error:
                refusal = (FenceRefused if isinstance(error, FenceError) else LayoutRefused)(str(error))
                for handle, base in zip(opening.handles, bases, strict=False):
                    lane.device.close_memory(base, handle.nbytes)
            finally:
                close_all(own_fds)
            found = refusal or opening.registration(tuple(bases), lane, fence)
            self._runtime.post(lambda: self._opened(session, request.id, found))

        lane.loads.call(on_device_thread)

    def _opened(self, session: Session, request_id: int, found: Registration | LayoutRefused | FenceRefused) -> None:
        session.is_registering = False
        if isinstance(found, Registration):
            session.registration = found
            session.answer(wire.Registered(request_id, _chunk_nbytes(found)))
            _log_registered(session, found)
        else:
            session.answer(wire.Error(request_id, found.code, str(found)))
        self._on_over(session)


@dataclass(frozen=True, slots=True)
class _Opening:
    """A registration that is checked and not mapped yet."""

    rows: tuple[RowMemory, ...]
    handles: tuple[MemoryHandle, ...]
    texts: tuple[str, ...]

    def registration(self, bases: tuple[int, ...], lane: Lane | Orders, fence: object | None) -> Registration:
        return Registration(self.rows, self.handles, bases, lane, fence, self.texts)


def _check_is_new(session: Session) -> None:
    if session.registration is not None or session.is_registering:
        raise AlreadyRegistered(f"session {session.id} has registered its KV memory; connect anew to do it again")


def _chunk_nbytes(registration: Registration) -> list[int]:
    return [held.chunk_nbytes for held in registration.rows]


def _log_registered(session: Session, registration: Registration) -> None:
    rows = [f"{group}:{shard}" for group, shard in (held.row for held in registration.rows)]
    logger.info(
        "registered session=%d pid=%d rows=%s memory=%s chunk_nbytes=%s",
        session.id, session.peer.pid, ",".join(rows), registration.handles[0].lane, _chunk_nbytes(registration),
    )  # fmt: skip
