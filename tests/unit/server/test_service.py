"""Each request gets one answer, which is true when it is given, whatever goes on meanwhile."""

import msgspec
import pytest

from kvist.wire import messages as wire
from tests.support.engine import packed
from tests.support.layouts import hnd, kv_apart
from tests.support.memory import GUARD
from tests.support.named import (
    CHUNK_TOKENS,
    LAID,
    NUM_SLOTS,
    answer,
    connect,
    content,
    digests,
    loaded,
    look_up,
    num_found,
    refusal,
    send_retrieve,
    send_store,
    store,
)
from tests.support.simulated import LEASE_TTL_S, SimulatedDaemon, SimulatedEngine


def test_what_was_stored_is_found_and_comes_back(engine: SimulatedEngine):
    """A stored prefix is found, and its bytes are put into exactly the named blocks."""
    assert store(engine, "a1", "a2", "a3") == wire.StoreReply(2, 3, 0)
    found = look_up(engine, "a1", "a2", "a3", "a4")
    assert found.num_chunks == 3
    sent = send_retrieve(engine, found.lease, 2, first=1)
    assert answer(engine, sent) == wire.RetrieveReply(sent.request.id, 2, [])
    assert loaded(engine, sent) == [content(engine, "a2"), content(engine, "a3")]
    engine.give_back(sent.chunks)
    assert all((array == GUARD).all() for array in engine.arrays)


def test_another_layout_of_the_same_bytes_shares_chunks(daemon: SimulatedDaemon, engine: SimulatedEngine):
    """What one engine stored, another one with other strides loads."""
    store(engine, "a1", "a2")
    other = connect(daemon, hnd, engine_id="y")
    sent = send_retrieve(other, look_up(other, "a1", "a2").lease, 2)
    assert answer(other, sent) == wire.RetrieveReply(sent.request.id, 2, [])
    assert loaded(other, sent) == [content(engine, "a1"), content(engine, "a2")]


def test_a_chunk_is_found_only_when_its_bytes_have_landed(daemon: SimulatedDaemon, engine: SimulatedEngine):
    """While a store is running nothing of it can be found; the moment it is answered, all of it."""
    sent = send_store(engine, "a1", "a2")
    assert num_found_now(engine) == 0
    daemon.executor.step()
    daemon.deliver()
    assert num_found_now(engine) == 0
    daemon.settle()
    assert sent not in engine.sent.values()
    assert num_found_now(engine) == 2


def num_found_now(engine: SimulatedEngine) -> int:
    """Look up without letting any copy go on."""
    engine.send(lambda number: wire.Lookup(number, digests("a1", "a2")))
    _, reply = engine.replies.pop()
    assert isinstance(reply, wire.LookupReply)
    return reply.num_chunks


def test_a_failed_copy_keeps_what_came_before_it(daemon: SimulatedDaemon, engine: SimulatedEngine):
    """When the third of four chunks cannot be read, two are stored, and storing again stores the rest."""
    sent = send_store(engine, "a1", "a2", "a3", "a4")
    daemon.executor.step()
    daemon.executor.step()
    daemon.executor.is_breaking = True
    assert answer(engine, sent) == wire.StoreReply(sent.request.id, 2, 0, 2, "copy failed")
    assert num_found(engine, "a1", "a2", "a3", "a4") == 2
    assert daemon.status().num_reserved == 0
    assert msgspec.structs.replace(store(engine, "a1", "a2", "a3", "a4"), id=0) == wire.StoreReply(0, 2, 2)
    assert num_found(engine, "a1", "a2", "a3", "a4") == 4


def test_two_stores_of_one_prefix_make_one(daemon: SimulatedDaemon, engine: SimulatedEngine):
    """Of two engines that store the same chunks at once, one copies; both are answered, and the bytes are whole."""
    other = connect(daemon, kv_apart, engine_id="y")
    first, second = send_store(engine, "a1", "a2"), send_store(other, "a1", "a2", "a3")
    assert answer(engine, first) == wire.StoreReply(first.request.id, 2, 0)
    assert answer(other, second) == wire.StoreReply(second.request.id, 1, 2)
    sent = send_retrieve(engine, look_up(engine, "a1", "a2", "a3").lease, 3)
    answer(engine, sent)
    assert loaded(engine, sent) == [content(engine, name) for name in ("a1", "a2", "a3")]
    assert daemon.status().num_sealed == 3


def test_a_corrupt_chunk_is_named_and_forgotten(daemon: SimulatedDaemon, engine: SimulatedEngine):
    """Of five chunks the fourth is damaged: it alone is named, no wrong byte is written, and a lookup ends at it."""
    names = ["a1", "a2", "a3", "a4", "a5"]
    store(engine, *names)
    place = bytes(daemon.pool.bytes).index(content(engine, "a4"))
    daemon.pool.bytes[place + 17] ^= 0x40
    sent = send_retrieve(engine, look_up(engine, *names).lease, 5)
    assert answer(engine, sent) == wire.RetrieveReply(sent.request.id, 5, [3])
    for number, (found, name) in enumerate(zip(loaded(engine, sent), names, strict=True)):
        if number == 3:
            assert all(a in (GUARD, b) for a, b in zip(found, content(engine, name), strict=True))
        else:
            assert found == content(engine, name)
    assert num_found(engine, *names) == 3
    assert daemon.status().counters["chunks_corrupt"] == 1
    assert store(engine, *names).num_stored == 2
    assert num_found(engine, *names) == 5


