"""Facts of a setup in which nothing is amiss, to be changed in one place at a time."""

from __future__ import annotations

import os
from dataclasses import replace

import msgspec

from kvist.adapters.vllm.options import Options
from kvist.doctor.facts import (
    Daemon,
    Disk,
    Facts,
    Folder,
    Gpus,
    Host,
    Listener,
    Namespaces,
    NotConnected,
    Socket,
    Transfer,
    Vllm,
)
from kvist.server.config import ServeConfig
from kvist.units import GIB
from kvist.wire.messages import StatusReply, TierStatus

PATH = "/run/kvist/kvist.sock"
UUID = "c7bd7de2-1b3f-4c46-9d1e-6a2f5f0e9a11"
COUNTERS = {"lookups": 10, "chunks_asked": 100, "chunks_found": 60, "chunks_stored": 40, "chunks_evicted": 5}
TIER = TierStatus("disk", 1 << 40, 1 << 30, 10, 2e9, 1e9, 0, 0)
STATUS = StatusReply(
    id=2, pid=77, boot_id="b", is_draining=False, pool_nbytes=8 * GIB, pool_used_nbytes=GIB, num_sealed=40,
    num_reserved=0, num_pinned=0, num_leases=0, num_sessions=3, num_registered=1, num_copies_in_flight=0,
    counters=COUNTERS, tiers=[TIER],
)  # fmt: skip
HOST = Host(
    kernel=(6, 8), descriptors_max=1 << 20, locked_nbytes_max=None, shm_nbytes=16 * GIB, shmem_huge="always",
    numa_nodes=(), memory_left=(("the machine's available memory", 64 * GIB), ("the limit", 32 * GIB)), copy_rate=8e9,
)  # fmt: skip
SOCKET = Socket(
    PATH, os.getuid(), Folder("/run/kvist", 0o700, 0), is_socket=True, peer=Listener(77, 0, "kvist serve")
)  # fmt: skip
NOBODY = replace(SOCKET, is_socket=None, peer=NotConnected("ENOENT", "No such file"))
DAEMON = Daemon("1.0", STATUS, None, Namespaces(("pid:[1]", "pid:[1]"), ("ipc:[1]", "ipc:[1]")))
DISK = Disk(
    path="/nvme/kvist", is_there=True, has_parent=True, filesystem="ext4", device=1,
    free_nbytes=400 * GIB, own_nbytes=0, refusal="", is_direct=True, write_rate=2e9, read_rate=3e9, user="",
    unusable="",
)  # fmt: skip
GPUS = Gpus(
    installed=(UUID,), visible=(UUID,), has_bindings=True, visible_devices=None, allocator="", numa_nodes=(),
    sharing=None,
)  # fmt: skip
TRANSFER = Transfer("KvistConnector", "kvist.adapters.vllm", "kv_both", "recompute", {"socket": PATH})
VLLM = Vllm("0.32.0", TRANSFER, Options(socket=PATH), has_arguments=True)
CONFIG = ServeConfig(pool=8 * GIB, disk=("/nvme/kvist",), disk_size=200 * GIB)
ENGINE_SIDE = Facts(HOST, SOCKET, DAEMON, None, (DISK,), GPUS, VLLM)
DAEMON_SIDE = Facts(
    HOST, replace(SOCKET, is_socket=None, peer=NotConnected("ENOENT", "No such file")), None, CONFIG, (DISK,), GPUS
)


def with_status(**changes: object) -> Facts:
    """Return the engine's side with another status; ``counters`` are added to the usual ones."""
    if "counters" in changes:
        changes["counters"] = {**COUNTERS, **changes["counters"]}
    return replace(ENGINE_SIDE, daemon=replace(DAEMON, status=msgspec.structs.replace(STATUS, **changes)))


def with_host(**changes: object) -> Facts:
    return replace(ENGINE_SIDE, host=replace(HOST, **changes))


def with_socket(**changes: object) -> Facts:
    """Return the engine's side with another socket, at which no daemon was asked."""
    return replace(ENGINE_SIDE, socket=replace(SOCKET, **changes), daemon=None)


def with_disk(**changes: object) -> Facts:
    return replace(ENGINE_SIDE, disks=(replace(DISK, **changes),))


def with_gpus(**changes: object) -> Facts:
    return replace(ENGINE_SIDE, gpus=replace(GPUS, **changes))


def with_vllm(**changes: object) -> Facts:
    return replace(ENGINE_SIDE, vllm=replace(VLLM, **changes))


def with_transfer(**changes: object) -> Facts:
    return with_vllm(transfer=msgspec.structs.replace(TRANSFER, **changes))


def with_config(**changes: object) -> Facts:
    return replace(DAEMON_SIDE, serve=msgspec.structs.replace(CONFIG, **changes))
