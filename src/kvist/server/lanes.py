"""Which device serves which memory, and the threads that use it.

The law: a lane is made when memory of its device is first registered, and stays; what it costs while nobody has memory
there is two idle threads. A device type registers itself in one table; others come in through an entry point.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib.metadata import entry_points
from typing import Final

from kvist.device.base import Device
from kvist.device.cuda.device import CudaDevice, PoolFile
from kvist.device.host import HostDevice
from kvist.errors import LayoutRefused
from kvist.model.transfer import Direction
from kvist.storage.pool import Pool
from kvist.transfer.executor import Executor

logger = logging.getLogger(__name__)

ENTRY_POINTS: Final = "kvist.devices"
"""Group of entry points whose names are device types and whose values are of type ``MakeDevice``."""


LANES_MAX: Final = 64
"""More devices than a host has: a name that a peer makes up must not cost threads without end."""


@dataclass(frozen=True, slots=True)
class DeviceContext:
    """What a device is made from."""

    pool: Pool
    copy_threads: int


MakeDevice = Callable[[str, DeviceContext], Device]
"""Makes the device of a UUID, which is empty for host memory."""


@dataclass(frozen=True, slots=True)
class Lane:
    """A device, and the executors on whose threads it is used: one for each direction where both can go at once."""

    device: Device
    loads: Executor
    stores: Executor

    def executor(self, direction: Direction) -> Executor:
        """Return the executor for copies in a direction."""
        return self.loads if direction is Direction.SCATTER else self.stores

    def close(self) -> None:
        """Finish what is queued, stop the threads, and close the device."""
        self.loads.close()
        self.stores.close()
        self.device.close()


class Lanes:
    """All lanes of one daemon. Used by the loop alone."""

    def __init__(self, context: DeviceContext, *, queue_max: int) -> None:
        self._context = context
        self._queue_max = queue_max
        self._makers = _device_types()
        self._lanes: dict[str, Lane] = {}

    def __getitem__(self, name: str) -> Lane:
        """Return the lane of a ``MemoryHandle.lane``.

        Raises:
            LayoutRefused: nobody serves that type of device, and the known ones are named; or there are too many.
        """
        if name not in self._lanes:
            device_type, _, device_uuid = name.partition(":")
            if device_type not in self._makers:
                raise LayoutRefused(f"memory on {device_type!r} is not served; known types: {sorted(self._makers)}")
            if len(self._lanes) >= LANES_MAX:
                raise LayoutRefused(
                    f"memory on {name!r}, after that of {len(self._lanes)} devices; at most {LANES_MAX}"
                )
            device = self._makers[device_type](device_uuid, self._context)
            loads = Executor(device, queue_max=self._queue_max)
            stores = loads if device_type == "host" else Executor(device, queue_max=self._queue_max)
            self._lanes[name] = Lane(device, loads, stores)
        return self._lanes[name]

    def close(self) -> None:
        """Close every lane. Idempotent."""
        while self._lanes:
            self._lanes.popitem()[1].close()


def _host(_: str, context: DeviceContext) -> Device:
    return HostDevice(context.pool.view, context.pool.address, num_threads=context.copy_threads)


def _cuda(device_uuid: str, context: DeviceContext) -> Device:
    return CudaDevice(device_uuid, PoolFile(context.pool.fd, context.pool.nbytes))


def _device_types() -> Mapping[str, MakeDevice]:
    found: dict[str, MakeDevice] = {"host": _host, "cuda": _cuda}
    for point in entry_points(group=ENTRY_POINTS):
        found[point.name] = point.load()
        logger.info("device type registered type=%s by=%s", point.name, point.value)
    return found
