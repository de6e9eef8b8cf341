"""Memory as an engine owns it: a sealed memfd, and bytes that say whose they are."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import mmap
import os
import resource
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import numpy.typing as npt

GUARD = 0xA5
"""Fills what a test's subject must not touch."""
SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW


class SharedMemory:
    """A memfd and a view of its bytes. The owner closes it."""

    def __init__(self, nbytes: int, *, name: str = "kvist-test", seals: int = SEALS) -> None:
        self.nbytes = nbytes
        self.fd = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        os.ftruncate(self.fd, nbytes)
        if seals:
            fcntl.fcntl(self.fd, fcntl.F_ADD_SEALS, seals)
        self._mapping = mmap.mmap(self.fd, nbytes)
        self.bytes: npt.NDArray[np.uint8] = np.frombuffer(self._mapping, dtype=np.uint8)

    def close(self) -> None:
        """Give the memory back. Idempotent; whoever else has it mapped keeps it."""
        if self.fd >= 0:
            del self.bytes
            with contextlib.suppress(BufferError):  # Somebody still has a view; the mapping goes with the last one.
                self._mapping.close()
            os.close(self.fd)
            self.fd = -1

    def __enter__(self) -> SharedMemory:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def stamp(name: bytes, nbytes: int) -> bytes:
    """Return bytes that no other name has, nor any other place under the same name."""
    return hashlib.shake_128(name).digest(nbytes)


def num_mappings(pid: int, name: str) -> int:
    """Return how many mappings of the memfd ``name`` process ``pid`` has."""
    return sum(f"/memfd:{name}" in line for line in Path(f"/proc/{pid}/maps").read_text().splitlines())


@contextlib.contextmanager
def numbered_fds(num: int) -> Iterator[list[int]]:
    """Yield memfds that hold their places in the list, ``number_of`` each."""
    fds: list[int] = []
    try:
        for number in range(num):
            fds.append(os.memfd_create("kvist-numbered", os.MFD_CLOEXEC))
            os.write(fds[-1], number.to_bytes(8, "big"))
        yield fds
    finally:
        for fd in fds:
            os.close(fd)


def number_of(fd: int) -> int:
    """Return which of ``numbered_fds`` a descriptor is."""
    return int.from_bytes(os.pread(fd, 8, 0), "big")


@contextlib.contextmanager
def many_fds() -> Iterator[int]:
    """Let this process have as many descriptors as the system allows it; yield how many."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    try:
        yield hard
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def num_fds(pid: int) -> int:
    """Return how many descriptors process ``pid`` has open."""
    return len(os.listdir(f"/proc/{pid}/fd"))
