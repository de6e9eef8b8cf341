"""What all calls of a fake driver have in common: a context, codes instead of exceptions, and failures at will."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

from tests.support.fake_memory import AddressSpace
from tests.support.fake_names import CUresult, Failed, check
from tests.support.fake_streams import Event, Scheduler, Stream

T = TypeVar("T")
Entry = Callable[..., tuple[Any, ...]]


@dataclass(slots=True, eq=False)
class Context:
    """What belongs to one process on one GPU."""

    ordinal: int
    legacy_stream: Stream
    """Number 0. Nothing orders it before other streams, which do not block."""
    num_users: int = 0
    is_destroyed: bool = False
    streams: dict[int, Stream] = field(default_factory=dict)
    ended_streams: list[Stream] = field(default_factory=list)
    """Destroyed, and perhaps not done with their work."""
    events: dict[int, Event] = field(default_factory=dict)
    modules: dict[int, dict[int, str]] = field(default_factory=dict)
    """The functions of each, by name."""

    @property
    def all_streams(self) -> list[Stream]:
        return [self.legacy_stream, *self.streams.values(), *self.ended_streams]

    @property
    def num_pending(self) -> int:
        return sum(len(stream.queue) for stream in self.all_streams)

    def check_works(self) -> None:
        """End the call if work has failed: from then on, nothing works in this context."""
        for stream in self.all_streams:
            check(stream.error is None, stream.error or CUresult.CUDA_SUCCESS)

    def parts(self) -> list[str]:
        """Return what is there, in words."""
        return [
            *["stream"] * len(self.streams),
            *["event"] * len(self.events),
            *["module"] * len(self.modules),
            *["pending work"] * self.num_pending,
        ]


def find(table: Mapping[int, T], handle: Any, code: CUresult = CUresult.CUDA_ERROR_INVALID_HANDLE) -> T:
    """Return what a handle stands for, or end the call."""
    check(int(handle) in table, code)
    return table[int(handle)]


def entry(*, num_results: int = 0, needs_context: bool = True) -> Callable[[Callable[..., Any]], Entry]:
    """Make a driver function of a method, which raises ``Failed`` instead of returning a code."""

    def decorate(method: Callable[..., Any]) -> Entry:
        @functools.wraps(method)
        def call(self: Calls, *arguments: Any) -> tuple[Any, ...]:
            self.on_call(method.__name__)
            with self.lock:
                try:
                    if not self.begin(method.__name__):
                        return (CUresult.CUDA_SUCCESS,)
                    if needs_context:
                        self.context.check_works()
                        self.scheduler.stir()
                    found = method(self, *arguments)
                    if needs_context:
                        self.context.check_works()
                except Failed as failure:
                    return (failure.code, *[None] * num_results)
                return (CUresult.CUDA_SUCCESS, *([found] if num_results == 1 else found or ()))

        return call

    return decorate


class Calls:
    """One process's calls, in order."""

    def __init__(self, lock: threading.RLock, scheduler: Scheduler) -> None:
        self.lock = lock
        self.scheduler = scheduler
        self.calls: list[str] = []
        self.launched: list[str] = []
        """Kernels, by name."""
        """Names of all calls so far."""
        self.ignored: set[str] = set()
        """Names of calls without a result that do nothing."""
        self.space = AddressSpace()
        self.contexts: dict[int, Context] = {}
        self.current = threading.local()
        self.on_call: Callable[[str], object] = str
        """Called before each call, with its name."""
        self._faults: dict[int, CUresult] = {}

    def fail_call(self, number: int, code: CUresult = CUresult.CUDA_ERROR_UNKNOWN) -> None:
        """Let the call fail, without effect, before which ``number`` others are made from now."""
        self._faults[len(self.calls) + number] = code

    def fail_nothing(self) -> None:
        """Forget about calls that were to fail."""
        self._faults.clear()

    @property
    def num_pending(self) -> int:
        """Pieces of work that were given and are not done."""
        return sum(context.num_pending for context in self.contexts.values())

    @property
    def context(self) -> Context:
        """The calling thread's."""
        context: Context | None = getattr(self.current, "context", None)
        if context is None:
            raise Failed(CUresult.CUDA_ERROR_INVALID_CONTEXT)
        check(not context.is_destroyed, CUresult.CUDA_ERROR_CONTEXT_IS_DESTROYED)
        return context

    def begin(self, name: str) -> bool:
        """Note a call; return whether it shall do anything."""
        self.calls.append(name)
        fault = self._faults.pop(len(self.calls) - 1, None)
        if fault is not None:
            raise Failed(fault)
        return name not in self.ignored
