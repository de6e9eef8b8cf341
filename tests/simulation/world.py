"""A world of engines on one small daemon: what may happen in it, and what must hold of every reply.

It is the oracle of the simulation: what a lookup must find, why a request may be refused, and what a block must hold
follow here from names and stamps, and from nothing that the service says.
"""

import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from kvist.index.chunk_index import ChunkState
from kvist.index.leases import SessionId
from kvist.model.keys import ChunkKey
from kvist.model.layout import GroupKind
from kvist.model.rows import Row
from kvist.wire import messages as wire
from kvist.wire.describing import describe_needs
from tests.simulation.granted import Granted
from tests.simulation.tenants import check_purged
from tests.simulation.tiers import check_awaited, check_loading, is_promised, key_of, note_awaited
from tests.support import kinds
from tests.support.copying import CopyingEngine
from tests.support.engine import packed
from tests.support.kinds import CHUNKS_MAX, SHAPE, Kind, content, digest, needed
from tests.support.memory import GUARD
from tests.support.simulated import LEASE_TTL_S, Sent, SimulatedDaemon, SimulatedEngine

BATCHES = [(), (), (1,), (1, 1), (99,), (99, 1)]
"""How a registration's descriptors may be cut: all at once, some ahead, all ahead, and one batch of none."""