def test_a_late_load_writes_nothing(daemon: SimulatedDaemon, engine: SimulatedEngine):
    """A load that has not begun by its deadline names all its chunks, and leaves the blocks as they were."""
    store(engine, "a1", "a2")
    sent = send_retrieve(engine, look_up(engine, "a1", "a2").lease, 2, deadline_ms=100)
    daemon.now += 0.2
    assert answer(engine, sent) == wire.RetrieveReply(sent.request.id, 2, [0, 1])
    assert {*b"".join(loaded(engine, sent))} == {GUARD}
    assert daemon.status().num_leases == daemon.status().num_pinned == 0
    assert num_found(engine, "a1", "a2") == 2


def test_skipped_blocks_are_not_written(engine: SimulatedEngine):
    """The leading blocks that an engine had already stay as they were."""
    store(engine, "a1", "a2")
    sent = send_retrieve(engine, look_up(engine, "a1", "a2").lease, 2, num_skipped_blocks=1)
    answer(engine, sent)
    first, second = loaded(engine, sent)
    assert second == content(engine, "a2")
    for place, (found, right) in enumerate(zip(first, content(engine, "a1"), strict=True)):
        assert found == (GUARD if engine.map.position[place] == 0 else right)


def test_a_full_pool_stores_what_fits(daemon: SimulatedDaemon, engine: SimulatedEngine):
    """With everything else held, a store keeps its first chunks, and says why not the others; nothing held is lost."""
    names = [f"a{number}" for number in range(NUM_SLOTS - 2)]
    store(engine, *names)
    held = look_up(engine, *names)
    reply = store(engine, "b1", "b2", "b3", "b4")
    assert (reply.num_stored, reply.num_refused, reply.reason) == (2, 2, "pool full")
    assert num_found(engine, "b1", "b2", "b3", "b4") == 2
    assert num_found(engine, *names) == len(names)
    engine.call(lambda number: wire.Release(number, held.lease))
    assert store(engine, "b3", "b4", parent="b2").num_stored == 2
    assert num_found(engine, "b1", "b2", "b3", "b4") == 4


