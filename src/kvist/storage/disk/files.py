"""The system calls of the disk tier, and nothing else: the seam at which tests break disks.

The law: a call does what its name says or raises ``OSError``. Writes and reads may be short, as the system's may.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

Buffer = bytes | bytearray | memoryview
_DIRECT_REFUSED = (errno.EINVAL, errno.EOPNOTSUPP, errno.EPERM, errno.ENOSYS)


class Files(Protocol):
    """Files of one machine. Any thread may call; descriptors are plain numbers."""

    def make_directory(self, path: Path) -> None:
        """Create a directory for this user alone, unless it exists. Its parent exists."""
        ...

    def open(self, path: Path, *, is_created: bool = True) -> int:
        """Open for reading and writing; create an empty file where there is none and ``is_created`` says so."""
        ...

    def open_direct(self, path: Path) -> int | None:
        """Open an existing file past the page cache; None where the file system does not offer that."""
        ...

    def close(self, fd: int) -> None:
        """Let go of a descriptor."""
        ...

    def lock(self, fd: int) -> bool:
        """Take the file for this process; return False if another one has it. The end of the process gives it back."""
        ...

    def nbytes(self, fd: int) -> int:
        """Return the length of a file."""
        ...

    def is_linked(self, fd: int) -> bool:
        """Return whether the file still has a name."""
        ...

    def free_nbytes(self, path: Path) -> int:
        """Return what the file system of ``path`` has free for this user."""
        ...

    def allocate(self, fd: int, nbytes: int) -> None:
        """Give a file at least this length, with space for all of it."""
        ...

    def truncate(self, fd: int, nbytes: int) -> None:
        """Give a file this length."""
        ...

    def write(self, fd: int, buffers: Sequence[Buffer], offset: int) -> int:
        """Write buffers one behind another; return how many bytes were."""
        ...

    def read(self, fd: int, buffers: Sequence[bytearray | memoryview], offset: int) -> int:
        """Read into buffers one behind another; return how many bytes were, 0 at the end of the file."""
        ...

    def sync(self, fd: int) -> None:
        """Make a file's bytes, and its length, durable."""
        ...

    def rename(self, source: Path, target: Path) -> None:
        """Give a file another's name; durable after ``sync_directory``."""
        ...

    def remove(self, path: Path) -> None:
        """Take a file's name away, if there is one."""
        ...

    def sync_directory(self, path: Path) -> None:
        """Make names durable."""
        ...


class OsFiles:
    """The real ones."""

    def make_directory(self, path: Path) -> None:
        with contextlib.suppress(FileExistsError):
            os.mkdir(path, 0o700)

    def open(self, path: Path, *, is_created: bool = True) -> int:
        return os.open(path, os.O_RDWR | os.O_CLOEXEC | (os.O_CREAT if is_created else 0), 0o600)

    def open_direct(self, path: Path) -> int | None:
        try:
            return os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_DIRECT)
        except OSError as error:
            if error.errno in _DIRECT_REFUSED:
                return None
            raise

    def close(self, fd: int) -> None:
        os.close(fd)

    def lock(self, fd: int) -> bool:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True

    def nbytes(self, fd: int) -> int:
        return os.fstat(fd).st_size

    def is_linked(self, fd: int) -> bool:
        return os.fstat(fd).st_nlink > 0

    def free_nbytes(self, path: Path) -> int:
        figures = os.statvfs(path)
        return figures.f_bavail * figures.f_frsize

    def allocate(self, fd: int, nbytes: int) -> None:
        os.posix_fallocate(fd, 0, nbytes)

    def truncate(self, fd: int, nbytes: int) -> None:
        os.ftruncate(fd, nbytes)

    def write(self, fd: int, buffers: Sequence[Buffer], offset: int) -> int:
        return os.pwritev(fd, buffers, offset)

    def read(self, fd: int, buffers: Sequence[bytearray | memoryview], offset: int) -> int:
        return os.preadv(fd, buffers, offset)

    def sync(self, fd: int) -> None:
        os.fdatasync(fd)

    def rename(self, source: Path, target: Path) -> None:
        os.rename(source, target)

    def remove(self, path: Path) -> None:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(path)

    def sync_directory(self, path: Path) -> None:
        fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)


def write_all(files: Files, fd: int, buffers: Sequence[Buffer], offset: int) -> None:
    """Write all of some buffers, in as many calls as it takes.

    Raises:
        OSError: as write(2); ``EIO`` if nothing more is taken.
    """
    while buffers:
        num = files.write(fd, buffers, offset)
        if num <= 0:
            raise OSError(errno.EIO, f"nothing was written at {offset}")
        offset += num
        buffers = _behind(buffers, num)


def read_all(files: Files, fd: int, buffers: Sequence[memoryview], offset: int) -> bool:
    """Fill all of some buffers; return whether the file had as much.

    Raises:
        OSError: as read(2).
    """
    rest: Sequence[Buffer] = buffers
    while rest:
        num = files.read(fd, [memoryview(buffer) for buffer in rest], offset)
        if num <= 0:
            return False
        offset += num
        rest = _behind(rest, num)
    return True


def _behind(buffers: Sequence[Buffer], num: int) -> list[Buffer]:
    """Return what is left of buffers behind their first ``num`` bytes."""
    left: list[Buffer] = []
    for buffer in buffers:
        if num < len(buffer):
            left.append(memoryview(buffer)[num:] if num else buffer)
        num = max(num - len(buffer), 0)
    return left
