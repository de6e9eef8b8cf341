"""Requests to the daemon, and what becomes of them.

The laws: no call blocks unless it is told for how long; but one that connects may wait for the daemon to take in the
descriptors of a registration that has more than go with one frame, as long as it does take them in. Every request that
was submitted ends as *answered* or as *lost*; lost means that the daemon is gone for good, with all its copies, and
never merely that it is slow. A daemon that is slow beyond the deadline is *late*: it gets no new requests until it has
answered the old ones, and whatever the old ones name (blocks above all) stays in its hands until then.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, Protocol, TypeVar

from kvist.client.connection import Connection
from kvist.errors import DeadlineExceeded, KvistError, Overloaded, ProtocolError, Unreachable, refusal
from kvist.wire import messages as wire
from kvist.wire.codec import FDS_MAX, encode

logger = logging.getLogger(__name__)

RETRY_S: Final = 0.1
"""Between two attempts to connect."""
_BATCHES_MAX: Final = 4
"""Batches of descriptors on their way at once, for the kernel lets a user have as many descriptors on their way as one
process may have open; 1024 are usual."""
_BATCH_S: Final = 0.5
"""How long a registration waits for the daemon to take a batch in."""
_PAUSE_S: Final = 10 * _BATCH_S
"""Until the next attempt after one that has waited in vain: whoever connects must not wait most of the time."""

Build = Callable[[int], wire.Request]
"""Makes a request with the id that it is given."""


class Registrar(Protocol):
    """Describes a worker's memory each time a connection begins."""

    def __call__(self, request_id: int) -> tuple[wire.Register, Sequence[int]]:
        """Return the registration and the descriptors that go with it, which stay the callee's."""
        ...


@dataclass(frozen=True, slots=True)
class About:
    """What an engine tells of itself with each hello."""

    serves: wire.NamespaceSpec | None = None
    needs: tuple[wire.NeedSpec, ...] = ()
    facts: Mapping[str, str] = field(default_factory=dict)
    """For people and their tools."""


@dataclass(slots=True, eq=False)
class Pending:
    """One request on its way. Only ``Client`` writes to it."""

    id: int
    sent_at: float
    reply: wire.Reply | None = None
    is_lost: bool = False
    connection: int = 0
    """Which of the client's connections it went out on; 0 for none."""

    @property
    def is_over(self) -> bool:
        """Answered or lost."""
        return self.is_lost or self.reply is not None


@dataclass(slots=True)
class _Link:
    """A connection and what is known of its other end."""

    connection: Connection
    number: int
    pending: dict[int, Pending] = field(default_factory=dict)
    welcome: wire.Welcome | None = None
    registration_id: int | None = None
    """Of the request that handed this process's memory over."""
    batches: set[int] = field(default_factory=set)
    """Requests that hand descriptors over ahead of the registration, and are unanswered."""
    refused_batch: wire.Error | None = None
    """The first answer that said no to one of them."""
    fault: str = ""
    """Why nothing more is said on this connection."""


T = TypeVar("T")


def expect(reply: wire.Reply, expected: type[T]) -> T:
    """Return a reply as what its request is answered with.

    Raises:
        ProtocolError: it is something else.
    """
    if not isinstance(reply, expected):
        raise ProtocolError(f"the daemon answered with {type(reply).__name__}, not {expected.__name__}")
    return reply


