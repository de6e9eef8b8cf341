"""Directories of the disk tier: whose they are, what they hold, how fast they are.

The law: what is there stays as it is, but for the lock's text. A file of 64 MiB, which has no name any more when it is
written, is measured beside it.
"""

from __future__ import annotations

import mmap
import os
import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final

from kvist.doctor.facts import Disk, NotKnown
from kvist.errors import ConfigError
from kvist.storage.disk.directory import LOCK_NAME, SLAB_NAME
from kvist.storage.disk.files import OsFiles
from kvist.storage.disk.inspection import describe
from kvist.storage.disk.log import LOG_NAME
from kvist.units import MIB

_PROBE_NBYTES: Final = 64 * MIB
_STEP_NBYTES: Final = 4 * MIB
_PROBE_S: Final = 3.0
"""A slow disk is measured with what it has done by then, in each direction."""
_MOUNTS: Final = Path("/proc/self/mountinfo")


def look_at_disk(path: Path) -> Disk:
    """Return what can be seen of a directory, after at most some 6 s of writing and reading."""
    is_there, has_parent = os.path.isdir(path), True
    folder = path if os.path.exists(path) else path.parent
    user, unusable = _user_of(path)
    is_direct: bool | NotKnown = NotKnown("nothing can be written")
    write_rate: float | NotKnown = NotKnown("nothing can be written")
    read_rate = write_rate
    refusal = ""
    try:
        is_direct, write_rate, read_rate = _measure(folder)
    except OSError as error:
        refusal = error.strerror or str(error)
        has_parent = not isinstance(error, FileNotFoundError)
    try:
        device: int | NotKnown = folder.stat().st_dev
        free: int | NotKnown = OsFiles().free_nbytes(folder)
    except OSError as error:
        device = free = NotKnown(error.strerror or str(error))
    return Disk(
        path=str(path), is_there=is_there, has_parent=has_parent, filesystem=filesystem_of(folder, _MOUNTS),
        device=device, free_nbytes=free, own_nbytes=_own_nbytes(path), refusal=refusal, is_direct=is_direct,
        write_rate=write_rate, read_rate=read_rate, user=user, unusable=unusable,
    )  # fmt: skip


def filesystem_of(path: Path, mounts: Path) -> str | NotKnown:
    """Return the type of the file system that ``path`` lies on, from a table like ``/proc/self/mountinfo``."""
    best: tuple[int, str] | None = None
    try:
        real = str(path.resolve())
        for line in mounts.read_text().splitlines():
            before, _, after = line.partition(" - ")
            point = re.sub(r"\\(\d{3})", lambda found: chr(int(found[1], 8)), before.split()[4])
            is_above = real == point or real.startswith(point.rstrip("/") + "/")
            if is_above and (best is None or len(point) >= best[0]):  # Of two on one point, the later one hides.
                best = (len(point), after.split()[0])
    except (OSError, IndexError) as error:
        return NotKnown(f"{mounts}: {error}")
    return best[1] if best is not None else NotKnown(f"{mounts} does not name it")


def _user_of(path: Path) -> tuple[str, str]:
    """Return the id of the process that uses a directory, or why what is there cannot be used."""
    files = OsFiles()
    try:
        fd = files.open(path / LOCK_NAME, is_created=False)
    except OSError:
        return "", ""
    try:
        if not files.lock(fd):
            return os.pread(fd, 32, 0).decode("ascii", "replace").strip() or "unknown", ""
    finally:
        files.close(fd)
    try:
        describe(files, path)
    except ConfigError as error:
        return "", str(error)
    return "", ""


def _own_nbytes(path: Path) -> int:
    nbytes = 0
    for name in (SLAB_NAME, LOG_NAME):
        try:
            nbytes += (path / name).stat().st_blocks * 512
        except OSError:
            continue
    return nbytes


def _measure(folder: Path) -> tuple[bool, float, float]:
    """Return whether direct I/O works, and the rates of writing and reading in bytes per second.

    Raises:
        OSError: it cannot be written there.
    """
    files = OsFiles()
    path = folder / f".kvist-doctor-{os.getpid()}"
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        direct = files.open_direct(path)
        files.remove(path)
        used = fd if direct is None else direct
        with memoryview(mmap.mmap(-1, _STEP_NBYTES)) as page:
            page[:] = os.urandom(_STEP_NBYTES)  # A disk that compresses must not look faster than it is.
            try:
                nbytes, write_rate = _run(lambda at: files.write(used, [page], at), _PROBE_NBYTES, fd)
                os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
                _, read_rate = _run(lambda at: files.read(used, [page], at), nbytes, None)
            finally:
                if direct is not None:
                    files.close(direct)
    finally:
        files.remove(path)
        files.close(fd)
    return direct is not None, write_rate, read_rate


def _run(step: Callable[[int], int], nbytes: int, synced: int | None) -> tuple[int, float]:
    """Return how many bytes were moved, step by step, and how fast."""
    began_at = time.perf_counter()
    at = 0
    while at < nbytes and time.perf_counter() - began_at < _PROBE_S:
        moved = step(at)
        if moved <= 0:
            break
        at += moved
    if synced is not None:
        OsFiles().sync(synced)
    return at, at / (time.perf_counter() - began_at)
