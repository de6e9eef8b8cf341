"""Whatever order leases are granted, claimed, landed, released, expired and orphaned in, pins balance."""

import itertools
from collections import Counter
from dataclasses import dataclass, field

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kvist.errors import ForeignLease, LeaseClaimed, UnknownLease
from kvist.index import leases
from kvist.index.chunk_index import Chunk, ChunkIndex
from kvist.index.eviction import LeastRecentlyUsed
from kvist.index.leases import Lease, LeaseId, LeaseTable, SessionId
from kvist.model.keys import ChunkKey
from kvist.model.rows import Row

TTL_S = 10.0
NUM_CHUNKS = 4
SHARDS = range(2)


@dataclass(eq=False)
class Held:
    """What the model knows of a lease."""

    lease: Lease
    engine: str
    session: int
    deadline: float
    num_chunks: dict[int, int]
    """Of each shard, from its first, the tail included."""
    unclaimed: Counter[int]
    reading: list[int] = field(default_factory=list)
    is_over: bool = False


def ids():
    """Return a source of lease ids."""
    numbers = itertools.count(1)
    return lambda: next(numbers).to_bytes(16, "big")


def sealed_rows(index: ChunkIndex) -> dict[int, list[Chunk]]:
    """Return one sealed prefix of ``NUM_CHUNKS`` chunks for each shard."""
    rows: dict[int, list[Chunk]] = {}
    for shard in SHARDS:
        parent: Chunk | None = None
        rows[shard] = []
        for number in range(NUM_CHUNKS):
            parent = index.reserve(ChunkKey(bytes([shard, number])), parent, 0, 1)
            index.seal(parent, b"")
            rows[shard].append(parent)
    return rows


