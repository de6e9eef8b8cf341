"""A session of the engine lane gets orders for its requests, and everything else as any other session does."""

import msgspec
import pytest

from kvist.wire import messages as wire
from tests.support.copying import CHECKSUM_NBYTES, CopyingEngine, checksum, fields_of
from tests.support.engine import packed
from tests.support.named import (
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
from tests.support.simulated import LEASE_TTL_S, Sent, SimulatedDaemon, SimulatedEngine


@pytest.fixture
def copier(daemon: SimulatedDaemon) -> CopyingEngine:
    return connect_copier(daemon)


def connect_copier(daemon: SimulatedDaemon, **more) -> CopyingEngine:
    copier = CopyingEngine(daemon, **more)
    assert isinstance(answer(copier, copier.register()), wire.Registered)
    return copier


def reply_to(engine: CopyingEngine, sent: Sent, **more) -> wire.Reply:
    """Carry the order of a request out, and return the request's reply."""
    engine.carry_out(sent.request.id, **more)
    return answer(engine, sent)


def stored(engine: CopyingEngine, *names: str) -> None:
    sent = send_store(engine, *names)
    assert reply_to(engine, sent).num_stored == len(names)
    engine.give_back(sent.chunks)


def test_the_pool_is_handed_over(daemon: SimulatedDaemon):
    """The reply has the pool's descriptor and size; nothing of the engine is opened, and its process is watched."""
    copier = CopyingEngine(daemon)
    reply = answer(copier, copier.register())
    assert reply == wire.Registered(1, [copier.map.nbytes], daemon.pool.nbytes)
    assert copier.pool_fds == [daemon.pool.fd]
    assert not daemon.device.open
    assert [process.pid for process in daemon.processes] == [copier.session.peer.pid]
    assert daemon.status().num_registered == 1


def test_a_daemon_that_isolates_gives_its_pool_to_nobody():
    """The refusal names the option; the memory can still be handed over to the daemon's own lane."""
    daemon = SimulatedDaemon(NUM_SLOTS, is_isolated=True)
    copier = CopyingEngine(daemon, shard=3)
    code, detail = refusal(copier, copier.register())
    assert (code, "--isolate" in detail, "shard 3" in detail) == ("pool_kept", True, True)
    assert copier.pool_fds == []
    assert daemon.processes == []
    fds = [memory.fd for memory in copier.memory]
    reply = copier.call(lambda number: SimulatedEngine.registration(copier, number), fds=fds)
    assert reply == wire.Registered(2, [copier.map.nbytes])
    daemon.close()


@pytest.mark.parametrize(
    ("memory", "num_fds", "code", "named"),
    [
        ([wire.MemorySpec("engine", LAID.memory_nbytes[0]), wire.MemorySpec("host", LAID.memory_nbytes[1])], 1,
         "layout_refused", "['engine', 'host']"),
        ([wire.MemorySpec("engine", nbytes) for nbytes in LAID.memory_nbytes], 2, "malformed", "0 file descriptors"),
        ([wire.MemorySpec("engine", nbytes, payload=b"x") for nbytes in LAID.memory_nbytes], 0, "layout_refused", "1"),
        ([wire.MemorySpec("engine", nbytes, part_nbytes=[nbytes]) for nbytes in LAID.memory_nbytes], 2,
         "layout_refused", "1 segments"),
    ],
    ids=["mixed", "descriptors", "payload", "segments"],
)  # fmt: skip
def test_memory_that_is_not_handed_over_has_no_handle(daemon: SimulatedDaemon, memory, num_fds, code, named):
    """Memory of the engine lane with anything that opens memory is refused, and can be registered without."""
    copier = CopyingEngine(daemon)
    fds = [memory.fd for memory in copier.memory][:num_fds]
    sent = copier.send(lambda number: msgspec.structs.replace(copier.registration(number), memory=memory), fds=fds)
    found, detail = refusal(copier, sent)
    assert (found, named in detail) == (code, True), detail
    assert isinstance(answer(copier, copier.register()), wire.Registered)


def test_a_copying_engine_registers_once(copier: CopyingEngine):
    """The second registration is refused, and no second watch or descriptor is left."""
    assert refusal(copier, copier.register())[0] == "already_registered"
    assert len(copier.daemon.processes) == len(copier.pool_fds) == 1


def test_what_one_engine_copies_another_copies_back(daemon: SimulatedDaemon, copier: CopyingEngine):
    """Orders name the chunks that are missing, by position, slot and checksum; the bytes come back elsewhere."""
    stored(copier, "a1")
    sent = send_store(copier, "a1", "a2", "a3")
    order, _ = copier.orders[sent.request.id]
    assert fields_of(order)[1:] == ([1, 2], [])
    assert num_found(copier, "a1", "a2", "a3") == 1
    reply = reply_to(copier, sent)
    assert reply == wire.StoreReply(reply.id, 2, 1)
    assert reply.id > sent.request.id
    other = connect_copier(daemon, engine_id="y")
    sent = send_retrieve(other, look_up(other, "a1", "a2", "a3").lease, 3, num_skipped_blocks=1)
    expected = [content(other, name) for name in ("a1", "a2", "a3")]
    assert fields_of(other.orders[sent.request.id][0])[2] == [checksum(chunk) for chunk in expected]
    reply = reply_to(other, sent)
    assert reply == wire.RetrieveReply(reply.id, 3, [])
    assert loaded(other, sent)[1:] == expected[1:]
    assert daemon.status().num_leases == daemon.status().num_pinned == 0


def test_a_store_that_is_carried_out_in_part_keeps_that_part(copier: CopyingEngine):
    """What was copied is sealed, the rest is aborted and counted as refused."""
    sent = send_store(copier, "a1", "a2", "a3")
    reply = reply_to(copier, sent, num=1)
    assert reply == wire.StoreReply(reply.id, 1, 0, 2, "copy failed")
    assert num_found(copier, "a1", "a2", "a3") == 1
    assert copier.daemon.status().num_reserved == 0


def test_a_load_that_is_carried_out_in_part_names_the_rest(copier: CopyingEngine):
    """What was not copied is named and kept; what does not match is named and dropped, with all behind it."""
    stored(copier, "a1", "a2", "a3", "a4")
    sent = send_retrieve(copier, look_up(copier, "a1", "a2", "a3", "a4").lease, 4)
    reply = reply_to(copier, sent, num=3, is_lying=lambda position: position == 1)
    assert reply == wire.RetrieveReply(reply.id, 4, [1, 3])
    assert num_found(copier, "a1", "a2", "a3", "a4") == 1
    counters = copier.daemon.status().counters
    assert (counters["chunks_corrupt"], counters["chunks_loaded"]) == (1, 2)


NO = b"\0" * CHECKSUM_NBYTES


@pytest.mark.parametrize(
    ("order", "fields", "named"),
    [
        ("nobody's", (0,), "there is no order"),
        ("store", (4, NO * 4), "4 of 3 chunks copied"),
        ("store", (3, NO * 2), "16 bytes of checksums of 3 chunks"),
        ("store", (1, NO, [0]), "1 chunks of a store"),
        ("load", (3, b"", [3]), "of which [3] failed"),
        ("load", (1, NO), "8 bytes of checksums"),
    ],
    ids=str,
)
def test_a_hostile_answer_is_refused(copier: CopyingEngine, order: str, fields: tuple, named: str):
    """An answer that cannot be is malformed and changes nothing; the orders are carried out as if it had not come."""
    stored(copier, "a1", "a2", "a3")
    load = send_retrieve(copier, look_up(copier, "a1", "a2", "a3").lease, 3)
    put = send_store(copier, "b1", "b2", "b3")
    number = {"nobody's": 99, "store": put.request.id, "load": load.request.id}[order]
    code, detail = refusal(copier, copier.send(lambda own: wire.CopyDone(own, number, *fields)))
    assert (code, named in detail) == ("malformed", True), detail
    assert reply_to(copier, load).failed == []
    assert reply_to(copier, put).num_stored == 3
    code, detail = refusal(copier, copier.send(lambda own: wire.CopyDone(own, put.request.id, 3, NO * 3)))
    assert (code, "there is no order" in detail) == ("malformed", True), detail


def test_only_who_was_ordered_answers(daemon: SimulatedDaemon, engine: SimulatedEngine, copier: CopyingEngine):
    """An answer from a session of the daemon lane, from another engine or before a registration is refused."""
    number = send_store(copier, "a1").request.id
    newcomer, other = CopyingEngine(daemon), connect_copier(daemon)
    for whose, code, named in (
        (engine, "malformed", f"session {engine.session.id} has no copies to carry out"),
        (newcomer, "not_registered", "has not registered"),
        (other, "malformed", f"there is no order {number}; 0 are open"),
    ):
        sent = whose.send(lambda own: wire.CopyDone(own, number, 1, NO))
        found, detail = refusal(whose, sent)
        assert (found, named in detail) == (code, True), detail
    assert num_found(copier, "a1") == 0


def test_answers_are_taken_when_nothing_else_is(copier: CopyingEngine):
    """An engine with as many orders open as it may have requests can answer them: nothing else would let it go on."""
    puts = [send_store(copier, f"a{number}") for number in range(4)]
    sent = copier.send(wire.Ping)
    assert refusal(copier, sent) == ("overloaded", "4 requests of this session are unanswered")
    assert [reply_to(copier, put).num_stored for put in puts] == [1] * 4


def test_a_request_with_the_id_of_an_order_changes_nothing(copier: CopyingEngine):
    """It could not be told from the other: it is refused before it has reserved a slot or spent a claim."""
    stored(copier, "a1")
    lease = look_up(copier, "a1").lease
    put = send_store(copier, "b1")
    before = copier.daemon.state()
    for request in (
        wire.Store(put.request.id, digests("c1"), b"", packed([[0, 1]])),
        wire.Retrieve(put.request.id, lease, 0, packed([[0, 1]])),
    ):
        reply = copier.daemon.service.handle(copier.session, request, ())
        assert reply == wire.Error(put.request.id, "malformed", f"request id {put.request.id} is that of an open order")
        assert copier.daemon.state() == before
    assert reply_to(copier, put).num_stored == 1
    assert reply_to(copier, send_retrieve(copier, lease, 1)).failed == []


def test_checksums_of_another_length_are_not_ordered(copier: CopyingEngine):
    """A chunk whose checksum no order can carry is refused, and its lease stays as it is."""
    stored(copier, "a1")
    found = look_up(copier, "a1")
    (chunk,) = copier.daemon.service._index._chunks.values()
    chunk.checksum *= 2
    code, detail = refusal(copier, send_retrieve(copier, found.lease, 1))
    assert (code, f"the {CHECKSUM_NBYTES} bytes of an order" in detail) == ("layout_refused", True)


def test_an_engine_waits_for_its_own_events(daemon: SimulatedDaemon, engine: SimulatedEngine, copier: CopyingEngine):
    """``is_fenced`` needs a registered event where the daemon copies, and none where the engine does."""

    def fenced_store(number: int) -> wire.Store:
        return wire.Store(number, digests("a1"), b"", packed([[0, 1]]), is_fenced=True)

    store(engine, "b1")
    lease = look_up(engine, "b1").lease
    no_event = ("malformed", "the worker of group 0 on shard 0 has registered no event to wait for")
    assert refusal(engine, engine.send(fenced_store)) == no_event
    assert refusal(engine, send_retrieve(engine, lease, 1, is_fenced=True)) == no_event
    assert isinstance(answer(engine, send_retrieve(engine, lease, 1)), wire.RetrieveReply)
    sent = copier.send(fenced_store)
    copier.answer(sent.request.id, 0)
    assert answer(copier, sent).reason == "copy failed"


@pytest.mark.parametrize("what", ["store", "load"])
def test_slots_outlive_the_connection(daemon: SimulatedDaemon, copier: CopyingEngine, what: str):
    """What a lost engine's orders name is neither published nor used again before its process has ended; then it is."""
    stored(copier, "a1", "a2")
    if what == "store":
        send_store(copier, "b1", "b2")
    else:
        send_retrieve(copier, look_up(copier, "a1", "a2").lease, 2)
    copier.end()
    daemon.settle()
    daemon.now += LEASE_TTL_S
    daemon.service.expire_leases()
    other = connect_copier(daemon, engine_id="y")
    for prompt in range(6):
        sent = send_store(other, *[f"{prompt}.{number}" for number in range(4)])
        copier.scribble()
        reply_to(other, sent)
        other.give_back(sent.chunks)
    status = daemon.status()
    assert (status.num_reserved, status.num_pinned) == ((2, 0) if what == "store" else (0, 2))
    assert (status.num_copies_in_flight, copier.is_closed) == (1, False)
    assert num_found(other, "b1") == 0
    copier.end_process()
    daemon.settle()
    status = daemon.status()
    assert (status.num_reserved, status.num_pinned, status.num_leases, copier.is_closed) == (0, 0, 0, True)
    sent = send_store(other, *[f"last.{number}" for number in range(NUM_SLOTS)])
    assert reply_to(other, sent).num_stored == NUM_SLOTS


@pytest.mark.parametrize("what", ["store", "load"])
def test_a_connection_may_break_on_the_order_itself(daemon: SimulatedDaemon, copier: CopyingEngine, what: str):
    """An engine that is gone when its order is sent holds what the order names until its process ends, and no more."""
    stored(copier, "a1")
    lease = look_up(copier, "a1").lease
    copier.is_deaf = True
    if what == "store":
        send_store(copier, "b1")
    else:
        send_retrieve(copier, lease, 1)
    status = daemon.status()
    assert (status.num_copies_in_flight, copier.session.is_draining, copier.is_closed) == (1, True, False)
    assert (status.num_leases, status.num_pinned, status.num_reserved) == ((0, 0, 1) if what == "store" else (1, 1, 0))
    copier.end_process()
    daemon.settle()
    assert copier.is_closed
    daemon.service.check_invariants()
    assert num_found(connect(daemon), "a1") == 1


def test_a_connection_may_break_on_the_registration(daemon: SimulatedDaemon):
    """An engine that is gone when it is sent the pool leaves nothing, and its process is watched no longer."""
    copier = CopyingEngine(daemon)
    copier.session.send_with_fds = lambda reply, fds: copier.end()
    copier.register()
    assert copier.is_closed
    assert all(process.is_closed for process in daemon.processes)
    assert daemon.status().num_sessions == 0


def test_a_stop_waits_for_answers_and_for_no_process(daemon: SimulatedDaemon, copier: CopyingEngine):
    """Orders of lost engines are given up at once; who is there may answer, and is given up when it goes."""
    lost, quiet = connect_copier(daemon), connect_copier(daemon)
    puts = {engine: send_store(engine, name) for engine, name in ((copier, "a1"), (lost, "b1"), (quiet, "c1"))}
    lost.end()
    daemon.settle()
    assert daemon.status().num_copies_in_flight == 3
    daemon.service.begin_draining()
    daemon.settle()
    assert (daemon.status().num_copies_in_flight, lost.is_closed) == (2, True)
    assert reply_to(copier, puts[copier]).num_stored == 1
    for engine in (copier, quiet):
        engine.end()
    daemon.settle()
    assert quiet.is_closed
    status = daemon.status()
    assert (status.num_sessions, status.num_reserved, status.num_sealed) == (0, 0, 1)
