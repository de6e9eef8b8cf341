"""The least that keeps the contract of a tier: a dictionary, done at once."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from kvist.model.keys import ChunkKey
from kvist.model.owners import IsOwner, Owner
from kvist.storage.base import StoredChunk, TierStats


class DictTier:
    """A ``Tier`` of so many bytes of slots, in the order of their use, the oldest first."""

    def __init__(self, nbytes: int) -> None:
        self._nbytes = nbytes
        self._chunks: dict[ChunkKey, tuple[StoredChunk, bytes]] = {}
        self._is_closed = False

    @property
    def name(self) -> str:
        return "dict"

    @property
    def used_nbytes(self) -> int:
        return sum(chunk.slot_nbytes for chunk, _ in self._chunks.values())

    def find(self, keys: Sequence[ChunkKey]) -> list[int | None]:
        found = map(self._chunks.get, keys)
        return [kept[0].slot_nbytes if kept is not None and not self._is_closed else None for kept in found]

    def owner(self, key: ChunkKey) -> Owner | None:
        kept = self._chunks.get(key)
        return kept[0].owner if kept is not None else None

    def touch(self, keys: Sequence[ChunkKey]) -> None:
        for key in reversed(keys):
            if key in self._chunks:
                self._chunks[key] = self._chunks.pop(key)

    def fetch(self, key: ChunkKey, target: memoryview, on_done: Callable[[StoredChunk | None], None]) -> None:
        kept = self._chunks.get(key)
        if kept is not None and not self._is_closed:
            target[: len(kept[1])] = kept[1]
        on_done(kept[0] if kept is not None and not self._is_closed else None)

    def offer(self, chunk: StoredChunk, source: memoryview, on_done: Callable[[bool], None]) -> bool:
        has_parent = chunk.parent is None or chunk.parent in self._chunks
        if self._is_closed or chunk.key in self._chunks or not has_parent or chunk.slot_nbytes > self._nbytes:
            return False
        self._chunks[chunk.key] = chunk, bytes(source[: chunk.nbytes])
        while self.used_nbytes > self._nbytes:
            parents = {kept.parent for kept, _ in self._chunks.values()}
            leaves = (key for key in self._chunks if key not in parents and key != chunk.key)
            victim = next(leaves, chunk.key)
            del self._chunks[victim]
        on_done(chunk.key in self._chunks)
        return True

    def drop(self, keys: Sequence[ChunkKey]) -> None:
        gone = set(keys)
        while below := {key for key, (chunk, _) in self._chunks.items() if chunk.parent in gone} - gone:
            gone |= below
        for key in gone & self._chunks.keys():
            del self._chunks[key]

    def purge(self, is_owner: IsOwner) -> Iterator[int]:
        before = len(self._chunks)
        self.drop([key for key, (chunk, _) in self._chunks.items() if is_owner(chunk.owner)])
        yield before - len(self._chunks)

    def read_seconds(self, nbytes: int) -> float:
        return 0.0

    def stats(self) -> TierStats:
        return TierStats(self._nbytes, self.used_nbytes, len(self._chunks), 0.0, 0.0, 0, 0, "", {})

    def close(self) -> None:
        self._is_closed = True
