"""Every message, as a frozen struct.

The law: a field is never changed or reused; new ones come last, with a default, and a reader passes over those that it
does not know; only a registration is understood whole or refused, since each of its fields says where bytes lie.
Digests travel packed, 16 bytes each, block ids as packed little-endian int32. Whatever a peer sends is decoded against
these types and nothing else.
"""

from __future__ import annotations

from typing import Final

import msgspec

from kvist.model.transfer import BLOCKS_MAX as BLOCKS_MAX
from kvist.model.transfer import CHUNKS_MAX as CHUNKS_MAX

PROTOCOL_VERSION: Final = 1
MAGIC: Final = "kvist"
PLANES_MAX: Final = 1 << 14
NAME_CHARS_MAX: Final = 256


class NamespaceSpec(msgspec.Struct, frozen=True):
    """``model.keys.Namespace`` on the wire."""

    model: str
    revision: str
    dtype: str
    layout: str
    shards: str
    chunk_tokens: int
    weights: str


class Hello(msgspec.Struct, frozen=True, tag="hello"):
    """The first message of a connection."""

    id: int
    magic: str
    version: int
    engine_id: str
    """Equal for all processes of one engine: leases belong to it."""
    name: str = ""
    """For people: what this process is."""
    serves: NamespaceSpec | None = None
    """Whose KV this process stores and loads, where it does so."""


