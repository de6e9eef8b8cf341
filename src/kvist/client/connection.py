"""A socket to the daemon that never blocks: frames and descriptors out, replies in."""

from __future__ import annotations

import array
import contextlib
import errno
import math
import os
import select
import socket
import struct
from collections.abc import Iterator, Sequence
from typing import Final

from kvist.errors import Overloaded, ProtocolError, Unreachable
from kvist.units import MIB
from kvist.wire.codec import FDS_MAX, FrameReader, decode_reply
from kvist.wire.messages import Reply

_UNSENT_NBYTES_MAX: Final = 16 * MIB
_READ_NBYTES: Final = 64 * 1024
_FLUSH_S: Final = 0.1
"""How long a registration waits for the hello before it to go out."""
_TIMEOUT_STEP_S: Final = 0.005
_AT_ONCE: Final = int(socket.MSG_DONTWAIT)
"""A plain integer: arithmetic on Python's flag types costs several microseconds."""
_CLOEXEC: Final = int(socket.MSG_CMSG_CLOEXEC)
_CONTROL_NBYTES: Final = socket.CMSG_SPACE(FDS_MAX * 4)
_UCRED: Final = struct.Struct("3i")
_TIMEVAL: Final = struct.Struct("@ll")


class Connection:
    """One connection. After an ``Unreachable`` it is closed and stays so."""

    def __init__(self, path: str) -> None:
        """Connect.

        Raises:
            Unreachable: nobody listens at ``path``.
            ProtocolError: whoever listens runs as another user, who must not get to see this engine's memory.
        """
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC | socket.SOCK_NONBLOCK)
        try:
            self._socket.connect(path)
        except OSError as error:
            self._socket.close()
            raise Unreachable(f"no kvist daemon answers at {path}: {error.strerror}") from error
        self.daemon_pid, uid, _ = _UCRED.unpack(
            self._socket.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _UCRED.size)
        )
        if uid not in (0, os.getuid()):
            self._socket.close()
            raise ProtocolError(f"{path} belongs to user {uid}; a daemon must run as root or as user {os.getuid()}")
        self._reader = FrameReader()
        self._unsent = bytearray()
        self._scratch = memoryview(bytearray(_READ_NBYTES))
        self._is_finished = False
        self.takes_fds = False
        """Whether descriptors are kept that come with replies; else the kernel closes them."""
        self.fds: list[int] = []
        # The kernel waits in ``recv`` itself, which spares every exchange a ``poll``; all else is sent and read without
        # waiting, flag by flag.
        self._socket.settimeout(None)
        self._receive_timeout_s = 0.0

    def send(self, frame: bytes, fds: Sequence[int] = ()) -> None:
        """Send now what the kernel takes, and the rest with later calls; ``fds`` go with the first byte.

        Raises:
            Unreachable: the daemon is gone.
            Overloaded: the daemon has stopped reading and the bound of unsent bytes is reached, or that of descriptors
                on their way. Nothing was sent.
        """
        if len(self._unsent) + len(frame) > _UNSENT_NBYTES_MAX:
            raise Overloaded(f"{len(self._unsent)} bytes to the daemon are unsent")
        if fds:
            self._send_with_fds(frame, fds)
        elif self._unsent:
            self._unsent += frame
            self._flush()
        else:
            self._unsent += frame[self._send_now(frame) :]

    def receive(self, timeout_s: float = 0.0) -> Iterator[Reply]:
        """Yield the replies that have come, after waiting at most ``timeout_s`` for the first.

        Raises:
            Unreachable: the daemon is gone; all that it sent before has been yielded.
            ProtocolError: what came is no reply.
        """
        if self._unsent:
            self._wait_writing(timeout_s)
            timeout_s = 0.0
        flags = self._set_timeout(timeout_s)
        while True:
            try:
                num_read = self._read(flags)
            except BlockingIOError:
                return
            except OSError as error:
                raise self._lost(str(error)) from error
            if not num_read:
                raise self._lost(f"end of stream from pid {self.daemon_pid}")
            for frame in () if self._is_finished else self._reader.feed(self._scratch[:num_read]):
                yield decode_reply(frame.body)
            if num_read < _READ_NBYTES:
                return
            flags = _AT_ONCE

    @property
    def fileno(self) -> int:
        """The socket's descriptor; negative when it is closed."""
        return self._socket.fileno()

    def finish(self) -> None:
        """Send and heed nothing more; ``receive`` raises when the daemon has closed its end. Idempotent."""
        self._is_finished = True
        self._unsent.clear()
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_WR)

    def close(self) -> None:
        """Close the socket, and descriptors that nobody has taken. Idempotent."""
        self._socket.close()
        while self.fds:
            os.close(self.fds.pop())

    def _read(self, flags: int) -> int:
        if not self.takes_fds:
            return self._socket.recv_into(self._scratch, 0, flags)
        num_read, control, _, _ = self._socket.recvmsg_into([self._scratch], _CONTROL_NBYTES, flags | _CLOEXEC)
        for level, kind, data in control:
            if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
                self.fds += array.array("i", data[: len(data) & ~3])
        return num_read

    def _set_timeout(self, timeout_s: float) -> int:
        """Let the next ``recv`` wait so long, a little longer where that spares a call; return its flags."""
        if timeout_s <= 0:
            return _AT_ONCE
        steps = math.ceil(timeout_s / _TIMEOUT_STEP_S)
        if steps * _TIMEOUT_STEP_S != self._receive_timeout_s:
            self._receive_timeout_s = steps * _TIMEOUT_STEP_S
            seconds, steps = divmod(steps, round(1 / _TIMEOUT_STEP_S))
            value = _TIMEVAL.pack(seconds, round(steps * _TIMEOUT_STEP_S * 1e6))
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, value)
        return 0

    def _wait_writing(self, timeout_s: float) -> None:
        """Send what is unsent, as far as the daemon reads within ``timeout_s``; return early when it writes."""
        self._flush()
        poll = select.poll()
        poll.register(self._socket, select.POLLIN | (select.POLLOUT if self._unsent else 0))
        poll.poll(timeout_s * 1000)
        self._flush()

    def _send_with_fds(self, frame: bytes, fds: Sequence[int]) -> None:
        """Send a frame whose descriptors must travel with its own first byte, so nothing may be queued before it."""
        if self._unsent:
            self._wait_writing(_FLUSH_S)
        if self._unsent:
            raise Overloaded(f"{len(self._unsent)} bytes to the daemon are unsent")
        try:
            sent = socket.send_fds(self._socket, [frame], list(fds), _AT_ONCE)
        except BlockingIOError as error:
            raise Overloaded(f"the daemon does not read: {error}") from error
        except OSError as error:
            if error.errno == errno.ETOOMANYREFS:
                raise Overloaded(f"too many descriptors are on their way: {error}") from error
            raise self._lost(str(error)) from error
        self._unsent += frame[sent:]

    def _flush(self) -> None:
        if self._unsent:
            del self._unsent[: self._send_now(self._unsent)]

    def _send_now(self, data: bytes | bytearray) -> int:
        try:
            return self._socket.send(data, _AT_ONCE)
        except BlockingIOError:
            return 0
        except OSError as error:
            raise self._lost(str(error)) from error

    def _lost(self, reason: str) -> Unreachable:
        self.close()
        return Unreachable(f"the kvist daemon (pid {self.daemon_pid}) is gone: {reason}")
