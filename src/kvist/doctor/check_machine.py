"""Facts of the machine, its disks and its GPUs to findings. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Final

from kvist.doctor import catalogue as kinds
from kvist.doctor.facts import Daemon, Disk, Facts, Gpus, Host, NotKnown
from kvist.doctor.findings import Finding, fine
from kvist.server.config import ServeConfig
from kvist.units import MIB, format_nbytes
from kvist.wire.messages import StatusReply

_KERNEL_MIN: Final = (5, 14)
_DESCRIPTORS_MIN: Final = 4096
"""Some 20 GiB of KV in segments of 20 MiB, three times, and 1,000 more."""
_SHM_NBYTES_MIN: Final = 64 * MIB + 1
"""More than containers get if nobody says otherwise."""
_COPY_RATE_MIN: Final = 2e9
_READ_RATE_MIN: Final = 500e6
"""KV of 128 KiB a token, at 4,000 tokens a second: what a model of 8 B parameters computes on one GPU at least."""
_HUGE: Final = ("always", "within_size", "force")
_TIGHT: Final = 0.8
_IN_MEMORY: Final = ("tmpfs", "ramfs")
_NETWORK: Final = ("nfs", "nfs4", "cifs", "smb3", "ceph", "glusterfs", "lustre", "9p", "virtiofs")


def check_host(facts: Facts) -> Iterator[Finding]:
    """Are its limits wide enough, and its copies fast enough?"""
    host = facts.host
    troubles = [*_check_limits(host, _pool_nbytes(facts)), *_check_memory(host, facts.gpus)]
    yield from troubles
    release = f"Linux {host.kernel[0]}.{host.kernel[1]}"
    yield fine("host", f"{release}, one thread copies {host.copy_rate / 1e9:.1f} GB/s")


def check_serve(facts: Facts) -> Iterator[Finding]:
    """Would a daemon with this configuration start?"""
    config = facts.serve
    if isinstance(config, NotKnown):
        yield kinds.SERVE_CONFIG.found(config.because)
    elif config is not None:
        name, left = min(facts.host.memory_left, key=lambda limit: limit[1])
        left = max(left, 0)
        what = f"a pool of {format_nbytes(config.pool)}, and {name} leaves {format_nbytes(left)}"
        if config.pool > left:
            yield kinds.SERVE_POOL.found(what, left=format_nbytes(left))
        elif config.pool > _TIGHT * left:
            yield kinds.SERVE_POOL_TIGHT.found(what, left=format_nbytes(left))
        else:
            yield fine("serve", what)


def check_disks(facts: Facts) -> Iterator[Finding]:
    """Can the directories be used, and are they worth it?"""
    daemon = facts.daemon.status if isinstance(facts.daemon, Daemon) else None
    pid = str(daemon.pid) if isinstance(daemon, StatusReply) else ""
    for disk in facts.disks:
        troubles = [*_check_use(disk, pid), *_check_place(disk), *_check_speed(disk)]
        if isinstance(facts.serve, ServeConfig) and facts.serve.disk_size:
            troubles += _check_space(disk, facts.serve.disk_size // len(facts.disks), len(facts.disks))
        yield from troubles or [fine("disk", f"{disk.path}: {_rates(disk)}")]
    devices = Counter(disk.device for disk in facts.disks if not isinstance(disk.device, NotKnown))
    for device, num in devices.items():
        if num > 1:
            paths = ", ".join(disk.path for disk in facts.disks if disk.device == device)
            yield kinds.DISK_ONE_DRIVE.found(f"{paths} are on one file system")


def check_gpus(facts: Facts) -> Iterator[Finding]:
    """Are there GPUs, and can what is needed of them be had?"""
    gpus = facts.gpus
    if gpus is None:
        return
    if "expandable_segments:True" in gpus.allocator:
        yield kinds.GPU_EXPANDABLE.found(f"PYTORCH_CUDA_ALLOC_CONF is {gpus.allocator!r}")
    installed = () if isinstance(gpus.installed, NotKnown) else gpus.installed
    visible = () if isinstance(gpus.visible, NotKnown) else gpus.visible
    if not installed and not visible:
        reason = gpus.visible.because if isinstance(gpus.visible, NotKnown) else "CUDA shows none"
        yield kinds.GPU_NONE.found(f"no GPU: {reason}")
    elif not visible and not gpus.has_bindings:
        yield kinds.GPU_BINDINGS.found(f"{len(installed)} GPUs: {', '.join(installed)}")
    elif len(visible) < len(installed) and (visible or gpus.visible_devices is not None):
        said = "is not set" if gpus.visible_devices is None else f"is {gpus.visible_devices!r}"
        yield kinds.GPU_HIDDEN.found(
            f"{len(visible)} of {len(installed)} GPUs are visible; CUDA_VISIBLE_DEVICES {said}"
        )
    elif isinstance(gpus.visible, NotKnown):
        yield kinds.GPU_DRIVER.found(gpus.visible.because)
    if visible and gpus.sharing is not None:
        yield kinds.GPU_SHARING.found(gpus.sharing.because)
    elif visible:
        yield fine("gpu", f"{', '.join(visible)}: another process can open its memory")


def _pool_nbytes(facts: Facts) -> int:
    if isinstance(facts.serve, ServeConfig):
        return facts.serve.pool
    status = facts.daemon.status if isinstance(facts.daemon, Daemon) else None
    return status.pool_nbytes if isinstance(status, StatusReply) else ServeConfig().pool


def _check_limits(host: Host, pool_nbytes: int) -> Iterator[Finding]:
    if host.kernel < _KERNEL_MIN:
        yield kinds.HOST_KERNEL.found(f"Linux {host.kernel[0]}.{host.kernel[1]}")
    if host.descriptors_max is not None and host.descriptors_max < _DESCRIPTORS_MIN:
        yield kinds.HOST_DESCRIPTORS.found(f"at most {host.descriptors_max}; {_DESCRIPTORS_MIN} are enough for most")
    if host.locked_nbytes_max is not None and host.locked_nbytes_max < pool_nbytes:
        limit = format_nbytes(host.locked_nbytes_max)
        yield kinds.HOST_LOCKED.found(f"{limit}, and a pool of {format_nbytes(pool_nbytes)}")
    if not isinstance(host.shm_nbytes, NotKnown) and host.shm_nbytes < _SHM_NBYTES_MIN:
        yield kinds.HOST_SHM.found(f"{format_nbytes(host.shm_nbytes)} in /dev/shm")


def _check_memory(host: Host, gpus: Gpus | None) -> Iterator[Finding]:
    if not isinstance(host.shmem_huge, NotKnown) and host.shmem_huge not in _HUGE:
        yield kinds.HOST_HUGE_PAGES.found(f"shmem_enabled is {host.shmem_huge!r}")
    if not isinstance(host.numa_nodes, NotKnown) and len(host.numa_nodes) > 1:
        free = ", ".join(f"{node.number}: {format_nbytes(node.free_nbytes)} free" for node in host.numa_nodes)
        own = gpus.numa_nodes if gpus is not None else ()
        places = "".join(f"; GPU {address} is on node {number}" for address, number in own)
        yield kinds.HOST_NUMA.found(f"nodes {free}{places}", node=own[0][1] if own else host.numa_nodes[0].number)
    if host.copy_rate < _COPY_RATE_MIN:
        yield kinds.HOST_SLOW_COPIES.found(f"{host.copy_rate / 1e9:.2f} GB/s")


def _check_use(disk: Disk, daemon_pid: str) -> Iterator[Finding]:
    if disk.user and disk.user != daemon_pid:
        yield kinds.DISK_IN_USE.found(f"process {disk.user} uses {disk.path}", pid=disk.user, path=disk.path)
    if disk.unusable:
        yield kinds.DISK_UNUSABLE.found(disk.unusable, path=disk.path)
    if not disk.has_parent:
        yield kinds.DISK_MISSING.found(f"{disk.path}: {disk.refusal}", path=disk.path)
    elif disk.refusal:
        yield kinds.DISK_NOT_WRITABLE.found(f"{disk.path}: {disk.refusal}", path=disk.path)


def _check_place(disk: Disk) -> Iterator[Finding]:
    kind = disk.filesystem
    if isinstance(kind, NotKnown) or not disk.has_parent:
        return
    if kind in _IN_MEMORY:
        yield kinds.DISK_IN_MEMORY.found(f"{disk.path} is on {kind}")
    elif kind == "overlay":
        yield kinds.DISK_OVERLAY.found(f"{disk.path} is on {kind}")
    elif kind in _NETWORK or kind.startswith("fuse"):
        yield kinds.DISK_NETWORK.found(f"{disk.path} is on {kind}")


def _check_speed(disk: Disk) -> Iterator[Finding]:
    if disk.is_direct is False:
        yield kinds.DISK_NOT_DIRECT.found(f"{disk.path} is on {disk.filesystem}")
    if not isinstance(disk.read_rate, NotKnown) and disk.read_rate < _READ_RATE_MIN:
        yield kinds.DISK_SLOW.found(f"{disk.path}: {_rates(disk)}")


def _check_space(disk: Disk, share_nbytes: int, num: int) -> Iterator[Finding]:
    if isinstance(disk.free_nbytes, NotKnown):
        return
    there = disk.free_nbytes + disk.own_nbytes
    if there < share_nbytes:
        what = f"{disk.path} has room for {format_nbytes(there)}, and its share is {format_nbytes(share_nbytes)}"
        yield kinds.DISK_SPACE.found(what, nbytes=format_nbytes(there * num))


def _rates(disk: Disk) -> str:
    if isinstance(disk.read_rate, NotKnown) or isinstance(disk.write_rate, NotKnown):
        return "not measured"
    return f"reads {disk.read_rate / 1e6:.0f} MB/s, writes {disk.write_rate / 1e6:.0f} MB/s"
