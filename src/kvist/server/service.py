"""What the daemon does for each message. All control flow of a request is here.

The laws: every request gets exactly one reply, an ``Error`` if it is refused; a refused request has changed nothing,
but that a refused registration closes the descriptors that came ahead of it.
A chunk is published only when its bytes have landed, and forgotten, with all that builds on it, when they no longer
match their checksum. One event loop calls every method of this module; copies run elsewhere and come back to it.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import math
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Final

from kvist import __version__
from kvist.errors import Draining, InvalidBlocks, LayoutRefused, Malformed, NotRegistered, Overloaded, Refused
from kvist.index.chunk_index import Chunk, ChunkIndex
from kvist.index.eviction import EvictionPolicy
from kvist.index.leases import Lease, LeaseId, LeaseTable, SessionId
from kvist.index.prefixes import add_tail, find_prefix
from kvist.index.tenants import Tenants
from kvist.model.layout import GroupKind
from kvist.model.owners import Quotas
from kvist.model.rows import Row, RowMemory
from kvist.model.transfer import CHECKSUM_NBYTES, Direction
from kvist.server.inspecting import describe_session, describe_tenants, describe_tier, locate
from kvist.server.measuring import Histogram
from kvist.server.orders import places_of, slot_offsets
from kvist.server.parsing import (
    parse_blocks,
    parse_chunk_s,
    parse_digests,
    parse_needs,
    parse_owner,
    parse_tail,
    parse_tails,
)  # fmt: skip
from kvist.server.purging import Purger
from kvist.server.registering import Registrar
from kvist.server.runtime import Runtime
from kvist.server.sessions import Peer, Registration, Send, Session, num_registered
from kvist.storage.slots import SLOT_ALIGNMENT, SlotAllocator
from kvist.tiering.controller import TierController, TiersBehind
from kvist.tiering.promoting import Wanted
from kvist.tiering.reserving import Reserver
from kvist.transfer.executor import Job
from kvist.transfer.plan import plan_copy
from kvist.wire import messages as wire
from kvist.wire.codec import KEPT_FDS_MAX

logger = logging.getLogger(__name__)

_LOOK_KEYS_MAX: Final = 1 << 16
"""Most keys that somebody who only looks may ask for: all of them are looked at, on the loop."""


class CacheService:
    """Composes index, leases, slots, executors and tiers."""

    def __init__(
        self,
        runtime: Runtime,
        slots: SlotAllocator,
        policy: EvictionPolicy,
        *,
        limits: wire.Limits,
        behind: TiersBehind | None = None,
        quotas: Quotas | None = None,
    ) -> None:
        self._runtime = runtime
        self._slots = slots
        tenants = Tenants(quotas or Quotas(), slots.nbytes, slot_alignment=SLOT_ALIGNMENT)
        self._index = ChunkIndex(policy, slots.free, tenants)
        self._reserver = Reserver(self._index, slots)
        self._tiers = TierController(
            behind or TiersBehind(), self._index, self._reserver, runtime.post, on_quiet=self._note_quiet,
            on_promoted=lambda asked_at: self._durations["promotion"].observe(runtime.clock() - asked_at),
        )  # fmt: skip
        self._purger = Purger(self._index, self._tiers, runtime.post)
        self._leases = LeaseTable(self._index, ttl_s=limits.lease_ttl_s, new_id=runtime.new_id)
        self._registrar = Registrar(
            runtime, slots, pool_nbytes=slots.nbytes, orders_max=limits.requests_max, on_over=self._close_if_drained
        )
        self._limits = limits
        self._sessions: dict[SessionId, Session] = {}
        self._session_ids = itertools.count(1)
        self._counters: Counter[str] = Counter()
        self._durations = {name: Histogram() for name in ("lookup", "load", "store", "promotion")}
        self._began_at = runtime.clock()
        self.is_draining = False
        self._drained: asyncio.Event | None = None

    # ── sessions ────────────────────────────────────────────────────────────────────────────────────────────────

    def open_session(self, peer: Peer, hello: wire.Hello, send: Send) -> Session:
        """Begin a session; the caller has checked the peer and the protocol."""
        session = Session(SessionId(next(self._session_ids)), peer, hello, send, self._runtime.clock())
        self._sessions[session.id] = session
        logger.info("session opened session=%d pid=%d name=%s", session.id, peer.pid, hello.name)
        return session

    def close_session(self, session: Session, on_closed: Callable[[], None]) -> None:
        """End a session: drop its leases now, finish or cancel its copies, unmap its memory, then call back.

        What its engine was told to copy is over when its process is, or when the daemon is stopping.
        """
        if session.is_draining:
            return
        session.on_closed = on_closed
        num_leases = self._leases.release_session(session.id)
        self._tiers.forget(session.id, self._runtime.clock())
        session.cancel()
        self.drop_descriptors(session)
        if session.registration is not None and (orders := session.registration.orders) is not None:
            orders.give_up() if self.is_draining else orders.end_with_process()
        logger.info(
            "session ending session=%d pid=%d leases=%d copies=%d",
            session.id, session.peer.pid, num_leases, len(session.jobs),
        )  # fmt: skip
        self._close_if_drained(session)

    def begin_draining(self) -> None:
        """Take no new work from now on. No slot is used again, so nobody's end need be waited for."""
        self.is_draining = True
        self._tiers.begin_draining()
        for session in self._sessions.values():
            if session.is_draining and session.registration is not None and session.registration.orders is not None:
                session.registration.orders.give_up()

    async def wait_drained(self, timeout_s: float) -> None:
        """Return when no copy is in flight and the tiers have what was stored, or when the time is over."""
        self._drained = asyncio.Event()
        self._note_quiet()
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._drained.wait(), timeout_s)
        self._tiers.give_up()

    @property
    def num_copies_in_flight(self) -> int:
        """Copies that have not landed, of all sessions."""
        return sum(len(session.jobs) for session in self._sessions.values())

    def expire_leases(self) -> bool:
        """End leases past their deadline, and what lookups of that age were to be read; say whether a lease is left."""
        now = self._runtime.clock()
        self._counters["leases_expired"] += self._leases.expire(now)
        self._tiers.expire(now)
        return len(self._leases) > 0

    def check_invariants(self) -> None:
        """Assert the laws of the index, and that slots and sessions add up. For tests."""
        self._index.check_invariants()
        self._tiers.check_invariants()
        for session in self._sessions.values():
            is_open = session.registration is None and not session.is_registering and not session.is_draining
            assert len(session.kept_fds) <= (KEPT_FDS_MAX if is_open else 0)
        if not self._sessions and self._tiers.is_quiet:
            stats = self._index.stats()
            assert len(self._leases) == stats.num_reserved == stats.num_pinned == stats.num_doomed == 0

    # ── requests ────────────────────────────────────────────────────────────────────────────────────────────────

    def handle(self, session: Session, request: wire.Request, fds: Sequence[int]) -> wire.Reply | None:
        """Carry a request out; return its reply, or None if that follows through ``session.send``.

        ``fds`` stay the caller's, who closes them when this returns.

        Raises:
            OSError: this process has no room for more descriptors; nothing has changed.
        """
        try:
            is_request_of_its_own = not isinstance(request, wire.CopyDone)
            if session.num_unanswered >= self._limits.requests_max and is_request_of_its_own:
                raise Overloaded(f"{session.num_unanswered} requests of this session are unanswered")
            return self._dispatch(session, request, fds)
        except Refused as refusal:
            if isinstance(request, wire.Register):
                self.drop_descriptors(session)
            self._counters[f"refused_{refusal.code}"] += 1
            logger.debug("refused session=%d code=%s detail=%s", session.id, refusal.code, refusal)
            return wire.Error(request.id, refusal.code, str(refusal))

    def drop_descriptors(self, session: Session) -> None:
        """Close what a session has handed over ahead of a registration that is not carried out."""
        self._registrar.drop_kept(session)

    def _dispatch(self, session: Session, request: wire.Request, fds: Sequence[int]) -> wire.Reply | None:
        match request:
            case wire.Ping() | wire.Status():
                return wire.Pong(request.id) if isinstance(request, wire.Ping) else self.status(request.id)
            case wire.Lookup():
                return self._lookup(session, request)
            case wire.Retrieve():
                self._retrieve(session, request)
                return None
            case wire.Store():
                return self._store(session, request)
            case wire.CopyDone():
                self._copy_done(session, request)
                return None
            case wire.Release():
                self._leases.release(LeaseId(request.lease))
                return wire.Released(request.id)
            case wire.Descriptors() | wire.Register() | wire.Purge():
                self._check_takes_work()
                return self._begin(session, request, fds)
            case wire.Status() | wire.Describe() | wire.Find():
                return self._look(request)
            case wire.Hello():
                raise Malformed(f"session {session.id} has said hello before")

    def _look(self, request: wire.Status | wire.Describe | wire.Find) -> wire.Reply:
        if isinstance(request, wire.Status):
            return self.status(request.id)
        if isinstance(request, wire.Describe):
            now = self._runtime.clock()
            return wire.Description(request.id, [describe_session(one, now) for one in self._sessions.values()])
        digests = parse_digests(request.digests)
        needs = parse_needs(request.needs, len(digests), keys_max=_LOOK_KEYS_MAX)
        return locate(request.id, digests, needs, self._index, self._tiers)

    def _begin(
        self, session: Session, request: wire.Descriptors | wire.Register | wire.Purge, fds: Sequence[int]
    ) -> wire.Received | None:
        """Take memory in, or begin a purge: what takes more than one turn of the loop."""
        if isinstance(request, wire.Descriptors):
            return self._registrar.keep(session, request, fds)
        if isinstance(request, wire.Register):
            self._registrar.register(session, request, fds)
            return None
        self._purger.begin(session.peer, request, session.answer)
        session.num_unanswered += 1
        return None

    def _lookup(self, session: Session, request: wire.Lookup) -> wire.LookupReply:
        self._check_takes_work()
        began_at = self._runtime.clock()
        digests = parse_digests(request.digests)
        needs = parse_needs(request.needs, len(digests))
        tails = parse_tails(request, needs)
        chunk_s = parse_chunk_s(request)
        num_chunks, rows = find_prefix(self._index, digests, needs)
        tail = add_tail(self._index, rows, tails) if num_chunks == len(digests) else 0
        lease_id = b""
        if num_chunks or tail:
            for held in rows.values():
                self._index.touch(held.chunks)
            lease_id = self._leases.grant(
                rows, session=session.id, engine_id=session.engine_id, now=began_at, chunk_s=chunk_s
            ).id
        loading = self._tiers.look_up(
            Wanted(digests, needs, session.id, began_at + self._limits.lease_ttl_s, tails, chunk_s, began_at),
            [held.chunks for held in rows.values()] if lease_id else [],
            num_found=num_chunks, tail_found=tail,
        )  # fmt: skip
        self._count_asked(session, request, (num_chunks, loading.num_chunks, len(digests)))
        loading_ms = math.ceil(loading.seconds * 1e3)
        is_told = request.wants_places and self._runtime.pool_fd is not None
        places = places_of(rows) if is_told else ()
        self._durations["lookup"].observe(self._runtime.clock() - began_at)
        return wire.LookupReply(request.id, num_chunks, lease_id, tail, loading.num_chunks, loading_ms, places)

    def _count_asked(self, session: Session, request: wire.Lookup, counts: tuple[int, int, int]) -> None:
        """Count a lookup by what it found, what is on its way, and what it asked for."""
        if request.is_repeat:
            self._counters["lookups_repeated"] += 1
            return
        num_found, num_loading, num_asked = counts
        self._counters["lookups"] += 1
        session.counters["lookups"] += 1
        for name, num_chunks in (
            ("asked", num_asked), ("found", num_found), ("loading", num_loading),
            ("missed", num_asked - num_found - num_loading),
        ):  # fmt: skip
            self._counters[f"chunks_{name}"] += num_chunks
            self._counters[f"tokens_{name}"] += num_chunks * session.chunk_tokens
            session.counters[f"chunks_{name}"] += num_chunks

    def _retrieve(self, session: Session, request: wire.Retrieve) -> None:
        self._check_takes_work()
        registration = _registered(session)
        held = parse_tail(registration.row(request.row), request.tail_blocks)
        lease = self._leases.find(LeaseId(request.lease), engine_id=session.engine_id, row=held.row)
        num_chunks = len(request.block_ids) // (4 * held.blocks_per_chunk)
        block_ids = parse_blocks(request.block_ids, held, num_chunks, num_skipped_blocks=request.num_skipped_blocks)
        chunks = _leased_chunks(lease, held, request.first_chunk, num_chunks)
        if registration.orders is not None and any(len(chunk.checksum) != CHECKSUM_NBYTES for chunk in chunks):
            raise LayoutRefused(
                f"the lease holds chunks with checksums of more than the {CHECKSUM_NBYTES} bytes of an order"
            )
        plan = plan_copy(
            Direction.SCATTER, held.group, block_ids, slot_offsets(chunks),
            num_skipped_blocks=request.num_skipped_blocks,
        )  # fmt: skip
        if request.deadline_ms < 0:
            raise Malformed(f"a deadline of {request.deadline_ms} ms")
        deadline = self._runtime.clock() + request.deadline_ms / 1e3 if request.deadline_ms else None
        job = Job(
            plan, registration.bases, positions=range(num_chunks), request_id=request.id, deadline=deadline,
            fence=_fence(registration, is_fenced=request.is_fenced), checksums=[chunk.checksum for chunk in chunks],
            on_done=lambda job: self._runtime.post(lambda: self._retrieved(session, job, (lease, held.row), chunks)),
        )  # fmt: skip
        _check_takes_copy(registration, Direction.SCATTER, request.id)
        self._leases.claim(lease, row=held.row)
        self._submit(session, registration, job)

    def _retrieved(self, session: Session, job: Job, claim: tuple[Lease, Row], chunks: Sequence[Chunk]) -> None:
        lease, row = claim
        self._leases.land(lease)
        for number in job.failed:
            chunk = chunks[number]
            logger.warning("checksum mismatch: chunk dropped key=%s nbytes=%d", chunk.key.hex(), chunk.nbytes)
            self._counters["chunks_corrupt"] += 1
            self._index.drop(chunk)
            self._tiers.drop([chunk.key])
        failed = sorted({*job.failed, *range(job.num_done, len(chunks))})
        num_loaded = len(chunks) - len(failed)
        if job.deadline is not None and job.num_done < len(chunks) and self._runtime.clock() > job.deadline:
            self._counters["deadlines_missed"] += 1
        self._counters["chunks_loaded"] += num_loaded
        self._counters[f"chunks_loaded_{job.plan.group.kind.value}"] += num_loaded
        self._counters["bytes_loaded"] += num_loaded * job.plan.chunk_nbytes
        session.counters["chunks_loaded"] += num_loaded
        if row == next(iter(lease.rows)):  # One row stands for all, and its readers share what one would count.
            self._counters["saved_us"] += int(num_loaded * lease.chunk_s * 1e6 / lease.rows[row].num_readers)
        self._landed(session, job, wire.RetrieveReply(job.request_id, len(chunks), failed))

    def _store(self, session: Session, request: wire.Store) -> wire.StoreReply | None:
        self._check_takes_work()
        registration = _registered(session)
        whole = registration.row(request.row)
        held = parse_tail(whole, request.tail_blocks)
        owner = parse_owner(request.tenant, session.model)
        digests = parse_digests(request.digests)
        if request.tail_blocks and len(digests) != 1:
            raise Malformed(f"{len(digests)} digests of a tail of {request.tail_blocks} blocks; it has one")
        block_ids = parse_blocks(request.block_ids, held, len(digests))
        parent_digests = parse_digests(request.parent)
        if len(parent_digests) > (held.group.kind is GroupKind.FULL):
            raise Malformed(f"{len(parent_digests)} digests as the parent in a row of kind {held.group.kind.value!r}")
        fence = _fence(registration, is_fenced=request.is_fenced)
        _check_takes_copy(registration, Direction.GATHER, request.id)
        found = self._reserver.reserve(held, parent_digests, digests, slot_nbytes=whole.chunk_nbytes, owner=owner)
        self._tiers.note_present(found.present)
        reply = wire.StoreReply(request.id, len(found.reserved), len(found.present), found.num_refused, found.reason)
        if not found.reserved:
            self._count_stored(reply, held.chunk_nbytes)
            return reply
        numbers = [number for number, _ in found.reserved]
        chunks = [chunk for _, chunk in found.reserved]
        job = Job(
            plan_copy(Direction.GATHER, held.group, block_ids[numbers], slot_offsets(chunks)),
            registration.bases, positions=numbers, request_id=request.id, fence=fence,
            on_done=lambda job: self._runtime.post(lambda: self._stored(session, reply, job, chunks)),
        )  # fmt: skip
        self._submit(session, registration, job)
        return None

    def _stored(self, session: Session, planned: wire.StoreReply, job: Job, chunks: Sequence[Chunk]) -> None:
        for chunk, checksum in zip(chunks, job.checksums, strict=False):
            self._index.seal(chunk, checksum)
        self._tiers.note_stored(chunks[: len(job.checksums)])
        for chunk in reversed(chunks[len(job.checksums) :]):
            self._index.abort(chunk)
        num_lost = len(chunks) - len(job.checksums)
        reply = wire.StoreReply(
            job.request_id, len(job.checksums), planned.num_present, planned.num_refused + num_lost,
            "copy failed" if num_lost else planned.reason,
        )  # fmt: skip
        self._count_stored(reply, job.plan.chunk_nbytes)
        session.counters["chunks_stored"] += reply.num_stored
        self._landed(session, job, reply)

    def _copy_done(self, session: Session, request: wire.CopyDone) -> None:
        orders = _registered(session).orders
        if orders is None:
            raise Malformed(f"session {session.id} has no copies to carry out")
        orders.finish(request)

    def _count_stored(self, reply: wire.StoreReply, chunk_nbytes: int) -> None:
        self._counters["chunks_stored"] += reply.num_stored
        self._counters["chunks_present"] += reply.num_present
        self._counters["chunks_refused"] += reply.num_refused
        self._counters["bytes_stored"] += reply.num_stored * chunk_nbytes

    def status(self, request_id: int) -> wire.StatusReply:
        """Return the daemon's counters and gauges."""
        stats = self._index.stats()
        sessions = list(self._sessions.values())
        return wire.StatusReply(
            request_id,
            pid=self._runtime.pid,
            boot_id=self._runtime.boot_id,
            is_draining=self.is_draining,
            pool_nbytes=self._slots.nbytes,
            pool_used_nbytes=self._slots.used_nbytes,
            num_sealed=stats.num_sealed,
            num_reserved=stats.num_reserved,
            num_pinned=stats.num_pinned,
            num_leases=len(self._leases),
            num_sessions=len(sessions),
            num_registered=num_registered(sessions),
            num_copies_in_flight=self.num_copies_in_flight,
            counters={
                **self._counters,
                **self._tiers.counters,
                **self._purger.counters,
                "chunks_evicted": stats.num_evicted,
            },
            tiers=[describe_tier(name, tier) for name, tier in self._tiers.stats()],
            version=__version__,
            uptime_s=self._runtime.clock() - self._began_at,
            lane_rates=dict(self._runtime.rates),
            histograms={name: histogram.status() for name, histogram in self._durations.items()},
            tenants=describe_tenants(self._index.tenants),
        )

    # ── copies ──────────────────────────────────────────────────────────────────────────────────────────────────

    def _submit(self, session: Session, registration: Registration, job: Job) -> None:
        """Begin a copy that was checked. A request's last act: an engine that is gone ends its session here."""
        job.submitted_at = self._runtime.clock()
        session.num_unanswered += 1
        session.jobs.add(job)
        registration.lane.executor(job.plan.direction).submit(job)

    def _landed(self, session: Session, job: Job, reply: wire.Reply) -> None:
        kind = "load" if job.plan.direction is Direction.SCATTER else "store"
        seconds = self._runtime.clock() - job.submitted_at
        self._counters[f"{kind}_ns"] += int(seconds * 1e9)
        self._durations[kind].observe(seconds)
        session.jobs.discard(job)
        session.answer(reply)
        self._close_if_drained(session)
        self._note_quiet()

    def _note_quiet(self) -> None:
        if self._drained is not None and not self.num_copies_in_flight and self._tiers.is_quiet:
            self._drained.set()

    def _close_if_drained(self, session: Session) -> None:
        if not session.is_draining or session.jobs or session.is_registering or session.id not in self._sessions:
            return
        self._registrar.let_go(session, lambda: self._session_closed(session))

    def _session_closed(self, session: Session) -> None:
        if self._sessions.pop(session.id, None) is not None:
            logger.info("session closed session=%d pid=%d", session.id, session.peer.pid)
            assert session.on_closed is not None
            session.on_closed()

    def _check_takes_work(self) -> None:
        if self.is_draining:
            raise Draining(f"the daemon (pid {self._runtime.pid}) is stopping")


