"""What the connector counts: each thing once, summed over workers and steps, and nothing where nothing has happened."""

from collections import Counter
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import prometheus_client
import pytest
from prometheus_client import CollectorRegistry

from kvist.wire import messages as wire
from tests.support.engine_sorts import CHUNK_TOKENS
from tests.support.fake_vllm import adapter
from tests.unit.adapters.test_scheduler import FULL, WITH_WINDOW, Bench, stored
from tests.unit.adapters.test_worker import LOAD, STORE, Recorder
from tests.unit.adapters.test_worker import worker as make_worker

metadata, stats = adapter("metadata"), adapter("stats")


def taken(bench: Bench) -> dict[str, Any]:
    """Return what the connector tells the engine."""
    told = bench.connector.get_kv_connector_stats()
    return told.data if told is not None else {}


def report(bench: Bench, *settled: int, failed: tuple[int, ...] = ()) -> None:
    meta = metadata.KvistWorkerMetadata(Counter(settled), "", frozenset(failed))
    bench.connector.update_connector_output(SimpleNamespace(kv_connector_worker_meta=meta, failed_recving=set()))


def begin_load(bench: Bench) -> int:
    """Let a request load two chunks; return the job's number."""
    bench.client.num_found = 2
    request = bench.request(40)
    bench.connector.get_num_new_matched_tokens(request, 0)
    bench.allocate(request, 32, [1, 2, 3, 4], [0, 0, 0, 0, 0, 0, 5, 6])
    (load,) = bench.step(0, 0).loads
    return int(load.id)


def test_a_request_that_is_put_off_counts_once():
    """However often the engine asks for a request that waits for a tier, its first answer counts; repeats say so."""
    bench = Bench(WITH_WINDOW)
    bench.client.num_found, bench.client.num_loading, bench.client.loading_ms = 1, 2, 100
    request = bench.request(60)
    for _ in range(9):
        bench.client.now += 0.3
        assert bench.connector.get_num_new_matched_tokens(request, 0)[0] is None
    bench.client.num_found, bench.client.num_loading = 3, 0
    bench.client.now += 0.3
    assert bench.connector.get_num_new_matched_tokens(request, 0)[0] == 3 * CHUNK_TOKENS
    lookups = [sent for sent in bench.client.sent if isinstance(sent, wire.Lookup)]
    assert [lookup.is_repeat for lookup in lookups] == [False] + [True] * (len(lookups) - 1)
    assert len(lookups) > 5
    assert taken(bench) == {
        "lookups": 1, "tokens_asked": 3 * CHUNK_TOKENS, "tokens_found": CHUNK_TOKENS,
        "tokens_loading": 2 * CHUNK_TOKENS,
    }  # fmt: skip
    assert taken(bench) == {}


def test_a_request_that_is_scheduled_again_counts_once():
    """Without room for its blocks, after a preemption and at its end a request is not counted again."""
    bench = Bench(WITH_WINDOW)
    bench.client.num_found = 2
    request = bench.request(60)
    for _ in range(5):
        bench.client.now += 20.0  # Its lease is too old to be relied on: it asks anew.
        assert bench.connector.get_num_new_matched_tokens(request, 0) == (32, True)
    bench.allocate(request, 0, [1], [2])
    bench.step(0, 8, [1], [2, 3], is_new=True)
    bench.step(0, 0, preempted=["r"])
    assert bench.connector.get_num_new_matched_tokens(request, 0) == (32, True)
    bench.connector.request_finished_all_groups(request, ([], []))
    lookups = [sent for sent in bench.client.sent if isinstance(sent, wire.Lookup)]
    assert [lookup.is_repeat for lookup in lookups] == [False] + [True] * 6
    assert taken(bench) == {"lookups": 1, "tokens_asked": 48, "tokens_found": 32}


def test_a_late_answer_counts_when_it_comes():
    """A lookup that is given up is late, and still counts as asked when it is answered, as it does for the daemon."""
    bench = Bench(WITH_WINDOW)
    bench.client.is_slow, bench.client.num_found = True, 1
    bench.client.welcome = SimpleNamespace(limits=SimpleNamespace(lease_ttl_s=30.0))
    request = bench.request(60)
    assert bench.connector.get_num_new_matched_tokens(request, 0) == (None, False)
    bench.client.now += 1.5
    assert bench.connector.get_num_new_matched_tokens(request, 0) == (0, False)
    assert taken(bench) == {"lookups_late": 1}
    bench.client.answer()
    bench.step(0, 0)
    assert taken(bench) == {"lookups": 1, "tokens_asked": 48, "tokens_found": 16}


def test_what_no_daemon_answers_is_lost():
    """A lookup that is lost asks for nothing; that of a request which is asked for later counts then."""
    bench = Bench(WITH_WINDOW)
    bench.client.is_slow = True
    request = bench.request(60)
    bench.client.answers[0][0].is_lost = True
    assert bench.connector.get_num_new_matched_tokens(request, 0) == (0, False)
    assert bench.connector.get_num_new_matched_tokens(request, 0) == (0, False)
    assert taken(bench) == {"lookups_lost": 1}


