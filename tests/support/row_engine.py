"""An engine whose worker holds several rows, in the daemon lane or in the engine lane.

``python -m tests.support.row_engine SOCKET SHARD`` is worker ``SHARD`` of two, each with half of the heads: it stores
what is named ``WRITTEN``, says so, waits for a line, loads ``READ``, and says how many chunks it has found as they
must be.
"""

from __future__ import annotations

import itertools
import sys
from collections import Counter
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace

import msgspec
import numpy as np

from kvist.client.client import Build, Client, Pending
from kvist.client.lane import EngineLane
from kvist.client.pool import LaneMemory
from kvist.model.coverage import need_of
from kvist.model.handles import ENGINE
from kvist.model.layout import GroupKind, LayerGroup
from kvist.model.rows import Row, RowMemory, row_memory
from kvist.wire import messages as wire
from kvist.wire.describing import describe_needs
from tests.support.copier import digests
from tests.support.engine import describe_rows, packed
from tests.support.lane_engine import CountedFences
from tests.support.layouts import ChunkMap, Laid, Shape, hnd, nhd
from tests.support.memory import GUARD, SharedMemory, stamp
from tests.support.twin import TwinDevice
from tests.support.waiting import wait_until

DEADLINE_S = 30.0
CHUNK_TOKENS = 16
WINDOW_TOKENS = 8
NUM_HEADS = 4
ROW_NBYTES = 64
WRITTEN = ("w1", "w2", "w3")
READ = ("r1", "r2", "r3", "r4")
Chunks = list[list[int]]


class RowEngine:
    """Requests in one line each. Every block is ``GUARD`` that no request has."""

    def __init__(
        self, path: str, rows: Sequence[RowMemory], memory_nbytes: Sequence[int], *, engine_id: str = "rows",
        is_copying: bool = False,
    ) -> None:  # fmt: skip
        self.rows = rows
        groups = {held.row.group: held.group for held in rows}
        num_shards = Counter(held.row.group for held in rows)
        self.needs = [need_of(groups[group], CHUNK_TOKENS, num_shards=num_shards[group]) for group in sorted(groups)]
        self._laid = [Laid(held.group, tuple(memory_nbytes)) for held in rows]
        self._maps: dict[tuple[int, int], ChunkMap] = {}
        self.memory = [SharedMemory(nbytes, name="kvist-rows") for nbytes in memory_nbytes]
        for memory in self.memory:
            memory.bytes[:] = GUARD
        self._is_copying = is_copying
        self._stack = ExitStack()
        for memory in self.memory:
            self._stack.callback(memory.close)
        self.scheduler = Client(path, engine_id=engine_id, name="scheduler", deadline_s=DEADLINE_S)
        self._stack.callback(self.scheduler.close)
        self.client = Client(
            path, engine_id=engine_id, name="worker", deadline_s=DEADLINE_S, registrar=self._registration
        )
        self._requests: Client | EngineLane = self.client
        if is_copying:
            bases = [array.ctypes.data for array in self.arrays]
            self._requests = EngineLane(self.client, LaneMemory(rows, bases), TwinDevice, CountedFences())
        self._stack.callback(self._requests.close)
        self.registered = self._requests.register(DEADLINE_S)

    def __enter__(self) -> RowEngine:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self._stack.close()

    @property
    def arrays(self) -> list[np.ndarray]:
        return [memory.bytes for memory in self.memory]

    def store(
        self, row: int, names: Sequence[str], chunks: Chunks, contents: Sequence[bytes], *, parent: Sequence[str] = (),
        tail_blocks: int = 0,
    ) -> wire.Reply | None:  # fmt: skip
        """Have chunks kept, from the first of a prompt or behind a parent, and fill their blocks with ``GUARD`` again.

        With ``tail_blocks``, they are one tail of so many blocks.
        """
        for blocks, content in zip(chunks, contents, strict=True):
            self._map(row, blocks).write(self.arrays, blocks, content)
        reply = self._wait(
            lambda number: wire.Store(
                number, digests(names), digests(parent), packed(chunks), row=row, tail_blocks=tail_blocks
            )
        )
        self._blank(row, chunks)
        return reply

    def look_up(
        self, names: Sequence[str], *, tails: Sequence[str] = (), num_shards: int | None = None
    ) -> wire.LookupReply:
        """Look up what all of this engine's groups need, on the shards that it holds, or on so many of each."""
        needs = [replace(need, num_shards=num_shards or need.num_shards) for need in self.needs]
        reply = self.scheduler.call(
            lambda number: wire.Lookup(number, digests(names), describe_needs(needs), digests(tails))
        )
        assert isinstance(reply, wire.LookupReply)
        return reply

    def num_found(self, names: Sequence[str]) -> int:
        """Return how many chunks can be served; nothing stays held."""
        found = self.look_up(names)
        self.scheduler.call(lambda number: wire.Release(number, found.lease))
        return found.num_chunks

    def load(self, row: int, lease: bytes, first: int, chunks: Chunks, *, tail_blocks: int = 0) -> list[bytes]:
        """Load chunks of a lease from ``first`` on, or its tail; return what their blocks hold then."""
        reply = self._wait(
            lambda number: wire.Retrieve(number, lease, first, packed(chunks), row=row, tail_blocks=tail_blocks)
        )
        assert isinstance(reply, wire.RetrieveReply), reply
        assert reply.failed == []
        return [self._map(row, blocks).read(self.arrays, blocks) for blocks in chunks]

    def clear(self) -> None:
        """Fill all memory with ``GUARD``."""
        for memory in self.memory:
            memory.bytes[:] = GUARD

    def is_untouched_but(self, row: int, chunks: Chunks) -> bool:
        """Say whether everything but a row's blocks is ``GUARD``; these are, too, when this returns."""
        self._blank(row, chunks)
        return all((array == GUARD).all() for array in self.arrays)

    def _blank(self, row: int, chunks: Chunks) -> None:
        for blocks in chunks:
            places = self._map(row, blocks)
            places.write(self.arrays, blocks, bytes([GUARD]) * places.nbytes)

    def _map(self, row: int, blocks: Sequence[int]) -> ChunkMap:
        if (row, len(blocks)) not in self._maps:
            self._maps[row, len(blocks)] = ChunkMap(self._laid[row], len(blocks))
        return self._maps[row, len(blocks)]

    def _wait(self, build: Build) -> wire.Reply | None:
        pending: Pending = self._requests.submit(build)
        wait_until(lambda: self._poll(pending), what=str(pending))
        return pending.reply

    def _poll(self, pending: Pending) -> bool:
        self._requests.poll(0.01)
        return pending.is_over

    def _registration(self, request_id: int) -> tuple[wire.Register, list[int]]:
        nbytes = [memory.nbytes for memory in self.memory]
        right = describe_rows(self.rows, nbytes, request_id, chunk_tokens=CHUNK_TOKENS)
        if not self._is_copying:
            return right, [memory.fd for memory in self.memory]
        return msgspec.structs.replace(right, memory=[wire.MemorySpec(ENGINE, size) for size in nbytes]), []


