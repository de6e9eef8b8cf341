"""What lies in a tier is read when it is asked for, and served when it is there, right or not at all."""

from collections.abc import Iterator
from dataclasses import replace

import pytest

from kvist.tiering import staging
from kvist.tiering.controller import WritePolicy
from kvist.wire import messages as wire
from tests.support.memory_tier import MemoryTier
from tests.support.named import (
    NUM_SLOTS,
    answer,
    connect,
    content,
    digests,
    loaded,
    num_found,
    send_retrieve,
    send_store,
    store,
)
from tests.support.simulated import SimulatedDaemon, SimulatedEngine

A = ("a1", "a2", "a3", "a4")


@pytest.fixture
def tier() -> MemoryTier:
    return MemoryTier()


@pytest.fixture
def daemon(tier: MemoryTier) -> Iterator[SimulatedDaemon]:
    daemon = SimulatedDaemon(NUM_SLOTS, tiers=[tier])
    yield daemon
    daemon.close()


def ask(engine: SimulatedEngine, *names: str, chunk_us: int = 0) -> wire.LookupReply:
    """Look up, and let nothing else happen."""
    engine.send(lambda number: wire.Lookup(number, digests(*names), chunk_us=chunk_us))
    _, reply = engine.replies.pop()
    assert isinstance(reply, wire.LookupReply)
    return reply


def flood(engine: SimulatedEngine, prefix: str = "x") -> None:
    """Store something else, until nothing of before is left in the pool."""
    for number in range(NUM_SLOTS):
        store(engine, f"{prefix}{number}")


def restarted(tier: MemoryTier, *, num_slots: int = NUM_SLOTS) -> SimulatedEngine:
    """Return an engine of a daemon that has only the tier of the one before."""
    return connect(SimulatedDaemon(num_slots, tiers=[tier]))


def test_a_new_daemon_serves_what_the_old_one_has_written(engine: SimulatedEngine, tier: MemoryTier):
    """The first answer says at once how much is on its way, and takes no slot from anybody who could use it sooner.

    When it is there, the same question finds all of it, and every byte is the one that was stored.
    """
    store(engine, *A)
    later = restarted(tier)
    assert ask(later, *A, "a5") == wire.LookupReply(2, 0, num_loading=4)
    later.daemon.settle()
    found = ask(later, *A, "a5")
    assert (found.num_chunks, found.num_loading) == (4, 0)
    sent = send_retrieve(later, found.lease, 4)
    assert answer(later, sent) == wire.RetrieveReply(sent.request.id, 4, [])
    assert loaded(later, sent) == [content(later, name) for name in A]
    later.daemon.close()


def test_what_was_evicted_comes_back_behind_what_is_there(
    daemon: SimulatedDaemon, engine: SimulatedEngine, tier: MemoryTier
):
    """A prefix of which the pool has lost the end is found up to there, held, and promoted from there on."""
    store(engine, *A)
    for number in range(NUM_SLOTS - 2):
        store(engine, f"x{number}")
    found = ask(engine, *A)
    assert (found.num_chunks, found.num_loading) == (2, 2)
    assert daemon.status().num_pinned == 2
    daemon.settle()
    assert num_found(engine, *A) == 4
    assert tier.num_fetched.total() == 2


def test_a_chunk_is_read_once_for_all_who_ask(engine: SimulatedEngine, tier: MemoryTier):
    """However many engines ask while it is read, one fetch is enough, and the chunk is of use to each."""
    store(engine, *A)
    later = restarted(tier)
    other = connect(later.daemon, engine_id="y")
    for asking in (later, other, later, other):
        assert ask(asking, *A).num_loading == 4
    later.daemon.settle()
    assert num_found(later, *A) == num_found(other, *A) == 4
    assert set(tier.num_fetched.values()) == {1}
    later.daemon.close()


def test_parents_are_read_first(engine: SimulatedEngine, tier: MemoryTier):
    """After each read that has ended, the prefix is longer by one."""
    store(engine, *A)
    later = restarted(tier)
    ask(later, *A)
    for number in range(1, len(A) + 1):
        tier.step()
        while later.daemon.posted:
            later.daemon.deliver()
        found = ask(later, *A)
        assert (found.num_chunks, found.num_loading) == (number, 4 - number)
    later.daemon.close()


