"""What a scrape says is what the daemon says, all of it; page, dashboard and alerts know its families."""

import ast
import json
import math
import re
from pathlib import Path

import pytest

from kvist.errors import REFUSALS
from kvist.server.measuring import BOUNDS_S
from kvist.web.metrics import COUNTS, NOT_EXPORTED, TIER_COUNTS, Exposition
from kvist.wire import messages as wire
from tests.support.http import call, families, samples
from tests.support.named import answer, look_up, send_retrieve, store
from tests.unit.web.conftest import Seen

ROOT = Path(__file__).parents[3]
SOURCE = ROOT / "src" / "kvist"
EXPORTED = {name for count in COUNTS for name in count.counters.values()}
TIER_EXPORTED = {name for count in TIER_COUNTS for name in count.counters.values()}


def counted(folder: str) -> list[tuple[str, ast.expr]]:
    """Return what counters are named with where they are moved, as expressions, with the functions they stand in."""
    found = []
    for path in sorted((SOURCE / folder).rglob("*.py")):
        tree = ast.parse(path.read_text())
        for node in ast.walk(tree):
            if not isinstance(node, ast.Subscript) or not isinstance(node.ctx, ast.Store):
                continue
            owner = ast.unparse(node.value)
            if owner.endswith("counters") and not owner.startswith("session."):
                found += [(str(path), one) for one in expressions(node.slice, tree)]
    return found


def expressions(name: ast.expr, tree: ast.Module) -> list[ast.expr]:
    """Return the expressions that a counter's name may be: where it is an argument, what callers hand in."""
    if not isinstance(name, ast.Name):
        return [name]
    functions = [one for one in ast.walk(tree) if isinstance(one, ast.FunctionDef)]
    found: list[ast.expr] = []
    for function in functions:
        positions = [number for number, one in enumerate(function.args.args) if one.arg == name.id]
        found += [
            node.args[positions[0] - 1]
            for node in ast.walk(tree)
            if positions and isinstance(node, ast.Call) and ast.unparse(node.func) == f"self.{function.name}"
        ]
    assert found, f"nobody knows what {name.id} may be"
    return found


def pattern(name: ast.expr) -> str:
    """Return the names that an expression may give, as a pattern."""
    if isinstance(name, ast.Constant):
        return re.escape(str(name.value))
    assert isinstance(name, ast.JoinedStr), ast.unparse(name)
    return "".join(re.escape(str(part.value)) if isinstance(part, ast.Constant) else r"\w+" for part in name.values)


@pytest.mark.parametrize(
    ("folder", "exported"), [("server", EXPORTED), ("tiering", EXPORTED), ("storage", TIER_EXPORTED)]
)
def test_every_counter_of_the_source_is_exported_or_left_out_on_purpose(folder: str, exported: set[str]):
    """Whoever adds a counter says how it is called in a scrape, or why it is not in one."""
    names = counted(folder)
    assert names
    known = exported | set(NOT_EXPORTED)
    assert not [
        f"{path}:{name.lineno} {ast.unparse(name)}"
        for path, name in names
        if not any(re.fullmatch(pattern(name), one) for one in known)
    ]


def test_a_counter_is_exported_once():
    """No counter is in two families, and what is left out is not exported."""
    for counts in (COUNTS, TIER_COUNTS):
        names = [name for count in counts for name in count.counters.values()]
        assert len(names) == len(set(names))
        assert not set(names) & set(NOT_EXPORTED)
    assert {f"refused_{code}" for code in REFUSALS} <= EXPORTED


def test_what_the_daemon_counts_is_what_a_scrape_says(seen: Seen):
    """After stores, loads and misses every counter of the status is known, and its value is in the scrape."""
    found = look_up(seen.engine, "a1", "a2")
    answer(seen.engine, send_retrieve(seen.engine, found.lease, 2))
    store(seen.engine, "b1")
    seen.watcher.sample()
    status = seen.daemon.status()
    assert set(status.counters) <= EXPORTED | set(NOT_EXPORTED)
    assert set(status.tiers[0].counters) <= TIER_EXPORTED | set(NOT_EXPORTED)
    values = samples(call(seen.app, "/metrics").body.decode())
    for count in COUNTS:
        for value, name in count.counters.items():
            key = count.name, ((count.label, value),) if count.label else ()
            assert (name, values[key]) == (name, status.counters.get(name, 0) * count.unit)
    for count in TIER_COUNTS:
        for value, name in count.counters.items():
            labels = {"tier": "memory", **({count.label: value} if count.label else {})}
            assert values[count.name, tuple(sorted(labels.items()))] == status.tiers[0].counters.get(name, 0)
    assert values["kvist_up", ()] == values["kvist_tier_up", (("tier", "memory"),)] == 1
    assert values["kvist_pool_sealed_chunks", ()] == status.num_sealed == 3
    assert values["kvist_bytes_total", (("direction", "load"),)] == status.counters["bytes_loaded"] > 0


