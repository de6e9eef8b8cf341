"""Requests of an engine whose events the daemon cannot open: each is sent when the engine's work before it is done.

The laws: no call waits for the accelerator. Requests are sent in the order of their submission. One that was not sent
yet counts as on its way, and ends as all do: answered or lost.
"""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass
from typing import Final, Protocol

from kvist.client.client import Build, Client, Pending
from kvist.client.lane import Fences
from kvist.wire import messages as wire

_LOOK_S: Final = 0.0005
"""How often somebody who may wait looks whether the engine's work is done."""


class VisibleFences(Fences, Protocol):
    """Marks that this process can look at."""

    def is_done(self, fence: object) -> bool:
        """Return whether everything behind which a mark stands is done."""
        ...


@dataclass(slots=True, eq=False)
class _Request:
    build: Build
    outer: Pending
    """What the engine looks at."""
    fence: object
    inner: Pending | None = None
    """What was sent; None as long as the engine's work is not done."""


class WaitingClient:
    """A ``Client`` that looks at the engine's events itself. Used on one thread."""

    def __init__(self, client: Client, fences: VisibleFences) -> None:
        """Own ``client``."""
        self._client = client
        self._fences = fences
        self._unsent: deque[_Request] = deque()
        self._sent: list[_Request] = []

    def register(self, deadline_s: float | None = None) -> wire.Registered:
        """Register, as ``Client.register``."""
        return self._client.register(deadline_s)

    def submit(self, build: Build) -> Pending:
        """Send a request as soon as the engine's work until now is done; return at once."""
        request = _Request(build, Pending(0, time.monotonic()), self._fences.record())
        self._unsent.append(request)
        self._send_ready()
        return request.outer

    def poll(self, timeout_s: float = 0.0) -> None:
        """Send what has become ready, and take in what has come; wait at most so long for the first."""
        end = time.monotonic() + timeout_s
        while True:
            self._send_ready()
            left = max(end - time.monotonic(), 0.0)
            self._client.poll(min(left, _LOOK_S) if self._unsent else left)
            num_over = self._take_over()
            if num_over or left == 0.0:
                return

    def close(self) -> None:
        """Leave the daemon. What was not answered is lost."""
        self._client.close()
        for request in self._unsent:
            request.outer.is_lost = True
            self._fences.give_back(request.fence)
        self._unsent.clear()
        self._take_over()

    def _send_ready(self) -> None:
        while self._unsent and self._fences.is_done(self._unsent[0].fence):
            request = self._unsent.popleft()
            self._fences.give_back(request.fence)
            request.inner = self._client.submit(request.build)
            self._sent.append(request)
        self._take_over()

    def _take_over(self) -> int:
        """Tell the engine what has become of its requests; return of how many."""
        over = [request for request in self._sent if request.inner is not None and request.inner.is_over]
        for request in over:
            assert request.inner is not None
            request.outer.reply, request.outer.is_lost = request.inner.reply, request.inner.is_lost
        if over:
            self._sent = [request for request in self._sent if not request.outer.is_over]
        return len(over)
