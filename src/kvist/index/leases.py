"""Pins that outlive one request: granted by lookup, claimed by each shard's retrieve, dropped by any way out.

The law: a chunk is pinned for as long as a lease holds it or a copy reads it, and not a moment longer, in whatever
order leases are granted, claimed, landed, released, expired and their sessions closed. Every way out runs ``_drop``,
once; a lease that is let go while copies read from it drops with the last of them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NewType

from kvist.errors import ForeignLease, LeaseClaimed, UnknownLease
from kvist.index.chunk_index import Chunk, ChunkIndex

LeaseId = NewType("LeaseId", bytes)
SessionId = NewType("SessionId", int)

Row = tuple[int, int]
"""(group, shard)"""


@dataclass(slots=True, eq=False)
class Lease:
    """Pins on the first chunks of one prefix, on every group and shard. Only ``LeaseTable`` writes to it."""

    id: LeaseId
    session: SessionId
    engine_id: str
    rows: Mapping[Row, Sequence[Chunk]]
    deadline: float
    claims_left: set[int]
    num_reading: int = 0
    is_over: bool = field(default=False)


class LeaseTable:
    """Owns every lease. The daemon's loop is its only caller."""

    def __init__(self, index: ChunkIndex, *, ttl_s: float, new_id: Callable[[], bytes]) -> None:
        self._index = index
        self._ttl_s = ttl_s
        self._new_id = new_id
        self._leases: dict[LeaseId, Lease] = {}
        self._num_lingering = 0

    def __len__(self) -> int:
        """Return how many leases hold pins, those that only wait for their copies included."""
        return len(self._leases) + self._num_lingering

    def grant(self, rows: Mapping[Row, Sequence[Chunk]], *, session: SessionId, engine_id: str, now: float) -> Lease:
        """Pin the sealed chunks of ``rows`` until ``now + ttl_s``."""
        for chunks in rows.values():
            for chunk in chunks:
                self._index.pin(chunk)
        shards = {shard for _, shard in rows}
        lease = Lease(LeaseId(self._new_id()), session, engine_id, rows, now + self._ttl_s, shards)
        self._leases[lease.id] = lease
        return lease

    def find(self, lease_id: LeaseId, *, engine_id: str, shard: int) -> Lease:
        """Return a lease that ``shard`` of engine ``engine_id`` may claim.

        Raises:
            UnknownLease: expired, released, or never granted.
            ForeignLease: granted to another engine.
            LeaseClaimed: this shard has had its share, or has none.
        """
        lease = self._leases.get(lease_id)
        if lease is None:
            raise UnknownLease(f"lease {lease_id.hex()} has expired, was released, or was never granted")
        if lease.engine_id != engine_id:
            raise ForeignLease(f"lease {lease_id.hex()} belongs to engine {lease.engine_id!r}, not to {engine_id!r}")
        if shard not in lease.claims_left:
            raise LeaseClaimed(f"lease {lease_id.hex()}: shard {shard} has no claim left")
        return lease

    def claim(self, lease: Lease, *, shard: int) -> None:
        """Spend one shard's share of a found lease. ``land`` must follow when its copy is over."""
        lease.claims_left.remove(shard)
        lease.num_reading += 1

    def land(self, lease: Lease) -> None:
        """Note that a claimed copy is over. The last claim's landing ends the lease."""
        assert lease.num_reading > 0
        lease.num_reading -= 1
        if lease.is_over:
            self._num_lingering -= lease.num_reading == 0
            self._drop(lease)
        elif not lease.claims_left and lease.num_reading == 0:
            self.release(lease.id)

    def release(self, lease_id: LeaseId) -> bool:
        """End a lease; return whether there was one. Unknown ones are harmless."""
        lease = self._leases.pop(lease_id, None)
        if lease is None:
            return False
        lease.is_over = True
        self._num_lingering += lease.num_reading > 0
        self._drop(lease)
        return True

    def release_session(self, session: SessionId) -> int:
        """End every lease that ``session`` was granted; return how many."""
        return sum(self.release(lease.id) for lease in list(self._leases.values()) if lease.session == session)

    def expire(self, now: float) -> int:
        """End every lease whose deadline has passed; return how many."""
        late = []
        for lease in self._leases.values():  # Granted in order of their deadlines.
            if lease.deadline > now:
                break
            late.append(lease.id)
        return sum(self.release(lease_id) for lease_id in late)

    def _drop(self, lease: Lease) -> None:
        if lease.num_reading:
            return
        for chunks in lease.rows.values():
            for chunk in chunks:
                self._index.unpin(chunk)
