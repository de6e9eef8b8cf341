"""The Unix socket: bytes, descriptors and peers in; messages to the service; replies out.

The laws: a peer's user is checked before its first byte is read. Nothing that a peer does or leaves undone makes the
daemon wait: reads and writes never block, what a peer does not read is bounded, and its end is seen as the end of its
stream. Whoever sends descriptors that there is no room for is ended with a word, and nobody else is; whoever connects
waits. A socket is closed only when the session's last copy has landed, so a peer that sees it closed knows that nothing
writes to its memory any more.
"""

from __future__ import annotations

import array
import asyncio
import contextlib
import errno
import logging
import os
import resource
import socket
from collections.abc import Sequence
from typing import Final

from kvist import __version__
from kvist.errors import Malformed, NotPermitted, Overloaded, ProtocolError, Refused, VersionMismatch
from kvist.server.listening import Access, listen, peer_of
from kvist.server.parsing import check_hello, close_all
from kvist.server.service import CacheService
from kvist.server.sessions import Peer, Session
from kvist.units import MIB
from kvist.wire import messages as wire
from kvist.wire.codec import FDS_MAX, FrameReader, decode_request, encode, request_id

logger = logging.getLogger(__name__)

_UNSENT_NBYTES_MAX: Final = 4 * MIB
_READ_NBYTES: Final = 256 * 1024
_CONTROL_NBYTES: Final = socket.CMSG_SPACE(FDS_MAX * 4)
_CLOEXEC: Final = int(socket.MSG_CMSG_CLOEXEC)
_TRUNCATED: Final = int(socket.MSG_CTRUNC)
"""Plain integers: arithmetic on Python's flag types costs several microseconds."""
_SHORTAGES: Final = (errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ENOBUFS)
_ACCEPT_PAUSE_S: Final = 0.1
"""How long connections wait in the kernel's queue when there is no room for one and none ends."""


class Transport:
    """Listens on one path, and owns its connections."""

    def __init__(
        self, service: CacheService, path: str, *, boot_id: str, access: Access, sessions_max: int,
        limits: wire.Limits,
    ) -> None:  # fmt: skip
        self.service = service
        self.boot_id = boot_id
        self.limits = limits
        self.scratch = memoryview(bytearray(_READ_NBYTES))
        self._access = access
        self._sessions_max = sessions_max
        self._path = path
        self._loop = asyncio.get_running_loop()
        self._connections: set[_Connection] = set()
        self._all_gone = asyncio.Event()
        self._all_gone.set()
        self._pause: asyncio.TimerHandle | None = None
        """Set while nothing is accepted."""
        self._is_short = False
        """The last connection could not be accepted."""
        self._lock_fd, self._listener = listen(path, access)
        self._loop.add_reader(self._listener, self._accept)

    def stop_listening(self) -> None:
        """Take no more connections, and give the path up. Idempotent."""
        if self._listener.fileno() >= 0:
            self._resume()
            self._loop.remove_reader(self._listener)
            self._listener.close()
            with contextlib.suppress(FileNotFoundError):
                os.unlink(self._path)
            os.close(self._lock_fd)

    async def close(self) -> None:
        """End every connection, and return when nothing of any session is left."""
        self.stop_listening()
        for connection in list(self._connections):
            connection.close("daemon stops")
        await self._all_gone.wait()

    def forget(self, connection: _Connection) -> None:
        """Note that a connection is gone."""
        self._connections.discard(connection)
        self._resume()
        if not self._connections:
            self._all_gone.set()

    def _accept(self) -> None:
        try:
            sock, _ = self._listener.accept()
        except (BlockingIOError, ConnectionAbortedError):
            return
        except OSError as error:
            if error.errno not in _SHORTAGES:
                raise
            self._pause_accepting(error)
            return
        self._is_short = False
        sock.settimeout(0)
        pid, uid, gid = peer_of(sock)
        refusal: Refused | None = None
        if not self._access.allows(sock, uid, gid):
            refusal = NotPermitted(f"user {uid} may not use this daemon; it serves {self._access}")
        elif len(self._connections) >= self._sessions_max:
            refusal = Overloaded(f"{len(self._connections)} connections are open")
        if refusal is not None:
            logger.warning("connection refused pid=%d uid=%d reason=%s", pid, uid, refusal)
            with contextlib.suppress(OSError):
                sock.send(encode(wire.Error(0, refusal.code, str(refusal))))
            sock.close()
            return
        self._all_gone.clear()
        self._connections.add(_Connection(self, self._loop, sock, Peer(pid, uid)))

    def _pause_accepting(self, error: OSError) -> None:
        """Leave who comes in the kernel's queue for a moment: the loop would find the socket readable for ever."""
        if not self._is_short:
            logger.warning(
                "connection not accepted error=%s connections=%d descriptors_max=%d",
                error, len(self._connections), descriptors_max(),
            )  # fmt: skip
        self._is_short = True
        self._loop.remove_reader(self._listener)
        self._pause = self._loop.call_later(_ACCEPT_PAUSE_S, self._resume)

    def _resume(self) -> None:
        if self._pause is not None:
            self._pause.cancel()
            self._pause = None
            self._loop.add_reader(self._listener, self._accept)


