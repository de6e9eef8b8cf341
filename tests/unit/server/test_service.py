"""Each request gets one answer, which is true when it is given; a refusal names what was wrong and changes nothing."""

import hashlib
from collections.abc import Iterator
from dataclasses import replace

import msgspec
import pytest

from kvist.model.layout import GroupKind
from kvist.wire import messages as wire
from tests.support.engine import packed
from tests.support.layouts import Shape, hnd, kv_apart, nhd, opaque
from tests.support.memory import GUARD, stamp
from tests.support.simulated import LEASE_TTL_S, SimulatedDaemon, SimulatedEngine

NUM_SLOTS = 16
SHAPE = Shape(num_layers=2, num_blocks=32, block_tokens=2, num_heads=1, row_nbytes=8)
CHUNK_TOKENS = 4
LAID = nhd(SHAPE)


@pytest.fixture
def daemon() -> Iterator[SimulatedDaemon]:
    daemon = SimulatedDaemon(NUM_SLOTS, queue_max=8, requests_max=4)
    yield daemon
    daemon.close()


def connect(daemon: SimulatedDaemon, lay=nhd, **more) -> SimulatedEngine:
    """Return an engine whose memory is registered."""
    engine = SimulatedEngine(daemon, lay(SHAPE), chunk_tokens=CHUNK_TOKENS, **more)
    assert isinstance(answer(engine, engine.register()), wire.Registered)
    return engine


@pytest.fixture
def engine(daemon: SimulatedDaemon) -> SimulatedEngine:
    return connect(daemon)


def answer(engine: SimulatedEngine, sent) -> wire.Reply:
    engine.daemon.settle()
    return next(reply for answered, reply in engine.replies if answered is sent)


def digests(*names: str) -> bytes:
    return b"".join(hashlib.sha256(name.encode()).digest()[:16] for name in names)


def content(engine: SimulatedEngine, name: str) -> bytes:
    return stamp(name.encode() + bytes([engine.shard]), engine.map.nbytes)


def send_store(engine: SimulatedEngine, *names: str, parent: str = ""):
    """Send a store of stamped chunks, and free their blocks when it is answered."""
    chunks = engine.take_chunks(len(names))
    for blocks, name in zip(chunks, names, strict=True):
        engine.map.write(engine.arrays, blocks, content(engine, name))
    above = digests(parent) if parent else b""
    return engine.send(lambda number: wire.Store(number, digests(*names), above, packed(chunks)), chunks)


def store(engine: SimulatedEngine, *names: str, parent: str = "") -> wire.StoreReply:
    sent = send_store(engine, *names, parent=parent)
    reply = answer(engine, sent)
    engine.give_back(sent.chunks)
    assert isinstance(reply, wire.StoreReply)
    return reply


def look_up(engine: SimulatedEngine, *names: str, num_shards: int = 1) -> wire.LookupReply:
    reply = engine.call(lambda number: wire.Lookup(number, digests(*names), num_shards=num_shards))
    assert isinstance(reply, wire.LookupReply)
    return reply


def num_found(engine: SimulatedEngine, *names: str) -> int:
    """Return how many chunks a lookup finds, and give the lease back."""
    reply = look_up(engine, *names)
    engine.call(lambda number: wire.Release(number, reply.lease))
    return reply.num_chunks


def send_retrieve(engine: SimulatedEngine, lease: bytes, num: int, *, first: int = 0, **more):
    chunks = engine.take_chunks(num)
    return engine.send(lambda number: wire.Retrieve(number, lease, first, packed(chunks), **more), chunks)


def loaded(engine: SimulatedEngine, sent) -> list[bytes]:
    """Return what lies in the blocks of a retrieve."""
    return [engine.map.read(engine.arrays, blocks) for blocks in sent.chunks]


def refusal(engine: SimulatedEngine, sent) -> tuple[str, str]:
    reply = answer(engine, sent)
    assert isinstance(reply, wire.Error)
    return reply.code, reply.detail


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
    first, second = (connect(daemon, shard=shard, num_shards=2) for shard in range(2))
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
    daemon.service.is_draining = True
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


