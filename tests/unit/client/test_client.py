"""Every request ends as answered or as lost, no call waits longer than it is told, a daemon that returns is used."""

import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec
import pytest

from kvist.client.client import RETRY_S, Client, Pending
from kvist.errors import REFUSALS, DeadlineExceeded, Refused, Unreachable
from kvist.wire import messages as wire
from kvist.wire.codec import FDS_MAX, FrameReader, decode_request, encode

LIMITS = wire.Limits(1, 2, 3, 4, 5.0)
REGISTER = wire.Register(0, 16, [wire.MemorySpec("host", 64)], [])


class Daemon:
    """The other end of the socket, played by the test: it reads and answers when it is told to."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(str(path))
        self._listener.listen(8)
        self._listener.settimeout(5)
        self.socket = socket.socket()
        self.fds: list[int] = []
        self.num_fds: list[int] = []
        """How many of them each request owns."""
        self._reader = FrameReader()

    def accept(self) -> None:
        """Take the next connection."""
        self.socket.close()
        self.socket, _ = self._listener.accept()
        self.socket.settimeout(5)
        self._reader = FrameReader()

    def has_connection(self) -> bool:
        """Say whether somebody waits to be accepted."""
        self._listener.settimeout(0)
        try:
            self.accept()
        except BlockingIOError:
            return False
        finally:
            self._listener.settimeout(5)
        return True

    def read(self) -> list[wire.Request]:
        """Return the requests that have come, at least one."""
        data, fds, _, _ = socket.recv_fds(self.socket, 1 << 20, FDS_MAX)
        self.fds += fds
        frames = [(decode_request(frame.body), frame.num_fds) for frame in self._reader.feed(data)]
        self.num_fds += [num_fds for _, num_fds in frames]
        return [request for request, _ in frames]

    def read_kinds(self, *kinds: type[wire.Request]) -> list[wire.Request]:
        """Return requests of exactly these kinds, in this order."""
        found: list[wire.Request] = []
        while len(found) < len(kinds):
            found += self.read()
        assert [type(request) for request in found] == list(kinds)
        return found

    def send(self, *replies: wire.Reply) -> None:
        self.socket.sendall(b"".join(map(encode, replies)))

    def welcome(self, client: Client) -> None:
        """Accept a client that has just sent its first request, greet it, and answer that request."""
        self.accept()
        hello, ping = self.read_kinds(wire.Hello, wire.Ping)
        self.send(wire.Welcome(hello.id, 1, "9.9", "boot", LIMITS), wire.Pong(ping.id))
        client.poll(5)

    def close(self) -> None:
        self.socket.close()
        self._listener.close()
        self.path.unlink(missing_ok=True)
        for fd in self.fds:
            os.close(fd)


class Clock:
    """Time that passes when the test says so."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "s"


@pytest.fixture
def daemon(path: Path) -> Iterator[Daemon]:
    daemon = Daemon(path)
    yield daemon
    daemon.close()


@pytest.fixture
def client(path: Path, clock: Clock) -> Iterator[Client]:
    client = Client(str(path), engine_id="x", name="test", deadline_s=1.0, clock=clock)
    yield client
    client.close()


def registering(path: Path, fds: list[int], **more) -> Client:
    return Client(
        str(path), engine_id="x", name="test", deadline_s=1.0,
        registrar=lambda number: (msgspec.structs.replace(REGISTER, id=number), fds), **more,
    )  # fmt: skip


@contextmanager
def answering(daemon: Daemon, build: Callable[[wire.Request], wire.Reply]) -> Iterator[None]:
    """Answer the next request while this thread waits for the answer."""

    def answer() -> None:
        (request,) = daemon.read()
        daemon.send(build(request))

    thread = threading.Thread(target=answer)
    thread.start()
    yield
    thread.join(10)
    assert not thread.is_alive()


def is_lost(pending: Pending) -> bool:
    assert pending.is_over is (pending.is_lost or pending.reply is not None)
    return pending.is_lost


def test_replies_find_their_requests(daemon: Daemon, client: Client):
    """Replies that come in any order, and in any pieces, answer the requests whose ids they carry."""
    first = client.submit(wire.Ping)
    daemon.welcome(client)
    assert first.reply == wire.Pong(first.id)
    pending = [client.submit(wire.Ping) for _ in range(5)]
    requests = daemon.read_kinds(*[wire.Ping] * 5)
    stream = b"".join(encode(wire.Pong(request.id)) for request in reversed(requests))
    for place in range(len(stream)):
        daemon.socket.sendall(stream[place : place + 1])
        client.poll(0.0)
    client.poll(0.5)
    assert [one.reply for one in pending] == [wire.Pong(request.id) for request in requests]
    assert client.num_unanswered == 0
    assert client.welcome == wire.Welcome(1, 1, "9.9", "boot", LIMITS)


