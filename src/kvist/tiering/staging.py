"""What reads and writes of tiers share: the tiers, the pool that they read into and write from, the way to the loop.

The law: in each direction, bytes in flight stay below a limit, unless one chunk alone is above it; what tiers tell on
threads of their own is heard on the loop.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final, TypeVar

from kvist.storage.base import Tier
from kvist.units import MIB

T = TypeVar("T")

IN_FLIGHT_NBYTES_MAX: Final = 256 * MIB
"""Enough for the fastest drives to be busy, and given back in a tenth of a second by slow ones."""
_POOL_SHARE_MAX: Final = 8


@dataclass(frozen=True, slots=True)
class Staging:
    """A pool and the tiers behind it, the fastest first."""

    tiers: Sequence[Tier]
    pool: memoryview
    post: Callable[[Callable[[], None]], None]
    """Runs a call on the loop; may be called from any thread."""

    @property
    def nbytes_max(self) -> int:
        """Most bytes in flight in one direction."""
        return min(IN_FLIGHT_NBYTES_MAX, len(self.pool) // _POOL_SHARE_MAX)

    def has_room(self, in_flight_nbytes: int, nbytes: int) -> bool:
        """Return whether so many bytes more may be in flight."""
        return not in_flight_nbytes or in_flight_nbytes + nbytes <= self.nbytes_max

    def view(self, offset: int, nbytes: int) -> memoryview:
        """Return a part of the pool."""
        return self.pool[offset : offset + nbytes]

    def on_loop(self, call: Callable[[T], None]) -> Callable[[T], None]:
        """Return what may be called on any thread, and calls ``call`` on the loop."""
        return lambda value: self.post(lambda: call(value))
