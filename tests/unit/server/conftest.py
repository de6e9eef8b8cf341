"""A simulated daemon for each test, and an engine on it."""

from collections.abc import Iterator

import pytest

from tests.support.named import NUM_SLOTS, connect
from tests.support.simulated import SimulatedDaemon, SimulatedEngine


@pytest.fixture
def daemon() -> Iterator[SimulatedDaemon]:
    daemon = SimulatedDaemon(NUM_SLOTS, queue_max=8, requests_max=4)
    yield daemon
    daemon.close()


@pytest.fixture
def engine(daemon: SimulatedDaemon) -> SimulatedEngine:
    return connect(daemon)
