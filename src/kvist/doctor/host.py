"""This machine's limits and ceilings, as this process sees them."""

from __future__ import annotations

import os
import re
import resource
import time
from pathlib import Path
from typing import Final

import numpy as np

from kvist.doctor.facts import Host, NotKnown, NumaNode
from kvist.storage.pool import free_memory
from kvist.units import KIB, MIB

_COPIED_NBYTES: Final = 64 * MIB
_NUM_COPIES: Final = 3
_SHM: Final = "/dev/shm"  # noqa: S108 -- looked at, not used
_SHMEM_HUGE: Final = Path("/sys/kernel/mm/transparent_hugepage/shmem_enabled")
_NODES: Final = Path("/sys/devices/system/node")


def look_at_host() -> Host:
    """Return limits, and how fast one thread copies; takes some tenths of a second."""
    release = re.match(r"(\d+)\.(\d+)", os.uname().release)
    assert release is not None, os.uname().release
    return Host(
        kernel=(int(release[1]), int(release[2])),
        descriptors_max=_limit(resource.getrlimit(resource.RLIMIT_NOFILE)[1]),
        locked_nbytes_max=_limit(resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]),
        shm_nbytes=_shm_nbytes(),
        shmem_huge=_shmem_huge(_SHMEM_HUGE),
        numa_nodes=numa_nodes(_NODES),
        memory_left=tuple(free_memory()),
        copy_rate=_copy_rate(),
    )


def numa_nodes(folder: Path) -> tuple[NumaNode, ...] | NotKnown:
    """Return the nodes of memory that the kernel describes below ``folder``."""
    nodes = []
    try:
        for path in sorted(folder.glob("node[0-9]*")):
            fields = dict(re.findall(r"(\w+):\s+(\d+) kB", (path / "meminfo").read_text()))
            number = int(path.name.removeprefix("node"))
            nodes.append(NumaNode(number, int(fields["MemTotal"]) * KIB, int(fields["MemFree"]) * KIB))
    except (OSError, KeyError) as error:
        return NotKnown(f"{folder}: {error}")
    return tuple(nodes) or NotKnown(f"{folder} describes no node")


def _limit(value: int) -> int | None:
    return None if value == resource.RLIM_INFINITY else value


def _shm_nbytes() -> int | NotKnown:
    try:
        figures = os.statvfs(_SHM)
    except OSError as error:
        return NotKnown(f"{_SHM}: {error.strerror}")
    return figures.f_blocks * figures.f_frsize


def _shmem_huge(path: Path) -> str | NotKnown:
    try:
        chosen = re.search(r"\[(\w+)\]", path.read_text())
    except OSError as error:
        return NotKnown(f"{path}: {error.strerror}")
    return chosen[1] if chosen else NotKnown(f"{path} says nothing")


def _copy_rate() -> float:
    source, target = np.ones(_COPIED_NBYTES, dtype=np.uint8), np.zeros(_COPIED_NBYTES, dtype=np.uint8)
    shortest_s = float("inf")
    for _ in range(_NUM_COPIES):
        began_at = time.perf_counter()
        np.copyto(target, source)
        shortest_s = min(shortest_s, time.perf_counter() - began_at)
    return _COPIED_NBYTES / shortest_s
