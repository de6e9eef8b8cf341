"""What the page shows, worked out of samples of the daemon.

The laws: figures are of the newest sample and of differences between samples, and depend on nothing else. Tokens asked
for are those found in the pool, those found in a tier and those missed. What cannot be known yet is None, never 0.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Final

from kvist.web.differences import Durations, Read, counter, durations, gained, per_second, since
from kvist.web.watcher import Sample
from kvist.wire import messages as wire

WINDOW_S: Final = 300.0
"""What "lately" is."""
NOW_S: Final = 10.0
"""What a rate is taken over."""
MINUTES_MAX: Final = 8
MINUTE_S: Final = 60.0
CEILING: Final = "memcpy"
"""Of ``lane_rates``: what copies inside the host's memory can reach, measured at the daemon's start."""


@dataclass(frozen=True, slots=True)
class Tokens:
    """What lookups asked for, by where it was found."""

    pool: int
    tier: int
    missed: int

    @property
    def asked(self) -> int:
        """All of them."""
        return self.pool + self.tier + self.missed

    @property
    def hits(self) -> int:
        """What was found, in the pool or in a tier."""
        return self.pool + self.tier

    @property
    def hit_rate(self) -> float | None:
        """The share that was found."""
        return self.hits / self.asked if self.asked else None


@dataclass(frozen=True, slots=True)
class Flow:
    """Bytes in one direction."""

    name: str
    per_s: float | None
    """Now."""
    ceiling: float | None
    """Bytes per second that were measured as possible; None if nothing was."""
    total_nbytes: int
    """Since the daemon's start."""

    @property
    def share(self) -> float | None:
        """Of the ceiling."""
        return self.per_s / self.ceiling if self.per_s is not None and self.ceiling else None


@dataclass(frozen=True, slots=True)
class Fill:
    """How full the pool or a tier is."""

    name: str
    used_nbytes: int
    capacity_nbytes: int
    num_chunks: int
    num_evicted: int
    """Chunks, since the daemon's start."""
    evicted_per_s: float | None
    off_reason: str = ""

    @property
    def share(self) -> float:
        """Of the capacity."""
        return self.used_nbytes / self.capacity_nbytes if self.capacity_nbytes else 0.0


@dataclass(frozen=True, slots=True)
class Worry:
    """Something that should stay at 0, or nearly."""

    name: str
    total: int
    """Since the daemon's start."""
    lately: int


@dataclass(frozen=True, slots=True)
class Engine:
    """All connected processes of one engine."""

    engine_id: str
    model: str
    """Empty if none of them has said."""
    dtype: str
    chunk_tokens: int | None
    lanes: tuple[str, ...]
    memory: tuple[str, ...]
    texts: tuple[str, ...]
    """Its layer groups."""
    processes: tuple[wire.SessionStatus, ...]
    chunks: Tokens
    """Not in tokens, and since they connected."""
    num_lookups: int
    num_loaded: int
    num_stored: int


@dataclass(frozen=True, slots=True)
class Minute:
    """How long requests of one minute took."""

    began_at: float
    """Seconds since the epoch."""
    lookup: Durations
    load: Durations


@dataclass(frozen=True, slots=True)
class Figures:
    """The page's figures, all of one instant."""

    at: float
    status: wire.StatusReply
    window_s: float
    """What "lately" covers: less than ``WINDOW_S`` while the samples are young."""
    unit: str
    """What ``lately`` and ``total`` are counted in."""
    lately: Tokens
    total: Tokens
    saved_s: float
    """Of computing, since the daemon's start."""
    flows: tuple[Flow, ...]
    fills: tuple[Fill, ...]
    worries: tuple[Worry, ...]
    engines: tuple[Engine, ...]
    others: tuple[wire.SessionStatus, ...]
    """Connected processes of no engine, such as this one."""
    lookup: Durations
    load: Durations
    store: Durations
    minutes: tuple[Minute, ...]
    """The newest first."""


def work_out(samples: Sequence[Sample]) -> Figures | None:
    """Return the figures of the newest of ``samples``, which are in the order of their taking; None of none."""
    if not samples:
        return None
    status = samples[-1].status
    window = since(samples, WINDOW_S)
    now = since(samples, NOW_S)
    unit = unit_of(status)
    engines, others = _engines(samples[-1].sessions)
    return Figures(
        at=samples[-1].at,
        status=status,
        window_s=window[-1].at - window[0].at,
        unit=unit,
        lately=tokens_between(window, unit),
        total=_tokens(status.counters, unit),
        saved_s=status.counters.get("saved_us", 0) / 1e6,
        flows=tuple(_flows(now)),
        fills=tuple(_fills(now)),
        worries=tuple(_worries(window)),
        engines=engines,
        others=others,
        lookup=durations(window, "lookup"),
        load=durations(window, "load"),
        store=durations(window, "store"),
        minutes=tuple(_minutes(samples)),
    )


def notices(figures: Figures | None, failure: str) -> list[str]:
    """Return what somebody should look at; ``failure`` says why there is no new sample, and is empty while there is."""
    found = []
    if failure:
        found.append(f"The daemon does not answer: {failure}")
    if figures is None:
        return found
    if figures.status.is_draining:
        found.append("The daemon is stopping: it finishes what has begun and takes no new work.")
    found += [f"The tier {fill.name} is off: {fill.off_reason}" for fill in figures.fills if fill.off_reason]
    num_wrong = figures.worries[0].total
    if num_wrong:
        found.append(
            f"{num_wrong} chunks did not match their checksums and were dropped: "
            f"memory or a drive of this host is faulty, or something writes into them."
        )
    return found


