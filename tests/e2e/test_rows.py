"""Several rows on a real daemon: each group's blocks come back as they were, over either lane and across shards."""

from __future__ import annotations

import subprocess
import sys
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from kvist.model.layout import GroupKind, LayerGroup, LayerPlane, slice_heads
from kvist.model.rows import Row, row_memory
from kvist.wire import messages as wire
from tests.support.daemon import Daemon
from tests.support.layouts import ChunkMap, Laid, Shape, kv_apart, nhd
from tests.support.memory import stamp
from tests.support.row_engine import (
    CHUNK_TOKENS,
    NUM_HEADS,
    READ,
    WRITTEN,
    RowEngine,
    blocks_of,
    part_of,
    two_groups,
    whole_chunk,
)
from tests.support.waiting import wait_until

ROOT = Path(__file__).parents[2]
NAMES = tuple("abcde")


def three_groups() -> tuple[list[LayerGroup], list[int]]:
    """Return a full group, one with a window of two chunks and a recurrent one, each with blocks of its own size."""
    full, window = nhd(Shape(2, 40, 4, 2, 64)), kv_apart(Shape(1, 20, 8, 1, 48))
    state = LayerPlane(3, 0, num_blocks=12, block_stride=5000, row_nbytes=3000)
    windowed = tuple(replace(plane, memory=2) for plane in window.group.planes)
    groups = [
        full.group,
        LayerGroup(GroupKind.WINDOW, 8, windowed, window=CHUNK_TOKENS + 5),
        LayerGroup(GroupKind.RECURRENT, 16, (state,)),
    ]
    return groups, [*full.memory_nbytes, *window.memory_nbytes, 12 * 5000]


@pytest.mark.parametrize("is_copying", [False, True], ids=["daemon lane", "engine lane"])
def test_three_groups_come_back(tmp_path: Path, *, is_copying: bool):
    """What is stored is, while it is evicted in part, loaded into other blocks byte for byte, and nothing else is."""
    groups, memory_nbytes = three_groups()
    rows = [row_memory(Row(number, 0), group, CHUNK_TOKENS) for number, group in enumerate(groups)]
    hits = []
    with (
        Daemon(tmp_path, pool="256KiB") as daemon,
        RowEngine(daemon.path, rows, memory_nbytes, is_copying=is_copying) as engine,
    ):
        assert engine.registered.chunk_nbytes == [held.chunk_nbytes for held in rows] == [8192, 1536, 3000]

        def store(names: tuple[str, ...]) -> None:
            for number, held in enumerate(rows):
                contents = [stamp(f"{name}{number}".encode(), held.chunk_nbytes) for name in names]
                reply = engine.store(number, names, blocks_of(held, len(names)), contents)
                assert isinstance(reply, wire.StoreReply), reply
                assert reply.num_refused == 0
            wait_until(lambda: daemon.status().num_copies_in_flight == 0)

        def load(num_chunks: int, lease: bytes) -> None:
            for number, (held, first) in enumerate(zip(rows, (0, max(0, num_chunks - 2), num_chunks - 1), strict=True)):
                chunks = blocks_of(held, num_chunks - first, start=held.group.num_blocks - 5 * held.blocks_per_chunk)
                expected = [stamp(f"{name}{number}".encode(), held.chunk_nbytes) for name in NAMES[first:num_chunks]]
                assert engine.load(number, lease, first, chunks) == expected
                assert engine.is_untouched_but(number, chunks)

        store(NAMES)
        for turn in range(40):
            for names in (NAMES, NAMES[:3]):  # What both need was used last.
                found = engine.look_up(names)
                if found.num_chunks:
                    load(found.num_chunks, found.lease)
                hits += [found.num_chunks] if names is NAMES else []
            if not hits[-1]:
                break
            for number in range(turn):
                store((f"other {turn}/{number}",))
    assert hits[0] == 5
    assert hits == sorted(hits, reverse=True)

    assert {0, 5} < set(hits), hits


def two_full_groups() -> tuple[list[LayerGroup], list[int]]:
    """Return two full groups, with chunks of four blocks each, in layouts of their own."""
    first, second = nhd(Shape(2, 40, 4, 2, 64)), kv_apart(Shape(1, 40, 4, 1, 48))
    moved = tuple(replace(plane, memory=2) for plane in second.group.planes)
    return [first.group, replace(second.group, planes=moved)], [*first.memory_nbytes, *second.memory_nbytes]


