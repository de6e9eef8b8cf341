"""A daemon's figures as text: what ``kvist status`` prints once and ``kvist top`` again and again. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final

import msgspec
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from kvist.units import format_nbytes
from kvist.watching.differences import Durations
from kvist.watching.figures import CEILING, Engine, Figures, Fill, Tokens, notices
from kvist.watching.watcher import Sample
from kvist.wire import messages as wire

_BAR_CHARS: Final = 24
_FULL, _EMPTY, _PARTS = "█", "░", " ▏▎▍▌▋▊▉"
_NOTHING: Final = "·"
_PADDING: Final = (0, 2, 0, 0)


def beginning(sample: Sample) -> Sample:
    """Return what the daemon of ``sample`` was when it started: from there on is since the start."""
    status = sample.status
    zero = {
        name: msgspec.structs.replace(one, counts=[0] * len(one.counts), sum_s=0.0)
        for name, one in status.histograms.items()
    }
    tiers = [msgspec.structs.replace(tier, counters={}) for tier in status.tiers]
    begun = msgspec.structs.replace(status, counters={}, uptime_s=0.0, histograms=zero, tiers=tiers)
    return Sample(sample.at, begun, sample.sessions)


def board(figures: Figures | None, failure: str = "", *, has_rates: bool = True) -> RenderableType:
    """Return all of a daemon's figures; ``failure`` says why there are no newer ones.

    Without ``has_rates`` there is nothing about now: the figures are of one look.
    """
    notes = [Text(note, style="bold red") for note in notices(figures, failure)]
    if figures is None:
        return Group(*notes)
    parts: list[RenderableType] = [Text(_title(figures.status), style="bold"), *notes, "", _fills(figures.fills), ""]
    parts += [_hits("since the start", figures.total, figures.unit)]
    if has_rates:
        parts += [_hits(f"last {figures.window_s:.0f} s", figures.lately, figures.unit)]
    parts += ["", _copies(figures, has_rates=has_rates)]
    if _are_told_apart(figures.status.tenants):
        parts += ["", _tenants(figures.status.tenants)]
    if figures.engines:
        parts += ["", _engines(figures.engines)]
    parts += ["", *(Text(line, style="dim") for line in _footer(figures))]
    return Group(*parts)


def bar(share: float, *, chars: int = _BAR_CHARS) -> str:
    """Return a bar of so many characters, of which ``share`` is full, to an eighth of a character."""
    eighths = round(min(max(share, 0.0), 1.0) * chars * 8)
    full, rest = divmod(eighths, 8)
    return (_FULL * full + (_PARTS[rest] if rest else "")).ljust(chars, _EMPTY)


def duration_text(seconds: float | None) -> str:
    """Return a duration for people; of what is beyond all buckets, that it is."""
    if seconds is None:
        return _NOTHING
    if math.isinf(seconds):
        return "> 10 s"
    for unit, name in ((1.0, "s"), (1e-3, "ms")):
        if seconds >= unit:
            return f"{seconds / unit:.3g} {name}"
    return f"{seconds * 1e6:.3g} µs"


def uptime_text(seconds: float) -> str:
    """Return how long something has run, in its two largest units."""
    left, parts = int(seconds), list[str]()
    for name, size in (("d", 86400), ("h", 3600), ("min", 60), ("s", 1)):
        number, left = divmod(left, size)
        if number or (name == "s" and not parts):
            parts.append(f"{number} {name}")
    return " ".join(parts[:2])


def _title(status: wire.StatusReply) -> str:
    state = ", stopping" if status.is_draining else ""
    return f"kvist {status.version}, pid {status.pid}, up {uptime_text(status.uptime_s)}{state}"


def _fills(fills: Sequence[Fill]) -> Table:
    table = Table("", "", "used", "chunks", "evicted", "", box=None, padding=_PADDING)
    for fill in fills:
        used = f"{format_nbytes(fill.used_nbytes)} of {format_nbytes(fill.capacity_nbytes)}"
        note = Text(f"off: {fill.off_reason}" if fill.off_reason else "", style="red")
        table.add_row(fill.name, bar(fill.share), used, f"{fill.num_chunks:,}", f"{fill.num_evicted:,}", note)
    return table


def _hits(name: str, tokens: Tokens, unit: str) -> Text:
    if not tokens.asked:
        return Text(f"{name}: nothing was asked for")
    pool, tier, missed = (f"{number / tokens.asked:.1%}" for number in (tokens.pool, tokens.tier, tokens.missed))
    return Text(f"{name}: {tokens.asked:,} {unit} asked for, {pool} in the pool, {tier} in tiers, {missed} missed")


def _copies(figures: Figures, *, has_rates: bool) -> Table:
    now = ["now", "of the ceiling"] if has_rates else []
    table = Table("", *now, "while copying", "in all", "p50", "p95", box=None, padding=_PADDING)
    durations = {"loads": figures.load, "stores": figures.store}
    for flow in figures.flows:
        rates = [_rate(flow.per_s), f"{flow.share:.0%}" if flow.share is not None else _NOTHING] if has_rates else []
        took = durations.get(flow.name)
        spent_s = figures.status.counters.get(f"{flow.name[:-1]}_ns", 0) / 1e9 if took is not None else 0
        while_copying = _rate(flow.total_nbytes / spent_s if spent_s else None)
        table.add_row(flow.name, *rates, while_copying, format_nbytes(flow.total_nbytes), *_quantiles(took))
    table.add_row("lookups", *(_NOTHING for _ in now), _NOTHING, _NOTHING, *_quantiles(figures.lookup))
    return table


def _quantiles(durations: Durations | None) -> tuple[str, str]:
    if durations is None or not durations.num:
        return _NOTHING, _NOTHING
    p50, p95 = (duration_text(durations.quantile(share)) for share in (0.5, 0.95))
    return f"≤ {p50}" if p50[0] != ">" else p50, f"≤ {p95}" if p95[0] != ">" else p95


def _rate(per_s: float | None) -> str:
    return _NOTHING if per_s is None else f"{per_s / 1e9:.2f} GB/s"


def _are_told_apart(tenants: Sequence[wire.TenantStatus]) -> bool:
    return len(tenants) > 1 or any(tenant.quota_nbytes for tenant in tenants)


def _tenants(tenants: Sequence[wire.TenantStatus]) -> Table:
    table = Table("tenant", "used", "chunks", "evicted", box=None, padding=_PADDING)
    for tenant in tenants:
        quota = f" of {format_nbytes(tenant.quota_nbytes)}" if tenant.quota_nbytes else ""
        used = f"{format_nbytes(tenant.nbytes)}{quota}"
        table.add_row(tenant.name or "(no name)", used, f"{tenant.num_chunks:,}", f"{tenant.num_evicted:,}")
    return table


def _engines(engines: Sequence[Engine]) -> Table:
    table = Table("engine", "model", "lane", "lookups", "hit rate", "loaded", "stored", box=None, padding=_PADDING)
    for engine in sorted(engines, key=lambda one: -one.num_lookups):
        rate = engine.chunks.hit_rate
        table.add_row(
            engine.engine_id[:12], engine.model or "not told", ",".join(engine.lanes) or _NOTHING,
            f"{engine.num_lookups:,}", f"{rate:.1%}" if rate is not None else _NOTHING,
            f"{engine.num_loaded:,} chunks", f"{engine.num_stored:,} chunks",
        )  # fmt: skip
    return table


def _footer(figures: Figures) -> list[str]:
    status = figures.status
    worries = [f"{worry.total:,} {worry.name}" for worry in figures.worries if worry.total]
    held = (
        f"{status.num_sealed} sealed, {status.num_reserved} being written, {status.num_pinned} pinned; "
        f"{status.num_sessions} sessions, {status.num_registered} with KV memory; {status.num_leases} leases; "
        f"{status.num_copies_in_flight} copies in flight"
    )
    lines = [held, f"{figures.saved_s:,.1f} s of computing saved"]
    ceiling = figures.status.lane_rates.get(CEILING)
    if ceiling:
        lines.append(f"one thread copies {ceiling / 1e9:.1f} GB/s inside the pool, measured at the start")
    return [*lines, *(["to look at: " + ", ".join(worries)] if worries else [])]
