"""One directory of the disk tier: its lock, its slab, its log.

The laws: a directory has one user at a time. Opening changes nothing but the lock; ``prepare`` makes the directory
what this tier wants, and from then on its files never take more than their share of the disk. What it was before is
kept, unless it is damaged, or does not fit.
"""

from __future__ import annotations

import errno
import logging
import mmap
import os
import secrets
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np
import numpy.typing as npt

from kvist.errors import ConfigError
from kvist.storage.base import StoredChunk
from kvist.storage.disk.chunk_io import Scratch, read_chunk, write_chunk
from kvist.storage.disk.files import Files, read_all, write_all
from kvist.storage.disk.format import (
    BATCH_NBYTES,
    ENTRY,
    LOG,
    PAGE_NBYTES,
    SLAB,
    FileHeader,
    encode_file_header,
    parse_file_header,
)  # fmt: skip
from kvist.storage.disk.log import (
    LOG_NAME,
    NEW_LOG_NAME,
    DiskLog,
    Loaded,
    check_version,
    is_due,
    load,
    read_file,
    rewritten_nbytes,
)  # fmt: skip
from kvist.storage.slots import SlotAllocator
from kvist.units import GIB, KIB, MIB, align_up, format_nbytes

logger = logging.getLogger(__name__)

LOCK_NAME: Final = "kvist.lock"
SLAB_NAME: Final = "kvist.slab"
SHARE_NBYTES_MIN: Final = MIB
BATCH_ENTRIES_MAX: Final = 256
_INDEX_NBYTES_MIN: Final = 256 * KIB
_EXTENTS_MIN: Final = 8
"""Fewer and larger ones than the pool's: a slot is a page larger than its chunk, and the end of each extent is lost."""
_SCRATCH_NBYTES_MAX: Final = 4 * MIB
_PROBE_PIECE_NBYTES: Final = MIB
_NO_SPACE: Final = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


@dataclass(frozen=True, slots=True)
class Budget:
    """How a directory's share of the disk is divided."""

    slab_nbytes: int
    log_nbytes_max: int
    chunks_max: int


