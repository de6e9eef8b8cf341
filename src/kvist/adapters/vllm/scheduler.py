"""The scheduler's side: which prompts are cached, which blocks to load, which to store.

The laws: nothing here waits for the daemon longer than ``_ANSWER_WAIT_S``, and no request is put off longer than the
deadline. A block that the daemon may read or write is held by a reference from the step that names it until every
worker has reported the job settled, so no copy, however late, meets another request's bytes.
"""

from __future__ import annotations

import functools
import logging
import time
import uuid
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

from kvist.adapters.vllm import layout
from kvist.adapters.vllm.metadata import LoadJob, StoreJob
from kvist.adapters.vllm.options import Options, parse_request_options
from kvist.adapters.vllm.tracking import Lookup, Tracked
from kvist.client.client import Client, Pending
from kvist.errors import ConfigError, KeyInvalid
from kvist.model.keys import Digest, MediaItem, Namespace, root_digest, split_digests
from kvist.wire import messages as wire

logger = logging.getLogger(__name__)

_ANSWER_WAIT_S: Final = 0.003
"""Several times what the daemon needs for a lookup; longer would be felt by the running batch."""
_LEASE_MARGIN: Final = 0.5
"""Part of a lease's life for which a remembered lookup is trusted."""
_STEPPING_S: Final = 2.0
"""How long an idle engine is kept stepping for a job's end."""


@dataclass(slots=True, eq=False)
class _Job:
    """A load or store whose blocks are held."""

    blocks: list[Any]
    begun_at: float
    digests: frozenset[Digest] = frozenset()
    """What a load brings; others who need it wait for it."""
    num_settled: int = 0


@dataclass(frozen=True, slots=True)
class EngineFacts:
    """What does not change while the engine runs."""

    block_tokens: int
    num_workers: int
    num_blocks: int
    held_share_max: float
    """Part of the blocks that unfinished stores may hold."""
    has_prefix_cache: bool
    """The engine itself keeps finished prompts' blocks for others."""


