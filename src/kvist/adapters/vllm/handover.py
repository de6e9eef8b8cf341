"""A worker's memory, handed to the daemon or kept for threads of ours in the worker.

The law: block ids mean the same to whoever copies; what differs between the lanes is only whose addresses they become.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from kvist.client.client import Client
from kvist.client.lane import EngineLane
from kvist.client.pool import LaneMemory
from kvist.client.waiting import WaitingClient
from kvist.device.cuda.device import CudaDevice, PoolFile
from kvist.device.cuda.export import device_of, export_memory
from kvist.device.cuda.fences import SharedFence, StreamFences
from kvist.model.handles import ENGINE, MemoryHandle
from kvist.model.rows import RowMemory
from kvist.transfer.governor import Governor
from kvist.wire import messages as wire
from kvist.wire.describing import describe_memory, describe_row


class Way(enum.Enum):
    """Who copies on a GPU, and who waits for the engine's work before that."""

    ENGINE = "engine"
    DAEMON = "daemon"
    DAEMON_WITHOUT_EVENTS = "daemon, without events"


@dataclass(frozen=True, slots=True)
class HandedOver:
    """What a registration says, and what goes with it."""

    rows: tuple[RowMemory, ...]
    handles: tuple[MemoryHandle, ...]
    bases: tuple[int, ...] = ()
    """Addresses in this process, where it copies for itself."""
    fds: tuple[int, ...] = ()
    fence: SharedFence | None = None
    waits_itself: bool = False
    """The daemon has no event to wait for: the worker asks when its work so far is done."""

    def requests(self, client: Client, governor: Governor) -> Client | WaitingClient | EngineLane:
        """Return where the worker's requests go: to the daemon, or to threads that copy."""
        if not self.bases:
            return WaitingClient(client, StreamFences(current_stream)) if self.waits_itself else client
        device = self.handles[0].device
        return EngineLane(
            client, LaneMemory(self.rows, self.bases), lambda fd, nbytes: CudaDevice(device, PoolFile(fd, nbytes)),
            StreamFences(current_stream), governor,
        )  # fmt: skip

    def registration(self, request_id: int, *, chunk_tokens: int, texts: Sequence[str]) -> wire.Register:
        """Describe the memory to the daemon; ``fds`` travel beside it. ``texts`` are for people."""
        fence = self.fence.handle if self.fence is not None else b""
        rows = [describe_row(held) for held in self.rows]
        short = [text[: wire.TEXT_CHARS_MAX] for text in texts]
        return wire.Register(request_id, chunk_tokens, describe_memory(self.handles), rows, fence, short)


def keep_memory(rows: Sequence[RowMemory], storages: Sequence[Any]) -> HandedOver:
    """Describe memory that its own worker copies from and to.

    Raises:
        DeviceError: it is no memory of a GPU.
    """
    device = device_of(storages[0].data_ptr())
    handles = tuple(MemoryHandle(ENGINE, storage.nbytes(), device) for storage in storages)
    return HandedOver(tuple(rows), handles, tuple(storage.data_ptr() for storage in storages))


def share_memory(rows: Sequence[RowMemory], storages: Sequence[Any], *, waits_itself: bool = False) -> HandedOver:
    """Export memory for the daemon, each allocation once, and find every layer's place in it.

    An event goes with it, unless the worker is to wait itself.

    Raises:
        LayoutError: it cannot be exported; says what to change.
        FenceError: the memory can, and events cannot.
        DeviceError: CUDA fails.
    """
    exported, places = export_memory([(storage.data_ptr(), storage.nbytes()) for storage in storages])
    return HandedOver(
        tuple(_move(held, places) for held in rows),
        tuple(one.handle for one in exported),
        fds=tuple(fd for one in exported for fd in one.fds),
        fence=None if waits_itself else SharedFence(current_stream),
        waits_itself=waits_itself,
    )


def _move(held: RowMemory, places: Sequence[tuple[int, int]]) -> RowMemory:
    """Return a row whose planes lie in exported allocations: ``places`` says where each storage begins in which."""
    planes = tuple(
        replace(plane, memory=places[plane.memory][0], offset=plane.offset + places[plane.memory][1])
        for plane in held.group.planes
    )
    return replace(held, group=replace(held.group, planes=planes))


def current_stream() -> int:
    """Return the calling thread's stream, on which the engine computes."""
    return int(torch.cuda.current_stream().cuda_stream)