def plan_budget(share_nbytes: int) -> Budget:
    """Divide a share, as ``docs/disk-format.md`` says."""
    index_nbytes = align_up(max(share_nbytes // 256, _INDEX_NBYTES_MIN), PAGE_NBYTES)
    slab_nbytes = (share_nbytes - index_nbytes - PAGE_NBYTES) // PAGE_NBYTES * PAGE_NBYTES
    chunks_max = (index_nbytes * 3 // 8 - rewritten_nbytes(0)) // ENTRY.itemsize
    return Budget(slab_nbytes, index_nbytes // 2, chunks_max)


def take_lock(files: Files, path: Path, *, is_created: bool) -> int:
    """Make this process the user of a directory, until it closes what is returned.

    Raises:
        OSError: there is no such directory, or it is not ours.
        ConfigError: names the process that uses it.
    """
    fd = files.open(path / LOCK_NAME, is_created=is_created)
    try:
        if not files.lock(fd):
            owner = read_file(files, fd, 32).decode("ascii", "replace").strip() or "unknown"
            raise ConfigError(f"{path} is in use by the process with pid {owner}")
        files.truncate(fd, 0)
        write_all(files, fd, [f"{os.getpid()}\n".encode()], 0)
    except (OSError, ConfigError):
        files.close(fd)
        raise
    return fd


class DiskDirectory:
    """Files of one directory. Reads and writes of chunks on any thread; the rest on one at a time."""

    def __init__(self, files: Files, path: Path, *, is_created: bool) -> None:
        """Lock a directory and read what it says of itself.

        Raises:
            ConfigError: it cannot be used, somebody else uses it, or it is of a newer version.
        """
        self._files = files
        self.path = path
        self.is_direct = False
        self.loaded: Loaded | None = None
        """What the log says, as long as nobody has taken it over."""
        self.is_damaged = False
        """Whether there was a slab or a log that says nothing."""
        self.slab_nbytes = 0
        self.data_offset = PAGE_NBYTES
        self._lock = self._slab = self._log_fd = -1
        self._log: DiskLog | None = None
        try:
            if is_created:
                files.make_directory(path)
            self._lock = take_lock(files, path, is_created=is_created)
            self._read(is_created=is_created)
        except OSError as error:
            self.close()
            raise ConfigError(f"{path} cannot be used for chunks: {error.strerror or error}") from error
        except ConfigError:
            self.close()
            raise

    @property
    def log_nbytes(self) -> int:
        return self._log.nbytes if self._log is not None else 0

    @property
    def data_nbytes(self) -> int:
        """What the extents have together."""
        return self.budget.slab_nbytes - self.data_offset

    def is_loaded_log_due(self) -> bool:
        """Return whether the log that was loaded is worth writing anew."""
        return self.loaded is None or is_due(self.loaded.end, len(self.loaded.rows))

    def fits(self, offsets: npt.NDArray[np.int64], nbytes: npt.NDArray[np.int64]) -> npt.NDArray[np.bool_]:
        """Return which slots the slab has, as it is now, shape ``[n]``."""
        is_inside: npt.NDArray[np.bool_] = (offsets >= self.data_offset) & (offsets + nbytes <= self.slab_nbytes)
        is_inside &= offsets % PAGE_NBYTES == 0
        return is_inside

    def plan(self, share_nbytes: int) -> None:
        """Decide on sizes; what does not fit into them is given up. Nothing is written.

        Raises:
            ConfigError: the share is too small.
        """
        if share_nbytes < SHARE_NBYTES_MIN:
            raise ConfigError(
                f"{self.path} would get {format_nbytes(share_nbytes)}; a directory of the disk tier takes "
                f"{format_nbytes(SHARE_NBYTES_MIN)} or more: choose a larger --disk-size"
            )
        self.budget = plan_budget(share_nbytes)
        header = self.loaded.header if self.loaded is not None else None
        if header is not None and self.budget.slab_nbytes - header.data_offset < 2 * header.extent_nbytes:
            logger.warning("disk begun anew, too small for its extents path=%s", self.path)
            header = self.loaded = None
        self._is_new = header is None
        self.header = header or self._new_header()
        self.data_offset = self.header.data_offset
        self.slots = SlotAllocator(self.data_nbytes, extent_nbytes=self.header.extent_nbytes)

    def prepare(self, entries: bytes | None) -> None:
        """Give the files their sizes, and the log these puts; None leaves it as it is.

        Raises:
            ConfigError: the disk does not have the space, or refuses.
        """
        nbytes = self.budget.slab_nbytes
        try:
            if self._is_new:
                self._files.truncate(self._slab, 0)
            if self._files.nbytes(self._slab) > nbytes:
                self._files.truncate(self._slab, nbytes)
                self._files.sync(self._slab)
            self._allocate(nbytes)
            if self._is_new:
                write_all(self._files, self._slab, [encode_file_header(self.header)], 0)
            self._files.sync(self._slab)
            self.slab_nbytes = nbytes
            self._files.remove(self.path / NEW_LOG_NAME)
            self._start_log(entries)
            self._open_direct()
        except OSError as error:
            raise ConfigError(f"{self.path} cannot be used for chunks: {error.strerror or error}") from error
        self.loaded = None

    def measure(self, within_s: float, clock: Callable[[], float]) -> tuple[int, float, float]:
        """Write and read the scratch area, or what the time allows; return bytes, and the seconds of each.

        Raises:
            OSError: the disk fails.
        """
        nbytes = min(_PROBE_PIECE_NBYTES, self.data_offset - PAGE_NBYTES)
        memory = memoryview(mmap.mmap(-1, nbytes))
        memory[:] = os.urandom(PAGE_NBYTES) * (nbytes // PAGE_NBYTES)
        offsets = range(PAGE_NBYTES, self.data_offset - nbytes + 1, nbytes)
        begin = clock()
        num = 0
        for offset in offsets:
            write_all(self._files, self._slab, [memory], offset)
            num += 1
            if clock() - begin > within_s / 2:
                break
        self._files.sync(self._slab)
        middle = clock()
        for offset in offsets[:num]:
            read_all(self._files, self._slab, [memory], offset)
        return num * nbytes, middle - begin, clock() - middle

    def read(self, offset: int, header_nbytes: int, target: memoryview, scratch: Scratch) -> StoredChunk | None:
        """Read a chunk, as ``read_chunk``.

        Raises:
            OSError: the disk fails.
        """
        return read_chunk(self._files, self._slab, offset, header_nbytes, target, scratch)

    def write(self, offset: int, chunk: StoredChunk, source: memoryview, scratch: Scratch) -> None:
        """Write a chunk, as ``write_chunk``; durable after ``sync``.

        Raises:
            OSError: the disk fails.
        """
        write_chunk(self._files, self._slab, offset, chunk, source, scratch)

    def sync(self) -> None:
        """Make all chunks durable whose writes have returned.

        Raises:
            OSError: the disk fails.
        """
        self._files.sync(self._slab)

    def has_room(self, num_entries: int) -> bool:
        """Return whether the log takes so many entries more, within its share."""
        return self.log_nbytes + BATCH_NBYTES + num_entries * ENTRY.itemsize <= self.budget.log_nbytes_max

    def is_log_due(self, num_chunks: int) -> bool:
        """Return whether the log is worth writing anew."""
        return is_due(self.log_nbytes, num_chunks)

    def append(self, entries: bytes) -> None:
        """Make entries of the log durable, together.

        Raises:
            OSError: the disk fails, or the files were removed.
        """
        assert self._log is not None
        if not (self._files.is_linked(self._slab) and self._log.is_linked()):
            raise OSError(errno.ENOENT, "its files were removed")
        self._log.append(entries)

    def rewrite_log(self, entries: bytes) -> None:
        """Write the log anew, with just these puts.

        Raises:
            OSError: the disk fails, or the files were removed.
        """
        assert self._log is not None
        if not self._files.is_linked(self._slab):
            raise OSError(errno.ENOENT, "its files were removed")
        self._log.rewrite(entries)

    def close(self) -> None:
        """Let go of files and lock. Idempotent."""
        if self._log is not None:
            self._log.close()
        for fd in (self._slab, self._log_fd, self._lock):
            if fd >= 0:
                self._files.close(fd)
        self._slab = self._log_fd = self._lock = -1

    def _read(self, *, is_created: bool) -> None:
        slab_path, log_path = self.path / SLAB_NAME, self.path / LOG_NAME
        self._slab = self._files.open(slab_path, is_created=is_created)
        self._log_fd = self._files.open(log_path, is_created=is_created)
        raw = read_file(self._files, self._slab, PAGE_NBYTES)
        check_version(raw, SLAB, slab_path)
        slab = parse_file_header(raw, SLAB)
        loaded = load(self._files, self._log_fd, log_path)
        self.slab_nbytes = self._files.nbytes(self._slab)
        if slab is not None and loaded is not None and slab.epoch == loaded.header.epoch:
            self.loaded = loaded
            self.data_offset = loaded.header.data_offset
        else:
            self.is_damaged = bool(raw) or self._files.nbytes(self._log_fd) > 0

    def _new_header(self) -> FileHeader:
        slab_nbytes = self.budget.slab_nbytes
        scratch_nbytes = min(_SCRATCH_NBYTES_MAX, slab_nbytes // 64 // PAGE_NBYTES * PAGE_NBYTES)
        data_offset = PAGE_NBYTES + scratch_nbytes
        extent_nbytes = min(GIB, align_up((slab_nbytes - data_offset) // _EXTENTS_MIN, PAGE_NBYTES))
        return FileHeader(SLAB, secrets.token_bytes(16), extent_nbytes, data_offset, 0)

    def _allocate(self, nbytes: int) -> None:
        before = self._files.nbytes(self._slab)
        try:
            self._files.allocate(self._slab, nbytes)
        except OSError as error:
            if error.errno not in _NO_SPACE:
                raise
            self._files.truncate(self._slab, before)
            free_nbytes = self._files.free_nbytes(self.path)
            raise ConfigError(
                f"{self.path} has {format_nbytes(free_nbytes)} free, and {format_nbytes(nbytes - before)} more are "
                f"needed ({error.strerror}): choose a smaller --disk-size"
            ) from error

    def _start_log(self, entries: bytes | None) -> None:
        header = FileHeader(
            LOG, self.header.epoch, self.header.extent_nbytes, self.header.data_offset, self.header.seed
        )
        self._log = DiskLog(self._files, self.path, header)
        if entries is None and self.loaded is not None:
            self._log.attach(self._log_fd, self.loaded)
        else:
            self._log.rewrite(entries or b"")
            self._files.close(self._log_fd)
        self._log_fd = -1

    def _open_direct(self) -> None:
        """Go on past the page cache, where that can be; the first read shows whether it can."""
        fd = self._files.open_direct(self.path / SLAB_NAME)
        if fd is None:
            return
        try:
            self.is_direct = read_all(self._files, fd, [memoryview(mmap.mmap(-1, PAGE_NBYTES))], 0)
        except OSError as error:
            if error.errno != errno.EINVAL:
                self._files.close(fd)
                raise
        unused = self._slab if self.is_direct else fd
        self._slab = fd if self.is_direct else self._slab
        self._files.close(unused)
