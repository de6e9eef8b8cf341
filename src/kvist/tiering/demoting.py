"""From the pool into one tier: what is worth writing, behind everything else.

The laws: a chunk is pinned while it is written, and only then; one whose turn has not come may be evicted, and is
passed over. Parents are written before their children. What the tier holds is not offered to it again; what it does not
take at once is dropped, for the next use to offer it again. A chunk that proves wrong while it is written is dropped
from the tier as well.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

from kvist.index.chunk_index import Chunk, ChunkIndex, ChunkState
from kvist.model.keys import ChunkKey
from kvist.model.owners import IsOwner
from kvist.storage.base import StoredChunk
from kvist.tiering.staging import Staging

QUEUE_MAX: Final = 1 << 16
"""Chunks that wait for their turn: they cost an entry each and hold nothing."""


@dataclass(slots=True, eq=False)
class _Write:
    chunk: Chunk
    children: list[Chunk] = field(default_factory=list)
    """Whose turn has come and who wait for this one."""


class Demoter:
    """Owns every write to one tier. The daemon's loop is its only caller."""

    def __init__(self, index: ChunkIndex, staging: Staging, tier: int, is_barred: IsOwner) -> None:
        """Write to one of the tiers, but nothing of owners that are barred when its turn comes."""
        self._index = index
        self._is_barred = is_barred
        self._staging = staging
        self._tier = staging.tiers[tier]
        self._queue: deque[Chunk] = deque()
        self._known: set[ChunkKey] = set()
        """Queued, waiting for their parents, or being written."""
        self._writes: dict[ChunkKey, _Write] = {}
        self._writing_nbytes = 0
        self.counters: Counter[str] = Counter()

    @property
    def num_writes(self) -> int:
        """Chunks that are queued or being written."""
        return len(self._known)

    def want(self, chunks: Sequence[Chunk]) -> None:
        """Write sealed chunks as soon as may be, behind those before them in their prefixes, unless they are there."""
        for chunk, held in zip(chunks, self._tier.find([chunk.key for chunk in chunks]), strict=True):
            if held is None and chunk.key not in self._known:
                self._enqueue(chunk)
        self.pump()

    def pump(self) -> None:
        """Offer what is queued, as far as staging is free."""
        while self._queue and self._staging.has_room(self._writing_nbytes, self._queue[0].nbytes):
            self._offer(self._queue.popleft())

    def give_up_queued(self) -> None:
        """Begin no further write."""
        for chunk in [*self._queue, *(child for write in self._writes.values() for child in write.children)]:
            self._pass_over(chunk, "demotions_dropped")
        self._queue.clear()
        for write in self._writes.values():
            write.children.clear()

    def check_invariants(self) -> None:
        """Assert the module's laws. For tests."""
        waiting = [child.key for write in self._writes.values() for child in write.children]
        keys = [*(chunk.key for chunk in self._queue), *waiting, *self._writes]
        assert len(keys) == len(set(keys))
        assert set(keys) == self._known
        assert all(write.chunk.pins > 0 for write in self._writes.values())
        assert self._writing_nbytes == sum(write.chunk.nbytes for write in self._writes.values())

    def _enqueue(self, chunk: Chunk) -> None:
        """Queue a chunk behind those of its ancestors that the tier does not have."""
        lineage, node = [chunk], chunk.parent
        while node is not None and node.key not in self._known and self._tier.find([node.key]) == [None]:
            lineage.append(node)
            node = node.parent
        for one in reversed(lineage):
            if len(self._known) >= QUEUE_MAX:
                self.counters["demotions_dropped"] += 1
                return
            self._known.add(one.key)
            self._queue.append(one)

    def _offer(self, chunk: Chunk) -> None:
        if chunk.state is not ChunkState.SEALED or self._is_barred(chunk.owner):
            self._pass_over(chunk, "demotions_passed_over")
            return
        parent = chunk.parent.key if chunk.parent is not None else None
        stored = StoredChunk(chunk.key, parent, chunk.nbytes, chunk.slot_nbytes, chunk.checksum, chunk.owner)
        write = self._writes[chunk.key] = _Write(chunk)
        self._index.pin(chunk)
        self._writing_nbytes += chunk.nbytes
        source = self._staging.view(chunk.slot_offset, chunk.nbytes)
        if self._tier.offer(stored, source, self._staging.on_loop(lambda is_kept: self._written(write, is_kept))):
            return
        self._let_go(write)
        before = self._writes.get(parent) if parent is not None else None
        if before is not None:
            before.children.append(chunk)
        else:
            self._pass_over(chunk, "demotions_refused")

    def _written(self, write: _Write, is_kept: bool) -> None:
        chunk = write.chunk
        is_wrong = chunk.state is ChunkState.DROPPED
        self._let_go(write)
        self._known.discard(chunk.key)
        if is_wrong:
            self._tier.drop([chunk.key])
        if is_kept and not is_wrong:
            self.counters["chunks_demoted"] += 1
            self.counters["bytes_demoted"] += chunk.nbytes
            self._queue.extendleft(reversed(write.children))
        else:
            self.counters["demotions_failed"] += 1
            for child in write.children:
                self._pass_over(child, "demotions_refused")
        self.pump()

    def _let_go(self, write: _Write) -> None:
        del self._writes[write.chunk.key]
        self._writing_nbytes -= write.chunk.nbytes
        self._index.unpin(write.chunk)

    def _pass_over(self, chunk: Chunk, counter: str) -> None:
        self._known.discard(chunk.key)
        self.counters[counter] += 1
