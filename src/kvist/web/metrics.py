"""The daemon's counters as Prometheus reads them. The only module that knows its client library.

The laws: a scrape is one instant of the daemon; every counter of the daemon is in these tables, or in ``NOT_EXPORTED``
with the reason; a name has its unit; labels have values that are known here, or names that the operator gave (tiers).
The names are explained in ``docs/metrics.md``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Final

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.exposition import CONTENT_TYPE_LATEST
from prometheus_client.utils import floatToGoString

from kvist.errors import REFUSALS
from kvist.model.layout import GroupKind
from kvist.watching.watcher import Sample
from kvist.wire import messages as wire


@dataclass(frozen=True, slots=True)
class Count:
    """A counter of the daemon, or several that one label tells apart."""

    name: str
    text: str
    counters: Mapping[str, str]
    """What the daemon calls it, by the value of the label; by ``""`` where there is no label."""
    label: str = ""
    unit: float = 1.0
    """What one of the daemon's is in the unit of the name."""


@dataclass(frozen=True, slots=True)
class Gauge:
    """A figure of the daemon's status."""

    name: str
    text: str
    read: Callable[[wire.StatusReply], float]


@dataclass(frozen=True, slots=True)
class TierGauge:
    """A figure of each tier."""

    name: str
    text: str
    read: Callable[[wire.TierStatus], float]


_RESULTS: Final = {"pool": "found", "tier": "loading", "miss": "missed"}
_DIRECTIONS: Final = {"load": "loaded", "store": "stored", "promote": "promoted", "demote": "demoted"}
_TIER_REFUSALS: Final = ("busy", "closing", "known", "no_room", "off", "owners", "parent", "too_large")

COUNTS: Final = (
    Count("kvist_lookups_total", "Requests that were looked up, each once.", {"": "lookups"}),
    Count("kvist_repeated_lookups_total", "Lookups of requests that had asked before.", {"": "lookups_repeated"}),
    Count("kvist_asked_chunks_total", "Whole chunks that lookups asked for.", {"": "chunks_asked"}),
    Count("kvist_asked_tokens_total", "Tokens that lookups asked for.", {"": "tokens_asked"}),
    Count(
        "kvist_lookup_chunks_total", "Chunks asked for, by where they were.",
        {result: f"chunks_{name}" for result, name in _RESULTS.items()}, "result",
    ),
    Count(
        "kvist_lookup_tokens_total", "Tokens asked for, by where they were.",
        {result: f"tokens_{name}" for result, name in _RESULTS.items()}, "result",
    ),
    Count(
        "kvist_loaded_chunks_total", "Chunks written into engines' blocks, by the kind of their layers.",
        {kind.value: f"chunks_loaded_{kind.value}" for kind in GroupKind}, "kind",
    ),
    Count("kvist_stored_chunks_total", "Chunks that the pool took from engines.", {"": "chunks_stored"}),
    Count("kvist_present_chunks_total", "Chunks offered that were there already.", {"": "chunks_present"}),
    Count("kvist_refused_chunks_total", "Chunks offered and not kept.", {"": "chunks_refused"}),
    Count("kvist_promoted_chunks_total", "Chunks read from tiers into the pool.", {"": "chunks_promoted"}),
    Count("kvist_demoted_chunks_total", "Chunks written from the pool to tiers.", {"": "chunks_demoted"}),
    Count(
        "kvist_bytes_total", "Bytes moved.",
        {direction: f"bytes_{name}" for direction, name in _DIRECTIONS.items()}, "direction",
    ),
    Count(
        "kvist_lost_promotions_total", "Chunks of tiers that did not reach the pool.",
        {reason: f"promotions_{reason}" for reason in ("refused", "failed", "given_up")}, "reason",
    ),
    Count(
        "kvist_lost_demotions_total", "Chunks of the pool that did not reach a tier.",
        {reason: f"demotions_{reason}" for reason in ("refused", "dropped", "failed", "passed_over")}, "reason",
    ),
    Count(
        "kvist_evicted_chunks_total", "Chunks given up.",
        {"room": "chunks_evicted", "purge": "chunks_purged"}, "reason",
    ),
    Count("kvist_expired_leases_total", "Prefixes looked up and never loaded.", {"": "leases_expired"}),
    Count(
        "kvist_refused_requests_total", "Requests refused.",
        {code: f"refused_{code}" for code in REFUSALS}, "code",
    ),
    Count("kvist_checksum_failures_total", "Chunks whose bytes had changed in the pool.", {"": "chunks_corrupt"}),
    Count("kvist_deadline_misses_total", "Loads that were not begun in time.", {"": "deadlines_missed"}),
    Count("kvist_saved_compute_seconds_total", "Computing that loads have saved.", {"": "saved_us"}, unit=1e-6),
)  # fmt: skip

