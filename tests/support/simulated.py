"""A whole cache service without threads, sockets or time: every step of it happens when the test says so."""

from __future__ import annotations

import itertools
import os
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import msgspec
import numpy as np

from kvist.device.base import GoOn, IsShared, never
from kvist.device.host import HostDevice
from kvist.errors import LayoutRefused, Overloaded
from kvist.index.eviction import LeastRecentlyUsed
from kvist.model.handles import MemoryHandle
from kvist.model.owners import Quotas
from kvist.model.rows import Row, row_memory
from kvist.model.transfer import CopyPlan, Direction
from kvist.server.lanes import Lane
from kvist.server.runtime import Runtime
from kvist.server.service import CacheService
from kvist.server.sessions import Peer, Session
from kvist.storage.slots import SlotAllocator
from kvist.tiering.controller import TiersBehind, WritePolicy
from kvist.transfer.executor import Job
from kvist.wire import messages as wire
from tests.support.engine import describe_rows
from tests.support.layouts import ChunkMap, Laid
from tests.support.memory import GUARD, SharedMemory
from tests.support.memory_tier import MemoryTier

LEASE_TTL_S = 10.0


def always() -> bool:
    """Let a copy go on to its end."""
    return True


class HostOnly(dict[str, Lane]):
    """The lanes of a daemon that serves host memory alone."""

    def __missing__(self, name: str) -> Lane:
        raise LayoutRefused(f"memory on {name!r} is not served; known types: {sorted(self)}")


