"""What this process knows of the daemon, and when it saw that.

The laws: the daemon is asked over its socket like by anybody, by one thread at a time, and for all who come at one time
once; whoever shows something shows a sample of one instant. History is bounded. While the daemon does not answer,
there is no sample of that time, and ``failure`` says why.
"""

from __future__ import annotations

import math
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, TypeVar

from kvist.client.client import Build, Client, expect
from kvist.errors import KvistError
from kvist.wire import messages as wire

PERIOD_S: Final = 1.0
HISTORY_MAX: Final = 3600
"""Samples that are kept: an hour."""
_DEADLINE_S: Final = 2.0

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Sample:
    """The daemon at one instant."""

    at: float
    """Seconds since the epoch, for people."""
    status: wire.StatusReply
    sessions: tuple[wire.SessionStatus, ...]


class Watcher:
    """Owns the connection to the daemon, and the samples. Any thread may call it."""

    def __init__(
        self,
        socket_path: str,
        *,
        clock: Callable[[], float] | None = None,
        ticks: Callable[[], float] = time.monotonic,
        client: Client | None = None,
    ) -> None:
        """Begin without a sample; connects when it is first asked."""
        self.socket_path = socket_path
        self.failure = "the daemon has not been asked yet"
        """Why there is no new sample; empty while there is one."""
        self._clock = clock or time.time  # noqa: TID251 -- people and scrapers compare it with their own clocks
        self._client = client or Client(socket_path, engine_id="kvist-web", name="kvist web", deadline_s=_DEADLINE_S)
        self._ticks = ticks
        self._seen_at = -math.inf
        """When the daemon last answered, in ``ticks``."""
        self._tried_at = -math.inf
        self._lock = threading.Lock()
        self._sampling = threading.Lock()
        self._history: deque[Sample] = deque(maxlen=HISTORY_MAX)

    @property
    def latest(self) -> Sample | None:
        """The newest sample, however old it is."""
        return self._history[-1] if self._history else None

    @property
    def history(self) -> list[Sample]:
        """All samples, oldest first."""
        return list(self._history)

    @property
    def silent_s(self) -> float:
        """For how long the daemon has not said anything; infinite if it never has."""
        return self._ticks() - self._seen_at

    def recent(self, age_max_s: float) -> Sample | None:
        """Return the newest sample, or a new one if that is older; None if the daemon says nothing.

        Whoever comes while somebody asks gets what that one hears. Blocks for a few seconds at most.
        """
        with self._sampling:
            if self._ticks() - self._tried_at > age_max_s:
                return self._sample()
            return None if self.failure else self.latest

    def sample(self) -> Sample | None:
        """Ask the daemon how it is, and keep what it says; None if it says nothing.

        Blocks for a few seconds at most.
        """
        with self._sampling:
            return self._sample()

    def ask(self, build: Build, expected: type[T]) -> T:
        """Send the daemon one request, and return its reply.

        Raises:
            KvistError: it refused, is not there, or answered something else.
        """
        with self._lock:
            reply = self._client.call(build)
        return expect(reply, expected)

    def close(self) -> None:
        """Close the connection. Idempotent."""
        with self._lock:
            self._client.close()

    def _sample(self) -> Sample | None:
        try:
            status = self.ask(wire.Status, wire.StatusReply)
            sessions = self.ask(wire.Describe, wire.Description).sessions
        except KvistError as error:
            self.failure = str(error)
            self._tried_at = self._ticks()
            return None
        found = Sample(self._clock(), status, tuple(sessions))
        self._history.append(found)
        self.failure = ""
        self._seen_at = self._tried_at = self._ticks()
        return found
