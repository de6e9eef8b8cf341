"""What the daemon's process gives to the service: identity, time, chance, threads, and a view of other processes.

The law: nothing here decides anything. A simulation puts its own in the place of each.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

from kvist.server.lanes import Lane
from kvist.server.orders import SupportsWatch


class SupportsLanes(Protocol):
    """Finds the lane of a device."""

    def __getitem__(self, name: str) -> Lane:
        """Return it, or raise ``LayoutRefused``."""
        ...


@dataclass(frozen=True, slots=True)
class Runtime:
    """What the service needs from the process around it."""

    pid: int
    boot_id: str
    post: Callable[[Callable[[], None]], None]
    """Run a call on the service's loop; may be called from any thread."""
    clock: Callable[[], float]
    new_id: Callable[[], bytes]
    """Unguessable, 16 bytes."""
    lanes: SupportsLanes
    """By the name that a memory handle gives."""
    watch: Callable[[int], SupportsWatch]
    """Watch a process, by its id, or raise ``LayoutRefused``."""
    rates: Mapping[str, float]
    """What was measured at the start, bytes per second, for people."""
    pool_fd: int | None
    """What engines that copy for themselves are given; None if no engine may see the pool."""
