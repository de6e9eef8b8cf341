"""The worker's side: it hands KV memory to the daemon, sends what the scheduler decided, and says what became of it.

The laws: no call here blocks a step that computes. A job is a request to the daemon for each row of each of its
groups, and over when all are. A load is reported to the engine exactly once: when it is over, when its daemon is gone,
or at its deadline, as failed; which blocks failed is exact. A job is *settled* only when the daemon has answered all of
it or is gone, because only then nothing can touch its blocks any more.
"""

from __future__ import annotations

import array
import logging
import math
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, Protocol

from kvist.adapters.vllm.metadata import KvistMetadata, LoadJob, LoadPart, StorePart
from kvist.adapters.vllm.stats import Tally
from kvist.client.client import Build, Pending
from kvist.client.planning import Places
from kvist.transfer.governor import Governor
from kvist.wire import messages as wire

logger = logging.getLogger(__name__)

_IDLE_WAIT_S: Final = 0.005
"""How long a step that computes nothing waits for the daemon: this worker's core is better used by the copy."""


class Requests(Protocol):
    """Where a worker's requests go: a ``Client``, or an ``EngineLane``."""

    def submit(self, build: Build) -> Pending:
        """Send a request and return at once."""
        ...

    def poll(self, timeout_s: float = 0.0) -> None:
        """Take in what has come; wait at most so long for the first."""
        ...

    def close(self) -> None:
        """Leave the daemon."""
        ...


class Lane(Requests, Protocol):
    """An ``EngineLane``: threads of this process that copy."""

    def load(self, build: Build, places: Places) -> Pending:
        """Begin a load, as ``submit``, ahead of the daemon's order."""
        ...


class Fence(Protocol):
    """An event that the daemon knows."""

    def record(self) -> None:
        """Set it behind everything that the worker has given to its accelerator."""
        ...


@dataclass(slots=True, eq=False)
class _Load:
    job: LoadJob
    begun_at: float
    sends: list[tuple[LoadPart, int]]
    """What is asked of the daemon: a part of the job, and the row that it is for."""
    pending: list[Pending]
    """One for each of ``sends``."""
    is_reported: bool = False

    @property
    def is_over(self) -> bool:
        return all(pending.is_over for pending in self.pending)


@dataclass(frozen=True, slots=True)
class Results:
    """What a worker tells its engine after a step."""

    finished: set[str] = field(default_factory=set)
    """Requests whose load is over, well or badly."""
    failed: set[str] = field(default_factory=set)
    """Those of them of whose blocks not all can be used."""
    failed_blocks: set[int] = field(default_factory=set)
    """Blocks whose content must not be used."""

    def add(self, request_id: str, failed_blocks: Iterable[int], *, is_whole: bool) -> None:
        """Take a load's end in."""
        self.finished.add(request_id)
        self.failed_blocks.update(failed_blocks)
        if not is_whole:
            self.failed.add(request_id)