class _Connection:
    """One peer's socket. Becomes a session with its HELLO."""

    def __init__(self, transport: Transport, loop: asyncio.AbstractEventLoop, sock: socket.socket, peer: Peer) -> None:
        self._transport = transport
        self._loop = loop
        self._sock = sock
        self._peer = peer
        self._reader = FrameReader()
        self._fds: list[int] = []
        self._unsent = bytearray()
        self._session: Session | None = None
        self._is_closing = False
        self._is_writing = False
        """The loop calls ``_flush`` when the peer reads."""
        loop.add_reader(sock, self._on_readable)

    @property
    def _is_registered(self) -> bool:
        """Descriptors have no place on this connection any more."""
        return self._session is not None and self._session.registration is not None

    def close(self, reason: str) -> None:
        """Read nothing more; close the socket when the session has ended. Idempotent."""
        if self._is_closing:
            return
        self._is_closing = True
        logger.debug("connection closing pid=%d reason=%s", self._peer.pid, reason)
        self._loop.remove_reader(self._sock)
        close_all(self._fds)
        self._fds.clear()
        if self._session is None:
            self._finish()
        else:
            self._transport.service.close_session(self._session, self._finish)

    def send(self, reply: wire.Reply, fds: Sequence[int] = ()) -> None:
        """Send a reply now if the peer reads, soon if it does so a little later; end the connection if it does not.

        Descriptors go with the first byte, so with them nothing may be waiting to be sent.
        """
        frame = encode(reply, num_fds=len(fds))
        num_sent = 0 if self._unsent else self._send_now(frame, fds)
        if fds and not num_sent:
            return self.close("peer does not read its replies")
        if num_sent == len(frame):
            return None
        self._unsent += frame[num_sent:]
        if len(self._unsent) > _UNSENT_NBYTES_MAX:
            self._unsent.clear()
            self.close("peer does not read its replies")
        else:
            self._flush()
        return None

    def _on_readable(self) -> None:
        try:
            nbytes = self._receive()
        except BlockingIOError:
            return None
        except Overloaded as error:
            return self._refuse_and_close(0, error.code, error)
        except OSError as error:
            return self.close(str(error))
        if not nbytes:
            return self.close("end of stream")
        try:
            self._take(self._transport.scratch[:nbytes])
        except ProtocolError as error:
            self._refuse_and_close(0, "protocol", error)
        except Exception as error:  # The connection's one boundary: its fault ends it, and the daemon goes on.
            if isinstance(error, OSError) and error.errno in _SHORTAGES:
                return self._refuse_and_close(0, Overloaded.code, self._lacks_room(str(error)))
            logger.exception("fault while serving pid=%d", self._peer.pid)
            self._refuse_and_close(0, "fault", ProtocolError(f"the daemon has a fault: {error!r}"))
        return None

    def _receive(self) -> int:
        """Read into the scratch buffer; return how many bytes.

        Raises:
            Overloaded: there was no room for all descriptors that came; the kernel has closed the others.
        """
        if self._is_registered:
            # No descriptor can belong here any more; the kernel closes those that come. Several microseconds less.
            return self._sock.recv_into(self._transport.scratch)
        nbytes, control, flags, _ = self._sock.recvmsg_into([self._transport.scratch], _CONTROL_NBYTES, _CLOEXEC)
        for level, kind, data in control:
            if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
                self._fds += array.array("i", data[: len(data) & ~3])
        if flags & _TRUNCATED:
            raise self._lacks_room(f"{len(self._fds)} have come, others were lost")
        return nbytes

    def _lacks_room(self, what: str) -> Overloaded:
        return Overloaded(
            f"the daemon has no room for the descriptors of process {self._peer.pid}: {what}; it may have "
            f"{descriptors_max()} in all (ulimit -n)"
        )

    def _take(self, data: memoryview) -> None:
        for frame in self._reader.feed(data):
            self._on_frame(frame.body, frame.num_fds)
            if self._is_closing:
                return
        # Descriptors come with the first byte of their frame: what is left belongs to the one that has begun.
        if len(self._fds) > (FDS_MAX if self._reader.is_inside_frame else 0):
            raise ProtocolError(f"{len(self._fds)} descriptors that no frame owns")

    def _on_frame(self, body: bytes | memoryview, num_fds: int) -> None:
        if not num_fds or self._is_registered:
            return self._on_request(body, num_fds, ())
        if num_fds > len(self._fds):
            raise ProtocolError(f"a frame owns {num_fds} descriptors and {len(self._fds)} have come")
        fds, self._fds = self._fds[:num_fds], self._fds[num_fds:]
        try:
            return self._on_request(body, num_fds, fds)
        finally:
            close_all(fds)

    def _on_request(self, body: bytes | memoryview, num_fds: int, fds: Sequence[int]) -> None:
        try:
            request = decode_request(body)
        except Malformed as error:
            if self._session is None:
                raise ProtocolError(f"no hello: {error}") from error
            self._transport.service.drop_descriptors(self._session)  # It may have been their registration.
            return self.send(wire.Error(request_id(body), error.code, str(error)))
        if self._session is None:
            return self._on_hello(request)
        if num_fds and not isinstance(request, wire.Register | wire.Descriptors):
            raise ProtocolError(f"{num_fds} descriptors with a {type(request).__name__}")
        reply = self._transport.service.handle(self._session, request, fds)
        if reply is not None:
            self.send(reply)
        return None

    def _on_hello(self, request: wire.Request) -> None:
        if not isinstance(request, wire.Hello) or request.magic != wire.MAGIC:
            raise ProtocolError(f"a connection begins with a hello, not with {type(request).__name__}")
        if request.version != wire.PROTOCOL_VERSION:
            error = VersionMismatch(
                f"the client speaks protocol {request.version}, the daemon (kvist {__version__}) speaks "
                f"{wire.PROTOCOL_VERSION}; update the older of the two"
            )
            return self._refuse_and_close(request.id, "version_mismatch", error)
        check_hello(request)
        self._session = self._transport.service.open_session(self._peer, request, self.send)
        return self.send(
            wire.Welcome(
                request.id, wire.PROTOCOL_VERSION, __version__, self._transport.boot_id, self._transport.limits
            )
        )

    def _refuse_and_close(self, request_number: int, code: str, error: ProtocolError | Overloaded) -> None:
        event = "connection ended" if isinstance(error, Overloaded) else "protocol error"
        logger.warning("%s pid=%d error=%s", event, self._peer.pid, error)
        self.send(wire.Error(request_number, code, str(error)))
        self.close(code)

    def _flush(self) -> None:
        if self._unsent:
            del self._unsent[: self._send_now(self._unsent)]
        if self._sock.fileno() < 0 or bool(self._unsent) == self._is_writing:
            return
        self._is_writing = not self._is_writing
        if self._is_writing:
            self._loop.add_writer(self._sock, self._flush)
        else:
            self._loop.remove_writer(self._sock)

    def _send_now(self, data: bytes | bytearray, fds: Sequence[int] = ()) -> int:
        """Return how many bytes went out; all of them if the peer is gone, for whom nothing need be kept."""
        try:
            return socket.send_fds(self._sock, [data], list(fds)) if fds else self._sock.send(data)
        except BlockingIOError:
            return 0
        except OSError as error:
            self.close(str(error))
            return len(data)

    def _finish(self) -> None:
        if self._sock.fileno() >= 0:
            self._loop.remove_writer(self._sock)
            self._sock.close()
        self._transport.forget(self)


def descriptors_max() -> int:
    """Return how many descriptors this process may have."""
    return resource.getrlimit(resource.RLIMIT_NOFILE)[0]
