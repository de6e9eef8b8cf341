"""What people and their tools ask a daemon, and what it says. The laws are those of ``wire.messages``.

None of these changes what is cached, or for how long: a look takes no lease, counts as no use, and reads no tier.
"""

from __future__ import annotations

import msgspec

from kvist.wire.specs import NamespaceSpec, NeedSpec


class Status(msgspec.Struct, frozen=True, tag="status"):
    """Ask for the daemon's counters."""

    id: int


class Describe(msgspec.Struct, frozen=True, tag="describe"):
    """Ask who is connected, and with which model and memory."""

    id: int


class Find(msgspec.Struct, frozen=True, tag="find"):
    """Ask where the chunks of a prefix are."""

    id: int
    digests: bytes
    needs: tuple[NeedSpec, ...] = (NeedSpec("full"),)
    """Of each layer group, by its number."""


class Purge(msgspec.Struct, frozen=True, tag="purge"):
    """Drop what a tenant has, what is of a model, what is both, or everything, in the pool and in all tiers."""

    id: int
    tenant: str | None = None
    """None is any, ``""`` those who have named none."""
    model: str | None = None


class PurgeReply(msgspec.Struct, frozen=True, tag="purge_reply"):
    """What was dropped can not be found any more."""

    id: int
    num_chunks: int
    """Dropped from the pool."""
    nbytes: int
    """That they have taken of it."""
    num_kept: int
    """Pinned, being written, or above such: they stay, and another purge takes them when they are let go."""
    tiers: dict[str, int] = {}
    """Chunks dropped from each tier, by its name."""


class HistogramStatus(msgspec.Struct, frozen=True):
    """How long something took, since the start."""

    bounds_s: list[float]
    """Upper ends of all buckets but the last, which has none."""
    counts: list[int]
    """Of each bucket alone; one more than there are bounds."""
    sum_s: float


class TierStatus(msgspec.Struct, frozen=True):
    """``storage.base.TierStats`` on the wire."""

    name: str
    capacity_nbytes: int
    used_nbytes: int
    num_chunks: int
    read_rate: float
    """Bytes per second, measured; 0 as long as nothing was read."""
    write_rate: float
    num_queued_reads: int
    num_queued_writes: int
    off_reason: str = ""
    """Why the tier is off; empty while it serves."""
    counters: dict[str, int] = {}


class TenantStatus(msgspec.Struct, frozen=True):
    """What a tenant has in the pool."""

    name: str
    """``*`` for all that have no line of their own."""
    nbytes: int
    """That its slots take of the pool."""
    num_chunks: int
    quota_nbytes: int
    """0 if it has none."""
    num_evicted: int
    """Since it last had nothing."""


class StatusReply(msgspec.Struct, frozen=True, tag="status_reply"):
    """Counters and gauges of one instant. Bytes and counts."""

    id: int
    pid: int
    boot_id: str
    is_draining: bool
    pool_nbytes: int
    pool_used_nbytes: int
    num_sealed: int
    num_reserved: int
    num_pinned: int
    num_leases: int
    num_sessions: int
    num_registered: int
    num_copies_in_flight: int
    counters: dict[str, int] = {}
    tiers: list[TierStatus] = []
    """Behind the pool, the fastest first."""
    tenants: list[TenantStatus] = []
    """Those that have something in the pool, the largest first: at most 64, and one line for all others."""
    version: str = ""
    """Of the daemon."""
    uptime_s: float = 0.0
    lane_rates: dict[str, float] = {}
    """What was measured at the start, bytes per second: ``populate`` for making the pool present, ``memcpy``."""
    histograms: dict[str, HistogramStatus] = {}
    """``lookup``, from its frame to its reply; ``load`` and ``store``, from the request to the landing; ``promotion``,
    of each chunk that has come from a tier, from its first lookup."""


class SessionRow(msgspec.Struct, frozen=True):
    """A row that a session has registered."""

    group: int
    shard: int
    kind: str
    block_tokens: int
    window: int | None
    num_planes: int
    num_blocks: int
    chunk_nbytes: int


class SessionStatus(msgspec.Struct, frozen=True):
    """One connected process."""

    id: int
    pid: int
    uid: int
    engine_id: str
    name: str
    connected_s: float
    """For how long."""
    serves: NamespaceSpec | None
    """What its keys begin with; None for processes that are no engine's."""
    needs: tuple[NeedSpec, ...]
    facts: dict[str, str]
    """What it says of itself, for people."""
    lane: str
    """Who copies: ``daemon`` or ``engine``; empty as long as no memory is registered."""
    memory: str
    """On which device, such as ``host`` or ``cuda:GPU-...``."""
    rows: list[SessionRow]
    texts: list[str]
    """Its layer groups, for people: axes, shapes, bytes of a token and of a chunk."""
    num_copies_in_flight: int
    counters: dict[str, int]
    """``lookups``, ``chunks_asked``, ``chunks_found``, ``chunks_stored``, ``chunks_loaded`` of this session."""


class Description(msgspec.Struct, frozen=True, tag="description"):
    """Who is connected."""

    id: int
    sessions: list[SessionStatus]


class FoundRow(msgspec.Struct, frozen=True):
    """Where the chunks of one row are."""

    group: int
    shard: int
    places: bytes
    """One byte a chunk: 0 nowhere, 1 in the pool, 2 in the first tier behind it, and so on."""


class Found(msgspec.Struct, frozen=True, tag="found"):
    """Where the chunks of a prefix are."""

    id: int
    num_chunks: int
    """Of the prefix that the pool can serve now."""
    num_with_tiers: int
    """Of the prefix that pool and tiers can serve together."""
    tiers: list[str]
    rows: list[FoundRow]