class Leases(RuleBasedStateMachine):
    """Drives a lease table and a list of what is held side by side. Engines ``x`` and ``y`` have two sessions each."""

    def __init__(self) -> None:
        super().__init__()
        self.index = ChunkIndex(LeastRecentlyUsed(), lambda _offset, _nbytes: None)
        self.rows = sealed_rows(self.index)
        self.table = LeaseTable(self.index, ttl_s=TTL_S, new_id=ids())
        self.now = 100.0
        self.known: list[Held] = []

    @rule(
        wanted=st.lists(
            st.tuples(st.integers(0, NUM_CHUNKS), st.integers(1, 3), st.booleans()), min_size=1, max_size=2
        ),
        session=st.integers(0, 3),
    )
    def grant(self, wanted: list[tuple[int, int, bool]], session: int) -> None:
        """Grant what is wanted of each shard: chunks, of which the last may be a tail, and readers."""
        engine = "xy"[session // 2]
        rows = {
            Row(0, shard): leases.Held(0, self.rows[shard][:num_chunks], num_readers, has_tail and num_chunks > 0)
            for shard, (num_chunks, num_readers, has_tail) in enumerate(wanted)
        }
        lease = self.table.grant(rows, session=SessionId(session), engine_id=engine, now=self.now)
        assert lease.id not in {held.lease.id for held in self.known}
        unclaimed = Counter(
            {
                shard: num_readers * (2 if has_tail and num > 1 else 1)
                for shard, (num, num_readers, has_tail) in enumerate(wanted)
                if num
            }
        )
        held = {shard: num_chunks for shard, (num_chunks, _, _) in enumerate(wanted)}
        self.known.append(Held(lease, engine, session, self.now + TTL_S, held, unclaimed))

    @precondition(lambda self: self.known)
    @rule(data=st.data(), engine=st.sampled_from("xy"), shard=st.integers(0, 2))
    def claim(self, data: st.DataObject, engine: str, shard: int) -> None:
        held = data.draw(st.sampled_from(self.known))
        try:
            lease = self.table.find(held.lease.id, engine_id=engine, row=Row(0, shard))
        except UnknownLease:
            assert held.is_over
        except ForeignLease:
            assert engine != held.engine
        except LeaseClaimed:
            assert not held.unclaimed[shard]
        else:
            assert not held.is_over
            assert held.unclaimed[shard] > 0
            assert engine == held.engine
            assert {row.shard: len(there.chunks) for row, there in lease.rows.items()} == held.num_chunks
            self.table.claim(lease, row=Row(0, shard))
            held.unclaimed[shard] -= 1
            held.reading.append(shard)

    @precondition(lambda self: any(held.reading for held in self.known))
    @rule(data=st.data())
    def land(self, data: st.DataObject) -> None:
        held = data.draw(st.sampled_from([held for held in self.known if held.reading]))
        held.reading.pop()
        self.table.land(held.lease)
        if not held.unclaimed.total() and not held.reading:
            held.is_over = True

    @precondition(lambda self: self.known)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        held = data.draw(st.sampled_from(self.known))
        assert self.table.release(held.lease.id) is not held.is_over
        held.is_over = True

    @rule(session=st.integers(0, 3))
    def release_session(self, session: int) -> None:
        mine = [held for held in self.known if held.session == session and not held.is_over]
        assert self.table.release_session(SessionId(session)) == len(mine)
        for held in mine:
            held.is_over = True

    @rule(seconds=st.floats(0, 7))
    def pass_time(self, seconds: float) -> None:
        self.now += seconds
        late = [held for held in self.known if held.deadline <= self.now and not held.is_over]
        assert self.table.expire(self.now) == len(late)
        for held in late:
            held.is_over = True

    @invariant()
    def pins_are_those_of_live_leases_and_running_copies(self) -> None:
        holding = [held for held in self.known if not held.is_over or held.reading]
        assert len(self.table) == len(holding)
        for shard, chunks in self.rows.items():
            for number, chunk in enumerate(chunks):
                assert chunk.pins == sum(number < held.num_chunks.get(shard, 0) for held in holding)
        self.index.check_invariants()

    def teardown(self) -> None:
        """Once all copies have landed and all sessions are gone, nothing is pinned."""
        for held in self.known:
            for _ in held.reading:
                self.table.land(held.lease)
        for session in range(4):
            self.table.release_session(SessionId(session))
        assert len(self.table) == 0
        assert self.index.stats().num_pinned == 0


TestLeases = Leases.TestCase
TestLeases.settings = settings(max_examples=100, stateful_step_count=40)


@pytest.fixture
def index() -> ChunkIndex:
    return ChunkIndex(LeastRecentlyUsed(), lambda _offset, _nbytes: None)


@pytest.fixture
def table(index: ChunkIndex) -> LeaseTable:
    return LeaseTable(index, ttl_s=TTL_S, new_id=ids())


def grant(table: LeaseTable, index: ChunkIndex, *, num_shards: int = 1) -> Lease:
    rows = sealed_rows(index)
    wanted = {Row(0, shard): leases.Held(0, rows[shard]) for shard in range(num_shards)}
    return table.grant(wanted, session=SessionId(1), engine_id="x", now=0.0)


def test_refusals_say_which_lease_and_why(index: ChunkIndex, table: LeaseTable):
    """Unknown, foreign and claimed leases are told apart, each with the lease's id."""
    lease = grant(table, index)
    with pytest.raises(UnknownLease, match="6e6f"):
        table.find(LeaseId(b"no"), engine_id="x", row=Row(0, 0))
    with pytest.raises(ForeignLease, match=rf"{lease.id.hex()} belongs to engine 'x', not to 'y'"):
        table.find(lease.id, engine_id="y", row=Row(0, 0))
    with pytest.raises(LeaseClaimed, match=rf"{lease.id.hex()}: group 0 on shard 7 has no claim"):
        table.find(lease.id, engine_id="x", row=Row(0, 7))
    table.claim(table.find(lease.id, engine_id="x", row=Row(0, 0)), row=Row(0, 0))
    with pytest.raises(LeaseClaimed, match="shard 0"):
        table.find(lease.id, engine_id="x", row=Row(0, 0))
    table.land(lease)
    with pytest.raises(UnknownLease, match=lease.id.hex()):
        table.find(lease.id, engine_id="x", row=Row(0, 0))


def test_a_lease_ends_with_its_last_shard(index: ChunkIndex, table: LeaseTable):
    """With two shards, the first one's landing keeps the lease for the second; the second's ends it."""
    lease = grant(table, index, num_shards=2)
    for shard, num_left in ((0, 1), (1, 0)):
        table.claim(table.find(lease.id, engine_id="x", row=Row(0, shard)), row=Row(0, shard))
        table.land(lease)
        assert len(table) == num_left
    assert index.stats().num_pinned == 0
    assert table.release(lease.id) is False


@pytest.mark.parametrize("way_out", ["release", "expire", "session"])
def test_a_running_copy_outlives_its_lease(index: ChunkIndex, table: LeaseTable, way_out: str):
    """A lease that ends while a copy reads from it is gone for claims at once, and its pins when the copy lands."""
    lease = grant(table, index, num_shards=2)
    table.claim(table.find(lease.id, engine_id="x", row=Row(0, 0)), row=Row(0, 0))
    ended = {
        "release": lambda: table.release(lease.id),
        "expire": lambda: table.expire(TTL_S),
        "session": lambda: table.release_session(SessionId(1)),
    }[way_out]()
    assert ended == 1
    with pytest.raises(UnknownLease):
        table.find(lease.id, engine_id="x", row=Row(0, 1))
    assert (len(table), index.stats().num_pinned) == (1, 2 * NUM_CHUNKS)
    assert index.evict() is None
    table.land(lease)
    assert (len(table), index.stats().num_pinned) == (0, 0)
    assert index.evict() == 1


def test_a_lease_lives_until_its_deadline_and_not_longer(index: ChunkIndex, table: LeaseTable):
    """Before the deadline nothing expires; at it, everything of that age does."""
    lease = grant(table, index)
    assert table.expire(TTL_S - 1e-6) == 0
    assert table.find(lease.id, engine_id="x", row=Row(0, 0)) is lease
    assert table.expire(TTL_S) == 1


def test_each_reader_of_a_row_has_a_claim(index: ChunkIndex, table: LeaseTable):
    """Where two workers hold one row, each reads it once, and there is no third; a row of one reader has one claim.

    The lease ends with the last of all.
    """
    chunks = sealed_rows(index)
    rows = {Row(0, 0): leases.Held(0, chunks[0], num_readers=2), Row(1, 0): leases.Held(0, chunks[1], num_readers=1)}
    lease = table.grant(rows, session=SessionId(1), engine_id="x", now=0.0)
    for row, held in rows.items():
        for _ in range(held.num_readers):
            table.claim(table.find(lease.id, engine_id="x", row=row), row=row)
        with pytest.raises(LeaseClaimed, match=str(row)):
            table.find(lease.id, engine_id="x", row=row)
    for num_left in (1, 1, 0):
        table.land(lease)
        assert len(table) == num_left
    assert index.stats().num_pinned == 0


def test_a_row_that_holds_nothing_is_not_waited_for(index: ChunkIndex, table: LeaseTable):
    """A lease ends when the rows that hold chunks are read; one that holds none is refused and keeps nobody."""
    chunks = sealed_rows(index)[0]
    rows = {Row(0, 0): leases.Held(0, chunks), Row(1, 0): leases.Held(NUM_CHUNKS, [])}
    lease = table.grant(rows, session=SessionId(1), engine_id="x", now=0.0)
    with pytest.raises(LeaseClaimed, match="group 1 on shard 0 has no claim"):
        table.find(lease.id, engine_id="x", row=Row(1, 0))
    table.claim(lease, row=Row(0, 0))
    table.land(lease)
    assert len(table) == 0


@pytest.mark.parametrize("num_readers", [1, 3])
@pytest.mark.parametrize(
    ("num_chunks", "has_tail", "num_parts"),
    [(0, False, 0), (NUM_CHUNKS, False, 1), (1, True, 1), (NUM_CHUNKS, True, 2)],
    ids=["nothing", "whole chunks", "a tail alone", "whole chunks and a tail"],
)
def test_a_tail_is_claimed_apart(
    index: ChunkIndex, table: LeaseTable, num_chunks: int, num_readers: int, num_parts: int, *, has_tail: bool
):
    """Each reader of a row has a claim on its whole chunks and one on its tail, of those that there are.

    The lease ends when all of them have landed, and not before.
    """
    held = leases.Held(0, sealed_rows(index)[0][:num_chunks], num_readers, has_tail)
    assert held.num_claims == num_readers * num_parts
    row = Row(0, 0)
    lease = table.grant({row: held}, session=SessionId(1), engine_id="x", now=0.0)
    for number in range(held.num_claims):
        table.claim(table.find(lease.id, engine_id="x", row=row), row=row)
        if number % 2:
            table.land(lease)
        assert (len(table), index.stats().num_pinned) == (1, num_chunks)
    with pytest.raises(LeaseClaimed, match=str(row)):
        table.find(lease.id, engine_id="x", row=row)
    for _ in range(lease.num_reading):
        assert (len(table), index.stats().num_pinned) == (1, num_chunks)
        table.land(lease)
    assert (len(table), index.stats().num_pinned) == ((0, 0) if num_parts else (1, 0))
