"""Descriptors that come ahead of a registration are kept in order, within a bound, and none outlives its purpose."""

import gc
import os
from collections.abc import Callable, Iterator
from dataclasses import replace

import msgspec
import pytest

from kvist.model.handles import ENGINE
from kvist.wire import messages as wire
from kvist.wire.codec import FDS_MAX, KEPT_FDS_MAX
from tests.support.layouts import block_outermost, nhd
from tests.support.memory import SharedMemory, many_fds, num_fds
from tests.support.named import (
    CHUNK_TOKENS,
    LAID,
    SHAPE,
    answer,
    content,
    loaded,
    look_up,
    refusal,
    send_retrieve,
    store,
)
from tests.support.simulated import SimulatedDaemon, SimulatedEngine

NUM_LAYERS = 6


@pytest.fixture
def unregistered(daemon: SimulatedDaemon) -> Iterator[SimulatedEngine]:
    """An engine that has said hello; with its end, everything that came with it is closed."""
    before = num_open()
    engine = SimulatedEngine(daemon, LAID, chunk_tokens=CHUNK_TOKENS)
    yield engine
    engine.end()
    daemon.settle()
    assert num_open() == before


def num_open() -> int:
    gc.collect()  # What others have left behind is no concern of these tests.
    return num_fds(os.getpid())


def own(engine: SimulatedEngine) -> list[int]:
    return [memory.fd for memory in engine.memory]


@pytest.mark.parametrize("ahead", [(), (1,), (6,), (1, 2), (3, 3), (1, 1, 1, 1, 1)], ids=str)
def test_descriptors_keep_their_order(daemon: SimulatedDaemon, ahead: tuple[int, ...]):
    """However a registration's descriptors are cut into batches, each names the memory that it named in one frame."""
    shape = replace(SHAPE, num_layers=NUM_LAYERS)
    first, second = [SimulatedEngine(daemon, lay(shape), chunk_tokens=CHUNK_TOKENS) for lay in (nhd, block_outermost)]
    before = num_open()
    for engine, cut in ((first, ahead), (second, ())):
        assert isinstance(answer(engine, engine.register(*cut)), wire.Registered)
    assert num_open() == before
    assert store(first, "a1", "a2").num_stored == 2
    sent = send_retrieve(second, look_up(second, "a1", "a2").lease, 2)
    assert isinstance(answer(second, sent), wire.RetrieveReply)
    assert loaded(second, sent) == [content(second, "a1"), content(second, "a2")]


def test_the_answer_says_how_many_are_kept(unregistered: SimulatedEngine):
    """Each batch is answered at once, with the number of all that are kept."""
    fds = own(unregistered)
    assert [unregistered.call(wire.Descriptors, fds=fds).num_kept for _ in range(3)] == [2, 4, 6]


def test_a_batch_of_none_is_refused(unregistered: SimulatedEngine):
    """Whoever hands nothing over is told so, and how many are kept."""
    unregistered.call(wire.Descriptors, fds=own(unregistered))
    code, detail = refusal(unregistered, unregistered.send(wire.Descriptors))
    assert (code, "none have come; 2 are kept" in detail) == ("malformed", True)