def test_without_a_daemon_requests_are_lost_at_once(path: Path, client: Client, clock: Clock):
    """Nobody listens: lost, immediately; and a daemon that comes is found with the first request after the pause."""
    began = time.monotonic()
    assert all(is_lost(client.submit(wire.Ping)) for _ in range(100))
    assert time.monotonic() - began < 1
    with pytest.raises(Unreachable, match=str(path)):
        client.call(wire.Ping)
    daemon = Daemon(path)
    assert is_lost(client.submit(wire.Ping))
    assert not daemon.has_connection()
    clock.now += RETRY_S
    assert not is_lost(client.submit(wire.Ping))
    daemon.welcome(client)
    daemon.close()


def test_the_end_of_the_daemon_is_the_end_of_what_is_pending(daemon: Daemon, client: Client, clock: Clock):
    """What was answered before the end counts; the rest is lost with it; the next daemon is a new connection."""
    client.submit(wire.Ping)
    daemon.welcome(client)
    first, second = client.submit(wire.Ping), client.submit(wire.Ping)
    daemon.read_kinds(wire.Ping, wire.Ping)
    daemon.send(wire.Pong(first.id))
    daemon.socket.close()
    client.poll(5)
    client.poll(5)
    assert (first.reply, is_lost(second)) == (wire.Pong(first.id), True)
    assert (client.is_connected, client.welcome, client.num_unanswered) == (False, None, 0)
    clock.now += RETRY_S
    third = client.submit(wire.Ping)
    daemon.welcome(client)
    assert third.reply is not None
    assert third.id > second.id


def test_a_late_daemon_gets_nothing_new(daemon: Daemon, client: Client, clock: Clock):
    """Past the deadline new requests are lost unsent, the old ones stay open, and with their answers all is well."""
    client.submit(wire.Ping)
    daemon.welcome(client)
    old = client.submit(wire.Ping)
    daemon.read_kinds(wire.Ping)
    clock.now += client.deadline_s
    assert not client.is_late
    clock.now += 0.001
    assert client.is_late
    refused = client.submit(wire.Ping)
    assert (is_lost(refused), is_lost(old)) == (True, False)
    with pytest.raises(Unreachable, match="late"):
        client.call(wire.Ping)
    daemon.send(wire.Pong(old.id))
    client.poll(5)
    assert old.reply is not None
    assert not client.is_late
    new = client.submit(wire.Ping)
    assert daemon.read_kinds(wire.Ping) == [wire.Ping(new.id)]


def test_an_answer_that_nobody_read_is_an_answer(daemon: Daemon, client: Client, clock: Clock):
    """However long a client does not look, a daemon that has answered is not late."""
    client.submit(wire.Ping)
    daemon.welcome(client)
    old = client.submit(wire.Ping)
    daemon.read_kinds(wire.Ping)
    daemon.send(wire.Pong(old.id))
    clock.now += 100 * client.deadline_s
    new = client.submit(wire.Ping)
    assert (is_lost(new), old.is_over) == (False, True)


def test_a_call_waits_as_long_as_it_is_told(daemon: Daemon, path: Path):
    """Without an answer a call ends at its deadline, not before and not much later; its request stays open."""
    client = Client(str(path), engine_id="x", name="test", deadline_s=30)
    began = time.monotonic()
    with pytest.raises(DeadlineExceeded, match=str(path)):
        client.call(wire.Ping, deadline_s=0.2)
    assert 0.2 <= time.monotonic() - began < 2
    assert client.num_unanswered == 2
    client.close()


@pytest.mark.parametrize("code", [*REFUSALS, "of the future"])
def test_refusals_come_back_as_their_class(daemon: Daemon, client: Client, code: str):
    """Each code is raised as the class that it names, with the daemon's text; one that nobody knows as a refusal."""
    client.submit(wire.Ping)
    daemon.welcome(client)
    expected = REFUSALS.get(code, Refused)
    answer = answering(daemon, lambda ping: wire.Error(ping.id, code, "because"))
    with answer, pytest.raises(expected, match="because") as refused:
        client.call(wire.Ping, deadline_s=5)
    assert type(refused.value) is expected
    assert client.is_connected


