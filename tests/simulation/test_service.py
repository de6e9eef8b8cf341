"""Several engines on a small pool, in any order of everything: right bytes or an exact failure, and nothing is left.

Each run is one seed. A step is an engine's request, a slice of a copy, an engine's answer to an order, a message from
the device's thread to the loop, a death, a corrupt byte, or time. After every step the service's own laws are checked;
each retrieve is compared byte for byte with what the digests' stamps say; no slot changes hands while an engine's
process may be writing to it; and when all sessions are over, nothing is held any more.
"""

import random
from collections import Counter
from dataclasses import dataclass, field

import numpy as np
import pytest

from kvist.index.chunk_index import ChunkState
from kvist.model.keys import Digest, chunk_keys
from kvist.model.layout import GroupKind
from kvist.model.rows import Row
from kvist.wire import messages as wire
from kvist.wire.describing import describe_needs
from tests.support import kinds
from tests.support.copying import CopyingEngine
from tests.support.engine import packed
from tests.support.kinds import CHUNKS_MAX, SHAPE, Kind, content, digest, needed
from tests.support.memory import GUARD
from tests.support.simulated import LEASE_TTL_S, Sent, SimulatedDaemon, SimulatedEngine

NUM_SLOTS = 12

BATCHES = [(), (), (1,), (1, 1), (99,), (99, 1)]
"""How a registration's descriptors may be cut: all at once, some ahead, all ahead, and one batch of none."""


@dataclass(eq=False)
class Granted:
    """A lease as its engine knows it."""

    id: bytes
    kind: Kind
    digests: list[bytes]
    granter: SimulatedEngine
    deadline: float
    unclaimed: Counter[Row]
    is_released: bool = False


