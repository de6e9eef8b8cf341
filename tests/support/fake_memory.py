"""Memory of a fake GPU: memfds, mapped where a process may reach them; and which addresses those are.

The law: between two allocations lie bytes that belong to nobody, so that a range that is checked is inside one
allocation, or inside segments that were mapped side by side on purpose.
"""

from __future__ import annotations

import ctypes
import enum
import mmap
import os
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from tests.support.fake_names import CUresult, Failed, check

PAGE_NBYTES = mmap.PAGESIZE
SEGMENT_NBYTES = 2 * 1024 * 1024
"""Granularity of virtual memory."""
_POISON_NBYTES = 64 * 1024
_PROT_NONE = 0
_MAP_FIXED = 0x10
_ANONYMOUS = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [
    ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_longlong,
]  # fmt: skip
_libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]


class Kind(enum.Enum):
    DEVICE = "allocated"
    MANAGED = "managed"
    OPENED = "opened"
    VIRTUAL = "mapped"
    PINNED = "pinned"
    REGISTERED = "registered"


ON_HOST = frozenset({Kind.PINNED, Kind.REGISTERED})
ON_DEVICE = frozenset(Kind) - ON_HOST


class Physical:
    """Bytes, for as long as anybody holds them."""

    def __init__(self, nbytes: int, *, is_exportable: bool = True) -> None:
        self.nbytes = nbytes
        self.is_exportable = is_exportable
        self.fd = os.memfd_create("fake-gpu", os.MFD_CLOEXEC)
        os.ftruncate(self.fd, nbytes)
        os.pwrite(self.fd, b"\xcc" * min(nbytes, _POISON_NBYTES), 0)
        status = os.fstat(self.fd)
        self.identity = (status.st_dev, status.st_ino)
        self._num_holders = 0

    def hold(self) -> Physical:
        self._num_holders += 1
        return self

    def let_go(self) -> None:
        self._num_holders -= 1
        if not self._num_holders:
            os.close(self.fd)

    @property
    def is_alive(self) -> bool:
        return self._num_holders > 0


@dataclass(slots=True, eq=False)
class Range:
    """Addresses that may be touched."""

    address: int
    nbytes: int
    kind: Kind
    owner: object
    """The context that it ends with; the process, for virtual memory."""
    physical: Physical | None = None
    is_accessible: bool = True
    token: bytes = b""
    """The handle that it was opened with."""

    @property
    def end(self) -> int:
        return self.address + self.nbytes

    def __str__(self) -> str:
        return f"{self.nbytes} bytes {self.kind.value}"


@dataclass(slots=True)
class AddressSpace:
    """What one process can reach."""

    ranges: dict[int, Range] = field(default_factory=dict)
    reservations: dict[int, int] = field(default_factory=dict)

    def map(self, physical: Physical, kind: Kind, owner: object, token: bytes = b"") -> Range:
        """Map memory at a place of its own, with a page of nothing behind it."""
        address = reserve(physical.nbytes + PAGE_NBYTES)
        return self.map_at(address, physical, Range(address, physical.nbytes, kind, owner, physical, token=token))

    def map_at(self, address: int, physical: Physical, found: Range) -> Range:
        protection = mmap.PROT_READ | mmap.PROT_WRITE
        mapped = _libc.mmap(address, found.nbytes, protection, mmap.MAP_SHARED | _MAP_FIXED, physical.fd, 0)
        assert mapped == address
        physical.hold()
        self.ranges[address] = found
        return found

    def unmap(self, address: int, *kinds: Kind) -> None:
        """Undo ``map``; the range must begin there."""
        found = self.ranges.get(address)
        check(found is not None and found.kind in kinds)
        del self.ranges[address]
        if found.physical is None:
            return
        if found.kind is Kind.VIRTUAL:  # Its addresses stay reserved.
            flags = _ANONYMOUS | _MAP_FIXED
            assert _libc.mmap(address, found.nbytes, _PROT_NONE, flags, -1, 0) == address
        else:
            release(address, found.nbytes + PAGE_NBYTES)
        found.physical.let_go()

    def register(self, address: int, nbytes: int, owner: object) -> None:
        """Let host memory of the process's own be reached."""
        is_free = all(found.end <= address or address + nbytes <= found.address for found in self.ranges.values())
        check(is_free, CUresult.CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED)
        self.ranges[address] = Range(address, nbytes, Kind.REGISTERED, owner)

    def find(self, address: int) -> Range:
        """Return the range that an address lies in."""
        for found in self.ranges.values():
            if found.address <= address < found.end:
                return found
        raise Failed(CUresult.CUDA_ERROR_INVALID_VALUE)

    def bytes_at(self, address: int, nbytes: int, kinds: frozenset[Kind] = frozenset(Kind)) -> npt.NDArray[np.uint8]:
        """Return bytes that may be touched.

        Raises:
            Failed: one of them may not.
        """
        at = address
        while at < address + nbytes:
            found = next((one for one in self.ranges.values() if one.address <= at < one.end), None)
            is_right = found is not None and found.is_accessible and found.kind in kinds
            check(is_right, CUresult.CUDA_ERROR_ILLEGAL_ADDRESS)
            at = found.end
        return raw_bytes(address, nbytes)

    def mapped_inside(self, address: int, nbytes: int) -> Iterator[Range]:
        """Yield the segments of virtual memory that lie in a stretch of addresses."""
        for found in self.ranges.values():
            if found.kind is Kind.VIRTUAL and found.address < address + nbytes and address < found.end:
                yield found


def raw_bytes(address: int, nbytes: int) -> npt.NDArray[np.uint8]:
    """Return bytes at an address, unchecked."""
    return np.ctypeslib.as_array((ctypes.c_uint8 * nbytes).from_address(address))


def reserve(nbytes: int) -> int:
    """Take addresses that nothing lies at."""
    address = _libc.mmap(None, nbytes, _PROT_NONE, _ANONYMOUS, -1, 0)
    assert address
    return int(address)


def release(address: int, nbytes: int) -> None:
    """Give addresses back."""
    assert _libc.munmap(address, nbytes) == 0