def test_eviction_makes_room_from_the_oldest_end(daemon: SimulatedDaemon, engine: SimulatedEngine):
    """Storing three times what fits never takes more than there is, and the newest prefix is whole."""
    for prompt in range(6):
        names = [f"{prompt}.{number}" for number in range(NUM_SLOTS // 2)]
        assert store(engine, *names).num_stored == NUM_SLOTS // 2
        assert daemon.status().pool_used_nbytes <= daemon.pool.nbytes
        assert num_found(engine, *names) == NUM_SLOTS // 2
    assert daemon.status().counters["chunks_evicted"] == 6 * NUM_SLOTS // 2 - NUM_SLOTS


def test_a_store_below_a_chunk_that_is_gone_is_refused(engine: SimulatedEngine):
    """Without its parent a chunk could never be found: it is not stored, and the answer says so."""
    reply = store(engine, "a2", "a3", parent="a1")
    assert (reply.num_stored, reply.num_refused, reply.reason) == (0, 2, "no parent")


def test_all_shards_or_none(daemon: SimulatedDaemon):
    """A prefix is as long as on the shard that has least of it; each shard gets its own bytes, once."""
    first, second = (connect(daemon, shard=shard) for shard in range(2))
    store(first, "a1", "a2", "a3")
    assert look_up(first, "a1", "a2", "a3", num_shards=2).num_chunks == 0
    store(second, "a1", "a2")
    found = look_up(first, "a1", "a2", "a3", num_shards=2)
    assert found.num_chunks == 2
    for engine in (first, second):
        sent = send_retrieve(engine, found.lease, 2)
        answer(engine, sent)
        assert loaded(engine, sent) == [content(engine, "a1"), content(engine, "a2")]
        engine.give_back(sent.chunks)
    code, detail = refusal(second, send_retrieve(second, found.lease, 2))
    assert (code, found.lease.hex() in detail) == ("unknown_lease", True)
    assert daemon.status().num_leases == 0


@pytest.mark.parametrize("way_out", ["release", "expiry", "granter's death"])
def test_a_running_load_keeps_its_chunks(daemon: SimulatedDaemon, engine: SimulatedEngine, way_out: str):
    """A lease that ends while its load is running does not pull the bytes away; the pins go with the landing."""
    scheduler = connect(daemon)
    store(engine, "a1", "a2")
    found = look_up(scheduler, "a1", "a2")
    sent = send_retrieve(engine, found.lease, 2)
    daemon.executor.step()
    if way_out == "release":
        scheduler.send(lambda number: wire.Release(number, found.lease))
    elif way_out == "expiry":
        daemon.now += LEASE_TTL_S
        daemon.service.expire_leases()
    else:
        scheduler.end()
    other = connect_without_copies(daemon)
    for prompt in range(4):
        other.send(lambda number, prompt=prompt: store_request(other, number, prompt))
    assert daemon.status().num_pinned == 2
    assert answer(engine, sent) == wire.RetrieveReply(sent.request.id, 2, [])
    assert loaded(engine, sent) == [content(engine, "a1"), content(engine, "a2")]
    assert daemon.status().num_pinned == daemon.status().num_leases == 0


def connect_without_copies(daemon: SimulatedDaemon) -> SimulatedEngine:
    """Connect and register while jobs stay queued: calls go first, so only they are run."""
    engine = SimulatedEngine(daemon, LAID, engine_id="z", chunk_tokens=CHUNK_TOKENS)
    engine.register()
    while daemon.executor.calls:
        daemon.executor.step()
    while daemon.posted:
        daemon.deliver()
    assert engine.session.registration is not None
    return engine


def store_request(engine: SimulatedEngine, number: int, prompt: int) -> wire.Store:
    return wire.Store(number, digests(*[f"{prompt}/{n}" for n in range(4)]), b"", packed(engine.take_chunks(4)))


def test_a_dead_session_is_unmapped_after_its_last_copy(daemon: SimulatedDaemon, engine: SimulatedEngine):
    """The slice that is running lands first; then the memory is closed; what was not copied is not kept."""
    sent = send_store(engine, "a1", "a2", "a3")
    daemon.executor.step()
    engine.end()
    assert daemon.device.open
    assert not engine.is_closed
    daemon.settle()
    assert engine.is_closed
    assert not daemon.device.open
    assert not [answered for answered, _ in engine.replies if answered is sent]
    status = daemon.status()
    assert (status.num_sealed, status.num_reserved, status.num_sessions) == (1, 0, 0)


def test_a_session_that_dies_while_it_registers_leaves_nothing(daemon: SimulatedDaemon):
    """Memory that is being opened when its owner goes is closed right after."""
    engine = SimulatedEngine(daemon, LAID, chunk_tokens=CHUNK_TOKENS)
    engine.register()
    engine.end()
    assert not engine.is_closed
    daemon.settle()
    assert engine.is_closed
    assert not daemon.device.open


def test_unanswered_requests_are_bounded(daemon: SimulatedDaemon, engine: SimulatedEngine):
    """The request behind the bound is refused, and is taken when one has been answered."""
    for number in range(4):
        send_store(engine, f"a{number}")
    sent = engine.send(wire.Ping)
    code, detail = next((reply.code, reply.detail) for answered, reply in engine.replies if answered is sent)
    assert (code, detail) == ("overloaded", "4 requests of this session are unanswered")
    daemon.settle()
    assert isinstance(engine.call(wire.Ping), wire.Pong)


def test_a_draining_daemon_takes_no_new_work(daemon: SimulatedDaemon, engine: SimulatedEngine):
    """Lookups, stores, loads and registrations are refused as such; what is running is answered, and leases go back."""
    store(engine, "a1")
    found = look_up(engine, "a1")
    running = send_store(engine, "b1")
    daemon.service.begin_draining()
    late = SimulatedEngine(daemon, LAID, chunk_tokens=CHUNK_TOKENS)
    for whose, sent in (
        (engine, engine.send(lambda number: wire.Lookup(number, digests("a1")))),
        (engine, send_store(engine, "c1")),
        (engine, send_retrieve(engine, found.lease, 1)),
        (late, late.register()),
    ):
        code, detail = refusal(whose, sent)
        assert (code, str(daemon.status().pid) in detail) == ("draining", True)
    assert isinstance(answer(engine, running), wire.StoreReply)
    assert isinstance(engine.call(lambda number: wire.Release(number, found.lease)), wire.Released)
    assert daemon.status().num_leases == 0


def test_counters_tell_what_happened(daemon: SimulatedDaemon, engine: SimulatedEngine):
    """Idle counters stand still; each chunk is counted where it happened, and once."""
    idle = daemon.status()
    assert daemon.status() == idle
    store(engine, "a1", "a2")
    store(engine, "a1", "a2", "a3")
    found = look_up(engine, "a1", "a2", "a3", "a4")
    answer(engine, send_retrieve(engine, found.lease, 2))
    counters = daemon.status().counters
    nbytes = engine.map.nbytes
    expected = {
        "chunks_stored": 3, "chunks_present": 2, "chunks_refused": 0, "bytes_stored": 3 * nbytes, "lookups": 1,
        "chunks_asked": 4, "chunks_found": 3, "chunks_loaded": 2, "bytes_loaded": 2 * nbytes, "chunks_evicted": 0,
    }  # fmt: skip
    assert {name: counters[name] for name in expected} == expected
