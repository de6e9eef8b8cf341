"""Whoever looks is told the truth, and changes nothing."""

import os
from collections.abc import Iterator

import pytest

from kvist.server.measuring import BOUNDS_S, Histogram
from kvist.server.sessions import Peer, Session
from kvist.wire import messages as wire
from tests.support.memory_tier import MemoryTier
from tests.support.named import CHUNK_TOKENS, NUM_SLOTS, answer, digests, look_up, send_retrieve, store
from tests.support.simulated import SimulatedDaemon, SimulatedEngine

NAMESPACE = wire.NamespaceSpec("a model", "main", "bfloat16", "layout", "heads1.pp1", CHUNK_TOKENS)


@pytest.fixture
def tier() -> MemoryTier:
    return MemoryTier()


@pytest.fixture
def daemon(tier: MemoryTier) -> Iterator[SimulatedDaemon]:
    daemon = SimulatedDaemon(NUM_SLOTS, tiers=[tier])
    yield daemon
    daemon.close()


def find(engine: SimulatedEngine, *names: str, needs: tuple[wire.NeedSpec, ...] = (wire.NeedSpec("full"),)):
    engine.send(lambda number: wire.Find(number, digests(*names), needs))
    return engine.replies.pop()[1]


def scheduler(daemon: SimulatedDaemon, replies: list[wire.Reply]) -> Session:
    """Return a session that tells what it serves, as an engine's scheduler does."""
    hello = wire.Hello(0, wire.MAGIC, wire.PROTOCOL_VERSION, "x", "scheduler", NAMESPACE, facts={"engine": "fake 1"})
    return daemon.service.open_session(Peer(os.getpid(), 7), hello, lambda reply, fds: replies.append(reply))


def test_chunks_are_found_where_they_are(daemon: SimulatedDaemon, engine: SimulatedEngine):
    """Pool, tier and nowhere are told apart, and the two prefixes are those that could be served."""
    store(engine, "a1", "a2", "a3")
    daemon.settle()
    for number in range(NUM_SLOTS - 1):
        store(engine, f"x{number}")
    found = find(engine, "a1", "a2", "a3", "a4")
    assert [(row.group, row.shard, row.places) for row in found.rows] == [(0, 0, bytes([1, 2, 2, 0]))]
    assert (found.num_chunks, found.num_with_tiers, found.tiers) == (1, 3, ["memory"])


def test_looking_changes_nothing(daemon: SimulatedDaemon, engine: SimulatedEngine):
    """A look grants no lease, reads no tier and saves no chunk from its eviction."""
    store(engine, "a1")
    store(engine, "b1")
    before = daemon.status()
    assert find(engine, "a1").num_chunks == 1
    after = daemon.status()
    assert after.num_leases == after.num_pinned == 0
    assert before.counters == after.counters
    for number in range(NUM_SLOTS - 1):
        store(engine, f"x{number}")
    assert find(engine, "a1").num_chunks == 0, "it was the longest unused, for a look is no use"
    assert find(engine, "b1").num_chunks == 1


def test_a_row_that_is_missing_is_told(engine: SimulatedEngine):
    """What one shard has is shown, and cannot be served without the other."""
    store(engine, "a1")
    found = find(engine, "a1", needs=(wire.NeedSpec("full", num_shards=2),))
    assert [(row.shard, row.places) for row in found.rows] == [(0, b"\x01"), (1, b"\x00")]
    assert (found.num_chunks, found.num_with_tiers) == (0, 0)


def test_a_look_is_bounded(engine: SimulatedEngine):
    """More keys than the loop can look at beside its work are refused, with the number."""
    needs = (wire.NeedSpec("full", num_shards=64),)
    engine.send(lambda number: wire.Find(number, bytes(16) * 1025, needs))
    reply = engine.replies.pop()[1]
    assert isinstance(reply, wire.Error)
    assert reply.code == "malformed"
    assert "65536 keys" in reply.detail


