"""An engine that schedules as vLLM does, with both sides of the connector and a whole daemon, and no thread or time.

Pages are stamps of the tokens that they stand for, so whatever the engine computes from is right or wrong at a glance;
a block that is taken is ``GUARD`` from end to end. Nothing happens but by a call of the test's.
"""

from __future__ import annotations

import itertools
import random
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

from kvist.model.coverage import first_needed
from kvist.model.keys import (
    DIGEST_NBYTES,
    Digest,
    Namespace,
    as_tokens,
    chain_digests,
    root_digest,
    split_digests,
    tail_digests,
)
from kvist.model.layout import GroupKind
from kvist.model.rows import Row, RowMemory, row_memory
from kvist.wire import messages as wire
from tests.support.engine import describe_rows
from tests.support.engine_blocks import Pool, Table
from tests.support.engine_sorts import CHUNK_TOKENS, PAGE_NBYTES, Sort
from tests.support.fake_vllm import adapter
from tests.support.memory import GUARD, SharedMemory, stamp
from tests.support.simulated import SimulatedDaemon
from tests.support.simulated_client import DEADLINE_S, Link

RUNNING_MAX = 4


@dataclass(eq=False)
class Request:
    request_id: str
    all_token_ids: list[int]
    num_left: int
    """Tokens to decode."""
    num_computed_tokens: int = 0
    status: str = "waiting"
    tables: list[Table] = field(default_factory=list)
    was_preempted: bool = False

    @property
    def num_tokens(self) -> int:
        return len(self.all_token_ids)


def named(request: wire.Store | wire.Retrieve) -> list[int]:
    """Return the blocks that a request reads or writes."""
    skipped = request.num_skipped_blocks if isinstance(request, wire.Retrieve) else 0
    return memoryview(request.block_ids).cast("i").tolist()[skipped:]


