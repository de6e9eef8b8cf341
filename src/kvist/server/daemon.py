"""The composition root: a pool, a device, a service and a socket make a daemon; a signal ends it in order.

The law of the stop: new work is refused, copies that have begun are finished and answered (for at most ``drain_s``)
and what was stored goes to the tiers; then sessions end, memory is unmapped, threads are joined, the socket's path is
gone, and the tiers are closed, with what a later start needs of them. HTTP is answered until sessions have ended.
"""

from __future__ import annotations

import asyncio
import logging
import os
import resource
import secrets
import signal
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import uvloop

from kvist import __version__
from kvist.errors import LayoutRefused
from kvist.index.eviction import LeastRecentlyUsed
from kvist.server.config import ServeConfig, process_environment
from kvist.server.lanes import DeviceContext, Lanes
from kvist.server.listening import Access
from kvist.server.readiness import Supervisor
from kvist.server.runtime import Runtime
from kvist.server.service import CacheService
from kvist.server.transport import Transport, descriptors_max
from kvist.server.web import Door, open_door, supervise
from kvist.storage.base import Tier
from kvist.storage.disk.tier import DiskTier
from kvist.storage.pool import Pool, measure_memcpy, open_pool
from kvist.storage.slots import SlotAllocator
from kvist.tiering.controller import TiersBehind, WritePolicy
from kvist.units import format_nbytes
from kvist.wire import messages as wire
from kvist.wire.codec import FRAME_NBYTES_MAX

logger = logging.getLogger(__name__)

_SWITCH_INTERVAL_S: Final = 1e-4
"""How long a thread may keep the interpreter from the loop; Python's default of 5 ms would be the loop's latency."""
_TICK_S: Final = 0.25
_POPULATE_THREADS_MAX: Final = 16


@dataclass(frozen=True, slots=True)
class Started:
    """What people are told when clients can connect."""

    status: wire.StatusReply
    """With what was measured."""
    url: str
    """Where HTTP is; empty if it is nowhere."""


OnReady = Callable[[Started], None]


def run(config: ServeConfig, *, on_progress: Callable[[int], None], on_ready: OnReady) -> None:
    """Serve until SIGTERM or SIGINT.

    ``on_progress`` is told how many bytes of the pool are present, ``on_ready`` that clients can connect.

    Raises:
        ConfigError: the pool, the socket or HTTP's address cannot be had; nothing is left behind.
    """
    sys.setswitchinterval(_SWITCH_INTERVAL_S)
    _raise_descriptor_limit()
    supervisor = Supervisor(process_environment())
    supervisor.starting(f"making a pool of {format_nbytes(config.pool)} present")
    num_threads = min(_POPULATE_THREADS_MAX, os.cpu_count() or 1)
    with ExitStack() as stack:
        door = open_door(config.http, config.http_token_file)
        if door is not None:
            stack.callback(door.close)
        began_at = time.monotonic()
        pool = open_pool(config.pool, num_threads=num_threads, on_progress=on_progress)
        stack.callback(pool.close)
        rates = {"populate": pool.nbytes / (time.monotonic() - began_at), "memcpy": measure_memcpy(pool)}
        uvloop.run(_serve(config, pool, rates, door, supervisor, on_ready))


async def _serve(
    config: ServeConfig,
    pool: Pool,
    rates: Mapping[str, float],
    door: Door | None,
    supervisor: Supervisor,
    on_ready: OnReady,
) -> None:
    loop = asyncio.get_running_loop()
    lanes = Lanes(DeviceContext(pool, config.copy_threads), queue_max=config.copies_max)
    boot_id = secrets.token_hex(8)
    limits = wire.Limits(
        frame_nbytes_max=FRAME_NBYTES_MAX, chunks_max=wire.CHUNKS_MAX, blocks_max=wire.BLOCKS_MAX,
        requests_max=config.requests_max, lease_ttl_s=config.lease_ttl_s,
    )  # fmt: skip
    runtime = Runtime(
        pid=os.getpid(), boot_id=boot_id, post=lambda call: _post(loop, call), clock=time.monotonic,
        new_id=lambda: secrets.token_bytes(16), lanes=lanes, watch=lambda pid: _ProcessWatch(loop, pid),
        rates=rates, pool_fd=None if config.isolate else pool.fd,
    )  # fmt: skip
    tiers = _open_tiers(config)
    behind = TiersBehind(pool.view, tiers, WritePolicy(config.disk_write))
    service = CacheService(
        runtime, SlotAllocator(pool.nbytes), LeastRecentlyUsed(), limits=limits, behind=behind, quotas=config.quotas
    )
    try:
        transport = Transport(
            service, config.socket_path, boot_id=boot_id, access=Access.of(config.allow_uids, config.socket_group),
            sessions_max=config.sessions_max, limits=limits,
        )  # fmt: skip
        await _until_signalled(config, service, transport, door, supervisor, on_ready)
    finally:
        lanes.close()
        for tier in tiers:
            tier.close()