class Watched:
    """A process that ends when the test says so."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.callback: Callable[[], None] | None = None
        self.has_ended = False
        self.is_closed = False

    def when_ended(self, callback: Callable[[], None]) -> None:
        assert not self.is_closed
        assert self.callback is None
        self.callback = callback

    def close(self) -> None:
        self.is_closed = True

    def end(self) -> None:
        """Let the process end. Idempotent."""
        if not self.has_ended and self.callback is not None and not self.is_closed:
            self.callback()
            assert self.is_closed
        self.has_ended = True


class WatchedSlots(SlotAllocator):
    """Slots of which none is given out or taken back while an engine may be copying to or from it."""

    def __init__(self, pool_nbytes: int, ordered: Callable[[], set[int]]) -> None:
        super().__init__(pool_nbytes)
        self._ordered = ordered

    def allocate(self, nbytes: int) -> int | None:
        offset = super().allocate(nbytes)
        assert offset not in self._ordered(), f"the slot at {offset} is given out while an order names it"
        return offset

    def free(self, offset: int, nbytes: int) -> None:
        assert offset not in self._ordered(), f"the slot at {offset} is freed while an order names it"
        super().free(offset, nbytes)


class WatchedDevice(HostDevice):
    """A host device that knows what is open, so that a copy to or from anything else fails the test."""

    def __init__(self, pool: SharedMemory) -> None:
        super().__init__(pool.bytes.data, pool.bytes.ctypes.data, num_threads=1)
        self.open: set[int] = set()

    def open_memory(self, handle: MemoryHandle, fds: Sequence[int]) -> int:
        address = super().open_memory(handle, fds)
        self.open.add(address)
        return address

    def close_memory(self, address: int, nbytes: int) -> None:
        self.open.remove(address)
        super().close_memory(address, nbytes)

    def gather(
        self, plan: CopyPlan, bases: Sequence[int], chunks: range, go_on: GoOn, is_shared: IsShared = never
    ) -> list[bytes]:
        assert self.open.issuperset(bases)
        return super().gather(plan, bases, chunks, go_on)

    def scatter(
        self,
        plan: CopyPlan,
        bases: Sequence[int],
        chunks: range,
        checksums: Sequence[bytes],
        go_on: GoOn,
        is_shared: IsShared = never,
    ) -> list[bool]:
        assert self.open.issuperset(bases)
        return super().scatter(plan, bases, chunks, checksums, go_on)


class SteppedExecutor:
    """Keeps an executor's laws, a chunk a step, on the caller's thread."""

    def __init__(self, device: WatchedDevice, clock: Callable[[], float], *, queue_max: int) -> None:
        self._device = device
        self._clock = clock
        self.queue_max = queue_max
        self.calls: deque[Callable[[], None]] = deque()
        self.jobs: list[Job] = []
        self.is_breaking = False
        """The next step fails."""

    @property
    def is_busy(self) -> bool:
        return bool(self.calls or self.jobs)

    def check_takes_work(self) -> None:
        if len(self.jobs) >= self.queue_max:
            raise Overloaded(f"{self.queue_max} copies are queued")

    def submit(self, job: Job) -> None:
        self.check_takes_work()
        self.jobs.append(job)

    def call(self, function: Callable[[], None]) -> None:
        self.calls.append(function)

    def step(self) -> None:
        """Run one call, or one chunk of the oldest load, or of the oldest store where there is no load."""
        if self.calls:
            self.calls.popleft()()
        elif self.jobs:
            job = next((job for job in self.jobs if job.plan.direction is Direction.SCATTER), self.jobs[0])
            self._advance(job)

    def _advance(self, job: Job) -> None:
        is_over = job.is_cancelled or (job.deadline is not None and self._clock() > job.deadline)
        is_over = is_over or self.is_breaking
        self.is_breaking = False
        if not is_over:
            chunks = range(job.num_done, job.num_done + 1)
            if job.plan.direction is Direction.GATHER:
                job.checksums += self._device.gather(job.plan, job.bases, chunks, always)
            else:
                expected = job.checksums[job.num_done : chunks.stop]
                if self._device.scatter(job.plan, job.bases, chunks, expected, always) == [False]:
                    job.failed.append(job.num_done)
            job.num_done += 1
        if is_over or job.num_done == job.plan.num_chunks:
            self.jobs.remove(job)
            job.on_done(job)


class SimulatedDaemon:
    """A service with its pool, its device's thread and its loop, all driven by ``step``."""

    def __init__(
        self,
        num_slots: int,
        *,
        queue_max: int = 1000,
        requests_max: int = 1000,
        is_isolated: bool = False,
        tiers: Sequence[MemoryTier] = (),
        policy: WritePolicy = WritePolicy.ALWAYS,
        quotas: Quotas | None = None,
    ) -> None:
        self.now = 1000.0
        self.engines: list[SimulatedEngine] = []
        self.posted: deque[Callable[[], None]] = deque()
        self.pool = SharedMemory(num_slots * 4096, name="kvist-simulated-pool")
        self.device = WatchedDevice(self.pool)
        self.executor = SteppedExecutor(self.device, lambda: self.now, queue_max=queue_max)
        self.processes: list[Watched] = []
        """Those that the service watches or has watched, in the order of their registrations."""
        numbers = itertools.count(1)
        runtime = Runtime(
            rates={},
            pid=os.getpid(), boot_id="boot", post=self.posted.append, clock=lambda: self.now,
            new_id=lambda: next(numbers).to_bytes(16, "big"),
            watch=self._watch, pool_fd=None if is_isolated else self.pool.fd,
            lanes=HostOnly(host=Lane(self.device, self.executor, self.executor)),  # type: ignore[arg-type]
        )  # fmt: skip
        limits = wire.Limits(1 << 20, wire.CHUNKS_MAX, wire.BLOCKS_MAX, requests_max, LEASE_TTL_S)
        self.slots = WatchedSlots(self.pool.nbytes, self.ordered_slots)
        self.tiers = tiers
        self.service = CacheService(
            runtime, self.slots, LeastRecentlyUsed(), limits=limits,
            behind=TiersBehind(self.pool.bytes.data, tiers, policy), quotas=quotas,
        )  # fmt: skip

    @property
    def is_busy(self) -> bool:
        return bool(self.posted) or self.executor.is_busy or any(tier.is_busy for tier in self.tiers)

    def ordered_slots(self) -> set[int]:
        """Return the slots that an engine has in its hands: ordered, unanswered, its process alive."""
        return set().union(*(engine.slots_in_hand() for engine in self.engines))

    def _watch(self, pid: int) -> Watched:
        self.processes.append(Watched(pid))
        return self.processes[-1]

    def deliver(self) -> None:
        """Run what the device's thread has posted to the loop, oldest first: one call."""
        if self.posted:
            self.posted.popleft()()

    def settle(self) -> None:
        """Run everything until nothing is left to do."""
        while self.is_busy:
            self.deliver()
            self.executor.step()
            for tier in self.tiers:
                tier.step()

    def status(self) -> wire.StatusReply:
        return self.service.status(0)

    def state(self) -> wire.StatusReply:
        """Return what a refused request must leave as it is: everything but the counters, evictions included."""
        status = self.status()
        evicted = {"chunks_evicted": status.counters["chunks_evicted"]}
        return msgspec.structs.replace(status, counters=evicted)

    def close(self) -> None:
        """End every session, check that nothing of them is left, and give the pool back."""
        for engine in self.engines:
            engine.end()
            engine.end_process()
        self.settle()
        self.service.check_invariants()
        assert all(engine.is_closed for engine in self.engines)
        assert not self.device.open
        assert all(process.is_closed for process in self.processes)
        self.service._tiers.check_invariants()
        assert self.service._tiers.is_quiet
        self.pool.close()


