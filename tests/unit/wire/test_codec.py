"""Whatever arrives, in whatever pieces, becomes frames and messages or a refusal that says what it saw."""

import contextlib
import struct
import types
import typing
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvist.errors import Malformed, ProtocolError
from kvist.wire import messages as wire
from kvist.wire.codec import (
    FDS_MAX,
    FRAME_NBYTES_MAX,
    Frame,
    FrameReader,
    decode_reply,
    decode_request,
    encode,
    request_id,
)

REQUESTS = typing.get_args(wire.Request)
REPLIES = typing.get_args(wire.Reply)

_PLAIN: dict[Any, st.SearchStrategy] = {
    int: st.integers(-(2**63), 2**64 - 1),
    float: st.floats(allow_nan=False),
    str: st.text(max_size=8),
    bytes: st.binary(max_size=40),
    bool: st.booleans(),
    type(None): st.none(),
}


def values(kind: Any) -> st.SearchStrategy:
    """Return any value of a field's type."""
    if kind in _PLAIN:
        return _PLAIN[kind]
    arguments = typing.get_args(kind)
    if typing.get_origin(kind) is list:
        return st.lists(values(arguments[0]), max_size=3)
    if typing.get_origin(kind) is tuple:
        return st.lists(values(arguments[0]), max_size=3).map(tuple)
    if typing.get_origin(kind) is dict:
        return st.dictionaries(values(arguments[0]), values(arguments[1]), max_size=3)
    if isinstance(kind, types.UnionType):
        return st.one_of(*map(values, arguments))
    fields = msgspec.structs.fields(kind)
    return st.fixed_dictionaries({field.name: values(field.type) for field in fields}).map(lambda made: kind(**made))


requests = st.one_of(*map(values, REQUESTS))
replies = st.one_of(*map(values, REPLIES))
A_LOOKUP = wire.Lookup(7, b"d" * 32)
A_LOOKUP_OF_TWO = wire.Lookup(7, b"d" * 32, (wire.NeedSpec("full", None, 2, 2), wire.NeedSpec("window", 3, 4)))


@pytest.mark.parametrize("kind", REQUESTS, ids=lambda kind: kind.__name__)
def test_every_request_comes_back(kind: type[wire.Request]):
    """What is encoded as a request is decoded as the same request."""

    @settings(max_examples=25)
    @given(values(kind))
    def check(message: wire.Request) -> None:
        (frame,) = FrameReader().feed(encode(message))
        assert decode_request(frame.body) == message

    check()


@pytest.mark.parametrize("kind", REPLIES, ids=lambda kind: kind.__name__)
def test_every_reply_comes_back(kind: type[wire.Reply]):
    """What is encoded as a reply is decoded as the same reply."""

    @settings(max_examples=25)
    @given(values(kind))
    def check(message: wire.Reply) -> None:
        (frame,) = FrameReader().feed(encode(message))
        assert decode_reply(frame.body) == message

    check()


def test_a_lookup_is_these_bytes():
    """The wire is little-endian headers and msgpack maps, as another implementation would write them."""
    one = {"kind": "full", "span": None, "num_shards": 1, "num_readers": 1}
    two = [
        {"kind": "full", "span": None, "num_shards": 2, "num_readers": 2},
        {"kind": "window", "span": 3, "num_shards": 4, "num_readers": 1},
    ]
    for message, needs in ((A_LOOKUP, [one]), (A_LOOKUP_OF_TWO, two)):
        fields = {"digests": b"d" * 32, "needs": needs, "tails": b"", "chunk_us": 0, "wants_places": False}
        fields["is_repeat"] = False
        body = msgspec.msgpack.encode({"type": "lookup", "id": 7, **fields})
        assert encode(message) == b"kv" + struct.pack("<HI", 0, len(body)) + body


def test_a_lookup_reply_is_these_bytes():
    """What is here, what holds it, and what is on its way."""
    fields = {
        "type": "lookup_reply", "id": 7, "num_chunks": 2, "lease": b"l" * 16, "tail": 0, "num_loading": 3,
        "loading_ms": 12, "places": [],
    }  # fmt: skip
    assert encode(wire.LookupReply(7, 2, b"l" * 16, 0, 3, 12))[8:] == msgspec.msgpack.encode(fields)


def test_a_registration_is_these_bytes():
    """A row says its kind, its blocks and its window, and which group on which shard it is."""
    row = wire.GroupSpec("window", 16, [wire.PlaneSpec(0, 0, 4, 64, 16)], 0, window=32, group=1, shard=2)
    message = wire.Register(7, 256, [wire.MemorySpec("host", 256)], [row])
    fields = {
        "type": "register", "id": 7, "chunk_tokens": 256,
        "memory": [{"kind": "host", "nbytes": 256, "device": "", "payload": b"", "part_nbytes": []}],
        "groups": [{
            "kind": "window", "block_tokens": 16, "planes": [[0, 0, 4, 64, 16, 1, 0, 1, 0, 1, 0]], "null_block": 0,
            "window": 32, "group": 1, "shard": 2,
        }],
        "fence": b"", "texts": [],
    }  # fmt: skip
    assert encode(message)[8:] == msgspec.msgpack.encode(fields)


