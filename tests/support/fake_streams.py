"""Streams of a fake GPU: queues whose work is done when somebody waits for it, or when chance has it so.

The law: nothing orders the work of two streams but an event that one waits for.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from tests.support.fake_names import CUresult, Failed


@dataclass(slots=True, eq=False)
class Record:
    """A place in a stream."""

    stream: Stream
    is_done: bool = False


@dataclass(slots=True, eq=False)
class Event:
    """Where it was recorded last; shared with the processes that have opened it."""

    flags: int
    record: Record | None = None


@dataclass(slots=True, eq=False)
class Wait:
    record: Record


@dataclass(slots=True, eq=False)
class Stream:
    """Work in the order in which it was given."""

    queue: deque[Record | Wait | Callable[[], None]] = field(default_factory=deque)
    error: CUresult | None = None
    """Of the work that failed; none is done after it."""

    def step(self) -> bool:
        """Do the next piece of work; return whether there was one that need not wait."""
        if not self.queue or (isinstance(self.queue[0], Wait) and not self.queue[0].record.is_done):
            return False
        work = self.queue.popleft()
        if isinstance(work, Record):
            work.is_done = True
        elif not isinstance(work, Wait) and self.error is None:
            try:
                work()
            except Failed as failure:
                self.error = failure.code
        return True


class Scheduler:
    """All streams of a machine."""

    def __init__(self, seed: int, liveliness: float) -> None:
        self._random = random.Random(seed)
        self._liveliness = liveliness
        self.streams: list[Stream] = []

    def stir(self) -> None:
        """Now and then, do some work of some stream."""
        if self.streams and self._random.random() < self._liveliness:
            stream = self._random.choice(self.streams)
            for _ in range(self._random.randint(1, 6)):
                if not stream.step():
                    break

    def finish(self, record: Record) -> None:
        """Do what comes before a place in a stream, and little else."""
        while not record.is_done:
            self.stir()
            if not record.is_done:
                self._advance(record.stream)

    def drain(self, stream: Stream) -> None:
        """Do all work of a stream, and little else."""
        while stream.queue:
            self.stir()
            if stream.queue:
                self._advance(stream)

    def _advance(self, stream: Stream) -> None:
        if not stream.step():
            wait = stream.queue[0]
            assert isinstance(wait, Wait)
            self.finish(wait.record)