def test_a_read_that_fails_is_unreadable_at_every_instant(engine: SimulatedEngine, tier: MemoryTier):
    """While a damaged chunk is read, when it has been, and ever after: it is not found, nor what builds on it."""
    store(engine, *A)
    later = restarted(tier)
    assert ask(later, *A).num_loading == 4
    tier.is_failing = True
    tier.step()
    tier.is_failing = False
    assert ask(later, *A).num_chunks == 0
    while later.daemon.is_busy:
        later.daemon.deliver()
        assert ask(later, *A).num_chunks == 0
        tier.step()
        assert ask(later, *A).num_chunks == 0
    status = later.daemon.status()
    assert (status.num_sealed, status.num_reserved, status.pool_used_nbytes) == (0, 0, 0)
    assert status.counters["promotions_failed"] >= 1
    later.daemon.close()


def test_a_tier_that_hands_out_another_chunk_is_not_believed(engine: SimulatedEngine, tier: MemoryTier):
    """Whatever a tier calls verified, what is published is the chunk that was asked for, behind its parent."""
    store(engine, "a1", "a2")
    first, second = (stored for stored, _ in tier.chunks.values())
    for told in (second, replace(first, parent=second.key), replace(first, slot_nbytes=1), replace(first, nbytes=0)):
        later = restarted(tier)
        assert ask(later, "a1").num_loading == 1
        *_, on_done = tier.reads.popleft()
        on_done(told)
        later.daemon.settle()
        assert later.daemon.status().num_sealed == 0
        later.daemon.close()


def test_what_proves_wrong_while_it_is_written_is_not_kept(engine: SimulatedEngine, tier: MemoryTier):
    """A chunk that an engine finds wrong while a tier writes it is not in the tier afterwards."""
    store_without_settling(engine, *A)
    engine.daemon.pool.bytes[engine.daemon.service._index.match([tier.writes[1][0].key])[0].slot_offset] ^= 1
    sent = send_retrieve(engine, ask(engine, *A).lease, 4)
    while engine.daemon.executor.is_busy or engine.daemon.posted:
        engine.daemon.executor.step()
        engine.daemon.deliver()
    assert sent not in engine.sent.values()
    engine.daemon.settle()
    assert [key[:16] for key in tier.chunks] == [digests("a1")]


def test_what_proves_wrong_at_an_engine_is_dropped_everywhere(
    daemon: SimulatedDaemon, engine: SimulatedEngine, tier: MemoryTier
):
    """A byte that changes in the pool costs the chunk in every tier, with what builds on it, and nothing before it."""
    store(engine, *A)
    chunk = daemon.service._index.match([key for key in tier.chunks if key[:16] == digests("a2")])[0]
    daemon.pool.bytes[chunk.slot_offset] ^= 1
    found = ask(engine, *A)
    sent = send_retrieve(engine, found.lease, 4)
    reply = answer(engine, sent)
    assert isinstance(reply, wire.RetrieveReply)
    assert reply.failed == [1]
    assert [key[:16] for key in tier.chunks] == [digests("a1")]
    assert ask(engine, *A).num_loading == 0


@pytest.mark.parametrize(("chunk_us", "num_loading"), [(0, 4), (10**6, 4), (900, 0)])
def test_what_is_computed_sooner_is_not_read(
    engine: SimulatedEngine, tier: MemoryTier, chunk_us: int, num_loading: int
):
    """An engine that computes a chunk in less time than reading it takes is given what is there, and nothing more."""
    store(engine, *A)
    tier.read_rate = engine.map.nbytes * 1000.0
    later = restarted(tier)
    reply = ask(later, *A, chunk_us=chunk_us)
    assert reply.num_loading == num_loading
    assert reply.loading_ms == num_loading
    later.daemon.settle()
    assert tier.num_fetched.total() == num_loading
    later.daemon.close()


def test_a_queue_of_reads_counts(engine: SimulatedEngine, tier: MemoryTier):
    """What others wait for is before what is asked for now: a prefix that would wait too long is not promoted."""
    store(engine, *A)
    store(engine, "b1")
    tier.read_rate = engine.map.nbytes * 1000.0
    later = restarted(tier)
    assert ask(later, *A, chunk_us=2000).num_loading == 4
    assert ask(later, "b1", chunk_us=2000).num_loading == 0
    assert ask(later, "b1", chunk_us=6000).num_loading == 1
    later.daemon.close()


def test_no_room_is_a_shorter_hit(tier: MemoryTier):
    """A prefix that does not fit is promoted as far as it does, and no chunk of it is evicted for another one."""
    names = [f"a{number}" for number in range(12)]
    store(restarted(tier), *names)
    later = restarted(tier, num_slots=8)
    assert ask(later, *names).num_loading == 8
    later.daemon.settle()
    found = ask(later, *names)
    assert (found.num_chunks, found.num_loading) == (8, 0)
    later.daemon.close()


