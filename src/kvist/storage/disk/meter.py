"""How fast a disk is, from what it has done.

The law: a rate is bytes per second in which there was something to do; what is idle, and what ran at once, counts once.
"""

from __future__ import annotations

import math
from typing import Final

_MEMORY_S: Final = 2.0
"""Busy seconds after which what was measured weighs a third of what it did."""


class RateMeter:
    """Counts operations of one direction. Callers see to it that one thread at a time is here."""

    def __init__(self) -> None:
        self._num_active = 0
        self._counted_until = 0.0
        self._nbytes = 0.0
        self._busy_s = 0.0

    @property
    def rate(self) -> float:
        """Bytes per busy second; 0 as long as nothing was done."""
        return self._nbytes / self._busy_s if self._busy_s > 0 else 0.0

    def begin(self, now: float) -> None:
        """Count an operation that begins."""
        self._count(now)
        self._num_active += 1

    def end(self, now: float, nbytes: int) -> None:
        """Count an operation that ends, and what it has moved."""
        assert self._num_active > 0
        self._count(now)
        self._num_active -= 1
        self._nbytes += nbytes

    def _count(self, now: float) -> None:
        if self._num_active:
            busy_s = max(now - self._counted_until, 0.0)
            weight = math.exp(-busy_s / _MEMORY_S)
            self._nbytes *= weight
            self._busy_s = self._busy_s * weight + busy_s
        self._counted_until = now
