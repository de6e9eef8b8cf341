"""The web process's view of a simulated daemon: no sockets, no time."""

from __future__ import annotations

import itertools
import os
from typing import Any

from kvist.client.client import Build
from kvist.errors import Unreachable, refusal
from kvist.server.sessions import Peer
from kvist.watching.watcher import Watcher
from kvist.wire import messages as wire
from tests.support.simulated import SimulatedDaemon

SILENCE = "it says nothing"


class WatchingClient:
    """Has the face of a ``Client`` that waits for its answers."""

    def __init__(self, daemon: SimulatedDaemon) -> None:
        self.daemon = daemon
        self.is_silent = False
        """The daemon does not answer."""
        self.num_asked = 0
        self._ids = itertools.count(1)
        hello = wire.Hello(0, wire.MAGIC, wire.PROTOCOL_VERSION, "kvist-web", "kvist web")
        self._session = daemon.service.open_session(Peer(os.getpid(), os.getuid()), hello, lambda *_: None)

    def call(self, build: Build, **_: Any) -> wire.Reply:
        self.num_asked += 1
        if self.is_silent:
            raise Unreachable(SILENCE)
        reply = self.daemon.service.handle(self._session, build(next(self._ids)), [])
        assert reply is not None
        if isinstance(reply, wire.Error):
            raise refusal(reply.code, reply.detail)
        return reply

    def close(self) -> None: ...


def watch(daemon: SimulatedDaemon) -> tuple[Watcher, WatchingClient]:
    """Return a watcher of a simulated daemon, on its clock, that has seen it once."""
    client = WatchingClient(daemon)
    watcher = Watcher("", clock=lambda: 1e9 + daemon.now, ticks=lambda: daemon.now, client=client)
    watcher.sample()
    return watcher, client
