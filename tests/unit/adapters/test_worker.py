"""A worker's jobs: a request for each row of each part, over when all are, reported once, settled only at the end."""

from collections import Counter
from dataclasses import replace
from typing import Any

import pytest

from kvist.client.client import Build, Pending
from kvist.client.planning import Places
from kvist.wire import messages as wire
from tests.support.fake_vllm import adapter

metadata = adapter("metadata")
DEADLINE_S = 1.0


class Recorder:
    """Takes requests, and answers when the test says so."""

    def __init__(self) -> None:
        self.now = 0.0
        self.sent: list[tuple[Any, Pending]] = []
        self.fails_at: int | None = None
        self.places: dict[int, Places] = {}
        """Of what may be copied ahead, by request."""

    def submit(self, build: Build) -> Pending:
        if self.fails_at == len(self.sent):
            raise RuntimeError(self.fails_at)
        pending = Pending(len(self.sent) + 1, self.now)
        self.sent.append((build(pending.id), pending))
        return pending

    def load(self, build: Build, places: Places) -> Pending:
        pending = self.submit(build)
        self.places[pending.id] = places
        return pending

    def poll(self, timeout_s: float = 0.0) -> None: ...

    def close(self) -> None: ...

    def answer(self, number: int, *failed: int) -> None:
        """Answer a request; of a retrieve, these chunks have failed."""
        request, pending = self.sent[number]
        if isinstance(request, wire.Store):
            pending.reply = wire.StoreReply(request.id, 1, 0, 1, "no parent")
        else:
            pending.reply = wire.RetrieveReply(request.id, 2, list(failed))

    def lose(self, number: int) -> None:
        self.sent[number][1].is_lost = True


LOAD = metadata.LoadJob(
    7, "request", b"lease", (metadata.LoadPart(0, 1, (3, 4, 5, 6), 1), metadata.LoadPart(2, 2, (0, 8, 9, 10), 1))
)
STORE = metadata.StoreJob(
    8, (metadata.StorePart(0, b"d" * 32, b"p" * 16, (1, 2)), metadata.StorePart(2, b"e" * 16, b"", (3,)))
)
ROWS = {0: [0, 3], 2: [1, 2]}


@pytest.fixture
def recorder() -> Recorder:
    return Recorder()


def worker(recorder: Recorder, rows: Any = ROWS) -> Any:
    side = adapter("worker").WorkerSide(deadline_s=DEADLINE_S, clock=lambda: recorder.now)
    side.connect(recorder, None, rows)
    return side


def begun(recorder: Recorder, rows: Any = ROWS) -> Any:
    side = worker(recorder, rows)
    side.begin(metadata.KvistMetadata(loads=[LOAD]))
    return side


@pytest.mark.parametrize("copies_itself", [True, False])
def test_a_row_is_loaded_from_the_places_of_its_shard(recorder: Recorder, copies_itself: bool):
    """A worker that copies for itself begins with the places of each row's own shard, where they are known."""
    first, second = LOAD.parts
    parts = (replace(first, places={0: Places(b"0", b"a"), 1: Places(b"1", b"b")}), second)
    side = worker(recorder)
    if copies_itself:
        side.copy_itself(recorder, [0, 0, 1, 1])
    side.begin(metadata.KvistMetadata(loads=[replace(LOAD, parts=parts)]))
    assert [request.row for request, _ in recorder.sent] == [0, 3, 1, 2]
    assert recorder.places == ({1: Places(b"0", b"a"), 2: Places(b"1", b"b")} if copies_itself else {})


def test_each_row_is_asked_for_its_groups_blocks(recorder: Recorder):
    """A load asks for each part once for every row of its group, a store likewise; nothing else is asked."""
    side = begun(recorder)
    side.store(metadata.KvistMetadata(stores=[STORE]))
    requests = [request for request, _ in recorder.sent]
    loads = [(one.row, one.first_chunk, one.num_skipped_blocks, one.lease) for one in requests[:4]]
    assert loads == [(0, 1, 1, b"lease"), (3, 1, 1, b"lease"), (1, 2, 1, b"lease"), (2, 2, 1, b"lease")]
    assert memoryview(requests[2].block_ids).cast("i").tolist() == [0, 8, 9, 10]
    stores = [(one.row, one.digests, one.parent, memoryview(one.block_ids).cast("i").tolist()) for one in requests[4:]]
    assert stores == [
        (0, b"d" * 32, b"p" * 16, [1, 2]), (3, b"d" * 32, b"p" * 16, [1, 2]), (1, b"e" * 16, b"", [3]),
        (2, b"e" * 16, b"", [3]),
    ]  # fmt: skip


