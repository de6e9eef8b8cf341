"""A pool holds nearly what its bytes would, whatever sizes of chunks come and go; beside it is one without extents."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass
from typing import Protocol

import pytest

from kvist.index.chunk_index import Chunk, ChunkIndex
from kvist.index.eviction import LeastRecentlyUsed
from kvist.model.keys import ChunkKey, Digest, chunk_keys
from kvist.storage.slots import SLOT_ALIGNMENT, SlotAllocator
from kvist.units import KIB, MIB, align_up


@dataclass(frozen=True)
class Engine:
    """What an engine stores of each conversation."""

    name: str
    full_nbytes: int
    """Of a chunk of its full group, of which it needs all."""
    last_nbytes: int = 0
    """Of a chunk of another group; 0 if there is none."""
    num_last: int = 0
    """How many of these, the last ones, it needs."""


SMALL = Engine("one size", 512 * KIB)
WINDOWS = Engine("full and windows", 1024 * KIB, 96 * KIB, 4)
STATES = Engine("full and states", 640 * KIB, 2300 * KIB, 1)
NUM_CONVERSATIONS = 400


class Slots(Protocol):
    def allocate(self, nbytes: int) -> int | None: ...

    def free(self, offset: int, nbytes: int) -> None: ...


class Bytes:
    """Gives room as long as there are bytes, wherever they lie: what no allocator can do better than."""

    def __init__(self, pool_nbytes: int) -> None:
        self._num_left = pool_nbytes
        self._next = 0

    def allocate(self, nbytes: int) -> int | None:
        slot_nbytes = align_up(nbytes, SLOT_ALIGNMENT)
        if slot_nbytes > self._num_left:
            return None
        self._num_left -= slot_nbytes
        self._next += SLOT_ALIGNMENT
        return self._next

    def free(self, offset: int, nbytes: int) -> None:
        self._num_left += align_up(nbytes, SLOT_ALIGNMENT)


class Cache:
    """An index over slots, to which conversations come back."""

    def __init__(self, slots: Slots) -> None:
        self._slots = slots
        self._index = ChunkIndex(LeastRecentlyUsed(), slots.free)
        self._held: dict[ChunkKey, Chunk] = {}

    def held(self) -> Counter[int]:
        """Return how many chunks there are of each size."""
        return Counter(chunk.nbytes for key, chunk in self._held.items() if self._index.get(key) is chunk)

    def serve(self, engine: Engine, conversation: int, num_chunks: int) -> int:
        """Look a conversation up and store what is missing; return how many chunks of its full group were there."""
        digests = [Digest(f"{engine.name[:6]}{conversation:05}{number:05}".encode()) for number in range(num_chunks)]
        keys = chunk_keys(digests, group=0, shard=0)
        found = self._index.match(keys)
        self._index.touch(found)
        parent = found[-1] if found else None
        for key in keys[len(found) :]:
            parent = self._store(key, parent, engine.full_nbytes)
        for key in chunk_keys(digests, group=1, shard=0)[num_chunks - engine.num_last :]:
            if (chunk := self._index.get(key)) is not None:
                self._index.touch([chunk])
            else:
                self._store(key, None, engine.last_nbytes)
        return len(found)

    def _store(self, key: ChunkKey, parent: Chunk | None, nbytes: int) -> Chunk:
        if parent is not None:
            self._index.pin(parent)
        while (offset := self._slots.allocate(nbytes)) is None:
            assert self._index.evict() is not None
        if parent is not None:
            self._index.unpin(parent)
        chunk = self._index.reserve(key, parent, offset, nbytes, align_up(nbytes, SLOT_ALIGNMENT))
        self._index.seal(chunk, b"")
        self._held[key] = chunk
        return chunk


def run(cache: Cache, engine: Engine, *, num_requests: int, seed: int) -> float:
    """Let conversations come, some much more often than others; return the part of their chunks that was found."""
    chance = random.Random(seed)
    lengths = [chance.randrange(4, 40) for _ in range(NUM_CONVERSATIONS)]
    num_found = num_asked = 0
    for _ in range(num_requests):
        conversation = min(int(chance.paretovariate(0.6)) - 1, NUM_CONVERSATIONS - 1)
        num_found += cache.serve(engine, conversation, lengths[conversation])
        num_asked += lengths[conversation]
    return num_found / num_asked


@pytest.mark.parametrize("pool_nbytes", [512 * MIB, 1024 * MIB], ids=["512 MiB", "1 GiB"])
def test_sizes_come_and_go(pool_nbytes: int):
    """An engine of one size, then others of two sizes each, and again the first find nearly what bytes alone would.

    Small chunks beside large ones cost a twentieth. Where each size needs a large part of an extent, a quarter of the
    pool may lie in extents of a size that is no longer asked for.
    """
    ours, ideal = Cache(SlotAllocator(pool_nbytes)), Cache(Bytes(pool_nbytes))
    lost = {SMALL: (0.01, 0.01), WINDOWS: (0.01, 0.05), STATES: (0.04, 0.25)}
    for seed, engine in enumerate((SMALL, WINDOWS, STATES, SMALL)):
        hits_lost, bytes_lost = lost[engine]
        found, best = (run(cache, engine, num_requests=1500, seed=seed) for cache in (ours, ideal))
        assert found > best - hits_lost, engine
        held, most = (sum(size * count for size, count in cache.held().items()) for cache in (ours, ideal))
        assert held > (1 - bytes_lost) * most, (engine, ours.held(), ideal.held())