class Engine:
    """A scheduler, a worker, their connectors, and requests that are answered from right bytes or not at all."""

    def __init__(self, daemon: SimulatedDaemon, sort: Sort, chance: random.Random) -> None:
        self.daemon, self.sort, self.chance = daemon, sort, chance
        self.memory = SharedMemory(sort.num_blocks * PAGE_NBYTES, name="kvist-scheduled")
        self.pages = self.memory.bytes.reshape(sort.num_blocks, PAGE_NBYTES)
        self.pages[:] = GUARD
        self.pool = Pool(sort.num_blocks, self._block_taken)
        self.groups = sort.engine_groups()
        self.rows: list[RowMemory] = [
            row_memory(Row(number, 0), group, CHUNK_TOKENS) for number, group in enumerate(sort.layer_groups())
        ]
        self.worker_link = Link(daemon, "worker", self._check_sent)
        self.worker_link.submit(self._registration, [self.memory.fd])
        daemon.settle()
        self.scheduler_link = Link(daemon, "scheduler")
        self.connector = self._connect()
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []
        self.ended: dict[str, Request] = {}
        """Whose load is still under way."""
        self.prefixes: dict[bytes, tuple[int, ...]] = {}
        self.sequences: list[list[int]] = []
        """Of requests that are over."""
        self.seen: Counter[str] = Counter()
        self.stats = adapter("stats").KvistStats()
        """All that the connector has told of itself."""
        self._promised: dict[str, tuple[int, int, tuple[int, ...]]] = {}
        """Loads that are under way: tokens that the engine has itself, with those of the load, and its groups."""
        self._ids = itertools.count()

    def _connect(self) -> Any:
        options = adapter("options").Options(deadline_s=DEADLINE_S)
        namespace = Namespace("model", "", "bf16", "layout", "1", CHUNK_TOKENS)
        self._root = root_digest(namespace)
        facts = adapter("groups").EngineFacts(
            groups=self.groups, needs=tuple(group.need for group in self.groups), num_workers=1,
            num_blocks=self.sort.num_blocks, held_share_max=0.25, has_prefix_cache=True,
        )  # fmt: skip
        side = adapter("scheduler").SchedulerSide
        tally = adapter("stats").Tally()
        scheduler = side(self.scheduler_link, options, namespace, facts, clock=lambda: self.daemon.now, tally=tally)
        worker = adapter("worker").WorkerSide(deadline_s=DEADLINE_S, clock=lambda: self.daemon.now, tally=tally)
        worker.connect(self.worker_link)
        kind = adapter("connector").KvistConnector
        connector = kind.__new__(kind)
        connector.__dict__.update(
            _scheduler=scheduler, _worker=worker, _undone={}, _meta=None, _failed_blocks=set(), _refusal="",
            _faults=set(), _tells_blocks=self.tells_blocks, _cut=SimpleNamespace(groups=self.groups), _tally=tally,
        )  # fmt: skip
        connector.bind_gpu_block_pool(self.pool)
        return connector

    @property
    def tells_blocks(self) -> bool:
        return [group.kind for group in self.groups] == [GroupKind.FULL]

    def _registration(self, request_id: int) -> wire.Register:
        return describe_rows(self.rows, [self.memory.nbytes], request_id, chunk_tokens=CHUNK_TOKENS)

    # ── what bytes must be ──────────────────────────────────────────────────────────────────────────────────────

    def page(self, group: Any, tokens: Sequence[int]) -> bytes:
        """Return the page of the block that ends with the last of ``tokens``."""
        return stamp(repr((group.number, tuple(tokens))).encode(), PAGE_NBYTES)

    def holds(self, block_id: int, group: Any, tokens: Sequence[int]) -> bool:
        return bool(self.pages[block_id].tobytes() == self.page(group, tokens))

    def _check_sent(self, request: wire.Request) -> None:
        """Hold what is named against references, needs and, for a store, bytes."""
        if not isinstance(request, wire.Store | wire.Retrieve):
            return
        group = self.groups[request.row]
        ids = named(request)
        held = {block.block_id for job in self.connector._scheduler._jobs.values() for block in job.blocks}
        assert held.issuperset(ids), "a block is named without a reference"
        assert 0 not in ids
        if isinstance(request, wire.Store):
            size = request.tail_blocks or group.stored_blocks_per_chunk
            for number, digest in enumerate(split_digests(request.digests)):
                tokens = self.prefixes[digest]
                for at, block_id in enumerate(ids[number * size : (number + 1) * size]):
                    end = len(tokens) - (size - 1 - at) * group.block_tokens
                    assert self.holds(block_id, group, tokens[:end]), f"{group} {end} of {len(tokens)}"
            self.seen["stored a tail" if request.tail_blocks else f"stored {group.kind.value}"] += len(ids) // size
        else:
            self.seen["asked for a tail"] += bool(request.tail_blocks)

    def _block_taken(self, block_id: int) -> None:
        """Fill a block that changes hands; nobody may have it in mind any more."""
        self.pages[block_id] = GUARD
        for _, request in self.worker_link.pending.values():
            if isinstance(request, wire.Store | wire.Retrieve):
                assert block_id not in named(request), "a named block changes hands"

    def _local(self, request: Request) -> tuple[int, list[list[Any]]]:
        """Return the longest prefix that the engine's own cache can go on from, and its blocks."""
        step = max(group.block_tokens for group in self.groups)
        tokens = tuple(request.all_token_ids)
        for length in range((len(tokens) - 1) // step * step, 0, -step):
            found = [self._local_blocks(group, tokens, length) for group in self.groups]
            if all(blocks is not None for blocks in found):
                return length, found  # type: ignore[return-value]
        return 0, [[] for _ in self.groups]

    def _local_blocks(self, group: Any, tokens: tuple[int, ...], length: int) -> list[Any] | None:
        skipped = Table(group, self.pool).num_skipped(length)
        blocks = [self.pool.blocks[0]] * skipped
        for at in range(skipped, length // group.block_tokens):
            block = self.pool.cached.get((group.number, tokens[: (at + 1) * group.block_tokens]))
            if block is None:
                return None
            blocks.append(block)
        return blocks

    # ── what may happen ─────────────────────────────────────────────────────────────────────────────────────────

    def add(self, tokens: list[int], num_decoded: int) -> None:
        request = Request(f"r{next(self._ids)}", tokens, num_decoded)
        self._learn_prefixes(request)
        self.waiting.append(request)
        self.connector.on_new_request(request)

    def end(self, request: Request) -> None:
        """Let a request be over: aborted, or answered."""
        self.sequences.append(request.all_token_ids)
        for table in request.tables:
            table.let_go(request.num_computed_tokens if request.status == "running" else 0)
        self.connector.request_finished_all_groups(request, tuple(table.ids for table in request.tables))
        (self.running if request in self.running else self.waiting).remove(request)
        if request.status == "loading":
            self.ended[request.request_id] = request
        else:
            self._free(request)

    def step(self, budget: int) -> None:
        """Schedule, compute, load, store, report: one step."""
        output = self._schedule(budget)
        meta = self.connector.build_connector_meta(output)
        self._check_loads(meta)
        self.connector.bind_connector_metadata(meta)
        for request in self.running:
            if num_tokens := output.num_scheduled_tokens.get(request.request_id):
                self._compute(request, num_tokens)
        self.connector.start_load_kv(None)
        if output.total_num_scheduled_tokens or self.sort.is_told:
            self.connector.wait_for_save()
        self._take_results()
        for request in list(self.running):
            if request.request_id in output.num_scheduled_tokens:
                self._sample(request)
        assert not self.connector._faults, self.connector._faults

    def _schedule(self, budget: int) -> Any:
        self._output = SimpleNamespace(
            scheduled_new_reqs=[], num_scheduled_tokens={}, preempted_req_ids=set(), total_num_scheduled_tokens=0,
            scheduled_cached_reqs=SimpleNamespace(
                req_ids=[], new_block_ids=[], num_computed_tokens=[], resumed_req_ids=set()
            ),
        )  # fmt: skip
        self._offers: dict[str, list[tuple[int, int, int]]] = {}
        for request in list(self.running):
            if request in self.running and (num := self._fit(request, budget)):
                before = [len(table.blocks) for table in request.tables]
                if self._make_room(request, num):
                    budget -= self._schedule_tokens(request, num)
                    added = [table.ids[at:] for table, at in zip(request.tables, before, strict=True)]
                    self._tell(request, added if any(added) else None)
        for request in list(self.waiting):
            if budget and len(self.running) < RUNNING_MAX and not self._output.preempted_req_ids:
                budget -= self._admit(request, budget)
        output = self._output
        output.total_num_scheduled_tokens = sum(output.num_scheduled_tokens.values())
        if self.sort.is_told:
            there = {request.request_id: request for request in self.running}
            output.kv_connector_block_state = SimpleNamespace(
                boundary_state_offloads=self._offers,
                get_block_ids=lambda request_id: tuple(table.ids for table in there[request_id].tables),
            )
        return output

    def _tell(self, request: Request, added: list[list[int]] | None) -> None:
        cached = self._output.scheduled_cached_reqs
        cached.req_ids.append(request.request_id)
        cached.new_block_ids.append(added)
        cached.num_computed_tokens.append(request.num_computed_tokens)

    def _fit(self, request: Request, budget: int) -> int:
        """Return how many tokens to compute; a prefill ends where a state is kept."""
        computed = request.num_computed_tokens
        end = min(request.num_tokens, computed + budget)
        for group in self.groups:
            if group.kind is GroupKind.RECURRENT and computed < request.num_tokens - 1:
                last = (request.num_tokens - 1) // group.block_tokens * group.block_tokens
                if end < request.num_tokens or last > computed:
                    end = max(computed, min(end, last) // group.block_tokens * group.block_tokens)
        return end - computed

    def _make_room(self, request: Request, num: int) -> bool:
        """Take blocks for a running request, from those that began after it if need be."""
        for table in request.tables:
            table.let_go(request.num_computed_tokens)
        end = request.num_computed_tokens + num
        while sum(table.num_missing(end) for table in request.tables) > len(self.pool.free):
            self._preempt(last := self.running[-1])
            if last is request:
                return False
        return True

    def _schedule_tokens(self, request: Request, num: int) -> int:
        end = request.num_computed_tokens + num
        for table in request.tables:
            table.grow(end)
            is_kept = table.group.kind is GroupKind.RECURRENT and end % table.group.block_tokens == 0
            if is_kept and self.chance.random() < 0.8:
                offer = table.group.number, table.ids[end // table.group.block_tokens - 1], end
                self._offers.setdefault(request.request_id, []).append(offer)
        self._output.num_scheduled_tokens[request.request_id] = num
        return num

    def _preempt(self, request: Request) -> None:
        self.seen["preempted"] += 1
        self.running.remove(request)
        self._free(request)
        request.status, request.was_preempted = "waiting", True
        self._output.preempted_req_ids.add(request.request_id)
        self.waiting.appendleft(request)

    def _admit(self, request: Request, budget: int) -> int:
        """Begin a request, or its load; return how many tokens are computed of it in this step."""
        if request.status == "loading":
            return 0
        num_external = num_local = 0
        tables, local = request.tables, [[] for _ in self.groups]
        is_fresh = not request.num_computed_tokens
        if is_fresh:
            num_local, local = self._local(request)
            num_external, is_async = self.connector.get_num_new_matched_tokens(request, num_local)
            if num_external is None:
                self.seen["put off"] += 1
                return 0
            assert is_async is bool(num_external)
            assert num_local + num_external <= request.num_tokens
            tables = [Table(group, self.pool) for group in self.groups]
        total = request.num_computed_tokens or num_local + num_external
        request.num_computed_tokens = total
        num = 0 if num_external else self._fit(request, budget)
        whole = request.num_tokens + request.num_left if num_external else total + num
        if (not num and not num_external) or not self._has_room(request, tables, total, whole):
            request.num_computed_tokens = 0 if is_fresh else total
            return 0
        loaded = self.connector.get_loaded_kv_cache_group_ids(request) if num_external else ()
        if is_fresh:
            request.tables = tables
            for table, blocks in zip(tables, local, strict=True):
                table.adopt(blocks, total)
        for table in tables:
            table.grow(total)
        blocks = SimpleNamespace(get_block_ids=lambda: tuple(table.ids for table in tables))
        self.connector.update_state_after_alloc(request, blocks, num_external)
        if num_external:
            request.status = "loading"
            self._promised[request.request_id] = num_local, total, loaded
            return 0
        return self._begin(request, num)

    def _begin(self, request: Request, num: int) -> int:
        self.waiting.remove(request)
        self.running.append(request)
        request.status = "running"
        self._schedule_tokens(request, num)
        ids = [table.ids for table in request.tables]
        if request.was_preempted and not self.sort.is_v2:
            self._tell(request, ids)
            self._output.scheduled_cached_reqs.resumed_req_ids.add(request.request_id)
        else:
            new = SimpleNamespace(
                req_id=request.request_id, block_ids=ids, num_computed_tokens=request.num_computed_tokens
            )
            self._output.scheduled_new_reqs.append(new)
        return num

    def _has_room(self, request: Request, tables: list[Table], total: int, end: int) -> bool:
        """Say whether there are blocks for a request, and for those that wait with their blocks loaded."""
        others = [one for one in self.waiting if one.tables and one is not request]
        wanted = sum(
            -(-(one.num_tokens + one.num_left) // table.group.block_tokens) - len(table.blocks)
            for one in others
            for table in one.tables
        )
        wanted += sum(
            max(0, -(-end // table.group.block_tokens) - max(table.num_skipped(total), len(table.blocks)))
            for table in tables
        )
        return wanted <= len(self.pool.free)

    def _compute(self, request: Request, num: int) -> None:
        """Compute tokens, from what is right, and write what is right."""
        computed, tokens = request.num_computed_tokens, request.all_token_ids
        end = request.num_computed_tokens = computed + num
        for table in request.tables:
            group, size = table.group, table.group.block_tokens
            for at in range(table.num_skipped(computed), -(-computed // size)):
                ends = {computed} if group.kind is GroupKind.RECURRENT else {min((at + 1) * size, computed)}
                ends |= {(at + 1) * size} if group.kind is GroupKind.FULL else set()
                assert any(self.holds(table.ids[at], group, tokens[:last]) for last in ends), (group, at, computed)
            first = (end - 1) // size if group.kind is GroupKind.RECURRENT else computed // size
            for at in range(first, -(-end // size)):
                block_end = min((at + 1) * size, end)
                page = self.page(group, tokens[:block_end])
                self.pages[table.ids[at]] = list(page)
                if block_end == (at + 1) * size:
                    self.pool.remember(table.blocks[at], (group.number, tuple(tokens[:block_end])))

    def _sample(self, request: Request) -> None:
        if request.num_computed_tokens < request.num_tokens:
            return
        request.all_token_ids.append(self.chance.randrange(3))
        self._learn_prefixes(request)
        request.num_left -= 1
        if request.num_left <= 0:
            self.seen["answered"] += 1
            self.end(request)

    def _take_results(self) -> None:
        connector = self.connector
        if self.sort.is_told:
            results = connector.get_transfer_results(set())
            finished, failed = results.finished_recving, results.failed_recving
        else:
            finished, failed = connector.get_finished(set())[1] or set(), set()
        invalid = connector.get_block_ids_with_load_errors()
        assert failed <= finished
        assert self.tells_blocks or not invalid
        self._fail_blocks(invalid)
        for request_id in finished:
            num_local, total, _ = self._promised.pop(request_id)
            if request_id in self.ended:
                self._free(self.ended.pop(request_id))
                continue
            request = next(one for one in self.waiting if one.request_id == request_id)
            request.status = "waiting"
            if request_id in failed:
                request.num_computed_tokens = 0
            if not request.num_computed_tokens:
                self._free(request)
            is_whole = request.num_computed_tokens == total
            self.seen["loaded" if is_whole else "failed"] += 1
            self.seen["loaded behind own"] += is_whole and num_local > 0
            if request.num_computed_tokens == request.num_tokens:
                request.num_computed_tokens -= 1
        worker_meta = connector.build_connector_worker_meta()
        connector.update_connector_output(SimpleNamespace(kv_connector_worker_meta=worker_meta, failed_recving=failed))
        if (stats := connector.get_kv_connector_stats()) is not None:
            assert not stats.is_empty()
            self.stats = self.stats.aggregate(stats)

    def _fail_blocks(self, invalid: set[int]) -> None:
        for request in self.waiting:
            for at, block_id in enumerate(request.tables[0].ids if request.tables else ()):
                if block_id in invalid and request.status == "loading":
                    request.num_computed_tokens = at * self.groups[0].block_tokens
                    break

    def _free(self, request: Request) -> None:
        for table in request.tables:
            table.clear()
        request.tables, request.num_computed_tokens = [], 0

    def _check_loads(self, meta: Any) -> None:
        """A load writes exactly what each group needs and the engine does not have."""
        for job in meta.loads:
            request = next(one for one in self.waiting if one.request_id == job.request_id)
            num_local, total, loaded = self._promised[job.request_id]
            num_chunks = total // CHUNK_TOKENS
            whole = [part for part in job.parts if not part.is_tail]
            assert tuple(part.group for part in whole) == loaded
            behind = request.tables[0].ids[num_chunks * self.groups[0].blocks_per_chunk :]
            tail = behind[: total % CHUNK_TOKENS // self.groups[0].block_tokens]
            assert [part.block_ids for part in job.parts if part.is_tail] == ([tuple(tail)] if tail else [])
            for table in request.tables:
                group, size = table.group, table.group.block_tokens
                expected = {
                    table.ids[at]
                    for chunk in range(first_needed(group.need, num_chunks), num_chunks)
                    for at in range((chunk + 1) * group.blocks_per_chunk)[-group.stored_blocks_per_chunk :]
                    if at * size >= num_local and table.ids[at]
                }
                written = [part.block_ids[part.num_skipped_blocks :] for part in whole if part.group == group.number]
                assert {block_id for block_ids in written for block_id in block_ids} == expected
                skipped = [part.num_skipped_blocks for part in whole if part.group == group.number]
                self.seen["skipped"] += any(skipped)

    def _learn_prefixes(self, request: Request) -> None:
        tokens = request.all_token_ids
        num_chunks = len(tokens) // CHUNK_TOKENS
        packed = chain_digests(self._root, as_tokens(tokens[: num_chunks * CHUNK_TOKENS]), CHUNK_TOKENS)
        for chunk, digest in enumerate(split_digests(bytes(packed))):
            self.prefixes[digest] = tuple(tokens[: (chunk + 1) * CHUNK_TOKENS])
        start, parent = num_chunks * CHUNK_TOKENS, Digest(bytes(packed)[-DIGEST_NBYTES:] or self._root)
        tails = tail_digests(parent, as_tokens(tokens[start:]), self.groups[0].block_tokens, start=start)
        for number, digest in enumerate(split_digests(tails), 1):
            self.prefixes[digest] = tuple(tokens[: start + number * self.groups[0].block_tokens])

    def check_idle(self) -> None:
        """Nothing is held any more, by anybody."""
        assert not self.connector._scheduler._jobs
        assert not self.connector._scheduler._tracked
        assert not self._promised
        assert not self.ended
        assert len(self.pool.free) == self.sort.num_blocks - 1

    def close(self) -> None:
        """End both sessions."""
        for link in (self.scheduler_link, self.worker_link):
            self.daemon.service.close_session(link.session, lambda: None)
        self.daemon.settle()
        self.memory.close()
