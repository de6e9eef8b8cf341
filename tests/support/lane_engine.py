"""An engine whose own threads copy: an ``EngineLane`` with a ``TwinDevice``, stamped memory, counted fences.

A scheduler's client of the same engine looks prefixes up.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Sequence

import msgspec
import numpy as np

from kvist.client.client import Client, Pending
from kvist.client.lane import EngineLane
from kvist.client.planning import Places
from kvist.client.pool import LaneMemory
from kvist.model.handles import ENGINE
from kvist.model.rows import Row, row_memory
from kvist.model.transfer import Direction
from kvist.wire import messages as wire
from tests.support.copier import NBYTES, digests
from tests.support.engine import NAMESPACE, SMALL, describe, packed
from tests.support.layouts import ChunkMap
from tests.support.memory import GUARD, stamp
from tests.support.twin import TwinDevice
from tests.support.waiting import wait_until

DEADLINE_S = 30.0
BLOCKS_PER_CHUNK = 2
ROWS = [row_memory(Row(0, 0), SMALL.group, NAMESPACE.chunk_tokens)]
Chunks = list[list[int]]


class CountedFences:
    """Marks that are numbers, in the order in which they were recorded."""

    def __init__(self) -> None:
        self.num_recorded = 0
        self.given_back: Counter[object] = Counter()

    def record(self) -> object:
        self.num_recorded += 1
        return self.num_recorded

    def give_back(self, fence: object) -> None:
        self.given_back[fence] += 1

    def check_all_back(self) -> None:
        """Wait until every fence is given back, and assert that none was twice."""
        wait_until(lambda: len(self.given_back) == self.num_recorded, what=str(self.given_back))
        assert self.given_back == Counter(range(1, self.num_recorded + 1))


class Gate:
    """Holds copies up until the test opens it."""

    def __init__(self) -> None:
        self.is_reached = threading.Event()
        self.may_pass = threading.Event()

    def __call__(self, _: Direction) -> None:
        self.is_reached.set()
        assert self.may_pass.wait(60)

    def wait_reached(self) -> None:
        assert self.is_reached.wait(20)

    def open(self) -> None:
        self.may_pass.set()


class LaneEngine:
    """Blocks are ``GUARD`` unless a request has them."""

    def __init__(
        self, path: str, *, deadline_s: float = DEADLINE_S, make_device: Callable[[int, int], TwinDevice] = TwinDevice
    ) -> None:
        self.memory = [np.full(nbytes, GUARD, dtype=np.uint8) for nbytes in SMALL.memory_nbytes]
        self.map = ChunkMap(SMALL, BLOCKS_PER_CHUNK)
        self.free_blocks = list(range(SMALL.group.num_blocks))
        self.fences = CountedFences()
        self.devices: list[TwinDevice] = []
        self.before_copy: Callable[[Direction], None] = lambda _: None
        self.scheduler = Client(path, engine_id="engine", name="scheduler", deadline_s=DEADLINE_S)
        self.client = Client(path, engine_id="engine", name="worker", deadline_s=deadline_s, registrar=self._register)
        """The lane's own: to look at only."""
        self._make_device = make_device
        memory = LaneMemory(ROWS, [array.ctypes.data for array in self.memory])
        self.lane = EngineLane(self.client, memory, self._new_device, self.fences)

    def __enter__(self) -> LaneEngine:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self.lane.close()
        self.scheduler.close()
        self.devices.clear()

    def take_chunks(self, num: int) -> Chunks:
        """Take blocks for ``num`` chunks."""
        return [[self.free_blocks.pop() for _ in range(BLOCKS_PER_CHUNK)] for _ in range(num)]

    def fill(self, chunks: Chunks, names: Sequence[str]) -> None:
        """Write what chunks of these names hold."""
        for blocks, name in zip(chunks, names, strict=True):
            self.map.write(self.memory, blocks, stamp(name.encode(), NBYTES))

    def read(self, chunks: Chunks) -> list[bytes]:
        return [self.map.read(self.memory, blocks) for blocks in chunks]

    def give_back(self, chunks: Chunks) -> None:
        """Fill blocks with ``GUARD`` and call them free."""
        for blocks in chunks:
            self.map.write(self.memory, blocks, bytes([GUARD]) * NBYTES)
            self.free_blocks[:0] = blocks

    def is_untouched(self) -> bool:
        """Say whether every byte is ``GUARD``."""
        return all((array == GUARD).all() for array in self.memory)

    def submit_store(self, names: Sequence[str]) -> tuple[Pending, Chunks]:
        """Write chunks into blocks, and ask for them to be kept."""
        chunks = self.take_chunks(len(names))
        self.fill(chunks, names)
        keys, block_ids = digests(names), packed(chunks)
        return self.lane.submit(lambda number: wire.Store(number, keys, b"", block_ids)), chunks

    def store(self, names: Sequence[str]) -> wire.Reply | None:
        """Have chunks kept; return the answer, or None if it was lost."""
        pending, chunks = self.submit_store(names)
        wait_over(pending)
        self.give_back(chunks)
        return pending.reply

    def look_up(self, names: Sequence[str]) -> wire.LookupReply:
        reply = self.scheduler.call(lambda number: wire.Lookup(number, digests(names), wants_places=True))
        assert isinstance(reply, wire.LookupReply)
        return reply

    def num_found(self, names: Sequence[str]) -> int:
        """Return how many chunks are there; nothing stays held."""
        found = self.look_up(names)
        self.scheduler.call(lambda number: wire.Release(number, found.lease))
        return found.num_chunks

    def wait_found(self, names: Sequence[str]) -> None:
        """Wait until chunks are there, of which the daemon hears a moment after the engine."""
        wait_until(lambda: self.num_found(names) == len(names))

    def submit_load(
        self, lease: bytes, num_chunks: int, *, num_skipped_blocks: int = 0, places: Places | None = None
    ) -> tuple[Pending, Chunks]:
        """Ask for the chunks of a lease; ahead of the order where their places are known."""
        chunks = self.take_chunks(num_chunks)
        block_ids = packed(chunks)

        def build(number: int) -> wire.Request:
            return wire.Retrieve(number, lease, 0, block_ids, num_skipped_blocks)

        return self.lane.submit(build) if places is None else self.lane.load(build, places), chunks

    def load(self, names: Sequence[str], *, is_ahead: bool = False) -> tuple[list[bytes], wire.Reply | None]:
        """Load chunks that are there into other blocks; return what these hold then, and the answer."""
        found = self.look_up(names)
        assert found.num_chunks == len(names)
        places = Places(found.places[0].slots, found.places[0].checksums) if is_ahead else None
        pending, chunks = self.submit_load(found.lease, len(names), places=places)
        wait_over(pending)
        held = self.read(chunks)
        self.give_back(chunks)
        return held, pending.reply

    def check_works(self, names: Sequence[str]) -> None:
        """Assert that chunks are kept and come back."""
        assert self.store(names) == wire.StoreReply(0, len(names), 0)
        self.wait_found(names)
        held, reply = self.load(names)
        assert held == [stamp(name.encode(), NBYTES) for name in names]
        assert reply == wire.RetrieveReply(0, len(names), [])

    def _new_device(self, fd: int, nbytes: int) -> TwinDevice:
        device = self._make_device(fd, nbytes)
        device.before_copy = lambda direction: self.before_copy(direction)
        self.devices.append(device)
        return device

    def _register(self, request_id: int) -> tuple[wire.Register, list[int]]:
        right = describe(SMALL, request_id, chunk_tokens=NAMESPACE.chunk_tokens)
        memory = [wire.MemorySpec(ENGINE, nbytes) for nbytes in SMALL.memory_nbytes]
        return msgspec.structs.replace(right, memory=memory), []


def wait_over(*pending: Pending) -> None:
    """Wait until requests are over."""
    wait_until(lambda: all(one.is_over for one in pending), what=str(pending))
