"""A registration with more descriptors than one frame owns arrives whole and in order, or is said not to."""

import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvist.errors import LayoutRefused
from kvist.wire import messages as wire
from kvist.wire.codec import FDS_MAX
from tests.support.memory import many_fds, number_of, numbered_fds
from tests.unit.client.test_client import LIMITS, Daemon, answering, is_lost, registering

NUM_BATCHES = 9
AT_ONCE = 4
"""Batches that are on their way at one time."""


@pytest.fixture
def daemon(tmp_path: Path) -> Iterator[Daemon]:
    with many_fds():
        daemon = Daemon(tmp_path / "s")
        yield daemon
        daemon.close()


@pytest.fixture
def many() -> Iterator[list[int]]:
    """One descriptor, as often as ``NUM_BATCHES`` and a registration have room for."""
    fd = os.memfd_create("kvist-test")
    yield [fd] * (NUM_BATCHES + 1) * FDS_MAX
    os.close(fd)


@pytest.mark.parametrize(
    ("num", "ahead", "own"),
    [(0, [], 0), (FDS_MAX, [], FDS_MAX), (FDS_MAX + 1, [FDS_MAX], 1), (1000, [FDS_MAX] * 3, 1000 - 3 * FDS_MAX)],
)
def test_descriptors_arrive_in_order(daemon: Daemon, num: int, ahead: list[int], own: int):
    """Whole frames go ahead, the rest with the registration; each descriptor is the one that was sent in its place."""
    with numbered_fds(num) as fds:
        client = registering(daemon.path, fds)
        client.submit(wire.Ping)
        daemon.accept()
        hello, *batches, register, ping = daemon.read_kinds(
            wire.Hello, *[wire.Descriptors] * len(ahead), wire.Register, wire.Ping
        )
    assert daemon.num_fds == [0, *ahead, own, 0]
    assert [number_of(fd) for fd in daemon.fds] == list(range(num))
    daemon.send(wire.Welcome(hello.id, 1, "9.9", "boot", LIMITS))
    daemon.send(
        *[wire.Received(batch.id, 1) for batch in batches], wire.Registered(register.id, [8]), wire.Pong(ping.id)
    )
    client.poll(5)
    assert client.registration == wire.Registered(register.id, [8])
    assert client.num_unanswered == 0
    client.close()


def test_batches_wait_for_the_daemon(daemon: Daemon, many: list[int]):
    """No more than a few batches are on their way at once: each answer lets the next one go."""
    client = registering(daemon.path, many)
    on_way: list[int] = []

    def take_in() -> None:
        daemon.accept()
        hello, *batches = daemon.read_kinds(wire.Hello, *[wire.Descriptors] * AT_ONCE)
        daemon.send(wire.Welcome(hello.id, 1, "9.9", "boot", LIMITS))
        while isinstance(batches[-1], wire.Descriptors):
            on_way.append(len(batches))
            daemon.send(wire.Received(batches.pop(0).id, 1))
            batches += daemon.read()

    thread = threading.Thread(target=take_in)
    thread.start()
    pending = client.submit(wire.Ping)
    thread.join(10)
    assert not thread.is_alive()
    assert not pending.is_lost
    assert on_way == [AT_ONCE] * (NUM_BATCHES - AT_ONCE + 1)
    assert len(daemon.fds) == len(many)
    client.close()


def test_a_daemon_that_takes_nothing_in_is_given_up(daemon: Daemon, many: list[int]):
    """Without answers the connection is lost in a moment, and the next one is not begun at once."""
    client = registering(daemon.path, many)
    began = time.monotonic()
    assert is_lost(client.submit(wire.Ping))
    assert time.monotonic() - began < 2
    assert not client.is_connected
    assert f"{AT_ONCE} batches are unanswered" in client.failure
    daemon.accept()
    assert is_lost(client.submit(wire.Ping))
    assert not daemon.has_connection()


def test_the_first_refusal_is_the_registrations_answer(daemon: Daemon, many: list[int]):
    """Who registers learns why a batch was refused, not what followed from it."""
    client = registering(daemon.path, many[: 2 * FDS_MAX])
    client.submit(wire.Ping)
    daemon.accept()
    hello, batch, register, _ = daemon.read_kinds(wire.Hello, wire.Descriptors, wire.Register, wire.Ping)
    refusal = wire.Error(batch.id, "layout_refused", "too many")
    daemon.send(wire.Welcome(hello.id, 1, "9.9", "boot", LIMITS), refusal)
    client.poll(5)
    assert client.registration is None
    daemon.send(wire.Error(register.id, "malformed", "too few"))
    with answering(daemon, lambda ping: wire.Pong(ping.id)), pytest.raises(LayoutRefused, match="too many"):
        client.register(5)
    assert client.registration == refusal
    client.close()


def test_after_a_refusal_no_more_is_sent(daemon: Daemon, many: list[int]):
    """A refused batch is the last one: the registration follows, so that the daemon lets go of those before."""
    client = registering(daemon.path, many)

    def refuse() -> None:
        daemon.accept()
        hello, *batches = daemon.read_kinds(wire.Hello, *[wire.Descriptors] * AT_ONCE)
        daemon.send(
            wire.Welcome(hello.id, 1, "9.9", "boot", LIMITS),
            *[wire.Error(batch.id, "draining", "stops") for batch in batches],
        )

    thread = threading.Thread(target=refuse)
    thread.start()
    client.submit(wire.Ping)
    thread.join(10)
    kinds = [type(request) for request in daemon.read()]
    while wire.Ping not in kinds:
        kinds += [type(request) for request in daemon.read()]
    assert kinds in ([wire.Register, wire.Ping], [wire.Descriptors, wire.Register, wire.Ping])
    client.close()
