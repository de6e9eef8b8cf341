"""A process with GPU memory of its own, which does what it is told over a socket.

Started as ``python -m tests.support.gpu_worker FD``. Each message is a JSON line: a command and its arguments; the
answer is a JSON line, with descriptors where the command exports.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from base64 import b64decode, b64encode
from pathlib import Path
from typing import Any

import numpy as np

from kvist.client.client import Client
from kvist.client.lane import EngineLane
from kvist.client.pool import LaneMemory
from kvist.device.cuda import driver
from kvist.device.cuda.device import CudaDevice, PoolFile
from kvist.device.cuda.export import export_memory
from kvist.device.cuda.fences import SharedFence, StreamFences
from kvist.errors import KvistError
from kvist.model.handles import ENGINE, MemoryHandle
from kvist.model.layout import GroupKind, LayerGroup, LayerPlane
from kvist.model.rows import Row, row_memory
from kvist.wire import messages as wire
from kvist.wire.describing import describe_memory, describe_row
from tests.support.memory import stamp

ROOT = Path(__file__).resolve().parents[2]


class GpuWorker:
    """The parent's end."""

    def __init__(self, **environment: str) -> None:
        ours, theirs = socket.socketpair()
        command = [sys.executable, "-m", "tests.support.gpu_worker", str(theirs.fileno())]
        settings = [f"{name}={value}" for name, value in environment.items()]
        self.process = subprocess.Popen(["env", *settings, *command], pass_fds=[theirs.fileno()], cwd=ROOT)
        theirs.close()
        ours.settimeout(120)
        self._socket = ours

    def ask(self, command: str, **arguments: Any) -> Any:
        """Return the answer to a command.

        Raises:
            RuntimeError: the command failed there; carries its words.
        """
        answer, _ = self._exchange(command, arguments)
        return answer

    def export(self, spans: list[tuple[int, int]]) -> tuple[list[MemoryHandle], list[list[int]], list[tuple[int, int]]]:
        """Return handles, the descriptors of each, and the place of each span."""
        answer, fds = self._exchange("export", {"spans": spans})
        handles = [
            MemoryHandle(kind, nbytes, device, b64decode(payload), tuple(parts))
            for kind, nbytes, device, payload, parts in answer["handles"]
        ]
        left = iter(fds)
        return handles, [[next(left) for _ in range(handle.num_fds)] for handle in handles], answer["places"]

    def close(self) -> None:
        """Kill it."""
        self.process.kill()
        self.process.wait()
        self._socket.close()

    def _exchange(self, command: str, arguments: dict[str, Any]) -> tuple[Any, list[int]]:
        self._socket.sendall(json.dumps([command, arguments]).encode() + b"\n")
        text, fds = b"", []
        while not text.endswith(b"\n"):
            data, more, _, _ = socket.recv_fds(self._socket, 65536, 253)
            assert data, f"the worker ended with {self.process.wait(10)}"
            text += data
            fds += more
        answer = json.loads(text)
        if "error" in answer:
            raise RuntimeError(answer["error"])
        return answer["ok"], fds


