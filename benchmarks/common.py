"""What the benchmarks share: a daemon, a stand-in for an engine's memory, and honest figures.

The law: a figure is printed beside its ceiling or its peer from the same run, as one JSON line, with the machine's load
before the run; medians of interleaved repetitions, with the quartiles as spread.
"""

from __future__ import annotations

import fcntl
import json
import mmap
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from kvist.client.client import Client
from kvist.device.libc import copy_memory
from kvist.model.keys import Namespace, Tokens, as_tokens, chain_digests, root_digest
from kvist.wire import messages as wire

DEADLINE_S = 30.0


@contextmanager
def daemon(pool: str, *options: str) -> Iterator[tuple[str, int]]:
    """Run ``kvist serve``; yield its socket and its pid."""
    with tempfile.TemporaryDirectory(prefix="kvist-bench-") as folder:
        socket = f"{folder}/kvist.sock"
        command = [
            sys.executable,
            "-m",
            "kvist",
            "serve",
            "--pool",
            pool,
            "--socket",
            socket,
            "--http",
            "off",
            *options,
        ]
        with open(f"{folder}/log", "wb") as log:
            process = subprocess.Popen(command, stderr=log)
        try:
            wait_until(lambda: os.path.exists(socket) or process.poll() is not None, 120)
            if process.poll() is not None:
                raise SystemExit(Path(f"{folder}/log").read_text())
            yield socket, process.pid
        finally:
            if process.poll() is None:
                process.send_signal(signal.SIGTERM)
                process.wait(30)


def wait_until(is_so: Callable[[], object], within_s: float) -> float:
    """Poll until a condition holds; return after how many seconds it did."""
    begin = time.monotonic()
    while not is_so():
        if time.monotonic() - begin > within_s:
            raise SystemExit(f"a condition did not hold within {within_s} s")
        time.sleep(0.0005)
    return time.monotonic() - begin


@dataclass(frozen=True)
class Shape:
    """A host layout: one opaque page per layer and block."""

    name: str
    num_layers: int
    page_nbytes: int
    num_blocks: int
    block_tokens: int = 128

    @property
    def chunk_nbytes(self) -> int:
        return self.num_layers * self.page_nbytes


class FakeEngine:
    """KV memory in a sealed memfd, and a client that has registered it."""

    def __init__(self, socket: str, shape: Shape, name: str = "benchmark") -> None:
        self.shape = shape
        nbytes = shape.num_layers * shape.num_blocks * shape.page_nbytes
        self.fd = os.memfd_create("kvist-kv", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        os.ftruncate(self.fd, nbytes)
        fcntl.fcntl(self.fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
        whole = np.frombuffer(mmap.mmap(self.fd, nbytes), dtype=np.uint8)
        self.memory = whole.reshape(shape.num_layers, shape.num_blocks, shape.page_nbytes)
        self.client = Client(socket, engine_id=name, name=name, deadline_s=DEADLINE_S, registrar=self._register)
        self.client.register()

    def _register(self, number: int) -> tuple[wire.Register, Sequence[int]]:
        shape = self.shape
        stride = shape.num_blocks * shape.page_nbytes
        planes = [
            wire.PlaneSpec(0, layer * stride, shape.num_blocks, shape.page_nbytes, shape.page_nbytes)
            for layer in range(shape.num_layers)
        ]
        group = wire.GroupSpec("full", shape.block_tokens, planes, 0)
        memory = [wire.MemorySpec("host", self.memory.nbytes)]
        return wire.Register(number, shape.block_tokens, memory, [group]), [self.fd]


def shared_memory(nbytes: int) -> npt.NDArray[np.uint8]:
    """Return memory of the pool's kind, with all of its pages present."""
    fd = os.memfd_create("kvist-bench", os.MFD_CLOEXEC)
    os.ftruncate(fd, nbytes)
    memory = np.frombuffer(mmap.mmap(fd, nbytes), dtype=np.uint8)
    os.close(fd)
    memory[:] = 1
    return memory


def make_tokens(num_tokens: int, seed: int) -> list[int]:
    """Return a prompt as an engine has it: a list of ints."""
    values: list[int] = np.random.default_rng(seed).integers(0, 128_000, num_tokens).tolist()
    return values


def make_digests(tokens: Sequence[int] | Tokens, chunk_tokens: int, model: str = "benchmark") -> bytes:
    """Return the keys of a prompt."""
    namespace = Namespace(model, "", "bfloat16", "pages", "tp1", chunk_tokens)
    return chain_digests(root_digest(namespace), as_tokens(tokens), chunk_tokens)


Copy = tuple[int, int, int]
"""Source, target, bytes."""


def memcpy_s(copies: Sequence[Copy]) -> float:
    """Copy on this thread; return the seconds."""
    begin = time.perf_counter()
    for source, target, nbytes in copies:
        copy_memory(target, source, nbytes)
    return time.perf_counter() - begin


def report(case: str, **figures: object) -> None:
    """Print one JSON line, with the load of the last minute."""
    rounded = {name: round(value, 4) if isinstance(value, float) else value for name, value in figures.items()}
    print(json.dumps({"case": case, **rounded, "load": round(os.getloadavg()[0], 2)}), flush=True)


def quartiles(values: Sequence[float]) -> list[float]:
    """Return the first quartile, the median and the third quartile."""
    return [round(value, 4) for value in statistics.quantiles(values, n=4)]


def cpu_s(pid: int) -> float:
    """Return the processor time that a process has used."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
