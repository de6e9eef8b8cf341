"""How a worker's memory comes to whoever copies."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from kvist.errors import DeadlineExceeded, FenceError, FenceRefused, KvistError, LayoutRefused, PoolKept
from tests.support.fake_vllm import adapter

KEPT = PoolKept("no pool for engines (--isolate)")


class Side:
    """A worker's side that takes note of where its requests go."""

    governor = None

    def __init__(self) -> None:
        self.connected: list[Any] = []
        self.num_closed = 0

    def connect(self, requests: Any, fence: Any, rows: Any) -> None:
        self.connected.append(requests)

    def close(self) -> None:
        self.num_closed += 1


def register(lane: str, answer: Callable[[str], KvistError | None]) -> tuple[Any, Side, list[str]]:
    """Register a worker on a GPU; ``answer`` says what a daemon has against a way to copy."""
    kind = adapter("connector").KvistConnector
    connector, side, asked = kind.__new__(kind), Side(), []
    found = SimpleNamespace(rows=(), storages=(), texts=(), rows_of_group=lambda groups: {})

    def hand_over(_: Any, way: Any) -> Any:
        def ask(deadline_s: float) -> Any:
            asked.append(way.value)
            if (error := answer(way.value)) is not None:
                raise error
            return SimpleNamespace(chunk_nbytes=[1])

        requests = SimpleNamespace(register=ask)
        return SimpleNamespace(requests=lambda client, governor: requests, fence=None, bases=(), fds=())

    connector.__dict__.update(
        _refusal="", _faults=set(), _worker=side, _cut=SimpleNamespace(groups=(), chunk_tokens=256), _cache_config=None,
        _options=adapter("options").Options(lane=lane), _hand_over=hand_over, _client=lambda name, registrar: None,
        _config=SimpleNamespace(
            parallel_config=SimpleNamespace(rank=0), device_config=SimpleNamespace(device_type="cuda")
        ),
    )  # fmt: skip
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(adapter("connector").layout, "describe_memory", lambda *_: found)
        connector.register_kv_caches({})
    assert not connector._faults
    return connector, side, asked


def test_a_daemon_that_keeps_its_pool_copies_itself():
    """Where no lane was asked for and the daemon gives no engine its pool, the memory is handed over instead."""
    connector, side, asked = register("", lambda way: KEPT if way == "engine" else None)
    assert asked == ["engine", "daemon"]
    assert (connector._refusal, len(side.connected), side.num_closed) == ("", 2, 1)


def test_a_lane_that_was_asked_for_is_not_replaced():
    """With the engine lane named, a daemon that keeps its pool leaves the engine without a cache, and it says why."""
    connector, _, asked = register("engine", lambda _: KEPT)
    assert asked == ["engine"]
    assert "--isolate" in connector._refusal


@pytest.mark.parametrize(("lane", "way"), [("", "engine"), ("engine", "engine"), ("daemon", "daemon")])
def test_the_engine_copies_unless_told_otherwise(lane: str, way: str):
    """On a GPU the worker's own threads copy; with ``daemon`` the daemon does."""
    connector, _, asked = register(lane, lambda _: None)
    assert (asked, connector._refusal) == ([way], "")


@pytest.mark.parametrize("refused", [FenceError("no events here"), FenceRefused("isolated namespaces")])
@pytest.mark.parametrize("lane", ["", "daemon"])
def test_a_worker_waits_itself_where_events_cannot_be_shared(lane: str, refused: KvistError):
    """Where the daemon cannot open the engine's event, the memory is handed over without one, and only then."""

    def answer(way: str) -> KvistError | None:
        return KEPT if way == "engine" else refused if way == "daemon" else None

    connector, side, asked = register(lane, answer)
    assert asked == ([] if lane else ["engine"]) + ["daemon", "daemon, without events"]
    assert (connector._refusal, side.num_closed) == ("", len(asked) - 1)


def test_what_a_daemon_refuses_is_final_and_its_absence_is_not():
    """An engine whose layout is refused has no cache; one without a daemon tries again later."""
    assert "overlap" in register("", lambda _: LayoutRefused("two layers overlap"))[0]._refusal
    assert register("", lambda _: DeadlineExceeded("no answer"))[0]._refusal == ""
