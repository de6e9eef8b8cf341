"""What the daemon does for each message. All control flow of a request is here.

The laws: every request gets exactly one reply, an ``Error`` if it is refused; a refused request has changed nothing.
A chunk is published only when its bytes have landed, and forgotten, with all that builds on it, when they no longer
match their checksum. One event loop calls every method of this module; copies run elsewhere and come back to it.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from kvist.errors import (
    AlreadyRegistered,
    Draining,
    InvalidBlocks,
    LayoutError,
    LayoutRefused,
    Malformed,
    NotRegistered,
    Overloaded,
    Refused,
)  # fmt: skip
from kvist.index.chunk_index import Chunk, ChunkIndex, ChunkState
from kvist.index.eviction import EvictionPolicy
from kvist.index.leases import Lease, LeaseId, LeaseTable, SessionId
from kvist.model.coverage import check_kinds, servable_chunks
from kvist.model.handles import MemoryHandle
from kvist.model.keys import Digest, chunk_keys
from kvist.model.layout import KVLayout
from kvist.model.transfer import Direction
from kvist.server.lanes import Lane
from kvist.server.parsing import (
    ROWS_MAX,
    check_lookup,
    close_all,
    duplicate_all,
    parse_blocks,
    parse_digests,
    parse_layout,
)  # fmt: skip
from kvist.server.sessions import Peer, Registration, Session, num_registered
from kvist.storage.slots import SlotAllocator
from kvist.transfer.executor import Job
from kvist.transfer.plan import plan_copy
from kvist.wire import messages as wire

logger = logging.getLogger(__name__)

_CHUNK_ROWS_MAX = 1 << 22
"""Most rows of one chunk: what a copy of it costs beyond its bytes."""
_BLOCK_NBYTES_MAX = 1 << 30
"""Most bytes of one block: devices count inside a block with 32 bits."""


class SupportsLanes(Protocol):
    """Finds the lane of a device."""

    def __getitem__(self, name: str) -> Lane:
        """Return it, or raise ``LayoutRefused``."""
        ...


@dataclass(frozen=True, slots=True)
class Runtime:
    """What the service needs from the process around it."""

    pid: int
    boot_id: str
    post: Callable[[Callable[[], None]], None]
    """Run a call on the service's loop; may be called from any thread."""
    clock: Callable[[], float]
    new_id: Callable[[], bytes]
    """Unguessable, 16 bytes."""
    lanes: SupportsLanes
    """By the name that a memory handle gives."""


