"""Moving an engine's CPU KV memory into shared memory, under the tensors that use it.

The law: afterwards every tensor that lay in the old memory lies in the new one, at the same place and with the same
bytes, and nothing refers to the old memory any more; if that cannot be shown, nothing has changed. The new memory is a
sealed memfd: it needs no space in ``/dev/shm``, and cannot be taken away from under the daemon.
"""

from __future__ import annotations

import contextlib
import fcntl
import gc
import mmap
import os
from collections.abc import Iterator, Sequence
from typing import Any, Final

import numpy as np
import torch

from kvist.errors import LayoutError
from kvist.units import MIB

_SEALS: Final = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
_STEP_NBYTES: Final = 16 * MIB


def share_storages(storages: Sequence[Any]) -> list[int]:
    """Move each storage into a memfd of its own; return the descriptors, which the caller owns.

    Raises:
        LayoutError: something refers to a storage that no Python tensor explains.
    """
    fds: list[int] = []
    try:
        for storage in storages:
            fds.append(_share(storage))  # noqa: PERF401 -- what was shared before a failure must be closed
    except LayoutError:
        for fd in fds:
            os.close(fd)
        raise
    return fds


def _share(old: Any) -> int:
    nbytes = old.nbytes()
    fd = os.memfd_create("kvist-kv", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, nbytes)
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _SEALS)
    # All pages are made present now: at their first touch, in the middle of a load, they would cost more than its copy.
    mapping = mmap.mmap(fd, nbytes, flags=mmap.MAP_SHARED | mmap.MAP_POPULATE)
    memory = np.frombuffer(mapping, dtype=np.uint8)
    new = torch.from_numpy(memory).untyped_storage()
    _copy_written(old, new)
    moved = list(_tensors_on(old))
    for tensor in moved:
        _point(tensor, new)
    # One user is left if all is well: the object ``old`` itself.
    if (num_left := torch._C._storage_Use_Count(old._cdata)) > 1:  # noqa: SLF001 -- torch has no public count
        for tensor in moved:
            _point(tensor, old)
        os.close(fd)
        raise LayoutError(f"{num_left - 1} users of the KV memory of {nbytes} bytes are not among its tensors")
    return fd


def _copy_written(old: Any, new: Any) -> None:
    """Copy what is not zero: memory that was never written stays untouched on both sides."""
    source = torch.empty(0, dtype=torch.uint8).set_(old)
    target = torch.empty(0, dtype=torch.uint8).set_(new)
    for part, room in zip(source.split(_STEP_NBYTES), target.split(_STEP_NBYTES), strict=True):
        if torch.any(part):
            room.copy_(part)


def _tensors_on(storage: Any) -> Iterator[torch.Tensor]:
    address = storage.data_ptr()
    for found in gc.get_objects():
        if issubclass(type(found), torch.Tensor):
            with contextlib.suppress(RuntimeError, NotImplementedError):  # Tensors without storage of their own.
                if found.device.type == "cpu" and found.untyped_storage().data_ptr() == address:
                    yield found


def _point(tensor: torch.Tensor, storage: Any) -> None:
    with torch.inference_mode(mode=tensor.is_inference()), torch.no_grad():
        tensor.set_(storage, tensor.storage_offset(), tensor.size(), tensor.stride())