@pytest.mark.parametrize(
    ("change", "code", "named"),
    [
        ({"chunk_tokens": 5}, "layout_refused", "chunk_tokens 5 is no multiple of the engine's block of 2 tokens"),
        ({"chunk_tokens": -4}, "layout_refused", "chunk_tokens -4"),
        ({"chunk_tokens": 0}, "layout_refused", "chunk_tokens 0"),
        ({"chunk_tokens": 4096}, "layout_refused", "use a pool of at least"),
        ({"shard": 2, "num_shards": 2}, "malformed", "shard 2 of 2"),
        ({"shard": -1}, "malformed", "shard -1 of 1"),
        ({"shard": 70_000, "num_shards": 100_000}, "malformed", "70000 of 100000"),
        ({"memory": []}, "layout_refused", "0 allocations"),
        ({"groups": []}, "layout_refused", "0 groups"),
        ({"memory": [wire.MemorySpec("host", 0)]}, "layout_refused", "0 bytes"),
        ({"memory": [wire.MemorySpec("abacus", LAID.memory_nbytes[0])] * 2}, "layout_refused", "abacus"),
        ({"memory": [wire.MemorySpec("host", 2**63)] * 2}, "layout_refused", str(2**63)),
        ({"memory": [wire.MemorySpec("host", LAID.memory_nbytes[0] - 1)] * 2}, "layout_refused", "ends at byte"),
        ({"memory": [wire.MemorySpec("host", LAID.memory_nbytes[0] + 1)] * 2}, "layout_refused", "declared with"),
        ({"memory": [wire.MemorySpec("host", LAID.memory_nbytes[0])] * 3}, "malformed", "3 allocations and 2 file"),
    ],
    ids=str,
)
def test_a_registration_that_cannot_be_is_refused(daemon: SimulatedDaemon, change: dict, code: str, named: str):
    """A registration whose numbers do not fit is refused with them, maps nothing, and can be sent again, corrected."""
    engine = SimulatedEngine(daemon, LAID, chunk_tokens=CHUNK_TOKENS)
    fds = [memory.fd for memory in engine.memory]
    sent = engine.send(lambda number: msgspec.structs.replace(engine.registration(number), **change), fds=fds)
    found, detail = refusal(engine, sent)
    assert (found, named in detail) == (code, True), detail
    assert not daemon.device.open
    assert isinstance(answer(engine, engine.register()), wire.Registered)


@pytest.mark.parametrize("kind", [kind.value for kind in GroupKind if kind is not GroupKind.FULL] + ["sparse"])
def test_a_group_that_is_not_served_is_refused_by_name(daemon: SimulatedDaemon, kind: str):
    """Known kinds that are not served and unknown ones are both named."""
    engine = SimulatedEngine(daemon, LAID, chunk_tokens=CHUNK_TOKENS)

    def build(number: int) -> wire.Register:
        right = engine.registration(number)
        return msgspec.structs.replace(right, groups=[msgspec.structs.replace(right.groups[0], kind=kind)])

    sent = engine.send(build, fds=[memory.fd for memory in engine.memory])
    code, detail = refusal(engine, sent)
    assert (code, f"'{kind}'" in detail) == ("layout_refused", True)


def test_two_groups_are_refused_with_their_number(daemon: SimulatedDaemon):
    """Models with several groups are refused as such, not served in part."""
    engine = SimulatedEngine(daemon, LAID, chunk_tokens=CHUNK_TOKENS)

    def build(number: int) -> wire.Register:
        right = engine.registration(number)
        return msgspec.structs.replace(right, groups=right.groups * 2)

    sent = engine.send(build, fds=[memory.fd for memory in engine.memory])
    assert refusal(engine, sent) == ("layout_refused", "2 layer groups; only models with one are served")


def test_a_chunk_of_crumbs_is_refused(daemon: SimulatedDaemon):
    """A chunk of more rows than can be planned is refused with their number, before anything is planned."""
    pool = SimulatedDaemon(1 << 14)
    rows = (1 << 22) + 1
    plane = wire.PlaneSpec(0, 0, 1, 0, 1, num_heads=rows, head_stride=1)
    engine = SimulatedEngine(pool, opaque(replace(SHAPE, num_blocks=2)), chunk_tokens=CHUNK_TOKENS)

    def build(number: int) -> wire.Register:
        memory = [wire.MemorySpec("host", rows)]
        return wire.Register(number, 0, 1, 2, memory, [wire.GroupSpec("full", 2, [plane])])

    code, detail = refusal(engine, engine.send(build, fds=[engine.memory[0].fd]))
    assert (code, detail) == ("layout_refused", f"a chunk of {rows} rows is over the limit of {rows - 1}")
    pool.close()


def test_registering_twice_is_refused(engine: SimulatedEngine):
    """A session registers once; the second time is refused, also while the first is on its way."""
    code, detail = refusal(engine, engine.register())
    assert (code, "has registered" in detail) == ("already_registered", True)
    late = SimulatedEngine(engine.daemon, LAID, chunk_tokens=CHUNK_TOKENS)
    first, second = late.register(), late.register()
    assert refusal(late, second)[0] == "already_registered"
    assert isinstance(answer(late, first), wire.Registered)


NO = b"\0" * 16