@dataclass(eq=False)
class Sent:
    """One request on its way, and the blocks that it may touch."""

    request: wire.Request
    chunks: list[list[int]] = field(default_factory=list)
    job: Job | None = None


class SimulatedRow:
    """One row of a worker, in allocations of its own."""

    def __init__(self, row: Row, laid: Laid, *, chunk_tokens: int, first_memory: int) -> None:
        planes = tuple(replace(plane, memory=plane.memory + first_memory) for plane in laid.group.planes)
        self.held = row_memory(row, replace(laid.group, planes=planes), chunk_tokens)
        """As registered."""
        self.row = row
        self.blocks_per_chunk = self.held.blocks_per_chunk
        self._laid = laid
        self._maps: dict[int, ChunkMap] = {}
        self.map = self.map_of(self.blocks_per_chunk)
        self.memory = [SharedMemory(nbytes, name="kvist-engine") for nbytes in laid.memory_nbytes]
        for memory in self.memory:
            memory.bytes[:] = GUARD
        self.free_blocks = list(range(laid.group.num_blocks))

    @property
    def arrays(self) -> list[np.ndarray]:
        return [memory.bytes for memory in self.memory]

    def map_of(self, num_blocks: int) -> ChunkMap:
        """Return where the bytes of a chunk, or of a tail, of so many blocks lie."""
        if num_blocks not in self._maps:
            self._maps[num_blocks] = ChunkMap(self._laid, num_blocks)
        return self._maps[num_blocks]

    def write(self, blocks: Sequence[int], chunk: bytes) -> None:
        """Put a chunk's canonical bytes into its blocks."""
        self.map_of(len(blocks)).write(self.arrays, blocks, chunk)

    def read(self, blocks: Sequence[int]) -> bytes:
        """Return the canonical bytes that lie in a chunk's blocks."""
        return self.map_of(len(blocks)).read(self.arrays, blocks)