class CacheService:
    """Composes index, leases, slots and executors."""

    def __init__(
        self, runtime: Runtime, slots: SlotAllocator, policy: EvictionPolicy, *, pool_nbytes: int, limits: wire.Limits
    ) -> None:
        self._runtime = runtime
        self._slots = slots
        self._index = ChunkIndex(policy, slots.free)
        self._leases = LeaseTable(self._index, ttl_s=limits.lease_ttl_s, new_id=runtime.new_id)
        self._pool_nbytes = pool_nbytes
        self._limits = limits
        self._sessions: dict[SessionId, Session] = {}
        self._session_ids = itertools.count(1)
        self._counters: Counter[str] = Counter()
        self.is_draining = False
        self._drained: asyncio.Event | None = None

    # ── sessions ────────────────────────────────────────────────────────────────────────────────────────────────

    def open_session(self, peer: Peer, hello: wire.Hello, send: Callable[[wire.Reply], None]) -> Session:
        """Begin a session; the caller has checked the peer and the protocol."""
        session = Session(SessionId(next(self._session_ids)), peer, hello.engine_id, hello.name, send)
        self._sessions[session.id] = session
        logger.info("session opened session=%d pid=%d name=%s", session.id, peer.pid, hello.name)
        return session

    def close_session(self, session: Session, on_closed: Callable[[], None]) -> None:
        """End a session: drop its leases now, finish or cancel its copies, unmap its memory, then call back."""
        if session.is_draining:
            return
        session.on_closed = on_closed
        num_leases = self._leases.release_session(session.id)
        session.cancel()
        logger.info(
            "session ending session=%d pid=%d leases=%d copies=%d",
            session.id, session.peer.pid, num_leases, len(session.jobs),
        )  # fmt: skip
        self._close_if_drained(session)

    async def wait_drained(self, timeout_s: float) -> None:
        """Return when no copy is in flight, or when the time is over."""
        self._drained = asyncio.Event()
        if not self.num_copies_in_flight:
            return
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._drained.wait(), timeout_s)

    @property
    def num_copies_in_flight(self) -> int:
        """Copies that have not landed, of all sessions."""
        return sum(len(session.jobs) for session in self._sessions.values())

    def expire_leases(self) -> bool:
        """End leases past their deadline; return whether any lease is left."""
        self._counters["leases_expired"] += self._leases.expire(self._runtime.clock())
        return len(self._leases) > 0

    def check_invariants(self) -> None:
        """Assert the laws of the index, and that slots and sessions add up. For tests."""
        self._index.check_invariants()
        if not self._sessions:
            stats = self._index.stats()
            assert len(self._leases) == stats.num_reserved == stats.num_pinned == stats.num_doomed == 0

    # ── requests ────────────────────────────────────────────────────────────────────────────────────────────────

    def handle(self, session: Session, request: wire.Request, fds: Sequence[int]) -> wire.Reply | None:
        """Carry a request out; return its reply, or None if that follows through ``session.send``.

        ``fds`` stay the caller's, who closes them when this returns.
        """
        try:
            if session.num_unanswered >= self._limits.requests_max:
                raise Overloaded(f"{session.num_unanswered} requests of this session are unanswered")
            return self._dispatch(session, request, fds)
        except Refused as refusal:
            self._counters[f"refused_{refusal.code}"] += 1
            logger.debug("refused session=%d code=%s detail=%s", session.id, refusal.code, refusal)
            return wire.Error(request.id, refusal.code, str(refusal))

    def _dispatch(self, session: Session, request: wire.Request, fds: Sequence[int]) -> wire.Reply | None:
        match request:
            case wire.Ping():
                return wire.Pong(request.id)
            case wire.Lookup():
                return self._lookup(session, request)
            case wire.Retrieve():
                self._retrieve(session, request)
                return None
            case wire.Store():
                return self._store(session, request)
            case wire.Release():
                self._leases.release(LeaseId(request.lease))
                return wire.Released(request.id)
            case wire.Register():
                self._register(session, request, fds)
                return None
            case wire.Status():
                return self.status(request.id)
            case wire.Hello():
                raise Malformed(f"session {session.id} has said hello before")

    def _lookup(self, session: Session, request: wire.Lookup) -> wire.LookupReply:
        self._check_takes_work()
        digests = parse_digests(request.digests)
        check_lookup(request, len(digests))
        pairs = itertools.product(range(request.num_groups), range(request.num_shards))
        rows = {
            (group, shard): self._index.match(chunk_keys(digests, group=group, shard=shard)) for group, shard in pairs
        }
        num_chunks = servable_chunks([len(chunks) for chunks in rows.values()])
        self._counters["lookups"] += 1
        self._counters["chunks_asked"] += len(digests)
        self._counters["chunks_found"] += num_chunks
        if not num_chunks:
            return wire.LookupReply(request.id, 0)
        held = {row: chunks[:num_chunks] for row, chunks in rows.items()}
        for chunks in held.values():
            self._index.touch(chunks)
        lease = self._leases.grant(held, session=session.id, engine_id=session.engine_id, now=self._runtime.clock())
        return wire.LookupReply(request.id, num_chunks, lease.id)

    def _retrieve(self, session: Session, request: wire.Retrieve) -> None:
        self._check_takes_work()
        registration = _registered(session)
        lease = self._leases.find(LeaseId(request.lease), engine_id=session.engine_id, shard=registration.shard)
        num_chunks = len(request.block_ids) // (4 * registration.blocks_per_chunk)
        block_ids = parse_blocks(request.block_ids, registration, num_chunks)
        row = lease.rows[registration.group_number, registration.shard]
        chunks = row[request.first_chunk : request.first_chunk + num_chunks] if request.first_chunk >= 0 else []
        if len(chunks) != num_chunks or not num_chunks:
            raise InvalidBlocks(
                f"chunks [{request.first_chunk}, {request.first_chunk + num_chunks}) of a lease on {len(row)} chunks"
            )
        if any(chunk.nbytes != registration.chunk_nbytes for chunk in chunks):
            raise LayoutRefused(f"the lease holds chunks of another size than {registration.chunk_nbytes} bytes")
        plan = plan_copy(
            Direction.SCATTER, registration.group, block_ids, _slot_offsets(chunks),
            num_skipped_blocks=request.num_skipped_blocks,
        )  # fmt: skip
        if request.deadline_ms < 0:
            raise Malformed(f"a deadline of {request.deadline_ms} ms")
        deadline = self._runtime.clock() + request.deadline_ms / 1e3 if request.deadline_ms else None
        job = Job(
            plan, registration.bases, deadline=deadline, checksums=[chunk.checksum for chunk in chunks],
            on_done=lambda job: self._runtime.post(lambda: self._retrieved(session, request.id, job, lease, chunks)),
        )  # fmt: skip
        self._submit(session, registration, job)
        self._leases.claim(lease, shard=registration.shard)

    def _retrieved(self, session: Session, request_id: int, job: Job, lease: Lease, chunks: Sequence[Chunk]) -> None:
        self._leases.land(lease)
        for number in job.failed:
            chunk = chunks[number]
            logger.warning("checksum mismatch: chunk dropped key=%s nbytes=%d", chunk.key.hex(), chunk.nbytes)
            self._counters["chunks_corrupt"] += 1
            self._index.drop(chunk)
        failed = sorted({*job.failed, *range(job.num_done, len(chunks))})
        self._counters["chunks_loaded"] += len(chunks) - len(failed)
        self._counters["bytes_loaded"] += (len(chunks) - len(failed)) * job.plan.chunk_nbytes
        self._landed(session, job, wire.RetrieveReply(request_id, len(chunks), failed))

    def _store(self, session: Session, request: wire.Store) -> wire.StoreReply | None:
        self._check_takes_work()
        registration = _registered(session)
        digests = parse_digests(request.digests)
        block_ids = parse_blocks(request.block_ids, registration, len(digests))
        parent_digests = parse_digests(request.parent)
        if len(parent_digests) > 1:
            raise Malformed(f"{len(parent_digests)} digests as one parent")
        self._lane(registration).stores.check_takes_work()
        found = self._reserve(registration, parent_digests, digests)
        reply = wire.StoreReply(request.id, len(found.reserved), found.num_present, found.num_refused, found.reason)
        if not found.reserved:
            self._count_stored(reply, registration.chunk_nbytes)
            return reply
        numbers = [number for number, _ in found.reserved]
        chunks = [chunk for _, chunk in found.reserved]
        job = Job(
            plan_copy(Direction.GATHER, registration.group, block_ids[numbers], _slot_offsets(chunks)),
            registration.bases,
            on_done=lambda job: self._runtime.post(lambda: self._stored(session, reply, job, chunks)),
        )
        self._submit(session, registration, job)
        return None

    def _reserve(
        self, registration: Registration, parent_digests: Sequence[Digest], digests: Sequence[Digest]
    ) -> _Reservation:
        """Reserve a slot for every chunk that is not there yet, evicting as needed, until one cannot be had."""
        place = {"group": registration.group_number, "shard": registration.shard}
        parent_keys = chunk_keys(parent_digests, **place)
        parent = self._index.get(parent_keys[0]) if parent_keys else None
        if parent_keys and parent is None:
            return _Reservation([], 0, len(digests), "no parent")
        reserved: list[tuple[int, Chunk]] = []
        num_present = 0
        for number, key in enumerate(chunk_keys(digests, **place)):
            chunk = self._index.get(key)
            if chunk is not None:
                num_present += 1
            else:
                slot_offset = self._allocate(registration.chunk_nbytes, below=parent)
                if slot_offset is None:
                    return _Reservation(reserved, num_present, len(digests) - number, "pool full")
                chunk = self._index.reserve(key, parent, slot_offset, registration.chunk_nbytes)
                reserved.append((number, chunk))
            parent = chunk
        return _Reservation(reserved, num_present, 0, "")

    def _allocate(self, nbytes: int, *, below: Chunk | None) -> int | None:
        """Return a slot, evicting leaves as needed, but never the chunk that the new one will hang below."""
        pinned = below if below is not None and below.state is ChunkState.SEALED else None
        if pinned is not None:
            self._index.pin(pinned)
        try:
            while (slot_offset := self._slots.allocate(nbytes)) is None:
                if self._index.evict() is None:
                    return None
            return slot_offset
        finally:
            if pinned is not None:
                self._index.unpin(pinned)

    def _stored(self, session: Session, planned: wire.StoreReply, job: Job, chunks: Sequence[Chunk]) -> None:
        for chunk, checksum in zip(chunks, job.checksums, strict=False):
            self._index.seal(chunk, checksum)
        for chunk in reversed(chunks[len(job.checksums) :]):
            self._index.abort(chunk)
        reply = planned
        if num_lost := len(chunks) - len(job.checksums):
            reply = wire.StoreReply(
                planned.id, len(job.checksums), planned.num_present, planned.num_refused + num_lost, "copy failed"
            )
        self._count_stored(reply, job.plan.chunk_nbytes)
        self._landed(session, job, reply)

    def _count_stored(self, reply: wire.StoreReply, chunk_nbytes: int) -> None:
        self._counters["chunks_stored"] += reply.num_stored
        self._counters["chunks_present"] += reply.num_present
        self._counters["chunks_refused"] += reply.num_refused
        self._counters["bytes_stored"] += reply.num_stored * chunk_nbytes

    def _register(self, session: Session, request: wire.Register, fds: Sequence[int]) -> None:
        self._check_takes_work()
        if session.registration is not None or session.is_registering:
            raise AlreadyRegistered(f"session {session.id} has registered its KV memory; connect anew to do it again")
        layout, handles = parse_layout(request)
        lanes = {handle.lane for handle in handles}
        if len(lanes) != 1:
            raise LayoutRefused(f"memory on {sorted(lanes)}; one worker's memory lies on one device")
        lane = self._runtime.lanes[lanes.pop()]
        num_fds = sum(handle.num_fds for handle in handles)
        if len(fds) != num_fds:
            raise Malformed(f"{len(handles)} allocations with {num_fds} file descriptors, and {len(fds)} have come")
        if not 0 <= request.shard < request.num_shards <= ROWS_MAX:
            raise Malformed(f"shard {request.shard} of {request.num_shards}; at most {ROWS_MAX}")
        try:
            check_kinds(layout.groups)
            if len(layout.groups) > 1:
                raise LayoutError(f"{len(layout.groups)} layer groups; only models with one are served")
            blocks_per_chunk = layout.groups[0].blocks_per_chunk(request.chunk_tokens)
            self._slots.check_fits(layout.groups[0].block_nbytes * blocks_per_chunk)
            num_rows = layout.groups[0].num_rows * blocks_per_chunk
            if layout.groups[0].block_nbytes > _BLOCK_NBYTES_MAX:
                raise LayoutError(f"a block of {layout.groups[0].block_nbytes} bytes; at most {_BLOCK_NBYTES_MAX}")
            if num_rows > _CHUNK_ROWS_MAX:
                raise LayoutError(f"a chunk of {num_rows} rows is over the limit of {_CHUNK_ROWS_MAX}")
        except LayoutError as error:
            raise LayoutRefused(str(error)) from error
        self._open_memory(session, request, _Opening(lane, layout, handles, blocks_per_chunk), fds)

    def _open_memory(self, session: Session, request: wire.Register, opening: _Opening, fds: Sequence[int]) -> None:
        """Map the memory on its device's thread; the reply follows."""
        lane, own_fds = opening.lane, duplicate_all(fds)
        session.is_registering = True
        session.num_unanswered += 1

        def on_device_thread() -> None:
            bases: list[int] = []
            refusal: LayoutRefused | None = None
            try:
                left = iter(own_fds)
                for handle in opening.handles:
                    fds_of_handle = list(itertools.islice(left, handle.num_fds))
                    bases.append(lane.device.open_memory(handle, fds_of_handle))
            except LayoutError as error:
                refusal = LayoutRefused(str(error))
                for handle, base in zip(opening.handles, bases, strict=False):
                    lane.device.close_memory(base, handle.nbytes)
            finally:
                close_all(own_fds)
            registration = None if refusal else Registration(
                request.shard, opening.layout, 0, opening.blocks_per_chunk, opening.handles, tuple(bases)
            )  # fmt: skip
            self._runtime.post(lambda: self._registered(session, request.id, registration, refusal))

        lane.loads.call(on_device_thread)

    def _registered(
        self, session: Session, request_id: int, registration: Registration | None, refusal: LayoutRefused | None
    ) -> None:
        session.is_registering = False
        session.registration = registration
        if refusal is not None:
            self._answer(session, wire.Error(request_id, refusal.code, str(refusal)))
        elif registration is not None:
            self._answer(session, wire.Registered(request_id, registration.chunk_nbytes))
            logger.info(
                "registered session=%d pid=%d shard=%d blocks=%d chunk_nbytes=%d",
                session.id, session.peer.pid, registration.shard, registration.group.num_blocks,
                registration.chunk_nbytes,
            )  # fmt: skip
        self._close_if_drained(session)

    def status(self, request_id: int) -> wire.StatusReply:
        """Return the daemon's counters and gauges."""
        stats = self._index.stats()
        sessions = list(self._sessions.values())
        return wire.StatusReply(
            request_id,
            pid=self._runtime.pid,
            boot_id=self._runtime.boot_id,
            is_draining=self.is_draining,
            pool_nbytes=self._pool_nbytes,
            pool_used_nbytes=self._slots.used_nbytes,
            num_sealed=stats.num_sealed,
            num_reserved=stats.num_reserved,
            num_pinned=stats.num_pinned,
            num_leases=len(self._leases),
            num_sessions=len(sessions),
            num_registered=num_registered(sessions),
            num_copies_in_flight=self.num_copies_in_flight,
            counters={**self._counters, "chunks_evicted": stats.num_evicted},
        )

    # ── copies ──────────────────────────────────────────────────────────────────────────────────────────────────

    def _lane(self, registration: Registration) -> Lane:
        return self._runtime.lanes[registration.handles[0].lane]

    def _submit(self, session: Session, registration: Registration, job: Job) -> None:
        job.submitted_at = self._runtime.clock()
        self._lane(registration).executor(job.plan.direction).submit(job)
        session.jobs.add(job)
        session.num_unanswered += 1

    def _landed(self, session: Session, job: Job, reply: wire.Reply) -> None:
        kind = "load" if job.plan.direction is Direction.SCATTER else "store"
        self._counters[f"{kind}_ns"] += int((self._runtime.clock() - job.submitted_at) * 1e9)
        session.jobs.discard(job)
        self._answer(session, reply)
        self._close_if_drained(session)
        if self._drained is not None and not self.num_copies_in_flight:
            self._drained.set()

    def _answer(self, session: Session, reply: wire.Reply) -> None:
        session.num_unanswered -= 1
        if not session.is_draining:
            session.send(reply)

    def _close_if_drained(self, session: Session) -> None:
        if not session.is_draining or session.jobs or session.is_registering or session.id not in self._sessions:
            return
        registration, session.registration = session.registration, None
        if registration is None:
            self._session_closed(session)
            return
        lane = self._lane(registration)

        def on_device_thread() -> None:
            for handle, base in zip(registration.handles, registration.bases, strict=True):
                lane.device.close_memory(base, handle.nbytes)
            self._runtime.post(lambda: self._session_closed(session))

        lane.loads.call(on_device_thread)

    def _session_closed(self, session: Session) -> None:
        if self._sessions.pop(session.id, None) is not None:
            logger.info("session closed session=%d pid=%d", session.id, session.peer.pid)
            assert session.on_closed is not None
            session.on_closed()

    def _check_takes_work(self) -> None:
        if self.is_draining:
            raise Draining(f"the daemon (pid {self._runtime.pid}) is stopping")


@dataclass(frozen=True, slots=True)
class _Reservation:
    """What became of the chunks of one store."""

    reserved: list[tuple[int, Chunk]]
    """(position in the request, chunk)"""
    num_present: int
    num_refused: int
    reason: str


@dataclass(frozen=True, slots=True)
class _Opening:
    """A registration that is checked and not mapped yet."""

    lane: Lane
    layout: KVLayout
    handles: tuple[MemoryHandle, ...]
    blocks_per_chunk: int


def _registered(session: Session) -> Registration:
    if session.registration is None:
        raise NotRegistered(f"session {session.id} has not registered its KV memory")
    return session.registration


def _slot_offsets(chunks: Sequence[Chunk]) -> npt.NDArray[np.int64]:
    return np.array([chunk.slot_offset for chunk in chunks], dtype=np.int64)
