"""A daemon's socket and the daemon behind it, as an engine of this process's user would see them.

The laws: nothing waits longer than its deadline; nothing is left in the daemon: the session ends with its connection.
"""

from __future__ import annotations

import contextlib
import errno
import os
import socket
import stat
import struct
import time
from pathlib import Path
from typing import Final, TypeVar

from kvist.doctor.facts import (
    Daemon,
    Folder,
    Listener,
    Namespaces,
    NotConnected,
    NotKnown,
    Refusal,
    Silence,
    Socket,
)  # fmt: skip
from kvist.errors import ProtocolError
from kvist.model.handles import ENGINE, MemoryHandle
from kvist.model.layout import GroupKind, LayerGroup, LayerPlane
from kvist.model.rows import Row, row_memory
from kvist.units import KIB
from kvist.wire import messages as wire
from kvist.wire.codec import FrameReader, decode_reply, encode
from kvist.wire.describing import describe_memory, describe_row

DEADLINE_S: Final = 5.0
_CONNECT_S: Final = 1.0
_READ_NBYTES: Final = 64 * KIB
_UCRED: Final = struct.Struct("3i")
_BLOCK_TOKENS: Final = 16

_Reply = TypeVar("_Reply", bound=wire.Reply)


def look_at_socket(path: str) -> Socket:
    """Return what is at ``path``, and who accepts connections there."""
    parent = Path(path).parent
    try:
        found = parent.stat()
        folder: Folder | NotKnown = Folder(str(parent), stat.S_IMODE(found.st_mode), found.st_uid)
    except OSError as error:
        folder = NotKnown(error.strerror or str(error))
    try:
        is_socket: bool | None = stat.S_ISSOCK(os.lstat(path).st_mode)
    except OSError:
        is_socket = None
    return Socket(path, os.getuid(), folder, is_socket, _connect(path))


def ask_daemon(
    path: str, listener: Listener, *, deadline_s: float = DEADLINE_S
) -> Daemon | Refusal | Silence | NotKnown:
    """Greet whoever listens, ask for counters, and try whether an engine may copy for itself.

    Says ``NotKnown`` of a program that is no kvist daemon.
    """
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connected:
            connected.settimeout(deadline_s)
            connected.connect(path)
            exchange = _Exchange(connected, deadline_s)
            hello = wire.Hello(1, wire.MAGIC, wire.PROTOCOL_VERSION, "kvist-doctor", "kvist doctor")
            welcome = exchange.ask(hello, wire.Welcome)
            if isinstance(welcome, Refusal):
                return welcome
            status = exchange.ask(wire.Status(2), wire.StatusReply)
            lane = exchange.ask(_register(3), wire.Registered)
    except TimeoutError:
        return Silence(deadline_s)
    except OSError as error:
        return NotKnown(error.strerror or str(error))
    except ProtocolError as error:
        return NotKnown(str(error))
    return Daemon(
        welcome.daemon, status, lane if isinstance(lane, Refusal) else None,
        Namespaces(_namespaces("pid", listener.pid), _namespaces("ipc", listener.pid)),
    )  # fmt: skip


def program_of(pid: int) -> str | NotKnown:
    """Return the command line of a process."""
    try:
        words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
    except OSError as error:
        return NotKnown(f"process {pid}: {error.strerror}")
    return b" ".join(words).decode("utf-8", "replace").strip()


def _connect(path: str) -> Listener | NotConnected:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.settimeout(_CONNECT_S)
        try:
            probe.connect(path)
        except OSError as error:  # A path that is too long for an address has no number.
            return NotConnected(errno.errorcode.get(error.errno or 0, ""), error.strerror or str(error))
        pid, uid, _ = _UCRED.unpack(probe.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _UCRED.size))
    return Listener(pid, uid, program_of(pid))


class _Exchange:
    """Requests and replies over one socket, one after another."""

    def __init__(self, connected: socket.socket, deadline_s: float) -> None:
        self._socket = connected
        self._deadline_s = deadline_s
        self._reader = FrameReader()

    def ask(self, request: wire.Request, kind: type[_Reply]) -> _Reply | Refusal:
        """Send a request and return its reply.

        Raises:
            TimeoutError: there was none in time.
            OSError: the connection has ended before.
            ProtocolError: what came is no reply of this protocol.
        """
        end = time.monotonic() + self._deadline_s
        # Who refuses at once has closed its end already; what it has said can still be read.
        with contextlib.suppress(BrokenPipeError):
            self._socket.sendall(encode(request))
        while (left := end - time.monotonic()) > 0:
            self._socket.settimeout(left)
            data = self._socket.recv(_READ_NBYTES)
            if not data:
                raise ConnectionResetError(errno.ECONNRESET, "it has closed the connection without an answer")
            for frame in self._reader.feed(data):
                reply = decode_reply(frame.body)
                if isinstance(reply, kind):
                    return reply
                if isinstance(reply, wire.Error):
                    return Refusal(reply.code, reply.detail)
        raise TimeoutError(errno.ETIMEDOUT, f"no answer in {self._deadline_s:g} s")


def _register(request_id: int) -> wire.Register:
    """Describe the memory of an engine that copies for itself: one block of one byte a token, which nobody uses."""
    plane = LayerPlane(memory=0, offset=0, num_blocks=1, block_stride=_BLOCK_TOKENS, row_nbytes=_BLOCK_TOKENS)
    row = row_memory(Row(0, 0), LayerGroup(GroupKind.FULL, _BLOCK_TOKENS, (plane,)), _BLOCK_TOKENS)
    memory = describe_memory([MemoryHandle(ENGINE, _BLOCK_TOKENS)])
    return wire.Register(request_id, _BLOCK_TOKENS, memory, [describe_row(row)])


def _namespaces(kind: str, pid: int) -> tuple[str, str] | NotKnown:
    try:
        return os.readlink(f"/proc/self/ns/{kind}"), os.readlink(f"/proc/{pid}/ns/{kind}")
    except OSError as error:
        return NotKnown(f"the daemon's process {pid}: {error.strerror}")
