"""What the scheduler's side promises, begins, names and remembers, one step at a time."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from kvist.client.client import Build, Pending
from kvist.client.planning import Places
from kvist.model.keys import DIGEST_NBYTES, Digest, Namespace, split_digests
from kvist.model.layout import GroupKind
from kvist.wire import messages as wire
from tests.support.engine_blocks import Pool
from tests.support.engine_sorts import CHUNK_TOKENS, Sort
from tests.support.fake_vllm import adapter
from tests.support.scheduled import Request

FULL, WINDOW, CHUNKED, RECURRENT = GroupKind.FULL, GroupKind.WINDOW, GroupKind.CHUNKED, GroupKind.RECURRENT
WITH_WINDOW = ((FULL, 8, None, False), (WINDOW, 4, 8, False))
WITH_STATE = ((FULL, 8, None, False), (RECURRENT, 16, None, False))
WITH_DRAFT = ((FULL, 8, None, False), (FULL, 8, None, True))


class Finder:
    """A client that finds as many chunks as it is told."""

    def __init__(self) -> None:
        self.now = 0.0
        self.num_found = 0
        self.tail_found = 0
        self.places: tuple[wire.RowPlaces, ...] = ()
        self.num_loading = self.loading_ms = 0
        self.is_slow = False
        self.answers: list[tuple[Pending, wire.Reply]] = []
        self.rests: list[float] = []
        """For how long it was told to wait."""
        self.sent: list[wire.Request] = []
        self.is_connected, self.is_late, self.welcome = True, False, None

    def submit(self, build: Build) -> Pending:
        request = build(len(self.sent) + 1)
        self.sent.append(request)
        found = min(self.num_found, len(getattr(request, "digests", b"")) // DIGEST_NBYTES)
        lease = b"lease %d" % request.id if found else b""
        loading = (self.num_loading, self.loading_ms)
        reply = wire.LookupReply(request.id, found, lease, self.tail_found, *loading, self.places)
        pending = Pending(request.id, self.now, None if self.is_slow else reply)
        self.answers.append((pending, reply))
        return pending

    def poll(self, timeout_s: float = 0.0) -> None:
        self.rests += [timeout_s] if timeout_s else []

    def wait(self, pending: Pending, deadline_s: float) -> None:
        self.rests.append(deadline_s)

    def answer(self) -> None:
        """Let everything be answered that was slow."""
        for pending, reply in self.answers:
            pending.reply = reply


class Bench:
    """A connector's scheduler side, and a hand that plays vLLM."""

    def __init__(self, groups: Any, *, is_told: bool = True, held_share_max: float = 1.0) -> None:
        self.sort = Sort(groups, 100, is_told=is_told)
        self.client = Finder()
        self.pool = Pool(100, lambda _: None)
        engine_groups = self.sort.engine_groups()
        needs = [
            replace(group.need, num_shards=2 + group.number, num_readers=3 - group.number) for group in engine_groups
        ]
        facts = adapter("groups").EngineFacts(
            groups=engine_groups, needs=tuple(needs), num_workers=1, num_blocks=100, held_share_max=held_share_max,
            has_prefix_cache=True,
        )  # fmt: skip
        namespace = Namespace("model", "", "bf16", "layout", "1", CHUNK_TOKENS)
        side = adapter("scheduler").SchedulerSide
        tally = adapter("stats").Tally()
        self.side = side(
            self.client, adapter("options").Options(), namespace, facts, clock=lambda: self.client.now, tally=tally
        )
        kind = adapter("connector").KvistConnector
        self.connector = kind.__new__(kind)
        self.connector.__dict__.update(
            _scheduler=self.side,
            _worker=None,
            _undone={},
            _refusal="",
            _faults=set(),
            _tells_blocks=False,
            _tally=tally,
        )
        self.side.bind_pool(self.pool)

    def request(self, num_tokens: int) -> Request:
        request = Request("r", list(range(num_tokens)), 0)
        self.connector.on_new_request(request)
        return request

    def allocate(self, request: Request, num_external: int, *tables: list[int]) -> None:
        self.pool.touch([self.pool.blocks[block_id] for table in tables for block_id in table if block_id])
        blocks = SimpleNamespace(get_block_ids=lambda: tables)
        self.connector.update_state_after_alloc(request, blocks, num_external)

    def step(
        self, computed: int, num: int, *tables: list[int], states: Any = (), preempted: Any = (), is_new: bool = False
    ) -> Any:
        """Compute tokens of the request; its tables are told whole, or what is new of them."""
        cached = SimpleNamespace(req_ids=[], new_block_ids=[], num_computed_tokens=[], resumed_req_ids=set())
        new = []
        if num and is_new:
            new = [SimpleNamespace(req_id="r", block_ids=tables, num_computed_tokens=computed)]
        elif num:
            cached.req_ids, cached.new_block_ids, cached.num_computed_tokens = ["r"], [tables or None], [computed]
        output = SimpleNamespace(
            scheduled_new_reqs=new, scheduled_cached_reqs=cached, num_scheduled_tokens={"r": num} if num else {},
            preempted_req_ids=set(preempted), total_num_scheduled_tokens=num,
        )  # fmt: skip
        if self.sort.is_told:
            offers = {"r": list(states)} if states else {}
            output.kv_connector_block_state = SimpleNamespace(
                boundary_state_offloads=offers, get_block_ids=lambda _: tables
            )
        meta = self.connector.build_connector_meta(output)
        assert not self.connector._faults
        return meta

    @property
    def held(self) -> list[int]:
        return sorted(block.block_id for job in self.side._jobs.values() for block in job.blocks)


