"""The pool: host memory for chunks, in one sealed memfd.

The law: what ``open_pool`` returns is real. Its size was held against the memory that is free and against this
process's limits *before* it was taken, and every page is present, so that no later write can fail, wait for the kernel
or kill the daemon. The seals say that nobody, this process included, can shrink or grow it.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import resource
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np

from kvist.device import libc
from kvist.errors import ConfigError
from kvist.units import MIB, align_up, format_nbytes

_STEP_NBYTES: Final = 64 * MIB
_MEASURED_NBYTES: Final = 64 * MIB
_SEALS: Final = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
_CGROUP: Final = Path("/sys/fs/cgroup")


@dataclass(slots=True)
class Pool:
    """Mapped, present and sealed memory. Close it after everything that copies has stopped."""

    fd: int
    address: int
    nbytes: int
    view: memoryview
    """The same bytes, writable."""
    _mapping: mmap.mmap

    def close(self) -> None:
        """Unmap and close. Idempotent; views of the pool must be gone."""
        if self.fd >= 0:
            self.view.release()
            self._mapping.close()
            os.close(self.fd)
            self.fd = -1


def check_free_memory(nbytes: int) -> None:
    """Refuse a pool that this machine, container or process cannot hold.

    Raises:
        ConfigError: names the limit, what is free, and what was asked for.
    """
    for name, free in free_memory():
        if nbytes > free:
            raise ConfigError(
                f"a pool of {format_nbytes(nbytes)} does not fit: {name} leaves {format_nbytes(max(free, 0))}; "
                f"choose a smaller --pool"
            )


def open_pool(nbytes: int, *, num_threads: int, on_progress: Callable[[int], None]) -> Pool:
    """Create the pool and make all of its pages present, on ``num_threads`` threads.

    ``on_progress`` is called with the number of bytes that are present, from this thread.

    Raises:
        ConfigError: there is not enough memory; nothing stays allocated.
    """
    nbytes = align_up(nbytes, mmap.PAGESIZE)
    check_free_memory(nbytes)
    fd = os.memfd_create("kvist-pool", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(fd, nbytes)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _SEALS)
        mapping = mmap.mmap(fd, nbytes)
    except OSError as error:
        os.close(fd)
        raise ConfigError(f"a pool of {format_nbytes(nbytes)} cannot be made: {error}") from error
    address = int(np.frombuffer(mapping, dtype=np.uint8).ctypes.data)
    try:
        _populate(address, nbytes, num_threads, on_progress)
    except OSError as error:
        mapping.close()
        os.close(fd)
        raise ConfigError(f"a pool of {format_nbytes(nbytes)} cannot be populated: {error}") from error
    return Pool(fd, address, nbytes, memoryview(mapping), mapping)


def measure_memcpy(pool: Pool) -> float:
    """Return how fast one thread copies inside a pool that nobody uses yet, in bytes per second."""
    nbytes = min(_MEASURED_NBYTES, pool.nbytes // 2)
    bytes_of = np.frombuffer(pool.view, dtype=np.uint8)
    source, target = bytes_of[:nbytes], bytes_of[nbytes : 2 * nbytes]
    began_at = time.perf_counter()
    np.copyto(target, source)
    return nbytes / (time.perf_counter() - began_at)


def _populate(address: int, nbytes: int, num_threads: int, on_progress: Callable[[int], None]) -> None:
    starts = range(0, nbytes, _STEP_NBYTES)
    with ThreadPoolExecutor(num_threads, thread_name_prefix="kvist-populate") as threads:
        steps = [threads.submit(libc.populate, address + at, min(_STEP_NBYTES, nbytes - at)) for at in starts]
        try:
            for start, step in zip(starts, steps, strict=True):
                step.result()
                on_progress(min(start + _STEP_NBYTES, nbytes))
        except OSError:
            threads.shutdown(cancel_futures=True)
            raise


def free_memory() -> Iterator[tuple[str, int]]:
    """Yield what limits this process's memory, and how many bytes each limit leaves."""
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            yield "the machine's available memory", int(line.split()[1]) * 1024
    group = next((line[3:] for line in Path("/proc/self/cgroup").read_text().splitlines() if line[:3] == "0::"), None)
    for folder in [_CGROUP / group.strip("/"), _CGROUP] if group is not None else []:
        limit, current = folder / "memory.max", folder / "memory.current"
        if limit.is_file() and current.is_file() and (text := limit.read_text().strip()) != "max":
            yield f"the control group's limit ({limit})", int(text) - int(current.read_text())
    soft, _ = resource.getrlimit(resource.RLIMIT_AS)
    if soft != resource.RLIM_INFINITY:
        pages = int(Path("/proc/self/statm").read_text().split()[0])
        yield "the process's limit (ulimit -v)", soft - pages * mmap.PAGESIZE
