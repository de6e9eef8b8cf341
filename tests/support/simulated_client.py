"""A client whose daemon is simulated: requests are handled at once, copies when the test says so."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Sequence
from typing import Any

from kvist.client.client import Build, Pending
from kvist.server.sessions import Peer
from kvist.wire import messages as wire
from tests.support.simulated import SimulatedDaemon

DEADLINE_S = 2.0


class Link:
    """Has the face of a ``Client``: a session of the simulated daemon."""

    def __init__(self, daemon: SimulatedDaemon, name: str, on_sent: Callable[[wire.Request], None] | None = None):
        self.daemon = daemon
        self.is_connected = True
        self.pending: dict[int, tuple[Pending, wire.Request]] = {}
        self._ids = itertools.count(1)
        self._on_sent = on_sent
        hello = wire.Hello(0, wire.MAGIC, wire.PROTOCOL_VERSION, "engine", name)
        self.session = daemon.service.open_session(Peer(os.getpid(), os.getuid()), hello, self._receive)
        self.welcome = None

    @property
    def is_late(self) -> bool:
        oldest = next(iter(self.pending.values()), None)
        return oldest is not None and self.daemon.now - oldest[0].sent_at > DEADLINE_S

    def submit(self, build: Build, fds: Sequence[int] = (), **_: Any) -> Pending:
        pending = Pending(next(self._ids), self.daemon.now)
        if self.is_late or not self.is_connected:
            pending.is_lost = True
            return pending
        request = build(pending.id)
        self.pending[pending.id] = pending, request
        if self._on_sent is not None:
            self._on_sent(request)
        reply = self.daemon.service.handle(self.session, request, fds)
        assert not isinstance(reply, wire.Error), reply
        if reply is not None:
            self._receive(reply)
        return pending

    def poll(self, timeout_s: float = 0.0) -> None: ...

    def wait(self, pending: Pending, deadline_s: float) -> None: ...

    def close(self) -> None: ...

    def _receive(self, reply: wire.Reply, fds: Sequence[int] = ()) -> None:
        for fd in fds:
            os.close(fd)
        assert not isinstance(reply, wire.Error) or reply.code == "overloaded", reply
        self.pending.pop(reply.id)[0].reply = reply
