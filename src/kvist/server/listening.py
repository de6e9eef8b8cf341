"""The socket that engines connect to, and who may.

The laws: a path has one daemon, held by a lock beside it that goes with its process. Who may connect is decided by what
the kernel says of the peer, not by the socket's mode alone, which only lets through whoever may.
"""

from __future__ import annotations

import array
import contextlib
import fcntl
import grp
import logging
import os
import socket
import stat
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from kvist.errors import ConfigError

logger = logging.getLogger(__name__)

_UCRED: Final = struct.Struct("3i")
_PRIVATE: Final = 0o700
_SO_PEERGROUPS: Final = 59
"""Linux 4.13; no name in Python's ``socket``."""
_GROUPS_NBYTES_MAX: Final = 1024
"""As much as Python's ``getsockopt`` takes: 256 groups. Who is in more is asked for the first one alone."""


@dataclass(frozen=True, slots=True)
class Access:
    """Who may connect, besides root."""

    uids: frozenset[int]
    gid: int | None = None
    """All members of this group; None for no group."""

    @classmethod
    def of(cls, allow_uids: Sequence[int], group: str) -> Access:
        """Allow the daemon's own user, some others, and the members of a group, by name or number; empty for none.

        Raises:
            ConfigError: there is no such group.
        """
        uids = frozenset({os.getuid(), 0, *allow_uids})
        if not group:
            return cls(uids)
        try:
            return cls(uids, int(group) if group.isdecimal() else grp.getgrnam(group).gr_gid)
        except KeyError:
            raise ConfigError(f"socket_group: there is no group {group!r}") from None

    @property
    def mode(self) -> int:
        """Return the socket's mode: who is not let through by it cannot even be refused in words."""
        if self.uids > {os.getuid(), 0}:
            return 0o666
        return 0o600 if self.gid is None else 0o660

    def allows(self, sock: socket.socket, uid: int, gid: int) -> bool:
        """Return whether the peer of a connected socket may use this daemon."""
        return uid in self.uids or (self.gid is not None and self.gid in (gid, *_groups_of(sock)))

    def __str__(self) -> str:  # type: ignore[explicit-override] # ``typing.override`` came with Python 3.12
        """Name them for people."""
        return f"users {sorted(self.uids)}" + ("" if self.gid is None else f" and group {self.gid}")


def peer_of(sock: socket.socket) -> tuple[int, int, int]:
    """Return process, user and group at the other end, as they were when it connected or began to listen."""
    pid, uid, gid = _UCRED.unpack(sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _UCRED.size))
    return pid, uid, gid


def listen(path: str, access: Access) -> tuple[int, socket.socket]:
    """Bind ``path``, taking it over from a daemon that is dead; return a lock on it, and the listening socket.

    Raises:
        ConfigError: a living daemon has it, or its directory is not safe; names the process or the directory.
    """
    directory = Path(path).parent
    try:
        directory.mkdir(mode=_PRIVATE, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"socket {path}: its directory cannot be made: {error}") from error
    found = directory.stat()
    if found.st_mode & (stat.S_IWGRP | stat.S_IWOTH) and not found.st_mode & stat.S_ISVTX:
        raise ConfigError(f"socket {path}: others may write to {directory}; use a directory of your own")
    if found.st_uid not in (os.getuid(), 0):
        raise ConfigError(f"socket {path}: {directory} belongs to user {found.st_uid}, not to {os.getuid()}")
    lock_fd = os.open(f"{path}.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        fcntl.flock(lock_fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(lock_fd)
        raise ConfigError(f"socket {path} is in use by a kvist daemon{_owner(path)}") from None
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC | socket.SOCK_NONBLOCK)
    try:
        if owner := _owner(path):
            raise ConfigError(f"socket {path} is in use by another program{owner}")
        _unlink_stale(path)
        mask = os.umask(0o777 & ~access.mode)
        try:
            listener.bind(path)
        finally:
            os.umask(mask)
        if access.gid is not None:
            os.chown(path, -1, access.gid)
        listener.listen(128)
    except (OSError, ConfigError) as error:
        listener.close()
        os.close(lock_fd)
        if isinstance(error, ConfigError):
            raise
        raise ConfigError(f"socket {path} cannot be bound: {error}") from error
    return lock_fd, listener


def _unlink_stale(path: str) -> None:
    try:
        if not stat.S_ISSOCK(os.lstat(path).st_mode):
            raise ConfigError(f"socket {path}: there is a file of another kind")
    except FileNotFoundError:
        return
    logger.info("socket of a dead daemon taken over path=%s", path)
    os.unlink(path)


def _owner(path: str) -> str:
    """Return `` (pid N)`` if somebody listens at ``path``, else nothing."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.settimeout(1.0)
        try:
            probe.connect(path)
        except OSError:
            return ""
        return f" (pid {peer_of(probe)[0]})"


def _groups_of(sock: socket.socket) -> array.array[int]:
    """Return the supplementary groups of a peer."""
    groups = array.array("I")
    with contextlib.suppress(OSError):
        groups.frombytes(sock.getsockopt(socket.SOL_SOCKET, _SO_PEERGROUPS, _GROUPS_NBYTES_MAX))
    return groups
