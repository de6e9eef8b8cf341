"""Memory in more pieces than a frame has room for comes over whole; no descriptor of the daemon is lost on anybody."""

import contextlib
import os
from collections.abc import Iterator

import pytest

from kvist.errors import LayoutRefused, Unreachable
from kvist.wire import messages as wire
from kvist.wire.codec import FDS_MAX, KEPT_FDS_MAX
from tests.e2e.conftest import Connect
from tests.support.daemon import Daemon
from tests.support.engine import NAMESPACE, SMALL, FakeEngine, describe
from tests.support.layouts import Shape, block_outermost, nhd
from tests.support.memory import SharedMemory, many_fds, num_mappings
from tests.support.peer import Peer
from tests.support.waiting import wait_until

MANY = Shape(num_layers=1000, num_blocks=12, block_tokens=4, num_heads=1, row_nbytes=1)
"""An allocation a layer; chunks of two blocks and 16,000 bytes."""
PROMPT = list(range(20))
NUM_RESTS = 3


@pytest.fixture(autouse=True)
def room() -> Iterator[None]:
    """Let this process have the descriptors of many allocations."""
    with many_fds() as most:
        if most < 4096:
            pytest.skip(f"a process may have {most} descriptors here")
        yield


@pytest.fixture(autouse=True)
def goes_on_serving(shared: Daemon, room: None) -> Iterator[FakeEngine]:
    """An engine that is connected all the time stores and loads afterwards, and nothing of the test is left."""
    with FakeEngine(shared.path, engine_id="bystander") as engine:
        engine.client.register()
        before = shared.num_fds()
        yield engine
        shared.check_quiet(num_fds=before, num_sessions=2)
        engine.store(PROMPT)
        assert engine.load(PROMPT, engine.look_up(PROMPT)) == []


@pytest.fixture
def fd() -> Iterator[int]:
    with SharedMemory(4096, name="kvist-hostile") as memory:
        yield memory.fd


def test_a_thousand_allocations_arrive_in_order(shared: Daemon, connect: Connect, prompt: list[int]):
    """What is stored from a thousand pieces of memory is, byte by byte, what one piece gets in their place."""
    with (
        FakeEngine(shared.path, laid=nhd(MANY), name="kvist-many") as many,
        FakeEngine(shared.path, laid=block_outermost(MANY)) as one,
    ):
        before = shared.num_fds()
        many.client.register()
        assert num_mappings(shared.pid, "kvist-many") == MANY.num_layers
        one.client.register()
        assert many.store(prompt).num_stored == 5
        assert one.load(prompt, one.look_up(prompt)) == []
        assert many.load(prompt, many.look_up(prompt)) == []
        assert shared.num_fds() == before + 2  # Their sockets.


def test_a_registration_that_is_refused_closes_all(shared: Daemon):
    """A thousand descriptors whose registration does not fit are closed; the client is told why it does not."""
    laid = nhd(MANY)
    with FakeEngine(shared.path, laid=laid, name="kvist-many") as engine:
        before = shared.num_fds()
        engine.chunk_tokens = 7
        with pytest.raises(LayoutRefused, match="chunk_tokens 7"):
            engine.client.register()
        wait_until(lambda: shared.num_fds() == before + 1)
        assert num_mappings(shared.pid, "kvist-many") == 0


@pytest.mark.parametrize(
    ("num", "num_claimed", "code", "named"),
    [
        (0, 0, "malformed", "none have come; 3 are kept"),
        (2, 1, "protocol", "1 descriptors that no frame owns"),
        (2, 0, "protocol", "2 descriptors that no frame owns"),
        (1, 2, "protocol", "owns 2 descriptors and 1 have come"),
        (0, 2, "protocol", "owns 2 descriptors and 0 have come"),
    ],
    ids=["none", "more than announced", "none announced", "fewer than announced", "announced and none"],
)
def test_what_is_announced_must_come(shared: Daemon, fd: int, num: int, num_claimed: int, code: str, named: str):
    """A request for nothing is refused; a number that is not that of the descriptors ends the connection; all close."""
    before = shared.num_fds()
    with Peer(shared.path) as peer:
        peer.hello()
        assert peer.ask(wire.Descriptors(2), fds=[fd] * 3) == wire.Received(2, 3)
        peer.send(wire.Descriptors(3), fds=[fd] * num, num_fds=num_claimed)
        reply = peer.reply()
        while not isinstance(reply, wire.Error) or reply.code != code:
            reply = peer.reply()
        assert named in reply.detail
        if code == "protocol":
            assert peer.is_closed()
            wait_until(lambda: shared.num_fds() == before)


