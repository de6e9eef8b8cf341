"""Looks, then judges: the probes in an order, and all checks in a table.

The law: probes look and never raise for what they find; checks are functions of what was seen.
"""

from __future__ import annotations

import importlib.metadata
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from kvist.adapters.vllm.options import Options
from kvist.doctor.check_daemon import check_daemon, check_lane, check_service, check_socket
from kvist.doctor.check_machine import check_disks, check_gpus, check_host, check_serve
from kvist.doctor.check_vllm import check_vllm
from kvist.doctor.disks import look_at_disk
from kvist.doctor.facts import Daemon, Facts, Listener, NotKnown, Refusal, Silence, Socket, Vllm
from kvist.doctor.findings import Finding
from kvist.doctor.gpus import look_at_gpus
from kvist.doctor.host import look_at_host
from kvist.doctor.sockets import ask_daemon, look_at_socket
from kvist.doctor.vllm import read_arguments, read_transfer
from kvist.server.config import ServeConfig
from kvist.wire.address import default_socket_path

CHECKS: Final[tuple[Callable[[Facts], Iterator[Finding]], ...]] = (
    check_socket, check_daemon, check_service, check_lane, check_serve, check_vllm, check_host, check_disks, check_gpus,
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Questions:
    """What to look at."""

    socket: str | None = None
    """None for the one that is configured, or the user's default."""
    disks: tuple[str, ...] = ()
    vllm_arguments: str | None = None
    vllm_transfer: str | None = None
    serve: ServeConfig | NotKnown | None = None
    """None to look at the daemon that runs, from an engine's side."""
    has_gpus: bool = True


def look(questions: Questions, environment: Mapping[str, str]) -> Facts:
    """Gather facts; takes some seconds, most of them for disks.

    Raises:
        ConfigError: vLLM's arguments are no command line.
    """
    vllm = _read_vllm(questions)
    serve = questions.serve
    disks = questions.disks or (serve.disk if isinstance(serve, ServeConfig) else ())
    socket = look_at_socket(_socket_path(questions, vllm))
    return Facts(
        host=look_at_host(),
        socket=socket,
        daemon=_ask(socket) if serve is None else None,
        serve=serve,
        disks=tuple(look_at_disk(Path(path)) for path in disks),
        gpus=look_at_gpus(environment) if questions.has_gpus else None,
        vllm=vllm,
    )


def examine(facts: Facts) -> list[Finding]:
    """Return what all checks find."""
    return [finding for check in CHECKS for finding in check(facts)]


def _read_vllm(questions: Questions) -> Vllm | None:
    try:
        version: str | NotKnown = importlib.metadata.version("vllm")
    except importlib.metadata.PackageNotFoundError:
        version = NotKnown("vLLM is not installed beside this kvist")
    if questions.vllm_arguments is not None:
        return read_arguments(questions.vllm_arguments, version)
    return read_transfer(questions.vllm_transfer, version) if questions.vllm_transfer is not None else None


def _socket_path(questions: Questions, vllm: Vllm | None) -> str:
    if questions.socket:
        return questions.socket
    if isinstance(questions.serve, ServeConfig):
        return questions.serve.socket_path
    if vllm is not None and isinstance(vllm.options, Options):
        return vllm.options.socket_path
    return default_socket_path(os.getuid())


def _ask(socket: Socket) -> Daemon | Refusal | Silence | NotKnown | None:
    """Ask who listens, if an engine would."""
    peer = socket.peer
    if isinstance(peer, Listener) and peer.uid in (0, socket.own_uid):
        return ask_daemon(socket.path, peer)
    return None
