"""Orders that mean nothing are declined, and nothing of them is copied: the daemon is told, and the lane goes on."""

import socket
import threading
from collections.abc import Iterator
from pathlib import Path

import msgspec
import numpy as np
import pytest

from kvist.client.client import Pending
from kvist.client.planning import Places
from kvist.client.pool import OpenPool
from kvist.errors import LayoutError
from kvist.transfer.executor import Job
from kvist.wire import messages as wire
from kvist.wire.codec import encode
from tests.support.copier import NBYTES
from tests.support.lane_engine import Gate, LaneEngine, wait_over
from tests.support.memory import SharedMemory, stamp
from tests.support.waiting import wait_until
from tests.unit.client.test_client import LIMITS, Daemon

POOL_NBYTES = 4 * NBYTES
NAMES = ("a", "b")
STAMPS = [stamp(name.encode(), NBYTES) for name in NAMES]


class OrderingDaemon(Daemon):
    """Registers a lane, and orders what the test says."""

    def start(self, engine: LaneEngine, pool: SharedMemory, *, num_fds: int = 1) -> None:
        """Answer the first request of a lane, and what comes before it."""
        first = engine.lane.submit(wire.Ping)
        self.accept()
        hello, register, ping = self.read_kinds(wire.Hello, wire.Register, wire.Ping)
        self.send(wire.Welcome(hello.id, 1, "9.9", "boot", LIMITS))
        self.send_with_fds(wire.Registered(register.id, [NBYTES], POOL_NBYTES), [pool.fd] * num_fds)
        self.send(wire.Pong(ping.id))
        wait_over(first)

    def send_with_fds(self, reply: wire.Reply, fds: list[int]) -> None:
        """Send a reply, and descriptors with its first byte."""
        frame = encode(reply, num_fds=len(fds))
        socket.send_fds(self.socket, [frame], fds) if fds else self.socket.sendall(frame)

    def next_request(self) -> wire.Request:
        (request,) = self.read()
        return request


@pytest.fixture
def daemon(tmp_path: Path) -> Iterator[OrderingDaemon]:
    daemon = OrderingDaemon(tmp_path / "s")
    yield daemon
    daemon.close()


@pytest.fixture
def pool() -> Iterator[SharedMemory]:
    with SharedMemory(POOL_NBYTES, name="kvist-pool") as pool:
        yield pool


@pytest.fixture
def engine(daemon: OrderingDaemon, pool: SharedMemory) -> Iterator[LaneEngine]:
    """An engine whose lane is registered."""
    engine = LaneEngine(str(daemon.path))
    daemon.start(engine, pool)
    engine.lane.register(20)
    daemon.send(wire.Pong(daemon.next_request().id))
    yield engine
    daemon.socket.close()
    engine.close()


def order(number: int, *, slots=(0, NBYTES), positions=(0, 1), checksums=b"") -> wire.CopyOrder:
    return wire.CopyOrder(
        number, np.array(slots, dtype="<i8").tobytes(), np.array(positions, dtype="<i4").tobytes(), checksums
    )


WRONG = {
    "outside the pool": {"slots": (0, POOL_NBYTES - NBYTES + 1)},
    "before the pool": {"slots": (-1, 0)},
    "no such chunk": {"positions": (0, 2)},
    "a chunk before the first": {"positions": (-1, 0)},
    "more slots than chunks": {"positions": (0,)},
    "fewer slots than chunks": {"slots": (0,)},
}


@pytest.mark.parametrize("wrong", [*WRONG.values(), {"checksums": bytes(8)}], ids=[*WRONG, "checksums of a store"])
def test_a_wrong_order_is_declined(daemon: OrderingDaemon, engine: LaneEngine, pool: SharedMemory, wrong):
    """What an order of a store names must be there; if it is not, no byte moves, and the daemon hears of no chunk."""
    pending, _ = engine.submit_store(("a", "b"))
    store = daemon.next_request()
    daemon.send(order(store.id, **wrong))
    done = daemon.next_request()
    assert done == wire.CopyDone(done.id, store.id, 0)
    assert not pending.is_over
    daemon.send(wire.StoreReply(done.id, 0, 0, 2, "copy failed"))
    wait_over(pending)
    assert pending.reply == wire.StoreReply(done.id, 0, 0, 2, "copy failed")
    assert not pool.bytes.any()


@pytest.mark.parametrize("checksums", [b"", bytes(8), bytes(15), bytes(24)], ids=len)
def test_a_load_needs_its_checksums(daemon: OrderingDaemon, engine: LaneEngine, checksums: bytes):
    """Without one checksum for each chunk no chunk is loaded."""
    pending, _ = engine.submit_load(b"lease", 2)
    retrieve = daemon.next_request()
    daemon.send(order(retrieve.id, checksums=checksums))
    done = daemon.next_request()
    assert done == wire.CopyDone(done.id, retrieve.id, 0)
    daemon.send(wire.RetrieveReply(done.id, 2, [0, 1]))
    wait_over(pending)
    assert engine.is_untouched()