TIER_COUNTS: Final = (
    Count(
        "kvist_tier_chunks_total", "Chunks of a tier, by what happened to them.",
        {event: f"chunks_{event}" for event in ("read", "written", "evicted", "dropped", "damaged")}, "event",
    ),
    Count(
        "kvist_tier_bytes_total", "Bytes of a tier, by what happened to them.",
        {event: f"bytes_{event}" for event in ("read", "written", "evicted")}, "event",
    ),
    Count(
        "kvist_tier_refused_chunks_total", "Chunks that a tier did not take.",
        {reason: f"refused_{reason}" for reason in _TIER_REFUSALS}, "reason",
    ),
    Count("kvist_tier_read_errors_total", "Reads that failed.", {"": "read_errors"}),
)  # fmt: skip

NOT_EXPORTED: Final[Mapping[str, str]] = {
    "chunks_loaded": "the sum of kvist_loaded_chunks_total",
    "load_ns": "kvist_load_seconds_sum",
    "store_ns": "kvist_store_seconds_sum",
    "directories_off": "kvist_tier_off_directories, a gauge",
}
"""Counters of the daemon and of tiers that are left out, and what says the same."""

GAUGES: Final = (
    Gauge("kvist_uptime_seconds", "Since the start of the daemon.", lambda s: s.uptime_s),
    Gauge("kvist_draining", "1 while the daemon is stopping.", lambda s: s.is_draining),
    Gauge("kvist_pool_capacity_bytes", "Host memory for chunks.", lambda s: s.pool_nbytes),
    Gauge("kvist_pool_used_bytes", "Of it, in slots that are taken.", lambda s: s.pool_used_nbytes),
    Gauge("kvist_pool_sealed_chunks", "Chunks that can be found.", lambda s: s.num_sealed),
    Gauge("kvist_pool_reserved_chunks", "Chunks being written.", lambda s: s.num_reserved),
    Gauge("kvist_pool_pinned_chunks", "Chunks held by leases or copies.", lambda s: s.num_pinned),
    Gauge("kvist_leases", "Leases that hold pins.", lambda s: s.num_leases),
    Gauge("kvist_sessions", "Connected processes, this one included.", lambda s: s.num_sessions),
    Gauge("kvist_registered_sessions", "Of them, those with KV memory.", lambda s: s.num_registered),
    Gauge("kvist_copies_in_flight", "Copies begun or queued.", lambda s: s.num_copies_in_flight),
)

TIER_GAUGES: Final = (
    TierGauge("kvist_tier_up", "1 while the tier serves, 0 when it has turned off.", lambda t: not t.off_reason),
    TierGauge("kvist_tier_capacity_bytes", "What it may hold.", lambda t: t.capacity_nbytes),
    TierGauge("kvist_tier_used_bytes", "What it holds.", lambda t: t.used_nbytes),
    TierGauge("kvist_tier_chunks", "Chunks that it holds.", lambda t: t.num_chunks),
    TierGauge("kvist_tier_read_bytes_per_second", "Measured; 0 before a read.", lambda t: t.read_rate),
    TierGauge("kvist_tier_write_bytes_per_second", "Measured; 0 before a write.", lambda t: t.write_rate),
    TierGauge("kvist_tier_queued_reads", "Reads that wait or run.", lambda t: t.num_queued_reads),
    TierGauge("kvist_tier_queued_writes", "Writes that wait or run.", lambda t: t.num_queued_writes),
    TierGauge(
        "kvist_tier_off_directories",
        "Directories that have turned off.",
        lambda t: t.counters.get("directories_off", 0),
    ),
)

