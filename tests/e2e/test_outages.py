"""A daemon that is slow, stopped, killed or told to end: engines lose requests, never wait, and find it again."""

import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from kvist.errors import Draining, Unreachable
from kvist.wire import messages as wire
from tests.e2e.conftest import Connect
from tests.support.daemon import Daemon
from tests.support.engine import FakeEngine
from tests.support.layouts import Shape, opaque
from tests.support.waiting import wait_until

LARGE = opaque(Shape(num_layers=1, num_blocks=128, block_tokens=8, num_heads=1, row_nbytes=128 * 1024))
"""Chunks of one block and 2 MiB: a store of all of them takes a while."""
LARGE_PROMPT = list(range(128 * 8))


@pytest.fixture
def stopped(daemon: Daemon) -> Iterator[Daemon]:
    """A daemon that the test may stop; it goes on in the end."""
    yield daemon
    if daemon.process.poll() is None:
        daemon.signal(signal.SIGCONT)


def test_a_stopped_daemon_is_late_and_comes_back(stopped: Daemon, connect: Connect, prompt: list[int]):
    """Past the deadline requests to a daemon that stands still are lost at once; when it goes on, all is well."""
    engine = connect(stopped, deadline_s=0.2)
    engine.store(prompt)
    stopped.signal(signal.SIGSTOP)
    client = engine.client
    pending, chunks = engine.submit_store([9, *prompt])
    assert not pending.is_over
    assert not client.is_late
    wait_until(lambda: client.is_late, deadline_s=5)
    began = time.monotonic()
    lost = [client.submit(wire.Ping) for _ in range(100)]
    with pytest.raises(Unreachable, match="late"):
        client.call(wire.Ping)
    assert time.monotonic() - began < 1
    assert all(one.is_lost for one in lost)
    assert not pending.is_over
    stopped.signal(signal.SIGCONT)
    client.wait(pending, 20)
    assert isinstance(pending.reply, wire.StoreReply)
    assert pending.reply.num_stored == 5
    engine.give_back(chunks)
    assert not client.is_late
    assert engine.load([9, *prompt], engine.look_up([9, *prompt])) == []


def test_a_stopped_daemon_does_not_hold_up_who_connects(stopped: Daemon):
    """An engine that meets a daemon that stands still waits for nothing longer than it was told."""
    stopped.signal(signal.SIGSTOP)
    with FakeEngine(stopped.path, deadline_s=0.1) as engine:
        began = time.monotonic()
        with pytest.raises(Unreachable):
            engine.client.register()
        assert all(engine.client.submit(wire.Ping).is_lost for _ in range(10))
        assert time.monotonic() - began < 2
        stopped.signal(signal.SIGCONT)
        engine.client.deadline_s = 20
        assert engine.client.register().chunk_nbytes == [4096]


def test_a_killed_daemon_loses_what_is_pending(daemon: Daemon, connect: Connect, prompt: list[int]):
    """The end of the daemon is the end of every request to it; the next daemon is found, and told of the memory."""
    engine = connect(daemon)
    engine.store(prompt)
    daemon.signal(signal.SIGSTOP)
    pending, chunks = engine.submit_store([9, *prompt])
    daemon.kill()
    began = time.monotonic()
    engine.client.wait(pending, 20)
    assert pending.is_lost
    assert time.monotonic() - began < 1
    engine.give_back(chunks)
    with pytest.raises(Unreachable, match=rf"pid {daemon.pid}\) is gone|{daemon.path}"):
        engine.client.call(wire.Ping)
    daemon.start()
    wait_until(lambda: is_registered(engine))
    assert engine.num_found(prompt) == 0
    assert engine.store(prompt).num_stored == 5
    assert engine.load(prompt, engine.look_up(prompt)) == []
    assert engine.is_untouched()


def is_registered(engine: FakeEngine) -> bool:
    """Say whether the client has, by itself, connected and registered anew."""
    engine.client.submit(wire.Ping)
    engine.client.poll(0.05)
    return isinstance(engine.client.registration, wire.Registered) and engine.client.welcome is not None


def test_a_stop_answers_what_has_begun(tmp_path: Path, connect: Connect):
    """A store that is being copied is answered, nothing new is taken, the path is gone, the exit code is 0."""
    daemon = Daemon(tmp_path, pool="512MiB")
    engine = connect(daemon, laid=LARGE, is_guarded=False)
    bystander = connect(daemon, engine_id="bystander")
    pending = engine.client.submit(store_of(engine, LARGE_PROMPT))
    wait_until(lambda: daemon.status().num_copies_in_flight == 1)
    daemon.signal(signal.SIGTERM)
    wait_until(lambda: not os.path.exists(daemon.path))
    with pytest.raises((Draining, Unreachable)):
        bystander.look_up(LARGE_PROMPT)
    engine.client.wait(pending, 30)
    assert pending.reply == wire.StoreReply(pending.id, 128, 0)
    assert daemon.process.wait(30) == 0
    assert not os.path.exists(daemon.path)
    assert "Traceback" not in daemon.log.read_text()


def test_loads_do_not_wait_for_stores(tmp_path: Path, connect: Connect, prompt: list[int]):
    """While a long store is being copied, another engine's load of little is answered long before its end."""
    with Daemon(tmp_path, pool="768MiB") as daemon:
        engine = connect(daemon)
        engine.store(prompt)
        writer = connect(daemon, laid=LARGE, is_guarded=False, engine_id="writer")
        stores = [writer.client.submit(store_of(writer, [start, *LARGE_PROMPT[1:]])) for start in (1, 2)]
        wait_until(lambda: daemon.status().num_copies_in_flight == 2)
        assert engine.load(prompt, engine.look_up(prompt)) == []
        writer.client.poll()
        assert not stores[1].is_over
        for pending in stores:
            writer.client.wait(pending, 30)
            assert pending.reply == wire.StoreReply(pending.id, 128, 0)


def store_of(engine: FakeEngine, prompt: list[int]) -> Callable[[int], wire.Store]:
    """Return a store of a long prompt, whose chunks are blocks 0, 1, 2 and so on."""
    digests = b"".join(engine.digests(prompt))
    ids = b"".join(number.to_bytes(4, "little") for number in range(LARGE.group.num_blocks))
    return lambda number: wire.Store(number, digests, b"", ids)