class PlaneSpec(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """``model.layout.LayerPlane`` on the wire."""

    memory: int
    offset: int
    num_blocks: int
    block_stride: int
    row_nbytes: int
    num_kv: int = 1
    kv_stride: int = 0
    num_tokens: int = 1
    token_stride: int = 0
    num_heads: int = 1
    head_stride: int = 0


class GroupSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A row that a worker holds, ``model.rows.RowMemory``, on the wire."""

    kind: str
    block_tokens: int
    planes: list[PlaneSpec]
    null_block: int | None = None
    window: int | None = None
    """Tokens, for kinds that have a window."""
    group: int = 0
    """Number of the layer group, which all workers of all engines that share chunks give it."""
    shard: int = 0


class MemorySpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """``model.handles.MemoryHandle`` on the wire; each owns the next ``num_fds`` file descriptors of its session."""

    kind: str
    nbytes: int
    device: str = ""
    payload: bytes = b""
    part_nbytes: list[int] = []


class Register(msgspec.Struct, frozen=True, tag="register", forbid_unknown_fields=True):
    """Describe and hand over one worker's KV memory."""

    id: int
    chunk_tokens: int
    memory: list[MemorySpec]
    groups: list[GroupSpec]
    """The worker's rows; requests name them by their place here."""
    fence: bytes = b""
    """A GPU event of the engine, as CUDA exports it: copies of requests that say ``is_fenced`` wait for it."""


class Descriptors(msgspec.Struct, frozen=True, tag="descriptors"):
    """Hand over descriptors that have no room in the frame of the registration to come; they go before its own."""

    id: int


class NeedSpec(msgspec.Struct, frozen=True):
    """``model.coverage.Need`` on the wire."""

    kind: str
    span: int | None = None
    """Chunks, for kinds that have a window."""
    num_shards: int = 1
    num_readers: int = 1
    """Workers that will read each row: more than one where KV is replicated."""


class Lookup(msgspec.Struct, frozen=True, tag="lookup"):
    """Ask how much of a prefix all rows can serve, and hold what that needs under a lease."""

    id: int
    digests: bytes
    needs: tuple[NeedSpec, ...] = (NeedSpec("full"),)
    """Of each layer group, by its number."""
    tails: bytes = b""
    """Digests of the tails that may follow the last of ``digests``, shortest first. Only if all needs are ``full``."""
    chunk_us: int = 0
    """What computing one chunk takes the engine: what takes longer to read from a tier is not read; 0 if not known."""
    wants_places: bool = False
    """Say where the chunks lie, for workers that copy for themselves and may so begin ahead of the order."""


class Retrieve(msgspec.Struct, frozen=True, tag="retrieve"):
    """Write chunks ``[first_chunk, first_chunk + n)`` of a lease's prefix into the blocks of one of the rows."""

    id: int
    lease: bytes
    first_chunk: int
    block_ids: bytes
    """int32, ``n * blocks_per_chunk``: the stored blocks of each chunk"""
    num_skipped_blocks: int = 0
    """Leading blocks that must not be written; they, and no others, may be the null block."""
    deadline_ms: int = 0
    """Copies not begun by then are not begun at all; 0 is no deadline."""
    is_fenced: bool = False
    """The blocks may be written only after the registered event, which was recorded before this was sent."""
    row: int = 0
    """Which of the registered rows."""
    tail_blocks: int = 0
    """Blocks of the lease's tail, which is then the only chunk of this request; 0 where chunks are whole."""


class Store(msgspec.Struct, frozen=True, tag="store"):
    """Keep the chunks that the blocks of one of the rows hold."""

    id: int
    digests: bytes
    parent: bytes
    """Digest of the chunk before the first; empty at the start of a prompt, and for rows that are not ``full``."""
    block_ids: bytes
    """int32: the stored blocks of each chunk"""
    is_fenced: bool = False
    """The blocks hold their bytes only after the registered event, which was recorded before this was sent."""
    row: int = 0
    """Which of the registered rows."""
    tail_blocks: int = 0
    """Blocks of a tail, which is then the only chunk of this request; 0 where chunks are whole."""
    tenant: str = ""
    """Whose the chunks are: they count for its quota, and go with its purge. Their keys keep them apart."""


class CopyDone(msgspec.Struct, frozen=True, tag="copy_done"):
    """An order was carried out, or as much of it as will be. The reply is that of the request behind the order."""

    id: int
    order: int
    """``CopyOrder.id``"""
    num_done: int
    """Chunks that were copied, from the order's first."""
    checksums: bytes = b""
    """Of the copied chunks, 8 bytes each, for a store."""
    failed: list[int] = []
    """Copied chunks that do not match their checksums, for a retrieve."""


class Release(msgspec.Struct, frozen=True, tag="release"):
    """Give a lease back. Twice is harmless."""

    id: int
    lease: bytes


class Ping(msgspec.Struct, frozen=True, tag="ping"):
    """Ask for a sign of life."""

    id: int


class Status(msgspec.Struct, frozen=True, tag="status"):
    """Ask for the daemon's counters."""

    id: int


class Purge(msgspec.Struct, frozen=True, tag="purge"):
    """Drop what a tenant has, what is of a model, what is both, or everything, in the pool and in all tiers."""

    id: int
    tenant: str | None = None
    """None is any, ``""`` those who have named none."""
    model: str | None = None


Request = Hello | Register | Descriptors | Lookup | Retrieve | Store | CopyDone | Release | Ping | Status | Purge


class Limits(msgspec.Struct, frozen=True):
    """What the daemon accepts and promises."""

    frame_nbytes_max: int
    chunks_max: int
    blocks_max: int
    requests_max: int
    """Unanswered requests of one session."""
    lease_ttl_s: float


class Welcome(msgspec.Struct, frozen=True, tag="welcome"):
    """The connection is a session now."""

    id: int
    version: int
    daemon: str
    boot_id: str
    """Another one after every restart of the daemon."""
    limits: Limits


class Registered(msgspec.Struct, frozen=True, tag="registered"):
    """The memory is mapped; block ids can be named.

    To an engine that copies itself comes one file descriptor: the pool's.
    """

    id: int
    chunk_nbytes: list[int]
    """Of each row."""
    pool_nbytes: int = 0
    """Size of the pool, where its descriptor comes with this."""


class Received(msgspec.Struct, frozen=True, tag="received"):
    """The descriptors are kept for the registration to come."""

    id: int
    num_kept: int
    """All that are kept now, those of earlier requests included."""


class RowPlaces(msgspec.Struct, frozen=True):
    """Where the chunks that a lease holds of one row lie in the pool, and their checksums."""

    group: int
    shard: int
    first_chunk: int
    slots: bytes
    """int64, offsets from the pool's start"""
    checksums: bytes
    """8 bytes each"""


class LookupReply(msgspec.Struct, frozen=True, tag="lookup_reply"):
    """A prefix of ``num_chunks`` chunks can be served.

    What that needs of each row is held under ``lease``, which is empty if there is neither a chunk nor a tail.
    """

    id: int
    num_chunks: int
    lease: bytes = b""
    tail: int = 0
    """Which of the tails is held besides, as chunk ``num_chunks`` of each row; counted from 1, and 0 for none."""
    num_loading: int = 0
    """Chunks behind ``num_chunks`` that are being read from a tier: they are held by nobody, and the same lookup can
    find them when they are there."""
    loading_ms: int = 0
    """About how long that will take; 0 if not known."""
    places: tuple[RowPlaces, ...] = ()
    """If they were asked for and the daemon shares its pool: of every row whose checksums an order could carry."""


class RetrieveReply(msgspec.Struct, frozen=True, tag="retrieve_reply"):
    """All bytes have landed, except in the blocks of the failed chunks."""

    id: int
    num_chunks: int
    failed: list[int] = []
    """Chunks of this request, counted from its first, whose blocks must not be used."""


class StoreReply(msgspec.Struct, frozen=True, tag="store_reply"):
    """The blocks have been read and may be reused."""

    id: int
    num_stored: int
    num_present: int
    """Were cached already, or are being stored by someone else."""
    num_refused: int = 0
    reason: str = ""
    """Why the refused ones were: ``pool full``, ``tenant quota``, ``no parent``, ``copy failed``."""


class CopyOrder(msgspec.Struct, frozen=True, tag="copy_order"):
    """Copy between the request's blocks and these slots, then say ``CopyDone``. The reply to a retrieve or a store."""

    id: int
    slots: bytes
    """Offset of each chunk in the pool, int64."""
    positions: bytes
    """Which of the request's chunks these are, int32."""
    checksums: bytes = b""
    """Of each chunk, 8 bytes, for a retrieve."""


class Released(msgspec.Struct, frozen=True, tag="released"):
    """The lease is gone, whether or not it was there."""

    id: int


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


class Pong(msgspec.Struct, frozen=True, tag="pong"):
    """The sign of life."""

    id: int


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


class Error(msgspec.Struct, frozen=True, tag="error"):
    """The request was not carried out. ``id`` is 0 if the request's own could not be read."""

    id: int
    code: str
    detail: str


Reply = (
    Welcome
    | Registered
    | Received
    | LookupReply
    | RetrieveReply
    | StoreReply
    | CopyOrder
    | Released
    | PurgeReply
    | Pong
    | StatusReply
    | Error
)
