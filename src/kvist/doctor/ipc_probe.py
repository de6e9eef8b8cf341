"""Whether another process can open a GPU's memory: exported here, opened and read by a child that runs this module.

The law: the child says the bytes that the parent has written, or the sharing has failed.
"""

from __future__ import annotations

import ctypes
import hashlib
import subprocess
import sys
from collections.abc import Callable
from contextlib import ExitStack
from typing import Final

from kvist.device.cuda.driver import LEGACY_STREAM, Context, call, take
from kvist.device.cuda.export import export_memory
from kvist.device.cuda.memory import OpenedMemory
from kvist.errors import DeviceError, KvistError
from kvist.model.handles import CUDA_IPC, MemoryHandle
from kvist.units import MIB

_NBYTES: Final = 2 * MIB
_CHILD_S: Final = 60.0
_PATTERN: Final = hashlib.sha256(b"kvist doctor").digest()


def share_memory(device: str, read_elsewhere: Callable[[MemoryHandle], bytes]) -> None:
    """Write to a GPU's memory, and compare with what ``read_elsewhere`` reads at its beginning.

    Raises:
        DeviceError: CUDA fails, here or there, or other bytes came back.
        LayoutError: the memory cannot be exported.
    """
    with ExitStack() as stack:
        context = Context(device)
        stack.callback(context.close)
        context.use()
        address = int(take(stack, "cuMemFree", "cuMemAlloc", _NBYTES))
        written = ctypes.create_string_buffer(_PATTERN)
        call("cuMemcpyHtoD", address, ctypes.addressof(written), len(_PATTERN))
        call("cuStreamSynchronize", LEGACY_STREAM)  # The copy may return before its bytes have landed.
        (exported,), _ = export_memory([(address, _NBYTES)])
        stack.callback(exported.close)
        read = read_elsewhere(exported.handle)
    if read != _PATTERN:
        raise DeviceError(f"another process has read {read.hex()} where {_PATTERN.hex()} was written")


def open_in_another_process(handle: MemoryHandle) -> bytes:
    """Return the first bytes of exported memory, as a child reads them.

    Raises:
        DeviceError: the child could not.
    """
    command = [sys.executable, "-m", __name__, handle.device, str(handle.nbytes), handle.payload.hex()]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_CHILD_S, check=False)  # noqa: S603
    except (OSError, subprocess.TimeoutExpired) as error:
        raise DeviceError(f"the other process: {error}") from error
    if done.returncode:
        lines = done.stderr.strip().splitlines() or [f"exit code {done.returncode}"]
        raise DeviceError(f"the other process: {lines[-1]}")
    return bytes.fromhex(done.stdout.strip())


def read_memory(handle: MemoryHandle) -> bytes:
    """Open exported memory in this process, and return its first bytes.

    Raises:
        DeviceError: CUDA fails.
        LayoutError: it cannot be opened.
    """
    buffer = ctypes.create_string_buffer(len(_PATTERN))
    with ExitStack() as stack:
        context = Context(handle.device)
        stack.callback(context.close)
        context.use()
        memory = OpenedMemory()
        address = memory.open(handle, (), context.device)
        stack.callback(memory.close, address)
        call("cuMemcpyDtoH", ctypes.addressof(buffer), address, len(_PATTERN))
    return buffer.raw


def _main() -> int:
    device, nbytes, payload = sys.argv[1:]
    try:
        read = read_memory(MemoryHandle(CUDA_IPC, int(nbytes), device, bytes.fromhex(payload)))
    except KvistError as error:
        sys.stderr.write(f"{error}\n")
        return 1
    sys.stdout.write(f"{read.hex()}\n")
    return 0


if __name__ == "__main__":
    sys.exit(_main())