def test_what_was_asked_for_was_somewhere(seen: Seen):
    """Chunks and tokens asked for are those of the pool, of a tier and of nowhere together."""
    look_up(seen.engine, "a1", "x")
    seen.watcher.sample()
    values = samples(call(seen.app, "/metrics").body.decode())
    for what in ("chunks", "tokens"):
        parts = [values[f"kvist_lookup_{what}_total", (("result", result),)] for result in ("pool", "tier", "miss")]
        assert sum(parts) == values[f"kvist_asked_{what}_total", ()]
    assert values["kvist_asked_chunks_total", ()] == 5


def test_histograms_are_cumulative(seen: Seen):
    """Each bucket has all that took no longer than its bound; the last has all, and the sum is the daemon's."""
    bounds = list(BOUNDS_S)
    counts = [number % 3 for number in range(len(bounds) + 1)]
    status = seen.daemon.status()
    sample = seen.watcher.latest
    assert sample is not None
    status.histograms["load"] = wire.HistogramStatus(bounds, counts, 12.5)
    text = Exposition(lambda: type(sample)(0.0, status, ())).render().decode()
    buckets = {
        float(dict(labels)["le"]): value
        for (name, labels), value in samples(text).items()
        if name == "kvist_load_seconds_bucket"
    }
    assert buckets == {bound: sum(counts[: number + 1]) for number, bound in enumerate([*bounds, math.inf])}
    assert samples(text)["kvist_load_seconds_count", ()] == sum(counts)
    assert samples(text)["kvist_load_seconds_sum", ()] == 12.5


def test_without_a_daemon_a_scrape_says_so(seen: Seen):
    """A daemon that is silent is ``kvist_up 0`` and nothing else: old figures are not shown as new ones."""
    seen.client.is_silent = True
    seen.watcher.sample()
    scrape = call(seen.app, "/metrics")
    assert (scrape.code, samples(scrape.body.decode())) == (200, {("kvist_up", ()): 0.0})


def test_the_page_lists_what_is_exported(seen: Seen):
    """``docs/metrics.md`` has each family once, with its type, its labels and their values, and no other."""
    page = (ROOT / "docs" / "metrics.md").read_text()
    rows = re.findall(r"^\| `(kvist_\w+)` \| (\w+) \| ([^|]*)\|", page, re.MULTILINE)
    found = families(call(seen.app, "/metrics").body.decode())
    assert sorted((name, kind) for name, kind, _ in rows) == sorted((name, one.type) for name, one in found.items())
    counts = {count.name: count for count in (*COUNTS, *TIER_COUNTS)}
    for name, _, text in rows:
        told = [re.findall(r"`(\w+)`", part) for part in text.split(";") if part.strip()]
        labels = {label for sample in found[name].samples for label in sample.labels} - {"le"}
        assert (name, {label for label, *_ in told}) == (name, labels or {label for label, *_ in told})
        for label, *values in told:
            if values and name in counts:
                assert (name, label, values) == (name, counts[name].label, list(counts[name].counters))


@pytest.mark.parametrize("file", ["grafana/kvist.json", "prometheus/alerts.yml", "prometheus/alerts_test.yml"])
def test_what_is_deployed_asks_for_what_there_is(seen: Seen, file: str):
    """Every metric that the dashboard, an alert or its test names is in a scrape."""
    text = (ROOT / "deploy" / file).read_text()
    found = {
        suffixed
        for name, one in families(call(seen.app, "/metrics").body.decode()).items()
        for suffixed in ([f"{name}_bucket", f"{name}_sum", f"{name}_count"] if one.type == "histogram" else [name])
    }
    named = set(re.findall(r"\bkvist_\w+", text))
    assert len(named) > 5
    assert named <= found | {"kvist_load_seconds"}  # An alert's text names the histogram as a whole.


def test_the_dashboard_is_one(seen: Seen):
    """Its panels have ids of their own, do not overlap, and ask the data source that the person has picked."""
    board = json.loads((ROOT / "deploy" / "grafana" / "kvist.json").read_text())
    panels = board["panels"]
    assert len({one["id"] for one in panels}) == len(panels)
    cells = [
        (x, y)
        for place in (one["gridPos"] for one in panels)
        for x in range(place["x"], place["x"] + place["w"])
        for y in range(place["y"], place["y"] + place["h"])
    ]
    assert len(set(cells)) == len(cells)
    assert max(x for x, _ in cells) == 23
    asked = [target for one in panels for target in one.get("targets", [])]
    assert {target["datasource"]["uid"] for target in asked} == {"${datasource}"}
    assert all('instance=~"$instance"' in target["expr"] for target in asked)
