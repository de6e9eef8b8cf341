"""A request whose event the daemon cannot open goes out when the engine's work before it is done, and not sooner."""

from collections import deque
from typing import Any

from kvist.client.client import Build, Pending
from kvist.client.waiting import WaitingClient
from kvist.wire import messages as wire


class Work:
    """An accelerator's work, done when the test says so."""

    def __init__(self) -> None:
        self.num_given = 0
        self.num_done = 0
        self.given_back: list[object] = []

    def record(self) -> object:
        self.num_given += 1
        return self.num_given

    def is_done(self, fence: Any) -> bool:
        return fence <= self.num_done

    def give_back(self, fence: object) -> None:
        self.given_back.append(fence)


class Daemon:
    """A client whose requests the test answers."""

    def __init__(self) -> None:
        self.sent: list[Pending] = []
        self.requests: list[wire.Request] = []
        self.answers: deque[int] = deque()
        self.waits: list[float] = []

    def submit(self, build: Build) -> Pending:
        self.requests.append(build(len(self.sent) + 1))
        self.sent.append(Pending(len(self.sent) + 1, 0.0))
        return self.sent[-1]

    def poll(self, timeout_s: float) -> None:
        self.waits.append(timeout_s)
        while self.answers:
            number = self.answers.popleft()
            self.sent[number].reply = wire.Pong(number + 1)

    def close(self) -> None:
        for pending in self.sent:
            pending.is_lost |= pending.reply is None


def waiting() -> tuple[WaitingClient, Daemon, Work]:
    daemon, work = Daemon(), Work()
    return WaitingClient(daemon, work), daemon, work  # type: ignore[arg-type]


def test_a_request_goes_out_when_the_work_before_it_is_done():
    """Nothing is sent of work that runs, in the order of submission after that, and events are used again."""
    client, daemon, work = waiting()
    outer = [client.submit(wire.Ping) for _ in range(3)]
    client.poll()
    assert daemon.requests == []
    assert not any(pending.is_over for pending in outer)
    work.num_done = 2
    client.poll()
    assert daemon.requests == [wire.Ping(1), wire.Ping(2)]
    assert work.given_back == [1, 2]
    daemon.answers += [1]
    client.poll()
    assert [pending.reply for pending in outer] == [None, wire.Pong(2), None]
    work.num_done = 3
    client.poll()
    daemon.answers += [0, 2]
    client.poll()
    assert [pending.reply for pending in outer] == [wire.Pong(1), wire.Pong(2), wire.Pong(3)]


def test_work_that_is_done_costs_no_wait():
    """An engine without work in flight sends at once."""
    client, daemon, work = waiting()
    work.num_done = 9
    client.submit(wire.Ping)
    assert daemon.requests == [wire.Ping(1)]


def test_whoever_waits_looks_at_the_work_meanwhile():
    """A wait for the first answer is cut into short ones while something is unsent, and ends in time."""
    client, daemon, _ = waiting()
    client.submit(wire.Ping)
    client.poll(0.005)
    assert max(daemon.waits) <= 0.0005
    assert daemon.requests == []


def test_what_was_not_answered_at_the_end_is_lost():
    """Closing ends all requests, those that were never sent as well, and gives their events back."""
    client, daemon, work = waiting()
    work.num_done = 1
    outer = [client.submit(wire.Ping) for _ in range(2)]
    client.close()
    assert [pending.is_lost for pending in outer] == [True, True]
    assert len(daemon.requests) == 1
    assert work.given_back == [1, 2]