@given(st.lists(st.tuples(st.one_of(requests, replies), st.integers(0, FDS_MAX)), max_size=6), st.data())
def test_frames_do_not_depend_on_how_the_stream_is_cut(found: list[tuple], data: st.DataObject):
    """Any cuts of a stream give the same frames, and none before its last byte has come."""
    frames = [encode(message, num_fds=num_fds) for message, num_fds in found]
    stream = b"".join(frames)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(stream)), max_size=12)))
    reader = FrameReader()
    seen: list[Frame] = []
    for start, end in zip([0, *cuts], [*cuts, len(stream)], strict=True):
        seen += reader.feed(memoryview(stream)[start:end])
        num_whole = sum(sum(map(len, frames[: count + 1])) <= end for count in range(len(frames)))
        assert len(seen) == num_whole
        assert reader.is_inside_frame is (end != sum(map(len, frames[:num_whole])))
    assert seen == [Frame(frame[8:], num_fds) for frame, (_, num_fds) in zip(frames, found, strict=True)]


bodies = st.one_of(
    st.binary(max_size=60),
    st.recursive(
        st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats() | st.text(max_size=9) | st.binary(),
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["id", "type", "x"]), inner),
    ).map(msgspec.msgpack.encode),
    st.tuples(st.one_of(requests, replies), st.integers(0, 200), st.integers(0, 255)).map(
        lambda drawn: damaged(msgspec.msgpack.encode(drawn[0]), drawn[1], drawn[2])
    ),
)


def damaged(body: bytes, place: int, value: int) -> bytes:
    """Return ``body`` with one byte changed, or cut short."""
    place %= len(body) + 1
    return body[:place] if value % 4 == 0 else body[:place] + bytes([value]) + body[place + 1 :]


@settings(max_examples=500)
@given(bodies)
def test_no_body_does_more_than_be_refused(body: bytes):
    """Any bytes are a request or Malformed, a reply or a ProtocolError, and their id is an id or 0."""
    with contextlib.suppress(Malformed):
        assert isinstance(decode_request(body), REQUESTS)
    with contextlib.suppress(ProtocolError):
        assert isinstance(decode_reply(body), REPLIES)
    found = request_id(body)
    assert type(found) is int
    assert 0 <= found < 2**63


@pytest.mark.parametrize(
    "body",
    [
        b"\x91" * 100_000 + b"\xc0",
        b"\x81\xa2id" * 50_000,
        b"\x81\x91\x01\x02",
        b"\x81\x81\x01\x02\x03",
        b"\xdf\xff\xff\xff\xff",
        b"\xdd\xff\xff\xff\xff",
        b"\xc6\xff\xff\xff\xff",
        b"\xd6\xff\xff\xff\xff\xff",
        b"\xc7\x0c\xff\xff\xff\xff\xff\x7f\xff\xff\xff\xff\xff\xff\xff",
        b"\xa1\xff",
        b"",
    ],
    ids=lambda body: body[:6].hex(),
)
def test_hostile_bodies_are_refused(body: bytes):
    """Endless nesting, keys that cannot be, lengths that are not there, impossible times: refused, and no crash."""
    with pytest.raises(Malformed):
        decode_request(body)
    with pytest.raises(ProtocolError):
        decode_reply(body)
    assert request_id(body) == 0


@settings(max_examples=200)
@given(st.binary(max_size=64), st.integers(0, 64))
def test_no_stream_does_more_than_be_refused(garbage: bytes, cut: int):
    """Any stream is frames or a ProtocolError that shows its first bytes, and stays refused."""
    reader = FrameReader(frame_nbytes_max=1000)
    try:
        list(reader.feed(garbage[:cut]))
        list(reader.feed(garbage[cut:]))
    except ProtocolError:
        with pytest.raises(ProtocolError):
            list(reader.feed(b"more"))
    else:
        assert garbage[:2] == b"kv" or len(garbage) < 8


@pytest.mark.parametrize(
    ("header", "named"),
    [
        (b"GET / HTTP/1.1\r\n", r"b'GET / HT'"),
        (b"vk" + struct.pack("<HI", 0, 0), "not the kvist protocol"),
        (b"kv" + struct.pack("<HI", 0, FRAME_NBYTES_MAX + 1), f"{FRAME_NBYTES_MAX + 1} bytes .* {FRAME_NBYTES_MAX}"),
        (b"kv" + struct.pack("<HI", 0, 2**32 - 1), f"{2**32 - 1} bytes"),
        (b"kv" + struct.pack("<HI", FDS_MAX + 1, 0), f"{FDS_MAX + 1} descriptors .* {FDS_MAX}"),
    ],
    ids=["HTTP", "wrong magic", "one byte over", "4 GiB", "too many descriptors"],
)
def test_wrong_headers_are_refused_at_once(header: bytes, named: str):
    """A header that cannot be is refused before its body is waited for, with what it said."""
    with pytest.raises(ProtocolError, match=named):
        list(FrameReader().feed(header))


