"""Several rows in one registration: each is stored, found, held and loaded as its own kind needs, and never mixed."""

from __future__ import annotations

from dataclasses import replace

import pytest

from kvist.model.coverage import Need, need_of
from kvist.model.rows import Row
from kvist.wire import messages as wire
from kvist.wire.describing import describe_needs
from tests.support.copying import CopyingEngine
from tests.support.engine import packed
from tests.support.kinds import CHUNK_TOKENS, SHAPE, Way, chunked, content, needed, recurrent, short, window
from tests.support.layouts import nhd
from tests.support.named import answer, digests, refusal
from tests.support.simulated import Sent, SimulatedDaemon, SimulatedEngine

NAMES = ("a", "b", "c", "d", "e")
NUM_SLOTS = 48


@pytest.fixture
def daemon() -> SimulatedDaemon:
    daemon = SimulatedDaemon(NUM_SLOTS)
    yield daemon
    daemon.close()


def connect(
    daemon: SimulatedDaemon, *ways: Way, shards: tuple[int, ...] = (0,), make: type = SimulatedEngine
) -> SimulatedEngine:
    """Return a worker that has registered all ways as groups, on all shards."""
    places = [(Row(group, shard), way(SHAPE)) for shard in shards for group, way in enumerate(ways)]
    engine = make(daemon, places[0][1], shard=shards[0], more=places[1:], chunk_tokens=CHUNK_TOKENS)
    assert isinstance(answer(engine, engine.register()), wire.Registered)
    return engine


def send_store(engine: SimulatedEngine, row: int, *names: str, parent: str = "") -> Sent:
    there = engine.rows[row]
    chunks = engine.take_chunks(len(names), row)
    for blocks, name in zip(chunks, names, strict=True):
        there.write(blocks, content(digests(name), there.row, there.map.nbytes))
    above = digests(parent) if parent else b""
    return engine.send(lambda number: wire.Store(number, digests(*names), above, packed(chunks), row=row), chunks)


def store(engine: SimulatedEngine, row: int, *names: str, parent: str = "") -> wire.StoreReply:
    sent = send_store(engine, row, *names, parent=parent)
    reply = answer(engine, sent)
    engine.give_back(sent.chunks, row)
    assert isinstance(reply, wire.StoreReply)
    return reply


def needs_of(*ways: Way, num_shards: int = 1, num_readers: int = 1) -> list[Need]:
    return [need_of(way(SHAPE).group, CHUNK_TOKENS, num_shards=num_shards, num_readers=num_readers) for way in ways]


def look_up(
    engine: SimulatedEngine, *names: str, ways: tuple[Way, ...], num_shards: int = 1, num_readers: int = 1
) -> wire.LookupReply:
    return look_up_needs(engine, *names, needs=needs_of(*ways, num_shards=num_shards, num_readers=num_readers))


def look_up_needs(engine: SimulatedEngine, *names: str, needs: list[Need]) -> wire.LookupReply:
    reply = engine.call(lambda number: wire.Lookup(number, digests(*names), describe_needs(needs)))
    assert isinstance(reply, wire.LookupReply)
    return reply


def send_retrieve(engine: SimulatedEngine, row: int, lease: bytes, first: int, num: int) -> Sent:
    chunks = engine.take_chunks(num, row)
    return engine.send(lambda number: wire.Retrieve(number, lease, first, packed(chunks), row=row), chunks)


def check_loads(engine: SimulatedEngine, row: int, lease: bytes, first: int, *names: str) -> None:
    """Assert that chunks of a lease come into blocks of a row, byte for byte."""
    sent = send_retrieve(engine, row, lease, first, len(names))
    assert answer(engine, sent) == wire.RetrieveReply(sent.request.id, len(names), [])
    there = engine.rows[row]
    expected = [content(digests(name), there.row, there.map.nbytes) for name in names]
    assert [there.read(blocks) for blocks in sent.chunks] == expected
    engine.give_back(sent.chunks, row)


def test_each_row_holds_what_its_group_needs(daemon: SimulatedDaemon):
    """Of five chunks a full row holds five, a window of two its last two, a state its last; other chunks are free."""
    ways = (nhd, window(nhd), recurrent(nhd))
    engine = connect(daemon, *ways)
    for row in range(3):
        assert store(engine, row, *NAMES).num_stored == 5
    found = look_up(engine, *NAMES, ways=ways)
    assert found.num_chunks == 5
    assert daemon.status().num_pinned == 5 + 2 + 1
    for row, first, told in ((1, 2, "[2, 4) of a lease on [3, 5)"), (2, 3, "[3, 5) of a lease on [4, 5)")):
        code, detail = refusal(engine, send_retrieve(engine, row, found.lease, first, 2))
        assert (code, told in detail) == ("invalid_blocks", True), detail
    check_loads(engine, 0, found.lease, 0, *NAMES)
    check_loads(engine, 1, found.lease, 3, "d", "e")
    assert daemon.status().num_leases == 1
    check_loads(engine, 2, found.lease, 4, "e")
    assert (daemon.status().num_leases, daemon.status().num_pinned) == (0, 0)
    counters = daemon.status().counters
    loaded = [counters[f"chunks_loaded_{kind}"] for kind in ("full", "window", "recurrent")]
    assert (loaded, counters["chunks_loaded"]) == ([5, 2, 1], 8)


