"""Samples of a daemon that is made up, and a watcher that sees it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec

from kvist.client.client import Build
from kvist.errors import Unreachable
from kvist.web.watcher import Sample, Watcher
from kvist.wire import messages as wire

EPOCH = 1_800_000_000.0
"""When uptimes begin: a whole minute."""
GONE = "nobody is at home"
BOUNDS_S = (1e-3, 10e-3, 0.1)
QUIET = wire.StatusReply(
    0, pid=77, boot_id="first", is_draining=False, pool_nbytes=1000, pool_used_nbytes=250, num_sealed=5,
    num_reserved=0, num_pinned=0, num_leases=0, num_sessions=1, num_registered=0, num_copies_in_flight=0,
    version="0.1.0", lane_rates={"memcpy": 1e6},
)  # fmt: skip
MODEL = wire.NamespaceSpec("model", "main", "bfloat16", "layout", "tp1", 16)


def histogram(*counts: int) -> wire.HistogramStatus:
    return wire.HistogramStatus(list(BOUNDS_S), list(counts), 0.0)


def sample(
    uptime_s: float, counters: Mapping[str, int] | None = None, *, at: float | None = None,
    sessions: Sequence[wire.SessionStatus] = (), **status,
) -> Sample:  # fmt: skip
    """Return the daemon after so many seconds, which is when it is seen unless ``at`` says otherwise."""
    told = msgspec.structs.replace(QUIET, uptime_s=uptime_s, counters=dict(counters or {}), **status)
    return Sample(EPOCH + (uptime_s if at is None else at), told, tuple(sessions))


def session(number: int, *, engine_id: str = "engine", counters: Mapping[str, int] | None = None, **more):
    """Return a connected process that has said nothing of itself but what ``more`` says."""
    facts = {
        "serves": None, "needs": (), "facts": {}, "lane": "", "memory": "", "rows": [], "texts": [],
        "name": f"process {number}", "connected_s": 60.0, "num_copies_in_flight": 0,
    }  # fmt: skip
    return wire.SessionStatus(
        id=number, pid=100 + number, uid=0, engine_id=engine_id, counters=dict(counters or {}), **(facts | more)
    )


class MadeUpDaemon:
    """In a client's place: answers with what it was given last, or not at all."""

    def __init__(self) -> None:
        self.sample: Sample | None = None
        self.num_asked = 0

    def call(self, build: Build) -> wire.Reply:
        self.num_asked += 1
        if self.sample is None:
            raise Unreachable(GONE)
        is_status = isinstance(build(0), wire.Status)
        return self.sample.status if is_status else wire.Description(0, list(self.sample.sessions))

    def close(self) -> None:
        self.sample = None


class Watched:
    """A watcher, and the daemon that it sees."""

    def __init__(self, *samples: Sample) -> None:
        self.daemon = MadeUpDaemon()
        self.now = EPOCH
        self.watcher = Watcher("/run/kvist.sock", clock=lambda: self.now, client=self.daemon)
        self.see(*samples)

    def see(self, *samples: Sample) -> None:
        """Let it take these samples."""
        for taken in samples:
            self.daemon.sample, self.now = taken, taken.at
            assert self.watcher.sample() == taken

    def lose(self) -> None:
        """Let the daemon be gone when it is asked next."""
        self.daemon.sample = None
        assert self.watcher.sample() is None
