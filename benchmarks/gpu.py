"""A stand-in for a GPU engine: KV memory of a real layout, registered with the daemon, and the link's own speed."""

from __future__ import annotations

import ctypes
import itertools
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from common import DEADLINE_S
from kvist.client.client import Client
from kvist.client.lane import EngineLane
from kvist.client.pool import LaneMemory
from kvist.device.cuda import driver
from kvist.device.cuda.device import CudaDevice, PoolFile
from kvist.device.cuda.export import device_of, export_memory
from kvist.device.cuda.fences import StreamFences
from kvist.model.handles import ENGINE, MemoryHandle
from kvist.model.layout import GroupKind, LayerGroup, LayerPlane
from kvist.model.rows import Row, row_memory
from kvist.transfer.governor import Governor
from kvist.wire import messages as wire
from kvist.wire.describing import describe_memory, describe_row


@dataclass(frozen=True)
class GpuLayout:
    """One allocation a layer, all alike. Bytes."""

    name: str
    num_layers: int
    block_tokens: int
    block_stride: int
    row_nbytes: int
    num_kv: int
    kv_stride: int
    """0: K and V lie in halves of the allocation."""
    token_stride: int
    num_heads: int = 1
    head_stride: int = 0

    @property
    def page_nbytes(self) -> int:
        return self.num_kv * self.block_tokens * self.num_heads * self.row_nbytes

    def memory_nbytes(self, num_blocks: int) -> int:
        """Return the size of each layer's allocation."""
        is_apart = self.num_kv > 1 and not self.kv_stride
        return num_blocks * self.block_stride * (2 if is_apart else 1)

    @property
    def token_nbytes(self) -> int:
        return self.num_layers * self.page_nbytes // self.block_tokens

    def group(self, num_blocks: int) -> LayerGroup:
        kv_stride = self.kv_stride or num_blocks * self.block_stride
        planes = tuple(
            LayerPlane(
                layer, 0, num_blocks, self.block_stride, self.row_nbytes, self.num_kv,
                kv_stride if self.num_kv > 1 else 0, self.block_tokens, self.token_stride, self.num_heads,
                self.head_stride,
            )
            for layer in range(self.num_layers)
        )  # fmt: skip
        return LayerGroup(GroupKind.FULL, self.block_tokens, planes, 0)


LLAMA_8B = [
    GpuLayout("Llama-3-8B NHD, K and V apart", 32, 16, 32_768, 2_048, 2, 0, 2_048),
    GpuLayout("Llama-3-8B NHD, K and V in a block", 32, 16, 65_536, 2_048, 2, 32_768, 2_048),
    GpuLayout("Llama-3-8B HND", 32, 16, 65_536, 256, 2, 32_768, 256, 8, 4_096),
    GpuLayout("Llama-3-8B fused [B, H, N, 2D]", 32, 16, 65_536, 256, 2, 256, 512, 8, 8_192),
]
OTHERS = [
    GpuLayout("one KV head, 80 layers", 80, 16, 8_192, 256, 2, 4_096, 256),
    GpuLayout("MLA, block 16", 61, 16, 18_432, 1_152, 1, 0, 1_152),
    GpuLayout("MLA, block 64", 61, 64, 73_728, 1_152, 1, 0, 1_152),
    GpuLayout("Llama-3-8B, all layers in a block", 1, 16, 2 << 20, 128 << 10, 1, 0, 128 << 10),
    GpuLayout("Llama-3-8B, 4 of 8 heads", 32, 16, 65_536, 1_024, 2, 32_768, 2_048),
    GpuLayout("Llama-3-8B, 1 of 8 heads", 32, 16, 65_536, 256, 2, 32_768, 2_048),
    GpuLayout("gpt-oss-120b, 18 full layers", 18, 16, 32_768, 1_024, 2, 16_384, 1_024),
    GpuLayout("sparse indexer, pages of 64 rows of 132 bytes", 61, 64, 8_448, 132, 1, 0, 132),
    GpuLayout("states of 18,688 bytes in pages of 65,536", 36, 256, 65_536, 73, 1, 0, 73),
]


MANY_LAYERS = GpuLayout("64 allocations", 64, 16, 65_536, 2_048, 2, 32_768, 2_048)


