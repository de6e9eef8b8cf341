"""The catalogue of chunks in the pool, as a forest of prefixes.

The laws, held by ``check_invariants`` after every step of a simulation:

* A chunk is absent, reserved (being written) or sealed (readable, immutable). Only ``seal`` publishes.
* The index is closed under prefixes: a chunk's parent is in the index for as long as the chunk is. Evictions take
  leaves; when a chunk must go at once, everything below it goes too. A chunk that is of use without those before it has
  no parent.
* An eviction takes a leaf of the tenant that uses most of its share (``tenants.py``), and of its leaves the one that
  the policy ranks lowest. No tenant has more than its quota, if its callers ``make_room`` before they reserve.
* A slot returns to the pool exactly once, and never while its chunk is reserved or pinned. A chunk that was dropped
  under a pin is *doomed*: out of the catalogue, its slot freed with the last pin.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

from kvist.index.chunk import Chunk as Chunk
from kvist.index.chunk import ChunkState as ChunkState
from kvist.index.chunk import Tenant
from kvist.index.eviction import EvictionPolicy
from kvist.index.tenants import Tenants
from kvist.model.keys import ChunkKey
from kvist.model.owners import NOBODY, IsOwner, Owner, Quotas

_PURGED_AT_ONCE = 256
"""Chunks that one step of a purge looks at: well below a millisecond."""


@dataclass(frozen=True, slots=True)
class IndexStats:
    """Counts at one instant."""

    num_reserved: int
    num_sealed: int
    num_pinned: int
    num_doomed: int
    """Dropped while pinned or being written: their slots are still taken."""
    num_evicted: int
    """Since the start."""


@dataclass(slots=True)
class Purged:
    """One step of a purge."""

    num_dropped: int = 0
    nbytes: int = 0
    """That these have taken of the pool."""
    num_kept: int = 0


class ChunkIndex:
    """Maps keys to slots, and decides what may be evicted. The daemon's loop is its only caller."""

    def __init__(
        self, policy: EvictionPolicy, free_slot: Callable[[int, int], None], tenants: Tenants | None = None
    ) -> None:
        """Begin empty; ``free_slot(slot_offset, slot_nbytes)`` takes slots back. Without tenants nobody has a quota."""
        self._policy = policy
        self._free_slot = free_slot
        self.tenants = tenants or Tenants(Quotas(), 1)
        self._chunks: dict[ChunkKey, Chunk] = {}
        self._clock = 0
        self._sequence = 0
        self._num_reserved = 0
        self._num_pinned = 0
        self._num_doomed = 0
        self._num_evicted = 0

    def get(self, key: ChunkKey) -> Chunk | None:
        """Return the chunk of ``key``, reserved or sealed."""
        return self._chunks.get(key)

    def match(self, keys: Sequence[ChunkKey]) -> list[Chunk]:
        """Return the chunks of the longest prefix of ``keys`` that is sealed."""
        chunks = self._chunks
        found = []
        for key in keys:
            chunk = chunks.get(key)
            if chunk is None or chunk.state is not ChunkState.SEALED:
                break
            found.append(chunk)
        return found

    def find_sealed(self, keys: Sequence[ChunkKey]) -> list[Chunk | None]:
        """Return the sealed chunk of each key, None where there is none."""
        found = map(self._chunks.get, keys)
        return [chunk if chunk is not None and chunk.state is ChunkState.SEALED else None for chunk in found]

    def touch(self, chunks: Iterable[Chunk]) -> None:
        """Record one use of a whole prefix."""
        self._clock += 1
        for chunk in chunks:
            chunk.last_used = self._clock
            chunk.num_hits += 1

    def reserve(
        self, key: ChunkKey, parent: Chunk | None, slot_offset: int, nbytes: int, slot_nbytes: int | None = None,
        *, owner: Owner = NOBODY,
    ) -> Chunk:  # fmt: skip
        """Announce that ``key`` is being written into a slot; it hangs below ``parent`` from now on.

        The slot is as large as the chunk, unless ``slot_nbytes`` says more; it counts as its owner's.
        """
        slot_nbytes = nbytes if slot_nbytes is None else slot_nbytes
        assert nbytes <= slot_nbytes
        assert key not in self._chunks
        assert parent is None or parent.state is not ChunkState.DROPPED
        chunk = Chunk(key, parent, slot_offset, nbytes, slot_nbytes, self.tenants.enter(owner, slot_nbytes))
        self._clock += 1
        chunk.last_used = self._clock
        self._chunks[key] = chunk
        self._num_reserved += 1
        if parent is not None:
            chunk.next_sibling = parent.first_child
            if parent.first_child is not None:
                parent.first_child.previous_sibling = chunk
            parent.first_child = chunk
        return chunk

    def seal(self, chunk: Chunk, checksum: bytes, nbytes: int | None = None) -> bool:
        """Publish a chunk whose bytes have landed; return whether it was still wanted.

        It has as many as were reserved for it, unless ``nbytes`` says that it has fewer.
        """
        if chunk.state is ChunkState.DROPPED:
            self._settle(chunk)
            return False
        assert chunk.state is ChunkState.RESERVED
        self._num_reserved -= 1
        chunk.state = ChunkState.SEALED
        chunk.checksum = checksum
        chunk.nbytes = chunk.nbytes if nbytes is None else nbytes
        assert 0 < chunk.nbytes <= chunk.slot_nbytes
        self._offer(chunk)
        return True

    def abort(self, chunk: Chunk) -> None:
        """Undo a reservation whose copy is over; what was reserved below it is dropped with it."""
        if chunk.state is ChunkState.DROPPED:
            self._settle(chunk)
            return
        assert chunk.state is ChunkState.RESERVED
        for child in list(chunk.children()):
            self.drop(child)
        self._num_reserved -= 1
        parent = chunk.parent
        self._remove(chunk)
        self._free(chunk)
        self._offer(parent)

    def pin(self, chunk: Chunk) -> None:
        """Hold a sealed chunk against eviction and re-use of its slot."""
        assert chunk.state is ChunkState.SEALED
        chunk.pins += 1
        self._num_pinned += chunk.pins == 1

    def unpin(self, chunk: Chunk) -> None:
        """Undo one ``pin``."""
        assert chunk.pins > 0
        chunk.pins -= 1
        if chunk.pins:
            return
        self._num_pinned -= 1
        if chunk.state is ChunkState.DROPPED:
            self._settle(chunk)
        else:
            self._offer(chunk)

    def drop(self, chunk: Chunk) -> None:
        """Take a chunk and everything below it out of the catalogue; held slots are freed with their last hold."""
        if chunk.state is ChunkState.DROPPED:
            return
        parent = chunk.parent
        below = [chunk]
        for node in below:
            below.extend(node.children())
        for node in reversed(below):
            is_reserved = node.state is ChunkState.RESERVED
            is_held = node.pins > 0 or is_reserved
            self._num_reserved -= is_reserved
            self._remove(node)
            if is_held:
                self._num_doomed += 1
            else:
                self._free(node)
        self._offer(parent)

    def evict(self) -> int | None:
        """Free the slot of an unpinned leaf; return its bytes, None if there is none."""
        tenant = self.tenants.choose(self._first_rank)
        return self._evict_of(tenant) if tenant is not None else None

    def make_room(self, tenant: str, nbytes: int) -> bool:
        """Evict a tenant's own leaves until its quota has room for so many bytes more; return whether it has.

        What could never have room evicts nothing.
        """
        if not self.tenants.could_have_room(tenant, nbytes):
            return False
        while not self.tenants.has_room(tenant, nbytes):
            found = self.tenants.get(tenant)
            if found is None or self._first_rank(found) is None:
                return False
            self._evict_of(found)
        return True

    def purge(self, is_owner: IsOwner) -> Iterator[Purged]:
        """Drop what some owners have, a slice at each step, but not what is pinned, being written, or above such.

        Chunks that are stored while it runs stay.
        """
        keys = list(self._chunks)  # In the order of their coming, so that children are behind their parents.
        while keys:
            purged = Purged()
            for key in reversed(keys[-_PURGED_AT_ONCE:]):
                chunk = self._chunks.get(key)
                if chunk is None or not is_owner(chunk.owner):
                    continue
                if self._is_evictable(chunk):
                    self.drop(chunk)
                    purged.num_dropped += 1
                    purged.nbytes += self.tenants.taken_nbytes(chunk.slot_nbytes)
                else:
                    purged.num_kept += 1
            del keys[-_PURGED_AT_ONCE:]
            yield purged

    def stats(self) -> IndexStats:
        """Return current counts; cheap."""
        return IndexStats(
            num_reserved=self._num_reserved,
            num_sealed=len(self._chunks) - self._num_reserved,
            num_pinned=self._num_pinned,
            num_doomed=self._num_doomed,
            num_evicted=self._num_evicted,
        )

    def check_invariants(self) -> None:
        """Assert the module's laws over the whole index. Costs a walk; for tests."""
        for key, chunk in self._chunks.items():
            assert chunk.key == key
            assert chunk.state in (ChunkState.RESERVED, ChunkState.SEALED)
            assert chunk.state is ChunkState.SEALED or chunk.pins == 0
            if chunk.parent is not None:
                assert self._chunks.get(chunk.parent.key) is chunk.parent, "a chunk outlived its parent"
                assert any(child is chunk for child in chunk.parent.children())
            for child in chunk.children():
                assert child.parent is chunk
                assert self._chunks.get(child.key) is child
            if self._is_evictable(chunk):
                assert chunk.is_queued, "an evictable chunk nobody will ever evict"
        assert self._num_reserved == sum(c.state is ChunkState.RESERVED for c in self._chunks.values())
        num_pinned = sum(chunk.pins > 0 for chunk in self._chunks.values())
        assert num_pinned <= self._num_pinned <= num_pinned + self._num_doomed
        queued = [chunk for tenant in self.tenants for _, _, chunk in tenant.queue]
        assert len(queued) == len({id(chunk) for chunk in queued})
        self.tenants.check_invariants((chunk.account, chunk.slot_nbytes) for chunk in self._chunks.values())

    def _settle(self, chunk: Chunk) -> None:
        self._num_doomed -= 1
        self._free(chunk)

    def _free(self, chunk: Chunk) -> None:
        self.tenants.leave(chunk.account, chunk.slot_nbytes)
        self._free_slot(chunk.slot_offset, chunk.slot_nbytes)

    def _remove(self, chunk: Chunk) -> None:
        """Unlink a chunk that has no children left."""
        assert chunk.first_child is None
        del self._chunks[chunk.key]
        chunk.state = ChunkState.DROPPED
        if chunk.previous_sibling is not None:
            chunk.previous_sibling.next_sibling = chunk.next_sibling
        elif chunk.parent is not None:
            chunk.parent.first_child = chunk.next_sibling
        if chunk.next_sibling is not None:
            chunk.next_sibling.previous_sibling = chunk.previous_sibling
        chunk.parent = chunk.next_sibling = chunk.previous_sibling = None

    def _is_evictable(self, chunk: Chunk) -> bool:
        return chunk.state is ChunkState.SEALED and chunk.pins == 0 and chunk.first_child is None

    def _rank(self, chunk: Chunk) -> int:
        return self._policy.rank(last_used=chunk.last_used, num_hits=chunk.num_hits)

    def _offer(self, chunk: Chunk | None) -> None:
        if chunk is not None and not chunk.is_queued and self._is_evictable(chunk):
            self._enqueue(chunk)
            self.tenants.note(chunk.account.tenant)

    def _enqueue(self, chunk: Chunk) -> None:
        chunk.is_queued = True
        self._sequence += 1
        heapq.heappush(chunk.account.tenant.queue, (self._rank(chunk), self._sequence, chunk))

    def _first_rank(self, tenant: Tenant) -> int | None:
        """Return the rank of the leaf that a tenant would give up, which is then the first of its queue."""
        while tenant.queue:
            rank, _, chunk = tenant.queue[0]
            if self._is_evictable(chunk) and self._rank(chunk) == rank:
                return rank
            heapq.heappop(tenant.queue)
            chunk.is_queued = False
            if self._is_evictable(chunk):
                self._enqueue(chunk)
        return None

    def _evict_of(self, tenant: Tenant) -> int:
        """Evict the first of a tenant's queue, which may go."""
        _, _, chunk = heapq.heappop(tenant.queue)
        chunk.is_queued = False
        parent = chunk.parent
        self._remove(chunk)
        self._num_evicted += 1
        tenant.num_evicted += 1
        self._free(chunk)
        self._offer(parent)
        return chunk.slot_nbytes
