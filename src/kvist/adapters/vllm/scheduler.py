"""The scheduler's side: which prompts are cached, which blocks to load, which to store.

The laws: nothing here waits for the daemon longer than ``_ANSWER_WAIT_S``, and no request is put off longer than the
deadline, or ``tier_wait_s`` while tiers are read. A block that the daemon may read or write is held by a reference from
the step that names it until every worker has reported the job settled, so no copy, however late, meets another
request's bytes. A block is named only while its request has it: of a window's blocks, and of states, many are gone when
the next step begins.
"""

from __future__ import annotations

import functools
import logging
import math
import time
import uuid
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

from kvist.adapters.vllm import layout
from kvist.adapters.vllm.blocks import find_places, first_loaded, plan_load, plan_store, plan_tail_load, stored_blocks
from kvist.adapters.vllm.groups import EngineFacts, EngineGroup
from kvist.adapters.vllm.metadata import LoadJob, LoadPart, StoreJob, StorePart
from kvist.adapters.vllm.options import Options, parse_request_options
from kvist.adapters.vllm.pace import PrefillPace
from kvist.adapters.vllm.stats import Tally
from kvist.adapters.vllm.tracking import Lookup, Prefill, Tracked, take_steps
from kvist.client.client import Client
from kvist.errors import ConfigError, KeyInvalid
from kvist.model.keys import DIGEST_NBYTES, Digest, MediaItem, Namespace, root_digest, split_digests
from kvist.model.layout import GroupKind
from kvist.wire import messages as wire
from kvist.wire.describing import describe_needs

logger = logging.getLogger(__name__)

_ANSWER_WAIT_S: Final = 0.003
"""Several times what the daemon needs for a lookup; longer would be felt by the running batch."""
_LEASE_MARGIN: Final = 0.5
"""Part of a lease's life for which a remembered lookup is trusted."""
_TAIL_BEHIND_MIN: Final = 4
"""Whole chunks that a sequence must have for its tail to be kept: a tail takes the room of one."""
_IDLE_WAIT_S: Final = 0.002
"""How long a step that computes nothing rests while requests wait for a tier: the engine asks again at once."""
_STEPPING_S: Final = 2.0
"""How long an idle engine is kept stepping for a job's end."""

Tables = Sequence[Sequence[int]]
"""A request's block ids, by group."""
States = Sequence[tuple[int, int, int]]
"""(group, block, tokens): the block holds the group's state after exactly so many tokens when this step is over."""


@dataclass(slots=True, eq=False)
class _Job:
    """A load or store whose blocks are held."""

    blocks: list[Any]
    begun_at: float
    num_tokens: int
    digests: frozenset[Digest] | None = None
    """What a load brings; others who need it wait for it. None for a store."""
    num_settled: int = 0
    has_failed: bool = False


