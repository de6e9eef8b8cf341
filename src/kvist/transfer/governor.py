"""How fast copies may go beside an engine that computes. Pure: times are passed in.

The laws: an engine that does not decode gives copies the whole link. Beside one that does, copies are spaced so that
over time its steps take at most ``budget`` longer than steps of the same kind without copies; what a copied byte costs
is read off the steps themselves. Copies never get less than ``RATE_MIN``, so every one ends.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final

RATE_MIN: Final = 1e9
"""Bytes per second that copies always get."""
RATE_MAX: Final = 100e9
"""Faster than any link: copies that could go so fast are not spaced."""
_IDLE_S: Final = 0.05
"""An engine that has shown no step for so long does not decode."""
_SMOOTHING: Final = 0.1
_KNOWN_AFTER: Final = 8
"""Steps without copies before those with copies are held against them."""


@dataclass(slots=True)
class _Usual:
    """Steps of one kind without copies."""

    seconds: float
    num: int = 1


class Governor:
    """One engine's. Steps are told by the engine's thread, turns are taken by the copying one."""

    def __init__(self, budget: float) -> None:
        """Allow steps to take ``budget`` longer, as a part of one; infinity never spaces copies."""
        assert budget > 0
        self._budget = budget
        self._usual: dict[int, _Usual] = {}
        self._last_step = -math.inf
        self._next_turn = -math.inf
        self._bytes_of_step = 0
        self._lost_s = 0.0
        self._lost_bytes = 0.0
        """What copies cost lately: seconds of decoding, and the bytes that they were lost for."""
        self.rate = math.inf
        """Bytes per second that copies may have, for people to see."""
        self.is_computing = False
        """The engine's last step computes something: it sends and fetches a few bytes, which copies must let in."""

    def begin_step(self, *, is_computing: bool) -> None:
        """Note that a step begins. Until the next one begins, the engine computes or it does not."""
        self.is_computing = is_computing

    def step(self, now: float, seconds: float, kind: int) -> None:
        """Note a decode step that has just ended; steps of one ``kind`` take alike, such as those of a batch size."""
        nbytes, self._bytes_of_step = self._bytes_of_step, 0
        self._last_step = now
        usual = self._usual.get(kind)
        if not nbytes:
            self._learn(usual, seconds, kind)
        elif usual is not None and usual.num >= _KNOWN_AFTER:
            self._adapt(seconds - usual.seconds, nbytes)

    def pass_over(self) -> None:
        """Note a step that did more than decode: what was copied beside it says nothing about decoding."""
        self._bytes_of_step = 0

    def turn(self, now: float, nbytes: int) -> float:
        """Return how many seconds to wait before copying ``nbytes``, and count them as copied."""
        self._bytes_of_step += nbytes
        if now - self._last_step > _IDLE_S or math.isinf(self.rate):
            self._next_turn = now
            return 0.0
        begin = max(now, self._next_turn)
        self._next_turn = begin + nbytes / self.rate
        return begin - now

    def _learn(self, usual: _Usual | None, seconds: float, kind: int) -> None:
        if usual is None:
            self._usual[kind] = _Usual(seconds)
        else:
            usual.seconds += _SMOOTHING * (seconds - usual.seconds)
            usual.num += 1

    def _adapt(self, lost_s: float, nbytes: int) -> None:
        """Let copies have as many bytes a second as cost the budget."""
        self._lost_s += lost_s - _SMOOTHING * self._lost_s
        self._lost_bytes += nbytes - _SMOOTHING * self._lost_bytes
        cost = max(self._lost_s, 0.0) / self._lost_bytes
        rate = self._budget / cost if cost > 0 else math.inf
        self.rate = max(RATE_MIN, rate) if rate < RATE_MAX else math.inf