def tokens_between(samples: Sequence[Sample], unit: str) -> Tokens:
    """Return what was asked for from the first of ``samples`` to the last."""
    names = (f"{unit}_found", f"{unit}_loading", f"{unit}_missed")
    return Tokens(*(gained(samples, counter(name)) for name in names))


def unit_of(status: wire.StatusReply) -> str:
    """Return what this daemon's lookups are counted in: ``tokens``, or ``chunks`` where no engine says how many."""
    has_only_chunks = status.counters.get("chunks_asked") and not status.counters.get("tokens_asked")
    return "chunks" if has_only_chunks else "tokens"


def _tokens(counters: dict[str, int], unit: str) -> Tokens:
    return Tokens(*(counters.get(f"{unit}_{name}", 0) for name in ("found", "loading", "missed")))


def _flows(now: Sequence[Sample]) -> Iterable[Flow]:
    status = now[-1].status
    memory = status.lane_rates.get(CEILING)
    flows = [("loads", "bytes_loaded", memory), ("stores", "bytes_stored", memory)]
    if status.tiers:
        tiers = [tier for tier in status.tiers if not tier.off_reason]
        flows.append(("tier reads", "bytes_promoted", sum(tier.read_rate for tier in tiers)))
        flows.append(("tier writes", "bytes_demoted", sum(tier.write_rate for tier in tiers)))
    for name, of, ceiling in flows:
        yield Flow(name, per_second(now, counter(of)), ceiling or None, status.counters.get(of, 0))


def _fills(now: Sequence[Sample]) -> Iterable[Fill]:
    status = now[-1].status
    evicted = counter("chunks_evicted")
    yield Fill(
        "pool", status.pool_used_nbytes, status.pool_nbytes, status.num_sealed, evicted(status),
        per_second(now, evicted),
    )  # fmt: skip
    for tier in status.tiers:
        evicted = _tier_counter(tier.name, "chunks_evicted")
        yield Fill(
            tier.name, tier.used_nbytes, tier.capacity_nbytes, tier.num_chunks, evicted(status),
            per_second(now, evicted), tier.off_reason,
        )  # fmt: skip


def _worries(window: Sequence[Sample]) -> Iterable[Worry]:
    of_tiers = [_tier_counter(tier.name, "chunks_damaged") for tier in window[-1].status.tiers]
    for name, reads in (
        ("checksum failures", [counter("chunks_corrupt"), *of_tiers]),
        ("deadlines missed", [counter("deadlines_missed")]),
        ("requests refused", [_requests_refused]),
        ("chunks refused", [counter("chunks_refused")]),
        ("tier reads failed", [counter("promotions_refused"), counter("promotions_failed")]),
        ("tier writes failed", [counter(f"demotions_{end}") for end in ("refused", "dropped", "failed")]),
        ("leases expired", [counter("leases_expired")]),
    ):
        yield Worry(name, sum(read(window[-1].status) for read in reads), sum(gained(window, read) for read in reads))


def _requests_refused(status: wire.StatusReply) -> int:
    return sum(num for name, num in status.counters.items() if name.startswith("refused_"))


def _tier_counter(tier: str, name: str) -> Read:
    return lambda status: sum(one.counters.get(name, 0) for one in status.tiers if one.name == tier)


def _engines(sessions: Sequence[wire.SessionStatus]) -> tuple[tuple[Engine, ...], tuple[wire.SessionStatus, ...]]:
    by_id: dict[str, list[wire.SessionStatus]] = {}
    for session in sessions:
        by_id.setdefault(session.engine_id, []).append(session)
    engines = [processes for processes in by_id.values() if any(one.serves or one.rows for one in processes)]
    others = [one for processes in by_id.values() if processes not in engines for one in processes]
    return tuple(_engine(processes) for processes in engines), tuple(others)


def _engine(processes: Sequence[wire.SessionStatus]) -> Engine:
    serves = next((one.serves for one in processes if one.serves is not None), None)
    counters: Counter[str] = sum((Counter(one.counters) for one in processes), Counter())
    return Engine(
        engine_id=processes[0].engine_id,
        model=serves.model if serves else "",
        dtype=serves.dtype if serves else "",
        chunk_tokens=serves.chunk_tokens if serves else None,
        lanes=_distinct(one.lane for one in processes),
        memory=_distinct(one.memory for one in processes),
        texts=_distinct(text for one in processes for text in one.texts),
        processes=tuple(processes),
        chunks=_tokens(counters, "chunks"),
        num_lookups=counters["lookups"],
        num_loaded=counters["chunks_loaded"],
        num_stored=counters["chunks_stored"],
    )


def _distinct(texts: Iterable[str]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(text for text in texts if text))


def _minutes(samples: Sequence[Sample]) -> list[Minute]:
    recent = since(samples, MINUTE_S * MINUTES_MAX)
    found: list[Minute] = []
    before = recent[:1]
    for number, taken in groupby(recent, key=lambda sample: sample.at // MINUTE_S):
        span = [*before, *taken]
        found.append(Minute(number * MINUTE_S, durations(span, "lookup"), durations(span, "load")))
        before = span[-1:]
    return found[: -MINUTES_MAX - 1 : -1]
