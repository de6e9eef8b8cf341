"""How long things take, counted in buckets.

The law: every observation is in exactly one bucket, and in the sum. Used by the loop alone.
"""

from __future__ import annotations

from bisect import bisect_left
from typing import Final

from kvist.wire.messages import HistogramStatus

BOUNDS_S: Final = (
    50e-6, 100e-6, 250e-6, 500e-6, 1e-3, 2.5e-3, 5e-3, 10e-3, 25e-3, 50e-3, 100e-3, 250e-3, 500e-3, 1.0, 2.5, 10.0
)  # fmt: skip


class Histogram:
    """Durations since the start."""

    __slots__ = ("_counts", "_sum_s")

    def __init__(self) -> None:
        self._counts = [0] * (len(BOUNDS_S) + 1)
        self._sum_s = 0.0

    def observe(self, seconds: float) -> None:
        """Count one duration, in the first bucket whose bound it does not exceed."""
        self._counts[bisect_left(BOUNDS_S, seconds)] += 1
        self._sum_s += seconds

    def status(self) -> HistogramStatus:
        """Return what was counted."""
        return HistogramStatus(list(BOUNDS_S), list(self._counts), self._sum_s)
