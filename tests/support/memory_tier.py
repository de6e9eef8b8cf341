"""A tier in memory, which does nothing until the test says so."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from kvist.model.keys import ChunkKey
from kvist.model.owners import IsOwner, Owner
from kvist.storage.base import StoredChunk, TierStats


@dataclass
class MemoryTier:
    """A dictionary of bytes with the face of a ``Tier``; ``step`` carries out the oldest read or write."""

    name: str = "memory"
    is_manual: bool = True
    """Reads and writes wait for ``step``."""
    is_failing: bool = False
    """Reads find what they read damaged, writes do not succeed."""
    off_reason: str = ""
    writes_max: int = 1 << 30
    """Queued writes beyond which no more are taken."""
    read_rate: float = 0.0
    must_wait_for_parents: bool = False
    """A chunk is taken only when its parent can be found."""
    chunks: dict[ChunkKey, tuple[StoredChunk, bytes]] = field(default_factory=dict)
    used: list[ChunkKey] = field(default_factory=list)
    """Keys of all touches."""
    offered: list[ChunkKey] = field(default_factory=list)
    """Keys that were taken, in their order."""
    num_fetched: Counter[ChunkKey] = field(default_factory=Counter)
    purged: set[ChunkKey] = field(default_factory=set)
    """Keys of writes that will not succeed."""
    is_closed: bool = False
    reads: deque[tuple[ChunkKey, memoryview, Callable[[StoredChunk | None], None]]] = field(default_factory=deque)
    writes: deque[tuple[StoredChunk, memoryview, Callable[[bool], None]]] = field(default_factory=deque)

    @property
    def is_busy(self) -> bool:
        return bool(self.reads or self.writes)

    def find(self, keys: Sequence[ChunkKey]) -> list[int | None]:
        if self.off_reason:
            return [None] * len(keys)
        found = map(self.chunks.get, keys)
        return [chunk[0].slot_nbytes if chunk is not None else None for chunk in found]

    def owner(self, key: ChunkKey) -> Owner | None:
        kept = self.chunks.get(key)
        return kept[0].owner if kept is not None else None

    def touch(self, keys: Sequence[ChunkKey]) -> None:
        self.used += keys

    def fetch(self, key: ChunkKey, target: memoryview, on_done: Callable[[StoredChunk | None], None]) -> None:
        assert all(key != other for other, _, _ in self.reads), "two fetches of one chunk at a time"
        self.num_fetched[key] += 1
        self.reads.append((key, target, on_done))
        self._settle()

    def offer(self, chunk: StoredChunk, source: memoryview, on_done: Callable[[bool], None]) -> bool:
        assert len(source) == chunk.nbytes
        assert self.off_reason or chunk.key not in self.chunks, "offered what is there"
        coming = {chunk.key for chunk, _, _ in self.writes}
        above = self.chunks.keys() if self.must_wait_for_parents else self.chunks.keys() | coming
        if self.off_reason or len(self.writes) >= self.writes_max or chunk.key in coming:
            return False
        if chunk.parent is not None and chunk.parent not in above:
            return False
        self.offered.append(chunk.key)
        self.writes.append((chunk, source, on_done))
        self._settle()
        return True

    def drop(self, keys: Sequence[ChunkKey]) -> None:
        dropped = set(keys)
        for key in list(self.chunks):
            if key in dropped or self.chunks[key][0].parent in dropped:
                dropped.add(key)
        for key in dropped & self.chunks.keys():
            del self.chunks[key]
        if dropped - set(keys):
            self.drop(list(dropped))

    def purge(self, is_owner: IsOwner) -> Iterator[int]:
        """Drop some chunks, two at a step, and those that are being written."""
        self.purged |= {chunk.key for chunk, _, _ in self.writes if is_owner(chunk.owner)}
        while found := [key for key, (chunk, _) in self.chunks.items() if is_owner(chunk.owner)][:2]:
            before = len(self.chunks)
            self.drop(found)
            yield before - len(self.chunks)

    def read_seconds(self, nbytes: int) -> float:
        waiting = sum(len(target) for _, target, _ in self.reads)
        return (nbytes + waiting) / self.read_rate if self.read_rate else 0.0

    def stats(self) -> TierStats:
        used = sum(chunk.slot_nbytes for chunk, _ in self.chunks.values())
        return TierStats(
            1 << 40, used, len(self.chunks), self.read_rate, 0.0, len(self.reads), len(self.writes), self.off_reason, {}
        )

    def close(self) -> None:
        self.is_closed = True

    def step(self) -> None:
        """Carry out the oldest read, or the oldest write where there is no read."""
        if self.reads:
            key, target, on_done = self.reads.popleft()
            chunk, content = self.chunks.get(key, (None, b""))
            is_right = chunk is not None and not self.is_failing and not self.off_reason
            target[: len(content)] = content if is_right else bytes(len(content))
            if self.is_failing:
                self.drop([key])
            on_done(chunk if is_right else None)
        elif self.writes:
            chunk, source, on_done = self.writes.popleft()
            is_kept = not self.is_failing and not self.off_reason and chunk.key not in self.purged
            self.purged.discard(chunk.key)
            is_kept = is_kept and (chunk.parent is None or chunk.parent in self.chunks)
            if is_kept:
                self.chunks[chunk.key] = chunk, bytes(source)
            on_done(is_kept)

    def _settle(self) -> None:
        while self.is_busy and not self.is_manual:
            self.step()
