"""The CUDA driver API, checked: every call that fails raises with its name, its code and CUDA's own words.

Imports cuda-bindings at its first use, so that importing this module needs no CUDA. The law: a GPU is named by its
UUID; ordinals are of one process and never leave it.
"""

from __future__ import annotations

import functools
import uuid
from contextlib import ExitStack
from typing import Any, Final

from kvist.errors import DeviceError

LAZY_PEER_ACCESS: Final = 1
"""CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS"""
HOST_REGISTER_PORTABLE: Final = 1
EVENT_DISABLE_TIMING, EVENT_INTERPROCESS = 2, 4
STREAM_NON_BLOCKING: Final = 1
LEGACY_STREAM: Final = 0
IPC_HANDLE_NBYTES: Final = 64
_NOT_READY: Final = 600


@functools.cache
def api() -> Any:
    """Return ``cuda.bindings.driver``.

    Raises:
        DeviceError: cuda-bindings or the driver is missing.
    """
    try:
        from cuda.bindings import driver  # noqa: PLC0415 -- only where there is a GPU
    except ImportError as error:
        raise DeviceError(f"CUDA memory needs cuda-bindings: {error}; pip install 'kvist[cuda]'") from error
    try:
        (code,) = driver.cuInit(0)
    except RuntimeError as error:
        raise DeviceError(f"there is no CUDA driver: {error}") from error
    if code:
        raise DeviceError(f"CUDA cannot be used: cuInit returned {int(code)} ({code.name})")
    return driver


def call(name: str, *arguments: Any) -> Any:
    """Call a driver function; return what it returns beside its code: nothing, a value, or a tuple.

    Raises:
        DeviceError: it failed.
    """
    code, *values = getattr(api(), name)(*arguments)
    if code:
        raise DeviceError(f"{name} returned {int(code)}: {_explain(code)}")
    return values[0] if len(values) == 1 else tuple(values)


def is_event_done(event: object) -> bool:
    """Return whether all work that an event was recorded behind is done; never waits.

    Raises:
        DeviceError: that work has failed.
    """
    (code,) = api().cuEventQuery(event)
    if code and int(code) != _NOT_READY:
        raise DeviceError(f"cuEventQuery returned {int(code)}: {_explain(code)}")
    return not code


def take(stack: ExitStack, release: str, name: str, *arguments: Any) -> Any:
    """Call a driver function that makes something; ``stack`` gives it back with the function ``release``.

    Raises:
        DeviceError: it failed.
    """
    made = call(name, *arguments)
    stack.callback(call, release, made)
    return made


def devices() -> dict[str, int]:
    """Return the ordinal of every GPU that this process sees, by UUID."""
    found = {}
    for ordinal in range(call("cuDeviceGetCount")):
        device = call("cuDeviceGet", ordinal)
        found[str(uuid.UUID(bytes=bytes(call("cuDeviceGetUuid", device).bytes)))] = ordinal
    return found


def find_device(device_uuid: str) -> int:
    """Return the ordinal of a GPU.

    Raises:
        DeviceError: this process does not see it; names both.
    """
    seen = devices()
    if device_uuid not in seen:
        raise DeviceError(
            f"GPU {device_uuid} is not visible to this process, which sees {sorted(seen)}; the daemon must see every "
            f"GPU of its engines (CUDA_VISIBLE_DEVICES, --gpus)"
        )
    return seen[device_uuid]


class Context:
    """The primary context of one GPU, held while this value lives."""

    def __init__(self, device_uuid: str) -> None:
        """Retain the context; it is created if nobody else in this process has.

        Raises:
            DeviceError: the GPU is not there, or has no memory left for a context.
        """
        self.device = call("cuDeviceGet", find_device(device_uuid))
        self._context = call("cuDevicePrimaryCtxRetain", self.device)

    def use(self) -> None:
        """Make it the calling thread's current context."""
        call("cuCtxSetCurrent", self._context)

    def arch(self) -> str:
        """Return the GPU's architecture, such as ``sm_90``."""
        attributes = api().CUdevice_attribute
        major = call("cuDeviceGetAttribute", attributes.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR, self.device)
        minor = call("cuDeviceGetAttribute", attributes.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR, self.device)
        return f"sm_{major}{minor}"

    def close(self) -> None:
        """Give the context up; it ends when nobody in this process holds it."""
        call("cuDevicePrimaryCtxRelease", self.device)


def _explain(code: Any) -> str:
    _, text = api().cuGetErrorString(code)
    return f"{code.name}: {text.decode() if text else 'no text'}"
