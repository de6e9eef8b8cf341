"""Names, codes and records of ``cuda.bindings.driver``, as far as the fake driver has them."""

from __future__ import annotations

import ctypes
import enum


class CUresult(enum.IntEnum):
    """What a call returns first."""

    CUDA_SUCCESS = 0
    CUDA_ERROR_INVALID_VALUE = 1
    CUDA_ERROR_OUT_OF_MEMORY = 2
    CUDA_ERROR_INVALID_DEVICE = 101
    CUDA_ERROR_INVALID_IMAGE = 200
    CUDA_ERROR_INVALID_CONTEXT = 201
    CUDA_ERROR_ALREADY_MAPPED = 208
    CUDA_ERROR_INVALID_HANDLE = 400
    CUDA_ERROR_NOT_FOUND = 500
    CUDA_ERROR_NOT_READY = 600
    CUDA_ERROR_ILLEGAL_ADDRESS = 700
    CUDA_ERROR_CONTEXT_IS_DESTROYED = 709
    CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED = 712
    CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED = 713
    CUDA_ERROR_MISALIGNED_ADDRESS = 716
    CUDA_ERROR_NOT_PERMITTED = 800
    CUDA_ERROR_UNKNOWN = 999


class Failed(Exception):
    """Ends a call with a code."""

    def __init__(self, code: CUresult) -> None:
        super().__init__(code.name)
        self.code = code


def check(is_right: object, code: CUresult = CUresult.CUDA_ERROR_INVALID_VALUE) -> None:
    """End the call with ``code`` unless something holds."""
    if not is_right:
        raise Failed(code)


class CUpointer_attribute(enum.IntEnum):  # noqa: N801
    CU_POINTER_ATTRIBUTE_IS_MANAGED = 8
    CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL = 9


class CUdevice_attribute(enum.IntEnum):  # noqa: N801
    CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR = 75
    CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR = 76


class CUmemAllocationHandleType(enum.IntEnum):
    CU_MEM_HANDLE_TYPE_NONE = 0
    CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR = 1


class CUmemAllocationType(enum.IntEnum):
    CU_MEM_ALLOCATION_TYPE_INVALID = 0
    CU_MEM_ALLOCATION_TYPE_PINNED = 1


class CUmemLocationType(enum.IntEnum):
    CU_MEM_LOCATION_TYPE_INVALID = 0
    CU_MEM_LOCATION_TYPE_DEVICE = 1


class CUmemAccess_flags(enum.IntEnum):  # noqa: N801
    CU_MEM_ACCESS_FLAGS_PROT_NONE = 0
    CU_MEM_ACCESS_FLAGS_PROT_READWRITE = 3


class CUmemLocation:
    def __init__(self) -> None:
        self.type = CUmemLocationType.CU_MEM_LOCATION_TYPE_INVALID
        self.id = 0


class CUmemAllocationProp:
    def __init__(self) -> None:
        self.type = CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_INVALID
        self.location = CUmemLocation()
        self.requestedHandleTypes = CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_NONE


class CUmemAccessDesc:
    def __init__(self) -> None:
        self.location = CUmemLocation()
        self.flags = CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_NONE


class _IpcHandle:
    """64 bytes that another process gives back."""

    def __init__(self) -> None:
        self._bytes = ctypes.create_string_buffer(64)

    def getPtr(self) -> int:  # noqa: N802
        return ctypes.addressof(self._bytes)

    @property
    def raw(self) -> bytes:
        return self._bytes.raw

    @classmethod
    def of(cls, raw: bytes) -> _IpcHandle:
        handle = cls()
        ctypes.memmove(handle.getPtr(), raw, 64)
        return handle


class CUipcMemHandle(_IpcHandle):
    pass


class CUipcEventHandle(_IpcHandle):
    pass


class Handle:
    """What the driver hands out: a number of no meaning, or an address. Converts to an int, and does no arithmetic."""

    __slots__ = ("_value",)

    def __init__(self, value: int) -> None:
        self._value = value

    def __int__(self) -> int:
        return self._value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Handle) and int(other) == int(self)

    def __hash__(self) -> int:
        return hash(self._value)