class SimulatedEngine:
    """One worker: a session, KV memory, and blocks that are ``GUARD`` from end to end unless a request has them.

    It has one row, ``shard`` of group 0, or ``more`` behind that. What is said of blocks without a row is said of the
    first.
    """

    def __init__(
        self, daemon: SimulatedDaemon, laid: Laid, *, engine_id: str = "x", name: str = "worker", shard: int = 0,
        more: Sequence[tuple[Row, Laid]] = (), chunk_tokens: int, model: str = "", uid: int | None = None,
    ) -> None:  # fmt: skip
        self.daemon = daemon
        daemon.engines.append(self)
        self.engine_id = engine_id
        self.name = name
        self.tenant = ""
        """Whose its chunks are, where the test says so."""
        self.shard = shard
        self.rows: list[SimulatedRow] = []
        for row, laid_here in [(Row(0, shard), laid), *more]:
            num_memory = sum(len(known.memory) for known in self.rows)
            self.rows.append(SimulatedRow(row, laid_here, chunk_tokens=chunk_tokens, first_memory=num_memory))
        self.blocks_per_chunk, self.map, self.free_blocks = (
            self.rows[0].blocks_per_chunk, self.rows[0].map, self.rows[0].free_blocks,
        )  # fmt: skip
        self.memory = [memory for row in self.rows for memory in row.memory]
        self.sent: dict[int, Sent] = {}
        self.replies: list[tuple[Sent, wire.Reply]] = []
        self.is_closed = False
        self._ids = itertools.count(1)
        serves = wire.NamespaceSpec(model, "", "", "", "", chunk_tokens, "") if model else None
        hello = wire.Hello(0, wire.MAGIC, wire.PROTOCOL_VERSION, engine_id, name, serves)
        peer = Peer(os.getpid(), os.getuid() if uid is None else uid)
        self.session: Session = daemon.service.open_session(peer, hello, self._receive)
        self._chunk_tokens = chunk_tokens

    @property
    def arrays(self) -> list[np.ndarray]:
        return [memory.bytes for memory in self.memory]

    def registration(self, request_id: int) -> wire.Register:
        """Return this engine's description of its memory."""
        nbytes = [memory.nbytes for memory in self.memory]
        return describe_rows([row.held for row in self.rows], nbytes, request_id, chunk_tokens=self._chunk_tokens)

    def register(self, *ahead: int) -> Sent:
        """Hand the memory over: so many descriptors in each of the batches that go ahead, the rest at last."""
        fds = [memory.fd for memory in self.memory]
        for num in ahead:
            batch, fds = fds[:num], fds[num:]
            self.send(wire.Descriptors, fds=batch)
        return self.send(self.registration, fds=fds)

    def send(
        self, build: Callable[[int], wire.Request], chunks: list[list[int]] | None = None, fds: Sequence[int] = ()
    ) -> Sent:
        """Let the service handle a request. Its reply, now or later, is appended to ``replies``.

        A request that is refused at once has changed nothing.
        """
        request = build(next(self._ids))
        sent = self.sent[request.id] = Sent(request, chunks or [])
        before, jobs = self.daemon.state(), set(self.session.jobs)
        reply = self.daemon.service.handle(self.session, request, fds)
        assert not isinstance(reply, wire.Error) or self.daemon.state() == before, reply
        sent.job = next(iter(self.session.jobs - jobs), None)
        if reply is not None:
            self._receive(reply)
        return sent

    def call(self, build: Callable[[int], wire.Request], **more: object) -> wire.Reply:
        """Send a request, run everything, and return its reply."""
        sent = self.send(build, **more)  # type: ignore[arg-type]
        self.daemon.settle()
        return next(reply for answered, reply in self.replies if answered is sent)

    def take_chunks(self, num: int, row: int = 0, *, tail_blocks: int = 0) -> list[list[int]]:
        """Take blocks for ``num`` chunks, or tails of so many blocks; for fewer if there are not so many."""
        free, num_blocks = self.rows[row].free_blocks, tail_blocks or self.rows[row].blocks_per_chunk
        num = min(num, len(free) // num_blocks)
        return [[free.pop() for _ in range(num_blocks)] for _ in range(num)]

    def give_back(self, chunks: list[list[int]], row: int = 0) -> None:
        """Fill blocks with ``GUARD`` and call them free; they are taken again when all others have been."""
        there = self.rows[row]
        for blocks in chunks:
            there.write(blocks, bytes([GUARD]) * there.map_of(len(blocks)).nbytes)
            there.free_blocks[:0] = blocks

    def end(self) -> None:
        """Lose the connection, as when the process dies."""
        self.daemon.service.close_session(self.session, self._closed)

    def end_process(self) -> None:
        """Let the process behind a lost connection be over. Nothing to an engine whose copies are the daemon's."""

    def slots_in_hand(self) -> set[int]:
        """Return the slots that this engine may be copying to or from by itself."""
        return set()

    def _closed(self) -> None:
        assert not self.is_closed
        self.is_closed = True
        for memory in self.memory:
            memory.close()

    def _receive(self, reply: wire.Reply, fds: Sequence[int] = ()) -> None:
        assert not self.is_closed
        self.replies.append((self.sent.pop(reply.id), reply))