@dataclass
class World:
    """One run."""

    chance: random.Random
    daemon: SimulatedDaemon
    kinds: list[Kind]
    """Which engines there are in this run."""
    prompts: list[list[str]]
    """What they are asked: the fewer there are, the more often all rows of one have been stored."""
    engines: list[tuple[Kind, SimulatedEngine]] = field(default_factory=list)
    ghosts: list[CopyingEngine] = field(default_factory=list)
    """Processes that have lost their connection, and live on."""
    leases: list[Granted] = field(default_factory=list)
    asked: dict[Sent, Granted] = field(default_factory=dict)
    """Retrieves that were sent, and their leases."""
    stored: set[tuple[bytes, Row]] = field(default_factory=set)
    """(digest, row) of every chunk that some store has named."""
    corrupted: set[tuple[bytes, Row]] = field(default_factory=set)
    """(digest, row) of every chunk in which a byte was changed."""
    num_seen: Counter[str] = field(default_factory=Counter)

    # ── what may happen ─────────────────────────────────────────────────────────────────────────────────────────

    def connect(self) -> None:
        kind = self.chance.choice(self.kinds)
        there = {engine.name for other, engine in self.engines if other is kind}
        for number, worker in enumerate(kind.workers):
            if f"worker {number}" not in there:
                make = CopyingEngine if number in kind.copiers else SimulatedEngine
                (first, way), *more = worker
                engine = make(
                    self.daemon, way(SHAPE), engine_id=kind.engine_id, name=f"worker {number}", shard=first.shard,
                    more=[(row, way(SHAPE)) for row, way in more], chunk_tokens=kinds.CHUNK_TOKENS,
                )  # fmt: skip
                if self.chance.random() < 0.1:
                    self.leave_early(engine)
                    continue
                engine.register(*([] if number in kind.copiers else self.chance.choice(BATCHES)))
                self.engines.append((kind, engine))

    def leave_early(self, engine: SimulatedEngine) -> None:
        """Let an engine end between handing descriptors over and registering."""
        for _ in range(self.chance.randint(1, 3)):
            engine.send(wire.Descriptors, fds=[memory.fd for memory in engine.memory])
        self.num_seen["kept at a death"] += bool(engine.session.kept_fds)
        engine.end()

    def hand_over(self) -> None:
        """Let an engine that has registered hand descriptors over: it is refused."""
        _, engine = self.pick()
        engine.send(wire.Descriptors, fds=[memory.fd for memory in engine.memory])
        _, reply = engine.replies.pop()
        assert isinstance(reply, wire.Error)
        assert reply.code == "already_registered"
        self.num_seen["too late"] += 1

    def die(self) -> None:
        if len(self.engines) > 3:
            _, engine = self.engines.pop(self.chance.randrange(len(self.engines)))
            for lease in self.leases:
                lease.is_released |= lease.granter is engine
            engine.end()
            self.num_seen["deaths with copies"] += bool(engine.session.jobs)
            self.mourn(engine)

    def mourn(self, engine: SimulatedEngine) -> None:
        """Let a lost engine of the engine lane haunt the pool until its process ends."""
        if isinstance(engine, CopyingEngine):
            self.ghosts.append(engine)
            self.num_seen["deaths with orders"] += bool(engine.orders)
            assert engine.is_closed is not bool(engine.session.jobs)

    def haunt(self) -> None:
        """Let a lost engine write where its orders sent it, or end."""
        if self.ghosts:
            ghost = self.chance.choice(self.ghosts)
            ghost.scribble()
            if self.chance.random() < 0.3:
                self.ghosts.remove(ghost)
                ghost.end_process()

    def carry_out(self) -> None:
        """Let an engine answer one of its orders: wholly, in part, not at all, or falsely."""
        busy = [engine for _, engine in self.engines if isinstance(engine, CopyingEngine) and engine.orders]
        if not busy:
            return
        engine = self.chance.choice(busy)
        number = self.chance.choice(list(engine.orders))
        order, sent = engine.orders[number]
        num_chunks = len(order.slots) // 8
        num = self.chance.choice([num_chunks, num_chunks, self.chance.randint(0, num_chunks)])
        liar = self.chance.choice([None] * 7 + [self.chance.randrange(len(sent.chunks))])
        for position in engine.carry_out(number, num=num, is_lying=lambda position: position == liar):
            self.corrupted.add((self.digest_of(sent, position), engine.rows[sent.request.row].row))
            self.num_seen["lies"] += 1

    def digest_of(self, sent: Sent, position: int) -> bytes:
        """Return whose bytes a request's chunk has."""
        if isinstance(sent.request, wire.Store):
            return sent.request.digests[16 * position : 16 * position + 16]
        assert isinstance(sent.request, wire.Retrieve)
        return self.asked[sent].digests[sent.request.first_chunk + position]

    def answer_falsely(self) -> None:
        """Let an engine say of an order what cannot be: it is refused, and has changed nothing."""
        busy = [engine for _, engine in self.engines if isinstance(engine, CopyingEngine) and engine.orders]
        engine = self.chance.choice(busy or [self.pick()[1]])
        order = self.chance.choice([10**6, *(engine.orders if isinstance(engine, CopyingEngine) else [])])
        wrong = self.chance.choice([(10**6, b"", []), (-1, b"", []), (0, b"x", []), (0, b"", [0]), (1, b"x" * 7, [])])
        engine.send(lambda number: wire.CopyDone(number, order, *wrong))
        _, reply = engine.replies.pop()
        assert isinstance(reply, wire.Error)
        assert reply.code in ("malformed", "not_registered"), reply
        self.num_seen["false answers"] += order != 10**6

    def lose_next(self) -> None:
        """Let a connection break when the next order is sent over it."""
        copiers = [engine for _, engine in self.engines if isinstance(engine, CopyingEngine)]
        if len(self.engines) > 2 and copiers and not any(engine.is_deaf for engine in copiers):
            self.chance.choice(copiers).is_deaf = self.chance.random() < 0.3

    def store(self) -> None:
        """Let one worker store a part of one row, or, mostly, all workers of an engine all of their rows."""
        kind, _ = self.pick()
        names = self.chance.choice(self.prompts)
        start = self.chance.choice([0, 0, 1, self.chance.randrange(CHUNKS_MAX)])
        workers = [worker for other, worker in self.engines if other is kind]
        places = [(worker, number) for worker in workers for number in range(len(worker.rows))]
        for worker, number in places if self.chance.random() < 0.6 else self.chance.sample(places, 1):
            self.store_row(kind, worker, number, names, start)

    def store_row(self, kind: Kind, engine: SimulatedEngine, number: int, names: list[str], start: int) -> None:
        there = engine.rows[number]
        is_chained = kind.needs[there.row.group].kind is GroupKind.FULL
        offered = names[start:] if is_chained else [name for name in names[start:] if self.chance.random() < 0.8]
        chunks = engine.take_chunks(self.chance.randint(1, CHUNKS_MAX - start), number)[: len(offered)]
        if not chunks:
            return
        wanted = [digest(kind.space, name) for name in offered[: len(chunks)]]
        for blocks, key in zip(chunks, wanted, strict=True):
            there.write(blocks, content(key, there.row, there.map.nbytes))
        parent = digest(kind.space, names[start - 1]) if start and is_chained else b""
        self.stored |= {(key, there.row) for key in wanted}
        engine.send(lambda i: wire.Store(i, b"".join(wanted), parent, packed(chunks), row=number), chunks)

    def look_up(self) -> None:
        kind, engine = self.pick()
        names = self.chance.choice(self.prompts)[: self.chance.randint(1, CHUNKS_MAX)]
        wanted = [digest(kind.space, name) for name in names]
        num_expected = self.num_servable(kind, wanted)
        engine.send(lambda i: wire.Lookup(i, b"".join(wanted), describe_needs(kind.needs)))
        _, reply = engine.replies.pop()
        assert isinstance(reply, wire.LookupReply)
        assert reply.num_chunks == num_expected
        assert (reply.lease != b"") is (reply.num_chunks > 0)
        self.num_seen["hits" if reply.num_chunks else "misses"] += 1
        if not reply.num_chunks:
            return
        unclaimed = Counter[Row]()
        for row in kind.ways:
            held = needed(kind.needs[row.group], reply.num_chunks)
            assert {(wanted[number], row) for number in held} <= self.stored
            unclaimed[row] = kind.needs[row.group].num_readers if held else 0
            self.num_seen["hits over a hole"] += (
                len(held) < sum(self.is_sealed(key, row) for key in wanted) < len(wanted)
            )
        deadline = self.daemon.now + LEASE_TTL_S
        self.leases.append(Granted(reply.lease, kind, wanted[: reply.num_chunks], engine, deadline, unclaimed))

    def num_servable(self, kind: Kind, wanted: list[bytes]) -> int:
        """Return what a lookup must find: the longest prefix of which every row holds what its group needs."""
        return max(
            num
            for num in range(len(wanted) + 1)
            if all(
                self.is_sealed(wanted[number], row)
                for row in kind.ways
                for number in needed(kind.needs[row.group], num)
            )
        )

    def is_sealed(self, key: bytes, row: Row) -> bool:
        (found,) = self.daemon.service._index.find_sealed(chunk_keys([Digest(key)], group=row.group, shard=row.shard))
        return found is not None

    def retrieve(self) -> None:
        if not self.leases:
            return
        lease = self.chance.choice(self.leases[-8:])
        kind, engine = self.pick()
        if self.chance.random() < 0.8:
            matching = [
                engine
                for kind, engine in self.engines
                if kind is lease.kind and any(lease.unclaimed[there.row] for there in engine.rows)
            ]
            kind, engine = (lease.kind, self.chance.choice(matching)) if matching else (kind, engine)
        number = self.chance.randrange(len(engine.rows))
        there = engine.rows[number]
        need = kind.needs[there.row.group]
        held = needed(need, len(lease.digests)) if kind is lease.kind else range(len(lease.digests))
        first = self.chance.choice(held or range(1))
        num = self.chance.randint(1, max(1, held.stop - first))
        if self.chance.random() < 0.15:
            first, num = self.chance.choice([(first, held.stop - first + 1), (held.start - 1, 1)])
        is_outside = not held.start <= first < first + num <= held.stop
        chunks = engine.take_chunks(num, number)
        if len(chunks) < num:
            engine.give_back(chunks, number)
            return
        deadline_ms = self.chance.choice([0, 0, 0, 1, 5000])
        num_skipped_blocks = self.chance.randrange(there.blocks_per_chunk)
        sent = engine.send(
            lambda i: wire.Retrieve(i, lease.id, first, packed(chunks), num_skipped_blocks, deadline_ms, row=number),
            chunks,
        )
        refusals = self.refusals(lease, kind, there.row) or ({"invalid_blocks"} if is_outside else set())
        if sent.job is not None:
            assert not refusals
            lease.unclaimed[there.row] -= 1
            self.asked[sent] = lease
        else:
            _, reply = engine.replies.pop()
            assert isinstance(reply, wire.Error)
            is_full = reply.code == "overloaded" and len(self.daemon.executor.jobs) == self.daemon.executor.queue_max
            is_unready = reply.code == "not_registered" and engine.session.registration is None
            is_full &= not isinstance(engine, CopyingEngine)
            assert is_full or is_unready or reply.code in refusals, reply
            self.num_seen[reply.code] += 1
            engine.give_back(chunks, number)

    def release(self) -> None:
        if self.leases:
            lease = self.chance.choice(self.leases)
            _, engine = self.pick()
            engine.send(lambda number: wire.Release(number, lease.id))
            assert isinstance(engine.replies.pop()[1], wire.Released)
            lease.is_released = True

    def pass_time(self) -> None:
        self.daemon.now += self.chance.choice([0.001, 0.1, 3.0])

    def expire(self) -> None:
        self.daemon.service.expire_leases()
        for lease in self.leases:
            lease.is_released |= lease.deadline <= self.daemon.now

    def corrupt(self) -> None:
        """Change a byte of a chunk in the pool, readable or not."""
        chunks = [chunk for chunk in self.daemon.service._index._chunks.values() if chunk.state is ChunkState.SEALED]
        if chunks and self.chance.random() < 0.3:
            chunk = self.chance.choice(chunks)
            place = chunk.slot_offset + self.chance.randrange(chunk.nbytes)
            self.daemon.pool.bytes[place] ^= self.chance.randint(1, 255)
            self.corrupted.add((chunk.key[:16], Row(chunk.key[17], chunk.key[19])))

    def break_device(self) -> None:
        self.daemon.executor.is_breaking = self.chance.random() < 0.3

    def slice(self) -> None:
        self.daemon.executor.step()

    def deliver(self) -> None:
        self.daemon.deliver()

    # ── what must hold ──────────────────────────────────────────────────────────────────────────────────────────

    def refusals(self, lease: Granted, kind: Kind, row: Row) -> set[str]:
        """Return why a retrieve may be refused, as far as the lease goes; nothing if it must not be."""
        if lease.is_released:
            return {"unknown_lease"}
        is_ended = set() if lease.unclaimed.total() else {"unknown_lease"}  # If the last copy on it has landed.
        if kind.engine_id != lease.kind.engine_id:
            return {"foreign_lease"} | is_ended
        return set() if lease.unclaimed[row] else {"lease_claimed"} | is_ended

    def take_in(self) -> None:
        """Check every reply that has come, and free its blocks."""
        for _, engine in self.engines:
            while engine.replies:
                sent, reply = engine.replies.pop(0)
                if isinstance(sent.request, wire.Store):
                    self.check_stored(sent, reply, engine)
                elif isinstance(sent.request, wire.Retrieve):
                    self.check_retrieved(sent, reply, engine)
                if isinstance(sent.request, wire.Store | wire.Retrieve):
                    engine.give_back(sent.chunks, sent.request.row)
            if not engine.sent:
                assert all((array == GUARD).all() for array in engine.arrays), "a byte outside the named blocks changed"

    def check_stored(self, sent: Sent, reply: wire.Reply, engine: SimulatedEngine) -> None:
        if isinstance(reply, wire.Error):
            assert reply.code in ("overloaded", "not_registered"), reply
            self.num_seen[reply.code] += 1
            return
        assert isinstance(reply, wire.StoreReply)
        assert reply.num_stored + reply.num_present + reply.num_refused == len(sent.chunks)
        assert (reply.reason != "") is (reply.num_refused > 0)
        self.num_seen[reply.reason or "stored"] += 1

    def check_retrieved(self, sent: Sent, reply: wire.Reply, engine: SimulatedEngine) -> None:
        """Every chunk is right, or is named; named are only those that were corrupted, or that were not copied."""
        assert isinstance(reply, wire.RetrieveReply)
        assert isinstance(sent.request, wire.Retrieve)
        assert sent.job is not None
        lease, there = self.asked.pop(sent), engine.rows[sent.request.row]
        assert reply.num_chunks == len(sent.chunks)
        for number, blocks in enumerate(sent.chunks):
            key = lease.digests[sent.request.first_chunk + number]
            right = np.frombuffer(content(key, there.row, there.map.nbytes), dtype=np.uint8)
            if number == 0:
                right = np.where(there.map.position < sent.request.num_skipped_blocks, GUARD, right)
            found = np.frombuffer(there.read(blocks), dtype=np.uint8)
            if number in reply.failed:
                is_uncopied = number >= sent.job.num_done
                assert is_uncopied or (key, there.row) in self.corrupted
                assert ((found == GUARD) | (found == right)).all(), "a wrong byte was written"
                self.num_seen["uncopied" if is_uncopied else "corrupt"] += 1
            else:
                assert (found == right).all(), "a wrong byte was called right"
                self.num_seen["loaded"] += 1
                self.num_seen[f"loaded {lease.kind.needs[there.row.group].kind.value}"] += 1
                self.num_seen["loaded of uneven groups"] += lease.kind.is_uneven

    def bury(self) -> None:
        """Take note of those whose connections broke on an order."""
        for kind, engine in list(self.engines):
            if engine.session.is_draining:
                self.engines.remove((kind, engine))
                for lease in self.leases:
                    lease.is_released |= lease.granter is engine
                self.num_seen["broken on an order"] += 1
                self.mourn(engine)

    def pick(self) -> tuple[Kind, SimulatedEngine]:
        return self.chance.choice(self.engines)