class GpuEngine:
    """GPU memory of a layout, filled with noise, and a client that has registered it."""

    def __init__(self, socket: str, layout: GpuLayout, num_blocks: int, *, chunk_tokens: int, name: str) -> None:
        self.layout = layout
        self.num_blocks = num_blocks
        self.chunk_tokens = chunk_tokens
        nbytes = layout.memory_nbytes(num_blocks)
        noise = np.random.default_rng(0).integers(0, 256, nbytes, dtype=np.uint8)
        self.memory = []
        for layer in range(layout.num_layers):
            self.memory.append(int(driver.call("cuMemAlloc", nbytes)))
            data = np.roll(noise, layer)
            driver.call("cuMemcpyHtoD", self.memory[-1], data.ctypes.data, nbytes)
        self._exported, _ = export_memory([(address, nbytes) for address in self.memory])
        self.client = Client(socket, engine_id=name, name=name, deadline_s=DEADLINE_S, registrar=self._register)
        begin = time.perf_counter()
        self.client.register(DEADLINE_S)
        self.registered_s = time.perf_counter() - begin

    def read(self, layer: int) -> np.ndarray[Any, np.dtype[np.uint8]]:
        """Return the bytes of a layer."""
        data = np.empty(self.layout.memory_nbytes(self.num_blocks), dtype=np.uint8)
        driver.call("cuMemcpyDtoH", data.ctypes.data, self.memory[layer], data.nbytes)
        return data

    def write(self, layer: int, data: np.ndarray[Any, np.dtype[np.uint8]]) -> None:
        """Set the bytes of a layer."""
        driver.call("cuMemcpyHtoD", self.memory[layer], data.ctypes.data, data.nbytes)

    def clear(self, layer: int) -> None:
        """Set a layer to zero."""
        driver.call("cuMemsetD8", self.memory[layer], 0, self.layout.memory_nbytes(self.num_blocks))

    def close(self) -> None:
        """Leave the daemon and free the memory."""
        self.client.close()
        for address in self.memory:
            driver.call("cuMemFree", address)

    def _register(self, number: int) -> tuple[wire.Register, Sequence[int]]:
        memory = describe_memory([one.handle for one in self._exported])
        row = row_memory(Row(0, 0), self.layout.group(self.num_blocks), self.chunk_tokens)
        fds = list(itertools.chain.from_iterable(one.fds for one in self._exported))
        return wire.Register(number, self.chunk_tokens, memory, [describe_row(row)]), fds


def start_lane(socket: str, engine: GpuEngine, governor: Governor | None = None) -> EngineLane:
    """Copy an engine's memory with threads of this process; a ``governor`` is told of its steps by the caller."""
    row = row_memory(Row(0, 0), engine.layout.group(engine.num_blocks), engine.chunk_tokens)
    device = device_of(engine.memory[0])
    nbytes = engine.layout.memory_nbytes(engine.num_blocks)
    memory = describe_memory([MemoryHandle(ENGINE, nbytes, device) for _ in engine.memory])

    def registrar(number: int) -> tuple[wire.Register, tuple[int, ...]]:
        return wire.Register(number, engine.chunk_tokens, memory, [describe_row(row)]), ()

    lane = EngineLane(
        Client(socket, engine_id=engine.layout.name, name="lane", deadline_s=DEADLINE_S, registrar=registrar),
        LaneMemory([row], engine.memory),
        lambda fd, nbytes: CudaDevice(device, PoolFile(fd, nbytes)), StreamFences(lambda: 0), governor,
    )  # fmt: skip
    lane.register(DEADLINE_S)
    return lane


class Link:
    """Plain copies between pinned memory and the GPU: the ceiling."""

    def __init__(self, nbytes_max: int) -> None:
        self._streams = [driver.call("cuStreamCreate", 1) for _ in range(2)]
        self._host = [int(driver.call("cuMemHostAlloc", nbytes_max, 0)) for _ in range(2)]
        self._gpu = [int(driver.call("cuMemAlloc", nbytes_max)) for _ in range(2)]
        self._events = [driver.call("cuEventCreate", 0) for _ in range(4)]
        for host in self._host:
            ctypes.memset(host, 1, nbytes_max)

    def out_s(self, nbytes: int) -> float:
        """Return the seconds of one copy to the host."""
        return self._timed(
            0, lambda: driver.call("cuMemcpyDtoHAsync", self._host[0], self._gpu[0], nbytes, self._streams[0])
        )

    def in_s(self, nbytes: int) -> float:
        """Return the seconds of one copy to the GPU."""
        return self._timed(
            1, lambda: driver.call("cuMemcpyHtoDAsync", self._gpu[1], self._host[1], nbytes, self._streams[1])
        )

    def both_s(self, nbytes: int) -> float:
        """Return the seconds of a copy of so many bytes in each direction, at once."""
        call, streams, events = driver.call, self._streams, self._events
        call("cuEventRecord", events[0], streams[0])
        call("cuStreamWaitEvent", streams[1], events[0], 0)
        call("cuMemcpyDtoHAsync", self._host[0], self._gpu[0], nbytes, streams[0])
        call("cuMemcpyHtoDAsync", self._gpu[1], self._host[1], nbytes, streams[1])
        call("cuEventRecord", events[1], streams[1])
        call("cuStreamWaitEvent", streams[0], events[1], 0)
        call("cuEventRecord", events[2], streams[0])
        call("cuEventSynchronize", events[2])
        return float(call("cuEventElapsedTime", events[0], events[2])) / 1e3

    def _timed(self, number: int, copy: Any) -> float:
        first, last = self._events[:2]
        driver.call("cuEventRecord", first, self._streams[number])
        copy()
        driver.call("cuEventRecord", last, self._streams[number])
        driver.call("cuEventSynchronize", last)
        return float(driver.call("cuEventElapsedTime", first, last)) / 1e3