def test_the_number_that_is_kept_is_bounded(unregistered: SimulatedEngine):
    """One descriptor more than the bound is refused with the numbers and closed; those before it stay, and count."""
    with many_fds() as most:
        if most < KEPT_FDS_MAX + 2 * FDS_MAX + num_open():
            pytest.skip(f"a process may have {most} descriptors here")
        fd = unregistered.memory[0].fd
        sizes = [FDS_MAX] * (KEPT_FDS_MAX // FDS_MAX) + [KEPT_FDS_MAX % FDS_MAX]
        kept = [unregistered.call(wire.Descriptors, fds=[fd] * size).num_kept for size in sizes]
        assert kept[-1] == KEPT_FDS_MAX
        before = num_open()
        code, detail = refusal(unregistered, unregistered.send(wire.Descriptors, fds=[fd]))
        assert (code, f"{KEPT_FDS_MAX} descriptors are kept and 1 have come; at most" in detail) == (
            "layout_refused",
            True,
        )
        assert num_open() == before
        code, detail = refusal(unregistered, unregistered.register())
        assert (code, f"2 file descriptors, and {KEPT_FDS_MAX + 2} have come" in detail) == ("malformed", True)
        assert num_open() == before - KEPT_FDS_MAX


def changed(**changes: object) -> Callable[[wire.Register], wire.Register]:
    return lambda right: msgspec.structs.replace(right, **changes)


@pytest.mark.parametrize(
    ("change", "code"),
    [
        (changed(groups=[]), "layout_refused"),
        (changed(chunk_tokens=5), "layout_refused"),
        (changed(memory=[wire.MemorySpec("host", LAID.memory_nbytes[0])] * 3), "malformed"),
        (changed(memory=[wire.MemorySpec("abacus", LAID.memory_nbytes[0])] * 2), "layout_refused"),
        (changed(memory=[wire.MemorySpec("host", LAID.memory_nbytes[0] + 4096)] * 2), "layout_refused"),
        (changed(memory=[wire.MemorySpec(ENGINE, LAID.memory_nbytes[0])] * 2), "malformed"),
        (changed(fence=b"x" * 64), "layout_refused"),
    ],
    ids=["rows", "chunk", "number", "unknown", "too small", "engine", "fence"],
)
def test_a_refused_registration_closes_what_came_ahead(
    unregistered: SimulatedEngine, change: Callable[[wire.Register], wire.Register], code: str
):
    """Whatever a registration is refused for, by whomever, nothing of it stays open; the next one begins anew."""
    before = num_open()
    first, second = own(unregistered)
    unregistered.call(wire.Descriptors, fds=[first])
    assert num_open() == before + 1
    sent = unregistered.send(lambda number: change(unregistered.registration(number)), fds=[second])
    assert refusal(unregistered, sent)[0] == code
    assert num_open() == before
    assert isinstance(answer(unregistered, unregistered.register(1)), wire.Registered)
    assert num_open() == before


def test_memory_that_is_refused_by_the_device_is_closed(daemon: SimulatedDaemon, unregistered: SimulatedEngine):
    """Descriptors of memory that cannot be mapped are closed like all others."""
    with SharedMemory(LAID.memory_nbytes[0], seals=0) as unsealed:
        before = num_open()
        unregistered.call(wire.Descriptors, fds=[unsealed.fd])
        sent = unregistered.send(unregistered.registration, fds=own(unregistered)[1:])
        assert refusal(unregistered, sent)[0] == "layout_refused"
        assert num_open() == before
        assert not daemon.device.open


def test_what_stops_every_request_stops_descriptors(daemon: SimulatedDaemon, unregistered: SimulatedEngine):
    """A daemon that is stopping keeps nothing, and refuses the registration that would own what it has kept."""
    before = num_open()
    unregistered.call(wire.Descriptors, fds=own(unregistered))
    daemon.service.begin_draining()
    assert refusal(unregistered, unregistered.send(wire.Descriptors, fds=own(unregistered)))[0] == "draining"
    assert refusal(unregistered, unregistered.send(unregistered.registration))[0] == "draining"
    assert num_open() == before


def test_after_a_registration_there_is_nothing_to_keep(daemon: SimulatedDaemon, unregistered: SimulatedEngine):
    """From the registration on, descriptors are refused: while it is carried out, and afterwards."""
    registering = unregistered.register(1)
    for _ in range(2):
        code, _ = refusal(unregistered, unregistered.send(wire.Descriptors, fds=own(unregistered)))
        assert code == "already_registered"
        assert isinstance(answer(unregistered, registering), wire.Registered)
    daemon.service.check_invariants()


def test_the_end_of_a_session_closes_what_it_has_kept(daemon: SimulatedDaemon, unregistered: SimulatedEngine):
    """A session that ends before its registration, or while it is carried out, leaves no descriptor."""
    unregistered.call(wire.Descriptors, fds=own(unregistered) * 300)
    before = num_open()
    other = SimulatedEngine(daemon, LAID, chunk_tokens=CHUNK_TOKENS)
    other.register(2)
    for engine in (unregistered, other):
        engine.end()
        daemon.service.check_invariants()
    daemon.settle()
    assert num_open() <= before - 600


def test_an_undecodable_request_may_have_been_the_registration(daemon: SimulatedDaemon, unregistered: SimulatedEngine):
    """What was kept is closed when a request did not decode, and the session goes on without."""
    before = num_open()
    unregistered.call(wire.Descriptors, fds=own(unregistered))
    daemon.service.drop_descriptors(unregistered.session)
    assert num_open() == before
    assert look_up(unregistered, "a1").num_chunks == 0
    assert unregistered.call(wire.Descriptors, fds=own(unregistered)).num_kept == 2
