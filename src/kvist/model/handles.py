"""Serialisable names for another process's memory. Untrusted until a ``Device`` has opened them."""

from __future__ import annotations

from dataclasses import dataclass

from kvist.errors import LayoutError

DEVICE_KIND_HOST = "host"


@dataclass(frozen=True, slots=True)
class MemoryHandle:
    """One exported allocation."""

    kind: str
    """Which ``Device`` opens it: ``host`` is shared memory whose file descriptor travels beside the handle."""
    nbytes: int

    def __post_init__(self) -> None:
        if self.nbytes <= 0:
            raise LayoutError(f"an allocation of {self.nbytes} bytes cannot be registered")
