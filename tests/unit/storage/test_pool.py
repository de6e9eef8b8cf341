"""A pool is real: as large as it says, present, sealed; and what cannot be had is refused before it is taken."""

import fcntl
import mmap
import os
from pathlib import Path

import numpy as np
import pytest

from kvist.errors import ConfigError
from kvist.storage import pool as pool_module
from kvist.storage.pool import check_free_memory, open_pool
from kvist.units import GIB, KIB, MIB
from tests.support.memory import num_fds, num_mappings


def resident_nbytes(name: str) -> int:
    """Return how much of this process's mapping of memfd ``name`` is present."""
    with open("/proc/self/smaps") as lines:
        is_inside = False
        for line in lines:
            if "-" in line.split()[0]:
                is_inside = f"/memfd:{name}" in line
            elif is_inside and line.startswith("Rss:"):
                return int(line.split()[1]) * 1024
    return 0


def test_every_page_is_present_and_writable():
    """All pages are there on return; both views show the same bytes, from the first to the last."""
    pool = open_pool(3 * MIB, num_threads=2, on_progress=lambda _: None)
    try:
        assert resident_nbytes("kvist-pool") == pool.nbytes == 3 * MIB
        seen = np.frombuffer(pool.view, dtype=np.uint8)
        assert seen.ctypes.data == pool.address
        assert not seen.any()
        seen[:: mmap.PAGESIZE] = 7
        seen[-1] = 9
        assert os.pread(pool.fd, 1, 0) == b"\x07"
        assert os.pread(pool.fd, 1, pool.nbytes - 1) == b"\x09"
        del seen
    finally:
        pool.close()


def test_nobody_can_change_its_size():
    """The seals hold against this process too, and cannot be taken off or added to."""
    pool = open_pool(64 * KIB, num_threads=1, on_progress=lambda _: None)
    try:
        for nbytes in (0, 4 * KIB, 128 * KIB):
            with pytest.raises(PermissionError):
                os.ftruncate(pool.fd, nbytes)
        with pytest.raises(PermissionError):
            fcntl.fcntl(pool.fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE)
        assert os.fstat(pool.fd).st_size == 64 * KIB
        assert not os.get_inheritable(pool.fd)
    finally:
        pool.close()


def test_close_gives_everything_back():
    """After ``close`` neither mapping nor descriptor is left. Twice is harmless."""
    fds = num_fds(os.getpid())
    pool = open_pool(64 * KIB, num_threads=1, on_progress=lambda _: None)
    assert num_mappings(os.getpid(), "kvist-pool") == 1
    pool.close()
    pool.close()
    assert num_mappings(os.getpid(), "kvist-pool") == 0
    assert num_fds(os.getpid()) == fds


@pytest.mark.parametrize("nbytes", [1, 64 * KIB + 1, 64 * MIB, 150 * MIB], ids=str)
def test_progress_rises_to_the_whole(nbytes: int):
    """What is told rises from step to step and ends with the whole pool, which is a whole number of pages."""
    told: list[int] = []
    pool = open_pool(nbytes, num_threads=2, on_progress=told.append)
    pool.close()
    assert told == sorted(set(told))
    assert told[-1] == pool.nbytes
    assert 0 <= pool.nbytes - nbytes < mmap.PAGESIZE
    assert len(told) >= nbytes // (64 * MIB)


def test_a_pool_that_does_not_fit_is_refused_before_it_is_taken():
    """More than the machine has is refused with what was asked for and what there is; nothing stays open."""
    fds = num_fds(os.getpid())
    with pytest.raises(ConfigError, match=r"a pool of 1024 TiB does not fit: .* leaves [\d.]+ GiB"):
        open_pool(GIB << 20, num_threads=1, on_progress=lambda _: None)
    assert num_fds(os.getpid()) == fds
    assert num_mappings(os.getpid(), "kvist-pool") == 0


@pytest.mark.skipif("0::" not in Path("/proc/self/cgroup").read_text(), reason="no unified control groups here")
def test_the_tightest_limit_is_named(tmp_path, monkeypatch):
    """Of machine, control group and process, the refusal names the one that does not suffice, and what it leaves."""
    check_free_memory(1 << 20)
    (tmp_path / "memory.max").write_text("1048576\n")
    (tmp_path / "memory.current").write_text("1000000\n")
    monkeypatch.setattr(pool_module, "_CGROUP", tmp_path)
    with pytest.raises(
        ConfigError, match=rf"a pool of 1 MiB does not fit: .*\({tmp_path}/memory.max\) leaves 47\.44 KiB"
    ):
        check_free_memory(1 << 20)
    check_free_memory(48_576)
    (tmp_path / "memory.current").write_text("2000000\n")
    with pytest.raises(ConfigError, match="leaves 0 B"):
        check_free_memory(1)
    (tmp_path / "memory.max").write_text("max\n")
    check_free_memory(1 << 20)