@pytest.mark.parametrize(
    "garbage",
    [b"HTTP/1.1 400 Bad Request\r\n", b"kv\0\0\2\0\0\0\xc1\xc1", encode(wire.Ping(1)), encode(wire.Error(0, "x", "y"))],
    ids=["another protocol", "no message", "a request", "an error without a request"],
)
def test_what_is_no_reply_ends_the_conversation(daemon: Daemon, client: Client, clock: Clock, garbage: bytes):
    """After garbage nothing is sent or heeded; what is pending is lost only when the daemon has closed its end."""
    client.submit(wire.Ping)
    daemon.welcome(client)
    pending = client.submit(wire.Ping)
    daemon.read_kinds(wire.Ping)
    daemon.socket.sendall(garbage)
    client.poll(5)
    assert not pending.is_over
    assert is_lost(client.submit(wire.Ping))
    daemon.socket.sendall(encode(wire.Pong(pending.id)))
    client.poll(0.05)
    assert not pending.is_over
    assert daemon.socket.recv(1) == b""
    daemon.socket.close()
    client.poll(5)
    assert is_lost(pending)
    clock.now += RETRY_S
    client.submit(wire.Ping)
    daemon.welcome(client)


def test_a_refused_hello_is_reported(daemon: Daemon, client: Client):
    """A daemon of another version says so once: the text is what every call raises until it can connect."""
    pending = client.submit(wire.Ping)
    daemon.accept()
    hello, _ = daemon.read_kinds(wire.Hello, wire.Ping)
    daemon.send(wire.Error(hello.id, "version_mismatch", "the daemon speaks 7"))
    daemon.socket.close()
    client.wait(pending, 5)
    assert is_lost(pending)
    with pytest.raises(Unreachable, match="version_mismatch: the daemon speaks 7"):
        client.call(wire.Ping)


def test_a_daemon_that_does_not_read_is_bounded(daemon: Daemon, client: Client):
    """What cannot be sent is lost at the bound, without blocking; what was sent before is still pending."""
    client.submit(wire.Ping)
    daemon.welcome(client)
    big = bytes(1 << 20)
    pending = [client.submit(lambda number: wire.Lookup(number, big)) for _ in range(40)]
    lost = [is_lost(one) for one in pending]
    assert lost.index(True) > 8
    assert all(lost[lost.index(True) :])
    assert client.is_connected
    assert client.num_unanswered == lost.index(True)


def test_a_registration_goes_with_every_connection(daemon: Daemon, path: Path, clock: Clock):
    """Right after the hello, with its descriptors; and again, the same, when the daemon has come back."""
    fd = os.memfd_create("kvist-test")
    os.write(fd, b"mine")
    client = registering(path, [fd], clock=clock)
    for _ in range(2):
        client.submit(wire.Ping)
        daemon.accept()
        hello, register, _ = daemon.read_kinds(wire.Hello, wire.Register, wire.Ping)
        assert register == msgspec.structs.replace(REGISTER, id=register.id)
        assert os.pread(daemon.fds[-1], 4, 0) == b"mine"
        assert client.registration is None
        daemon.send(wire.Welcome(hello.id, 1, "9.9", "boot", LIMITS), wire.Registered(register.id, [640]))
        client.poll(5)
        assert client.registration == wire.Registered(register.id, [640])
        with answering(daemon, lambda ping: wire.Pong(ping.id)):
            assert client.register(5) == wire.Registered(register.id, [640])
        daemon.socket.close()
        client.poll(5)
        clock.now += RETRY_S
    assert len(daemon.fds) == 2
    os.close(fd)


@pytest.mark.parametrize("code", ["layout_refused", "malformed", "draining", "already_registered"])
def test_a_refused_registration_is_raised_as_what_it_is(daemon: Daemon, path: Path, code: str):
    """Whatever the daemon's reason, ``register`` raises it, and does not wait for an answer that has come."""
    client = registering(path, [])
    client.submit(wire.Ping)
    daemon.accept()
    hello, register, _ = daemon.read_kinds(wire.Hello, wire.Register, wire.Ping)
    daemon.send(wire.Welcome(hello.id, 1, "9.9", "boot", LIMITS), wire.Error(register.id, code, "because"))
    began = time.monotonic()
    with answering(daemon, lambda ping: wire.Pong(ping.id)), pytest.raises(REFUSALS[code], match="because"):
        client.register(5)
    assert time.monotonic() - began < 2
    assert client.registration == wire.Error(register.id, code, "because")
    client.close()