def test_what_is_longest_unused_makes_room(engine: SimulatedEngine, tier: MemoryTier):
    """A prefix that comes back takes the slots of what is longest unused, from its end; what is pinned stays."""
    store(engine, *A)
    later = restarted(tier, num_slots=8)
    store(later, "b1", "b2", "b3")
    store(later, "c1", "c2", "c3")
    held = ask(later, "b1", "b2")
    assert ask(later, *A).num_loading == 4
    later.daemon.settle()
    tier.off_reason = "out of the way"
    assert (num_found(later, *A), num_found(later, "b1", "b2", "b3"), num_found(later, "c1", "c2")) == (4, 2, 2)
    assert held.num_chunks == 2
    later.daemon.close()


def test_one_fetch_at_a_time_also_of_what_nobody_wants_any_more(engine: SimulatedEngine, tier: MemoryTier):
    """A chunk whose parent failed is not read again before its first read has ended."""
    store(engine, *A)
    content_of = dict(tier.chunks)
    later = restarted(tier)
    assert ask(later, *A).num_loading == 4
    *_, on_done = tier.reads.popleft()
    on_done(None)
    later.daemon.deliver()
    assert tier.chunks == content_of
    assert ask(later, *A).num_loading == 1
    later.daemon.settle()
    assert ask(later, *A).num_loading == 3
    later.daemon.settle()
    assert num_found(later, *A) == 4
    later.daemon.close()


def test_all_that_is_stored_is_written(daemon: SimulatedDaemon, engine: SimulatedEngine, tier: MemoryTier):
    """Each chunk is written once, parents first, and pinned only while that lasts."""
    tier.is_manual = True
    store(engine, *A)
    store(engine, *A)
    assert [key[:16] for key in tier.offered] == [digests(name) for name in A]
    assert [chunk for chunk, _ in tier.chunks.values() if chunk.nbytes != engine.map.nbytes] == []
    status = daemon.status()
    assert status.num_pinned == 0
    assert status.counters["chunks_demoted"] == 4
    assert status.counters["bytes_demoted"] == 4 * engine.map.nbytes


def test_on_second_use_the_whole_prefix_is_written(tier: MemoryTier):
    """What is used once is never written; what is found, or stored again, is, with what it hangs on."""
    daemon = SimulatedDaemon(NUM_SLOTS, tiers=[tier], policy=WritePolicy.SECOND_USE)
    engine = connect(daemon)
    store(engine, *A)
    store(engine, "b1", "b2")
    assert not tier.offered
    assert num_found(engine, "a1", "a2") == 2
    assert [key[:16] for key in tier.offered] == [digests("a1"), digests("a2")]
    store(engine, "b2", parent="b1")
    assert [key[:16] for key in tier.offered[2:]] == [digests("b1"), digests("b2")]
    daemon.close()


def test_what_came_from_a_tier_is_not_offered_to_it_again(engine: SimulatedEngine, tier: MemoryTier):
    """Reading, finding and loading a chunk that a tier holds writes nothing."""
    store(engine, *A)
    later = restarted(tier)
    ask(later, *A)
    later.daemon.settle()
    assert num_found(later, *A) == 4
    assert len(tier.offered) == 4
    later.daemon.close()


def test_a_tier_that_falls_behind_gets_less(daemon: SimulatedDaemon, engine: SimulatedEngine, tier: MemoryTier):
    """What a tier does not take is served from the pool as before, and offered again at its next use."""
    tier.writes_max = 0
    store(engine, *A)
    assert not tier.offered
    assert daemon.status().counters["demotions_refused"] == 4
    tier.writes_max = 100
    assert num_found(engine, *A) == 4
    assert len(tier.offered) == 4


@pytest.fixture
def two_at_once(monkeypatch: pytest.MonkeyPatch, engine: SimulatedEngine) -> None:
    """Let two chunks be in flight in each direction."""
    monkeypatch.setattr(staging, "IN_FLIGHT_NBYTES_MAX", 2 * engine.map.nbytes)


@pytest.mark.usefixtures("two_at_once")
def test_what_is_in_flight_is_bounded(engine: SimulatedEngine, tier: MemoryTier):
    """However much is stored or asked for, a tier is given no more at once than there is staging for."""
    store_without_settling(engine, *A)
    assert (len(tier.writes), engine.daemon.status().num_pinned) == (2, 2)
    engine.daemon.settle()
    later = restarted(tier)
    assert ask(later, *A).num_loading == 4
    assert len(tier.reads) == 2
    later.daemon.settle()
    assert num_found(later, *A) == 4
    later.daemon.close()


