"""The seam between the pool and the stores behind it.

The laws: a tier holds a chunk whole or not at all, and what it hands out is what it was given or nothing. Its methods
return at once; what takes time ends with one call of ``on_done``, on any thread, whatever happens. A tier that cannot
go on turns itself off and says why: from then on it finds nothing and takes nothing, and serving goes on without it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

from kvist.model.keys import ChunkKey
from kvist.model.owners import NOBODY, IsOwner, Owner


@dataclass(frozen=True, slots=True)
class StoredChunk:
    """What a tier keeps of a chunk beside its bytes."""

    key: ChunkKey
    parent: ChunkKey | None
    """Of the chunk that this one is of no use without."""
    nbytes: int
    slot_nbytes: int
    """What the pool set aside for it: tails are kept in slots for whole chunks."""
    checksum: bytes
    """The device's own, with which the bytes are verified when an engine gets them."""
    owner: Owner = NOBODY


@dataclass(frozen=True, slots=True)
class TierStats:
    """One instant of a tier."""

    capacity_nbytes: int
    used_nbytes: int
    num_chunks: int
    read_rate: float
    """Bytes per second, measured; 0 as long as nothing was read."""
    write_rate: float
    num_queued_reads: int
    num_queued_writes: int
    off_reason: str
    """Why the tier is off; empty while it serves."""
    counters: dict[str, int]
    """By name, since the start: chunks and bytes read, written, evicted, and refused by reason."""


class Tier(Protocol):
    """A keyed store behind the pool. The daemon's loop is the only caller; all tests of it are one suite."""

    @property
    def name(self) -> str:
        """How people tell it from others, such as ``disk``."""
        ...

    def find(self, keys: Sequence[ChunkKey]) -> list[int | None]:
        """Return the bytes of the pool that each chunk wants (``slot_nbytes``); None where it is not held.

        From memory: no chunk is found whose bytes, or record, a crash could still take back or leave torn.
        """
        ...

    def owner(self, key: ChunkKey) -> Owner | None:
        """Return whose a chunk is that ``find`` has found; None if it is not held any more."""
        ...

    def touch(self, keys: Sequence[ChunkKey]) -> None:
        """Record one use of a whole prefix."""
        ...

    def fetch(self, key: ChunkKey, target: memoryview, on_done: Callable[[StoredChunk | None], None]) -> None:
        """Read a chunk into ``target``, which the caller leaves alone until then; None if it is not there as written.

        A chunk that proves damaged is dropped, with what builds on it. ``target`` has the bytes that ``find`` named and
        begins at a multiple of 4,096.
        """
        ...

    def offer(self, chunk: StoredChunk, source: memoryview, on_done: Callable[[bool], None]) -> bool:
        """Write a chunk from ``source``, which holds still until then; return whether it will be tried.

        No is said at once, and ``on_done`` is not called: the chunk is there already, its parent is not, the tier is
        off, or more than it can write in time is queued. ``on_done`` is told whether it can be found now.
        """
        ...

    def drop(self, keys: Sequence[ChunkKey]) -> None:
        """Forget chunks and all that build on them: their bytes are known to be wrong, or are not to be kept."""
        ...

    def purge(self, is_owner: IsOwner) -> Iterator[int]:
        """Drop what some owners have, with all that builds on it, a slice at each step; yield how many chunks it had.

        What is being read or written goes too: the read ends with None, the write with False. No step takes longer
        than what else the loop does at a time. Chunks that are offered meanwhile may stay.
        """
        ...

    def read_seconds(self, nbytes: int) -> float:
        """Return how long a read of so many bytes would take from now on, behind what is queued; 0 if not known."""
        ...

    def stats(self) -> TierStats:
        """Return current figures; cheap."""
        ...

    def close(self) -> None:
        """Finish what is being written, give up what is queued, keep the index, let go of everything. Idempotent."""
        ...