class Client:
    """One process's session with the daemon: connects, registers, and does so again when the daemon comes back."""

    def __init__(  # noqa: PLR0913 -- facts of the process, each with a name
        self,
        path: str,
        *,
        engine_id: str,
        name: str,
        about: About | None = None,
        deadline_s: float = 1.0,
        registrar: Registrar | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Begin unconnected; the first request connects."""
        self.path = path
        self.deadline_s = deadline_s
        self.registration: wire.Registered | wire.Error | None = None
        """The daemon's answer to this connection's registration."""
        self._engine_id = engine_id
        self._name = name
        self._about = about or About()
        self._registrar = registrar
        self._clock = clock
        self._link: _Link | None = None
        self._next_attempt = 0.0
        self._next_id = 1
        self._num_connections = 0
        self._last_failure = ""

    @property
    def welcome(self) -> wire.Welcome | None:
        """The daemon's greeting; None while there is no connection, or none that was answered."""
        return self._link.welcome if self._link else None

    @property
    def is_connected(self) -> bool:
        """A connection stands, as far as is known."""
        return self._link is not None

    @property
    def connection(self) -> int:
        """Number of the connection, which no other one of this client has; 0 while nothing can be sent on any."""
        return self._link.number if self._link and not self._link.fault else 0

    @property
    def failure(self) -> str:
        """Why there is no daemon, as far as is known; empty while all is well."""
        return self._last_failure

    @property
    def fileno(self) -> int:
        """Descriptor that is readable when ``poll`` has something to do; negative while there is no connection."""
        return self._link.connection.fileno if self._link else -1

    @property
    def is_late(self) -> bool:
        """The oldest unanswered request is past the deadline."""
        if self._link is None or not self._link.pending:
            return False
        oldest = next(iter(self._link.pending.values()))
        return self._clock() - oldest.sent_at > self.deadline_s

    @property
    def num_unanswered(self) -> int:
        """Requests whose end is not known."""
        return len(self._link.pending) if self._link else 0

    def submit(self, build: Build, *, even_if_late: bool = False, connection: int | None = None) -> Pending:
        """Send a request and return at once; lost at once if there is no daemon, or it is late.

        What a daemon must hear to let go of something is sent ``even_if_late``. What would mean nothing, or something
        else, on another ``connection`` goes out on that one or is lost.
        """
        if self.is_late:
            self.poll()  # An answer that nobody has read yet must not make the daemon look late.
        if self._link is None and connection is None:
            self._connect()
        link = self._link
        if link is None or link.fault or connection not in (None, link.number) or (self.is_late and not even_if_late):
            return Pending(0, self._clock(), is_lost=True)
        return self._send(link, build)

    def poll(self, timeout_s: float = 0.0) -> None:
        """Take in the replies that have come; wait at most ``timeout_s`` for the first."""
        link = self._link
        if link is None:
            return
        try:
            for reply in link.connection.receive(timeout_s):
                self._take(link, reply)
        except Unreachable as error:
            self._lose(link, link.fault or str(error))
        except ProtocolError as error:
            # The daemon may still be copying: what is pending is lost only when it has closed its end.
            link.fault = str(error)
            link.connection.finish()

    def wait(self, pending: Pending, deadline_s: float | None = None) -> None:
        """Poll until a request is over, for at most ``deadline_s``; without one, for the client's."""
        end = self._clock() + (self.deadline_s if deadline_s is None else deadline_s)
        while not pending.is_over and (left := end - self._clock()) > 0:
            self.poll(left)

    def call(self, build: Build, deadline_s: float | None = None) -> wire.Reply:
        """Send a request and return its reply.

        Raises:
            Refused: the daemon's answer, as the class that it names.
            DeadlineExceeded: no answer in time. The request may still be carried out.
            Unreachable: there is no daemon, or it went away.
        """
        pending = self.submit(build)
        self.wait(pending, deadline_s)
        if pending.is_lost:
            raise Unreachable(self._last_failure or f"the kvist daemon at {self.path} is late")
        if pending.reply is None:
            raise DeadlineExceeded(f"the kvist daemon at {self.path} has not answered in time")
        if isinstance(pending.reply, wire.Error):
            raise refusal(pending.reply.code, pending.reply.detail)
        return pending.reply

    def register(self, deadline_s: float | None = None) -> wire.Registered:
        """Connect if need be, and return the daemon's answer to the registration.

        Raises:
            As ``call``.
        """
        self.call(wire.Ping, deadline_s)
        end = self._clock() + (self.deadline_s if deadline_s is None else deadline_s)
        while self.registration is None and self._link is not None and (left := end - self._clock()) > 0:
            self.poll(left)
        if isinstance(self.registration, wire.Error):
            raise refusal(self.registration.code, self.registration.detail)
        if self._link is None:
            raise Unreachable(self._last_failure)
        if self.registration is None:
            raise DeadlineExceeded(f"the kvist daemon at {self.path} has not answered the registration in time")
        return self.registration

    def take_fds(self) -> list[int]:
        """Return the descriptors that came with the answer to the registration, which are the caller's now."""
        if self._link is None:
            return []
        fds, self._link.connection.fds = self._link.connection.fds, []
        return fds

    def close(self) -> None:
        """Close the connection, at this process's end only: copies that have begun go on in the daemon. Idempotent."""
        if self._link is not None:
            self._last_failure = "closed by this process"
            self._lose(self._link, self._last_failure)

    def _connect(self) -> None:
        now = self._clock()
        if now < self._next_attempt:
            return
        self._next_attempt = now + RETRY_S
        try:
            link = _Link(Connection(self.path), self._num_connections + 1)
        except KvistError as error:
            self._note_failure(str(error))
            return
        self._num_connections += 1
        self._link = link
        self._send(link, self._hello)
        if self._registrar is not None and self._link is link:
            self._send_registration(link, self._registrar)

    def _hello(self, request_id: int) -> wire.Request:
        about = self._about
        return wire.Hello(
            request_id, wire.MAGIC, wire.PROTOCOL_VERSION, self._engine_id, self._name, about.serves, about.needs,
            dict(about.facts),
        )  # fmt: skip

    def _send_registration(self, link: _Link, registrar: Registrar) -> None:
        pending = self._new_pending(link)
        link.registration_id = pending.id
        link.connection.takes_fds = True
        try:
            message, fds = registrar(pending.id)
            *batches, own = [fds[start : start + FDS_MAX] for start in range(0, len(fds) or 1, FDS_MAX)]
            end = self._clock() + self.deadline_s
            for batch in batches:
                if link.refused_batch is None:  # The daemon then refuses the registration too, and keeps nothing.
                    self._send_batch(link, batch, end)
            self._hand_over(link, encode(message, num_fds=len(own)), own, end)
        except (KvistError, OSError) as error:
            self._lose(link, str(error))
            if isinstance(error, Overloaded):
                self._next_attempt = self._clock() + _PAUSE_S
            return
        link.pending[pending.id] = pending

    def _send_batch(self, link: _Link, fds: Sequence[int], end: float) -> None:
        pending = self._new_pending(link)
        self._hand_over(link, encode(wire.Descriptors(pending.id), num_fds=len(fds)), fds, end)
        link.pending[pending.id] = pending
        link.batches.add(pending.id)

    def _hand_over(self, link: _Link, frame: bytes, fds: Sequence[int], end: float) -> None:
        """Send one frame of a registration when the daemon has caught up with those before it.

        Raises:
            Overloaded: it does not, or not before ``end``.
            Unreachable: it is gone, or has said that it takes nothing more.
        """
        is_sent = False
        while not is_sent:
            if link.batches:
                self._poll_registration(link, 0.0)
            if len(link.batches) >= _BATCHES_MAX:
                self._wait_batch(link, end)
            try:
                link.connection.send(frame, fds)
                is_sent = True
            except Overloaded:
                if not link.batches:
                    raise
                self._wait_batch(link, end)

    def _wait_batch(self, link: _Link, end: float) -> None:
        """Wait until one more batch is answered."""
        num_unanswered = len(link.batches)
        end = min(end, self._clock() + _BATCH_S)
        while len(link.batches) == num_unanswered:
            if (left := end - self._clock()) <= 0:
                raise Overloaded(f"the daemon takes no descriptors in: {num_unanswered} batches are unanswered")
            self._poll_registration(link, left)

    def _poll_registration(self, link: _Link, timeout_s: float) -> None:
        self.poll(timeout_s)
        if self._link is not link or link.fault:
            raise Unreachable(link.fault or self._last_failure)

    def _new_pending(self, link: _Link) -> Pending:
        pending = Pending(self._next_id, self._clock(), connection=link.number)
        self._next_id += 1
        return pending

    def _send(self, link: _Link, build: Build) -> Pending:
        pending = self._new_pending(link)
        try:
            link.connection.send(encode(build(pending.id)))
        except (Overloaded, ProtocolError) as error:
            pending.is_lost = True
            self._note_failure(str(error))
        except Unreachable as error:
            pending.is_lost = True
            self._lose(link, str(error))
        else:
            link.pending[pending.id] = pending  # Only now: a request that was never sent must not look unanswered.
        return pending

    def _take(self, link: _Link, reply: wire.Reply) -> None:
        if isinstance(reply, wire.Welcome):
            link.welcome = reply
            self._last_failure = ""
            logger.info(
                "connected to kvist daemon=%s pid=%d path=%s", reply.daemon, link.connection.daemon_pid, self.path
            )
        elif reply.id in link.batches:
            link.batches.discard(reply.id)
            if isinstance(reply, wire.Error) and link.refused_batch is None:
                link.refused_batch = reply
        elif reply.id == link.registration_id and isinstance(reply, wire.Registered | wire.Error):
            is_refused = isinstance(reply, wire.Error)
            self.registration = link.refused_batch if is_refused and link.refused_batch is not None else reply
            link.connection.takes_fds = False
        pending = link.pending.pop(reply.id, None)
        if pending is not None:
            pending.reply = reply
        elif isinstance(reply, wire.Error):
            raise ProtocolError(f"{reply.code}: {reply.detail}")
        if isinstance(reply, wire.Error) and link.welcome is None:
            raise ProtocolError(f"{reply.code}: {reply.detail}")

    def _lose(self, link: _Link, reason: str) -> None:
        """Give a connection up: the daemon's end of it is closed, so nothing of what is pending will still happen."""
        link.connection.close()
        if self._link is link:
            self._link = None
            self.registration = None
        for pending in link.pending.values():
            pending.is_lost = True
        link.pending.clear()
        self._note_failure(reason)

    def _note_failure(self, reason: str) -> None:
        if reason != self._last_failure:
            logger.warning("kvist is not available: %s", reason)
            self._last_failure = reason