def two_groups(*, num_heads: int, is_wide: bool) -> tuple[list[LayerGroup], list[int]]:
    """Return a full group and one with a short window, and their memory; engines of one sort lay them out alike."""
    lay, block_tokens = (hnd, (8, 8)) if is_wide else (nhd, (4, 4))
    laid = [lay(Shape(2, 16, tokens, num_heads, ROW_NBYTES)) for tokens in block_tokens]
    num_full = len(laid[0].memory_nbytes)
    moved = tuple(replace(plane, memory=plane.memory + num_full) for plane in laid[1].group.planes)
    window = LayerGroup(GroupKind.WINDOW, block_tokens[1], moved, window=WINDOW_TOKENS)
    return [laid[0].group, window], [*laid[0].memory_nbytes, *laid[1].memory_nbytes]


def whole_chunk(name: str, group: int) -> np.ndarray:
    """Return what a chunk of all heads holds: ``[layer, kv, token, head, byte]``, stored tokens only."""
    tokens = WINDOW_TOKENS if group else CHUNK_TOKENS
    shape = (2, 2, tokens, NUM_HEADS, ROW_NBYTES)
    return np.frombuffer(stamp(f"{name}/{group}".encode(), int(np.prod(shape))), dtype=np.uint8).reshape(shape)


def part_of(name: str, row: Row) -> bytes:
    """Return what a chunk of one of two shards holds."""
    heads = slice(row.shard * NUM_HEADS // 2, (row.shard + 1) * NUM_HEADS // 2)
    return np.ascontiguousarray(whole_chunk(name, row.group)[:, :, :, heads]).tobytes()


def blocks_of(held: RowMemory, num_chunks: int, *, start: int = 0) -> Chunks:
    """Return blocks for chunks of a row, the same for all rows of a group."""
    numbers = itertools.count(start)
    return [list(itertools.islice(numbers, held.blocks_per_chunk)) for _ in range(num_chunks)]


def main() -> None:
    """Do as the module says."""
    path, shard = sys.argv[1], int(sys.argv[2])
    groups, memory_nbytes = two_groups(num_heads=NUM_HEADS // 2, is_wide=False)
    rows = [row_memory(Row(number, shard), group, CHUNK_TOKENS) for number, group in enumerate(groups)]
    with RowEngine(path, rows, memory_nbytes, engine_id=f"worker {shard}") as engine:
        for number, held in enumerate(rows):
            contents = [part_of(name, held.row) for name in WRITTEN]
            reply = engine.store(number, WRITTEN, blocks_of(held, len(WRITTEN)), contents)
            assert isinstance(reply, wire.StoreReply), reply
            assert reply.num_stored == len(WRITTEN)
        _say("stored")
        sys.stdin.readline()
        found = engine.look_up(READ, num_shards=2)
        num_right = 0
        for number, held in enumerate(rows):
            first = 0 if number == 0 else found.num_chunks - 1
            names = READ[first : found.num_chunks]
            loaded = engine.load(number, found.lease, first, blocks_of(held, len(names)))
            num_right += sum(part_of(name, held.row) == chunk for name, chunk in zip(names, loaded, strict=True))
        _say(str(num_right))


def _say(word: str) -> None:
    sys.stdout.write(f"{word}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
