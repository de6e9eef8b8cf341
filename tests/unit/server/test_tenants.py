"""Tenants of one daemon: what each may have, what others see of it, and how it goes."""

from __future__ import annotations

import os

import msgspec
import pytest

from kvist.model.owners import Quotas
from kvist.storage.slots import SLOT_ALIGNMENT
from kvist.wire import messages as wire
from kvist.wire.codec import encode
from tests.support.memory_tier import MemoryTier
from tests.support.named import NUM_SLOTS, answer, connect, digests, look_up, num_found, refusal, send_store, store
from tests.support.simulated import SimulatedDaemon, SimulatedEngine

A = ("a1", "a2", "a3", "a4")
B = ("b1", "b2", "b3", "b4")


def purge(engine: SimulatedEngine, tenant: str | None = None, model: str | None = None) -> wire.PurgeReply:
    reply = engine.call(lambda number: wire.Purge(number, tenant, model))
    assert isinstance(reply, wire.PurgeReply)
    return msgspec.structs.replace(reply, id=0)


@pytest.fixture
def bounded() -> SimulatedEngine:
    """Return an engine of a daemon on which tenant ``a`` may have four slots, and others with a name six."""
    quotas = Quotas({"a": 4 * SLOT_ALIGNMENT, "*": 6 * SLOT_ALIGNMENT})
    return connect(SimulatedDaemon(NUM_SLOTS, quotas=quotas))


def test_a_quota_is_kept_by_evicting_ones_own(bounded: SimulatedEngine):
    """A tenant at its quota loses its longest unused leaves for what it stores, and nobody else loses anything."""
    store(bounded, *B, tenant="b")
    assert store(bounded, *A, tenant="a").num_stored == 4
    assert msgspec.structs.replace(store(bounded, "x1", "x2", tenant="a"), id=0) == wire.StoreReply(0, 2, 0)
    assert (num_found(bounded, *A), num_found(bounded, "x1", "x2"), num_found(bounded, *B)) == (2, 2, 4)
    assert store(bounded, *(f"y{number}" for number in range(8))).num_stored == 8
    bounded.daemon.close()


def test_a_store_beyond_the_quota_is_refused_when_all_is_pinned(bounded: SimulatedEngine):
    """What the quota has room for is stored; the rest is refused for the quota, and others are not."""
    store(bounded, *A[:3], tenant="a")
    lease = look_up(bounded, *A[:3]).lease
    assert msgspec.structs.replace(store(bounded, "x1", "x2", tenant="a"), id=0) == wire.StoreReply(
        0, 1, 0, 1, "tenant quota"
    )
    assert store(bounded, *B, tenant="b").num_stored == 4
    bounded.call(lambda number: wire.Release(number, lease))
    assert store(bounded, "x1", "x2", tenant="a").num_stored == 1
    bounded.daemon.close()


def test_one_who_floods_leaves_others_their_part():
    """Without quotas: a tenant that fills the pool again and again takes from itself what others have in use."""
    engine = connect(SimulatedDaemon(NUM_SLOTS))
    store(engine, *B, tenant="b")
    for number in range(5 * NUM_SLOTS):
        store(engine, f"x{number}", tenant="a")
    assert num_found(engine, *B) == 4
    engine.daemon.close()


def test_what_a_tier_brings_counts_for_its_owner():
    """A promotion takes from its owner's quota, and is refused where all of that is pinned."""
    tier = MemoryTier(is_manual=False)
    before = connect(SimulatedDaemon(NUM_SLOTS, tiers=[tier]))
    store(before, *A, tenant="a")
    before.daemon.settle()
    before.daemon.close()
    later = connect(SimulatedDaemon(NUM_SLOTS, tiers=[tier], quotas=Quotas({"a": 3 * SLOT_ALIGNMENT})))
    assert num_found(later, *A) == 0
    later.daemon.settle()
    (tenant,) = later.daemon.status().tenants
    assert (tenant.name, tenant.num_chunks, tenant.quota_nbytes) == ("a", 3, 3 * SLOT_ALIGNMENT)
    assert num_found(later, *A) == 3
    assert later.daemon.status().counters["promotions_refused"] > 0
    later.daemon.close()


def test_the_status_names_the_largest_tenants():
    """At most 64 lines, the largest first, and one for all others; together they are all that is taken."""
    engine = connect(SimulatedDaemon(80))
    store(engine, *A, tenant="big")
    for number in range(70):
        store(engine, f"x{number}", tenant=f"tenant {number}")
    status = engine.daemon.status()
    lines = status.tenants
    assert (len(lines), lines[0].name, lines[0].num_chunks, lines[-1].name) == (65, "big", 4, "*")
    assert lines[-1].num_chunks == 71 - 64
    assert sum(line.nbytes for line in lines) == status.pool_used_nbytes
    for number in range(40):
        store(engine, f"y{number}", tenant="late")
    status = engine.daemon.status()
    assert sum(line.num_evicted for line in status.tenants) == status.counters["chunks_evicted"] > 0
    assert sum(line.nbytes for line in status.tenants) == status.pool_used_nbytes
    engine.daemon.close()