def test_whoever_leaves_in_between_leaves_nothing(shared: Daemon, fd: int):
    """A peer that disconnects after some batches, or in the middle of one, has no descriptor left in the daemon."""
    before = shared.num_fds()
    for rest in (b"", b"kv"):
        with Peer(shared.path) as peer:
            peer.hello()
            for number in range(3):
                peer.send(wire.Descriptors(number), fds=[fd] * FDS_MAX)
            assert [peer.reply() for _ in range(3)] == [wire.Received(n, (n + 1) * FDS_MAX) for n in range(3)]
            if rest:
                peer.send(rest, fds=[fd] * FDS_MAX)
                wait_until(lambda: shared.num_fds() == before + 1 + 4 * FDS_MAX)
        wait_until(lambda: shared.num_fds() == before)


def test_more_than_the_bound_is_refused(shared: Daemon, fd: int):
    """At the bound the next descriptor is refused with the numbers, and what came is closed; so is all at the end."""
    if shared.fds_max < KEPT_FDS_MAX + 3 * FDS_MAX:
        pytest.skip(f"the daemon may have {shared.fds_max} descriptors here")
    with Peer(shared.path) as peer:
        peer.hello()
        before, num_kept = shared.num_fds(), 0
        while num_kept < KEPT_FDS_MAX:
            num = min(FDS_MAX, KEPT_FDS_MAX - num_kept)
            num_kept += num
            assert peer.ask(wire.Descriptors(2), fds=[fd] * num) == wire.Received(2, num_kept)
        wait_until(lambda: shared.num_fds() == before + num_kept)
        reply = peer.ask(wire.Descriptors(3), fds=[fd] * 2)
        assert isinstance(reply, wire.Error)
        assert (reply.code, f"{KEPT_FDS_MAX} descriptors are kept and 2 have come" in reply.detail) == (
            "layout_refused",
            True,
        ), reply
        assert peer.ask(wire.Ping(4)) == wire.Pong(4)
        assert shared.num_fds() == before + num_kept


def test_after_the_registration_descriptors_are_refused(shared: Daemon):
    """A session whose memory is registered is told so, as often as it tries, and what it sends is closed."""
    memory = [SharedMemory(nbytes) for nbytes in SMALL.memory_nbytes]
    fds = [one.fd for one in memory]
    with Peer(shared.path) as peer:
        peer.hello()
        assert peer.ask(wire.Descriptors(2), fds=fds[:1]) == wire.Received(2, 1)
        right = describe(SMALL, 3, chunk_tokens=NAMESPACE.chunk_tokens)
        assert isinstance(peer.ask(right, fds=fds[1:]), wire.Registered)
        before = shared.num_fds()
        for number in (4, 5):
            reply = peer.ask(wire.Descriptors(number), fds=fds)
            assert isinstance(reply, wire.Error)
            assert reply.code == "already_registered"
        wait_until(lambda: shared.num_fds() == before)
    for one in memory:
        one.close()


def test_a_request_that_does_not_decode_closes_what_is_kept(shared: Daemon, fd: int):
    """It may have been the registration that a newer client meant; the session goes on without its descriptors."""
    with Peer(shared.path) as peer:
        peer.hello()
        before = shared.num_fds()
        assert peer.ask(wire.Descriptors(2), fds=[fd] * 9) == wire.Received(2, 9)
        peer.send(b"kv\0\0\1\0\0\0\xc1")
        reply = peer.reply()
        assert isinstance(reply, wire.Error)
        assert reply.code == "malformed"
        assert shared.num_fds() == before
        assert peer.ask(wire.Descriptors(3), fds=[fd]) == wire.Received(3, 1)