def test_another_refusal_leaves_the_registration_alone(daemon: Daemon, path: Path):
    """A request that is refused because of a layout says nothing about the registration that was accepted."""
    client = registering(path, [])
    client.submit(wire.Ping)
    daemon.accept()
    hello, register, _ = daemon.read_kinds(wire.Hello, wire.Register, wire.Ping)
    daemon.send(wire.Welcome(hello.id, 1, "9.9", "boot", LIMITS), wire.Registered(register.id, [640]))
    client.poll(5)
    pending = client.submit(lambda number: wire.Retrieve(number, b"lease", 0, b""))
    daemon.send(wire.Error(pending.id, "layout_refused", "chunks of another size"))
    client.poll(5)
    assert pending.reply == wire.Error(pending.id, "layout_refused", "chunks of another size")
    assert client.registration == wire.Registered(register.id, [640])
    client.close()


def test_close_is_the_end_of_what_is_pending(daemon: Daemon, client: Client):
    """Closing loses what is pending and tells the daemon; twice is harmless; a later request connects anew."""
    client.submit(wire.Ping)
    daemon.welcome(client)
    pending = client.submit(wire.Ping)
    client.close()
    client.close()
    assert is_lost(pending)
    daemon.read_kinds(wire.Ping)
    assert daemon.socket.recv(1) == b""


def test_what_the_daemon_must_hear_is_sent_late(daemon: Daemon, client: Client, clock: Clock):
    """``even_if_late`` sends to a late daemon, and to none that is not there or has been given up."""
    client.submit(wire.Ping)
    daemon.welcome(client)
    old = client.submit(wire.Ping)
    daemon.read_kinds(wire.Ping)
    clock.now += 2 * client.deadline_s
    assert is_lost(client.submit(wire.Ping))
    must = client.submit(lambda number: wire.Release(number, b"lease"), even_if_late=True)
    assert not must.is_over
    assert daemon.read_kinds(wire.Release) == [wire.Release(must.id, b"lease")]
    daemon.send(wire.Pong(old.id), wire.Released(must.id))
    client.poll(5)
    assert (must.reply, client.is_late) == (wire.Released(must.id), False)
    daemon.socket.sendall(b"no reply")
    client.poll(5)
    assert is_lost(client.submit(wire.Ping, even_if_late=True))


def test_an_answer_goes_to_whom_it_is_for(daemon: Daemon, client: Client, clock: Clock):
    """What is said on one connection is sent on that one or on none, and connects to nobody."""
    first = client.submit(wire.Ping)
    daemon.welcome(client)
    assert first.connection == client.connection != 0
    assert not is_lost(client.submit(wire.Ping, connection=first.connection))
    daemon.read_kinds(wire.Ping)
    daemon.socket.close()
    client.poll(5)
    clock.now += RETRY_S
    assert client.connection == 0
    assert is_lost(client.submit(wire.Ping, even_if_late=True, connection=first.connection))
    assert not daemon.has_connection()
    second = client.submit(wire.Ping)
    daemon.welcome(client)
    assert second.connection == client.connection != first.connection
    assert is_lost(client.submit(wire.Ping, even_if_late=True, connection=first.connection))
    assert client.num_unanswered == 0


def test_a_request_that_cannot_be_made_leaves_nothing(daemon: Daemon, client: Client, clock: Clock):
    """When building a request raises, nothing is unanswered: the daemon, to whom nothing was said, is not late."""
    client.submit(wire.Ping)
    daemon.welcome(client)
    with pytest.raises(ZeroDivisionError):
        client.submit(lambda number: wire.Ping(number // 0))
    assert client.num_unanswered == 0
    clock.now += 2 * client.deadline_s
    assert not client.is_late
    assert not is_lost(client.submit(wire.Ping))


def test_a_registration_ends_with_its_connection(daemon: Daemon, path: Path):
    """An answer to a registration is true for its connection only: without one there is none."""
    client = registering(path, [])
    client.submit(wire.Ping)
    daemon.accept()
    hello, register, _ = daemon.read_kinds(wire.Hello, wire.Register, wire.Ping)
    daemon.send(wire.Welcome(hello.id, 1, "9.9", "boot", LIMITS), wire.Registered(register.id, [640]))
    client.poll(5)
    assert client.registration == wire.Registered(register.id, [640])
    daemon.socket.close()
    client.poll(5)
    assert client.registration is None
    assert client.take_fds() == []
