"""Connected engine processes, and what each of them has put into the daemon's hands.

States: connected → registered → draining → closed. The law: memory is unmapped only after the last copy on it has
landed, and it is unmapped then whatever the reason for the end was. A copy that the engine carries out itself has
landed when the engine says so or when its process has ended.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from kvist.errors import Malformed
from kvist.index.leases import SessionId
from kvist.model.handles import MemoryHandle
from kvist.model.rows import RowMemory
from kvist.server.lanes import Lane
from kvist.server.orders import Orders
from kvist.transfer.executor import Job
from kvist.wire.messages import Hello, Reply

Send = Callable[[Reply, Sequence[int]], None]
"""Sends a reply, and descriptors that stay the caller's."""


@dataclass(frozen=True, slots=True)
class Peer:
    """Who is at the other end, as the kernel says."""

    pid: int
    uid: int


@dataclass(frozen=True, slots=True)
class Registration:
    """One worker's KV memory, checked, and mapped where the daemon copies."""

    rows: tuple[RowMemory, ...]
    handles: tuple[MemoryHandle, ...]
    bases: tuple[int, ...]
    """Address of each allocation in this process; none where the engine copies for itself."""
    lane: Lane | Orders
    """Who copies."""
    fence: object | None = None
    """The engine's event, as the device has opened it."""
    texts: tuple[str, ...] = ()
    """The engine's layer groups, for people."""

    def row(self, number: int) -> RowMemory:
        """Return the row that a request names.

        Raises:
            Malformed: there is no such row.
        """
        if not 0 <= number < len(self.rows):
            raise Malformed(f"row {number} of {len(self.rows)} that this session has registered")
        return self.rows[number]

    @property
    def orders(self) -> Orders | None:
        """What the engine was told to copy; None where the daemon copies."""
        return self.lane if isinstance(self.lane, Orders) else None


@dataclass(slots=True, eq=False)
class Session:
    """One connection after its HELLO."""

    id: SessionId
    peer: Peer
    hello: Hello
    send_with_fds: Send
    connected_at: float
    registration: Registration | None = None
    is_registering: bool = False
    kept_fds: list[int] = field(default_factory=list)
    """Descriptors for the registration to come, in the order of their coming. Owned."""
    jobs: set[Job] = field(default_factory=set)
    """Copies that have not landed."""
    num_unanswered: int = 0
    counters: Counter[str] = field(default_factory=Counter)
    """What was done for this session, for people."""
    on_closed: Callable[[], None] | None = None
    """Set when the end has begun; called when nothing of the session is left."""

    @property
    def engine_id(self) -> str:
        """Equal for all processes of one engine."""
        return self.hello.engine_id

    @property
    def model(self) -> str:
        """What its engine serves; empty if it has not said."""
        return self.hello.serves.model if self.hello.serves is not None else ""

    @property
    def chunk_tokens(self) -> int:
        """Tokens of a chunk of this engine; 0 if it has not said."""
        return self.hello.serves.chunk_tokens if self.hello.serves is not None else 0

    def send(self, reply: Reply) -> None:
        """Send a reply."""
        self.send_with_fds(reply, ())

    def answer(self, reply: Reply) -> None:
        """Reply to a request that was left unanswered until now."""
        self.num_unanswered -= 1
        if not self.is_draining:
            self.send(reply)

    @property
    def is_draining(self) -> bool:
        """The connection is over; what has begun is being finished or cancelled."""
        return self.on_closed is not None

    def cancel(self) -> None:
        """Let no further chunk of this session's copies begin."""
        for job in self.jobs:
            job.is_cancelled = True


def num_registered(sessions: Sequence[Session]) -> int:
    """Return how many sessions have registered KV memory."""
    return sum(session.registration is not None for session in sessions)
