"""What the bytes on disk mean (``docs/disk-format.md``): values to bytes and back.

The law: any bytes give what was written, or None; they are taken for something else only if a 64-bit sum happens to
be right. A version that we do not know is told from damage, because it must be left alone.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, Literal

import numpy as np
import numpy.typing as npt
from xxhash import xxh3_64, xxh3_64_intdigest

from kvist.errors import KeyInvalid
from kvist.model.keys import DIGEST_NBYTES, ChunkKey
from kvist.model.owners import Owner
from kvist.storage.base import StoredChunk
from kvist.units import align_up

PAGE_NBYTES: Final = 4096
"""What direct I/O asks for, and what is torn at."""
FORMAT_VERSION: Final = 1
KEY_NBYTES: Final = DIGEST_NBYTES + 4
NO_KEY: Final = ChunkKey(bytes(KEY_NBYTES))

FileKind = Literal[b"kvistslb", b"kvistlog"]
SLAB: Final = b"kvistslb"
LOG: Final = b"kvistlog"
_CHUNK_MAGIC: Final = b"kvistchk"
_BATCH_MAGIC: Final = b"kvbt"

_VERSION: Final = struct.Struct("<8sI")
_FILE: Final = struct.Struct("<8sI4x16sQQQ")
_CHUNK: Final = struct.Struct("<8sIIQQQ20s20sHHI")
_BATCH: Final = struct.Struct("<4sIQ")
_ENTRY: Final = struct.Struct("<BBHHH20s20sQQQQ")
_NAME: Final = struct.Struct("<BBHHH72s")
_NAME_PIECE_NBYTES: Final = 72
_NAME_NBYTES: Final = struct.Struct("<H")
_SUM: Final = struct.Struct("<Q")
BATCH_NBYTES: Final = _BATCH.size + _SUM.size
_CHUNK_FIXED_NBYTES: Final = _CHUNK.size + _SUM.size

PUT: Final = 1
DROP: Final = 2
NAME: Final = 3
HAS_PARENT: Final = 1
ENTRY: Final = np.dtype(
    [
        ("kind", "u1"), ("flags", "u1"), ("header_pages", "<u2"), ("owner", "<u2"), ("reserved", "<u2"),
        ("key", f"V{KEY_NBYTES}"), ("parent", f"V{KEY_NBYTES}"),
        ("offset", "<u8"), ("nbytes", "<u8"), ("slot_nbytes", "<u8"), ("last_used", "<u8"),
    ]
)  # fmt: skip
"""One line of the log."""

Entries = npt.NDArray[np.void]
"""Of ``ENTRY``, shape ``[n]``."""


@dataclass(frozen=True, slots=True)
class FileHeader:
    """How a slab or a log begins."""

    kind: FileKind
    epoch: bytes
    """16 bytes, equal in the slab and the log that belong together."""
    extent_nbytes: int
    data_offset: int
    """Where the first extent begins."""
    seed: int
    """Of the sums in this log."""


@dataclass(frozen=True, slots=True)
class ChunkHeader:
    """What stands before a chunk's payload."""

    chunk: StoredChunk
    payload_sum: int
    header_nbytes: int


@dataclass(frozen=True, slots=True)
class Replay:
    """What a log says."""

    entries: bytes | memoryview
    """``ENTRY`` after ``ENTRY``, of all whole batches."""
    num_batches: int
    end: int
    """Where the whole batches end, from the beginning of what was given."""
    num_torn_nbytes: int
    """Behind that."""


def encode_file_header(header: FileHeader) -> bytes:
    """Return one page."""
    fixed = _FILE.pack(header.kind, FORMAT_VERSION, header.epoch, header.extent_nbytes, header.data_offset, header.seed)
    return (fixed + _SUM.pack(xxh3_64_intdigest(fixed))).ljust(PAGE_NBYTES, b"\0")


def find_version(raw: bytes | bytearray, kind: FileKind) -> int | None:
    """Return the format version that a file claims; None if it is no file of this kind."""
    if len(raw) < _VERSION.size:
        return None
    magic, version = _VERSION.unpack_from(raw)
    return int(version) if magic == kind else None


def parse_file_header(raw: bytes | bytearray, kind: FileKind) -> FileHeader | None:
    """Return the header of a slab or a log of this version; None if it is damaged or something else."""
    if len(raw) < _FILE.size + _SUM.size:
        return None
    magic, version, epoch, extent_nbytes, data_offset, seed = _FILE.unpack_from(raw)
    (found,) = _SUM.unpack_from(raw, _FILE.size)
    if magic != kind or version != FORMAT_VERSION or found != xxh3_64_intdigest(raw[: _FILE.size]):
        return None
    is_aligned = extent_nbytes % PAGE_NBYTES == 0 == data_offset % PAGE_NBYTES
    if not is_aligned or extent_nbytes == 0 or data_offset < PAGE_NBYTES:
        return None
    return FileHeader(kind, epoch, extent_nbytes, data_offset, seed)


def chunk_header_nbytes(checksum: bytes) -> int:
    """Return what a chunk with this device checksum has before its payload."""
    return align_up(_CHUNK_FIXED_NBYTES + len(checksum), PAGE_NBYTES)


def encode_chunk_header(chunk: StoredChunk, payload_sum: int) -> bytes:
    """Return the header, up to a multiple of the page."""
    header_nbytes = chunk_header_nbytes(chunk.checksum)
    fixed = _CHUNK.pack(
        _CHUNK_MAGIC, FORMAT_VERSION, header_nbytes, chunk.nbytes, chunk.slot_nbytes, payload_sum, chunk.key,
        chunk.parent or NO_KEY, HAS_PARENT if chunk.parent is not None else 0, 0, len(chunk.checksum),
    )  # fmt: skip
    total = _SUM.pack(xxh3_64_intdigest(fixed + chunk.checksum))
    return (fixed + total + chunk.checksum).ljust(header_nbytes, b"\0")


