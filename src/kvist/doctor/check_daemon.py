"""Facts of a socket and of the daemon behind it to findings. Pure."""

from __future__ import annotations

import stat
from collections.abc import Iterator
from typing import Final

from kvist.adapters.vllm.options import FLAG, Options
from kvist.doctor import catalogue as kinds
from kvist.doctor.facts import (
    Daemon,
    Facts,
    Folder,
    Listener,
    NotConnected,
    NotKnown,
    Refusal,
    Silence,
    Socket,
)  # fmt: skip
from kvist.doctor.findings import Finding, fine
from kvist.server.config import ServeConfig
from kvist.units import format_nbytes
from kvist.wire.messages import StatusReply

_OTHERS: Final = stat.S_IWGRP | stat.S_IWOTH
_LANE_CODES: Final = ("refused_overloaded", "refused_pool_kept")
"""Refusals with findings of their own."""


def check_socket(facts: Facts) -> Iterator[Finding]:
    """Is there a daemon to connect to? Or, for one that is still to start, room for it?"""
    found = facts.socket
    yield from _check_folder(found, is_own=facts.serve is not None)
    if found.is_socket is False:
        yield kinds.SOCKET_OTHER_FILE.found(f"{found.path} is no socket", path=found.path)
    elif facts.serve is not None:
        yield _check_free(found)
    elif isinstance(found.peer, NotConnected):
        yield _explain(found, found.peer)
    elif found.peer.uid not in (0, found.own_uid):
        yield kinds.SOCKET_FOREIGN.found(
            f"{_who(found.peer)} listens at {found.path} as user {found.peer.uid}", uid=found.own_uid
        )
    else:
        yield fine("socket", f"{_who(found.peer)} listens at {found.path}")


def check_daemon(facts: Facts) -> Iterator[Finding]:
    """Does it speak with us?"""
    daemon, peer = facts.daemon, facts.socket.peer
    pid = peer.pid if isinstance(peer, Listener) else 0
    match daemon:
        case Daemon():
            yield fine("daemon", f"kvist {daemon.version} answers")
        case Refusal(code="version_mismatch"):
            yield kinds.DAEMON_VERSION.found(daemon.detail)
        case Refusal():
            yield kinds.DAEMON_REFUSES.found(f"{daemon.code}: {daemon.detail}")
        case Silence():
            yield kinds.DAEMON_SILENT.found(f"no answer within {daemon.deadline_s:g} s", pid=pid)
        case NotKnown() if isinstance(peer, Listener):
            yield kinds.DAEMON_OTHER_PROGRAM.found(f"{_who(peer)} listens: {daemon.because}", pid=pid)
        case _:
            return


def check_service(facts: Facts) -> Iterator[Finding]:
    """Does it serve, as far as its counters tell?"""
    status = _status(facts)
    if status is None:
        return
    troubles = [*_check_state(status), *_check_sessions(status), *_check_refusals(status), *_check_use(status)]
    used = f"{format_nbytes(status.pool_used_nbytes)} of {format_nbytes(status.pool_nbytes)}"
    yield from troubles or [fine("service", f"{status.num_sealed} chunks in {used}, nothing amiss")]


def check_lane(facts: Facts) -> Iterator[Finding]:
    """May an engine copy for itself?"""
    options = facts.vllm.options if facts.vllm is not None else None
    wants_engine = isinstance(options, Options) and options.lane == "engine"
    if isinstance(facts.serve, ServeConfig) and facts.serve.isolate:
        yield _check_isolation(wants_engine=wants_engine)
    status = _status(facts)
    if not isinstance(facts.daemon, Daemon) or status is None or status.is_draining:
        return
    lane, names = facts.daemon.lane, facts.daemon.namespaces
    is_apart = isinstance(names.pid, NotKnown) or names.pid[0] != names.pid[1]
    if lane is None:
        yield fine("lane", "engines may copy for themselves")
    elif lane.code == "pool_kept":
        yield _check_isolation(wants_engine=wants_engine)
    elif is_apart:
        seen = names.pid.because if isinstance(names.pid, NotKnown) else f"{names.pid[0]} here, {names.pid[1]} there"
        yield kinds.LANE_UNSEEN.found(f"{lane.detail} ({seen})")
    else:
        yield kinds.LANE_REFUSED.found(f"{lane.code}: {lane.detail}")
    if not isinstance(names.ipc, NotKnown) and names.ipc[0] != names.ipc[1]:
        yield kinds.LANE_IPC.found(f"{names.ipc[0]} here, {names.ipc[1]} there")


def _check_isolation(*, wants_engine: bool) -> Finding:
    if wants_engine:
        return kinds.LANE_ISOLATED.found("the daemon isolates, and the engine's `lane` is `engine`")
    return kinds.LANE_DAEMON_COPIES.found("the daemon isolates")


