"""What happened between samples of the daemon: differences of counters, and shares of the differences of histograms.

The laws: a counter's difference is never negative. A restarted daemon, which is one of another boot id, counts from 0,
and so does a counter that has fallen. Time is the daemon's own, so that a clock that is set changes no rate.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Final

from kvist.watching.watcher import Sample
from kvist.wire import messages as wire

BEYOND: Final = math.inf
"""A duration beyond the last bound of its histogram."""

Read = Callable[[wire.StatusReply], int]
"""Reads a number that only grows as long as a daemon lives."""
_Ends = tuple[wire.StatusReply, wire.StatusReply]
"""The first and the last that is known of one daemon."""


def counter(name: str) -> Read:
    """Return what reads a counter; one that nothing has moved is 0."""
    return lambda status: status.counters.get(name, 0)


def gained(samples: Sequence[Sample], read: Read) -> int:
    """Return by how much a number has grown from the first of ``samples`` to the last.

    Of a daemon that was started in between, all that it has counted.
    """
    return _gained(_ends(samples), read)


def per_second(samples: Sequence[Sample], read: Read) -> float | None:
    """Return how fast a number grows, from the last daemon's first of ``samples`` to the last; None of one alone."""
    if not samples:
        return None
    ends = _ends(samples)[-1]
    seconds = ends[1].uptime_s - ends[0].uptime_s
    return _gained([ends], read) / seconds if seconds > 0 else None


@dataclass(frozen=True, slots=True)
class Durations:
    """How long something took, as far as buckets tell."""

    bounds_s: tuple[float, ...]
    """Upper ends of all buckets but the last."""
    counts: tuple[int, ...]
    """Of each bucket; one more than there are bounds."""

    def __post_init__(self) -> None:
        assert len(self.counts) == len(self.bounds_s) + 1
        assert min(self.counts) >= 0

    @property
    def num(self) -> int:
        """How many there were."""
        return sum(self.counts)

    def quantile(self, share: float) -> float | None:
        """Return the bound in seconds within which ``share`` of all stayed; ``BEYOND`` all bounds, None of none."""
        assert 0 < share <= 1
        needed = math.ceil(share * self.num)
        reached = 0
        for bound, num in zip((*self.bounds_s, BEYOND), self.counts, strict=True):
            reached += num
            if needed and reached >= needed:
                return bound
        return None


def durations(samples: Sequence[Sample], name: str) -> Durations:
    """Return what a histogram has counted from the first of ``samples`` to the last, with the bounds of the last."""
    histogram = samples[-1].status.histograms.get(name)
    if histogram is None:
        return Durations((), (0,))
    ends = _ends(samples)
    counts = (_gained(ends, _bucket(name, at, histogram.bounds_s)) for at in range(len(histogram.counts)))
    return Durations(tuple(histogram.bounds_s), tuple(counts))


def since(samples: Sequence[Sample], seconds: float) -> list[Sample]:
    """Return the newest of ``samples`` that were taken at most ``seconds`` before the last."""
    kept: list[Sample] = []
    for sample in reversed(samples):
        if sample.at < samples[-1].at - seconds:
            break
        kept.append(sample)
    return kept[::-1]


def _ends(samples: Sequence[Sample]) -> list[_Ends]:
    runs = (list(run) for _, run in groupby((sample.status for sample in samples), key=lambda status: status.boot_id))
    return [(run[0], run[-1]) for run in runs]


def _gained(ends: Sequence[_Ends], read: Read) -> int:
    (first, last), *later = ends
    before = read(first) if read(first) <= read(last) else 0
    return read(last) - before + sum(read(status) for _, status in later)


def _bucket(name: str, at: int, bounds_s: list[float]) -> Read:
    def read(status: wire.StatusReply) -> int:
        histogram = status.histograms.get(name)
        return histogram.counts[at] if histogram is not None and histogram.bounds_s == bounds_s else 0

    return read
