"""A request that cannot be carried out is refused with the value that is wrong, and has changed nothing."""

from dataclasses import replace

import msgspec
import pytest

from kvist.wire import messages as wire
from tests.support.engine import packed
from tests.support.layouts import opaque
from tests.support.memory import GUARD
from tests.support.named import (
    CHUNK_TOKENS,
    LAID,
    SHAPE,
    answer,
    look_up,
    refusal,
    send_retrieve,
    store,
)
from tests.support.simulated import SimulatedDaemon, SimulatedEngine


@pytest.mark.parametrize(
    ("change", "code", "named"),
    [
        ({"chunk_tokens": 5}, "layout_refused", "chunk_tokens 5 is no multiple of the engine's block of 2 tokens"),
        ({"chunk_tokens": -4}, "layout_refused", "chunk_tokens -4"),
        ({"chunk_tokens": 0}, "layout_refused", "chunk_tokens 0"),
        ({"chunk_tokens": 4096}, "layout_refused", "use a pool of at least"),
        ({"memory": []}, "layout_refused", "0 allocations"),
        ({"groups": []}, "layout_refused", "0 groups"),
        ({"memory": [wire.MemorySpec("host", 0)]}, "layout_refused", "0 bytes"),
        ({"memory": [wire.MemorySpec("abacus", LAID.memory_nbytes[0])] * 2}, "layout_refused", "abacus"),
        ({"memory": [wire.MemorySpec("host", 2**63)] * 2}, "layout_refused", str(2**63)),
        ({"memory": [wire.MemorySpec("host", LAID.memory_nbytes[0] - 1)] * 2}, "layout_refused", "ends at byte"),
        ({"memory": [wire.MemorySpec("host", LAID.memory_nbytes[0] + 1)] * 2}, "layout_refused", "declared with"),
        (
            {"memory": [wire.MemorySpec("host", LAID.memory_nbytes[0])] * 3},
            "malformed",
            "3 allocations with 3 file descriptors, and 2",
        ),
    ],
    ids=str,
)
def test_a_registration_that_cannot_be_is_refused(daemon: SimulatedDaemon, change: dict, code: str, named: str):
    """A registration whose numbers do not fit is refused with them, maps nothing, and can be sent again, corrected."""
    engine = SimulatedEngine(daemon, LAID, chunk_tokens=CHUNK_TOKENS)
    fds = [memory.fd for memory in engine.memory]
    sent = engine.send(lambda number: msgspec.structs.replace(engine.registration(number), **change), fds=fds)
    found, detail = refusal(engine, sent)
    assert (found, named in detail) == (code, True), detail
    assert not daemon.device.open
    assert isinstance(answer(engine, engine.register()), wire.Registered)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"kind": "sparse"}, "unknown kind of layer group 'sparse'"),
        ({"kind": "window"}, "a group of kind 'window' with a window of None tokens"),
        ({"kind": "chunked"}, "a group of kind 'chunked' with a window of None tokens"),
        ({"window": 4}, "a group of kind 'full' with a window of 4 tokens"),
        ({"kind": "recurrent", "window": 4}, "a group of kind 'recurrent' with a window of 4 tokens"),
        ({"kind": "window", "window": 0}, "a window of 0 tokens"),
        ({"kind": "window", "window": -4}, "a window of -4 tokens"),
        ({"kind": "window", "window": 3}, "a window of 3 tokens in chunks of 4"),
        ({"group": 4096}, "group 4096 on shard 0; both numbers lie in [0, 4096)"),
        ({"group": -1}, "group -1 on shard 0"),
        ({"shard": 70_000}, "group 0 on shard 70000"),
        ({"shard": -1}, "group 0 on shard -1"),
    ],
    ids=str,
)
def test_a_row_that_cannot_be_is_refused(daemon: SimulatedDaemon, change: dict, named: str):
    """Unknown kinds, windows that do not go with a kind or a chunk, and numbers that no key can hold are named."""
    engine = SimulatedEngine(daemon, LAID, chunk_tokens=CHUNK_TOKENS)

    def build(number: int) -> wire.Register:
        right = engine.registration(number)
        return msgspec.structs.replace(right, groups=[msgspec.structs.replace(right.groups[0], **change)])

    sent = engine.send(build, fds=[memory.fd for memory in engine.memory])
    code, detail = refusal(engine, sent)
    assert (code, named in detail) == ("layout_refused", True), detail


def test_a_row_comes_once(daemon: SimulatedDaemon):
    """A registration that has one row twice is refused with the row's numbers."""
    engine = SimulatedEngine(daemon, LAID, chunk_tokens=CHUNK_TOKENS)

    def build(number: int) -> wire.Register:
        right = engine.registration(number)
        return msgspec.structs.replace(right, groups=right.groups * 2)

    sent = engine.send(build, fds=[memory.fd for memory in engine.memory])
    assert refusal(engine, sent) == ("layout_refused", "group 0 on shard 0 appears 2 times in one registration")


