"""Whatever wrong is sent, its sender gets one answer that names it, and the daemon goes on serving everybody else."""

import contextlib
import os
import struct
from collections.abc import Callable, Iterator

import msgspec
import pytest

from kvist.errors import ForeignLease, LeaseClaimed, UnknownLease
from kvist.wire import messages as wire
from kvist.wire.codec import FDS_MAX, FRAME_NBYTES_MAX, encode
from tests.e2e.conftest import Connect
from tests.support.daemon import Daemon
from tests.support.engine import NAMESPACE, SMALL, FakeEngine, describe, packed
from tests.support.memory import SharedMemory, num_mappings
from tests.support.peer import Peer

PROMPT = list(range(40))
NO = b"\0" * 16


@pytest.fixture(autouse=True)
def goes_on_serving(shared: Daemon) -> Iterator[None]:
    """Around each test an engine stores and loads, and afterwards nothing of the test is left."""
    before = shared.num_fds()
    yield
    with FakeEngine(shared.path) as engine:
        engine.client.register()
        engine.store(PROMPT)
        assert engine.load(PROMPT, engine.look_up(PROMPT)) == []
    shared.check_quiet(num_fds=before)


@pytest.fixture
def memory() -> Iterator[list[SharedMemory]]:
    memory = [SharedMemory(nbytes, name="kvist-refused") for nbytes in SMALL.memory_nbytes]
    yield memory
    for one in memory:
        one.close()


@pytest.fixture
def registered(shared: Daemon, memory: list[SharedMemory]) -> Iterator[Peer]:
    """A session whose memory is registered."""
    with Peer(shared.path) as peer:
        peer.hello()
        right = describe(SMALL, 2, chunk_tokens=NAMESPACE.chunk_tokens)
        assert isinstance(peer.ask(right, fds=[one.fd for one in memory]), wire.Registered)
        yield peer


def header(nbytes: int, *, num_fds: int = 0, magic: bytes = b"kv") -> bytes:
    return struct.pack("<2sHI", magic, num_fds, nbytes)


