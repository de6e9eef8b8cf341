"""Memory at an address presents itself as a tensor, without a copy and without a framework.

The law: no element of an accepted tensor lies outside its memory, and the memory's owner lives as long as any consumer
or unconsumed capsule does, and no longer. What is wrong is refused when the value is made; an export cannot fail then.

The protocol is DLPack 1.1 (dmlc/dlpack, include/dlpack/dlpack.h), which ``torch.from_dlpack``, ``cupy.from_dlpack`` and
``numpy.from_dlpack`` speak. Its two callbacks, the capsule's destructor and the tensor's deleter, must be C: consumers
call them from any thread and while an exception is in flight, which a ctypes callback would lose, so that an
``IndexError`` became a ``SystemError``. So numpy makes the capsule, over an array that has the right address, shape and
strides and is never read; what numpy has no words for, type and device, is then written into it. Nobody else has seen
it yet.
"""

from __future__ import annotations

import ctypes
import math
from dataclasses import dataclass, field
from typing import Final

import numpy as np

from kvist.errors import LayoutError

CPU: Final = 1
"""kDLCPU. Its only ordinal is 0."""
CUDA: Final = 2
"""kDLCUDA."""

DIMENSIONS_MAX: Final = 32
"""What numpy before 2.0 can hold."""

_INT64_MAX: Final = 2**63 - 1
_VERSIONED_SINCE: Final = (1, 0)
_MINOR_VERSION: Final = 1
"""Of DLPack, which named 8-bit floats in 1.1."""
_NUMPY_IS_VERSIONED: Final = np.lib.NumpyVersion(np.__version__) >= "2.1.0"
"""An older numpy makes legacy capsules only, which the protocol lets a producer return at any time."""


@dataclass(frozen=True, slots=True)
class _ElementType:
    code: int
    """DLDataTypeCode."""
    nbytes: int


_TYPES: Final = {
    "float64": _ElementType(2, 8),
    "float32": _ElementType(2, 4),
    "float16": _ElementType(2, 2),
    "bfloat16": _ElementType(4, 2),
    "int64": _ElementType(0, 8),
    "int32": _ElementType(0, 4),
    "int16": _ElementType(0, 2),
    "int8": _ElementType(0, 1),
    "uint8": _ElementType(1, 1),
    "bool": _ElementType(6, 1),
    "float8_e4m3fn": _ElementType(10, 1),
    "float8_e5m2": _ElementType(12, 1),
}
DTYPES: Final = frozenset(_TYPES)
"""Names of the element types that a tensor may have, as torch spells them."""