def test_a_chunk_of_crumbs_is_refused(daemon: SimulatedDaemon):
    """A chunk of more rows than can be planned is refused with their number, before anything is planned."""
    pool = SimulatedDaemon(1 << 14)
    rows = (1 << 22) + 1
    plane = wire.PlaneSpec(0, 0, 1, 0, 1, num_heads=rows, head_stride=1)
    engine = SimulatedEngine(pool, opaque(replace(SHAPE, num_blocks=2)), chunk_tokens=CHUNK_TOKENS)

    def build(number: int) -> wire.Register:
        memory = [wire.MemorySpec("host", rows)]
        return wire.Register(number, 2, memory, [wire.GroupSpec("full", 2, [plane])])

    code, detail = refusal(engine, engine.send(build, fds=[engine.memory[0].fd]))
    assert (code, detail) == ("layout_refused", f"a chunk of {rows} rows is over the limit of {rows - 1}")
    pool.close()


def test_registering_twice_is_refused(engine: SimulatedEngine):
    """A session registers once; the second time is refused, also while the first is on its way."""
    code, detail = refusal(engine, engine.register())
    assert (code, "has registered" in detail) == ("already_registered", True)
    late = SimulatedEngine(engine.daemon, LAID, chunk_tokens=CHUNK_TOKENS)
    first, second = late.register(), late.register()
    assert refusal(late, second)[0] == "already_registered"
    assert isinstance(answer(late, first), wire.Registered)


NO = b"\0" * 16
FULL = wire.NeedSpec("full")


def a_need(**numbers: int) -> wire.NeedSpec:
    return wire.NeedSpec("full", **numbers)


@pytest.mark.parametrize(
    ("build", "code", "named"),
    [
        (lambda n: wire.Lookup(n, b"x" * 17), "malformed", "17 bytes"),
        (lambda n: wire.Lookup(n, NO * (wire.CHUNKS_MAX + 1)), "malformed", f"{wire.CHUNKS_MAX + 1} digests"),
        (lambda n: wire.Lookup(n, NO, (FULL, a_need(num_shards=0))), "malformed", "on 0 shards"),
        (lambda n: wire.Lookup(n, NO, needs=()), "malformed", "0 groups"),
        (lambda n: wire.Lookup(n, NO, (a_need(num_shards=2**62),)), "malformed", str(2**62)),
        (lambda n: wire.Lookup(n, NO, (a_need(num_shards=4096), FULL)), "malformed", "on the 4097 rows of 2 groups"),
        (lambda n: wire.Lookup(n, NO, (a_need(num_shards=-1), FULL)), "malformed", "on -1 shards"),
        (lambda n: wire.Lookup(n, NO, needs=(FULL,) * 4097), "malformed", "4097 groups"),
        (lambda n: wire.Lookup(n, NO, (FULL, a_need(num_readers=0))), "malformed", "0 readers"),
        (lambda n: wire.Lookup(n, NO, (a_need(num_readers=4097),)), "malformed", "4097 readers"),
        (lambda n: wire.Lookup(n, NO, needs=(wire.NeedSpec("sparse"),)), "malformed", "'sparse'"),
        (lambda n: wire.Lookup(n, NO, needs=(wire.NeedSpec("window"),)), "malformed", "a span of None chunks"),
        (lambda n: wire.Lookup(n, NO, needs=(wire.NeedSpec("full", 2),)), "malformed", "a span of 2 chunks"),
        (lambda n: wire.Store(n, NO, b"", packed([[0, 1]]), row=1), "malformed", "row 1 of 1"),
        (lambda n: wire.Store(n, NO, b"", packed([[0, 1]]), row=-1), "malformed", "row -1 of 1"),
        (lambda n: wire.Lookup(n, NO * wire.CHUNKS_MAX, (a_need(num_shards=4096),)), "malformed", "the 4096 rows"),
        (lambda n: wire.Store(n, NO, b"x", packed([[0, 1]])), "malformed", "1 bytes"),
        (lambda n: wire.Store(n, NO, NO * 2, packed([[0, 1]])), "malformed", "2 digests as the parent"),
        (lambda n: wire.Store(n, NO, b"", packed([[0]])), "invalid_blocks", "1 block ids for 1 chunks of 2"),
        (lambda n: wire.Store(n, NO, b"", packed([[0, 32]])), "invalid_blocks", "block id 32"),
        (lambda n: wire.Store(n, NO, b"", packed([[0, -1]])), "invalid_blocks", "block id -1"),
        (lambda n: wire.Store(n, NO, b"", packed([[3, 3]])), "invalid_blocks", "block id 3 appears 2 times"),
        (
            lambda n: wire.Store(n, NO, b"", bytes(4 * (wire.BLOCKS_MAX + 1))),
            "invalid_blocks",
            f"{wire.BLOCKS_MAX + 1} block ids are over the limit",
        ),
        (lambda n: wire.Retrieve(n, b"nobody", 0, packed([[0, 1]])), "unknown_lease", b"nobody".hex()),
        (lambda n: wire.Hello(n, "kvist", 1, "x"), "malformed", "hello"),
    ],
    ids=lambda value: "" if callable(value) else value,
)
def test_a_request_that_cannot_be_is_refused(engine: SimulatedEngine, build, code: str, named: str):
    """A request with a wrong value is refused with that value, and the session goes on."""
    found, detail = refusal(engine, engine.send(build))
    assert (found, named in detail) == (code, True), detail
    assert store(engine, "a1").num_stored == 1


