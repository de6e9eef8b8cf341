"""Bytes on disk: what is written is read, what is damaged is seen, what is newer is told from damage."""

from __future__ import annotations

import struct

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvist.model.keys import ChunkKey
from kvist.storage.base import StoredChunk
from kvist.storage.disk.format import (
    ENTRY,
    FORMAT_VERSION,
    LOG,
    PAGE_NBYTES,
    SLAB,
    FileHeader,
    chunk_header_nbytes,
    encode_batch,
    encode_chunk_header,
    encode_drop,
    encode_file_header,
    encode_put,
    find_version,
    parse_chunk_header,
    parse_file_header,
    replay,
)  # fmt: skip

KEYS = st.binary(min_size=20, max_size=20).map(ChunkKey)
CHUNKS = st.builds(
    lambda key, parent, nbytes, rest, checksum: StoredChunk(key, parent, nbytes, nbytes + rest, checksum),
    KEYS, st.none() | KEYS, st.integers(1, 2**40), st.integers(0, 2**30), st.binary(max_size=9000),
)  # fmt: skip
HEADER = FileHeader(LOG, b"0123456789abcdef", 1 << 20, 8192, 77)


def flipped(raw: bytes, at: int, bit: int) -> bytes:
    changed = bytearray(raw)
    changed[at] ^= 1 << bit
    return bytes(changed)


@given(chunk=CHUNKS, payload_sum=st.integers(0, 2**64 - 1))
def test_a_chunk_header_says_what_was_written(chunk: StoredChunk, payload_sum: int):
    """All fields come back, for device checksums of any length; the header fills pages."""
    raw = encode_chunk_header(chunk, payload_sum)
    assert len(raw) == chunk_header_nbytes(chunk.checksum)
    assert len(raw) % PAGE_NBYTES == 0
    header = parse_chunk_header(raw)
    assert header is not None
    assert (header.chunk, header.payload_sum, header.header_nbytes) == (chunk, payload_sum, len(raw))


@given(chunk=CHUNKS, data=st.data())
def test_a_wrong_bit_in_a_chunk_header_is_seen(chunk: StoredChunk, data: st.DataObject):
    """Any bit of what is said, turned over, gives None; so does a header that is not all there."""
    raw = encode_chunk_header(chunk, 7)
    end = 96 + len(chunk.checksum)
    assert parse_chunk_header(flipped(raw, data.draw(st.integers(0, end - 1)), data.draw(st.integers(0, 7)))) is None
    assert parse_chunk_header(raw[: data.draw(st.integers(0, end - 1))]) is None


def test_bytes_of_a_chunk_header_do_not_change():
    """The format is what its page says, byte by byte."""
    chunk = StoredChunk(ChunkKey(b"k" * 20), ChunkKey(b"p" * 20), 5000, 8192, b"sum")
    raw = encode_chunk_header(chunk, 0x1122334455667788)
    fixed = b"kvistchk" + struct.pack("<IIQQQ", 1, 4096, 5000, 8192, 0x1122334455667788)
    assert raw[:88] == fixed + b"k" * 20 + b"p" * 20 + struct.pack("<HHI", 1, 0, 3)
    assert raw[88:96].hex() == "015af8d227f3dbfa"
    assert raw[96:] == b"sum".ljust(4000, b"\0")


@given(raw=st.binary(max_size=300))
def test_any_bytes_are_parsed(raw: bytes):
    """No bytes make a parser raise."""
    for start in (b"", b"kvistchk\1\0\0\0", b"kvistlog\1\0\0\0", b"kvbt"):
        assert parse_chunk_header(start + raw) is None
        assert parse_file_header(start + raw, LOG) is None
        assert replay(start + raw, 5).entries == b""


@pytest.mark.parametrize("kind", [SLAB, LOG])
def test_a_file_header_says_what_was_written(kind: bytes):
    """All fields come back; another kind, a wrong bit and a part of it are None; a version is told from damage."""
    assert kind in (SLAB, LOG)
    header = FileHeader(SLAB if kind == SLAB else LOG, b"0123456789abcdef", 1 << 20, 8192, 77)
    raw = encode_file_header(header)
    assert len(raw) == PAGE_NBYTES
    assert parse_file_header(raw, header.kind) == header
    assert parse_file_header(raw, SLAB if kind == LOG else LOG) is None
    assert all(parse_file_header(flipped(raw, at, 3), header.kind) is None for at in (0, 8, 16, 31, 39, 63))
    newer = raw[:8] + struct.pack("<I", FORMAT_VERSION + 1) + raw[12:]
    assert parse_file_header(newer, header.kind) is None
    assert find_version(newer, header.kind) == FORMAT_VERSION + 1
    assert find_version(b"something else", header.kind) is None
    assert find_version(b"", header.kind) is None


@given(chunk=CHUNKS, offset=st.integers(0, 2**50))
def test_an_entry_says_what_was_written(chunk: StoredChunk, offset: int):
    """A put names the chunk, its place and its last use; a drop key and place."""
    put, drop = np.frombuffer(encode_put(chunk, 7, 3, offset, 99) + encode_drop(chunk.key, offset), dtype=ENTRY)
    assert (put["key"].item(), put["offset"], put["nbytes"], put["slot_nbytes"]) == (
        chunk.key, offset, chunk.nbytes, chunk.slot_nbytes,
    )  # fmt: skip
    assert (put["kind"], put["header_pages"], put["last_used"]) == (1, 3, 99)
    assert put["parent"].item() == (chunk.parent or bytes(20))
    assert (drop["kind"], drop["key"].item(), drop["offset"]) == (2, chunk.key, offset)


@given(sizes=st.lists(st.integers(1, 5), min_size=1, max_size=6), data=st.data())
def test_replay_ends_at_the_first_batch_that_is_not_whole(sizes: list[int], data: st.DataObject):
    """Wherever a log is cut or one bit is wrong, what is read are the whole batches before, and the rest is counted."""
    bodies = [bytes([number]) * (ENTRY.itemsize * size) for number, size in enumerate(sizes)]
    batches = [encode_batch(number, body, 5) for number, body in enumerate(bodies)]
    log = b"".join(batches)
    at = data.draw(st.integers(0, len(log) - 1))
    num_whole = sum(at >= sum(map(len, batches[: number + 1])) for number in range(len(batches)))
    for damaged in (log[:at], flipped(log, at, data.draw(st.integers(0, 7)))):
        result = replay(damaged, 5)
        assert bytes(result.entries) == b"".join(bodies[:num_whole])
        assert (result.num_batches, result.end) == (num_whole, sum(map(len, batches[:num_whole])))
        assert result.num_torn_nbytes == len(damaged) - result.end


def test_batches_of_another_log_are_not_read():
    """A batch with another seed, or out of its turn, ends replay."""
    body = bytes(ENTRY.itemsize)
    assert replay(encode_batch(0, body, 5), 6).num_batches == 0
    assert replay(encode_batch(1, body, 5), 5).num_batches == 0
    assert replay(encode_batch(0, body, 5) + encode_batch(2, body, 5), 5).num_batches == 1