def _check_folder(found: Socket, *, is_own: bool) -> Iterator[Finding]:
    folder = found.folder
    if not isinstance(folder, Folder):
        return
    if folder.mode & _OTHERS and not folder.mode & stat.S_ISVTX:
        yield kinds.SOCKET_OPEN_FOLDER.found(f"{folder.path} has mode {folder.mode:04o}", folder=folder.path)
    if is_own and folder.uid not in (0, found.own_uid):
        yield kinds.SOCKET_FOREIGN_FOLDER.found(f"{folder.path} belongs to user {folder.uid}, not to {found.own_uid}")


def _check_free(found: Socket) -> Finding:
    if isinstance(found.peer, Listener):
        return kinds.SOCKET_IN_USE.found(f"{_who(found.peer)} listens at {found.path}", pid=found.peer.pid)
    return fine("socket", f"{found.path} is free")


def _explain(found: Socket, failure: NotConnected) -> Finding:
    what = f"{found.path}: {failure.text}"
    if failure.name in ("ENOENT", "ENOTDIR"):
        return kinds.SOCKET_MISSING.found(what, path=found.path)
    if failure.name == "ECONNREFUSED":
        return kinds.SOCKET_DEAD.found(what, path=found.path)
    if failure.name in ("EACCES", "EPERM"):
        return kinds.SOCKET_FORBIDDEN.found(what, uid=found.own_uid)
    return kinds.SOCKET_BLOCKED.found(what, path=found.path)


def _who(peer: Listener) -> str:
    if isinstance(peer.program, NotKnown):
        return f"process {peer.pid}" if peer.pid else "a process that cannot be seen from here"
    return f"process {peer.pid} ({peer.program})"


def _status(facts: Facts) -> StatusReply | None:
    status = facts.daemon.status if isinstance(facts.daemon, Daemon) else None
    return status if isinstance(status, StatusReply) else None


def _check_state(status: StatusReply) -> Iterator[Finding]:
    if status.is_draining:
        yield kinds.SERVICE_DRAINING.found(f"process {status.pid} is draining")
    for tier in status.tiers:
        if tier.off_reason:
            yield kinds.SERVICE_TIER_OFF.found(f"{tier.name}: {tier.off_reason}")
    if num := status.counters.get("chunks_corrupt", 0):
        yield kinds.SERVICE_CORRUPT.found(f"{num} chunks")


def _check_sessions(status: StatusReply) -> Iterator[Finding]:
    if status.num_registered:
        return
    num_others = status.num_sessions - 1  # We are one ourselves.
    if num_others and status.counters.get("lookups", 0):
        yield kinds.SERVICE_UNREGISTERED.found(f"{num_others} other sessions, none with KV memory")
    else:  # Whoever else is connected may only look at it, as we do.
        yield kinds.SERVICE_NO_ENGINE.found(f"{num_others} other sessions, none an engine's", flag=FLAG)


def _check_refusals(status: StatusReply) -> Iterator[Finding]:
    counters = status.counters
    if num := counters.get("refused_overloaded", 0):
        yield kinds.SERVICE_OVERLOADED.found(f"{num} requests")
    others = {key: num for key, num in counters.items() if key.startswith("refused_") and key not in _LANE_CODES}
    if any(others.values()):
        texts = (f"{key.removeprefix('refused_')}: {num}" for key, num in sorted(others.items()) if num)
        yield kinds.SERVICE_REFUSED.found(", ".join(texts))
    num_stored, num_refused = counters.get("chunks_stored", 0), counters.get("chunks_refused", 0)
    if num_refused * 20 > num_stored + num_refused:
        yield kinds.SERVICE_CHUNKS_REFUSED.found(
            f"{num_refused} of {num_stored + num_refused} chunks", pool=format_nbytes(status.pool_nbytes)
        )


def _check_use(status: StatusReply) -> Iterator[Finding]:
    def count(name: str) -> int:
        return status.counters.get(name, 0)

    asked, found, stored, evicted = map(count, ("chunks_asked", "chunks_found", "chunks_stored", "chunks_evicted"))
    if asked and stored and not found:
        yield kinds.SERVICE_NO_HITS.found(f"{stored} chunks stored, {asked} asked for, 0 found")
    elif evicted * 2 > stored and found * 5 < asked:
        yield kinds.SERVICE_POOL_SMALL.found(
            f"{evicted} of {stored} stored chunks evicted, {found} of {asked} found",
            pool=format_nbytes(status.pool_nbytes),
        )
    if count("lookups") and status.num_registered and not stored and not count("chunks_present"):
        yield kinds.SERVICE_NOTHING_STORED.found(f"{count('lookups')} lookups, 0 chunks stored")
    if lost := count("demotions_dropped") + count("demotions_passed_over"):
        yield kinds.SERVICE_DISK_BEHIND.found(f"{lost} chunks, {count('chunks_demoted')} written")
    if num := count("leases_expired"):
        yield kinds.SERVICE_LEASES_EXPIRED.found(f"{num} leases")