@pytest.mark.parametrize(
    ("change", "code", "named"),
    [
        ({"first_chunk": -1}, "invalid_blocks", "chunks [-1, 1) of a lease on [0, 3) of group 0 on shard 0"),
        ({"first_chunk": 2}, "invalid_blocks", "chunks [2, 4) of a lease on [0, 3)"),
        ({"first_chunk": 2**62}, "invalid_blocks", str(2**62)),
        ({"block_ids": b""}, "invalid_blocks", "chunks [0, 0)"),
        ({"block_ids": packed([[0, 1], [2]])}, "invalid_blocks", "3 block ids"),
        ({"block_ids": packed([[0, 1], [2, 99]])}, "invalid_blocks", "block id 99"),
        ({"num_skipped_blocks": 2}, "invalid_blocks", "2 blocks to skip in a chunk of 2"),
        ({"num_skipped_blocks": -1}, "invalid_blocks", "-1 blocks to skip"),
        ({"deadline_ms": -1}, "malformed", "-1 ms"),
        ({"lease": b"\1"}, "unknown_lease", "01"),
        ({"row": 1}, "malformed", "row 1 of 1"),
        ({"row": -1}, "malformed", "row -1 of 1"),
    ],
    ids=str,
)
def test_a_retrieve_that_cannot_be_is_refused(engine: SimulatedEngine, change: dict, code: str, named: str):
    """A retrieve with a wrong value is refused with that value; its lease can still be claimed."""
    store(engine, "a1", "a2", "a3")
    lease = look_up(engine, "a1", "a2", "a3").lease
    right = wire.Retrieve(0, lease, 0, packed([[0, 1], [2, 3]]))
    found, detail = refusal(engine, engine.send(lambda n: msgspec.structs.replace(right, id=n, **change)))
    assert (found, named in detail) == (code, True), detail
    assert all((array == GUARD).all() for array in engine.arrays)
    assert isinstance(engine.call(lambda n: msgspec.structs.replace(right, id=n)), wire.RetrieveReply)


def test_a_null_block_is_refused(daemon: SimulatedDaemon):
    """The engine's null block is neither read nor written."""
    laid = replace(LAID, group=replace(LAID.group, null_block=0))
    engine = SimulatedEngine(daemon, laid, chunk_tokens=CHUNK_TOKENS)
    assert isinstance(answer(engine, engine.register()), wire.Registered)
    sent = engine.send(lambda number: wire.Store(number, NO, b"", packed([[1, 0]])))
    assert refusal(engine, sent) == ("invalid_blocks", "block id 0 is the engine's null block")


def test_chunks_of_another_size_are_not_loaded(daemon: SimulatedDaemon, engine: SimulatedEngine):
    """An engine that finds a chunk under its key whose size is not its own is told so, and nothing is written."""
    store(engine, "a1")
    other = SimulatedEngine(daemon, LAID, engine_id="y", chunk_tokens=2 * CHUNK_TOKENS)
    assert isinstance(answer(other, other.register()), wire.Registered)
    code, detail = refusal(other, send_retrieve(other, look_up(other, "a1").lease, 1))
    assert (code, str(other.map.nbytes) in detail) == ("layout_refused", True)


def test_nothing_is_copied_before_registering(daemon: SimulatedDaemon):
    """A session without memory may look up and release, and is told that it cannot store or load."""
    engine = SimulatedEngine(daemon, LAID, chunk_tokens=CHUNK_TOKENS)
    assert look_up(engine, "a1").num_chunks == 0
    for build in (
        lambda number: wire.Store(number, NO, b"", packed([[0, 1]])),
        lambda number: wire.Retrieve(number, NO, 0, packed([[0, 1]])),
    ):
        assert refusal(engine, engine.send(build))[0] == "not_registered"
