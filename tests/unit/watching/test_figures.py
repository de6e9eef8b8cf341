"""Figures and columns, worked out of made-up samples."""

import itertools
import math

from hypothesis import given
from hypothesis import strategies as st

from kvist.watching.differences import BEYOND, Durations, counter, durations, gained, per_second, since
from kvist.watching.figures import Tokens, notices, work_out
from kvist.web.series import POINTS_MAX, columns
from kvist.wire import messages as wire
from tests.support.samples import BOUNDS_S, EPOCH, MODEL, histogram, sample, session

ASKED = ("tokens_found", "tokens_loading", "tokens_missed")
DISK = wire.TierStatus("disk", 4000, 1000, 7, 300.0, 200.0, 0, 0)


def asked(found: int, loading: int, missed: int) -> dict[str, int]:
    return {**dict(zip(ASKED, (found, loading, missed), strict=True)), "tokens_asked": found + loading + missed}


def test_no_sample_gives_no_figures():
    """Before the daemon was seen there are neither figures nor points, and the notice says why."""
    assert work_out([]) is None
    assert columns([]).at == []
    assert notices(None, "nobody is there") == ["The daemon does not answer: nobody is there"]


def test_one_sample_gives_totals_and_no_rates():
    """What takes two samples to know is None, not 0; what has been counted since the start is there."""
    figures = work_out([sample(5, {**asked(6, 2, 2), "bytes_loaded": 500, "saved_us": 2_500_000})])
    assert (figures.total, figures.total.hit_rate, figures.saved_s) == (Tokens(6, 2, 2), 0.8, 2.5)
    assert (figures.lately, figures.lately.hit_rate, figures.window_s) == (Tokens(0, 0, 0), None, 0.0)
    assert [(flow.per_s, flow.share, flow.total_nbytes) for flow in figures.flows] == [
        (None, None, 500),
        (None, None, 0),
    ]


def test_the_hit_rate_is_of_the_window_and_of_the_start():
    """Lately is what was asked for in the last five minutes; in total, all that the daemon has counted."""
    samples = [sample(0, asked(0, 0, 90)), sample(100, asked(0, 0, 100)), sample(400, asked(60, 20, 120))]
    figures = work_out(samples)
    assert (figures.window_s, figures.lately, figures.lately.hit_rate) == (300.0, Tokens(60, 20, 20), 0.8)
    assert (figures.total, figures.total.asked, figures.total.hit_rate) == (Tokens(60, 20, 120), 200, 0.4)


def test_engines_that_do_not_tell_tokens_are_counted_in_chunks():
    """Where no lookup had tokens, the unit is chunks; where nothing was asked for yet, it is tokens."""
    figures = work_out([sample(0, {"chunks_asked": 4, "chunks_found": 1, "chunks_missed": 3})])
    assert (figures.unit, figures.total) == ("chunks", Tokens(1, 0, 3))
    assert work_out([sample(0)]).unit == "tokens"


def test_rates_are_of_the_last_seconds_by_the_daemons_clock():
    """A clock that is set between two samples changes no rate."""
    counted = [{"bytes_loaded": nbytes, "bytes_stored": 10 * nbytes} for nbytes in (0, 4000, 8000)]
    samples = [sample(0, counted[0]), sample(90, counted[1]), sample(94, counted[2], at=98)]
    loads, stores = work_out(samples).flows
    assert (loads.per_s, loads.share, stores.per_s, stores.share) == (1000.0, 0.001, 10_000.0, 0.01)


def test_tiers_have_their_own_flows_and_ceilings():
    """Reads and writes of tiers are held against what was measured of the tiers that serve."""
    off = wire.TierStatus("old", 10, 0, 0, 1e9, 1e9, 0, 0, off_reason="gone")
    before, after = {"bytes_promoted": 0}, {"bytes_promoted": 600, "bytes_demoted": 100}
    figures = work_out([sample(0, before, tiers=[DISK, off]), sample(4, after, tiers=[DISK, off])])
    assert [(flow.name, flow.per_s, flow.ceiling) for flow in figures.flows[2:]] == [
        ("tier reads", 150.0, 300.0), ("tier writes", 25.0, 200.0)
    ]  # fmt: skip
    assert [(fill.name, fill.share, fill.off_reason) for fill in figures.fills] == [
        ("pool", 0.25, ""), ("disk", 0.25, ""), ("old", 0.0, "gone")
    ]  # fmt: skip