HISTOGRAMS: Final = {
    "lookup": ("kvist_lookup_seconds", "From a lookup's frame to its reply."),
    "load": ("kvist_load_seconds", "From a load's request to its landing."),
    "store": ("kvist_store_seconds", "From a store's request to its landing."),
    "promotion": ("kvist_promotion_seconds", "From the lookup of a chunk in a tier to its place in the pool."),
}


_OTHER_TENANTS: Final = "*"


class Exposition:
    """The text that a scrape gets."""

    content_type = CONTENT_TYPE_LATEST

    def __init__(self, sample: Callable[[], Sample | None]) -> None:
        """Begin; each scrape asks for one ``sample``, which may block, and is None while the daemon says nothing."""
        self._sample = sample
        self._registry = CollectorRegistry(auto_describe=False)
        self._registry.register(self)

    def render(self) -> bytes:
        """Return one scrape."""
        return generate_latest(self._registry)

    def collect(self) -> Iterable[Metric]:
        """Return the families of one instant; without a daemon, that it is not there."""
        sample = self._sample()
        yield GaugeMetricFamily("kvist_up", "1 while the daemon answers.", value=sample is not None)
        if sample is not None:
            yield from _families(sample.status)


def _families(status: wire.StatusReply) -> Iterable[Metric]:
    info = GaugeMetricFamily("kvist_build_info", "What runs; always 1.", labels=["version", "protocol"])
    info.add_metric([status.version, str(wire.PROTOCOL_VERSION)], 1)
    yield info
    for gauge in GAUGES:
        yield GaugeMetricFamily(gauge.name, gauge.text, value=gauge.read(status))
    ceilings = GaugeMetricFamily("kvist_ceiling_bytes_per_second", "Measured at the start.", labels=["what"])
    for what, rate in status.lane_rates.items():
        ceilings.add_metric([what], rate)
    yield ceilings
    for count in COUNTS:
        yield _counter(count, [((), status.counters)])
    yield from _tenants(status.tenants)
    for tier_gauge in TIER_GAUGES:
        family = GaugeMetricFamily(tier_gauge.name, tier_gauge.text, labels=["tier"])
        for tier in status.tiers:
            family.add_metric([tier.name], tier_gauge.read(tier))
        yield family
    for count in TIER_COUNTS:
        yield _counter(count, [((tier.name,), tier.counters) for tier in status.tiers], ["tier"])
    for key, (name, text) in HISTOGRAMS.items():
        if key in status.histograms:
            yield _histogram(name, text, status.histograms[key])


def _tenants(tenants: Sequence[wire.TenantStatus]) -> Iterable[Metric]:
    """Return what tenants have: of those to whom the operator has given a quota, and of all others in one."""
    used = GaugeMetricFamily("kvist_tenant_used_bytes", "What a tenant has of the pool.", labels=["tenant"])
    quotas = GaugeMetricFamily("kvist_tenant_quota_bytes", "What a tenant may have of the pool.", labels=["tenant"])
    named = [tenant for tenant in tenants if tenant.quota_nbytes]
    for tenant in named:
        used.add_metric([tenant.name], tenant.nbytes)
        quotas.add_metric([tenant.name], tenant.quota_nbytes)
    used.add_metric([_OTHER_TENANTS], sum(tenant.nbytes for tenant in tenants if not tenant.quota_nbytes))
    yield from (used, quotas)


def _counter(
    count: Count, owners: Sequence[tuple[tuple[str, ...], Mapping[str, int]]], labels: Sequence[str] = ()
) -> Metric:
    """Return a family with one value for each owner and each value of the label, 0 where nothing has happened."""
    family = CounterMetricFamily(count.name, count.text, labels=[*labels, *filter(None, [count.label])])
    for values, counters in owners:
        for value, name in count.counters.items():
            family.add_metric([*values, *filter(None, [value])], counters.get(name, 0) * count.unit)
    return family


def _histogram(name: str, text: str, status: wire.HistogramStatus) -> Metric:
    bounds = [*map(floatToGoString, status.bounds_s), "+Inf"]
    return HistogramMetricFamily(
        name, text, buckets=list(zip(bounds, accumulate(status.counts), strict=True)), sum_value=status.sum_s
    )