def test_the_largest_frame_passes():
    """A frame as large as the limit is read and written; one byte more is not written."""
    fits = wire.Store(1, b"", b"", bytes(FRAME_NBYTES_MAX))
    nbytes = FRAME_NBYTES_MAX - (len(msgspec.msgpack.encode(fits)) - FRAME_NBYTES_MAX)
    frame = encode(wire.Store(1, b"", b"", bytes(nbytes)), num_fds=FDS_MAX)
    assert [len(found.body) for found in FrameReader().feed(frame)] == [FRAME_NBYTES_MAX]
    with pytest.raises(ProtocolError, match=f"{FRAME_NBYTES_MAX + 1} bytes and 0 descriptors"):
        encode(wire.Store(1, b"", b"", bytes(nbytes + 1)))
    with pytest.raises(ProtocolError, match=f"{FDS_MAX + 1} descriptors"):
        encode(wire.Ping(1), num_fds=FDS_MAX + 1)


def test_a_pickle_is_not_opened(tmp_path):
    """A pickle that would run a program is refused wherever bytes are read, and the program does not run."""
    proof = tmp_path / "proof"
    bomb = f"cos\nsystem\n(S'touch {proof}'\ntR.".encode()
    with pytest.raises(Malformed):
        decode_request(bomb)
    with pytest.raises(ProtocolError):
        decode_reply(bomb)
    with pytest.raises(ProtocolError):
        list(FrameReader().feed(bomb))
    assert decode_request(msgspec.msgpack.encode(wire.Lookup(1, bomb))) == wire.Lookup(1, bomb)
    assert not proof.exists()


def with_field(message: wire.Request | wire.Reply, name: str, value: object) -> bytes:
    """Return a message's body with one more field, as a newer peer would send it."""
    return msgspec.msgpack.encode({**msgspec.msgpack.decode(msgspec.msgpack.encode(message)), name: value})


def test_unknown_fields_are_passed_over():
    """A newer peer's additional field does not disturb an older reader."""
    assert decode_request(with_field(A_LOOKUP, "horizon", 3)) == A_LOOKUP
    assert decode_reply(with_field(wire.Pong(3), "mood", "good")) == wire.Pong(3)


REGISTER = {
    "type": "register", "id": 1, "chunk_tokens": 16,
    "memory": [{"kind": "host", "nbytes": 4096}],
    "groups": [{"kind": "full", "block_tokens": 16, "planes": [[0, 0, 4, 64, 16]]}],
}  # fmt: skip


@pytest.mark.parametrize(
    ("path", "found"),
    [
        ((), {"interleave": 2}),
        (("memory", 0), {"page": 2}),
        (("groups", 0), {"sinks": 8}),
        (("groups", 0, "planes"), 9),
    ],
    ids=["registration", "memory", "group", "plane"],
)
def test_a_registration_is_understood_whole_or_refused(path: tuple, found: Any):
    """What says where bytes lie is never passed over, at any depth: an older daemon refuses what it does not know."""
    assert isinstance(decode_request(msgspec.msgpack.encode(REGISTER)), wire.Register)
    newer = msgspec.msgpack.decode(msgspec.msgpack.encode(REGISTER))
    place = newer
    for step in path:
        place = place[step]
    if isinstance(place, list):
        place[0] = [0, 0, 4, 64, 16, 1, 0, 1, 0, 1, 0, found]
    else:
        place |= found
    with pytest.raises(Malformed):
        decode_request(msgspec.msgpack.encode(newer))


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ({"id": 5, "type": "dance"}, 5),
        ({"type": "store", "id": 2**63 - 1}, 2**63 - 1),
        ({"id": 2**63}, 0),
        ({"id": -1}, 0),
        ({"id": "5"}, 0),
        ({"id": 5.0}, 0),
        ({"id": True}, 0),
        ({"type": "ping"}, 0),
        ([5], 0),
        (5, 0),
    ],
    ids=str,
)
def test_a_broken_request_keeps_its_id(body: object, expected: int):
    """The id of a request that does not decode is found where there is one, so that its sender learns of it."""
    raw = msgspec.msgpack.encode(body)
    with pytest.raises(Malformed):
        decode_request(raw)
    assert request_id(raw) == expected


def test_every_message_has_a_type_and_an_id_of_its_own():
    """No two messages have one tag, and each carries the id that ties a reply to its request."""
    tags = [kind.__struct_config__.tag for kind in (*REQUESTS, *REPLIES)]
    assert len(set(tags)) == len(tags)
    assert all(kind.__struct_fields__[0] == "id" for kind in (*REQUESTS, *REPLIES))
