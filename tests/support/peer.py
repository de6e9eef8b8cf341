"""A bare socket to the daemon: for everything that no proper client would send."""

from __future__ import annotations

import os
import socket
from collections.abc import Sequence

from kvist.wire import messages as wire
from kvist.wire.codec import FDS_MAX, FrameReader, decode_reply, encode

DEADLINE_S = 20.0


class Peer:
    """Sends any bytes and descriptors; reads replies."""

    def __init__(self, path: str, *, connected: socket.socket | None = None) -> None:
        self.socket = connected or socket.socket(socket.AF_UNIX)
        self.socket.settimeout(DEADLINE_S)
        if connected is None:
            self.socket.connect(path)
        self.fds: list[int] = []
        """Descriptors that came with replies; closed with the socket."""
        self._reader = FrameReader()
        self._replies: list[wire.Reply] = []

    def __enter__(self) -> Peer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the socket and what came over it. Idempotent."""
        self.socket.close()
        while self.fds:
            os.close(self.fds.pop())

    def send(self, *messages: wire.Request | bytes, fds: Sequence[int] = (), num_fds: int | None = None) -> None:
        """Send messages, or bytes as they are; ``num_fds`` is what the frames claim, if not the truth."""
        claimed = len(fds) if num_fds is None else num_fds
        raw = b"".join(one if isinstance(one, bytes) else encode(one, num_fds=claimed) for one in messages)
        if fds:
            socket.send_fds(self.socket, [raw], list(fds))
        else:
            self.socket.sendall(raw)

    def reply(self) -> wire.Reply:
        """Return the next reply."""
        while not self._replies:
            data, fds, _, _ = socket.recv_fds(self.socket, 1 << 16, FDS_MAX)
            self.fds += fds
            assert data, "the daemon has closed the connection"
            self._replies += [decode_reply(frame.body) for frame in self._reader.feed(data)]
        return self._replies.pop(0)

    def ask(self, request: wire.Request, *, fds: Sequence[int] = ()) -> wire.Reply:
        """Send a request and return the next reply, which must be its own."""
        self.send(request, fds=fds)
        reply = self.reply()
        assert reply.id == request.id
        return reply

    def hello(self, engine_id: str = "engine") -> Peer:
        """Become a session."""
        assert isinstance(self.ask(wire.Hello(1, wire.MAGIC, wire.PROTOCOL_VERSION, engine_id)), wire.Welcome)
        return self

    def is_closed(self) -> bool:
        """Wait for the end of the stream; say whether it came without another reply."""
        try:
            return self.socket.recv(1 << 16) == b""
        except ConnectionResetError:
            return True