def test_a_group_is_the_row_of_its_number_unless_it_is_told(recorder: Recorder):
    """Without a table of rows, group 2 is row 2; with one, a group that is not in it has no row here."""
    begun(recorder, None)
    assert [request.row for request, _ in recorder.sent] == [0, 2]
    other = Recorder()
    side = begun(other, {2: [0]})
    assert [(request.row, request.first_chunk) for request, _ in other.sent] == [(0, 2)]
    other.answer(0)
    assert side.collect().finished == {"request"}


def test_a_load_is_over_when_all_its_rows_are(recorder: Recorder):
    """It is reported, once, and settled with the last answer, whatever their order; nothing has failed then."""
    side = begun(recorder)
    for number in (2, 0, 3):
        recorder.answer(number)
        assert side.collect().finished == set()
        assert not side.take_settled()
    recorder.answer(1)
    results = side.collect()
    assert (results.finished, results.failed, results.failed_blocks) == ({"request"}, set(), set())
    assert side.take_settled() == Counter({7: 1})
    assert side.collect().finished == set()


def test_a_failed_chunk_of_any_row_fails_the_load(recorder: Recorder):
    """The request is named as failed; and of its blocks those that were to be written, in the chunk that failed."""
    side = begun(recorder)
    for number in (0, 1, 2):
        recorder.answer(number)
    recorder.answer(3, 0)
    results = side.collect()
    assert (results.finished, results.failed, results.failed_blocks) == ({"request"}, {"request"}, {8})
    other = Recorder()
    side = begun(other, {0: [0]})
    other.answer(0, 0, 1)
    assert side.collect().failed_blocks == {4, 5, 6}


def test_a_row_that_is_lost_fails_its_blocks(recorder: Recorder):
    """A request that is lost fails all that it should have written; the load is settled, for the daemon is gone."""
    side = begun(recorder)
    for number in (0, 1, 2):
        recorder.answer(number)
    recorder.lose(3)
    results = side.collect()
    assert (results.failed, results.failed_blocks) == ({"request"}, {8, 9, 10})
    assert side.take_settled() == Counter({7: 1})


def test_a_late_row_fails_the_load_and_keeps_its_blocks(recorder: Recorder):
    """At the deadline the load is reported as failed, once; it is settled only when the last row has answered."""
    side = begun(recorder)
    for number in (0, 1, 2):
        recorder.answer(number)
    recorder.now += DEADLINE_S * 1.01
    assert side.collect().failed == {"request"}
    assert not side.take_settled()
    recorder.answer(3)
    assert side.collect().finished == set()
    assert side.take_settled() == Counter({7: 1})


def test_what_cannot_be_sent_is_still_reported_and_settled(recorder: Recorder):
    """A fault between two rows leaves a load that fails, and settles when what was sent is answered."""
    recorder.fails_at = 2
    side = worker(recorder)
    with pytest.raises(RuntimeError):
        side.begin(metadata.KvistMetadata(loads=[LOAD]))
    assert side.collect().finished == set()
    recorder.answer(0)
    recorder.answer(1)
    assert side.collect().failed == {"request"}
    assert side.take_settled() == Counter({7: 1})


def test_giving_up_reports_all_that_is_open(recorder: Recorder):
    """Every load and every promise that was not kept is reported as failed, and not again; jobs settle as before."""
    side = begun(recorder)
    side.begin(metadata.KvistMetadata(undone={"undone": (11, 12)}))
    results = side.give_up()
    assert (results.finished, results.failed) == ({"request", "undone"}, {"request", "undone"})
    assert results.failed_blocks == {4, 5, 6, 8, 9, 10, 11, 12}
    assert side.give_up().finished == side.collect().finished == set()
    for number in range(4):
        recorder.answer(number)
    side.collect()
    assert side.take_settled() == Counter({7: 1})


def test_a_store_is_settled_when_all_rows_have_answered(recorder: Recorder):
    """A refusal of one group's chunks, or of all, is no fault: it is an answer like another."""
    side = worker(recorder)
    side.store(metadata.KvistMetadata(stores=[STORE]))
    for number in range(4):
        side.collect()
        assert not side.take_settled()
        recorder.answer(number)
    side.collect()
    assert side.take_settled() == Counter({8: 1})