class WorkerSide:
    """Lives in a worker process, on its main thread."""

    def __init__(
        self, *, deadline_s: float = 1.0, governor: Governor | None = None,
        clock: Callable[[], float] = time.monotonic, tally: Tally | None = None,
    ) -> None:  # fmt: skip
        """Begin without a daemon; all loads fail at once until ``connect``."""
        self._client: Requests | None = None
        self._fence: Fence | None = None
        self._rows_of_group: Mapping[int, Sequence[int]] = {}
        self._lane: Lane | None = None
        self._shards: Sequence[int] = ()
        self._deadline_s = deadline_s
        self._clock = clock
        self._loads: list[_Load] = []
        self._stores: dict[int, list[Pending]] = {}
        self._settled: Counter[int] = Counter()
        self._failed: set[int] = set()
        self._tally = tally or Tally()
        self.governor = governor or Governor(math.inf)
        """Spaces this worker's stores, by what its steps take."""
        self._last_step = (-math.inf, 0)
        """When the last step began, and how many requests decoded in it."""
        self._is_idle = False
        self._undone: dict[str, Sequence[int]] = {}

    def connect(
        self, client: Requests, fence: Fence | None = None, rows_of_group: Mapping[int, Sequence[int]] | None = None
    ) -> None:
        """Use a client, which registers this worker's memory; ``fence`` is the event that it registers, if any.

        ``rows_of_group`` says which of the registered rows hold a group, by its number in vLLM; without it, each group
        is the row of its number.
        """
        self._client = client
        self._fence = fence
        self._rows_of_group = rows_of_group or {}
        self._lane, self._shards = None, ()

    def copy_itself(self, lane: Lane, shards: Sequence[int]) -> None:
        """Load ahead of orders through the lane that ``connect`` was given; ``shards`` are those of its rows."""
        self._lane, self._shards = lane, shards

    def begin(self, metadata: KvistMetadata) -> None:
        """Send this step's loads. Stores follow when the step has been computed, at once if it computes nothing.

        Not all versions of vLLM call what follows a step that computes nothing (none up to 0.30 does).
        """
        self._is_idle = metadata.is_idle
        self.governor.begin_step(is_computing=not metadata.is_idle)
        self._note_step(metadata.num_decoding)
        self._undone.update(metadata.undone)
        begun = [self._note_load(job) for job in metadata.loads]
        self._loads += begun  # Known before anything is sent: whatever goes wrong now, each is reported.
        for load in begun:
            for number, (part, row) in enumerate(load.sends):
                load.pending[number] = self._send_load(load.job, part, row)
        if metadata.is_idle:
            self.store(metadata)

    def store(self, metadata: KvistMetadata) -> None:
        """Send this step's stores; every byte that they name has been computed."""
        for job in metadata.stores:
            if job.id not in self._stores:
                pending = self._stores[job.id] = []
                for part in job.parts:
                    pending += [self._send_store(part, row, job.tenant) for row in self._rows(part.group)]

    def collect(self) -> Results:
        """Return what has ended since the last call."""
        if self._client is not None:
            is_waiting = self._is_idle and (self._loads or self._stores)
            self._client.poll(_IDLE_WAIT_S if is_waiting else 0.0)
        results = self._take_undone()
        now = self._clock()
        for load in self._loads:
            if not load.is_reported and (load.is_over or now - load.begun_at > self._deadline_s):
                failed_blocks = self._failed_blocks(load)
                results.add(load.job.request_id, failed_blocks, is_whole=not failed_blocks)
                load.is_reported = True
                if failed_blocks:
                    self._failed.add(load.job.id)
        self._settle()
        return results

    def give_up(self) -> Results:
        """Report every load that was not reported yet as failed. Their jobs settle as they would have."""
        results = self._take_undone()
        for load in self._loads:
            if not load.is_reported:
                load.is_reported = True
                written = set().union(*map(_written, load.job.parts))
                results.add(load.job.request_id, written, is_whole=False)
                self._failed.add(load.job.id)
        return results

    def take_settled(self) -> Counter[int]:
        """Return the jobs that have settled since the last call."""
        settled, self._settled = self._settled, Counter()
        return settled

    def take_failed(self) -> frozenset[int]:
        """Return the jobs of which something has failed since the last call, a refusal of the daemon's included."""
        failed, self._failed = self._failed, set()
        return frozenset(failed)

    def close(self) -> None:
        """Leave the daemon, which unmaps this worker's memory."""
        if self._client is not None:
            self._client.close()

    def _note_step(self, num_decoding: int) -> None:
        """Tell the governor how long the step before took, if it decoded."""
        now = self._clock()
        began_at, kind = self._last_step
        if kind and num_decoding:
            self.governor.step(now, now - began_at, kind)
        else:
            self.governor.pass_over()
        self._last_step = (now, num_decoding)

    def _take_undone(self) -> Results:
        undone, self._undone = self._undone, {}
        results = Results()
        for request_id, block_ids in undone.items():
            results.add(request_id, block_ids, is_whole=False)
        return results

    def _rows(self, group: int) -> Sequence[int]:
        return self._rows_of_group.get(group, ()) if self._rows_of_group else (group,)

    def _note_load(self, job: LoadJob) -> _Load:
        sends = [(part, row) for part in job.parts for row in self._rows(part.group)]
        return _Load(job, self._clock(), sends, [self._lost() for _ in sends])

    def _lost(self) -> Pending:
        return Pending(0, self._clock(), is_lost=True)

    def _submit(self, build: Build) -> Pending:
        if self._fence is not None:
            self._fence.record()
        return self._client.submit(build) if self._client is not None else self._lost()

    def _send_load(self, job: LoadJob, part: LoadPart, row: int) -> Pending:
        block_ids, tail_blocks = _pack(part.block_ids), len(part.block_ids) * part.is_tail
        deadline_ms = int(self._deadline_s * 1000)
        is_fenced = self._fence is not None

        def build(number: int) -> wire.Request:
            return wire.Retrieve(
                number, job.lease, part.first_chunk, block_ids, part.num_skipped_blocks, deadline_ms, is_fenced, row,
                tail_blocks,
            )  # fmt: skip

        if self._lane is not None and (places := part.places.get(self._shards[row])) is not None:
            return self._lane.load(build, places)
        return self._submit(build)

    def _send_store(self, part: StorePart, row: int, tenant: str) -> Pending:
        block_ids, tail_blocks = _pack(part.block_ids), len(part.block_ids) * part.is_tail
        is_fenced = self._fence is not None
        return self._submit(
            lambda number: wire.Store(number, part.digests, part.parent, block_ids, is_fenced, row, tail_blocks, tenant)
        )

    def _failed_blocks(self, load: _Load) -> set[int]:
        """Return the blocks of a load that were not, or not rightly, written."""
        failed: set[int] = set()
        for (part, row), pending in zip(load.sends, load.pending, strict=True):
            reply, written = pending.reply, _written(part)
            if isinstance(reply, wire.RetrieveReply):
                size = len(part.block_ids) // reply.num_chunks
                block_ids = [part.block_ids[chunk * size + at] for chunk in reply.failed for at in range(size)]
                failed |= written.intersection(block_ids)
                reason = f"chunks {reply.failed} do not match" if block_ids else ""
            elif isinstance(reply, wire.Error):
                failed |= written
                reason = f"{reply.code}: {reply.detail}"
            else:
                failed |= written
                reason = "daemon is gone or late"
            if reason:
                logger.warning("load failed request=%s row=%d reason=%s", load.job.request_id, row, reason)
        return failed

    def _settle(self) -> None:
        for load in self._loads:
            if load.is_over:
                self._settled[load.job.id] += 1
                self._count_loaded(load.pending)
        self._loads = [load for load in self._loads if not load.is_over]
        for number, pending in list(self._stores.items()):
            if all(one.is_over for one in pending):
                del self._stores[number]
                self._settled[number] += 1
                if not self._count_stored(pending):
                    self._failed.add(number)

    def _count_loaded(self, pending: Iterable[Pending]) -> None:
        for one in pending:
            if isinstance(one.reply, wire.RetrieveReply):
                self._tally.add("chunks_loaded", one.reply.num_chunks - len(one.reply.failed))

    def _count_stored(self, pending: Sequence[Pending]) -> bool:
        """Count a store's chunks, and return whether the daemon has all of them."""
        replies = [one.reply for one in pending if isinstance(one.reply, wire.StoreReply)]
        for reply in replies:
            self._tally.note_stored(reply)
        return len(replies) == len(pending) and not any(reply.num_refused for reply in replies)


def _written(part: LoadPart) -> set[int]:
    """Return the blocks that a load writes."""
    return set(part.block_ids[part.num_skipped_blocks :])


def _pack(block_ids: Sequence[int]) -> bytes:
    return array.array("i", block_ids).tobytes()