def stored(meta: Any) -> list[tuple[int, int, tuple[int, ...]]]:
    """Return (group, chunks, blocks) of what a step stores."""
    return [(part.group, len(part.digests) // 16, part.block_ids) for job in meta.stores for part in job.parts]


def test_a_lookup_tells_needs_shards_and_readers():
    """The daemon is asked with what each group needs, by its order, on all its shards, for all its readers."""
    bench = Bench(WITH_WINDOW)
    bench.request(40)
    (lookup,) = bench.client.sent
    assert lookup.needs == (wire.NeedSpec("full", None, 2, 3), wire.NeedSpec("window", 1, 3, 2))


@pytest.mark.parametrize(
    ("groups", "num_tokens", "num_asked"),
    [(WITH_WINDOW, 48, 2), (WITH_WINDOW, 49, 3), (WITH_STATE, 32, 1), (WITH_DRAFT, 48, 3)],
)
def test_a_token_is_left_to_compute_unless_all_groups_are_full(groups: Any, num_tokens: int, num_asked: int):
    """A prompt of whole chunks is asked for without its last one where the engine could not go back by a token."""
    bench = Bench(groups)
    bench.request(num_tokens)
    assert len(bench.client.sent[0].digests) == num_asked * DIGEST_NBYTES


@pytest.mark.parametrize("groups", [WITH_WINDOW, WITH_DRAFT], ids=["full and window", "full"])
def test_a_hit_is_what_is_found_and_not_there(groups: Any):
    """For every length, and chunks and blocks that the daemon and the engine have: what else is found, if it is a chunk
    or more. It never reaches behind the prompt, nor to its end where a token must be left to compute.
    """
    for num_tokens in range(1, 65):
        for num_found in range(num_tokens // CHUNK_TOKENS + 1):
            for num_local in range(0, num_tokens + 1, 8):
                bench = Bench(groups)
                bench.client.num_found = num_found
                promised, is_async = bench.connector.get_num_new_matched_tokens(bench.request(num_tokens), num_local)
                last = num_tokens - (groups is WITH_WINDOW)
                best = min(num_found, last // CHUNK_TOKENS) * CHUNK_TOKENS - num_local
                assert promised == (best if best >= CHUNK_TOKENS else 0)
                assert is_async is (promised > 0)
                assert num_local + promised <= max(last, num_local)


@pytest.mark.parametrize(
    "nameless", [{"prompt_embeds": object()}, {"prompt_is_token_ids": [True, False]}, {"resumable": True}], ids=list
)
def test_what_has_no_name_is_not_cached(nameless: dict[str, Any]):
    """Embeddings in a prompt, and tokens that may still change, are neither asked for nor stored; tokens alone are."""
    for more, is_cached in ((nameless, False), ({}, True)):
        bench = Bench(WITH_WINDOW)
        bench.client.num_found = 1
        request = Request("r", list(range(40)), 0)
        request.__dict__.update(more)
        bench.connector.on_new_request(request)
        assert bool(bench.client.sent) is is_cached
        assert bench.connector.get_num_new_matched_tokens(request, 0) == ((16, True) if is_cached else (0, False))
        stores = stored(bench.step(0, 40, [1, 2, 3, 4, 5], list(range(6, 16)), is_new=True))
        assert bool(stores) is is_cached


def test_a_prompt_is_named_with_what_it_shows():
    """One text with two images has one name before the image and two from its chunk on; the same image under another
    request has one.
    """

    def names(identifier: str) -> list[Digest]:
        bench = Bench(WITH_WINDOW)
        place = SimpleNamespace(offset=20, length=5)
        request = Request(identifier, list(range(49)), 0)
        request.__dict__["mm_features"] = [SimpleNamespace(identifier=identifier, mm_position=place)]
        bench.connector.on_new_request(request)
        return split_digests(bench.client.sent[0].digests)

    one, other, again = names("one"), names("other"), names("one")
    assert one == again
    assert [left == right for left, right in zip(one, other, strict=True)] == [True, False, False]


def test_what_the_engine_has_itself_is_not_waited_for():
    """A request of which less than a chunk is left is not kept; what the late answer names is not offered again."""
    bench = Bench(((FULL, 8, None, False),))
    bench.client.is_slow, bench.client.num_found = True, 2
    request = bench.request(40)
    assert bench.connector.get_num_new_matched_tokens(request, 32) == (0, False)
    assert not bench.client.rests
    bench.allocate(request, 0, [1, 2, 3, 4, 5])
    bench.client.answer()
    assert stored(bench.step(32, 8, [1, 2, 3, 4, 5], is_new=True)) == []
    assert bench.client.sent[-1] == wire.Release(2, b"lease 1")


def test_a_load_is_held_and_names_its_groups():
    """A load fills what each group needs; these blocks and no others are held, until it is settled."""
    bench = Bench(WITH_WINDOW)
    bench.client.num_found = 2
    request = bench.request(40)
    assert bench.connector.get_num_new_matched_tokens(request, 0) == (32, True)
    assert bench.connector.get_loaded_kv_cache_group_ids(request) == (0, 1)
    bench.allocate(request, 32, [1, 2, 3, 4], [0, 0, 0, 0, 0, 0, 5, 6])
    (load,) = bench.step(0, 0).loads
    assert [(part.group, part.first_chunk, part.block_ids) for part in load.parts] == [
        (0, 0, (1, 2, 3, 4)), (1, 1, (5, 6))
    ]  # fmt: skip
    assert bench.held == [1, 2, 3, 4, 5, 6]
    bench.side.take_reports({load.id: 1})
    assert bench.held == []


def test_a_load_names_the_places_of_its_own_chunks():
    """Each part is told by shard where its chunks lie, and no others; nothing where that is not known of all."""
    bench = Bench(WITH_WINDOW)
    bench.client.num_found = 2
    slots, sums = b"".join(bytes([n]) * 8 for n in range(3)), b"".join(bytes([n]) * 8 for n in range(10, 13))
    bench.client.places = (
        wire.RowPlaces(0, 0, 0, slots, sums), wire.RowPlaces(0, 1, 0, slots[8:], sums[8:]),
        wire.RowPlaces(1, 0, 0, slots[:16], sums[:16]), wire.RowPlaces(1, 1, 2, slots, sums),
    )  # fmt: skip
    request = bench.request(40)
    bench.connector.get_num_new_matched_tokens(request, 0)
    bench.allocate(request, 32, [1, 2, 3, 4], [0, 0, 0, 0, 0, 0, 5, 6])
    (load,) = bench.step(0, 0).loads
    assert [part.places for part in load.parts] == [
        {0: Places(slots[:16], sums[:16]), 1: Places(slots[8:], sums[8:])}, {0: Places(slots[8:16], sums[8:16])}
    ]  # fmt: skip


ALONE = ((FULL, 4, None, False),)


@pytest.mark.parametrize(("num_tokens", "num_tails"), [(64, 0), (67, 0), (68, 1), (79, 3), (63, 0)])
def test_what_lies_behind_the_last_whole_chunk_is_asked_for_in_blocks(num_tokens: int, num_tails: int):
    """A prompt of four chunks or more asks for each number of whole blocks that may follow them."""
    bench = Bench(ALONE)
    bench.request(num_tokens)
    (lookup,) = bench.client.sent
    assert (len(lookup.digests), len(lookup.tails)) == (num_tokens // 16 * DIGEST_NBYTES, num_tails * DIGEST_NBYTES)


def test_a_tail_is_loaded_behind_its_chunks():
    """A hit goes to the end of the tail, whose blocks are loaded as a part of their own, and held."""
    bench = Bench(ALONE)
    bench.client.num_found, bench.client.tail_found = 4, 2
    request = bench.request(79)
    assert bench.connector.get_num_new_matched_tokens(request, 16) == (72 - 16, True)
    bench.allocate(request, 56, list(range(1, 21)))
    (load,) = bench.step(0, 0).loads
    assert [(part.first_chunk, part.block_ids, part.is_tail) for part in load.parts] == [
        (1, tuple(range(5, 17)), False), (4, (17, 18), True)
    ]  # fmt: skip
    assert bench.held == list(range(5, 19))


def test_a_tail_alone_is_not_loaded():
    """Where the engine has all whole chunks, what a tail would add is computed sooner."""
    bench = Bench(ALONE)
    bench.client.num_found, bench.client.tail_found = 4, 3
    assert bench.connector.get_num_new_matched_tokens(bench.request(79), 64) == (0, False)


@pytest.mark.parametrize("groups", [WITH_WINDOW, WITH_STATE, WITH_DRAFT])
def test_sequences_of_several_groups_have_no_tails(groups: Any):
    """Only where one full group is all that there is, a tail is what its tokens say."""
    bench = Bench(groups)
    bench.request(79)
    assert bench.client.sent[0].tails == b""


@pytest.mark.parametrize("num_tokens", [78, 79])
def test_a_finished_request_leaves_its_tail(num_tokens: int):
    """What was computed in whole blocks behind the last whole chunk is stored when the request ends, below that chunk.

    The token that was sampled last has no KV. Who asks for the same tokens asks for that very tail.
    """
    bench = Bench(ALONE)
    request = bench.request(num_tokens)
    table = list(range(1, 21))
    assert stored(bench.step(0, num_tokens, table, is_new=True)) == [(0, 4, tuple(range(1, 17)))]
    request.all_token_ids.append(num_tokens)
    bench.connector.request_finished_all_groups(request, (table,))
    (job,) = bench.step(0, 0).stores
    (part,) = job.parts
    assert (part.block_ids, part.is_tail, len(part.parent)) == (
        tuple(range(17, 17 + (num_tokens - 64) // 4)), True, DIGEST_NBYTES
    )  # fmt: skip
    lookup = bench.client.sent[0]
    assert part.parent == lookup.digests[-DIGEST_NBYTES:]
    assert part.digests == lookup.tails[-DIGEST_NBYTES:]
    assert bench.held == list(range(1, 17 + (num_tokens - 64) // 4))


def test_a_group_that_needs_nothing_is_not_loaded():
    """Where the prefix ends with an attention chunk, that group is neither named to the engine nor filled."""
    bench = Bench(((FULL, 8, None, False), (CHUNKED, 8, 32, False)))
    bench.client.num_found = 2
    request = bench.request(40)
    assert bench.connector.get_num_new_matched_tokens(request, 0) == (32, True)
    assert bench.connector.get_loaded_kv_cache_group_ids(request) == (0,)
    bench.allocate(request, 32, [1, 2, 3, 4], [0, 0, 0, 0])
    assert [part.group for part in bench.step(0, 0).loads[0].parts] == [0]


def test_a_needed_block_that_is_not_there_fails_the_load():
    """The promise is reported as failed, holds nothing, gives its lease back, and is not made again."""
    bench = Bench(WITH_STATE)
    bench.client.num_found = 2
    request = bench.request(40)
    assert bench.connector.get_num_new_matched_tokens(request, 0) == (32, True)
    bench.allocate(request, 32, [1, 2, 3, 4], [0, 0])
    assert bench.connector._faults == {"_allocated"}
    bench.connector._faults.clear()
    meta = bench.step(0, 0)
    assert (meta.loads, meta.undone) == ([], {"r": ()})
    assert bench.held == []
    assert isinstance(bench.client.sent[-1], wire.Release)
    assert bench.connector.get_num_new_matched_tokens(request, 0) == (0, False)


def test_a_failed_load_is_computed_and_offered_again():
    """Of a request whose load failed as a whole nothing is loaded any more, and all is stored that it computes."""
    bench = Bench(WITH_WINDOW)
    bench.client.num_found = 2
    request = bench.request(40)
    bench.connector.get_num_new_matched_tokens(request, 0)
    bench.allocate(request, 32, [1, 2, 3, 4], [0, 0, 0, 0, 0, 0, 5, 6])
    bench.step(0, 0)
    output = SimpleNamespace(kv_connector_worker_meta=None, failed_recving={"r"})
    bench.connector.update_connector_output(output)
    assert bench.connector.get_num_new_matched_tokens(request, 0) == (0, False)
    meta = bench.step(0, 32, [11, 12, 13, 14], list(range(21, 29)), is_new=True)
    assert stored(meta) == [(0, 2, (11, 12, 13, 14)), (1, 2, (23, 24, 27, 28))]


def test_each_group_stores_what_it_still_has():
    """A window's chunk that was let go of is never read; the full group's is stored, and the next ones are."""
    bench = Bench(WITH_WINDOW)
    bench.request(64)
    bench.client.is_late = True
    assert stored(bench.step(0, 32, [1, 2, 3, 4], list(range(11, 19)), is_new=True)) == []
    bench.client.is_late = False
    meta = bench.step(32, 16, [1, 2, 3, 4, 5, 6], [0, 0, 0, 0, 0, 0, 0, 18, 19, 20, 21, 22])
    assert stored(meta) == [(0, 3, (1, 2, 3, 4, 5, 6)), (1, 1, (21, 22))]
    assert meta.stores[0].parts[0].parent == meta.stores[0].parts[1].parent == b""
    meta = bench.step(48, 16, [1, 2, 3, 4, 5, 6, 7, 8], [0] * 12 + [23, 24, 25, 26])
    assert stored(meta) == [(0, 1, (7, 8)), (1, 1, (25, 26))]
    assert len(meta.stores[0].parts[0].parent) == DIGEST_NBYTES
    assert meta.stores[0].parts[1].parent == b""


def test_a_state_is_stored_only_as_it_is_offered():
    """A state is read from the block that the engine names for a chunk's end, in this step, and from no table."""
    bench = Bench(WITH_STATE)
    bench.request(64)
    meta = bench.step(0, 32, [1, 2, 3, 4], [0, 12], states=[(1, 42, 32)], is_new=True)
    assert stored(meta) == [(0, 2, (1, 2, 3, 4)), (1, 1, (42,))]
    assert bench.held == [1, 2, 3, 4, 42]
    meta = bench.step(32, 16, [1, 2, 3, 4, 5, 6], [0, 12, 13], states=[(1, 43, 40)])
    assert stored(meta) == [(0, 1, (5, 6))]
    meta = bench.step(48, 16, [1, 2, 3, 4, 5, 6, 7, 8], [0, 12, 13, 14], states=[(1, 44, 48)])
    assert stored(meta) == [(0, 1, (7, 8))]


def test_a_drafts_last_chunk_waits_for_the_end():
    """Layers of a draft are stored one chunk behind, and their last chunk when the request is over."""
    bench = Bench(WITH_DRAFT)
    request = bench.request(40)
    tables = [1, 2, 3, 4, 5], [11, 12, 13, 14, 15]
    assert stored(bench.step(0, 32, *tables, is_new=True)) == [(0, 2, (1, 2, 3, 4)), (1, 1, (11, 12))]
    assert stored(bench.step(32, 8, *tables)) == []
    bench.connector.request_finished_all_groups(request, tables)
    assert bench.held == [1, 2, 3, 4, 11, 12, 13, 14]
    assert stored(bench.step(0, 0)) == [(1, 1, (13, 14))]


def test_a_preempted_requests_blocks_are_named_no_more():
    """What a job names is held by reference when its request loses its blocks; an end without blocks stores nothing."""
    bench = Bench(WITH_WINDOW, held_share_max=0.06)
    request = bench.request(64)
    tables = [1, 2, 3, 4, 5, 6], list(range(11, 23))
    bench.pool.touch([bench.pool.blocks[block_id] for table in tables for block_id in table])
    assert stored(bench.step(0, 48, *tables, is_new=True)) == [(0, 1, (1, 2)), (1, 1, (13, 14))]
    bench.pool.free_blocks([bench.pool.blocks[block_id] for table in tables for block_id in table])
    assert [bench.pool.blocks[block_id].ref_cnt for block_id in (1, 2, 3, 13, 14, 15)] == [1, 1, 0, 1, 1, 0]
    assert stored(bench.step(0, 0, preempted=["r"])) == []
    bench.connector.request_finished_all_groups(request, ([], []))
    assert stored(bench.step(0, 0)) == []
    assert bench.held == [1, 2, 13, 14]


def test_a_load_that_is_cut_off_is_not_stored():
    """A request that ends while its blocks are being loaded stores nothing of them, whatever it had computed before."""
    bench = Bench(WITH_WINDOW)
    request = bench.request(64)
    bench.client.is_late = True
    bench.step(0, 48, [1, 2, 3, 4, 5, 6], list(range(11, 23)), is_new=True)
    bench.client.is_late, bench.client.num_found = False, 1
    bench.side._tracked["r"].lookup = None
    assert bench.connector.get_num_new_matched_tokens(request, 0) == (16, True)
    bench.allocate(request, 16, [31, 32], [0, 0, 33, 34])
    bench.step(0, 0)
    bench.connector.request_finished_all_groups(request, ([31, 32, 35, 36], [0, 0, 33, 34, 37, 38, 39, 40]))
    assert stored(bench.step(0, 0)) == []


def test_tables_are_followed_where_the_engine_tells_what_is_new():
    """Before vLLM 0.29 new ids are appended, those of a new or resumed request replace what was known."""
    bench = Bench(((FULL, 8, None, False),), is_told=False)
    bench.request(96)
    assert stored(bench.step(0, 16, [1, 2], is_new=True)) == [(0, 1, (1, 2))]
    assert stored(bench.step(16, 8, [3])) == []
    assert stored(bench.step(24, 8, [4])) == [(0, 1, (3, 4))]
    bench.step(0, 0, preempted=["r"])
    assert stored(bench.step(32, 16, [11, 12, 13, 14, 15, 16], is_new=True)) == [(0, 1, (15, 16))]
    assert stored(bench.step(48, 16, [17, 18])) == [(0, 1, (17, 18))]


def test_a_draft_tokens_kv_is_not_stored_at_the_end():
    """The last token of a request has no KV of its own, whatever a step with draft tokens has computed in its place."""
    bench = Bench(((FULL, 8, None, False),))
    request = bench.request(30)
    bench.step(0, 29, [1, 2, 3, 4], is_new=True)
    bench.step(29, 5, [1, 2, 3, 4, 5])
    request.all_token_ids += [5, 6]
    bench.connector.request_finished_all_groups(request, ([1, 2, 3, 4],))
    assert stored(bench.step(0, 0)) == []


@pytest.mark.parametrize("groups", [WITH_WINDOW, ((WINDOW, 8, 32, False),)])
def test_groups_whose_failures_cannot_be_told_are_refused(groups: Any, monkeypatch: pytest.MonkeyPatch):
    """Before vLLM 0.30 only one full group is served: the sentence names the groups and the version."""
    connector = adapter("connector")
    connector._check_failures_can_be_told(Sort(groups, 10).engine_groups())
    monkeypatch.setattr(connector, "_TransferResults", None)
    with pytest.raises(connector.LayoutError, match=r"'window'\] need vLLM 0.30 or later"):
        connector._check_failures_can_be_told(Sort(groups, 10).engine_groups())


def test_states_that_are_not_offered_are_refused():
    """A Mamba cache mode in which no block is named for a boundary is refused with the group and the mode."""
    check = adapter("connector")._check_states_are_offered
    specs = [SimpleNamespace(), SimpleNamespace(mamba_cache_mode="align"), SimpleNamespace(mamba_cache_mode="all")]
    groups = [SimpleNamespace(kv_cache_spec=spec) for spec in specs]
    check(SimpleNamespace(kv_cache_groups=groups[:2]))
    with pytest.raises(adapter("connector").LayoutError, match="group 2 has the Mamba cache mode 'all'"):
        check(SimpleNamespace(kv_cache_groups=groups))