def test_another_tenants_chunks_are_as_if_never_stored(daemon: SimulatedDaemon, engine: SimulatedEngine):
    """A lookup of what another tenant has, under one's own digests, gets the bytes of one for what nobody has."""
    store(engine, *A, tenant="a")
    other = connect(daemon, engine_id="y")
    replies = []
    for names in (tuple(f"tenant b/{name}" for name in A), ("never", "stored", "by", "anybody")):
        sent = other.send(lambda number, names=names: wire.Lookup(number, digests(*names), wants_places=True))
        _, reply = other.replies.pop()
        replies.append(encode(msgspec.structs.replace(reply, id=sent.request.id - len(replies))))
    assert replies[0] == replies[1]


@pytest.mark.parametrize(
    ("names", "is_dropped"),
    [(("a", None), "aa.."), ((None, "m"), "a.b."), (("a", "m"), "a..."), (("", None), "...."), ((None, None), "aabb")],
    ids=str,
)
def test_a_purge_takes_what_was_named(names: tuple[str | None, str | None], is_dropped: str):
    """Of a tenant, of a model, of both, or everything, in the pool and in the tier; all else stays."""
    tier = MemoryTier(is_manual=False)
    daemon = SimulatedDaemon(NUM_SLOTS, tiers=[tier])
    one, two = connect(daemon, model="m"), connect(daemon, engine_id="y", model="n")
    prompts = [(one, "a", "p1"), (two, "a", "p2"), (one, "b", "p3"), (two, "b", "p4")]
    for engine, tenant, name in prompts:
        store(engine, name, f"{name}/2", tenant=tenant)
    daemon.settle()
    num = 2 * sum(letter != "." for letter in is_dropped)
    reply = purge(one, *names)
    assert reply == wire.PurgeReply(0, num, num * SLOT_ALIGNMENT, 0, {"memory": num} if num else {})
    found = [num_found(engine, name, f"{name}/2") for engine, _, name in prompts]
    daemon.settle()
    assert found == [2 if letter == "." else 0 for letter in is_dropped]
    assert [num_found(engine, name, f"{name}/2") for engine, _, name in prompts] == found
    daemon.close()


def test_a_purge_leaves_what_is_held(daemon: SimulatedDaemon, engine: SimulatedEngine):
    """What a lease holds, what is above it, and what is being written stays and is counted; once let go, it goes."""
    store(engine, *A, tenant="a")
    lease = look_up(engine, *A[:2]).lease
    sent = send_store(engine, "x1", tenant="a")
    engine.send(lambda number: wire.Purge(number, "a"))
    while not any(isinstance(reply, wire.PurgeReply) for _, reply in engine.replies):
        daemon.deliver()
    reply = engine.replies.pop()[1]
    assert isinstance(reply, wire.PurgeReply)
    assert (reply.num_chunks, reply.nbytes, reply.num_kept) == (2, 2 * SLOT_ALIGNMENT, 3)
    assert isinstance(answer(engine, sent), wire.StoreReply)
    assert (num_found(engine, *A), num_found(engine, "x1")) == (2, 1)
    engine.call(lambda number: wire.Release(number, lease))
    assert purge(engine, "a") == wire.PurgeReply(0, 3, 3 * SLOT_ALIGNMENT, 0)
    assert (num_found(engine, *A), num_found(engine, "x1"), daemon.status().pool_used_nbytes) == (0, 0, 0)


def test_a_large_purge_is_done_in_slices():
    """Requests are answered between two slices, and the purge once, when all is gone."""
    engine = connect(SimulatedDaemon(2000))
    for number in range(100):
        store(engine, *(f"{number}/{part}" for part in range(12)), tenant="a")
    engine.replies.clear()
    engine.send(lambda number: wire.Purge(number, "a"))
    num_turns = 0
    while not engine.replies:
        engine.daemon.deliver()
        num_turns += 1
        if not engine.replies:
            assert isinstance(engine.daemon.service.handle(engine.session, wire.Ping(10**6), ()), wire.Pong)
    reply = engine.replies.pop()[1]
    assert isinstance(reply, wire.PurgeReply)
    assert (reply.num_chunks, num_turns) == (1200, 1200 // 256 + 2)
    assert engine.daemon.status().num_sealed == engine.session.num_unanswered == 0
    engine.daemon.close()


def test_who_is_lost_while_a_purge_runs_gets_no_answer(daemon: SimulatedDaemon, engine: SimulatedEngine):
    """The purge is done all the same."""
    store(engine, *A)
    engine.send(wire.Purge)
    engine.end()
    daemon.settle()
    assert (daemon.status().num_sealed, daemon.status().num_sessions) == (0, 0)


@pytest.mark.parametrize("uid", [os.getuid() + 1, 12345])
def test_only_the_daemons_user_and_root_may_purge(daemon: SimulatedDaemon, engine: SimulatedEngine, uid: int):
    """Another user who may connect is refused, and everything stays."""
    store(engine, *A)
    stranger = connect(daemon, engine_id="y", uid=uid)
    code, detail = refusal(stranger, stranger.send(wire.Purge))
    assert (code, f"user {uid} may not purge" in detail) == ("not_permitted", True)
    assert num_found(engine, *A) == 4
    root = connect(daemon, engine_id="z", uid=0)
    assert purge(root).num_chunks == 4


@pytest.mark.parametrize("tenant", ["*", "x" * 257], ids=["star", "long"])
def test_a_name_that_no_tenant_can_have_is_refused(engine: SimulatedEngine, tenant: str):
    """In a store and in a purge; nothing has changed."""
    assert refusal(engine, send_store(engine, "a1", tenant=tenant))[0] == "malformed"
    assert refusal(engine, engine.send(lambda number: wire.Purge(number, tenant)))[0] == "malformed"
