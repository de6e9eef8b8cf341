"""A tail is kept, found, held and loaded behind its prefix, as a chunk of its own in a slot as large as the others."""

from __future__ import annotations

import msgspec
import pytest

from kvist.model.keys import Digest, chunk_keys
from kvist.model.rows import Row
from kvist.wire import messages as wire
from tests.support.copying import CopyingEngine
from tests.support.engine import packed
from tests.support.kinds import Way, content, of_kind
from tests.support.layouts import Shape, hnd, nhd
from tests.support.memory import GUARD
from tests.support.memory_tier import MemoryTier
from tests.support.named import answer, digests, refusal
from tests.support.simulated import Sent, SimulatedDaemon, SimulatedEngine

CHUNK_TOKENS = 6
"""Three blocks: there are tails of one block and of two."""
SHAPE = Shape(num_layers=1, num_blocks=48, block_tokens=2, num_heads=1, row_nbytes=1024)
BLOCK_NBYTES = 4096
"""As large as the smallest slot, so that a tail in a slot of its own size would be seen."""
SLOT_NBYTES = 3 * BLOCK_NBYTES
NUM_SLOTS = 32
FULL = (wire.NeedSpec("full"),)


def states(shape: Shape):
    """Lay out blocks of a group without tails."""
    return of_kind(nhd(shape).group.kind.RECURRENT, nhd)(shape)


