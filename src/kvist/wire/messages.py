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
from kvist.wire.inspection import Describe as Describe
from kvist.wire.inspection import Description as Description
from kvist.wire.inspection import Find as Find
from kvist.wire.inspection import Found as Found
from kvist.wire.inspection import FoundRow as FoundRow
from kvist.wire.inspection import HistogramStatus as HistogramStatus
from kvist.wire.inspection import Purge as Purge
from kvist.wire.inspection import PurgeReply as PurgeReply
from kvist.wire.inspection import SessionRow as SessionRow
from kvist.wire.inspection import SessionStatus as SessionStatus
from kvist.wire.inspection import Status as Status
from kvist.wire.inspection import StatusReply as StatusReply
from kvist.wire.inspection import TenantStatus as TenantStatus
from kvist.wire.inspection import TierStatus as TierStatus
from kvist.wire.specs import GroupSpec as GroupSpec
from kvist.wire.specs import MemorySpec as MemorySpec
from kvist.wire.specs import NamespaceSpec as NamespaceSpec
from kvist.wire.specs import NeedSpec as NeedSpec
from kvist.wire.specs import PlaneSpec as PlaneSpec

PROTOCOL_VERSION: Final = 1
MAGIC: Final = "kvist"
PLANES_MAX: Final = 1 << 14
NAME_CHARS_MAX: Final = 256
TEXT_CHARS_MAX: Final = 512


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
    """What the keys of this engine begin with, without adapter and salt."""
    needs: tuple[NeedSpec, ...] = ()
    """Of each of its layer groups, by number."""
    facts: dict[str, str] = {}
    """What else people and their tools may want to know of it, at most 4,096 characters."""


class Register(msgspec.Struct, frozen=True, tag="register", forbid_unknown_fields=True):
    """Describe and hand over one worker's KV memory."""

    id: int
    chunk_tokens: int
    memory: list[MemorySpec]
    groups: list[GroupSpec]
    """The worker's rows; requests name them by their place here."""
    fence: bytes = b""
    """A GPU event of the engine, as CUDA exports it: copies of requests that say ``is_fenced`` wait for it."""
    texts: list[str] = []
    """Its layer groups, for people, at most ``TEXT_CHARS_MAX`` characters each."""


class Descriptors(msgspec.Struct, frozen=True, tag="descriptors"):
    """Hand over descriptors that have no room in the frame of the registration to come; they go before its own."""

    id: int


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
    is_repeat: bool = False
    """The same request has asked before: counters leave this lookup out."""


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


Request = (
    Hello
    | Register
    | Descriptors
    | Lookup
    | Retrieve
    | Store
    | CopyDone
    | Release
    | Ping
    | Status
    | Describe
    | Find
    | Purge
)


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


class Pong(msgspec.Struct, frozen=True, tag="pong"):
    """The sign of life."""

    id: int


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
    | Description
    | Found
    | Error
)
