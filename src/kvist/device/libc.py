"""The few system calls that Python's own modules offer only with the interpreter lock held, or not at all."""

from __future__ import annotations

import ctypes
import mmap
import os
from typing import Final

MADV_POPULATE_WRITE: Final = 23
"""Linux 5.14: make all pages of a range present and writable, or fail; never a SIGBUS."""

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [
    ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_longlong,
]  # fmt: skip
_libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
_libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
_libc.memmove.restype = None
_libc.memmove.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t]
_MAP_FAILED: Final = ctypes.c_void_p(-1).value


copy_memory = _libc.memmove
"""``copy_memory(target, source, nbytes)`` on addresses. Lets go of the interpreter lock."""


def map_shared(fd: int, nbytes: int) -> int:
    """Map a file, readable and writable, with all of its pages present, and return its address.

    A page that is missing costs more at its first touch than its copy does. Blocks, without the interpreter lock.

    Raises:
        OSError: as mmap(2).
    """
    protection = mmap.PROT_READ | mmap.PROT_WRITE
    address = _libc.mmap(None, nbytes, protection, mmap.MAP_SHARED | mmap.MAP_POPULATE, fd, 0)
    if address is None or address == _MAP_FAILED:
        number = ctypes.get_errno()
        raise OSError(number, f"mmap of {nbytes} bytes: {os.strerror(number)}")
    return int(address)


def unmap(address: int, nbytes: int) -> None:
    """Undo ``map_shared``.

    Raises:
        OSError: as munmap(2).
    """
    if _libc.munmap(address, nbytes):
        number = ctypes.get_errno()
        raise OSError(number, f"munmap of {nbytes} bytes: {os.strerror(number)}")


def populate(address: int, nbytes: int) -> None:
    """Make every page of a mapped range present. Blocks, without the interpreter lock.

    Raises:
        OSError: there is not enough memory, or the kernel is older than 5.14 (EINVAL).
    """
    if _libc.madvise(address, nbytes, MADV_POPULATE_WRITE):
        number = ctypes.get_errno()
        raise OSError(number, f"populating {nbytes} bytes: {os.strerror(number)}")


def trim_memory() -> None:
    """Give memory that was freed back to the system, where the C library can. Milliseconds, with the lock let go."""
    trim = getattr(_libc, "malloc_trim", None)
    if trim is not None:
        trim(0)
