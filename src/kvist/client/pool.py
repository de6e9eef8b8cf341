"""A daemon's pool in the engine's process: its descriptor, the device that maps it, a thread for each direction.

The law: whatever ends the opening or the use of a pool, its descriptor is closed and its device is closed, after the
last copy has landed.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Final, Protocol

from kvist.device.base import Device
from kvist.errors import LayoutError
from kvist.model.rows import RowMemory
from kvist.model.transfer import Direction
from kvist.transfer.executor import Executor, Job
from kvist.transfer.governor import Governor

_QUEUE_MAX: Final = 1024


class LaneDevice(Device, Protocol):
    """A device that copies between this process's own memory and the pool."""

    def hold(self) -> None:
        """Get ready.

        Raises:
            DeviceError: it cannot be used.
        """
        ...


@dataclass(frozen=True, slots=True)
class LaneMemory:
    """What this process copies from and to."""

    rows: Sequence[RowMemory]
    """As registered: requests name them by their place here."""
    bases: Sequence[int]
    """Address of each allocation that the rows' planes name."""


MakeDevice = Callable[[int, int], LaneDevice]
"""Gets a pool's descriptor, which stays the caller's and outlives the device, and its bytes."""


class OpenPool:
    """A pool that copies can be made to and from."""

    def __init__(
        self, fds: Sequence[int], nbytes: int, make_device: MakeDevice, memory: LaneMemory | None = None,
        governor: Governor | None = None,
    ) -> None:  # fmt: skip
        """Open the pool that ``fds`` consists of; they are this object's from now on, whatever comes of it.

        Copies of ``memory`` are prepared for. A ``governor`` spaces stores. Loads are not spaced: somebody waits for
        them, and they would cost decode as much.

        Raises:
            LayoutError: the daemon has sent no pool, or the device cannot copy such memory.
            DeviceError: the device cannot be used.
        """
        self.nbytes = nbytes
        with ExitStack() as resources:
            for fd in fds:
                resources.callback(os.close, fd)
            if len(fds) != 1:
                raise LayoutError(f"a pool of {nbytes} bytes came with {len(fds)} descriptors, and not with one")
            device = make_device(fds[0], nbytes)
            resources.callback(device.close)
            device.hold()
            if memory is not None:
                for held in memory.rows:
                    device.prepare(held.group, held.blocks_per_chunk, memory.bases)
            self._executors: dict[Direction, Executor] = {}
            for direction in Direction:
                spaced = governor if direction is Direction.GATHER else None
                self._executors[direction] = Executor(device, queue_max=_QUEUE_MAX, governor=spaced)
                resources.callback(self._executors[direction].close)
            self._resources = resources.pop_all()

    def submit(self, job: Job) -> None:
        """Queue a copy.

        Raises:
            Overloaded: too many are queued.
        """
        self._executors[job.plan.direction].submit(job)

    def close(self) -> None:
        """Carry out what is queued, or skip it where it was cancelled, and give everything back. Idempotent."""
        self._resources.close()