@pytest.fixture
def daemon() -> SimulatedDaemon:
    daemon = SimulatedDaemon(NUM_SLOTS * SLOT_NBYTES // 4096)
    yield daemon
    daemon.close()


@pytest.fixture(params=[SimulatedEngine, CopyingEngine], ids=["daemon lane", "engine lane"])
def engine(daemon: SimulatedDaemon, request: pytest.FixtureRequest) -> SimulatedEngine:
    return connect(daemon, nhd, make=request.param)


def connect(daemon: SimulatedDaemon, *ways: Way, make: type = SimulatedEngine) -> SimulatedEngine:
    """Return a worker that has registered all ways as groups."""
    more = [(Row(group, 0), way(SHAPE)) for group, way in enumerate(ways) if group]
    engine = make(daemon, ways[0](SHAPE), more=more, chunk_tokens=CHUNK_TOKENS)
    assert isinstance(answer(engine, engine.register()), wire.Registered)
    return engine


def reply_to(engine: SimulatedEngine, sent: Sent, **more: int) -> wire.Reply:
    """Let a request's copy be carried out in whichever lane; return the reply without its id."""
    if isinstance(engine, CopyingEngine) and sent.request.id in engine.orders:
        engine.carry_out(sent.request.id, **more)
    return msgspec.structs.replace(answer(engine, sent), id=0)


def stamped(engine: SimulatedEngine, row: int, name: str, num_blocks: int) -> bytes:
    return content(digests(name), engine.rows[row].row, num_blocks * BLOCK_NBYTES)


def send_store(engine: SimulatedEngine, *names: str, parent: str = "", tail_blocks: int = 0, row: int = 0) -> Sent:
    chunks = engine.take_chunks(len(names), row, tail_blocks=max(0, tail_blocks))
    for blocks, name in zip(chunks, names, strict=True):
        engine.rows[row].write(blocks, stamped(engine, row, name, len(blocks)))
    above = digests(parent) if parent else b""
    return engine.send(
        lambda number: wire.Store(number, digests(*names), above, packed(chunks), row=row, tail_blocks=tail_blocks),
        chunks,
    )


def store(
    engine: SimulatedEngine, *names: str, parent: str = "", tail_blocks: int = 0, row: int = 0
) -> wire.StoreReply:
    sent = send_store(engine, *names, parent=parent, tail_blocks=tail_blocks, row=row)
    reply = reply_to(engine, sent)
    engine.give_back(sent.chunks, row)
    assert isinstance(reply, wire.StoreReply)
    return reply


def store_all(engine: SimulatedEngine, *, row: int = 0) -> None:
    """Keep the chunks ``a`` and ``b``, and behind them the tails ``b1``, of one block, and ``b2``, of two."""
    assert store(engine, "a", "b", row=row) == wire.StoreReply(0, 2, 0)
    for num_blocks in (1, 2):
        name = f"b{num_blocks}"
        assert store(engine, name, parent="b", tail_blocks=num_blocks, row=row) == wire.StoreReply(0, 1, 0)


def send_look_up(
    engine: SimulatedEngine, *names: str, tails: tuple[str, ...], needs: tuple[wire.NeedSpec, ...] = FULL
) -> Sent:
    return engine.send(lambda number: wire.Lookup(number, digests(*names), needs, digests(*tails)))


def look_up(engine: SimulatedEngine, *names: str, tails: tuple[str, ...], **more) -> wire.LookupReply:
    reply = reply_now(engine, send_look_up(engine, *names, tails=tails, **more))
    assert isinstance(reply, wire.LookupReply), reply
    return msgspec.structs.replace(reply, id=0)


def reply_now(engine: SimulatedEngine, sent: Sent) -> wire.Reply:
    """Return the reply to what was sent last, without letting any copy go on."""
    answered, reply = engine.replies.pop()
    assert answered is sent
    return reply


def found(engine: SimulatedEngine, *names: str, tails: tuple[str, ...]) -> tuple[int, int]:
    """Return how many chunks and which tail a lookup finds; nothing stays held."""
    reply = look_up(engine, *names, tails=tails)
    reply_now(engine, engine.send(lambda number: wire.Release(number, reply.lease)))
    return reply.num_chunks, reply.tail


def send_retrieve(
    engine: SimulatedEngine, lease: bytes, first: int, num: int = 1, *, tail_blocks: int = 0, row: int = 0, **more
) -> Sent:
    chunks = engine.take_chunks(num, row, tail_blocks=max(0, tail_blocks))
    return engine.send(
        lambda number: wire.Retrieve(number, lease, first, packed(chunks), row=row, tail_blocks=tail_blocks, **more),
        chunks,
    )


def check_loaded(engine: SimulatedEngine, sent: Sent, *names: str) -> None:
    """Assert that chunks have come into the blocks of a retrieve byte for byte, and that nothing else has changed."""
    assert reply_to(engine, sent) == wire.RetrieveReply(0, len(names), [])
    row = sent.request.row
    expected = [stamped(engine, row, name, len(blocks)) for name, blocks in zip(names, sent.chunks, strict=True)]
    assert [engine.rows[row].read(blocks) for blocks in sent.chunks] == expected
    engine.give_back(sent.chunks, row)
    assert engine.sent or all((array == GUARD).all() for array in engine.arrays)


def test_a_tail_comes_back_behind_its_prefix(daemon: SimulatedDaemon, engine: SimulatedEngine):
    """The longest of the tails that are asked for and there is held, and comes into other blocks, byte for byte."""
    assert store(engine, "a", "b") == wire.StoreReply(0, 2, 0)
    stored = {}
    for number, name in enumerate(("b1", "b2")):
        sent = send_store(engine, name, parent="b", tail_blocks=number + 1)
        assert found(engine, "a", "b", tails=("b1", "b2")) == (2, number)
        assert reply_to(engine, sent) == wire.StoreReply(0, 1, 0)
        stored[name] = sent.chunks[0]
        engine.give_back(sent.chunks)
    for tails, tail in ((("b1", "b2"), 2), (("b1",), 1), (("other", "b1"), 2), (("b1", "other"), 1), ((), 0)):
        reply = look_up(engine, "a", "b", tails=tails)
        assert (reply.num_chunks, reply.tail) == (2, tail)
        check_loaded(engine, send_retrieve(engine, reply.lease, 0, 2), "a", "b")
        if tail:
            name = tails[tail - 1]
            load = send_retrieve(engine, reply.lease, 2, tail_blocks=int(name[1]))
            assert set(load.chunks[0]).isdisjoint(stored[name])
            check_loaded(engine, load, name)
        assert (daemon.status().num_leases, daemon.status().num_pinned) == (0, 0)
    assert store(engine, "b2", parent="b", tail_blocks=2) == wire.StoreReply(0, 0, 1)
    counters = daemon.status().counters
    assert (counters["bytes_stored"], counters["chunks_stored"]) == (2 * SLOT_NBYTES + 3 * BLOCK_NBYTES, 4)


def test_a_sequence_shorter_than_a_chunk_is_a_tail(daemon: SimulatedDaemon, engine: SimulatedEngine):
    """With no whole chunk there is no parent; the tail is chunk 0 of the lease, and all that is claimed."""
    assert store(engine, "2", tail_blocks=2) == wire.StoreReply(0, 1, 0)
    assert look_up(engine, tails=("1",)) == wire.LookupReply(0, 0)
    reply = look_up(engine, tails=("1", "2"))
    assert (reply.num_chunks, reply.tail, len(reply.lease)) == (0, 2, 16)
    check_loaded(engine, send_retrieve(engine, reply.lease, 0, tail_blocks=2), "2")
    assert daemon.status().num_leases == 0


def test_blocks_at_the_start_of_a_tail_can_be_skipped(engine: SimulatedEngine):
    """As of chunks: the leading blocks are verified and not written; all of them cannot be skipped."""
    store_all(engine)
    reply = look_up(engine, "a", "b", tails=("b1", "b2"))
    code, detail = refusal(engine, send_retrieve(engine, reply.lease, 2, tail_blocks=2, num_skipped_blocks=2))
    assert (code, detail) == ("invalid_blocks", "2 blocks to skip in a chunk of 2")
    sent = send_retrieve(engine, reply.lease, 2, tail_blocks=2, num_skipped_blocks=1)
    assert reply_to(engine, sent) == wire.RetrieveReply(0, 1, [])
    position = engine.rows[0].map_of(2).position
    right = stamped(engine, 0, "b2", 2)
    loaded = engine.rows[0].read(sent.chunks[0])
    assert loaded == bytes(right[place] if at else GUARD for place, at in enumerate(position))


def test_a_tail_without_its_parent_is_not_kept(daemon: SimulatedDaemon, engine: SimulatedEngine):
    """It could not be found: it is counted as refused, and takes no slot."""
    assert store(engine, "b1", parent="b", tail_blocks=1) == wire.StoreReply(0, 0, 0, 1, "no parent")
    assert daemon.status().pool_used_nbytes == 0


def test_a_tail_goes_with_what_it_hangs_on(daemon: SimulatedDaemon, engine: SimulatedEngine):
    """When its parent is dropped, so is the tail; what is above them stays."""
    store_all(engine)
    daemon.service._index.drop(chunk_of(daemon, "b"))
    assert found(engine, "a", "b", tails=("b1", "b2")) == (1, 0)
    assert daemon.status().pool_used_nbytes == SLOT_NBYTES
    assert found(engine, tails=("b2",)) == (0, 0)


def test_a_prefix_that_is_not_found_whole_has_no_tail(engine: SimulatedEngine):
    """Tails are looked at only if all chunks were found: they go on from the last."""
    store_all(engine)
    assert found(engine, "a", "b", "c", tails=("b1", "b2")) == (2, 0)
    assert found(engine, "x", tails=("b1", "b2")) == (0, 0)
    assert found(engine, "a", "b", tails=("b1", "b2")) == (2, 2)


@pytest.mark.parametrize("place", [0, BLOCK_NBYTES, 2 * BLOCK_NBYTES - 1])
def test_a_corrupt_tail_fails_and_is_dropped_alone(daemon: SimulatedDaemon, engine: SimulatedEngine, place: int):
    """The reply names it; its prefix and the other tail are found as before."""
    store_all(engine)
    reply = look_up(engine, "a", "b", tails=("b1", "b2"))
    daemon.pool.bytes[chunk_of(daemon, "b2").slot_offset + place] ^= 1
    check_loaded(engine, send_retrieve(engine, reply.lease, 0, 2), "a", "b")
    sent = send_retrieve(engine, reply.lease, 2, tail_blocks=2)
    assert reply_to(engine, sent) == wire.RetrieveReply(0, 1, [0])
    assert daemon.status().counters["chunks_corrupt"] == 1
    assert found(engine, "a", "b", tails=("b1", "b2")) == (2, 1)
    assert daemon.status().pool_used_nbytes == 3 * SLOT_NBYTES


def chunk_of(daemon: SimulatedDaemon, name: str):
    (key,) = chunk_keys([Digest(digests(name))], group=0, shard=0)
    return daemon.service._index.get(key)


@pytest.mark.parametrize(
    ("first", "num", "tail_blocks", "code"),
    [
        (2, 1, 0, "layout_refused"),
        (1, 2, 0, "layout_refused"),
        (0, 3, 0, "layout_refused"),
        (0, 1, 2, "layout_refused"),
        (1, 1, 2, "layout_refused"),
        (1, 2, 2, "layout_refused"),
        (2, 1, 1, "layout_refused"),
        (2, 2, 2, "invalid_blocks"),
        (3, 1, 2, "invalid_blocks"),
        (2, 1, 3, "malformed"),
        (2, 1, -1, "malformed"),
    ],
)
def test_a_tail_is_loaded_as_what_it_is(engine: SimulatedEngine, first: int, num: int, tail_blocks: int, code: str):
    """A whole chunk at the tail's place, a tail at a chunk's, one of another length: refused, and no claim is spent."""
    store_all(engine)
    reply = look_up(engine, "a", "b", tails=("b1", "b2"))
    sent = send_retrieve(engine, reply.lease, first, num, tail_blocks=tail_blocks)
    found_code, detail = refusal(engine, sent)
    assert found_code == code, detail
    if code == "layout_refused":
        assert f"of another size than {(tail_blocks or 3) * BLOCK_NBYTES} bytes" in detail
    check_loaded(engine, send_retrieve(engine, reply.lease, 2, tail_blocks=2), "b2")
    check_loaded(engine, send_retrieve(engine, reply.lease, 0, 2), "a", "b")


@pytest.mark.parametrize("is_tail_first", [False, True])
def test_a_lease_ends_with_whole_chunks_and_tail(
    daemon: SimulatedDaemon, engine: SimulatedEngine, *, is_tail_first: bool
):
    """One of the two that has landed does not end it, nor two claims of which one has not landed; both do."""
    store_all(engine)
    reply = look_up(engine, "a", "b", tails=("b1", "b2"))

    def send(*, is_tail: bool) -> Sent:
        return send_retrieve(engine, reply.lease, *((2, 1) if is_tail else (0, 2)), tail_blocks=2 if is_tail else 0)

    def check(sent: Sent, *, is_tail: bool) -> None:
        check_loaded(engine, sent, *(("b2",) if is_tail else ("a", "b")))

    check(send(is_tail=is_tail_first), is_tail=is_tail_first)
    assert (daemon.status().num_leases, daemon.status().num_pinned) == (1, 3)
    last = send(is_tail=not is_tail_first)
    assert refusal_now(engine, send(is_tail=is_tail_first)) == "lease_claimed"
    assert (daemon.status().num_leases, daemon.status().num_pinned) == (1, 3)
    check(last, is_tail=not is_tail_first)
    assert (daemon.status().num_leases, daemon.status().num_pinned) == (0, 0)
    assert refusal_now(engine, send(is_tail=is_tail_first)) == "unknown_lease"


def refusal_now(engine: SimulatedEngine, sent: Sent) -> str:
    """Return the code of a refusal without letting any copy go on."""
    reply = reply_now(engine, sent)
    assert isinstance(reply, wire.Error), reply
    engine.give_back(sent.chunks)
    return reply.code


@pytest.mark.parametrize("tail_blocks", [-1, 3, 4, 2**40])
def test_a_tail_is_shorter_than_a_chunk(engine: SimulatedEngine, tail_blocks: int):
    """A store of a tail with as many blocks as a chunk, with more or with fewer than one is malformed."""
    sent = engine.send(lambda number: wire.Store(number, digests("x"), b"", packed([[0]]), tail_blocks=tail_blocks))
    code, detail = refusal(engine, sent)
    told = f"a tail of {tail_blocks} blocks in a row of kind 'full', whose chunks have 3"
    assert (code, told in detail) == ("malformed", True), detail


@pytest.mark.parametrize("names", [(), ("x", "y")], ids=len)
def test_a_store_of_a_tail_names_one(engine: SimulatedEngine, names: tuple[str, ...]):
    """Several digests, or none, of a tail are malformed, whatever blocks come with them."""
    code, detail = refusal(engine, send_store(engine, *names, tail_blocks=1))
    assert (code, f"{len(names)} digests of a tail of 1 blocks" in detail) == ("malformed", True), detail


def test_only_rows_of_whole_prefixes_have_tails(daemon: SimulatedDaemon):
    """What needs a part of a prefix has none to store or to load, and no lookup with such a group has any to offer."""
    engine = connect(daemon, nhd, states)
    told = "a tail of 1 blocks in a row of kind 'recurrent', whose chunks have 1"
    for send in (
        lambda: send_store(engine, "x", tail_blocks=1, row=1),
        lambda: send_retrieve(engine, b"l" * 16, 0, tail_blocks=1, row=1),
    ):
        code, detail = refusal(engine, send())
        assert (code, told in detail) == ("malformed", True), detail
    store_all(engine)
    needs = (wire.NeedSpec("full"), wire.NeedSpec("recurrent"), wire.NeedSpec("window", 1))
    code, detail = refusal(engine, send_look_up(engine, "a", tails=("a1", "a2"), needs=needs))
    assert (code, "2 tails behind groups of kinds ['recurrent', 'window']" in detail) == ("malformed", True), detail


def test_a_lookup_names_so_many_tails(engine: SimulatedEngine):
    """256 are looked at; one more is malformed, and so are digests that are not whole."""
    store_all(engine)
    others = tuple(str(number) for number in range(255))
    assert found(engine, "a", "b", tails=("b1", *others)) == (2, 1)
    assert found(engine, "a", "b", tails=(*others, "b1")) == (2, 256)
    assert refusal(engine, send_look_up(engine, "a", tails=("x", "y", *others))) == (
        "malformed", "257 tails; at most 256",
    )  # fmt: skip
    sent = engine.send(lambda number: wire.Lookup(number, digests("a"), FULL, b"x" * 17))
    assert refusal(engine, sent)[0] == "malformed"


def test_slots_of_tails_add_up(daemon: SimulatedDaemon, engine: SimulatedEngine):
    """Whole chunks and tails share the pool to its last slot; what is evicted makes room for either."""
    for number in range(NUM_SLOTS):
        assert store(engine, f"{number}").num_stored == 1
        tail = store(engine, f"{number}+", parent=f"{number}", tail_blocks=1 + number % 2)
        assert tail.num_stored == 1
        status = daemon.status()
        assert status.pool_used_nbytes == status.num_sealed * SLOT_NBYTES
        assert status.num_sealed == min(2 * number + 2, NUM_SLOTS)
    assert daemon.status().pool_used_nbytes == daemon.pool.nbytes
    while (nbytes := daemon.service._index.evict()) is not None:
        assert nbytes == SLOT_NBYTES
    assert daemon.status().pool_used_nbytes == 0


def test_a_tail_that_is_not_copied_leaves_nothing(daemon: SimulatedDaemon, engine: SimulatedEngine):
    """A failed copy gives the whole slot back, and the tail can be stored again."""
    store(engine, "a")
    sent = send_store(engine, "a1", parent="a", tail_blocks=1)
    assert daemon.status().pool_used_nbytes == 2 * SLOT_NBYTES
    daemon.executor.is_breaking = True
    assert reply_to(engine, sent, num=0) == wire.StoreReply(0, 0, 0, 1, "copy failed")
    assert daemon.status().pool_used_nbytes == SLOT_NBYTES
    daemon.executor.is_breaking = False
    assert store(engine, "a1", parent="a", tail_blocks=1).num_stored == 1
    assert found(engine, "a", tails=("a1",)) == (1, 1)


def test_a_tail_is_there_when_all_rows_have_it(daemon: SimulatedDaemon):
    """Of two groups with two readers each: the longest that both have, held for all readers of both."""
    engines = connect(daemon, nhd, hnd), connect(daemon, hnd, nhd)
    needs = (wire.NeedSpec("full", num_readers=2), wire.NeedSpec("full", num_readers=2))
    store_all(engines[0])
    store(engines[1], "a", "b", row=1)
    assert look_up(engines[0], "a", "b", tails=("b1", "b2"), needs=needs).tail == 0
    store(engines[0], "b1", parent="b", tail_blocks=1, row=1)
    assert look_up(engines[0], "a", "b", tails=("b1", "b2"), needs=needs).tail == 1
    store(engines[1], "b2", parent="b", tail_blocks=2, row=1)
    daemon.service._leases.release_session(engines[0].session.id)
    reply = look_up(engines[0], "a", "b", tails=("b1", "b2"), needs=needs)
    assert (reply.num_chunks, reply.tail, daemon.status().num_pinned) == (2, 2, 6)
    for engine in engines:
        for row in range(2):
            assert daemon.status().num_leases == 1
            check_loaded(engine, send_retrieve(engine, reply.lease, 2, tail_blocks=2, row=row), "b2")
            check_loaded(engine, send_retrieve(engine, reply.lease, 0, 2, row=row), "a", "b")
    assert (daemon.status().num_leases, daemon.status().num_pinned) == (0, 0)


def test_a_tail_comes_from_a_tier_behind_its_prefix():
    """Where all whole chunks are on their way, so is the longest tail, into a slot as large as theirs."""
    tier = MemoryTier()
    first = SimulatedDaemon(NUM_SLOTS * SLOT_NBYTES // 4096, tiers=[tier])
    store_all(connect(first, nhd))
    later = connect(SimulatedDaemon(NUM_SLOTS * SLOT_NBYTES // 4096, tiers=[tier]), nhd)
    assert look_up(later, "a", "b", tails=("b1", "b2")) == wire.LookupReply(0, 0, num_loading=2)
    later.daemon.settle()
    assert (len(tier.num_fetched), later.daemon.status().pool_used_nbytes) == (3, 3 * SLOT_NBYTES)
    reply = look_up(later, "a", "b", tails=("b1", "b2"))
    assert (reply.num_chunks, reply.tail, reply.num_loading) == (2, 2, 0)
    check_loaded(later, send_retrieve(later, reply.lease, 0, 2), "a", "b")
    check_loaded(later, send_retrieve(later, reply.lease, 2, tail_blocks=2), "b2")
    for daemon in (first, later.daemon):
        daemon.close()