class SchedulerSide:
    """Lives in the engine's scheduler process."""

    def __init__(
        self,
        client: Client,
        options: Options,
        namespace: Namespace,
        engine: EngineFacts,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._client = client
        self._options = options
        self._namespace = namespace
        self._chunk_tokens = namespace.chunk_tokens
        self._engine = engine
        self._blocks_per_chunk = namespace.chunk_tokens // engine.block_tokens
        self._held_max = max(self._blocks_per_chunk, int(engine.num_blocks * engine.held_share_max))
        self._clock = clock
        self._pool: Any = None
        self._roots: dict[tuple[str, str], Digest] = {}
        self._tracked: dict[str, Tracked] = {}
        self._jobs: dict[int, _Job] = {}
        self._next_job = 1
        self._loads: list[LoadJob] = []
        self._last_stores: list[StoreJob] = []
        """Of requests that have ended since the last step."""
        self._abandoned: list[Pending] = []

    def bind_pool(self, pool: Any) -> None:
        """Take vLLM's block pool, which gives references to blocks."""
        self._pool = pool

    def begin(self, request: Any) -> None:
        """Take note of a new request, and ask for its prefix at once."""
        tracked = self._track(request)
        if tracked is not None and tracked.options.read and not getattr(request, "skip_reading_prefix_cache", False):
            self._ask(tracked)

    def count_hit(self, request: Any, num_local_tokens: int) -> int | None:
        """Return how many tokens beyond the engine's own can be loaded; None to be asked again in the next step."""
        tracked = self._tracked.get(request.request_id) or self._track(request)
        if tracked is None or not tracked.options.read or getattr(request, "skip_reading_prefix_cache", False):
            return 0
        tracked.num_local_tokens = num_local_tokens
        self._ask(tracked)
        lookup = tracked.lookup
        if lookup is None:
            return 0
        if not lookup.pending.is_over:
            self._client.wait(lookup.pending, _ANSWER_WAIT_S)
        if not lookup.pending.is_over:
            if self._clock() - lookup.pending.sent_at <= self._options.deadline_s:
                return None
            self._forget_lookup(tracked)
            return 0
        num_chunks = lookup.reply.num_chunks if lookup.reply else 0
        tracked.num_offered = max(tracked.num_offered, num_chunks)
        num_hit_tokens = num_chunks * self._chunk_tokens - num_local_tokens
        if num_hit_tokens < self._chunk_tokens:
            return 0  # Computed sooner than loaded: a load takes a step or two, however small it is.
        needed = tracked.digest(num_local_tokens // self._chunk_tokens)
        if self._engine.has_prefix_cache and self._is_being_loaded(needed):
            return None
        return num_hit_tokens

    def _is_being_loaded(self, digest: Digest) -> bool:
        """Return whether a load that is not late yet brings this chunk: then the engine will soon have it itself."""
        now = self._clock()
        return any(
            digest in job.digests and now - job.begun_at <= self._options.deadline_s for job in self._jobs.values()
        )

    def allocated(self, request: Any, blocks: Any, num_external_tokens: int) -> bool:
        """Take note of a request's blocks; begin its load if it was promised one, and return whether that is so."""
        tracked = self._tracked.get(request.request_id)
        if tracked is None:
            return False
        tracked.block_ids = list(blocks.get_block_ids()[0])
        lookup = tracked.lookup
        if num_external_tokens <= 0:
            self._forget_lookup(tracked)
        elif lookup is not None and lookup.reply is not None and not lookup.is_claimed:
            self._begin_load(tracked, lookup, num_external_tokens)
            return True
        return False

    def take_loads(self) -> list[LoadJob]:
        """Return the loads that were begun since the last call."""
        loads, self._loads = self._loads, []
        return loads

    def begin_stores(self, scheduler_output: Any) -> list[StoreJob]:
        """Return the stores of the chunks that this step completes."""
        self._client.poll()
        self._settle_abandoned()
        stores, self._last_stores = self._last_stores, []
        for request_id, num_computed_tokens in self._take_steps(scheduler_output):
            tracked = self._tracked.get(request_id)
            if tracked is not None:
                tracked.num_computed_tokens = num_computed_tokens
                stores += self._begin_store(tracked)
        return stores

    def take_reports(self, settled: Counter[int]) -> None:
        """Let go of the blocks of jobs that all workers are done with; ``settled`` counts workers by job."""
        for number, count in settled.items():
            job = self._jobs.get(number)
            if job is None:
                continue
            job.num_settled += count
            if job.num_settled >= self._engine.num_workers:
                del self._jobs[number]
                layout.let_go_of_blocks(self._pool, job.blocks)

    def end(self, request: Any) -> None:
        """Forget a request. Its jobs go on, and keep their blocks; what could not be stored before is stored now."""
        tracked = self._tracked.pop(request.request_id, None)
        if tracked is not None:
            self._forget_lookup(tracked)
            self._last_stores += self._begin_store(tracked)

    def must_keep_stepping(self) -> bool:
        """Return whether an idle engine should go on for the sake of jobs that will soon be over."""
        now = self._clock()
        return any(now - job.begun_at < self._options.deadline_s + _STEPPING_S for job in self._jobs.values())

    def change_weights(self) -> None:
        """Serve nothing that was stored so far: it may belong to other weights, and nobody says to which."""
        weights = f"{self._namespace.weights}/changed in place {uuid.uuid4().hex}"
        self._namespace = Namespace(
            self._namespace.model, self._namespace.revision, self._namespace.dtype, self._namespace.layout,
            self._namespace.shards, self._namespace.chunk_tokens, weights,
        )  # fmt: skip
        self._roots.clear()
        for tracked in list(self._tracked.values()):
            # Its KV is of both weights: neither name would be true.
            tracked.options = type(tracked.options)(read=False, write=False)
            self._forget_lookup(tracked)

    def close(self) -> None:
        """Leave the daemon, which drops all leases of this engine."""
        self._client.close()

    def _track(self, request: Any) -> Tracked | None:
        """Begin to follow a request; None if its KV has no name, or it allows nothing."""
        try:
            options = parse_request_options(getattr(request, "kv_transfer_params", None))
            if getattr(request, "prompt_embeds", None) is not None or getattr(request, "prompt_is_token_ids", None):
                return None  # An input without an identity.
            if getattr(request, "resumable", False):
                return None  # Its tokens may change under their keys.
            media = [MediaItem(*item) for item in layout.media_of(request)]
            root = self._root(layout.adapter_of(request), str(getattr(request, "cache_salt", None) or ""))
            tracked = Tracked(request, options, root, self._chunk_tokens, media)
            tracked.num_whole_chunks()
        except (ConfigError, KeyInvalid) as error:
            logger.warning("request is not cached request=%s reason=%s", request.request_id, error)
            return None
        if not (options.read or options.write):
            return None
        self._tracked[request.request_id] = tracked
        return tracked

    def _root(self, adapter: str, salt: str) -> Digest:
        root = self._roots.get((adapter, salt))
        if root is None:
            root = self._roots[adapter, salt] = root_digest(self._namespace, adapter=adapter, salt=salt)
        return root

    def _ask(self, tracked: Tracked) -> None:
        """Look a request's prefix up, unless that was done and still holds."""
        num_chunks = tracked.num_whole_chunks()
        if tracked.lookup is not None and self._is_remembered(tracked.lookup, num_chunks):
            return
        self._forget_lookup(tracked)
        if num_chunks:
            digests = tracked.packed(0, num_chunks)
            needs = (wire.NeedSpec("full", num_shards=self._engine.num_workers),)
            pending = self._client.submit(lambda number: wire.Lookup(number, digests, needs))
            tracked.lookup = Lookup(num_chunks, pending)

    def _is_remembered(self, lookup: Lookup, num_chunks: int) -> bool:
        if lookup.is_claimed or lookup.num_chunks_asked != num_chunks:
            return False
        welcome = self._client.welcome
        ttl_s = welcome.limits.lease_ttl_s if welcome else self._options.deadline_s
        is_fresh = self._clock() - lookup.pending.sent_at < ttl_s * _LEASE_MARGIN
        # A lookup that is lost, or found nothing, is not repeated: it would not find more before this request is over.
        return is_fresh or lookup.pending.is_lost or (lookup.reply is not None and not lookup.reply.num_chunks)

    def _forget_lookup(self, tracked: Tracked) -> None:
        """Give a lease back, or see to it that it will be when the answer comes."""
        lookup, tracked.lookup = tracked.lookup, None
        if lookup is None or lookup.is_claimed or lookup.pending.is_lost:
            return
        self._abandoned.append(lookup.pending)
        self._settle_abandoned()

    def _settle_abandoned(self) -> None:
        if not self._abandoned:
            return
        self._client.poll()
        waiting = []
        for pending in self._abandoned:
            if not pending.is_over:
                waiting.append(pending)
            elif isinstance(pending.reply, wire.LookupReply) and pending.reply.lease:
                self._client.submit(functools.partial(wire.Release, lease=pending.reply.lease))
        self._abandoned = waiting

    def _begin_load(self, tracked: Tracked, lookup: Lookup, num_external_tokens: int) -> None:
        assert lookup.reply is not None
        num_local = tracked.num_local_tokens
        first_chunk = num_local // self._chunk_tokens
        num_skipped_blocks = num_local % self._chunk_tokens // self._engine.block_tokens
        end = (num_local + num_external_tokens) // self._chunk_tokens
        first_block, end_block = first_chunk * self._blocks_per_chunk, end * self._blocks_per_chunk
        block_ids = tuple(tracked.block_ids[first_block:end_block])
        digests = frozenset(split_digests(tracked.packed(first_chunk, end)))
        number = self._hold(block_ids[num_skipped_blocks:], digests)
        lookup.is_claimed = True
        request_id = tracked.request.request_id
        self._loads.append(
            LoadJob(number, request_id, lookup.reply.lease, first_chunk, block_ids, num_skipped_blocks)
        )  # fmt: skip

    def _begin_store(self, tracked: Tracked) -> list[StoreJob]:
        """Store the chunks that are whole after this step, as far as blocks may be held for it."""
        if not tracked.options.write:
            return []
        end = min(tracked.num_computed_tokens // self._chunk_tokens, tracked.num_whole_chunks())
        end = min(end, len(tracked.block_ids) // self._blocks_per_chunk)
        first = tracked.num_offered
        num_held = sum(len(job.blocks) for job in self._jobs.values())
        end = min(end, first + (self._held_max - num_held) // self._blocks_per_chunk)
        if end <= first or not self._client.is_connected or self._client.is_late:
            return []
        block_ids = tuple(tracked.block_ids[first * self._blocks_per_chunk : end * self._blocks_per_chunk])
        tracked.num_offered = end
        parent = tracked.digest(first - 1) if first else b""
        return [StoreJob(self._hold(block_ids), tracked.packed(first, end), parent, block_ids)]

    def _hold(self, block_ids: tuple[int, ...], digests: frozenset[Digest] = frozenset()) -> int:
        number = self._next_job
        self._next_job += 1
        self._jobs[number] = _Job(layout.hold_blocks(self._pool, block_ids), self._clock(), digests)
        return number

    def _take_steps(self, scheduler_output: Any) -> list[tuple[str, int]]:
        """Bring block tables up to date; return (request, tokens computed when this step is over)."""
        num_scheduled = scheduler_output.num_scheduled_tokens
        steps = []
        for new in scheduler_output.scheduled_new_reqs:
            self._set_blocks(new.req_id, new.block_ids, is_whole=True)
            steps.append((new.req_id, new.num_computed_tokens + num_scheduled.get(new.req_id, 0)))
        cached = scheduler_output.scheduled_cached_reqs
        for request_id, block_ids, computed in zip(
            cached.req_ids, cached.new_block_ids, cached.num_computed_tokens, strict=True
        ):
            self._set_blocks(request_id, block_ids, is_whole=request_id in cached.resumed_req_ids)
            steps.append((request_id, computed + num_scheduled.get(request_id, 0)))
        return steps

    def _set_blocks(self, request_id: str, block_ids: Any, *, is_whole: bool) -> None:
        tracked = self._tracked.get(request_id)
        if tracked is None or (block_ids is None and not is_whole):
            return
        new = list(block_ids[0]) if block_ids else []
        if is_whole:
            tracked.block_ids = new
        else:
            tracked.block_ids += new
