"""Pins that outlive one request: granted by lookup, claimed by each row's retrieve, dropped by any way out.

The law: a chunk is pinned for as long as a lease holds it or a copy reads it, and not a moment longer, in whatever
order leases are granted, claimed, landed, released, expired and their sessions closed. Every way out runs ``_drop``,
once; a lease that is let go while copies read from it drops with the last of them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, NewType

from kvist.errors import ForeignLease, LeaseClaimed, UnknownLease
from kvist.index.chunk_index import Chunk, ChunkIndex
from kvist.model.rows import Row

LeaseId = NewType("LeaseId", bytes)
SessionId = NewType("SessionId", int)


class Held(NamedTuple):
    """What a lease holds of one row: the chunks that its group needs, by their place in the prefix."""

    first_chunk: int
    chunks: Sequence[Chunk]
    num_readers: int = 1
    """Workers that will read the row."""
    has_tail: bool = False
    """The last chunk is a tail, which its readers claim apart from the others."""

    @property
    def end(self) -> int:
        """Number of the chunk behind the last."""
        return self.first_chunk + len(self.chunks)

    @property
    def num_claims(self) -> int:
        """How often the row will be claimed: by each reader once for its whole chunks, and once for its tail."""
        has_whole = len(self.chunks) - self.has_tail > 0
        return self.num_readers * (has_whole + self.has_tail)


@dataclass(slots=True, eq=False)
class Lease:
    """Pins on what one prefix needs of every row. Only ``LeaseTable`` writes to it."""

    id: LeaseId
    session: SessionId
    engine_id: str
    rows: Mapping[Row, Held]
    deadline: float
    claims_left: dict[Row, int]
    """How many claims on each row are still to come, none of which is 0."""
    chunk_s: float
    """What computing one chunk would take the engine; 0 if that is not known."""
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

    def grant(
        self, rows: Mapping[Row, Held], *, session: SessionId, engine_id: str, now: float, chunk_s: float = 0.0
    ) -> Lease:
        """Pin the sealed chunks of ``rows`` until ``now + ttl_s``, or until each row was read by all of its readers.

        A row that holds nothing has nothing to claim. Computing one chunk would take whoever asks ``chunk_s``; 0 if
        that is not known.
        """
        for held in rows.values():
            for chunk in held.chunks:
                self._index.pin(chunk)
        claims = {row: held.num_claims for row, held in rows.items() if held.chunks}
        lease = Lease(LeaseId(self._new_id()), session, engine_id, rows, now + self._ttl_s, claims, chunk_s)
        self._leases[lease.id] = lease
        return lease

    def find(self, lease_id: LeaseId, *, engine_id: str, row: Row) -> Lease:
        """Return a lease of which a worker of engine ``engine_id`` may claim ``row``.

        Raises:
            UnknownLease: expired, released, or never granted.
            ForeignLease: granted to another engine.
            LeaseClaimed: this row was read by all who may, or the lease holds nothing of it.
        """
        lease = self._leases.get(lease_id)
        if lease is None:
            raise UnknownLease(f"lease {lease_id.hex()} has expired, was released, or was never granted")
        if lease.engine_id != engine_id:
            raise ForeignLease(f"lease {lease_id.hex()} belongs to engine {lease.engine_id!r}, not to {engine_id!r}")
        if row not in lease.claims_left:
            raise LeaseClaimed(f"lease {lease_id.hex()}: {row} has no claim left")
        return lease

    def claim(self, lease: Lease, *, row: Row) -> None:
        """Spend one claim on a row of a found lease. ``land`` must follow when its copy is over."""
        lease.claims_left[row] -= 1
        if not lease.claims_left[row]:
            del lease.claims_left[row]
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
        for held in lease.rows.values():
            for chunk in held.chunks:
                self._index.unpin(chunk)