def test_descriptors_without_room_end_only_their_connection(shared: Daemon, fd: int, goes_on_serving: FakeEngine):
    """Whoever sends more than the daemon may have open is told the numbers and ended; the others are served."""
    with Peer(shared.path) as peer, Peer(shared.path) as other:
        peer.hello()
        other.hello()
        with shared.room_for(100):
            peer.send(wire.Descriptors(2), fds=[fd] * FDS_MAX)
            reply = peer.reply()
            assert isinstance(reply, wire.Error)
            assert (reply.id, reply.code) == (0, "overloaded")
            assert f"process {os.getpid()}: 100 have come, others were lost" in reply.detail
            assert f"{shared.fds_max} in all" in reply.detail
            assert peer.is_closed()
            assert other.ask(wire.Ping(8)) == wire.Pong(8)
            goes_on_serving.store(PROMPT)
            assert goes_on_serving.load(PROMPT, goes_on_serving.look_up(PROMPT)) == []
            with Peer(shared.path) as new:
                assert new.hello().ask(wire.Descriptors(2), fds=[fd]) == wire.Received(2, 1)


@pytest.mark.parametrize("request_", [wire.Descriptors(2), describe(SMALL, 2, chunk_tokens=8)], ids=["batch", "own"])
def test_without_room_to_keep_them_it_is_the_same(shared: Daemon, request_: wire.Request):
    """Where descriptors arrive and cannot be kept, their connection ends with the reason; none of them is left."""
    memory = [SharedMemory(nbytes) for nbytes in SMALL.memory_nbytes]
    before = shared.num_fds()
    with Peer(shared.path) as peer:
        peer.hello()
        with shared.room_for(len(memory) + 1):
            peer.send(request_, fds=[one.fd for one in memory])
            reply = peer.reply()
            assert isinstance(reply, wire.Error)
            assert (reply.id, reply.code, "Too many open files; it may have" in reply.detail) == (0, "overloaded", True)
            assert peer.is_closed()
            wait_until(lambda: shared.num_fds() == before)
    for one in memory:
        one.close()


def test_an_engine_without_room_tries_again(shared: Daemon):
    """A registration for which the daemon has no room is lost, as with a daemon that ends, and is made later."""
    with FakeEngine(shared.path, laid=nhd(MANY), name="kvist-many") as engine:
        with shared.room_for(300), pytest.raises(Unreachable):
            engine.client.register()

        def is_registered() -> bool:
            with contextlib.suppress(Unreachable):
                engine.client.register()
            return engine.client.registration is not None

        wait_until(is_registered)
        assert isinstance(engine.client.registration, wire.Registered)


@pytest.mark.parametrize("is_freed", [True, False], ids=["a connection ends", "the limit is lifted"])
def test_a_connection_without_room_waits(shared: Daemon, *, is_freed: bool):
    """Whoever connects when the daemon is full is taken in when there is room; one line says so, and nothing spins."""
    line = "connection not accepted"
    logged = shared.num_logged(line)
    with Peer(shared.path) as old, contextlib.ExitStack() as stack:
        old.hello()
        lack = stack.enter_context(contextlib.ExitStack())
        lack.enter_context(shared.room_for(0))
        new = stack.enter_context(Peer(shared.path))
        new.send(wire.Hello(1, wire.MAGIC, wire.PROTOCOL_VERSION, "late"))
        wait_until(lambda: shared.num_logged(line) > logged)
        num_rests = shared.num_rests()
        wait_until(lambda: shared.num_rests() >= num_rests + NUM_RESTS)
        assert all(old.ask(wire.Ping(number)) == wire.Pong(number) for number in range(200))
        assert shared.num_logged(line) == logged + 1
        if is_freed:
            old.close()
        else:
            lack.close()
        assert isinstance(new.reply(), wire.Welcome)
        assert shared.num_logged(line) == logged + 1


def test_the_daemon_takes_all_descriptors_that_it_may_have(shared: Daemon):
    """The limit is the system's hard one, and the log says which it is."""
    with many_fds() as most:
        assert shared.fds_max == most
    assert shared.num_logged(f"descriptors_max={shared.fds_max}") >= 1