def test_a_restart_gives_no_negative_figure():
    """After a restart, what the new daemon has counted is counted, and rates are those of the new one alone."""
    disks = [wire.TierStatus("disk", 1, 0, 0, 0, 0, 0, 0, counters={"chunks_evicted": num}) for num in (50, 1, 3)]
    samples = [
        sample(1000, {**asked(900, 0, 100), "bytes_loaded": 10**9}, tiers=[disks[0]]),
        sample(1, {**asked(1, 0, 2), "bytes_loaded": 10}, at=1004, boot_id="second", tiers=[disks[1]]),
        sample(3, {**asked(4, 1, 4), "bytes_loaded": 50}, at=1006, boot_id="second", tiers=[disks[2]]),
    ]
    figures = work_out(samples)
    assert (figures.lately, figures.total) == (Tokens(4, 1, 4), Tokens(4, 1, 4))
    assert (figures.flows[0].per_s, figures.fills[1].evicted_per_s) == (20.0, 1.0)
    history = columns(samples)
    assert (history.loads, history.pool) == ([None, 20.0], [None, 1.5])


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 100)), min_size=1, max_size=30))
def test_no_difference_is_ever_negative(told):
    """Whatever counters and boots come one after another, nothing is lost twice and no rate falls below 0."""
    samples = [sample(at, {"x": num}, boot_id=str(boot)) for at, (boot, num) in enumerate(told)]
    assert gained(samples, counter("x")) >= 0
    assert (per_second(samples, counter("x")) or 0) >= 0


@given(st.lists(st.integers(0, 100), min_size=2, max_size=30), st.data())
def test_differences_add_up(steps, data):
    """What was gained over a whole is what was gained over its two parts."""
    totals = [sum(steps[: at + 1]) for at in range(len(steps))]
    samples = [sample(at, {"x": total}) for at, total in enumerate(totals)]
    cut = data.draw(st.integers(0, len(samples) - 1))
    parts = gained(samples[: cut + 1], counter("x")) + gained(samples[cut:], counter("x"))
    assert gained(samples, counter("x")) == parts == totals[-1] - totals[0]


@given(st.lists(st.floats(1e-6, 1.0), min_size=1, max_size=60), st.sampled_from([0.5, 0.95, 0.99, 1.0]))
def test_a_quantile_is_the_bound_of_its_bucket(seconds, share):
    """At least the share stayed within the bound, and not within the one before."""
    edges = [0.0, *BOUNDS_S, math.inf]
    counts = [sum(low < one <= high for one in seconds) for low, high in itertools.pairwise(edges)]
    bound = Durations(BOUNDS_S, tuple(counts)).quantile(share)
    needed = math.ceil(share * len(seconds))
    assert sum(one <= bound for one in seconds) >= needed
    assert sum(one <= edges[edges.index(bound) - 1] for one in seconds) < needed


def test_durations_are_those_of_the_window():
    """What took long before the window began does not count; what is beyond all bounds is said to be."""
    samples = [
        sample(0, histograms={"lookup": histogram(0, 0, 0, 90)}),
        sample(10, histograms={"lookup": histogram(0, 0, 0, 100)}),
        sample(305, histograms={"lookup": histogram(5, 4, 1, 100), "load": histogram(0, 0, 0, 1)}),
    ]
    figures = work_out(samples)
    assert figures.lookup.counts == (5, 4, 1, 0)
    assert [figures.lookup.quantile(share) for share in (0.5, 0.9, 0.95)] == [1e-3, 10e-3, 0.1]
    assert (figures.load.quantile(0.5), figures.store.quantile(0.5)) == (BEYOND, None)


def test_buckets_of_another_daemon_are_not_mixed():
    """A daemon that was updated may have other bounds: then only what it has counted itself is counted."""
    old = wire.HistogramStatus([1.0], [70, 80], 0.0)
    samples = [
        sample(9, histograms={"load": old}),
        sample(1, at=10, boot_id="b", histograms={"load": histogram(1, 2, 3, 4)}),
    ]
    assert durations(samples, "load").counts == (1, 2, 3, 4)


def test_each_minute_has_what_came_in_it():
    """The newest minute is first; together they have counted all, once."""
    samples = [sample(at, histograms={"lookup": histogram(at, 0, 0, 0)}) for at in range(30, 150, 5)]
    minutes = work_out(samples).minutes
    assert [minute.began_at - EPOCH for minute in minutes] == [120.0, 60.0, 0.0]
    assert [minute.lookup.num for minute in minutes] == [30, 60, 25]


def test_worries_add_up():
    """A worry sums the counters behind it, of the daemon and of its tiers, in all and lately."""
    disk = wire.TierStatus("disk", 1, 0, 0, 0, 0, 0, 0, counters={"chunks_damaged": 2})
    before = {"chunks_corrupt": 1, "refused_overloaded": 3}
    after = {"chunks_corrupt": 1, "refused_overloaded": 4, "refused_pool_full": 5, "deadlines_missed": 6}
    worries = work_out([sample(0, before, tiers=[disk]), sample(1, after, tiers=[disk])]).worries
    told = {worry.name: (worry.total, worry.lately) for worry in worries}
    assert told["checksum failures"] == (3, 0)
    assert told["requests refused"] == (9, 6)
    assert told["deadlines missed"] == (6, 6)