def _open_tiers(config: ServeConfig) -> list[Tier]:
    """Open what is behind the pool, the fastest first.

    Raises:
        ConfigError: a directory cannot be used as it is asked for.
    """
    if not config.disk:
        return []
    tier = DiskTier([Path(folder) for folder in config.disk], config.disk_size)
    stats = tier.stats()
    logger.info(
        "tier opened name=%s capacity=%s used=%s chunks=%d off_reason=%s",
        tier.name, format_nbytes(stats.capacity_nbytes), format_nbytes(stats.used_nbytes), stats.num_chunks,
        stats.off_reason,
    )  # fmt: skip
    return [tier]


async def _until_signalled(
    config: ServeConfig,
    service: CacheService,
    transport: Transport,
    door: Door | None,
    supervisor: Supervisor,
    on_ready: OnReady,
) -> None:
    loop = asyncio.get_running_loop()
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    async with asyncio.TaskGroup() as tasks:
        beside = [tasks.create_task(_expire_leases(service))]
        if door is not None:
            beside.append(tasks.create_task(supervise(door, config.socket_path)))
        logger.info(
            "serving version=%s pid=%d socket=%s pool=%s descriptors_max=%d",
            __version__, os.getpid(), config.socket_path, format_nbytes(config.pool), descriptors_max(),
        )  # fmt: skip
        supervisor.ready(f"serving {config.socket_path} with a pool of {format_nbytes(config.pool)}")
        on_ready(Started(service.status(0), "" if door is None else door.url))
        await stop.wait()
        supervisor.stopping(f"finishing {service.num_copies_in_flight} copies")
        logger.info("stopping copies=%d", service.num_copies_in_flight)
        service.begin_draining()
        transport.stop_listening()
        await service.wait_drained(config.drain_s)
        await transport.close()
        for task in beside:
            task.cancel()
    logger.info("stopped")


def _raise_descriptor_limit() -> None:
    """Take as many descriptors as the system allows, since one engine may hand thousands over."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def _post(loop: asyncio.AbstractEventLoop, call: Callable[[], None]) -> None:
    loop.call_soon_threadsafe(call)


class _ProcessWatch:
    """A process, held by a descriptor, so that its number cannot become another's.

    The descriptor is readable when all threads of the process have ended and its files are closed, those of its GPU
    included.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, pid: int) -> None:
        """Begin to watch.

        Raises:
            LayoutRefused: the process cannot be seen from here, or has ended.
        """
        self._loop = loop
        try:
            self._fd = os.pidfd_open(pid)
        except OSError as error:
            raise LayoutRefused(
                f"process {pid} cannot be watched ({error}), so it cannot copy for itself; use the daemon lane"
            ) from error

    def when_ended(self, callback: Callable[[], None]) -> None:
        self._loop.add_reader(self._fd, self._ended, callback)

    def close(self) -> None:
        if self._fd >= 0:
            self._loop.remove_reader(self._fd)
            os.close(self._fd)
            self._fd = -1

    def _ended(self, callback: Callable[[], None]) -> None:
        self._loop.remove_reader(self._fd)
        callback()


async def _expire_leases(service: CacheService) -> None:
    while True:
        await asyncio.sleep(_TICK_S)
        service.expire_leases()
