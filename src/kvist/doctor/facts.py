"""What probes have seen. Values only.

The law: what could not be seen is a ``NotKnown`` with its reason, and never a guess.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import msgspec

from kvist.adapters.vllm.options import Options
from kvist.server.config import ServeConfig
from kvist.wire.messages import StatusReply


@dataclass(frozen=True, slots=True)
class NotKnown:
    """Something that could not be seen."""

    because: str


@dataclass(frozen=True, slots=True)
class NumaNode:
    """One node of memory."""

    number: int
    nbytes: int
    free_nbytes: int


@dataclass(frozen=True, slots=True)
class Host:
    """This machine, as this process sees it."""

    kernel: tuple[int, int]
    """Version of Linux."""
    descriptors_max: int | None
    """The hard limit of open files; None for no limit."""
    locked_nbytes_max: int | None
    """The soft limit of locked memory; None for no limit."""
    shm_nbytes: int | NotKnown
    """Size of ``/dev/shm``."""
    shmem_huge: str | NotKnown
    """The kernel's choice for huge pages in shared memory, such as ``never``."""
    numa_nodes: tuple[NumaNode, ...] | NotKnown
    memory_left: tuple[tuple[str, int], ...]
    """What limits memory, and how many bytes each limit leaves."""
    copy_rate: float
    """Bytes per second that one thread copies."""


@dataclass(frozen=True, slots=True)
class Folder:
    """The directory of a socket."""

    path: str
    mode: int
    uid: int


@dataclass(frozen=True, slots=True)
class Listener:
    """Who accepts connections at a socket."""

    pid: int
    """0 if its process cannot be seen from here."""
    uid: int
    program: str | NotKnown


@dataclass(frozen=True, slots=True)
class NotConnected:
    """Why nobody accepts them."""

    name: str
    """Of the error, such as ``ECONNREFUSED``."""
    text: str


@dataclass(frozen=True, slots=True)
class Socket:
    """What is at the path of a daemon's socket."""

    path: str
    own_uid: int
    folder: Folder | NotKnown
    is_socket: bool | None
    """None if there is nothing."""
    peer: Listener | NotConnected


@dataclass(frozen=True, slots=True)
class Refusal:
    """A daemon's no."""

    code: str
    detail: str


@dataclass(frozen=True, slots=True)
class Silence:
    """A daemon that has taken the connection, and not answered."""

    deadline_s: float


@dataclass(frozen=True, slots=True)
class Namespaces:
    """The kernel's names of the namespaces of two processes: this one's, the daemon's."""

    pid: tuple[str, str] | NotKnown
    ipc: tuple[str, str] | NotKnown


@dataclass(frozen=True, slots=True)
class Daemon:
    """A daemon, as it answers."""

    version: str
    status: StatusReply | Refusal
    lane: Refusal | None
    """What it says to an engine that would copy for itself; None for yes."""
    namespaces: Namespaces


@dataclass(frozen=True, slots=True)
class Disk:
    """A directory for the disk tier, or its parent where it is still to be made."""

    path: str
    is_there: bool
    has_parent: bool
    filesystem: str | NotKnown
    """Type, such as ``ext4``."""
    device: int | NotKnown
    """Equal for directories of one file system."""
    free_nbytes: int | NotKnown
    own_nbytes: int
    """What kvist's files in it occupy, which a new daemon uses again."""
    refusal: str
    """Why nothing can be written; empty if it can."""
    is_direct: bool | NotKnown
    """Whether files can be read and written past the page cache."""
    write_rate: float | NotKnown
    """Bytes per second, measured."""
    read_rate: float | NotKnown
    user: str
    """Id of the process that uses it, or ``unknown``; empty if nobody does."""
    unusable: str
    """Why what is there cannot be used, such as a newer version; empty if it can, or if there is nothing."""


@dataclass(frozen=True, slots=True)
class Gpus:
    """GPUs, and how processes can share their memory."""

    installed: tuple[str, ...] | NotKnown
    """UUIDs that the kernel's driver names."""
    visible: tuple[str, ...] | NotKnown
    """UUIDs that CUDA shows to this process."""
    has_bindings: bool
    """Whether cuda-bindings is installed."""
    visible_devices: str | None
    """``CUDA_VISIBLE_DEVICES``"""
    allocator: str
    """``PYTORCH_CUDA_ALLOC_CONF``"""
    numa_nodes: tuple[tuple[str, int], ...]
    """Of GPUs by PCI address, where the kernel says."""
    sharing: NotKnown | None
    """Why another process could not open a GPU's memory, or was not tried; None if it could."""


class Transfer(msgspec.Struct, frozen=True):
    """``--kv-transfer-config``, as far as it concerns us."""

    kv_connector: str | None = None
    kv_connector_module_path: str | None = None
    kv_role: str | None = None
    kv_load_failure_policy: str = "fail"
    kv_connector_extra_config: dict[str, Any] = {}


@dataclass(frozen=True, slots=True)
class Vllm:
    """What ``vllm serve`` is told."""

    version: str | NotKnown
    """Of the vLLM that is installed beside us."""
    transfer: Transfer | NotKnown | None
    """None without the flag. Below a MultiConnector: our child, with the failure policy of the whole."""
    options: Options | NotKnown
    has_arguments: bool
    """False if only the transfer's configuration is known."""
    is_prefix_caching_off: bool = False
    is_hybrid_off: bool = False
    has_sleep_mode: bool = False
    has_computed_scales: bool = False
    num_prefill_ranks: int = 1
    block_tokens: int | None = None
    """None if vLLM chooses."""
    config_file: str = ""
    """A file with more arguments, which was not read."""


@dataclass(frozen=True, slots=True)
class Facts:
    """Everything. None stands for what was not looked at."""

    host: Host
    socket: Socket
    daemon: Daemon | Refusal | Silence | NotKnown | None = None
    """``NotKnown`` of what is no kvist daemon; None if nobody accepts connections, or it was not asked."""
    serve: ServeConfig | NotKnown | None = None
    """What ``kvist serve`` would be told, if that is asked."""
    disks: tuple[Disk, ...] = ()
    gpus: Gpus | None = None
    vllm: Vllm | None = None