@pytest.mark.parametrize("is_greeted", [False, True], ids=["before hello", "after hello"])
@pytest.mark.parametrize(
    ("raw", "named"),
    [
        (b"GET / HTTP/1.1\r\nHost: kvist\r\n\r\n", "b'GET / HT'"),
        (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03", "not the kvist protocol"),
        (header(FRAME_NBYTES_MAX + 1), f"{FRAME_NBYTES_MAX + 1} bytes is over the limit of {FRAME_NBYTES_MAX}"),
        (header(0, num_fds=FDS_MAX + 1), f"{FDS_MAX + 1} descriptors is over the limit"),
        (header(1, num_fds=2) + b"\xc0", "owns 2 descriptors and 0 have come"),
    ],
    ids=["HTTP", "TLS", "too large", "too many descriptors", "missing descriptors"],
)
def test_what_is_not_the_protocol_is_told_so(shared: Daemon, raw: bytes, named: str, *, is_greeted: bool):
    """The answer shows what came; then the connection is over."""
    with Peer(shared.path) as peer:
        if is_greeted:
            peer.hello()
        peer.send(raw)
        reply = peer.reply()
        assert isinstance(reply, wire.Error)
        assert (reply.id, reply.code, named in reply.detail) == (0, "protocol", True), reply
        assert peer.is_closed()


@pytest.mark.parametrize(
    ("first", "code", "named"),
    [
        (wire.Hello(5, wire.MAGIC, 2, "x"), "version_mismatch", "speaks protocol 2, the daemon (kvist "),
        (wire.Hello(5, wire.MAGIC, 0, "x"), "version_mismatch", "speaks protocol 0"),
        (wire.Hello(5, "kvast", 1, "x"), "protocol", "begins with a hello"),
        (wire.Hello(5, wire.MAGIC, 1, ""), "protocol", "at most 256 characters"),
        (wire.Hello(5, wire.MAGIC, 1, "x" * 257), "protocol", "at most 256 characters"),
        (wire.Hello(5, wire.MAGIC, 1, "x", facts={"a": "x" * 4096}), "protocol", "4097 characters of facts"),
        (wire.Hello(5, wire.MAGIC, 1, "x", needs=(wire.NeedSpec("full"),) * 4097), "protocol", "4097 groups"),
        (wire.Ping(5), "protocol", "begins with a hello, not with Ping"),
        (header(3) + b"abc", "protocol", "no hello"),
    ],
    ids=lambda value: "" if isinstance(value, str) else repr(value)[:40],
)
def test_a_wrong_greeting_is_answered(shared: Daemon, first: wire.Request | bytes, code: str, named: str):
    """A newer or older peer learns both versions; one that does not greet learns that it must."""
    with Peer(shared.path) as peer:
        peer.send(first)
        reply = peer.reply()
        assert isinstance(reply, wire.Error)
        assert (reply.code, named in reply.detail) == (code, True), reply
        assert peer.is_closed()


@pytest.mark.parametrize(
    ("body", "number", "named"),
    [
        (msgspec.msgpack.encode({"type": "dance", "id": 9}), 9, "dance"),
        (msgspec.msgpack.encode({"type": "lookup", "id": 9}), 9, "digests"),
        (msgspec.msgpack.encode({"type": "lookup", "id": 9, "digests": [1, 2]}), 9, "$.digests"),
        (msgspec.msgpack.encode({"type": "ping", "id": "nine"}), 0, "$.id"),
        (b"\x91" * 10_000, 0, "no valid request"),
        (b"cos\nsystem\n(S'false'\ntR.", 0, "no valid request"),
        (b"", 0, "no valid request"),
    ],
    ids=["unknown", "incomplete", "wrong type", "no id", "nested", "pickle", "empty"],
)
def test_a_request_that_does_not_decode_is_answered(shared: Daemon, body: bytes, number: int, named: str):
    """The answer has the request's id where there is one, and names the place; the session goes on."""
    with Peer(shared.path) as peer:
        peer.hello()
        peer.send(header(len(body)) + body)
        reply = peer.reply()
        assert isinstance(reply, wire.Error)
        assert (reply.id, reply.code, named in reply.detail) == (number, "malformed", True), reply
        assert peer.ask(wire.Ping(10)) == wire.Pong(10)


@pytest.mark.parametrize(
    ("request_", "code", "named"),
    [
        (wire.Store(3, NO, b"", packed([[0, 64]])), "invalid_blocks", "block id 64 is outside [0, 64)"),
        (wire.Store(3, NO, b"", packed([[0, -5]])), "invalid_blocks", "block id -5 is outside [0, 64)"),
        (wire.Store(3, NO, b"", packed([[7, 7]])), "invalid_blocks", "block id 7 appears 2 times"),
        (wire.Store(3, NO, b"", packed([[7]])), "invalid_blocks", "1 block ids for 1 chunks of 2 blocks; 2 are needed"),
        (wire.Store(3, NO, b"", packed([[7, 8, 9]])), "invalid_blocks", "3 block ids"),
        (wire.Store(3, NO, b"", b"12345"), "invalid_blocks", "5 bytes"),
        (wire.Store(3, NO, b"x" * 5, packed([[0, 1]])), "malformed", "5 bytes"),
        (wire.Store(3, NO + b"x", b"", packed([[0, 1]])), "malformed", "17 bytes"),
        (wire.Lookup(3, b"x" * 31), "malformed", "31 bytes"),
        (wire.Lookup(3, NO * (wire.CHUNKS_MAX + 1)), "malformed", f"{wire.CHUNKS_MAX + 1} digests are over the limit"),
        (wire.Lookup(3, NO, (wire.NeedSpec("full", num_shards=0),)), "malformed", "on 0 shards"),
        (wire.Retrieve(3, b"\xab\xcd", 0, packed([[0, 1]])), "unknown_lease", "abcd"),
        (wire.Hello(3, wire.MAGIC, 1, "x"), "malformed", "hello"),
    ],
    ids=lambda value: "" if isinstance(value, str) else type(value).__name__,
)
def test_a_wrong_value_is_named(registered: Peer, request_: wire.Request, code: str, named: str):
    """A request with a wrong value is refused with that value, and the session goes on."""
    reply = registered.ask(request_)
    assert isinstance(reply, wire.Error)
    assert (reply.code, named in reply.detail) == (code, True), reply
    assert registered.ask(wire.Ping(4)) == wire.Pong(4)


def changed(**changes: object) -> Callable[[wire.Register], wire.Register]:
    return lambda right: msgspec.structs.replace(right, **changes)


def changed_group(**changes: object) -> Callable[[wire.Register], wire.Register]:
    return lambda right: msgspec.structs.replace(right, groups=[msgspec.structs.replace(right.groups[0], **changes)])


def changed_plane(**changes: object) -> Callable[[wire.Register], wire.Register]:
    def change(right: wire.Register) -> wire.Register:
        first, *others = right.groups[0].planes
        return changed_group(planes=[msgspec.structs.replace(first, **changes), *others])(right)

    return change


@pytest.mark.parametrize(
    ("change", "code", "named"),
    [
        (
            changed(chunk_tokens=10),
            "layout_refused",
            "chunk_tokens 10 is no multiple of the engine's block of 4 tokens",
        ),
        (changed(chunk_tokens=9), "layout_refused", "chunk_tokens 9"),
        (changed_group(kind="window"), "layout_refused", "a group of kind 'window' with a window of None tokens"),
        (changed_group(kind="recurrent", window=4), "layout_refused", "kind 'recurrent' with a window of 4 tokens"),
        (changed_group(shard=4096), "layout_refused", "group 0 on shard 4096; both numbers lie in [0, 4096)"),
        (changed_group(kind="sparse"), "layout_refused", "unknown kind of layer group 'sparse'"),
        (changed_plane(offset=1), "layout_refused", "a plane ends at byte 65537 of allocation 0, which has 65536"),
        (changed_plane(num_blocks=65), "layout_refused", "different numbers of blocks: [64, 65]"),
        (changed_plane(memory=2), "layout_refused", "a plane names allocation 2 of 2"),
        (changed_plane(memory=1), "layout_refused", "two layers overlap in allocation 1"),
        (changed_plane(head_stride=63), "layout_refused", "a stride of 63 bytes overlaps rows that span 64"),
        (changed_plane(row_nbytes=-1), "layout_refused", "row_nbytes=-1"),
        (changed(memory=[wire.MemorySpec("host", 1 << 40)] * 2), "layout_refused", f"declared with {1 << 40} bytes"),
        (changed(memory=[wire.MemorySpec("abacus", 65536)] * 2), "layout_refused", "abacus"),
        (
            changed(memory=[wire.MemorySpec("host", 65536)] * 3),
            "malformed",
            "with 3 file descriptors, and 2",
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_wrong_layout_is_named(
    shared: Daemon, memory: list[SharedMemory], change: Callable[[wire.Register], wire.Register], code: str, named: str
):
    """A registration that does not fit its memory is refused with the numbers; nothing of it stays mapped."""
    with Peer(shared.path) as peer:
        peer.hello()
        right = describe(SMALL, 3, chunk_tokens=NAMESPACE.chunk_tokens)
        reply = peer.ask(change(right), fds=[one.fd for one in memory])
        assert isinstance(reply, wire.Error)
        assert (reply.code, named in reply.detail) == (code, True), reply
        assert num_mappings(shared.pid, "kvist-refused") == 0
        assert isinstance(peer.ask(right, fds=[one.fd for one in memory]), wire.Registered)


@pytest.mark.parametrize("seals", [0, 0x2, 0x4], ids=["no seals", "shrink only", "grow only"])
def test_memory_that_could_be_taken_away_is_refused(shared: Daemon, seals: int):
    """KV memory that its owner could still shrink is refused: reading it could kill the daemon."""
    memory = [SharedMemory(nbytes, seals=seals) for nbytes in SMALL.memory_nbytes]
    with Peer(shared.path) as peer:
        peer.hello()
        reply = peer.ask(describe(SMALL, 3, chunk_tokens=8), fds=[one.fd for one in memory])
        assert isinstance(reply, wire.Error)
        assert (reply.code, f"its seals are {seals:#x}" in reply.detail) == ("layout_refused", True), reply
    for one in memory:
        one.close()


def test_registering_twice_is_refused(shared: Daemon, registered: Peer, memory: list[SharedMemory]):
    """One session has one registration; the first one stays as it is."""
    right = describe(SMALL, 3, chunk_tokens=NAMESPACE.chunk_tokens)
    reply = registered.ask(right, fds=[one.fd for one in memory])
    assert isinstance(reply, wire.Error)
    assert (reply.code, "has registered its KV memory" in reply.detail) == ("already_registered", True)
    assert num_mappings(shared.pid, "kvist-refused") == len(memory)
    assert isinstance(registered.ask(wire.Store(4, b"1" * 16, b"", packed([[0, 1]]))), wire.StoreReply)


def test_a_null_block_is_refused(shared: Daemon, memory: list[SharedMemory]):
    """A block that the engine declared as none is not copied."""
    with Peer(shared.path) as peer:
        peer.hello()
        right = changed_group(null_block=3)(describe(SMALL, 2, chunk_tokens=8))
        assert isinstance(peer.ask(right, fds=[one.fd for one in memory]), wire.Registered)
        reply = peer.ask(wire.Store(3, NO, b"", packed([[2, 3]])))
        assert reply == wire.Error(3, "invalid_blocks", "block id 3 is the engine's null block")


def test_copies_need_a_registration(shared: Daemon):
    """A session without memory may ask, and is told that it can neither store nor load."""
    with Peer(shared.path) as peer:
        peer.hello()
        assert isinstance(peer.ask(wire.Lookup(2, NO)), wire.LookupReply)
        for request in (wire.Store(3, NO, b"", b""), wire.Retrieve(4, NO, 0, b"")):
            reply = peer.ask(request)
            assert isinstance(reply, wire.Error)
            assert (reply.code, "has not registered" in reply.detail) == ("not_registered", True)


def test_leases_are_not_for_everybody(shared: Daemon, connect: Connect):
    """A lease of another engine, one that was claimed, and one that went back are refused, each as what it is."""
    engine, stranger = connect(shared), connect(shared, engine_id="stranger")
    engine.store(PROMPT)
    found = engine.look_up(PROMPT)
    with pytest.raises(ForeignLease, match=rf"{found.lease.hex()} belongs to engine 'engine', not to 'stranger'"):
        stranger.load(PROMPT, found)
    assert engine.load(PROMPT, found) == []
    with pytest.raises((UnknownLease, LeaseClaimed), match=found.lease.hex()):
        engine.load(PROMPT, found)
    second = engine.look_up(PROMPT)
    engine.release(second.lease)
    engine.release(second.lease)
    with pytest.raises(UnknownLease, match=second.lease.hex()):
        engine.load(PROMPT, second)
    assert stranger.is_untouched()
    engine.client.close()
    stranger.client.close()


def test_a_lease_is_claimed_once(shared: Daemon, connect: Connect):
    """Of two loads under one lease, sent at once, the second is refused; the first is right."""
    engine = connect(shared)
    engine.store(PROMPT)
    found = engine.look_up(PROMPT)
    chunks = [engine.take_chunks(5) for _ in range(2)]
    first, second = [
        engine.client.submit(lambda number, chunks=chunks: wire.Retrieve(number, found.lease, 0, packed(chunks)))
        for chunks in chunks
    ]
    for pending in (first, second):
        engine.client.wait(pending)
    assert first.reply == wire.RetrieveReply(first.id, 5, [])
    assert isinstance(second.reply, wire.Error)
    assert second.reply.code in ("lease_claimed", "unknown_lease")
    assert [engine.map.read(engine.arrays, blocks) for blocks in chunks[0]] == [
        engine.content(digest) for digest in engine.digests(PROMPT)
    ]
    engine.client.close()


def test_descriptors_belong_to_registrations(shared: Daemon, memory: list[SharedMemory]):
    """Descriptors with any other request end the connection, and are closed."""
    with Peer(shared.path) as peer:
        peer.hello()
        peer.send(wire.Ping(2), fds=[memory[0].fd])
        reply = peer.reply()
        assert isinstance(reply, wire.Error)
        assert (reply.code, "1 descriptors with a Ping" in reply.detail) == ("protocol", True)
        assert peer.is_closed()


@pytest.mark.parametrize("num_claimed", [0, 1], ids=["none claimed", "one claimed"])
def test_descriptors_that_no_frame_owns_are_not_kept(shared: Daemon, memory: list[SharedMemory], num_claimed: int):
    """A frame that brings more descriptors than it claims is refused: they would pass for the next frame's."""
    with Peer(shared.path) as peer:
        peer.hello()
        peer.send(wire.Ping(2), fds=[memory[0].fd, memory[1].fd], num_fds=num_claimed)
        reply = peer.reply()
        while not isinstance(reply, wire.Error):
            assert reply == wire.Pong(2)
            reply = peer.reply()
        assert (reply.code, "descriptors" in reply.detail) == ("protocol", True), reply
        assert peer.is_closed()


def test_descriptors_do_not_pile_up(shared: Daemon, memory: list[SharedMemory]):
    """A peer that sends descriptors with half a frame, over and over, cannot use the daemon's up."""
    before = shared.num_fds()
    with Peer(shared.path) as peer:
        peer.hello()
        peer.send(encode(wire.Ping(2))[:9])
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            for _ in range(20):
                peer.send(b"\x83", fds=[memory[0].fd] * 250)
        with Peer(shared.path) as other:
            assert other.hello().ask(wire.Ping(8)) == wire.Pong(8)
        assert shared.num_fds() < before + 300


def test_half_a_frame_is_no_harm(shared: Daemon):
    """A peer that stops in mid-frame holds nobody up; the rest of its frame is taken when it comes."""
    frame = encode(wire.Ping(7))
    with Peer(shared.path) as peer:
        peer.hello()
        for part in (frame[:1], frame[1:5], frame[5:9]):
            peer.send(part)
            with Peer(shared.path) as other:
                assert other.hello().ask(wire.Ping(8)) == wire.Pong(8)
        peer.send(frame[9:])
        assert peer.reply() == wire.Pong(7)


def test_a_peer_that_does_not_read_is_let_go(shared: Daemon):
    """A peer that asks and asks and never reads an answer is closed at a bound; the others do not notice."""
    with Peer(shared.path) as peer:
        peer.hello()
        flood = encode(wire.Status(2)) * 2000
        is_open = True
        while is_open:
            try:
                peer.send(flood)
            except (BrokenPipeError, ConnectionResetError):
                is_open = False
            with Peer(shared.path) as other:
                assert other.hello().ask(wire.Ping(8)) == wire.Pong(8)


def test_requests_that_are_sent_together_are_answered_in_order(registered: Peer):
    """Many small requests in one go, right and wrong ones, get one answer each."""
    count = 500
    frames = [encode(wire.Ping(number) if number % 2 else wire.Lookup(number, b"x")) for number in range(count)]
    registered.send(b"".join(frames))
    replies = [registered.reply() for _ in range(count)]
    assert [reply.id for reply in replies] == list(range(count))
    assert {type(reply) for reply in replies[1::2]} == {wire.Pong}
    assert {type(reply) for reply in replies[::2]} == {wire.Error}


def test_the_socket_is_for_its_user_alone(shared: Daemon):
    """Nobody else may connect: the socket and its lock belong to the user, and to no one else's group."""
    assert os.stat(shared.path).st_mode & 0o777 == 0o600
    assert os.stat(f"{shared.path}.lock").st_mode & 0o777 == 0o600