@pytest.mark.parametrize("is_copying", [False, True], ids=["daemon lane", "engine lane"])
@pytest.mark.parametrize("names", [("a", "b"), ()], ids=["behind chunks", "alone"])
def test_a_tail_comes_back(tmp_path: Path, names: tuple[str, ...], *, is_copying: bool):
    """Whole chunks and the longest tail behind them, in every row, come into other blocks, and the lease ends."""
    groups, memory_nbytes = two_full_groups()
    rows = [row_memory(Row(number, 0), group, CHUNK_TOKENS) for number, group in enumerate(groups)]
    tails = ("1 block", "2 blocks", "3 blocks")
    with (
        Daemon(tmp_path, pool="256KiB") as daemon,
        RowEngine(daemon.path, rows, memory_nbytes, is_copying=is_copying) as engine,
    ):

        def contents(number: int, names: tuple[str, ...], num_blocks: int) -> list[bytes]:
            nbytes = rows[number].group.block_nbytes * num_blocks
            return [stamp(f"{name}{number}".encode(), nbytes) for name in names]

        slots = [-(-held.chunk_nbytes // 4096) * 4096 for held in rows]
        for number, held in enumerate(rows):
            stored = engine.store(number, names, blocks_of(held, len(names)), contents(number, names, 4))
            assert stored == wire.StoreReply(stored.id, len(names), 0)
            for num_blocks in (1, 2, 3)[: 3 - number]:  # The longest that both rows have is the second.
                tail = tails[num_blocks - 1 : num_blocks]
                reply = engine.store(
                    number, tail, blocks_of(held.tail(num_blocks), 1), contents(number, tail, num_blocks),
                    parent=names[-1:], tail_blocks=num_blocks,
                )  # fmt: skip
                assert reply == wire.StoreReply(reply.id, 1, 0)
        wait_until(lambda: daemon.status().num_copies_in_flight == 0)
        assert daemon.status().pool_used_nbytes == slots[0] * (len(names) + 3) + slots[1] * (len(names) + 2)

        found = engine.look_up(names, tails=tails)
        assert (found.num_chunks, found.tail) == (len(names), 2)
        for number, held in enumerate(rows):
            chunks = blocks_of(held, len(names), start=20)
            if names:
                assert engine.load(number, found.lease, 0, chunks) == contents(number, names, 4)
                assert engine.is_untouched_but(number, chunks)
            assert daemon.status().num_leases == 1
            chunks = blocks_of(held.tail(2), 1, start=30)
            expected = contents(number, tails[1:2], 2)
            assert engine.load(number, found.lease, len(names), chunks, tail_blocks=2) == expected
            assert engine.is_untouched_but(number, chunks)
        wait_until(lambda: daemon.status().num_leases == 0)
        assert daemon.status().num_pinned == 0


class Worker:
    """One of two workers, a process of its own."""

    def __init__(self, path: str, shard: int) -> None:
        command = [sys.executable, "-m", "tests.support.row_engine", path, str(shard)]
        self.process = subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def __enter__(self) -> Worker:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.communicate(timeout=20)

    def hear(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()

    def go_on(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write("\n")
        self.process.stdin.flush()


def test_two_workers_and_one_share_by_heads(tmp_path: Path):
    """What two workers with half of the heads each have stored, one with all of them loads, and the other way round."""
    groups, memory_nbytes = two_groups(num_heads=NUM_HEADS, is_wide=True)
    half = NUM_HEADS // 2
    rows = [
        row_memory(Row(number, shard), slice_heads(group, shard * half, half), CHUNK_TOKENS)
        for shard in range(2)
        for number, group in enumerate(groups)
    ]
    with ExitStack() as stack:
        daemon = stack.enter_context(Daemon(tmp_path))
        engine = stack.enter_context(RowEngine(daemon.path, rows, memory_nbytes, engine_id="alone"))
        assert engine.num_found(WRITTEN) == 0
        workers = [stack.enter_context(Worker(daemon.path, shard)) for shard in range(2)]
        assert [worker.hear() for worker in workers] == ["stored", "stored"]

        found = engine.look_up(WRITTEN)
        assert found.num_chunks == len(WRITTEN)
        for number, held in enumerate(rows):
            first = 0 if held.row.group == 0 else len(WRITTEN) - 1
            engine.load(number, found.lease, first, blocks_of(held, len(WRITTEN) - first))
        for group in range(2):
            assert_heads_are_joined(engine, groups[group], group)

        engine.clear()
        for number, held in enumerate(rows):
            contents = [part_of(name, held.row) for name in READ]
            reply = engine.store(number, READ, blocks_of(held, len(READ)), contents)
            assert isinstance(reply, wire.StoreReply)
            assert reply.num_stored == len(READ)
        for worker in workers:
            worker.go_on()
        assert [worker.hear() for worker in workers] == [str(len(READ) + 1)] * 2


TURN_TOKENS = 2


def turns(block_tokens: int) -> tuple[LayerGroup, list[int]]:
    """Return a group whose blocks are dealt out to two ranks, and a rank's memory of it."""
    laid = nhd(Shape(2, 40, block_tokens // 2, 2, 64))
    return replace(laid.group, block_tokens=block_tokens), laid.memory_nbytes


def tokens_of(rank: int, name: str) -> bytes:
    """Return a rank's part of a chunk of ``[layer, kv, token, head, byte]``: the tokens of its turns."""
    shape = (2, 2, CHUNK_TOKENS, 2, 64)
    chunk = np.frombuffer(stamp(name.encode(), int(np.prod(shape))), dtype=np.uint8).reshape(shape)
    mine = [token for token in range(CHUNK_TOKENS) if token // TURN_TOKENS % 2 == rank]
    return np.ascontiguousarray(chunk[:, :, mine]).tobytes()


@pytest.mark.parametrize("is_copying", [False, True], ids=["daemon lane", "engine lane"])
def test_ranks_that_take_turns_with_tokens(tmp_path: Path, *, is_copying: bool):
    """What two ranks of context parallelism have stored, two with blocks of another size load, each its own tokens;
    what only one of them has stored is not found.
    """
    with ExitStack() as stack:
        daemon = stack.enter_context(Daemon(tmp_path))
        engines = {}
        for block_tokens in (8, 16):
            group, memory_nbytes = turns(block_tokens)
            for rank in range(2):
                row = row_memory(Row(0, rank), group, CHUNK_TOKENS)
                engine = RowEngine(
                    daemon.path, [row], memory_nbytes, engine_id=f"blocks of {block_tokens}", is_copying=is_copying
                )
                engines[block_tokens, rank] = stack.enter_context(engine)
        for rank, names in enumerate((NAMES, NAMES[:3])):
            writer = engines[8, rank]
            reply = writer.store(
                0, names, blocks_of(writer.rows[0], len(names)), [tokens_of(rank, name) for name in names]
            )
            assert reply == wire.StoreReply(reply.id, len(names), 0)
        wait_until(lambda: daemon.status().num_copies_in_flight == 0)
        found = engines[16, 0].look_up(NAMES, num_shards=2)
        assert found.num_chunks == 3
        for rank in range(2):
            reader = engines[16, rank]
            chunks = blocks_of(reader.rows[0], 3, start=11)
            assert reader.load(0, found.lease, 0, chunks) == [tokens_of(rank, name) for name in NAMES[:3]]
            assert reader.is_untouched_but(0, chunks)
        wait_until(lambda: daemon.status().num_leases == 0)


def assert_heads_are_joined(engine: RowEngine, group: LayerGroup, number: int) -> None:
    """Assert that the blocks of the whole group hold all heads of the last chunk, each at its place."""
    held = row_memory(Row(number, 0), group, CHUNK_TOKENS)
    whole = ChunkMap(Laid(group, tuple(memory.nbytes for memory in engine.memory)), held.blocks_per_chunk)
    position = 0 if number else len(WRITTEN) - 1
    blocks = blocks_of(held, position + 1)[-1]
    assert whole.read(engine.arrays, blocks) == whole_chunk(WRITTEN[-1], number).tobytes()