def _registered(session: Session) -> Registration:
    if session.registration is None:
        raise NotRegistered(f"session {session.id} has not registered its KV memory")
    return session.registration


def _fence(registration: Registration, *, is_fenced: bool) -> object | None:
    if is_fenced and registration.fence is None and registration.orders is None:
        raise Malformed(f"the worker of {registration.rows[0].row} has registered no event to wait for")
    return registration.fence if is_fenced else None


def _leased_chunks(lease: Lease, held: RowMemory, first: int, num_chunks: int) -> Sequence[Chunk]:
    """Return some chunks that a lease holds of a row, by their numbers in its prefix."""
    leased, end = lease.rows[held.row], first + num_chunks
    if not leased.first_chunk <= first < end <= leased.end:
        raise InvalidBlocks(f"chunks [{first}, {end}) of a lease on [{leased.first_chunk}, {leased.end}) of {held.row}")
    chunks = leased.chunks[first - leased.first_chunk : end - leased.first_chunk]
    if any(chunk.nbytes != held.chunk_nbytes for chunk in chunks):
        raise LayoutRefused(f"the lease holds chunks of another size than {held.chunk_nbytes} bytes")
    return chunks


def _check_takes_copy(registration: Registration, direction: Direction, request_id: int) -> None:
    """Make sure that a copy can be submitted: what a request changes before that could not be undone."""
    registration.lane.executor(direction).check_takes_work()
    if registration.orders is not None:
        registration.orders.check_is_new(request_id)