def test_bytes_that_cannot_be_read_are_declined(daemon: OrderingDaemon, engine: LaneEngine):
    """An order that is no array of numbers loses its request and is answered; the next one is carried out."""
    broken, _ = engine.submit_store(("a", "b"))
    store = daemon.next_request()
    daemon.send(msgspec.structs.replace(order(store.id), slots=bytes(13)))
    done = daemon.next_request()
    assert done == wire.CopyDone(done.id, store.id, 0)
    assert broken.is_lost
    right, _ = engine.submit_store(("a", "b"))
    store = daemon.next_request()
    daemon.send(order(store.id))
    wait_over(right)
    assert right.reply == wire.StoreReply(0, 2, 0)


def test_a_chunk_that_was_not_ordered_is_not_loaded(daemon: OrderingDaemon, engine: LaneEngine, pool: SharedMemory):
    """A load counts as failed for every chunk but those that were copied and are right."""
    stored, _ = engine.submit_store(("a", "b"))
    daemon.send(order(daemon.next_request().id))
    done = daemon.next_request()
    assert isinstance(done, wire.CopyDone)
    wait_over(stored)
    pending, chunks = engine.submit_load(b"lease", 3)
    daemon.send(order(daemon.next_request().id, slots=(NBYTES,), positions=(1,), checksums=done.checksums[8:]))
    wait_over(pending)
    assert pending.reply == wire.RetrieveReply(0, 3, [0, 2])
    assert engine.read(chunks)[1] == pool.bytes[NBYTES : 2 * NBYTES].tobytes()


@pytest.mark.parametrize("positions", [(1, 0), (0, 0)])
def test_skipped_blocks_are_those_of_the_first_chunk(
    daemon: OrderingDaemon, engine: LaneEngine, positions: tuple[int, ...]
):
    """An order in which a chunk with skipped blocks is not the first, or comes twice, moves no byte."""
    engine.submit_load(b"lease", 2, num_skipped_blocks=1)
    retrieve = daemon.next_request()
    daemon.send(order(retrieve.id, positions=positions, checksums=bytes(16)))
    done = daemon.next_request()
    assert done == wire.CopyDone(done.id, retrieve.id, 0)
    assert engine.is_untouched()


def test_a_chunk_without_skipped_blocks_is_loaded_whole(daemon: OrderingDaemon, engine: LaneEngine, pool: SharedMemory):
    """Where the chunk whose blocks are skipped is not ordered, all blocks of the others are written."""
    engine.submit_store(("a", "b"))
    daemon.send(order(daemon.next_request().id))
    done = daemon.next_request()
    assert isinstance(done, wire.CopyDone)
    pending, chunks = engine.submit_load(b"lease", 2, num_skipped_blocks=1)
    daemon.send(order(daemon.next_request().id, slots=(NBYTES,), positions=(1,), checksums=done.checksums[8:]))
    wait_over(pending)
    assert pending.reply == wire.RetrieveReply(0, 2, [0])
    assert engine.read(chunks)[1] == pool.bytes[NBYTES : 2 * NBYTES].tobytes()


# ── loads that begin ahead of their order ──────────────────────────────────────────────────────────────────────────


@pytest.fixture
def places(daemon: OrderingDaemon, engine: LaneEngine) -> Places:
    """Where two chunks lie that were stored."""
    pending, chunks = engine.submit_store(NAMES)
    store = daemon.next_request()
    daemon.send(order(store.id))
    done = daemon.next_request()
    assert isinstance(done, wire.CopyDone)
    daemon.send(wire.StoreReply(done.id, 2, 0))
    wait_over(pending)
    engine.give_back(chunks)
    return Places(order(0).slots, done.checksums)


@pytest.fixture
def gate(engine: LaneEngine, places: Places) -> Iterator[Gate]:
    """Holds copies up, from after the store on."""
    gate = Gate()
    engine.before_copy = gate
    yield gate
    gate.open()


def finish(daemon: OrderingDaemon, engine: LaneEngine, pending: Pending) -> None:
    """Take the answer to an order in, and assert that the lane is at rest."""
    done = daemon.next_request()
    assert isinstance(done, wire.CopyDone)
    daemon.send(wire.RetrieveReply(done.id, 2, []))
    wait_over(pending)
    engine.fences.check_all_back()


@pytest.fixture(params=["later", "at once"])
def landing(request: pytest.FixtureRequest, places: Places, monkeypatch: pytest.MonkeyPatch) -> None:
    """Copies land some time after they were begun, or before whoever begins them goes on."""
    begin = OpenPool.submit

    def begin_and_land(pool: OpenPool, job: Job) -> None:
        landed, on_done = threading.Event(), job.on_done

        def land(job: Job) -> None:
            on_done(job)
            landed.set()

        job.on_done = land
        begin(pool, job)
        assert landed.wait(10)

    if request.param == "at once":
        monkeypatch.setattr(OpenPool, "submit", begin_and_land)