def test_a_request_without_a_key_is_told_once(caplog: pytest.LogCaptureFixture):
    """A request that cannot be cached, or that an engine without a cache gets, is counted and logged when it comes."""
    bench = Bench(WITH_WINDOW)
    request = SimpleNamespace(
        request_id="r", kv_transfer_params={"kvist": {"no_such": 1}}, num_tokens=60, all_token_ids=list(range(60))
    )
    bench.connector.on_new_request(request)
    for _ in range(3):
        assert bench.connector.get_num_new_matched_tokens(request, 0) == (0, False)
    assert taken(bench) == {"requests_not_cached": 1}
    assert caplog.text.count("request is not cached request=r") == 1
    bench.connector._refusal = "a reason"
    bench.request(60)
    assert taken(bench) == {"requests_not_cached": 1}
    assert bench.client.sent == []


def test_a_load_counts_when_all_workers_are_done():
    """Its tokens and its time, from the allocation on, are counted once, whatever the number of workers."""
    bench = Bench(WITH_WINDOW)
    bench.side._engine = replace(bench.side._engine, num_workers=2)
    number = begin_load(bench)
    taken(bench)
    bench.client.now += 0.25
    report(bench, number)
    assert taken(bench) == {}
    bench.client.now += 0.25
    report(bench, number)
    assert taken(bench) == {"load_seconds": [pytest.approx(0.5)], "tokens_loaded": 32}


def test_a_failed_load_has_no_tokens():
    """Whichever worker says so, and however long before the others are done; so for one that could not be begun."""
    bench = Bench(WITH_WINDOW)
    number = begin_load(bench)
    taken(bench)
    report(bench, failed=(number,))
    assert taken(bench) == {}
    report(bench, number)
    assert taken(bench) == {"load_seconds": [0.0], "loads_failed": 1}
    request = bench.request(40)
    bench.connector.get_num_new_matched_tokens(request, 0)
    bench.allocate(request, 32, [1, 2, 3, 4], [0] * 8)
    bench.connector._faults.clear()
    assert taken(bench)["loads_failed"] == 1


@pytest.mark.parametrize("is_kept", [True, False])
def test_stored_tokens_are_those_of_the_full_group(is_kept: bool):
    """A token counts once, however much the other groups keep, and only if the daemon has all chunks of its store."""
    bench = Bench(WITH_WINDOW[::-1])
    bench.request(64)
    (store,) = bench.step(0, 32, [0, 0, 0, 0, 15, 16, 17, 18], [1, 2, 3, 4], is_new=True).stores
    assert stored(metadata.KvistMetadata(stores=[store])) == [(0, 1, (17, 18)), (1, 2, (1, 2, 3, 4))]
    taken(bench)
    report(bench, store.id, failed=() if is_kept else (store.id,))
    assert taken(bench) == ({"tokens_stored": 32} if is_kept else {})


def test_a_tails_tokens_are_stored_too():
    """What is kept behind the last whole chunk counts with the blocks that it has."""
    bench = Bench(((FULL, 4, None, False),))
    request = bench.request(74)
    bench.step(0, 74, list(range(1, 20)), is_new=True)
    request.all_token_ids.append(1)
    bench.connector.request_finished_all_groups(request, (list(range(1, 20)),))
    (tail,) = bench.step(0, 0).stores
    taken(bench)
    report(bench, tail.id)
    assert taken(bench) == {"tokens_stored": 8}


def test_a_worker_counts_its_rows_chunks():
    """Chunks are counted for each row as its daemon has answered; a part that failed or was refused fails the job."""
    recorder = Recorder()
    side = make_worker(recorder)
    side.begin(metadata.KvistMetadata(loads=[LOAD]))
    for number, failed in enumerate([(), (), (), (0,)]):
        recorder.answer(number, *failed)
    side.collect()
    assert side._tally.take() == {"chunks_loaded": 7}
    assert (side.take_failed(), side.take_settled(), side.take_failed()) == ({7}, Counter({7: 1}), frozenset())
    side.store(metadata.KvistMetadata(stores=[STORE]))
    for number in (4, 5, 6, 7):
        recorder.answer(number)
    side.collect()
    assert side._tally.take() == {"chunks_stored": 4, "chunks_refused": 4}
    assert side.take_failed() == {8}


@pytest.mark.parametrize("is_given_up", [True, False])
def test_a_load_that_is_given_up_has_failed(is_given_up: bool):
    """At its deadline, or when a worker gives up, a load has failed before it is settled; what comes later counts."""
    recorder = Recorder()
    side = make_worker(recorder)
    side.begin(metadata.KvistMetadata(loads=[LOAD]))
    recorder.now += 0.0 if is_given_up else 1.1
    assert (side.give_up() if is_given_up else side.collect()).finished == {"request"}
    assert side.take_failed() == {7}
    for number in range(4):
        recorder.answer(number)
    side.collect()
    assert (side.take_failed(), side.take_settled()) == (frozenset(), Counter({7: 1}))
    assert side._tally.take() == {"chunks_loaded": 8}


