"""Orders that mean nothing are declined, and nothing of them is copied: the daemon is told, and the lane goes on."""

import socket
import threading
from collections.abc import Iterator
from pathlib import Path

import msgspec
import numpy as np
import pytest

from kvist.errors import LayoutError
from kvist.wire import messages as wire
from kvist.wire.codec import encode
from tests.support.copier import NBYTES
from tests.support.lane_engine import LaneEngine, wait_over
from tests.support.memory import SharedMemory
from tests.unit.client.test_client import LIMITS, Daemon

POOL_NBYTES = 4 * NBYTES


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
    assert isinstance(daemon.next_request(), wire.Ping)
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