@dataclass(frozen=True, slots=True)
class MemoryTensor:
    """A strided view of memory that somebody else keeps. Shape, strides and offset are in elements."""

    address: int
    """Of the memory's first byte, on its device."""
    dtype: str
    shape: tuple[int, ...]
    strides: tuple[int, ...] | None
    """None is row-major without gaps."""
    storage_offset: int
    """Of the tensor's first element from ``address``."""
    nbytes: int
    """Size of the memory from ``address``."""
    device_type: int
    ordinal: int
    owner: object = field(repr=False, compare=False)
    """Whatever keeps the memory mapped; referenced by this value and by all that is made of it."""

    def __post_init__(self) -> None:
        if self.dtype not in _TYPES:
            raise LayoutError(f"elements of type {self.dtype!r}; there are {', '.join(_TYPES)}")
        if self.device_type not in (CPU, CUDA) or self.ordinal < 0 or (self.device_type == CPU and self.ordinal):
            raise LayoutError(f"no tensors on device {self.ordinal} of DLPack type {self.device_type}")
        self._check_dimensions()
        self._check_extent()

    @property
    def element_strides(self) -> tuple[int, ...]:
        """The strides, spelled out."""
        if self.strides is not None:
            return self.strides
        return tuple(math.prod(self.shape[position + 1 :]) for position in range(len(self.shape)))

    @property
    def end(self) -> int:
        """Offset in bytes from ``address`` of the first byte behind the last element."""
        reach = 1 + sum((n - 1) * stride for n, stride in zip(self.shape, self.element_strides, strict=True))
        return (self.storage_offset + (0 if 0 in self.shape else reach)) * _TYPES[self.dtype].nbytes

    def __dlpack_device__(self) -> tuple[int, int]:
        return self.device_type, self.ordinal

    def __dlpack__(
        self,
        *,
        stream: int | None = None,
        max_version: tuple[int, int] | None = None,
        dl_device: tuple[int, int] | None = None,
        copy: bool | None = None,
    ) -> object:
        """Return a capsule that a consumer turns into a tensor of its own; no byte is read.

        No stream of ours produces the memory, so ``stream`` has nothing to wait for: whoever wrote the memory is known
        to the consumer alone.

        Raises:
            BufferError: a copy, or another device than the memory's, is asked for.
        """
        if copy:
            raise BufferError(f"{self.nbytes} bytes at {self.address:#x} are shared, never copied")
        if dl_device is not None and dl_device != self.__dlpack_device__():
            raise BufferError(f"memory of device {self.__dlpack_device__()} is asked for on device {dl_device}")
        array = np.asarray(_Described(self))
        if _NUMPY_IS_VERSIONED and max_version is not None and max_version >= _VERSIONED_SINCE:
            capsule: object = array.__dlpack__(max_version=_VERSIONED_SINCE)
            managed = _ManagedVersioned.from_address(_capsule_pointer(capsule, b"dltensor_versioned"))
            managed.minor = _MINOR_VERSION
            tensor = managed.tensor
        else:
            capsule = array.__dlpack__()
            tensor = _Tensor.from_address(_capsule_pointer(capsule, b"dltensor"))
        tensor.device_type, tensor.ordinal = self.__dlpack_device__()
        tensor.code = _TYPES[self.dtype].code
        return capsule

    def _check_dimensions(self) -> None:
        if len(self.shape) > DIMENSIONS_MAX:
            raise LayoutError(f"a tensor of {len(self.shape)} dimensions; at most {DIMENSIONS_MAX}")
        if self.strides is not None and len(self.strides) != len(self.shape):
            raise LayoutError(f"{len(self.strides)} strides for {len(self.shape)} dimensions")
        if min(self.storage_offset, self.nbytes, *self.shape, *(self.strides or ())) < 0:
            raise LayoutError(f"sizes, strides and offsets must not be negative: {self}")

    def _check_extent(self) -> None:
        if self.end > self.nbytes:
            raise LayoutError(f"a tensor ends at byte {self.end} of memory of {self.nbytes}: {self}")
        if self.address <= 0 or self.address + self.nbytes > 2**64:
            raise LayoutError(f"no memory of {self.nbytes} bytes lies at {self.address:#x}")
        # A stride of 0 and an empty dimension hide numbers from the extent that a consumer still multiplies.
        largest = max(math.prod(max(n, 1) for n in self.shape), *self.element_strides, 0) * _TYPES[self.dtype].nbytes
        if largest > _INT64_MAX:
            raise LayoutError(f"{largest} bytes do not fit 64 bits: {self}")


class _Described:
    """What an array of numpy is made of, and has as its base: numpy's array interface, version 3."""

    __slots__ = ("__array_interface__", "owner")

    def __init__(self, tensor: MemoryTensor) -> None:
        nbytes = _TYPES[tensor.dtype].nbytes
        self.owner = tensor.owner
        self.__array_interface__ = {
            "version": 3,
            "data": (tensor.address + tensor.storage_offset * nbytes, False),
            "typestr": np.dtype(f"u{nbytes}").str,
            "shape": tensor.shape,
            "strides": tuple(stride * nbytes for stride in tensor.element_strides),
        }


class _Tensor(ctypes.Structure):
    """DLTensor, which is also where a DLManagedTensor begins."""

    _fields_ = (
        ("data", ctypes.c_void_p),
        ("device_type", ctypes.c_int32),
        ("ordinal", ctypes.c_int32),
        ("num_dimensions", ctypes.c_int32),
        ("code", ctypes.c_uint8),
        ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    )


class _ManagedVersioned(ctypes.Structure):
    """DLManagedTensorVersioned."""

    _fields_ = (
        ("major", ctypes.c_uint32),
        ("minor", ctypes.c_uint32),
        ("manager", ctypes.c_void_p),
        ("deleter", ctypes.c_void_p),
        ("flags", ctypes.c_uint64),
        ("tensor", _Tensor),
    )


# A prototype of our own: the types of ``pythonapi``'s attributes are shared with everybody in the process.
_capsule_pointer = ctypes.PYFUNCTYPE(ctypes.c_void_p, ctypes.py_object, ctypes.c_char_p)(
    ("PyCapsule_GetPointer", ctypes.pythonapi)
)