def test_chunks_have_the_size_of_their_row(daemon: SimulatedDaemon):
    """The reply to a registration names each row's: a short window and a state keep one block of three."""
    engine = SimulatedEngine(
        daemon, nhd(SHAPE), chunk_tokens=CHUNK_TOKENS,
        more=[(Row(1, 0), short(nhd)(SHAPE)), (Row(2, 0), recurrent(nhd)(SHAPE))],
    )  # fmt: skip
    block = nhd(SHAPE).group.block_nbytes
    assert answer(engine, engine.register()) == wire.Registered(1, [3 * block, block, block])
    assert store(engine, 1, "a").num_stored == 1
    assert daemon.status().counters["bytes_stored"] == block


def test_chunks_of_windows_stand_alone(daemon: SimulatedDaemon):
    """A hole before a window's chunks is no obstacle, to a store or to a hit; a full row takes nothing behind one."""
    ways = (nhd, window(nhd))
    engine = connect(daemon, *ways)
    assert store(engine, 0, "d", parent="c").reason == "no parent"
    assert store(engine, 0, *NAMES).num_stored == 5
    assert store(engine, 1, "a", "d", "e").num_stored == 3
    assert look_up(engine, *NAMES, ways=ways).num_chunks == 5
    assert look_up(engine, *NAMES[:3], ways=ways).num_chunks == 1
    assert store(engine, 1, "c", "e").num_present == 1
    assert look_up(engine, *NAMES[:4], ways=ways).num_chunks == 4


def test_a_parent_of_chunks_that_stand_alone_is_refused(daemon: SimulatedDaemon):
    """Whoever names a parent in a row of windows is told the kind."""
    engine = connect(daemon, nhd, window(nhd))
    told = ("malformed", "1 digests as the parent in a row of kind 'window'")
    assert refusal(engine, send_store(engine, 1, "b", parent="a")) == told


def test_a_row_that_is_missing_is_a_miss(daemon: SimulatedDaemon):
    """Until the last row of the last shard is there, nothing is found; then as much as all of them have."""
    ways = (nhd, recurrent(nhd))
    first, second = connect(daemon, *ways), connect(daemon, *ways, shards=(1,))
    for engine, row, names in ((first, 0, NAMES), (first, 1, NAMES), (second, 0, NAMES[:3]), (second, 1, "ab")):
        assert look_up(first, *NAMES, ways=ways, num_shards=2).num_chunks == 0
        store(engine, row, *names)
    found = look_up(first, *NAMES, ways=ways, num_shards=2)
    assert found.num_chunks == 2
    check_loads(second, 0, found.lease, 0, "a", "b")
    check_loads(second, 1, found.lease, 1, "b")


def test_a_worker_may_hold_two_shards(daemon: SimulatedDaemon):
    """What two workers have stored, one that holds both shards loads, each from its own row, and the other way."""
    ways = (nhd, window(nhd))
    workers = connect(daemon, *ways), connect(daemon, *ways, shards=(1,))
    alone = connect(daemon, *ways, shards=(0, 1))
    for worker in workers:
        for row in range(2):
            store(worker, row, *NAMES)
    found = look_up(alone, *NAMES, ways=ways, num_shards=2)
    for row in (0, 2):
        check_loads(alone, row, found.lease, 0, *NAMES)
        check_loads(alone, row + 1, found.lease, 3, "d", "e")
    assert daemon.status().num_leases == 0
    for row in (0, 1, 2, 3):
        assert store(alone, row, "z").num_stored == 1
    found = look_up(alone, "z", ways=ways, num_shards=2)
    check_loads(workers[1], 0, found.lease, 0, "z")


def test_replicas_store_once_and_read_each(daemon: SimulatedDaemon):
    """The second replica's chunks are present; each reads the row once, and the lease ends with the last."""
    engines = [connect(daemon, nhd) for _ in range(2)]
    assert store(engines[0], 0, *NAMES).num_stored == 5
    assert store(engines[1], 0, *NAMES).num_present == 5
    found = look_up(engines[0], *NAMES, ways=(nhd,), num_readers=2)
    for engine in engines:
        check_loads(engine, 0, found.lease, 0, *NAMES)
    assert refusal(engines[0], send_retrieve(engines[0], 0, found.lease, 0, 1))[0] == "unknown_lease"
    assert daemon.status().num_pinned == 0