class _Commands:
    """The child's end: every public method is a command."""

    def __init__(self) -> None:
        self._context = driver.Context(next(iter(driver.devices())))
        self._context.use()
        self._stream = driver.call("cuStreamCreate", driver.STREAM_NON_BLOCKING)
        self._kept: list[Any] = []
        self.fds: list[int] = []

    def uuid(self) -> list[str]:
        return list(driver.devices())

    def allocate(self, nbytes: int) -> int:
        """``cuMemAlloc``."""
        return int(driver.call("cuMemAlloc", nbytes))

    def allocate_managed(self, nbytes: int) -> int:
        return int(driver.call("cuMemAllocManaged", nbytes, 1))

    def allocate_virtual(self, segments: list[int], is_exportable: bool) -> int:
        """Map physical segments behind one another, as a VMM allocator does."""
        names, call = driver.api(), driver.call
        prop = names.CUmemAllocationProp()
        prop.type = names.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
        prop.location.type = names.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
        prop.location.id = int(self._context.device)
        kinds = names.CUmemAllocationHandleType
        if is_exportable:
            prop.requestedHandleTypes = kinds.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR
        address = int(call("cuMemAddressReserve", sum(segments), 0, 0, 0))
        at = address
        for nbytes in segments:
            handle = call("cuMemCreate", nbytes, prop, 0)
            self._kept.append(handle)
            call("cuMemMap", at, nbytes, 0, handle, 0)
            at += nbytes
        access = names.CUmemAccessDesc()
        access.location = prop.location
        access.flags = names.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
        call("cuMemSetAccess", address, sum(segments), [access], 1)
        return address

    def torch_tensors(self, sizes: list[int]) -> list[int]:
        """Allocate with torch's caching allocator, whatever it is configured to be."""
        import torch  # noqa: PLC0415 -- only where a test asks for it

        tensors = [torch.empty(nbytes, dtype=torch.uint8, device="cuda") for nbytes in sizes]
        self._kept += tensors
        return [tensor.data_ptr() for tensor in tensors]

    def stamp(self, address: int, nbytes: int, name: str) -> None:
        """Fill memory so that every byte names its place."""
        data = np.frombuffer(stamp(name.encode(), nbytes), dtype=np.uint8).copy()
        driver.call("cuMemcpyHtoD", address, data.ctypes.data, nbytes)

    def read(self, address: int, nbytes: int) -> str:
        data = np.empty(nbytes, dtype=np.uint8)
        driver.call("cuMemcpyDtoH", data.ctypes.data, address, nbytes)
        return b64encode(data.tobytes()).decode()

    def free_nbytes(self) -> int:
        """How much memory of the GPU is free."""
        return int(driver.call("cuMemGetInfo")[0])

    def engine(self, socket: str, lane: str, num_blocks: int, page_nbytes: int) -> int:
        """Be an engine: KV memory of two layers, registered with a daemon; return its address."""
        nbytes = 2 * num_blocks * page_nbytes
        address = self.allocate(nbytes)
        planes = [
            LayerPlane(0, layer * num_blocks * page_nbytes, num_blocks, page_nbytes, page_nbytes) for layer in range(2)
        ]
        row = row_memory(Row(0, 0), LayerGroup(GroupKind.FULL, 16, tuple(planes), 0), 32)
        exported, _ = export_memory([(address, nbytes)])
        handle = exported[0].handle
        self._fence = SharedFence(lambda: int(self._stream))
        if lane == "engine":
            handle = MemoryHandle(ENGINE, nbytes, handle.device)
        memory = describe_memory([handle])
        fence = self._fence.handle if lane == "daemon" else b""

        def registrar(number: int) -> tuple[wire.Register, tuple[int, ...]]:
            return wire.Register(number, 32, memory, [describe_row(row)], fence), ()

        client = Client(socket, engine_id=lane, name=f"gpu worker {os.getpid()}", deadline_s=60, registrar=registrar)
        if lane == "engine":
            device = handle.device
            self._requests: Any = EngineLane(
                client, LaneMemory([row], [address]), lambda fd, size: CudaDevice(device, PoolFile(fd, size)),
                StreamFences(lambda: int(self._stream)),
            )  # fmt: skip
        else:
            self._requests = client
        self._requests.register(60)
        self._lookups = Client(socket, engine_id=lane, name="lookups", deadline_s=60)
        return address

    def queue_slow_stamp(self, address: int, nbytes: int, name: str) -> None:
        """Let the stream write stamps, long after this returns."""
        data = np.frombuffer(stamp(name.encode(), nbytes), dtype=np.uint8).copy()
        source = self.allocate(nbytes)
        call = driver.call
        call("cuMemcpyHtoD", source, data.ctypes.data, nbytes)
        busy = self.allocate(1 << 30)
        for _ in range(100):
            call("cuMemsetD8Async", busy, 1, 1 << 30, self._stream)
        call("cuMemcpyDtoDAsync", address, source, nbytes, self._stream)

    def store(self, digests: str, blocks: list[int], is_fenced: bool = False) -> list[int]:
        """Store chunks; return how many were stored, present and refused."""
        if is_fenced:
            self._fence.record()
        packed = np.array(blocks, dtype="<i4").tobytes()
        reply = self._wait(lambda i: wire.Store(i, b64decode(digests), b"", packed, is_fenced=is_fenced))
        assert isinstance(reply, wire.StoreReply), reply
        return [reply.num_stored, reply.num_present, reply.num_refused]

    def load(self, digests: str, blocks: list[int]) -> list[int]:
        """Look chunks up until all are there, load them, and return those that failed."""
        keys = b64decode(digests)
        packed = np.array(blocks, dtype="<i4").tobytes()
        found = self._lookups.call(lambda i: wire.Lookup(i, keys))
        while isinstance(found, wire.LookupReply) and found.num_chunks < len(keys) // 16:
            found = self._lookups.call(lambda i: wire.Lookup(i, keys))
        assert isinstance(found, wire.LookupReply), found
        reply = self._wait(lambda i: wire.Retrieve(i, found.lease, 0, packed))
        assert isinstance(reply, wire.RetrieveReply), reply
        return reply.failed

    def _wait(self, build: Any) -> wire.Reply | None:
        pending = self._requests.submit(build)
        while not pending.is_over:
            self._requests.poll(1.0)
        return pending.reply

    def export(self, spans: list[tuple[int, int]]) -> dict[str, Any]:
        exported, places = export_memory([tuple(span) for span in spans])
        self.fds = [fd for one in exported for fd in one.fds]
        handles = [
            (h.kind, h.nbytes, h.device, b64encode(h.payload).decode(), h.part_nbytes)
            for h in (one.handle for one in exported)
        ]
        return {"handles": handles, "places": places}


def main() -> None:
    sock = socket.socket(fileno=int(sys.argv[1]))
    commands = _Commands()
    for line in sock.makefile("rb"):
        name, arguments = json.loads(line)
        try:
            answer = {"ok": getattr(commands, name)(**arguments)}
        except (KvistError, OSError) as error:
            answer = {"error": f"{type(error).__name__}: {error}"}
        text = json.dumps(answer).encode() + b"\n"
        if commands.fds:
            socket.send_fds(sock, [text], commands.fds)
            for fd in commands.fds:
                os.close(fd)
            commands.fds = []
        else:
            sock.sendall(text)


if __name__ == "__main__":
    main()
