"""Frames, sans I/O: feed bytes in, take frames out.

A frame is a header of 8 bytes, ``b"kv"``, the number of file descriptors that it owns (uint16) and the body's length
(uint32), little-endian, and a msgpack body. The law: whatever arrives, a reader holds at most one frame's limit of
bytes, and every refusal says what it saw.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import Final, NamedTuple

import msgspec

from kvist.errors import Malformed, ProtocolError
from kvist.units import MIB
from kvist.wire.messages import Reply, Request

FRAME_NBYTES_MAX: Final = 8 * MIB
FDS_MAX: Final = 253
"""Most file descriptors that Linux passes with one message (SCM_MAX_FD)."""
KEPT_FDS_MAX: Final = 1 << 14
"""Most file descriptors that are kept for one registration, besides those of its own frame."""
_HEADER: Final = struct.Struct("<2sHI")
_HEADER_NBYTES: Final = _HEADER.size
_MAGIC: Final = b"kv"

_encoder = msgspec.msgpack.Encoder()
_request_decoder: msgspec.msgpack.Decoder[Request] = msgspec.msgpack.Decoder(Request)
_reply_decoder: msgspec.msgpack.Decoder[Reply] = msgspec.msgpack.Decoder(Reply)


class Frame(NamedTuple):
    """One undecoded message."""

    body: bytes | memoryview
    num_fds: int


def encode(message: Request | Reply, *, num_fds: int = 0) -> bytes:
    """Return ``message`` as one frame.

    Raises:
        ProtocolError: it is larger than ``FRAME_NBYTES_MAX``, or owns more than ``FDS_MAX`` descriptors.
    """
    body = _encoder.encode(message)
    if len(body) > FRAME_NBYTES_MAX or num_fds > FDS_MAX:
        raise ProtocolError(
            f"a message of {len(body)} bytes and {num_fds} descriptors; limits are {FRAME_NBYTES_MAX} and {FDS_MAX}"
        )
    return _HEADER.pack(_MAGIC, num_fds, len(body)) + body


def decode_request(body: bytes | memoryview) -> Request:
    """Decode a frame's body on the daemon's side.

    Raises:
        Malformed: it is no valid request; the text names the place.
    """
    try:
        return _request_decoder.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise Malformed(f"no valid request: {error}") from error


def decode_reply(body: bytes | memoryview) -> Reply:
    """Decode a frame's body on the engine's side.

    Raises:
        ProtocolError: it is no valid reply.
    """
    try:
        return _reply_decoder.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ProtocolError(f"no valid reply: {error}") from error


def request_id(body: bytes | memoryview) -> int:
    """Return the id of a request that does not decode, as far as it can be read; 0 if it cannot."""
    try:
        raw = msgspec.msgpack.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError, ValueError):
        return 0
    found = raw.get("id") if isinstance(raw, dict) else 0
    if not isinstance(found, int) or isinstance(found, bool):
        return 0
    return found if 0 <= found < 2**63 else 0


class FrameReader:
    """Splits a byte stream into frames."""

    def __init__(self, frame_nbytes_max: int = FRAME_NBYTES_MAX) -> None:
        self._frame_nbytes_max = frame_nbytes_max
        self._buffer = bytearray()

    @property
    def is_inside_frame(self) -> bool:
        """A frame has begun and has not come to its end."""
        return bool(self._buffer)

    def feed(self, data: bytes | memoryview) -> Iterator[Frame]:
        """Add received bytes and yield every frame that is complete now; a frame is valid until the next is asked for.

        Raises:
            ProtocolError: the stream is no kvist stream, or announces a frame over the limit.
        """
        if not self._buffer and (frame := self._whole(data)) is not None:
            yield frame
            return
        self._buffer += data
        while len(self._buffer) >= _HEADER_NBYTES:
            magic, num_fds, nbytes = _HEADER.unpack_from(self._buffer)
            if magic != _MAGIC:
                raise ProtocolError(f"not the kvist protocol: a frame begins with {bytes(self._buffer[:8])!r}")
            if nbytes > self._frame_nbytes_max:
                raise ProtocolError(f"a frame of {nbytes} bytes is over the limit of {self._frame_nbytes_max}")
            if num_fds > FDS_MAX:
                raise ProtocolError(f"a frame with {num_fds} descriptors is over the limit of {FDS_MAX}")
            end = _HEADER_NBYTES + nbytes
            if len(self._buffer) < end:
                return
            body = bytes(self._buffer[_HEADER_NBYTES:end])
            del self._buffer[:end]
            yield Frame(body, num_fds)

    def _whole(self, data: bytes | memoryview) -> Frame | None:
        """Return the frame that ``data`` is, from its first byte to its last: by far the most frequent case."""
        if not _HEADER_NBYTES <= len(data) <= _HEADER_NBYTES + self._frame_nbytes_max:
            return None
        magic, num_fds, nbytes = _HEADER.unpack_from(data)
        is_whole = magic == _MAGIC and len(data) == _HEADER_NBYTES + nbytes and num_fds <= FDS_MAX
        return Frame(data[_HEADER_NBYTES:], num_fds) if is_whole else None