@dataclass
class World:
    """One run."""

    chance: random.Random
    daemon: SimulatedDaemon
    kinds: list[Kind]
    """Which engines there are in this run."""
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
    awaited: dict[ChunkKey, dict[SessionId, float]] = field(default_factory=dict)
    """Who has asked for a chunk, and until when its answer is good."""
    num_seen: Counter[str] = field(default_factory=Counter)
    has_tenants: bool = False
    """Each space of keys is a tenant's."""

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
                engine.tenant = kind.space if self.has_tenants else ""
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
            check_awaited(self)

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
        """Let one worker store a part of one row, or, mostly, all workers of an engine all of their rows.

        What they store is some chunks of a prompt, or a tail behind them.
        """
        kind, _ = self.pick()
        names = self.chance.choice(kinds.PROMPTS)
        start = self.chance.choice([0, 0, 1, self.chance.randrange(CHUNKS_MAX)])
        workers = [worker for other, worker in self.engines if other is kind]
        places = [(worker, number) for worker in workers for number in range(len(worker.rows))]
        tail_blocks = self.chance.choice([0, 0, 0, *kinds.TAILS])
        above = self.found_of(kind, names) or names[:start]
        for worker, number in places if self.chance.random() < 0.6 else self.chance.sample(places, 1):
            if tail_blocks:
                self.store_tail(kind, worker, number, above, tail_blocks)
            else:
                self.store_row(kind, worker, number, names, start)

    def store_row(self, kind: Kind, engine: SimulatedEngine, number: int, names: list[str], start: int) -> None:
        there = engine.rows[number]
        is_chained = kind.needs[there.row.group].kind is GroupKind.FULL
        offered = names[start:] if is_chained else [name for name in names[start:] if self.chance.random() < 0.8]
        chunks = engine.take_chunks(self.chance.randint(1, CHUNKS_MAX - start), number)[: len(offered)]
        wanted = [digest(kind.space, name) for name in offered[: len(chunks)]]
        parent = digest(kind.space, names[start - 1]) if start and is_chained else b""
        if chunks:
            self.send_store(engine, number, wanted, parent, chunks)

    def store_tail(self, kind: Kind, engine: SimulatedEngine, number: int, above: list[str], tail_blocks: int) -> None:
        if kind.needs[engine.rows[number].row.group].kind is not GroupKind.FULL:
            return
        chunks = engine.take_chunks(1, number, tail_blocks=tail_blocks)
        wanted = [digest(kind.space, kinds.tail(above, tail_blocks))]
        parent = digest(kind.space, above[-1]) if above else b""
        if chunks:
            self.send_store(engine, number, wanted, parent, chunks, tail_blocks)

    def send_store(
        self, engine: SimulatedEngine, number: int, wanted: list[bytes], parent: bytes, chunks: list[list[int]],
        tail_blocks: int = 0,
    ) -> None:  # fmt: skip
        there = engine.rows[number]
        for blocks, key in zip(chunks, wanted, strict=True):
            there.write(blocks, content(key, there.row, there.map_of(len(blocks)).nbytes))
        self.stored |= {(key, there.row) for key in wanted}
        engine.send(
            lambda i: wire.Store(
                i, b"".join(wanted), parent, packed(chunks), row=number, tail_blocks=tail_blocks, tenant=engine.tenant
            ),
            chunks,
        )

    def look_up(self) -> None:
        kind, engine = self.pick()
        tails = [num for num in kinds.TAILS if kind.has_tails and self.chance.random() < 0.8]
        names = self.chance.choice(kinds.PROMPTS)
        known = self.found_of(kind, names) if tails and self.chance.random() < 0.7 else []
        names = known or names[: self.chance.randint(0 if tails else 1, CHUNKS_MAX)]
        wanted = [digest(kind.space, name) for name in names]
        wanted_tails = [digest(kind.space, kinds.tail(names, num_blocks)) for num_blocks in tails]
        num_expected = self.num_servable(kind, wanted)
        tail_expected = self.longest_tail(kind, wanted_tails) if num_expected == len(wanted) else 0
        needs = describe_needs(kind.needs)
        num_promised = self.num_servable(kind, wanted, lambda key, row: is_promised(self, key, row))
        before = self.daemon.status().counters
        engine.send(lambda i: wire.Lookup(i, b"".join(wanted), needs, b"".join(wanted_tails)))
        _, reply = engine.replies.pop()
        assert isinstance(reply, wire.LookupReply)
        assert (reply.num_chunks, reply.tail) == (num_expected, tail_expected)
        check_loading(self, kind, wanted, reply, num_promised, Counter(before))
        note_awaited(self, kind, engine, wanted + wanted_tails)
        is_hit = reply.num_chunks > 0 or reply.tail > 0
        assert (reply.lease != b"") is is_hit
        self.num_seen["hits" if is_hit else "misses"] += 1
        if not is_hit:
            return
        tail = wanted_tails[reply.tail - 1 : reply.tail]
        unclaimed = Counter[Row]()
        for row in kind.ways:
            held = needed(kind.needs[row.group], reply.num_chunks)
            assert {(wanted[number], row) for number in held} | {(key, row) for key in tail} <= self.stored
            unclaimed[row] = kind.needs[row.group].num_readers * (bool(held) + len(tail))
            self.num_seen["hits over a hole"] += (
                len(held) < sum(self.is_sealed(key, row) for key in wanted) < len(wanted)
            )
        deadline = self.daemon.now + LEASE_TTL_S
        tail_blocks = tails[reply.tail - 1] if tail else 0
        held = [*wanted[: reply.num_chunks], *tail]
        self.leases.append(Granted(reply.lease, kind, held, tail_blocks, engine, deadline, unclaimed))

    def num_servable(
        self, kind: Kind, wanted: list[bytes], is_there: Callable[[bytes, Row], bool] | None = None
    ) -> int:
        """Return what a lookup must find: the longest prefix of which every row holds what its group needs."""
        is_there = is_there or self.is_sealed
        return max(
            num
            for num in range(len(wanted) + 1)
            if all(is_there(wanted[number], row) for row in kind.ways for number in needed(kind.needs[row.group], num))
        )

    def found_of(self, kind: Kind, names: list[str]) -> list[str]:
        """Return as much of a prompt as can be found."""
        return names[: self.num_servable(kind, [digest(kind.space, name) for name in names])]

    def longest_tail(self, kind: Kind, tails: list[bytes]) -> int:
        """Return which tail a lookup must find behind all of its chunks, from 1, or 0 for none."""
        return max(
            (number for number, key in enumerate(tails, 1) if all(self.is_sealed(key, row) for row in kind.ways)),
            default=0,
        )

    def is_sealed(self, key: bytes, row: Row) -> bool:
        (found,) = self.daemon.service._index.find_sealed([key_of(key, row)])
        return found is not None

    def retrieve(self) -> None:
        if not self.leases:
            return
        live = [lease for lease in self.leases[-8:] if not lease.is_released and lease.unclaimed.total()]
        lease = self.chance.choice(live if live and self.chance.random() < 0.85 else self.leases[-8:])
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
        held = needed(need, lease.num_whole) if kind is lease.kind else range(lease.num_whole)
        part, tail_blocks = self.choose_part(lease, held)
        chunks = engine.take_chunks(len(part), number, tail_blocks=tail_blocks)
        if len(chunks) < len(part):
            engine.give_back(chunks, number)
            return
        deadline_ms = self.chance.choice([0, 0, 0, 1, 5000])
        num_skipped_blocks = self.chance.randrange(tail_blocks or there.blocks_per_chunk)
        sent = engine.send(
            lambda i: wire.Retrieve(
                i, lease.id, part.start, packed(chunks), num_skipped_blocks, deadline_ms,
                row=number, tail_blocks=tail_blocks,
            ),
            chunks,
        )  # fmt: skip
        refusals = self.refusals(lease, kind, there.row) or self.misfits(lease, held, part, tail_blocks)
        if tail_blocks and need.kind is not GroupKind.FULL:
            refusals = {"malformed"}
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

    def choose_part(self, lease: Granted, held: range) -> tuple[range, int]:
        """Choose chunks to load, mostly such as a row of the lease holds, and of how many blocks, if it is a tail."""
        is_wrong, end = self.chance.random() < 0.15, lease.num_whole
        if lease.tail_blocks and (not held or self.chance.random() < 0.5):
            tail = range(end, end + 1)
            wrong = [
                (tail, 0),
                (tail, len(kinds.TAILS) + 1 - lease.tail_blocks),
                (range(end + 1, end + 2), lease.tail_blocks),
                (range(end - 1, end), lease.tail_blocks),
            ]
            return self.chance.choice(wrong) if is_wrong else (tail, lease.tail_blocks)
        first = self.chance.choice(held or range(1))
        num = self.chance.randint(1, max(1, held.stop - first))
        if is_wrong:
            first, num = self.chance.choice([(first, held.stop - first + 1), (held.start - 1, 1)])
        return range(first, first + num), 0

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
        check_awaited(self)

    def corrupt(self) -> None:
        """Change a byte of a chunk in the pool, readable or not."""
        chunks = [chunk for chunk in self.daemon.service._index._chunks.values() if chunk.state is ChunkState.SEALED]
        if chunks and self.chance.random() < 0.3:
            chunk = self.chance.choice(chunks)
            self.daemon.pool.bytes[chunk.slot_offset + self.chance.randrange(chunk.nbytes)] ^= self.chance.randint(
                1, 255
            )
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

    def misfits(self, lease: Granted, held: range, part: range, tail_blocks: int) -> set[str]:
        """Return why chunks of a lease cannot be loaded as tails of so many blocks, or, with 0, as whole ones."""
        if not held.start <= part.start < part.stop <= held.stop + (lease.tail_blocks > 0):
            return {"invalid_blocks"}
        sizes = {lease.tail_blocks if number == lease.num_whole else 0 for number in part}
        return set() if sizes == {tail_blocks} else {"layout_refused"}

    def take_in(self) -> None:
        """Check every reply that has come, and free its blocks."""
        for _, engine in self.engines:
            while engine.replies:
                sent, reply = engine.replies.pop(0)
                if isinstance(sent.request, wire.Store):
                    self.check_stored(sent, reply, engine)
                elif isinstance(sent.request, wire.Retrieve):
                    self.check_retrieved(sent, reply, engine)
                elif isinstance(reply, wire.PurgeReply):
                    check_purged(self, sent.request, reply)
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
            laid = there.map_of(len(blocks))
            right = np.frombuffer(content(key, there.row, laid.nbytes), dtype=np.uint8)
            if number == 0:
                right = np.where(laid.position < sent.request.num_skipped_blocks, GUARD, right)
            found = np.frombuffer(there.read(blocks), dtype=np.uint8)
            if number in reply.failed:
                is_uncopied = number >= sent.job.num_done
                assert is_uncopied or (key, there.row) in self.corrupted
                assert ((found == GUARD) | (found == right)).all(), "a wrong byte was written"
                self.num_seen["uncopied" if is_uncopied else "corrupt"] += 1
                self.num_seen["corrupt tails"] += sent.request.tail_blocks > 0 and not is_uncopied
            else:
                assert (found == right).all(), "a wrong byte was called right"
                self.num_seen["loaded"] += 1
                self.num_seen["loaded tails"] += sent.request.tail_blocks > 0
                if sent.request.tail_blocks:
                    self.num_seen[f"loaded tails {'behind' if lease.num_whole else 'without'} a prefix"] += 1
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
    World.retrieve: 9,
    World.release: 1,
    World.pass_time: 2,
    World.expire: 1,
    World.corrupt: 2,
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
