"""Serialisable names for another process's memory. Untrusted until a ``Device`` has opened them.

The law: a handle, with the descriptors that travel beside it, says completely which memory it names; handles that need
no descriptor are equal only if they name the same. It is plain data, never code.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from kvist.errors import LayoutError

HOST: Final = "host"
"""Shared memory, one file descriptor."""
CUDA_IPC: Final = "cuda_ipc"
"""One ``cudaMalloc`` allocation: ``payload`` is CUDA's handle of 64 bytes; no descriptor."""
CUDA_VMM: Final = "cuda_vmm"
"""Virtual GPU memory: one file descriptor for each physical segment, in the order of ``part_nbytes``."""

ENGINE: Final = "engine"
"""Memory that is not handed over: its own process copies."""

_PAYLOAD_NBYTES: Final = {HOST: 0, CUDA_IPC: 64, CUDA_VMM: 0, ENGINE: 0}
_CHARS_MAX: Final = 64


@dataclass(frozen=True, slots=True)
class MemoryHandle:
    """One exported allocation."""

    kind: str
    nbytes: int
    device: str = ""
    """UUID of its GPU; empty for host memory."""
    payload: bytes = b""
    part_nbytes: tuple[int, ...] = ()
    """Sizes of its physical segments, each with a file descriptor of its own; empty if it is in one piece."""

    def __post_init__(self) -> None:
        if self.nbytes <= 0:
            raise LayoutError(f"an allocation of {self.nbytes} bytes cannot be registered")
        if not 0 < len(self.kind) <= _CHARS_MAX or len(self.device) > _CHARS_MAX:
            raise LayoutError(f"names of {len(self.kind)} and {len(self.device)} characters; at most {_CHARS_MAX}")
        if any(part <= 0 for part in self.part_nbytes):
            raise LayoutError(f"segments of {min(self.part_nbytes)} bytes cannot be registered")
        if self.part_nbytes and sum(self.part_nbytes) != self.nbytes:
            raise LayoutError(f"segments of {sum(self.part_nbytes)} bytes in memory of {self.nbytes}")
        if self.kind in _PAYLOAD_NBYTES:  # Of other kinds, only their own device knows what a handle looks like.
            self._check_own_kind()

    def _check_own_kind(self) -> None:
        if self.kind != ENGINE and bool(self.device) != (self.kind != HOST):
            raise LayoutError(f"memory of kind {self.kind!r} on device {self.device!r}")
        if len(self.payload) != _PAYLOAD_NBYTES[self.kind]:
            raise LayoutError(f"a handle of {len(self.payload)} bytes; {self.kind!r} has {_PAYLOAD_NBYTES[self.kind]}")
        if bool(self.part_nbytes) != (self.kind == CUDA_VMM):
            raise LayoutError(f"{len(self.part_nbytes)} segments in memory of kind {self.kind!r}")

    @property
    def num_fds(self) -> int:
        """File descriptors that travel beside it."""
        return 1 if self.kind == HOST else len(self.part_nbytes)

    @property
    def lane(self) -> str:
        """Which lane of the daemon serves it: the device's type and, if it has one, its UUID."""
        device_type = self.kind.partition("_")[0]
        return f"{device_type}:{self.device}" if self.device else device_type