class SchedulerSide:
    """Lives in the engine's scheduler process."""

    def __init__(
        self,
        client: Client,
        options: Options,
        namespace: Namespace,
        engine: EngineFacts,
        clock: Callable[[], float] = time.monotonic,
        tally: Tally | None = None,
    ) -> None:
        self._client = client
        self._tally = tally or Tally()
        self._options = options
        self._namespace = namespace
        self._chunk_tokens = namespace.chunk_tokens
        self._engine = engine
        self._groups = engine.groups
        blocks_per_chunk = sum(group.stored_blocks_per_chunk for group in engine.groups)
        self._held_max = max(blocks_per_chunk, int(engine.num_blocks * engine.held_share_max))
        self._needs = describe_needs(engine.needs)
        has_tails = len(engine.groups) == 1 and engine.groups[0].kind is GroupKind.FULL
        self._tail_block_tokens = engine.groups[0].block_tokens if has_tails and not engine.groups[0].is_draft else 0
        """0: sequences of this engine have no tails."""
        full = [group.number for group in engine.groups if group.kind is GroupKind.FULL and not group.is_draft]
        self._counted_group = [*full, engine.groups[0].number][0]
        """Whose chunks count as stored tokens: others keep some of a prefix, or later."""
        self._clock = clock
        self._pace = PrefillPace()
        self._pool: Any = None
        self._roots: dict[tuple[str, ...], Digest] = {}
        self._tracked: dict[str, Tracked] = {}
        self._jobs: dict[int, _Job] = {}
        self._next_job = 1
        self._loads: list[LoadJob] = []
        self._last_stores: list[StoreJob] = []
        """Of requests that have ended since the last step."""
        self._abandoned: list[tuple[Tracked, Lookup]] = []

    def bind_pool(self, pool: Any) -> None:
        """Take vLLM's block pool, which gives references to blocks."""
        self._pool = pool

    def begin(self, request: Any) -> None:
        """Take note of a new request, and ask for its prefix at once."""
        tracked = self._track(request)
        self._tally.add("requests_not_cached", int(tracked is None))
        if tracked is not None and tracked.options.read and not getattr(request, "skip_reading_prefix_cache", False):
            self._ask(tracked)

    def count_hit(self, request: Any, num_local_tokens: int) -> int | None:
        """Return how many tokens beyond the engine's own can be loaded; None to be asked again in the next step."""
        tracked = self._tracked.get(request.request_id)
        if tracked is None or not tracked.options.read or getattr(request, "skip_reading_prefix_cache", False):
            return 0
        if tracked.has_failed:
            return 0
        tracked.num_local_tokens = num_local_tokens
        tracked.begin_waiting()
        self._ask(tracked)
        lookup = tracked.lookup
        if lookup is None:
            return 0
        if int(request.num_tokens) - num_local_tokens < self._chunk_tokens:
            return 0  # Whatever the answer: such loads are not made.
        if not lookup.pending.is_over:
            self._client.wait(lookup.pending, _ANSWER_WAIT_S)
        if not lookup.pending.is_over:
            if self._clock() - lookup.pending.sent_at <= self._options.deadline_s:
                return None
            self._tally.add("lookups_late")
            self._forget_lookup(tracked)
            return 0
        self._count_lookup(lookup)
        return None if self._waits_for_tier(tracked) else self._count_found(tracked, lookup, num_local_tokens)

    def _count_found(self, tracked: Tracked, lookup: Lookup, num_local_tokens: int) -> int | None:
        """Return how many tokens beyond the engine's own the answer to a lookup is good for; None to be asked again."""
        num_chunks, tail = (lookup.reply.num_chunks, lookup.reply.tail) if lookup.reply else (0, 0)
        tracked.note_found(num_chunks)
        num_hit_tokens = num_chunks * self._chunk_tokens + tail * self._tail_block_tokens - num_local_tokens
        if num_hit_tokens < self._chunk_tokens:
            return 0  # Computed sooner than loaded: a load takes a step or two, however small it is.
        needed = tracked.digest(num_local_tokens // self._chunk_tokens)
        if self._engine.has_prefix_cache and self._is_being_loaded(needed):
            return None
        return num_hit_tokens

    def _waits_for_tier(self, tracked: Tracked) -> bool:
        """Return whether a request is put off for the sake of chunks that are being read."""
        computing_s = self._pace.seconds(tracked.num_loading_tokens) or math.inf
        return tracked.waits_for_tier(self._clock(), min(self._options.tier_wait_s, computing_s))

    def _is_being_loaded(self, digest: Digest) -> bool:
        """Return whether a load that is not late yet brings this chunk: then the engine will soon have it itself."""
        now = self._clock()
        return any(
            digest in (job.digests or ()) and now - job.begun_at <= self._options.deadline_s
            for job in self._jobs.values()
        )

    def loaded_groups(self, request: Any) -> tuple[int, ...]:
        """Return the groups whose blocks the load that was promised last will fill."""
        tracked = self._tracked.get(request.request_id)
        if tracked is None or tracked.lookup is None or tracked.lookup.reply is None:
            return ()
        num_chunks = tracked.lookup.reply.num_chunks
        num_local_chunks = tracked.num_local_tokens // self._chunk_tokens
        return tuple(
            group.number
            for group in self._groups
            if first_loaded(group, num_chunks=num_chunks, num_local_chunks=num_local_chunks) < num_chunks
        )

    def allocated(self, request: Any, blocks: Any, num_external_tokens: int) -> bool:
        """Begin a request's load if it was promised one, and return whether that is so.

        Raises:
            InvalidBlocks: the request does not have the blocks that it needs.
        """
        tracked = self._tracked.get(request.request_id)
        if tracked is None:
            return False
        lookup = tracked.lookup
        if num_external_tokens <= 0:
            self._forget_lookup(tracked)
        elif lookup is not None and lookup.reply is not None and not lookup.is_claimed:
            self._begin_load(tracked, lookup, blocks.get_block_ids(), num_external_tokens)
            return True
        return False

    def note_failed(self, request_ids: Iterable[str]) -> None:
        """Take note of requests whose loads have failed as a whole: another attempt might fail as well."""
        for request_id in request_ids:
            tracked = self._tracked.get(request_id)
            if tracked is not None:
                self._forget_lookup(tracked)
                tracked.note_failed()

    def take_loads(self) -> list[LoadJob]:
        """Return the loads that were begun since the last call."""
        loads, self._loads = self._loads, []
        return loads

    def begin_stores(self, scheduler_output: Any) -> list[StoreJob]:
        """Return the stores of the chunks that this step completes."""
        is_resting = not scheduler_output.total_num_scheduled_tokens and self._is_anybody_waiting()
        self._client.poll(_IDLE_WAIT_S if is_resting else 0.0)
        self._settle_abandoned()
        stores, self._last_stores = self._last_stores, []
        for request_id in getattr(scheduler_output, "preempted_req_ids", None) or ():
            if (tracked := self._tracked.get(request_id)) is not None:
                tracked.lose_blocks()
        num_scheduled = scheduler_output.num_scheduled_tokens
        state = getattr(scheduler_output, "kv_connector_block_state", None)
        for request_id, num_computed_tokens in take_steps(self._tracked, scheduler_output, is_told=state is not None):
            tracked = self._tracked.get(request_id)
            if tracked is None:
                continue
            num_before = num_computed_tokens - num_scheduled.get(request_id, 0)
            self._note_prefill(tracked.note_step(self._clock(), num_before))
            tracked.num_computed_tokens = num_computed_tokens
            first, end = self._open_chunks(tracked)
            if first >= end:
                continue
            if state is None:
                stores += self._begin_store(tracked, tracked.tables, (), end)
            else:
                states = state.boundary_state_offloads.get(request_id, ())
                stores += self._begin_store(tracked, state.get_block_ids(request_id), states, end)
        return stores

    def take_reports(self, settled: Counter[int], failed: Collection[int] = ()) -> None:
        """Let go of the blocks of jobs that all workers are done with; ``settled`` counts workers by job."""
        for number in self._jobs.keys() & failed:
            self._jobs[number].has_failed = True
        for number, count in settled.items():
            job = self._jobs.get(number)
            if job is None:
                continue
            job.num_settled += count
            if job.num_settled >= self._engine.num_workers:
                del self._jobs[number]
                self._count_job(job)
                layout.let_go_of_blocks(self._pool, job.blocks)

    def end(self, request: Any, tables: Tables) -> None:
        """Forget a request that still has its blocks. Its jobs go on, and keep theirs; what is left is stored now."""
        tracked = self._tracked.pop(request.request_id, None)
        if tracked is not None:
            self._note_prefill(tracked.end_prefill())
            self._forget_lookup(tracked)
            # The last token was sampled and has no KV, whatever a step with draft tokens has computed in its place.
            tracked.num_computed_tokens = min(tracked.num_computed_tokens, int(request.num_tokens) - 1)
            _, end = self._open_chunks(tracked)
            self._last_stores += self._begin_store(tracked, tables, (), end, is_over=True)

    def must_keep_stepping(self) -> bool:
        """Return whether an idle engine should go on for the sake of jobs that will soon be over."""
        now = self._clock()
        return any(now - job.begun_at < self._options.deadline_s + _STEPPING_S for job in self._jobs.values())

    def change_weights(self) -> None:
        """Serve nothing that was stored so far: it may belong to other weights, and nobody says to which."""
        weights = f"{self._namespace.weights}/changed in place {uuid.uuid4().hex}"
        self._namespace = replace(self._namespace, weights=weights)
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
            options = parse_request_options(getattr(request, "kv_transfer_params", None), self._options.tenant)
            if getattr(request, "prompt_embeds", None) is not None or getattr(request, "prompt_is_token_ids", None):
                return None  # An input without an identity.
            if getattr(request, "resumable", False):
                return None  # Its tokens may change under their keys.
            media = [MediaItem(*item) for item in layout.media_of(request)]
            salt = str(getattr(request, "cache_salt", None) or "")
            root = self._root(layout.adapter_of(request), salt, options.tenant)
            tracked = Tracked(request, options, root, self._chunk_tokens, media)
            tracked.num_offered = {group.number: 0 for group in self._groups}
            tracked.num_whole_chunks()
        except (ConfigError, KeyInvalid) as error:
            logger.warning("request is not cached request=%s reason=%s", request.request_id, error)
            return None
        if not (options.read or options.write):
            return None
        self._tracked[request.request_id] = tracked
        return tracked

    def _root(self, *place: str) -> Digest:
        if (root := self._roots.get(place)) is None:
            adapter, salt, tenant = place
            root = self._roots[place] = root_digest(self._namespace, adapter=adapter, salt=salt, tenant=tenant)
        return root

    def _ask(self, tracked: Tracked) -> None:
        """Look a request's prefix up, unless that was done and still holds."""
        num_chunks = tracked.num_whole_chunks()
        if self._engine.needs_last_token:
            num_chunks = min(num_chunks, (int(tracked.request.num_tokens) - 1) // self._chunk_tokens)
        num_tails = self._tail_blocks(num_chunks, int(tracked.request.num_tokens))
        if tracked.lookup is not None and self._is_remembered(tracked.lookup, (num_chunks, num_tails)):
            return
        before, tracked.lookup = tracked.lookup, None
        if num_chunks:
            digests = tracked.packed(0, num_chunks)
            end = num_chunks * self._chunk_tokens + num_tails * self._tail_block_tokens
            tails = tracked.tails(end, self._tail_block_tokens) if num_tails else b""
            chunk_us = int(self._pace.seconds(self._chunk_tokens) * 1e6)
            marks = (self._engine.is_copied_by_worker, tracked.was_asked)
            pending = self._client.submit(
                lambda number: wire.Lookup(number, digests, self._needs, tails, chunk_us, *marks)
            )
            tracked.lookup = Lookup((num_chunks, num_tails), pending, is_counted=tracked.was_asked)
            tracked.was_asked |= not pending.is_lost
        self._let_go(tracked, before)  # Behind the new question: what both find is held all the time.

    def _tail_blocks(self, num_chunks: int, num_tokens: int) -> int:
        """Return how many blocks there are behind a sequence's last whole chunk, if it is worth a tail."""
        if not self._tail_block_tokens or num_chunks < _TAIL_BEHIND_MIN:
            return 0
        return (num_tokens - num_chunks * self._chunk_tokens) // self._tail_block_tokens

    def _is_remembered(self, lookup: Lookup, asked: tuple[int, int]) -> bool:
        if lookup.is_claimed or lookup.asked != asked:
            return False
        welcome = self._client.welcome
        ttl_s = welcome.limits.lease_ttl_s if welcome else self._options.deadline_s
        is_fresh = self._clock() - lookup.pending.sent_at < ttl_s * _LEASE_MARGIN
        if self._clock() >= lookup.ask_again_at:
            return False
        # A lookup that is lost, or found nothing, is not repeated: it would not find more before this request is over.
        return is_fresh or lookup.pending.is_lost or (lookup.reply is not None and not lookup.reply.num_chunks)

    def _forget_lookup(self, tracked: Tracked) -> None:
        """Give a lease back, or see to it that it will be when the answer comes."""
        lookup, tracked.lookup = tracked.lookup, None
        self._let_go(tracked, lookup)

    def _let_go(self, tracked: Tracked, lookup: Lookup | None) -> None:
        if lookup is None or lookup.is_claimed or lookup.pending.is_lost:
            return
        self._abandoned.append((tracked, lookup))
        self._settle_abandoned()

    def _settle_abandoned(self) -> None:
        if not self._abandoned:
            return
        self._client.poll()
        waiting = []
        for tracked, lookup in self._abandoned:
            if not lookup.pending.is_over:
                waiting.append((tracked, lookup))
                continue
            self._count_lookup(lookup)
            if lookup.reply is not None and lookup.reply.lease:
                tracked.note_found(lookup.reply.num_chunks)  # What the daemon has need not be offered.
                self._client.submit(functools.partial(wire.Release, lease=lookup.reply.lease))
        self._abandoned = waiting

    def _count_lookup(self, lookup: Lookup) -> None:
        """Count a lookup that is over as the daemon does."""
        if not lookup.is_counted:
            lookup.is_counted = True
            self._tally.note_lookup(lookup.reply, lookup.asked[0], self._chunk_tokens)

    def _count_job(self, job: _Job) -> None:
        """Count a job that all workers are done with."""
        if job.digests is not None:
            self._tally.note_load(self._clock() - job.begun_at, job.num_tokens, has_failed=job.has_failed)
        elif not job.has_failed:
            self._tally.add("tokens_stored", job.num_tokens)

    def _is_anybody_waiting(self) -> bool:
        """Return whether a request waits for a tier."""
        lookups = [tracked.lookup for tracked in self._tracked.values()]
        return any(lookup is not None and lookup.ask_again_at < math.inf for lookup in lookups)

    def _note_prefill(self, prefill: Prefill | None) -> None:
        if prefill is not None:
            self._pace.note(prefill.num_tokens - prefill.num_before, self._clock() - prefill.began_at)

    def _begin_load(self, tracked: Tracked, lookup: Lookup, tables: Tables, num_external_tokens: int) -> None:
        assert lookup.reply is not None
        num_local = tracked.num_local_tokens
        num_chunks, num_left = divmod(num_local + num_external_tokens, self._chunk_tokens)
        planned = [
            plan_load(
                group, tables[group.number], num_chunks=num_chunks, chunk_tokens=self._chunk_tokens,
                num_local_tokens=num_local,
            )
            for group in self._groups
        ]  # fmt: skip
        if num_left:
            planned.append(plan_tail_load(self._groups[0], tables, num_chunks, num_left))
        parts = tuple(self._with_places(part, lookup.reply.places) for part in planned if part is not None)
        block_ids = [block_id for part in parts for block_id in part.block_ids[part.num_skipped_blocks :]]
        digests = frozenset(split_digests(tracked.packed(num_local // self._chunk_tokens, num_chunks)))
        number = self._hold(block_ids, num_external_tokens, digests)
        lookup.is_claimed = True
        tracked.lose_blocks()
        self._loads.append(LoadJob(number, tracked.request.request_id, lookup.reply.lease, parts))

    def _with_places(self, part: LoadPart, places: Sequence[wire.RowPlaces]) -> LoadPart:
        if not places:
            return part
        number, group = next((at, one) for at, one in enumerate(self._groups) if one.number == part.group)
        num_chunks = 1 if part.is_tail else len(part.block_ids) // group.stored_blocks_per_chunk
        return replace(part, places=find_places(part, num_chunks, places, number))

    def _open_chunks(self, tracked: Tracked) -> tuple[int, int]:
        """Return from where on some group's chunks were not offered, and where those end that are whole by now."""
        end = min(tracked.num_computed_tokens // self._chunk_tokens, tracked.num_whole_chunks())
        # A draft group's last chunk waits for the next one, or for the request's end.
        return min(tracked.num_offered[group.number] + group.is_draft for group in self._groups), end

    def _begin_store(
        self, tracked: Tracked, tables: Tables, states: States, end: int, *, is_over: bool = False
    ) -> list[StoreJob]:
        """Store what is whole after this step and still there, as far as blocks may be held for it."""
        if not tables or not tracked.options.write or not self._client.is_connected or self._client.is_late:
            return []
        num_free = self._held_max - sum(len(job.blocks) for job in self._jobs.values())
        chosen: dict[int, dict[int, list[int]]] = {group.number: {} for group in self._groups}
        boundaries = {(group, tokens): block_id for group, block_id, tokens in states}
        for chunk in range(min(tracked.num_offered.values()), end):
            is_trailing = chunk == end - 1 and not is_over
            found = {
                group.number: self._blocks_to_store(group, tables[group.number], boundaries, chunk)
                for group in self._groups
                if _is_next(tracked, group, chunk) and not (group.is_draft and is_trailing)
            }
            num_free -= sum(len(block_ids or ()) for block_ids in found.values())
            if num_free < 0:
                break
            for number, block_ids in found.items():
                if block_ids is not None:
                    tracked.num_offered[number] = chunk + 1
                if block_ids:
                    chosen[number][chunk] = block_ids
        parts = [plan_store(tracked, group, chosen[group.number]) for group in self._groups if chosen[group.number]]
        if is_over and all(num_offered == end for num_offered in tracked.num_offered.values()):
            parts += self._tail_to_store(tracked, tables, end, num_free)
        block_ids = [block_id for part in parts for block_id in part.block_ids]
        num_tail_tokens = sum(len(part.block_ids) * self._tail_block_tokens for part in parts if part.is_tail)
        num_tokens = len(chosen[self._counted_group]) * self._chunk_tokens + num_tail_tokens
        return [StoreJob(self._hold(block_ids, num_tokens), tuple(parts), tracked.options.tenant)] if parts else []

    def _tail_to_store(self, tracked: Tracked, tables: Tables, end: int, num_free: int) -> list[StorePart]:
        """Return what a request leaves behind its last whole chunk, if that is kept."""
        num_blocks = self._tail_blocks(end, tracked.num_computed_tokens)
        if not 0 < num_blocks <= num_free:
            return []
        (group,) = self._groups
        first = end * group.blocks_per_chunk
        block_ids = tuple(tables[group.number][first : first + num_blocks])
        if len(block_ids) < num_blocks or layout.NULL_BLOCK in block_ids:
            return []
        tails = tracked.tails(end * self._chunk_tokens + num_blocks * group.block_tokens, group.block_tokens)
        return [StorePart(group.number, tails[-DIGEST_NBYTES:], tracked.digest(end - 1), block_ids, is_tail=True)]

    def _blocks_to_store(
        self, group: EngineGroup, table: Sequence[int], boundaries: Mapping[tuple[int, int], int], chunk: int
    ) -> list[int] | None:
        """Return a chunk's blocks; none of them if they are gone for good, and None if they should be there."""
        if group.kind is GroupKind.RECURRENT:
            block_id = boundaries.get((group.number, (chunk + 1) * self._chunk_tokens))
            return [block_id] if block_id else []
        block_ids = stored_blocks(group, table, chunk)
        return block_ids if block_ids is not None or group.kind is GroupKind.FULL else []

    def _hold(self, block_ids: Sequence[int], num_tokens: int, digests: frozenset[Digest] | None = None) -> int:
        number = self._next_job
        self._next_job += 1
        self._jobs[number] = _Job(layout.hold_blocks(self._pool, block_ids), self._clock(), num_tokens, digests)
        return number


def _is_next(tracked: Tracked, group: EngineGroup, chunk: int) -> bool:
    """Return whether a chunk was not offered, and all before it were where chunks hang on each other."""
    num_offered = tracked.num_offered[group.number]
    return num_offered == chunk if group.kind is GroupKind.FULL else num_offered <= chunk