def parse_chunk_header(raw: bytes | memoryview) -> ChunkHeader | None:
    """Return what a chunk's header says; None if it is not whole, damaged, or something else."""
    if len(raw) < _CHUNK_FIXED_NBYTES:
        return None
    fields = _CHUNK.unpack_from(raw)
    magic, version, header_nbytes, nbytes, slot_nbytes, payload_sum, key, parent, flags, _, checksum_nbytes = fields
    checksum = bytes(raw[_CHUNK_FIXED_NBYTES : _CHUNK_FIXED_NBYTES + checksum_nbytes])
    (found,) = _SUM.unpack_from(raw, _CHUNK.size)
    if magic != _CHUNK_MAGIC or version != FORMAT_VERSION or len(checksum) != checksum_nbytes:
        return None
    if found != xxh3_64_intdigest(bytes(raw[: _CHUNK.size]) + checksum):
        return None
    if header_nbytes != chunk_header_nbytes(checksum) or not 0 < nbytes <= slot_nbytes:
        return None
    above = ChunkKey(parent) if flags & HAS_PARENT else None
    return ChunkHeader(StoredChunk(ChunkKey(key), above, nbytes, slot_nbytes, checksum), payload_sum, header_nbytes)


def encode_put(chunk: StoredChunk, owner: int, header_pages: int, offset: int, last_used: int) -> bytes:
    """Return the entry of the log that says where a chunk is, and the number of its owner."""
    flags = 0 if chunk.parent is None else HAS_PARENT
    above = chunk.parent or NO_KEY
    return _ENTRY.pack(
        PUT, flags, header_pages, owner, 0, chunk.key, above, offset, chunk.nbytes, chunk.slot_nbytes, last_used
    )


def encode_drop(key: ChunkKey, offset: int) -> bytes:
    """Return the entry of the log that says that a chunk is there no more."""
    return _ENTRY.pack(DROP, 0, 0, 0, 0, key, NO_KEY, offset, 0, 0, 0)


def num_name_entries(owner: Owner) -> int:
    """Return how many entries of the log an owner's name takes."""
    return -(-len(_name_of(owner)) // _NAME_PIECE_NBYTES)


def encode_names(owners: Mapping[int, Owner]) -> bytes:
    """Return the entries of the log that say whose numbers these are."""
    entries = []
    for number, owner in owners.items():
        raw = _name_of(owner)
        for at in range(0, len(raw), _NAME_PIECE_NBYTES):
            piece = raw[at : at + _NAME_PIECE_NBYTES]
            entries.append(_NAME.pack(NAME, 0, len(raw), number, 0, piece))
    return b"".join(entries)


def parse_names(entries: Entries) -> dict[int, Owner]:
    """Return whose numbers a log's entries of names say they are; the later ones win, those that say nothing do not."""
    owners: dict[int, Owner] = {}
    raw, nbytes, number = bytearray(), 0, 0
    for _, _, name_nbytes, found, _, piece in _NAME.iter_unpack(entries.tobytes()):
        if not raw:
            nbytes, number = name_nbytes, found
        raw += piece
        if len(raw) >= nbytes or (name_nbytes, found) != (nbytes, number):
            owner = _parse_name(bytes(raw[:nbytes])) if (name_nbytes, found) == (nbytes, number) else None
            if owner is not None:
                owners[number] = owner
            raw.clear()
    return owners


def _name_of(owner: Owner) -> bytes:
    tenant = owner.tenant.encode()
    return _NAME_NBYTES.pack(len(tenant)) + tenant + owner.model.encode()


def _parse_name(raw: bytes) -> Owner | None:
    if len(raw) < _NAME_NBYTES.size:
        return None
    (tenant_nbytes,) = _NAME_NBYTES.unpack_from(raw)
    names = raw[_NAME_NBYTES.size :]
    try:
        return Owner(names[:tenant_nbytes].decode(), names[tenant_nbytes:].decode())
    except (UnicodeDecodeError, KeyInvalid):
        return None


def encode_batch(number: int, entries: bytes, seed: int) -> bytes:
    """Return a batch of the log around ``ENTRY`` after ``ENTRY``."""
    num_entries, rest = divmod(len(entries), ENTRY.itemsize)
    assert rest == 0
    fixed = _BATCH.pack(_BATCH_MAGIC, num_entries, number)
    return b"".join((fixed, _SUM.pack(xxh3_64_intdigest(b"".join((fixed, entries)), seed)), entries))


def replay(raw: bytes | memoryview, seed: int) -> Replay:
    """Read the batches that follow a log's header, up to the first that is not whole."""
    view = memoryview(raw)
    bodies: list[memoryview] = []
    at = number = 0
    while (body := _parse_batch(view, at, number, seed)) is not None:
        bodies.append(body)
        at += BATCH_NBYTES + len(body)
        number += 1
    return Replay(bodies[0] if number == 1 else b"".join(bodies), number, at, len(raw) - at)


def _parse_batch(view: memoryview, at: int, number: int, seed: int) -> memoryview | None:
    if len(view) - at < BATCH_NBYTES:
        return None
    magic, num_entries, found_number = _BATCH.unpack_from(view, at)
    body = view[at + BATCH_NBYTES : at + BATCH_NBYTES + num_entries * ENTRY.itemsize]
    if magic != _BATCH_MAGIC or found_number != number or len(body) != num_entries * ENTRY.itemsize:
        return None
    (found,) = _SUM.unpack_from(view, at + _BATCH.size)
    hasher = xxh3_64(view[at : at + _BATCH.size], seed)
    hasher.update(body)
    return body if found == hasher.intdigest() else None