STEPS = {
    World.slice: 10,
    World.deliver: 10,
    World.store: 5,
    World.look_up: 5,
    World.retrieve: 5,
    World.release: 1,
    World.pass_time: 2,
    World.expire: 1,
    World.corrupt: 1,
    World.break_device: 1,
    World.connect: 1,
    World.die: 0.6,
    World.carry_out: 5,
    World.answer_falsely: 0.5,
    World.haunt: 1,
    World.lose_next: 1,
    World.hand_over: 0.5,
}
"""What happens, and how often."""


def run(seed: int, num_steps: int, *, has_rows: bool = False) -> Counter[str]:
    """Let a world run, end all of it, and return what was seen. Where engines have rows, there is more to copy."""
    chance = random.Random(seed)
    daemon = SimulatedDaemon(NUM_SLOTS * (3 if has_rows else 1), queue_max=chance.choice([2, 1000]))
    connecting = chance.sample(kinds.KINDS_OF_ROWS, 2) if has_rows else chance.sample(kinds.KINDS, 3)
    prompts = chance.sample(kinds.PROMPTS, 3) if has_rows else kinds.PROMPTS
    world = World(chance, daemon, connecting, prompts)
    steps = {**STEPS, World.slice: 40, World.deliver: 40} if has_rows else STEPS
    everyone = world.engines
    for _ in range(8):
        world.connect()
    for step in chance.choices(list(steps), list(steps.values()), k=num_steps):
        step(world)
        world.bury()
        world.take_in()
        daemon.service.check_invariants()
        assert daemon.status().pool_used_nbytes <= daemon.pool.nbytes
    ended = [engine for _, engine in everyone] + world.ghosts
    if chance.random() < 0.5:
        daemon.service.begin_draining()
    for engine in ended:
        engine.end()
    daemon.settle()
    if not daemon.service.is_draining:
        check_held(daemon, ended)
        for engine in ended:
            engine.end_process()
        daemon.settle()
    daemon.service.check_invariants()
    check_quiet(daemon, ended)
    daemon.close()
    return world.num_seen