@pytest.mark.usefixtures("two_at_once")
def test_what_is_evicted_before_its_turn_is_passed_over(
    daemon: SimulatedDaemon, engine: SimulatedEngine, tier: MemoryTier
):
    """Chunks that wait to be written hold no slot; those being written do, and their bytes are the stored ones."""
    sent = store_without_settling(engine, *A)
    assert sent not in engine.sent.values()
    assert daemon.status().num_pinned == 2
    for number in range(3 * NUM_SLOTS):
        store_without_settling(engine, f"x{number}")
    daemon.settle()
    assert daemon.status().counters["demotions_passed_over"] > 0
    assert all(
        content(engine, name) == tier.chunks[key][1] for name in A for key in tier.chunks if key[:16] == digests(name)
    )


def store_without_settling(engine: SimulatedEngine, *names: str):
    """Store while the tier does nothing."""
    sent = send_store(engine, *names)
    while engine.daemon.executor.is_busy or engine.daemon.posted:
        engine.daemon.executor.step()
        engine.daemon.deliver()
    engine.give_back(sent.chunks)
    return sent


def test_a_tier_that_is_off_is_as_good_as_none(engine: SimulatedEngine, tier: MemoryTier):
    """It finds nothing and takes nothing, serving goes on, and the status says why."""
    store(engine, *A)
    tier.off_reason = "Input/output error on /nvme0"
    store(engine, "b1")
    assert num_found(engine, *A, "a5") == 4
    (status,) = engine.daemon.status().tiers
    assert (status.name, status.off_reason) == ("memory", "Input/output error on /nvme0")


def test_each_chunk_that_is_asked_for_is_counted_once(daemon: SimulatedDaemon, engine: SimulatedEngine):
    """Found, on its way or missed: these are all that were asked for."""
    store(engine, *A)
    flood(engine)
    ask(engine, *A, "a5")
    daemon.settle()
    ask(engine, *A, "a5")
    counters = daemon.status().counters
    assert (counters["chunks_asked"], counters["chunks_found"]) == (10, 4)
    assert (counters["chunks_loading"], counters["chunks_missed"]) == (4, 2)


def test_a_lookup_is_a_use_in_the_tier_as_well(engine: SimulatedEngine, tier: MemoryTier):
    """Whether the pool or the tier serves it, the tier is told of the whole prefix at once, in its order."""
    store(engine, *A)
    num_found(engine, *A)
    assert [key[:16] for key in tier.used] == [digests(name) for name in A]
    later = restarted(tier)
    ask(later, *A)
    assert [key[:16] for key in tier.used[4:]] == [digests(name) for name in A]
    later.daemon.close()


@pytest.mark.usefixtures("two_at_once")
def test_a_stop_writes_what_was_stored_and_reads_nothing_more(
    daemon: SimulatedDaemon, engine: SimulatedEngine, tier: MemoryTier
):
    """Once the daemon is stopping, writes that wait are still made, and reads that have not begun are not."""
    store(engine, *A)
    later = restarted(tier)
    store_without_settling(later, "b1", "b2")
    ask(later, *A)
    later.daemon.service.begin_draining()
    num_begun = tier.num_fetched.total()
    later.daemon.settle()
    assert tier.num_fetched.total() == num_begun < 4
    assert {digests("b1"), digests("b2")} <= {key[:16] for key in tier.chunks}
    later.daemon.close()


def test_a_negative_cost_is_refused(engine: SimulatedEngine):
    """Computing takes time."""
    engine.send(lambda number: wire.Lookup(number, digests(*A), chunk_us=-1))
    _, reply = engine.replies.pop()
    assert isinstance(reply, wire.Error)
    assert reply.code == "malformed"


def test_a_promotion_takes_from_its_first_lookup_to_its_place(daemon: SimulatedDaemon, engine: SimulatedEngine):
    """Each chunk that comes from a tier is counted once, with the time that its first asker had to wait."""
    store(engine, *A)
    daemon.settle()
    flood(engine)
    before = sum(daemon.status().histograms["promotion"].counts)
    ask(engine, *A)
    daemon.now += 0.2
    ask(engine, *A)
    daemon.settle()
    found = daemon.status().histograms["promotion"]
    num_promoted = daemon.status().counters["chunks_promoted"]
    assert num_promoted >= len(A)
    assert sum(found.counts) - before == num_promoted
    assert found.counts[found.bounds_s.index(0.25)] == num_promoted