def test_sessions_are_described(daemon: SimulatedDaemon, engine: SimulatedEngine):
    """Who is connected, what it serves, and what of memory it has registered."""
    session = scheduler(daemon, [])
    daemon.now += 5
    store(engine, "a1", "a2")
    send = send_retrieve(engine, look_up(engine, "a1").lease, 1)
    answer(engine, send)
    engine.give_back(send.chunks)
    reply = daemon.service.handle(session, wire.Describe(3), ())
    assert isinstance(reply, wire.Description)
    worker, other = reply.sessions
    assert (other.uid, other.name, other.serves, other.lane, other.rows) == (7, "scheduler", NAMESPACE, "", [])
    assert (other.facts, other.connected_s) == ({"engine": "fake 1"}, 5)
    assert (worker.lane, worker.memory, worker.serves) == ("daemon", "host", None)
    held = engine.rows[0].held
    assert worker.rows == [
        wire.SessionRow(0, 0, "full", held.group.block_tokens, None, len(held.group.planes), held.group.num_blocks,
                        held.chunk_nbytes)
    ]  # fmt: skip
    assert worker.counters == {
        "lookups": 1, "chunks_asked": 1, "chunks_found": 1, "chunks_loading": 0, "chunks_missed": 0,
        "chunks_stored": 2, "chunks_loaded": 1,
    }  # fmt: skip
    daemon.service.close_session(session, lambda: None)


def test_each_chunk_asked_for_is_counted_once(daemon: SimulatedDaemon, engine: SimulatedEngine):
    """Asked = found + loading + missed, in chunks and in tokens; a question that is repeated is not counted again."""
    store(engine, "a1", "a2")
    replies: list[wire.Reply] = []
    session = scheduler(daemon, replies)
    asked = wire.Lookup(1, digests("a1", "a2", "a3"), chunk_us=1000)
    found = daemon.service.handle(session, asked, ())
    again = daemon.service.handle(session, wire.Lookup(2, digests("a1", "a2", "a3"), is_repeat=True), ())
    assert isinstance(found, wire.LookupReply)
    assert isinstance(again, wire.LookupReply)
    counters = daemon.status().counters
    assert (counters["lookups"], counters["lookups_repeated"]) == (1, 1)
    for unit, size in (("chunks", 1), ("tokens", CHUNK_TOKENS)):
        counts = [counters[f"{unit}_{name}"] for name in ("asked", "found", "loading", "missed")]
        assert counts == [3 * size, 2 * size, 0, size]
    sent = send_retrieve(engine, found.lease, 2)
    answer(engine, sent)
    engine.give_back(sent.chunks)
    assert daemon.status().counters["saved_us"] == 2000
    daemon.service.close_session(session, lambda: None)


def test_a_deadline_that_passed_is_counted(daemon: SimulatedDaemon, engine: SimulatedEngine):
    """A load that was not begun in time is a miss, and is counted as one of time."""
    store(engine, "a1")
    lease = look_up(engine, "a1").lease
    sent = send_retrieve(engine, lease, 1, deadline_ms=50)
    daemon.now += 1
    assert answer(engine, sent) == wire.RetrieveReply(sent.request.id, 1, [0])
    assert daemon.status().counters["deadlines_missed"] == 1
    engine.give_back(sent.chunks)


def test_durations_are_counted(daemon: SimulatedDaemon, engine: SimulatedEngine):
    """A copy is in the bucket of its time from request to landing."""
    store(engine, "a1")
    sent = send_retrieve(engine, look_up(engine, "a1").lease, 1)
    daemon.now += 0.3
    answer(engine, sent)
    engine.give_back(sent.chunks)
    found = daemon.status().histograms["load"]
    assert found.counts[found.bounds_s.index(0.5)] == 1
    assert sum(found.counts) == 1
    assert found.sum_s == pytest.approx(0.3)
    assert sum(daemon.status().histograms["lookup"].counts) == 1


def test_buckets_end_at_their_bounds():
    """A duration is in the first bucket that it does not exceed, and in the last if it exceeds all."""
    histogram = Histogram()
    for seconds in (0.0, BOUNDS_S[0], BOUNDS_S[0] * 1.01, BOUNDS_S[-1], BOUNDS_S[-1] * 2):
        histogram.observe(seconds)
    counts = histogram.status().counts
    assert (counts[0], counts[1], counts[-2], counts[-1], sum(counts)) == (2, 1, 1, 1, 5)