def test_groups_are_cut_and_read_each_in_their_own_way(daemon: SimulatedDaemon):
    """Two KV heads and states on four workers: two shards with two readers each beside four shards with one.

    The lookup waits for the last of the six rows, and the lease for the last of the eight readers.
    """
    workers = [
        SimulatedEngine(
            daemon, nhd(SHAPE), shard=rank // 2, more=[(Row(1, rank), recurrent(nhd)(SHAPE))],
            chunk_tokens=CHUNK_TOKENS,
        )
        for rank in range(4)
    ]  # fmt: skip
    for worker in workers:
        assert isinstance(answer(worker, worker.register()), wire.Registered)
    (heads,), (states,) = needs_of(nhd, num_shards=2, num_readers=2), needs_of(recurrent(nhd), num_shards=4)
    for rank, worker in enumerate(workers):
        reply = store(worker, 0, *NAMES)
        assert (reply.num_stored, reply.num_present) == ((0, 5) if rank % 2 else (5, 0))
        assert look_up_needs(workers[0], *NAMES, needs=[heads, states]).num_chunks == 0
        assert store(worker, 1, "c", "e").num_stored == 2
    found = look_up_needs(workers[0], *NAMES, needs=[heads, states])
    assert (found.num_chunks, daemon.status().num_pinned) == (5, 2 * 5 + 4)
    for worker in workers:
        check_loads(worker, 0, found.lease, 0, *NAMES)
    for worker in workers:
        assert daemon.status().num_leases == 1
        assert refusal(worker, send_retrieve(worker, 0, found.lease, 0, 1))[0] == "lease_claimed"
        check_loads(worker, 1, found.lease, 4, "e")
    assert (daemon.status().num_leases, daemon.status().num_pinned) == (0, 0)
    assert look_up_needs(workers[0], *NAMES, needs=[heads, replace(states, num_shards=5)]).num_chunks == 0


def test_a_prefix_that_needs_nothing_of_a_row_is_not_held_up_by_it(daemon: SimulatedDaemon):
    """At the end of an attention chunk its row holds nothing, has nothing to claim, and the lease ends without it."""
    ways = (nhd, chunked(nhd))
    engine = connect(daemon, *ways)
    store(engine, 0, *NAMES)
    found = look_up(engine, *NAMES, ways=ways)
    assert found.num_chunks == 3
    code, detail = refusal(engine, send_retrieve(engine, 1, found.lease, 2, 1))
    assert (code, "group 1 on shard 0 has no claim left" in detail) == ("lease_claimed", True)
    check_loads(engine, 0, found.lease, 0, *NAMES[:3])
    assert daemon.status().num_leases == 0
    store(engine, 1, "d", "e")
    found = look_up(engine, *NAMES, ways=ways)
    assert found.num_chunks == 5
    check_loads(engine, 1, found.lease, 3, "d", "e")


def test_evictions_make_a_hit_shorter_and_never_wrong(daemon: SimulatedDaemon):
    """As chunks are evicted one by one, what is found is what every row still has, byte for byte, down to nothing."""
    ways = (nhd, window(nhd), recurrent(nhd))
    engine = connect(daemon, *ways)
    for row in range(3):
        store(engine, row, *NAMES)
    hits = []
    while daemon.status().num_sealed:
        found = look_up(engine, *NAMES, ways=ways)
        hits.append(found.num_chunks)
        for row, way in enumerate(ways if found.num_chunks else ()):
            held = needed(need_of(way(SHAPE).group, CHUNK_TOKENS), found.num_chunks)
            check_loads(engine, row, found.lease, held.start, *NAMES[held.start : held.stop])
        assert daemon.service._index.evict() is not None
    assert len(hits) == 15
    assert hits == sorted(hits, reverse=True)
    assert (hits[0], hits[-1]) == (5, 0)


def test_orders_name_chunks_of_the_requests_row(daemon: SimulatedDaemon):
    """An engine that copies itself is ordered to copy chunks of the row that it asked about, with that row's sizes."""
    ways = (nhd, short(nhd))
    engine = connect(daemon, *ways, make=CopyingEngine)
    for row in range(2):
        sent = send_store(engine, row, "a", "b")
        engine.carry_out(sent.request.id)
        assert answer(engine, sent).num_stored == 2
        engine.give_back(sent.chunks, row)
    found = look_up(engine, "a", "b", ways=ways)
    assert found.num_chunks == 2
    for row, first, names in ((0, 0, "ab"), (1, 1, "b")):
        sent = send_retrieve(engine, row, found.lease, first, len(names))
        engine.carry_out(sent.request.id)
        assert answer(engine, sent).failed == []
        there = engine.rows[row]
        expected = [content(digests(name), there.row, there.map.nbytes) for name in names]
        assert [there.read(blocks) for blocks in sent.chunks] == expected
        engine.give_back(sent.chunks, row)
    assert daemon.status().num_leases == 0