def test_a_store_that_is_lost_has_failed():
    """Nothing is known of its chunks, so none is counted."""
    recorder = Recorder()
    side = make_worker(recorder)
    side.store(metadata.KvistMetadata(stores=[STORE]))
    for number in range(4):
        recorder.lose(number)
    side.collect()
    assert (side.take_failed(), side._tally.take()) == ({8}, {})


def test_workers_reports_are_joined():
    """What any worker has seen fail has failed, in whatever order reports are put together."""
    one = metadata.KvistWorkerMetadata(Counter({7: 1}), "", frozenset({7}))
    other = metadata.KvistWorkerMetadata(Counter({7: 1, 8: 1}), "")
    for joined in (one.aggregate(other), other.aggregate(one)):
        assert (joined.settled, joined.failed) == (Counter({7: 2, 8: 1}), {7})


def test_sums_of_workers_and_steps():
    """Numbers are added and times put together, once each; neither side of a sum is changed."""
    one = stats.KvistStats({"chunks_loaded": 2, "load_seconds": [0.5]})
    other = stats.KvistStats({"chunks_loaded": 3, "load_seconds": [0.25], "lookups": 1})
    both = one.aggregate(other).aggregate(stats.KvistStats())
    assert both.data == {"chunks_loaded": 5, "load_seconds": [0.5, 0.25], "lookups": 1}
    assert (one.data, other.data["load_seconds"]) == ({"chunks_loaded": 2, "load_seconds": [0.5]}, [0.25])
    assert both.reduce() == {
        "lookups": 1, "chunks_loaded": 5, "loads": 2, "load_seconds_mean": 0.375, "load_seconds_max": 0.5,
    }  # fmt: skip
    both.reset()
    assert both.is_empty()
    assert both.reduce() == {}


def test_what_is_told_is_made_of_plain_values():
    """Figures leave their process as numbers and lists, and are the same figures where they arrive."""
    tally = stats.Tally()
    tally.add("lookups")
    tally.note_load(0.5, 32, has_failed=False)
    data = tally.take()
    assert data == {"lookups": 1, "load_seconds": [0.5], "tokens_loaded": 32}
    kind = adapter("connector").KvistConnector
    assert kind.build_kv_connector_stats(data).data == data
    assert kind.build_kv_connector_stats().is_empty()
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(data)) == data


def test_every_figure_is_explained():
    """The page of figures has each of them, and no others."""
    page = (Path(__file__).resolve().parents[3] / "docs" / "metrics-vllm.md").read_text()
    rows = [line.split("|")[1] for line in page.splitlines() if line.startswith("| `")]
    names = [name.strip("` ").removesuffix("_total") for row in rows for name in row.split(",")]
    assert sorted(names) == sorted([*stats.COUNTERS, stats.LOAD_SECONDS])


@pytest.fixture
def registry() -> CollectorRegistry:
    return CollectorRegistry()


def prometheus(registry: CollectorRegistry, *engines: int) -> Any:
    kinds = {
        kind: lambda kind=kind, **named: kind(registry=registry, **named)
        for kind in (prometheus_client.Counter, prometheus_client.Gauge, prometheus_client.Histogram)
    }
    labels = {engine: ["a model", str(engine)] for engine in engines}
    return stats.KvistPromMetrics(SimpleNamespace(), kinds, ["model_name", "engine"], labels)


def test_figures_reach_prometheus(registry: CollectorRegistry):
    """Every figure is there, 0 at first, then the sum of what its engine has told, under that engine's labels."""
    metrics = prometheus(registry, 0, 1)

    def value(name: str, engine: int) -> float | None:
        return registry.get_sample_value(f"vllm:kvist_{name}", {"model_name": "a model", "engine": str(engine)})

    names = [*(f"{name}_total" for name in stats.COUNTERS), "load_seconds_count", "load_seconds_sum"]
    assert [value(name, engine) for name in names for engine in (0, 1)] == [0.0] * 2 * len(names)
    metrics.observe({"tokens_loaded": 32, "load_seconds": [0.5, 0.25]}, 1)
    metrics.observe({"tokens_loaded": 16}, 1)
    metrics.observe({"lookups": 1})
    assert (value("tokens_loaded_total", 1), value("tokens_loaded_total", 0)) == (48.0, 0.0)
    assert (value("load_seconds_count", 1), value("load_seconds_sum", 1)) == (2.0, 0.75)
    assert (value("lookups_total", 0), value("lookups_total", 1)) == (1.0, 0.0)


def test_what_is_not_known_is_passed_over(registry: CollectorRegistry):
    """A figure of another version, or an engine that came later, does not end the server's loop."""
    metrics = prometheus(registry, 0)
    metrics.observe({"no_such": 1, "lookups": 2})
    metrics.observe({"lookups": 2}, 7)
    labels = {"model_name": "a model", "engine": "0"}
    assert registry.get_sample_value("vllm:kvist_lookups_total", labels) == 2.0
