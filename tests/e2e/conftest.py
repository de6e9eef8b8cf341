"""A daemon for each test, or one for a whole file of tests that must leave it as it was."""

import itertools
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.support.daemon import Daemon
from tests.support.engine import NAMESPACE, FakeEngine

_STARTS = itertools.count(1000, 1000)
Connect = Callable[..., FakeEngine]


@pytest.fixture
def daemon(tmp_path: Path) -> Iterator[Daemon]:
    """A small daemon of the test's own."""
    with Daemon(tmp_path) as daemon:
        yield daemon


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    """A small daemon that goes on serving from test to test."""
    with Daemon(tmp_path_factory.mktemp("shared")) as daemon:
        yield daemon


@pytest.fixture
def prompt() -> list[int]:
    """Return a prompt of five chunks and a bit that no other test has."""
    start = next(_STARTS)
    return list(range(start, start + 5 * NAMESPACE.chunk_tokens + 3))


@pytest.fixture
def connect() -> Iterator[Callable[..., FakeEngine]]:
    """Return a function that makes registered engines, all of which end with the test."""
    with ExitStack() as stack:

        def make(daemon: Daemon, **more) -> FakeEngine:
            engine = stack.enter_context(FakeEngine(daemon.path, **more))
            engine.client.register()
            return engine

        yield make
