"""A chunk in the pool, and whose it is: what the index, its queues and its counts refer to.

The law: only ``ChunkIndex`` and ``Tenants`` write to these.
"""

from __future__ import annotations

import enum
from collections.abc import Iterator

from kvist.model.keys import ChunkKey
from kvist.model.owners import Owner


class ChunkState(enum.Enum):
    """``RESERVED`` bytes are being written; ``SEALED`` bytes never change; a ``DROPPED`` chunk is out of the index."""

    RESERVED = "reserved"
    SEALED = "sealed"
    DROPPED = "dropped"


class Chunk:
    """One chunk and its place in the forest. Only ``ChunkIndex`` writes to it."""

    __slots__ = (
        "account", "checksum", "first_child", "is_queued", "key", "last_used", "nbytes", "next_sibling", "num_hits",
        "parent", "pins", "previous_sibling", "slot_nbytes", "slot_offset", "state",
    )  # fmt: skip

    def __init__(
        self, key: ChunkKey, parent: Chunk | None, slot_offset: int, nbytes: int, slot_nbytes: int, account: Account
    ) -> None:
        self.key = key
        self.account = account
        self.slot_offset = slot_offset
        self.nbytes = nbytes
        self.slot_nbytes = slot_nbytes
        self.state = ChunkState.RESERVED
        self.checksum = b""
        self.pins = 0
        self.last_used = 0
        self.num_hits = 0
        self.is_queued = False
        self.parent = parent
        self.first_child: Chunk | None = None
        self.next_sibling: Chunk | None = None
        self.previous_sibling: Chunk | None = None

    @property
    def owner(self) -> Owner:
        return self.account.owner

    def children(self) -> Iterator[Chunk]:
        child = self.first_child
        while child is not None:
            following = child.next_sibling
            yield child
            child = following


class Tenant:
    """One tenant's part of the pool. ``Tenants`` counts, ``ChunkIndex`` keeps the queue."""

    __slots__ = ("name", "nbytes", "num_chunks", "num_evicted", "queue", "quota_nbytes")

    def __init__(self, name: str, quota_nbytes: int | None) -> None:
        self.name = name
        self.quota_nbytes = quota_nbytes
        self.nbytes = 0
        """Of its slots."""
        self.num_chunks = 0
        self.num_evicted = 0
        """Since it last had nothing."""
        self.queue: list[tuple[int, int, Chunk]] = []
        """Its leaves by rank, and some that are none any more."""


class Account:
    """One owner's chunks: what each of them refers to. Gone with the last."""

    __slots__ = ("num_chunks", "owner", "tenant")

    def __init__(self, owner: Owner, tenant: Tenant) -> None:
        self.owner = owner
        self.tenant = tenant
        self.num_chunks = 0