def check_held(daemon: SimulatedDaemon, engines: list[SimulatedEngine]) -> None:
    """Of lost engines, exactly those are left that have orders open, with their slots."""
    held = [engine for engine in engines if engine.slots_in_hand()]
    assert [engine for engine in engines if not engine.is_closed] == held
    status = daemon.status()
    assert status.num_sessions == status.num_registered == len(held)
    assert status.pool_used_nbytes >= len(daemon.ordered_slots()) * 4096


def check_quiet(daemon: SimulatedDaemon, engines: list[SimulatedEngine]) -> None:
    """Nothing is held, nothing is mapped, and the bytes in use are those of the chunks that can be read."""
    status = daemon.status()
    assert all(engine.is_closed for engine in engines)
    assert not any(engine.session.kept_fds for engine in daemon.engines)
    assert not daemon.device.open
    assert all(process.is_closed for process in daemon.processes)
    assert (status.num_sessions, status.num_registered, status.num_copies_in_flight) == (0, 0, 0)
    assert (status.num_leases, status.num_pinned, status.num_reserved) == (0, 0, 0)
    assert status.pool_used_nbytes == status.num_sealed * 4096


@pytest.mark.parametrize("part", range(8))
def test_whatever_happens_bytes_are_right_and_nothing_is_left(part: int):
    """Over many seeds: every byte that is called right is right, and a quiet service holds nothing.

    Everything that can happen has happened in every part, so that a service that does nothing does not pass.
    """
    seen: Counter[str] = Counter()
    for seed in range(part * 1000, part * 1000 + 14):
        seen += run(seed, 600)
    for outcome in (
        "stored", "pool full", "no parent", "copy failed", "hits", "misses", "loaded", "uncopied", "corrupt",
        "overloaded", "unknown_lease", "foreign_lease", "lease_claimed", "deaths with copies",
        "deaths with orders", "broken on an order", "lies", "false answers", "kept at a death", "too late",
    ):  # fmt: skip
        assert seen[outcome] > 0, outcome


@pytest.mark.parametrize("part", range(4))
def test_whatever_happens_to_rows_no_prefix_is_a_mix(part: int):
    """Over many seeds of groups with shards and readers of their own: a lookup finds what every row can go on from.

    Groups may have numbers of shards and readers of their own.
    Whatever was stored late, evicted, corrupted or lost with its worker makes a hit shorter, and never wrong.
    """
    seen: Counter[str] = Counter()
    for seed in range(part * 1000, part * 1000 + 14):
        seen += run(seed, 1200, has_rows=True)
    for outcome in (
        "stored", "pool full", "no parent", "hits", "misses", "hits over a hole", "invalid_blocks", "lease_claimed",
        "loaded full", "loaded window", "loaded chunked", "loaded recurrent", "corrupt", "deaths with copies",
        "loaded of uneven groups",
    ):  # fmt: skip
        assert seen[outcome] > 0, outcome


def test_the_same_seed_is_the_same_run():
    """A failing seed can be run again: nothing depends on time, threads or hashes."""
    assert run(42, 400) == run(42, 400)
