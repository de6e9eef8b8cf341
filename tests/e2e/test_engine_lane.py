"""Engines that copy for themselves: the pool is theirs to map, and a slot is free when nobody writes to it any more."""

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from kvist.errors import PoolKept
from kvist.wire import messages as wire
from tests.e2e.conftest import Connect
from tests.support.copier import KEPT, NBYTES, OPEN, ROOT, Copier, CopierProcess, registration
from tests.support.daemon import Daemon
from tests.support.memory import stamp
from tests.support.peer import Peer
from tests.support.waiting import wait_until

FREE_AFTER_S = 0.1
ATTEMPTS = 6
"""A busy machine may need some: the law is about the daemon's time, not about the machine's."""
POOL_NBYTES = 64 * 1024


@pytest.fixture
def small(tmp_path: Path):
    """A daemon with room for 16 chunks."""
    with Daemon(tmp_path, pool=str(POOL_NBYTES)) as daemon:
        yield daemon


def test_what_one_process_copies_another_copies_back(daemon: Daemon):
    """Bytes that an engine has put into the pool itself come back in another engine, which takes them itself."""
    before = daemon.num_fds()
    with CopierProcess(daemon.path), Copier(daemon.path) as other:
        found = other.look_up(KEPT)
        assert found.num_chunks == len(KEPT)
        chunks, reply = other.load(found)
        assert chunks == [stamp(name.encode(), NBYTES) for name in KEPT]
        assert reply == wire.RetrieveReply(reply.id, len(KEPT), [])
        assert other.look_up(OPEN).num_chunks == 0
        assert (daemon.count("chunks_stored"), daemon.count("chunks_loaded")) == (len(KEPT), len(KEPT))
    daemon.check_quiet(num_fds=before)


def test_a_changed_byte_is_seen_by_the_engine(daemon: Daemon):
    """A chunk that no longer matches its checksum is reported by who reads it, and found no more."""
    with Copier(daemon.path) as copier:
        copier.store(KEPT)
        daemon.poison(stamp(KEPT[1].encode(), NBYTES), place=99)
        _, reply = copier.load(copier.look_up(KEPT))
        assert reply == wire.RetrieveReply(reply.id, len(KEPT), [1])
        assert copier.look_up(KEPT).num_chunks == 1
        assert daemon.count("chunks_corrupt") == 1


def test_a_killed_copier_leaves_nothing(daemon: Daemon):
    """Within 100 ms of its death the slots of its open order are free, and nothing of the order can be found."""
    before = daemon.num_fds()
    took_s = []
    while min(took_s, default=FREE_AFTER_S) >= FREE_AFTER_S and len(took_s) < ATTEMPTS:
        with CopierProcess(daemon.path) as copier:
            status = daemon.status()
            assert (status.num_reserved, status.num_copies_in_flight) == (len(OPEN), 1)
            assert status.pool_used_nbytes == (len(KEPT) + len(OPEN)) * NBYTES
            began = time.monotonic()
            copier.kill()
            wait_until(lambda: daemon.status().num_reserved == 0, deadline_s=5)
            took_s.append(time.monotonic() - began)
            assert daemon.status().pool_used_nbytes == len(KEPT) * NBYTES
            daemon.check_quiet(num_fds=before)
    assert min(took_s) < FREE_AFTER_S, took_s
    with Copier(daemon.path) as other:
        assert other.look_up(OPEN).num_chunks == 0
        assert other.look_up(KEPT).num_chunks == len(KEPT)


def test_a_lost_connection_frees_no_slot(small: Daemon):
    """While the process lives, what its order names is used for nothing else; when it has ended, it is free."""
    with CopierProcess(small.path) as copier, Copier(small.path) as other:
        assert small.status().num_leases == 1
        copier.lose_connection()
        wait_until(lambda: small.status().num_leases == 0)
        num_others = POOL_NBYTES // NBYTES - len(OPEN)
        names = [f"other {number}" for number in range(num_others + 1)]
        reply = other.store(names)
        assert reply == wire.StoreReply(reply.id, num_others, 0, 1, "pool full")
        status = small.status()
        assert (status.num_reserved, status.num_copies_in_flight, status.num_sessions) == (len(OPEN), 1, 3)
        copier.kill()
        wait_until(lambda: small.status().num_sessions == 2)
        reply = other.store(names)
        assert reply == wire.StoreReply(reply.id, 1, num_others)