@pytest.mark.parametrize(
    ("build", "code", "named"),
    [
        (lambda n: wire.Lookup(n, b"x" * 17), "malformed", "17 bytes"),
        (lambda n: wire.Lookup(n, NO * (wire.CHUNKS_MAX + 1)), "malformed", f"{wire.CHUNKS_MAX + 1} digests"),
        (lambda n: wire.Lookup(n, NO, num_shards=0), "malformed", "0 shards"),
        (lambda n: wire.Lookup(n, NO, num_groups=-1), "malformed", "-1 groups"),
        (lambda n: wire.Lookup(n, NO, num_shards=2**62, num_groups=2), "malformed", str(2**62)),
        (lambda n: wire.Lookup(n, NO * wire.CHUNKS_MAX, num_shards=4096), "malformed", "4096 shards"),
        (lambda n: wire.Store(n, NO, b"x", packed([[0, 1]])), "malformed", "1 bytes"),
        (lambda n: wire.Store(n, NO, NO * 2, packed([[0, 1]])), "malformed", "2 digests as one parent"),
        (lambda n: wire.Store(n, NO, b"", packed([[0]])), "invalid_blocks", "1 block ids for 1 chunks of 2"),
        (lambda n: wire.Store(n, NO, b"", packed([[0, 32]])), "invalid_blocks", "block id 32"),
        (lambda n: wire.Store(n, NO, b"", packed([[0, -1]])), "invalid_blocks", "block id -1"),
        (lambda n: wire.Store(n, NO, b"", packed([[3, 3]])), "invalid_blocks", "block id 3 appears 2 times"),
        (
            lambda n: wire.Store(n, NO, b"", bytes(4 * (wire.BLOCKS_MAX + 1))),
            "invalid_blocks",
            f"{wire.BLOCKS_MAX + 1} block ids are over the limit",
        ),
        (lambda n: wire.Retrieve(n, b"nobody", 0, packed([[0, 1]])), "unknown_lease", b"nobody".hex()),
        (lambda n: wire.Hello(n, "kvist", 1, "x"), "malformed", "hello"),
    ],
    ids=lambda value: "" if callable(value) else value,
)
def test_a_request_that_cannot_be_is_refused(engine: SimulatedEngine, build, code: str, named: str):
    """A request with a wrong value is refused with that value, and the session goes on."""
    found, detail = refusal(engine, engine.send(build))
    assert (found, named in detail) == (code, True), detail
    assert store(engine, "a1").num_stored == 1


@pytest.mark.parametrize(
    ("change", "code", "named"),
    [
        ({"first_chunk": -1}, "invalid_blocks", "chunks [-1, 1) of a lease on 3 chunks"),
        ({"first_chunk": 2}, "invalid_blocks", "chunks [2, 4) of a lease on 3 chunks"),
        ({"first_chunk": 2**62}, "invalid_blocks", str(2**62)),
        ({"block_ids": b""}, "invalid_blocks", "chunks [0, 0)"),
        ({"block_ids": packed([[0, 1], [2]])}, "invalid_blocks", "3 block ids"),
        ({"block_ids": packed([[0, 1], [2, 99]])}, "invalid_blocks", "block id 99"),
        ({"num_skipped_blocks": 2}, "invalid_blocks", "2 blocks to skip in a chunk of 2"),
        ({"num_skipped_blocks": -1}, "invalid_blocks", "-1 blocks to skip"),
        ({"deadline_ms": -1}, "malformed", "-1 ms"),
        ({"lease": b"\1"}, "unknown_lease", "01"),
    ],
    ids=str,
)
def test_a_retrieve_that_cannot_be_is_refused(engine: SimulatedEngine, change: dict, code: str, named: str):
    """A retrieve with a wrong value is refused with that value; its lease can still be claimed."""
    store(engine, "a1", "a2", "a3")
    lease = look_up(engine, "a1", "a2", "a3").lease
    right = wire.Retrieve(0, lease, 0, packed([[0, 1], [2, 3]]))
    found, detail = refusal(engine, engine.send(lambda n: msgspec.structs.replace(right, id=n, **change)))
    assert (found, named in detail) == (code, True), detail
    assert all((array == GUARD).all() for array in engine.arrays)
    assert isinstance(engine.call(lambda n: msgspec.structs.replace(right, id=n)), wire.RetrieveReply)


def test_a_null_block_is_refused(daemon: SimulatedDaemon):
    """The engine's null block is neither read nor written."""
    laid = replace(LAID, group=replace(LAID.group, null_block=0))
    engine = SimulatedEngine(daemon, laid, chunk_tokens=CHUNK_TOKENS)
    assert isinstance(answer(engine, engine.register()), wire.Registered)
    sent = engine.send(lambda number: wire.Store(number, NO, b"", packed([[1, 0]])))
    assert refusal(engine, sent) == ("invalid_blocks", "block id 0 is the engine's null block")


def test_chunks_of_another_size_are_not_loaded(daemon: SimulatedDaemon, engine: SimulatedEngine):
    """An engine that finds a chunk under its key whose size is not its own is told so, and nothing is written."""
    store(engine, "a1")
    other = SimulatedEngine(daemon, LAID, engine_id="y", chunk_tokens=2 * CHUNK_TOKENS)
    assert isinstance(answer(other, other.register()), wire.Registered)
    code, detail = refusal(other, send_retrieve(other, look_up(other, "a1").lease, 1))
    assert (code, str(other.map.nbytes) in detail) == ("layout_refused", True)


def test_nothing_is_copied_before_registering(daemon: SimulatedDaemon):
    """A session without memory may look up and release, and is told that it cannot store or load."""
    engine = SimulatedEngine(daemon, LAID, chunk_tokens=CHUNK_TOKENS)
    assert look_up(engine, "a1").num_chunks == 0
    for build in (
        lambda number: wire.Store(number, NO, b"", packed([[0, 1]])),
        lambda number: wire.Retrieve(number, NO, 0, packed([[0, 1]])),
    ):
        assert refusal(engine, engine.send(build))[0] == "not_registered"


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
