"""What tiers may do in a world, and what a lookup must say of them."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from kvist.model.keys import ChunkKey, Digest, chunk_keys
from kvist.model.rows import Row
from kvist.wire import messages as wire
from tests.support.kinds import Kind, needed
from tests.support.simulated import LEASE_TTL_S, SimulatedEngine

if TYPE_CHECKING:
    from tests.simulation.world import World


def key_of(key: bytes, row: Row) -> ChunkKey:
    return chunk_keys([Digest(key)], group=row.group, shard=row.shard)[0]


def check_loading(
    world: World, kind: Kind, wanted: list[bytes], reply: wire.LookupReply, num_promised: int, before: Counter[str]
) -> None:
    """All that a tier holds is on its way, unless there was no room; what is said to be on its way is."""
    end = reply.num_chunks + reply.num_loading
    for row in kind.ways if reply.num_loading else ():
        for number in needed(kind.needs[row.group], end):
            assert world.daemon.service._index.get(key_of(wanted[number], row)) is not None
    after = Counter(world.daemon.status().counters)
    after.subtract(before)
    assert after["chunks_asked"] == after["chunks_found"] + after["chunks_loading"] + after["chunks_missed"]
    assert after["promotions_refused"] or end == num_promised
    world.num_seen["loading"] += reply.num_loading > 0
    world.num_seen["no room to promote"] += after["promotions_refused"]


def is_promised(world: World, key: bytes, row: Row) -> bool:
    """Return whether a chunk can be read in the pool, or soon: a tier holds it, and no dead read is in its way."""
    index, promoter = world.daemon.service._index, world.daemon.service._tiers._promoter
    name = key_of(key, row)
    if world.is_sealed(key, row):
        return True
    is_held = any(tier.find([name]) != [None] for tier in world.daemon.tiers)
    return is_held and (index.get(name) is not None or name not in promoter._fetches)


def note_awaited(world: World, kind: Kind, engine: SimulatedEngine, wanted: list[bytes]) -> None:
    """Take note of who may wait for what from now on."""
    for row in kind.ways:
        for key in wanted:
            world.awaited.setdefault(key_of(key, row), {})[engine.session.id] = world.daemon.now + LEASE_TTL_S


def check_awaited(world: World) -> None:
    """What has not begun to be read is awaited by somebody who lives, or is needed by what builds on it."""
    alive = {engine.session.id for _, engine in world.engines}
    for fetch in world.daemon.service._tiers._promoter._queue:
        askers = world.awaited[fetch.chunk.key]
        is_awaited = any(session in alive and until > world.daemon.now for session, until in askers.items())
        assert is_awaited or any(fetch.chunk.children())


def step_tier(world: World) -> None:
    """Let a tier end its oldest read or write: well, or not."""
    for tier in world.daemon.tiers:
        tier.is_failing = world.chance.random() < 0.15
        world.num_seen["reads failed"] += tier.is_failing and bool(tier.reads)
        tier.step()
        tier.is_failing = False


def trouble_tier(world: World) -> None:
    """Let a tier lose some chunks, be off for a while, or fall behind."""
    for tier in world.daemon.tiers:
        lost = [key for key in tier.chunks if world.chance.random() < 0.05]
        tier.drop(lost)
        world.num_seen["lost by a tier"] += len(lost)
        tier.off_reason = "drive is gone" if world.chance.random() < 0.1 else ""
        tier.writes_max = world.chance.choice([0, 1000, 1000, 1000])
        tier.must_wait_for_parents = world.chance.random() < 0.3


def empty_pool(world: World) -> None:
    """Let everything go that may go, so that what comes back is read from a tier."""
    while world.daemon.service._index.evict() is not None:
        pass


def fill_tiers(world: World) -> None:
    """Let engines store for a while, and tiers write all of it."""
    for _ in range(40):
        world.store()
        world.daemon.settle()
        world.bury()
        world.take_in()
