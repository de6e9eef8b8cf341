"""Requests to a simulated service in one line each: chunks have names, and their bytes follow from these."""

from __future__ import annotations

import hashlib

from kvist.wire import messages as wire
from tests.support.engine import packed
from tests.support.layouts import Shape, nhd
from tests.support.memory import stamp
from tests.support.simulated import Sent, SimulatedDaemon, SimulatedEngine

NUM_SLOTS = 16
SHAPE = Shape(num_layers=2, num_blocks=32, block_tokens=2, num_heads=1, row_nbytes=8)
CHUNK_TOKENS = 4
LAID = nhd(SHAPE)


def connect(daemon: SimulatedDaemon, lay=nhd, **more) -> SimulatedEngine:
    """Return an engine whose memory is registered."""
    engine = SimulatedEngine(daemon, lay(SHAPE), chunk_tokens=CHUNK_TOKENS, **more)
    assert isinstance(answer(engine, engine.register()), wire.Registered)
    return engine


def answer(engine: SimulatedEngine, sent: Sent) -> wire.Reply:
    engine.daemon.settle()
    return next(reply for answered, reply in engine.replies if answered is sent)


def digests(*names: str) -> bytes:
    return b"".join(hashlib.sha256(name.encode()).digest()[:16] for name in names)


def content(engine: SimulatedEngine, name: str) -> bytes:
    return stamp(name.encode() + bytes([engine.shard]), engine.map.nbytes)


def send_store(engine: SimulatedEngine, *names: str, parent: str = "", tenant: str = ""):
    """Send a store of stamped chunks, and free their blocks when it is answered."""
    chunks = engine.take_chunks(len(names))
    for blocks, name in zip(chunks, names, strict=True):
        engine.map.write(engine.arrays, blocks, content(engine, name))
    above = digests(parent) if parent else b""
    return engine.send(lambda number: wire.Store(number, digests(*names), above, packed(chunks), tenant=tenant), chunks)


def store(engine: SimulatedEngine, *names: str, parent: str = "", tenant: str = "") -> wire.StoreReply:
    sent = send_store(engine, *names, parent=parent, tenant=tenant)
    reply = answer(engine, sent)
    engine.give_back(sent.chunks)
    assert isinstance(reply, wire.StoreReply)
    return reply


def look_up(engine: SimulatedEngine, *names: str, num_shards: int = 1) -> wire.LookupReply:
    needs = (wire.NeedSpec("full", num_shards=num_shards),)
    reply = engine.call(lambda number: wire.Lookup(number, digests(*names), needs))
    assert isinstance(reply, wire.LookupReply)
    return reply


def num_found(engine: SimulatedEngine, *names: str) -> int:
    """Return how many chunks a lookup finds, and give the lease back."""
    reply = look_up(engine, *names)
    engine.call(lambda number: wire.Release(number, reply.lease))
    return reply.num_chunks


def send_retrieve(engine: SimulatedEngine, lease: bytes, num: int, *, first: int = 0, **more):
    chunks = engine.take_chunks(num)
    return engine.send(lambda number: wire.Retrieve(number, lease, first, packed(chunks), **more), chunks)


def loaded(engine: SimulatedEngine, sent) -> list[bytes]:
    """Return what lies in the blocks of a retrieve."""
    return [engine.map.read(engine.arrays, blocks) for blocks in sent.chunks]


def refusal(engine: SimulatedEngine, sent) -> tuple[str, str]:
    reply = answer(engine, sent)
    assert isinstance(reply, wire.Error)
    return reply.code, reply.detail