def test_processes_of_one_engine_are_one():
    """What its scheduler has looked up and its workers have moved is the engine's; tools are no engines."""
    row = wire.SessionRow(0, 0, "full", 16, None, 2, 64, 4096)
    looked = {"lookups": 3, "chunks_asked": 10, "chunks_found": 4, "chunks_loading": 1, "chunks_missed": 5}
    moved = {"chunks_loaded": 5, "chunks_stored": 2}
    workers = [
        session(number, lane="engine", memory=f"cuda:{number}", rows=[row], texts=["same"], counters=moved)
        for number in (2, 3)
    ]
    told = [session(1, serves=MODEL, counters=looked), *workers, session(9, engine_id="kvist-web")]
    figures = work_out([sample(0, sessions=told)])
    (engine,) = figures.engines
    assert (engine.model, engine.chunk_tokens, engine.lanes, engine.texts) == ("model", 16, ("engine",), ("same",))
    assert (engine.memory, [one.pid for one in engine.processes]) == (("cuda:2", "cuda:3"), [101, 102, 103])
    assert (engine.num_lookups, engine.chunks.hit_rate, engine.num_loaded, engine.num_stored) == (3, 0.5, 10, 4)
    assert [one.id for one in figures.others] == [9]


def test_what_needs_a_look_is_said():
    """A stop, a tier that is off and bytes that were wrong are told, with their reasons and numbers."""
    off = wire.TierStatus("disk", 1, 0, 0, 0, 0, 0, 0, off_reason="no space left")
    assert notices(work_out([sample(0, tiers=[DISK])]), "") == []
    told = notices(work_out([sample(0, {"chunks_corrupt": 3}, tiers=[off], is_draining=True)]), "gone")
    assert len(told) == 4
    for text, word in zip(told, ("gone", "stopping", "no space left", "3 chunks"), strict=True):
        assert word in text


@given(st.lists(st.sampled_from([-30.0, 0.5, 1.0, 1.1, 40.0, 4000.0]), max_size=300))
def test_columns_fit_their_times(steps):
    """Whatever the clock does, times rise, each column has a value or None for each, and there are not too many."""
    at = 0.0
    samples = []
    for number, step in enumerate(steps):
        at = max(at + step, 0.0)
        samples.append(sample(number, {"bytes_loaded": number}, at=at, tiers=[DISK]))
    history = columns(samples)
    assert history.at == sorted(history.at)
    assert len(history.at) <= POINTS_MAX
    plain = [getattr(history, name) for name in history.__struct_fields__ if name not in ("unit", "at", "fills")]
    assert {len(column) for column in [*plain, *history.fills.values()]} == {len(history.at)}


def test_an_hour_is_thinned_and_stays_in_place():
    """An hour of seconds is at most 600 points, which are the same a second later but for the newest."""
    hour = [sample(at, {"bytes_loaded": at * at}, boot_id="one") for at in range(3601)]
    first, later = columns(hour[:-1]), columns(hour)
    assert 300 <= len(first.at) <= POINTS_MAX
    assert first.at[:-1] == later.at[: len(first.at) - 1]
    assert later.at[-1] == EPOCH + 3600


def test_a_point_says_what_happened_since_the_one_before():
    """Rates, shares and the hit rate of the last minute, point by point; none where the daemon was away."""
    samples = [
        sample(0, asked(0, 0, 0), pool_used_nbytes=0, tiers=[DISK]),
        sample(1, {**asked(30, 10, 60), "chunks_evicted": 4, "bytes_stored": 70}, pool_used_nbytes=500, tiers=[DISK]),
        sample(2, asked(30, 10, 60), tiers=[]),
        sample(90, asked(40, 10, 60), tiers=[DISK]),
    ]
    history = columns(samples)
    assert (history.pool, history.tier, history.missed) == ([30.0, 0.0, None], [10.0, 0.0, None], [60.0, 0.0, None])
    assert history.hit_rate == [0.4, 0.4, 1.0]
    assert (history.evicted[0], history.stores[0], history.ceiling) == (4.0, 70.0, [1e6] * 3)
    assert history.fills == {"pool": [0.5, 0.25, 0.25], "disk": [0.25, None, 0.25]}


def test_the_window_ends_with_the_newest_sample():
    """What is older than the window is left out; what is exactly as old is not."""
    samples = [sample(uptime_s) for uptime_s in (0, 4, 5, 9, 10)]
    assert since(samples, 5) == samples[2:]
