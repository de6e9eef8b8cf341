"""GPUs on this side: those that the kernel's driver names, those that CUDA shows, and whether their memory is shared.

The law: a GPU is named by its UUID, on both sides.
"""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from kvist.device.cuda import driver
from kvist.doctor.facts import Gpus, NotKnown
from kvist.doctor.ipc_probe import open_in_another_process, share_memory
from kvist.errors import DeviceError, LayoutError

_DRIVER: Final = Path("/proc/driver/nvidia/gpus")
_PCI: Final = Path("/sys/bus/pci/devices")


def look_at_gpus(environment: Mapping[str, str]) -> Gpus:
    """Return what can be seen of GPUs; makes a context on the first one, for some tenths of a second."""
    has_bindings = _has_bindings()
    try:
        visible: tuple[str, ...] | NotKnown = tuple(sorted(driver.devices()))
    except DeviceError as error:
        visible = NotKnown(str(error))
    return Gpus(
        installed=installed_gpus(_DRIVER),
        visible=visible,
        has_bindings=has_bindings,
        visible_devices=environment.get("CUDA_VISIBLE_DEVICES"),
        allocator=environment.get("PYTORCH_CUDA_ALLOC_CONF", ""),
        numa_nodes=gpu_nodes(_DRIVER, _PCI),
        sharing=_try_sharing(visible),
    )


def installed_gpus(folder: Path) -> tuple[str, ...] | NotKnown:
    """Return the UUIDs that NVIDIA's kernel driver names below ``folder``."""
    try:
        texts = [path.read_text() for path in sorted(folder.glob("*/information"))]
    except OSError as error:
        return NotKnown(f"{folder}: {error.strerror}")
    found = [match[1].lower() for text in texts if (match := re.search(r"GPU UUID:\s+GPU-([0-9a-fA-F-]+)", text))]
    return tuple(sorted(found))


def gpu_nodes(folder: Path, devices: Path) -> tuple[tuple[str, int], ...]:
    """Return the PCI address and NUMA node of each GPU below ``folder`` that has one, as ``devices`` says."""
    nodes = []
    for gpu in sorted(folder.glob("*")):
        try:
            node = int((devices / gpu.name / "numa_node").read_text())
        except (OSError, ValueError):
            continue
        if node >= 0:
            nodes.append((gpu.name, node))
    return tuple(nodes)


def _has_bindings() -> bool:
    try:
        return importlib.util.find_spec("cuda.bindings") is not None
    except ModuleNotFoundError:
        return False


def _try_sharing(visible: tuple[str, ...] | NotKnown) -> NotKnown | None:
    if isinstance(visible, NotKnown) or not visible:
        return NotKnown("no GPU is visible")
    try:
        share_memory(visible[0], open_in_another_process)
    except (DeviceError, LayoutError) as error:
        return NotKnown(str(error))
    return None
