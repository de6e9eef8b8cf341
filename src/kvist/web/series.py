"""The columns that the page's charts are drawn from.

The laws: all columns are as long as the times, which rise. There are at most ``POINTS_MAX`` points, and all but the
newest stay where they are while the step does. Where nothing can be known, because the daemon was away or was started
anew, there is None, and no line is drawn.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from itertools import accumulate, groupby, pairwise
from typing import Final

import msgspec

from kvist.watching.differences import counter, per_second
from kvist.watching.figures import CEILING, tokens_between, unit_of
from kvist.watching.watcher import Sample
from kvist.wire import messages as wire

POINTS_MAX: Final = 600
HIT_RATE_S: Final = 60.0
"""What a point of the hit rate looks back on."""
_STEPS_S: Final = (1, 2, 5, 10, 20, 30, 60, 120, 300, 600, 1800, 3600)
_GAP_STEPS: Final = 5
"""Steps without a sample after which the daemon counts as having been away."""

Column = list[float | None]
Pair = tuple[Sample, Sample]


class History(msgspec.Struct, frozen=True):
    """A value a point in each column. Rates are of the time between a point and the one before."""

    unit: str
    """Of what is asked for: ``tokens``, or ``chunks`` where engines do not say how many tokens one has."""
    at: list[float]
    """Seconds since the epoch."""
    pool: Column
    """What was found there, a second; so ``tier`` and ``missed``."""
    tier: Column
    missed: Column
    hit_rate: Column
    """Of the last ``HIT_RATE_S``, as a share of 1."""
    loads: Column
    """Bytes per second; so all that follow, up to ``ceiling``."""
    stores: Column
    tier_reads: Column
    tier_writes: Column
    ceiling: Column
    evicted: Column
    """Chunks a second that the pool gave up."""
    fills: dict[str, Column]
    """How full the pool and each tier are, as a share of 1."""


def columns(samples: Sequence[Sample]) -> History:
    """Return what has become of the daemon; ``samples`` are in the order of their taking."""
    taken, step_s = _thinned(_rising(samples))
    pairs = list(pairwise(taken))
    unit = unit_of(taken[-1].status) if taken else "tokens"
    afters = [after.status for _, after in pairs]
    tiers = [tier.name for tier in taken[-1].status.tiers] if taken else []

    def rates(name: str) -> Column:
        return [_rate(pair, name, step_s) for pair in pairs]

    return History(
        unit=unit,
        at=[round(after.at, 1) for _, after in pairs],
        pool=rates(f"{unit}_found"),
        tier=rates(f"{unit}_loading"),
        missed=rates(f"{unit}_missed"),
        hit_rate=_hit_rates(pairs, unit),
        loads=rates("bytes_loaded"),
        stores=rates("bytes_stored"),
        tier_reads=rates("bytes_promoted"),
        tier_writes=rates("bytes_demoted"),
        ceiling=[status.lane_rates.get(CEILING) for status in afters],
        evicted=rates("chunks_evicted"),
        fills={
            "pool": [_share(status.pool_used_nbytes, status.pool_nbytes) for status in afters],
            **{name: [_tier_fill(status, name) for status in afters] for name in tiers},
        },
    )


def _rising(samples: Sequence[Sample]) -> list[Sample]:
    """Leave out what a clock that was set back has put behind the newest."""
    kept: list[Sample] = []
    for sample in reversed(samples):
        if not kept or sample.at < kept[-1].at:
            kept.append(sample)
    return kept[::-1]


def _thinned(samples: Sequence[Sample]) -> tuple[list[Sample], float]:
    """Return the last sample of each step, and the step in seconds."""
    if not samples:
        return [], _STEPS_S[0]
    span_s = samples[-1].at - samples[0].at
    # One step more than fits is touched at the ends, and one point more is there than pairs.
    step_s = next((step for step in _STEPS_S if span_s / step <= POINTS_MAX - 1), _STEPS_S[-1])
    steps = (list(within) for _, within in groupby(samples, key=lambda sample: sample.at // step_s))
    return [within[-1] for within in steps][-POINTS_MAX - 1 :], step_s


def _rate(pair: Pair, name: str, step_s: float) -> float | None:
    before, after = pair
    if before.status.boot_id != after.status.boot_id or after.at - before.at > _GAP_STEPS * step_s:
        return None
    rate = per_second(pair, counter(name))
    return None if rate is None else round(rate, 1)


def _hit_rates(pairs: Sequence[Pair], unit: str) -> Column:
    gains = [tokens_between(pair, unit) for pair in pairs]
    hits = [0, *accumulate(gain.hits for gain in gains)]
    asked = [0, *accumulate(gain.asked for gain in gains)]
    at = [after.at for _, after in pairs]
    firsts = [bisect_left(at, now - HIT_RATE_S) for now in at]
    return [
        _share(hits[last] - hits[first], asked[last] - asked[first])
        for first, last in zip(firsts, range(1, len(at) + 1), strict=True)
    ]


def _tier_fill(status: wire.StatusReply, name: str) -> float | None:
    tier = next((tier for tier in status.tiers if tier.name == name), None)
    return None if tier is None else _share(tier.used_nbytes, tier.capacity_nbytes)


def _share(part: int, whole: int) -> float | None:
    return round(part / whole, 4) if whole else None
