"""Descriptors that come with replies: kept only while they are wanted, never inherited, closed with the connection."""

import fcntl
import os
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvist.client.connection import Connection
from kvist.errors import Unreachable
from kvist.wire import messages as wire
from kvist.wire.codec import encode
from tests.support.memory import num_fds
from tests.support.waiting import wait_until


class Daemon:
    """The other end of one connection."""

    def __init__(self, path: Path) -> None:
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(str(path))
        self._listener.listen(1)
        self.socket = socket.socket()

    def accept(self) -> None:
        self.socket.close()
        self.socket, _ = self._listener.accept()

    def send(self, reply: wire.Reply, *fds: int) -> None:
        """Send a reply, and descriptors with its first byte."""
        socket.send_fds(self.socket, [encode(reply, num_fds=len(fds))], list(fds))

    def close(self) -> None:
        self._listener.close()
        self.socket.close()


@pytest.fixture
def daemon(tmp_path: Path) -> Iterator[Daemon]:
    daemon = Daemon(tmp_path / "s")
    yield daemon
    daemon.close()


@pytest.fixture
def connection(daemon: Daemon, tmp_path: Path) -> Iterator[Connection]:
    connection = Connection(str(tmp_path / "s"))
    daemon.accept()
    yield connection
    connection.close()


@pytest.fixture
def fd() -> Iterator[int]:
    """A descriptor of something that can be recognised."""
    fd = os.memfd_create("kvist-test")
    os.write(fd, b"mine")
    yield fd
    os.close(fd)


def receive(connection: Connection, *numbers: int) -> None:
    """Take pongs in, which must be exactly these."""
    found: list[int] = []
    while len(found) < len(numbers):
        found += [reply.id for reply in connection.receive(5)]
    assert found == list(numbers)


def test_descriptors_are_kept_while_they_are_wanted(daemon: Daemon, connection: Connection, fd: int):
    """What comes while ``takes_fds`` is set is kept, in its order, and no other program inherits it."""
    connection.takes_fds = True
    daemon.send(wire.Pong(1), fd)
    receive(connection, 1)
    with open("/dev/null", "rb") as other:
        daemon.send(wire.Pong(2), other.fileno(), fd)
        receive(connection, 2)
        assert [os.fstat(one).st_ino for one in connection.fds] == [
            os.fstat(one).st_ino for one in (fd, other.fileno(), fd)
        ]
    assert os.pread(connection.fds[0], 4, 0) == b"mine"
    assert all(fcntl.fcntl(one, fcntl.F_GETFD) & fcntl.FD_CLOEXEC for one in connection.fds)


def test_descriptors_that_nobody_wants_are_closed(daemon: Daemon, connection: Connection, fd: int):
    """What comes before ``takes_fds`` is set, or after it was taken back, stays open nowhere in this process."""
    before = num_fds(os.getpid())
    daemon.send(wire.Pong(1), fd, fd)
    receive(connection, 1)
    connection.takes_fds = True
    connection.takes_fds = False
    daemon.send(wire.Pong(2), fd)
    receive(connection, 2)
    assert (connection.fds, num_fds(os.getpid())) == ([], before)


def test_descriptors_end_with_their_connection(daemon: Daemon, connection: Connection, fd: int):
    """What nobody has taken is closed with the connection, once; what was taken is its taker's."""
    before = num_fds(os.getpid())
    connection.takes_fds = True
    daemon.send(wire.Pong(1), fd, fd, fd)
    receive(connection, 1)
    taken = connection.fds.pop()
    connection.close()
    connection.close()
    assert num_fds(os.getpid()) == before  # The socket has gone, and the one that was taken has come.
    assert os.pread(taken, 4, 0) == b"mine"
    os.close(taken)


def test_a_lost_daemon_leaves_no_descriptor(daemon: Daemon, connection: Connection, fd: int):
    """When the daemon is gone, what it has sent and nobody has taken is closed."""
    before = num_fds(os.getpid())
    connection.takes_fds = True
    daemon.send(wire.Pong(1), fd)
    receive(connection, 1)
    daemon.socket.close()
    with pytest.raises(Unreachable):
        wait_until(lambda: list(connection.receive(0.1)))
    assert num_fds(os.getpid()) == before - 2  # Both ends of the connection.