@pytest.mark.usefixtures("landing")
def test_a_load_is_copied_before_it_is_ordered(daemon: OrderingDaemon, engine: LaneEngine, places: Places):
    """A load whose places are known has its bytes before the order comes, and is over when that says the same."""
    pending, chunks = engine.submit_load(b"lease", 2, places=places)
    wait_until(lambda: engine.read(chunks) == STAMPS)
    assert not pending.is_over
    daemon.send(order(daemon.next_request().id, checksums=places.checksums))
    wait_over(pending)
    assert pending.reply == wire.RetrieveReply(0, 2, [])
    finish(daemon, engine, pending)


def test_an_order_may_come_before_the_copy_has_landed(
    daemon: OrderingDaemon, engine: LaneEngine, places: Places, gate: Gate
):
    """A load is over when both its order has come and its bytes have landed."""
    pending, chunks = engine.submit_load(b"lease", 2, places=places)
    gate.wait_reached()
    daemon.send(order(daemon.next_request().id, checksums=places.checksums))
    engine.lane.submit(wire.Ping)
    daemon.send(wire.Pong(daemon.next_request().id))
    assert not pending.is_over
    gate.open()
    wait_over(pending)
    assert engine.read(chunks) == STAMPS
    finish(daemon, engine, pending)


@pytest.mark.usefixtures("landing")
def test_an_order_that_says_something_else_is_carried_out(daemon: OrderingDaemon, engine: LaneEngine, places: Places):
    """What the daemon orders is what the blocks hold in the end, whatever was copied before."""
    pending, chunks = engine.submit_load(b"lease", 2, places=places)
    wait_until(lambda: engine.read(chunks) == STAMPS)
    sums = places.checksums[8:] + places.checksums[:8]
    daemon.send(order(daemon.next_request().id, slots=(NBYTES, 0), checksums=sums))
    wait_over(pending)
    assert pending.reply == wire.RetrieveReply(0, 2, [])
    assert engine.read(chunks) == STAMPS[::-1]
    finish(daemon, engine, pending)


def test_a_refused_load_is_refused_when_its_copy_has_landed(
    daemon: OrderingDaemon, engine: LaneEngine, places: Places, gate: Gate
):
    """What the daemon refuses is never believed, and is not over while the device may still write."""
    pending, _ = engine.submit_load(b"lease", 2, places=places)
    gate.wait_reached()
    refusal = wire.Error(daemon.next_request().id, "unknown_lease", "it has expired")
    daemon.send(refusal)
    engine.lane.submit(wire.Ping)
    daemon.send(wire.Pong(daemon.next_request().id))
    assert not pending.is_over
    gate.open()
    wait_over(pending)
    assert pending.reply == refusal
    engine.fences.check_all_back()


def test_a_daemon_that_goes_loses_a_load_when_its_copy_has_landed(
    daemon: OrderingDaemon, engine: LaneEngine, places: Places, gate: Gate
):
    """A load that was begun ahead outlives its connection until its last byte has landed, and is lost then."""
    pending, _ = engine.submit_load(b"lease", 2, places=places)
    gate.wait_reached()
    daemon.next_request()
    daemon.socket.close()
    wait_until(lambda: not engine.client.is_connected)
    assert not pending.is_over
    gate.open()
    wait_over(pending)
    assert pending.is_lost
    engine.fences.check_all_back()


@pytest.mark.parametrize(
    "wrong",
    [Places(order(0, slots=(0, POOL_NBYTES)).slots, bytes(16)), Places(order(0).slots, b""), Places(b"", b"")],
    ids=["outside the pool", "without checksums", "none"],
)
def test_places_that_cannot_be_wait_for_the_order(
    daemon: OrderingDaemon, engine: LaneEngine, places: Places, wrong: Places
):
    """No byte is read from outside the pool, or unchecked: such a load waits for its order."""
    pending, chunks = engine.submit_load(b"lease", 2, places=wrong)
    retrieve = daemon.next_request()
    assert engine.is_untouched()
    daemon.send(order(retrieve.id, checksums=places.checksums))
    wait_over(pending)
    assert engine.read(chunks) == STAMPS
    finish(daemon, engine, pending)


def test_a_lane_that_closes_waits_for_what_it_copies_ahead(
    daemon: OrderingDaemon, engine: LaneEngine, places: Places, gate: Gate
):
    """Closing ends when the last byte has landed; the load that nobody ordered is lost then."""
    pending, _ = engine.submit_load(b"lease", 2, places=places)
    gate.wait_reached()
    closing = threading.Thread(target=engine.lane.close)
    closing.start()
    daemon.next_request()
    assert not pending.is_over
    gate.open()
    daemon.socket.close()
    closing.join(30)
    assert not closing.is_alive()
    assert pending.is_lost


@pytest.mark.parametrize("num_fds", [0, 2])
def test_a_registration_without_a_pool(daemon: OrderingDaemon, pool: SharedMemory, num_fds: int):
    """A daemon that sends no descriptor, or more than one, is refused in words."""
    engine = LaneEngine(str(daemon.path))
    daemon.start(engine, pool, num_fds=num_fds)
    with pytest.raises(LayoutError, match=f"came with {num_fds} descriptors"):
        engine.lane.register(20)
    daemon.socket.close()
    engine.close()
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("kvist-lane")]