@pytest.mark.parametrize("is_connected", [True, False], ids=["connected", "lost"])
def test_a_stop_does_not_wait_for_processes(tmp_path: Path, *, is_connected: bool):
    """A daemon that stops gives open orders up: at once if the connection is lost, after ``drain_s`` if it is not."""
    config = tmp_path / "kvist.toml"
    config.write_text(f"drain_s = {0.2 if is_connected else 1000}\n")
    daemon = Daemon(tmp_path, arguments=["--config", str(config)])
    with CopierProcess(daemon.path) as copier:
        if not is_connected:
            copier.lose_connection()
            wait_until(lambda: daemon.status().num_leases == 0)
        daemon.signal(signal.SIGTERM)
        assert daemon.process.wait(20) == 0
        assert copier.process.poll() is None
    assert "Traceback" not in daemon.log.read_text()


def test_answers_are_taken_while_the_daemon_stops(tmp_path: Path):
    """An engine that carries its order out within ``drain_s`` is answered, and the daemon ends then."""
    daemon = Daemon(tmp_path)
    with Copier(daemon.path) as copier:
        order = copier.order_store(KEPT)
        daemon.signal(signal.SIGTERM)
        wait_until(lambda: not os.path.exists(daemon.path))
        reply = copier.peer.ask(wire.CopyDone(99, order.id, len(KEPT), copier.put(order)))
        assert reply == wire.StoreReply(99, len(KEPT), 0)
        assert daemon.process.wait(20) == 0


def test_the_pool_cannot_be_taken_away(daemon: Daemon):
    """Whoever has the pool's descriptor can neither shrink nor grow it, nor seal it against others."""
    with Copier(daemon.path) as copier:
        for nbytes in (0, 2 * copier.registered.pool_nbytes):
            with pytest.raises(PermissionError):
                os.ftruncate(copier.pool_fd, nbytes)
        assert os.fstat(copier.pool_fd).st_size == copier.registered.pool_nbytes == 16 << 20


def test_a_daemon_that_isolates_gives_no_engine_its_pool(tmp_path: Path, connect: Connect, prompt: list[int]):
    """With ``--isolate`` the engine lane is refused with the option's name, and the daemon lane serves."""
    with Daemon(tmp_path, arguments=["--isolate"]) as daemon:
        with Peer(daemon.path) as peer:
            reply = peer.hello().ask(registration(2))
            assert isinstance(reply, wire.Error)
            assert (reply.code, "--isolate" in reply.detail, peer.fds) == (PoolKept.code, True, [])
        engine = connect(daemon)
        engine.store(prompt)
        assert engine.load(prompt, engine.look_up(prompt)) == []


def test_the_pool_is_not_queued(daemon: Daemon):
    """A peer that does not read is not given the pool later, without its descriptor: its connection ends."""
    before = daemon.num_fds()
    with Peer(daemon.path) as peer:
        peer.hello()
        peer.send(*[wire.Status(number) for number in range(3000)], registration(2))
        wait_until(lambda: daemon.status().num_sessions == 1)
        num_fds = 0
        with contextlib.suppress(ConnectionResetError):
            while (received := socket.recv_fds(peer.socket, 1 << 16, 1))[0]:
                num_fds += len(received[1])
        assert num_fds == 0
        daemon.check_quiet(num_fds=before)


CONNECT = """
import socket, sys
daemon, parent = socket.socket(socket.AF_UNIX), socket.socket(fileno=int(sys.argv[2]))
daemon.connect(sys.argv[1])
socket.send_fds(parent, [b"x"], [daemon.fileno()])
"""


def test_a_process_that_is_gone_cannot_copy(daemon: Daemon):
    """A connection that has outlived the process that made it is refused the pool, and can go on without."""
    before = daemon.num_fds()
    ours, theirs = socket.socketpair()
    with ours, theirs:
        command = [sys.executable, "-c", CONNECT, daemon.path, str(theirs.fileno())]
        gone = subprocess.Popen(command, cwd=ROOT, pass_fds=[theirs.fileno()])
        _, fds, _, _ = socket.recv_fds(ours, 1, 1)
        assert gone.wait(20) == 0
    with Peer(daemon.path, connected=socket.socket(fileno=fds[0])) as peer:
        reply = peer.hello().ask(registration(2))
        assert isinstance(reply, wire.Error)
        assert (reply.code, f"process {gone.pid} cannot be watched" in reply.detail) == ("layout_refused", True), reply
        assert peer.fds == []
        assert peer.ask(wire.Ping(3)) == wire.Pong(3)
    daemon.check_quiet(num_fds=before)
