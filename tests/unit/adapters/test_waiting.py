"""A request waits for what is read from a tier while that is worth it, asks no oftener than needed, then goes on."""

import pytest

from kvist.wire import messages as wire
from tests.support.engine_sorts import CHUNK_TOKENS
from tests.unit.adapters.test_scheduler import WITH_WINDOW, Bench

WAIT_S = 5.0
"""The option's default."""


@pytest.fixture
def bench() -> Bench:
    """Return an engine that is told of two chunks, and of one more that is being read."""
    bench = Bench(WITH_WINDOW)
    bench.client.num_found, bench.client.num_loading, bench.client.loading_ms = 2, 1, 100
    return bench


def lookups(bench: Bench) -> list[wire.Lookup]:
    return [sent for sent in bench.client.sent if isinstance(sent, wire.Lookup)]


def ask(bench: Bench, request, num_local: int = 0) -> int | None:
    return bench.connector.get_num_new_matched_tokens(request, num_local)[0]


def know_pace(bench: Bench, chunk_s: float) -> None:
    """Let the engine have computed a prompt at so many seconds a chunk."""
    bench.side._pace.note(100 * CHUNK_TOKENS, 100 * chunk_s)


def test_a_request_waits_until_all_is_there(bench: Bench):
    """While chunks are being read the engine is told to ask again; when they are there, the whole hit is taken."""
    request = bench.request(60)
    bench.client.now = 0.1
    assert ask(bench, request) is None
    bench.client.num_found, bench.client.num_loading = 3, 0
    bench.client.now = 0.2
    assert ask(bench, request) == 3 * CHUNK_TOKENS


def test_questions_are_as_rare_as_the_estimate_allows(bench: Bench):
    """A question is repeated at half of what is expected, then at half of the rest, and never every step."""
    request = bench.request(60)
    bench.client.now = 0.01
    assert ask(bench, request) is None
    num_asked = len(lookups(bench))
    for _ in range(40):
        bench.client.now += 0.001
        assert ask(bench, request) is None
    assert len(lookups(bench)) == num_asked
    bench.client.now += 0.02
    bench.client.loading_ms = 2
    assert ask(bench, request) is None
    assert len(lookups(bench)) == num_asked + 1
    for _ in range(40):
        bench.client.now += 0.001
        assert ask(bench, request) is None
    assert len(lookups(bench)) <= num_asked + 11


def test_what_is_there_stays_held_while_it_waits(bench: Bench):
    """A lease is given back only behind the question that grants the next one, and every one but the last is."""
    request = bench.request(60)
    for _ in range(5):
        bench.client.now += 0.3
        assert ask(bench, request) is None
    kinds = [type(sent) for sent in bench.client.sent]
    assert kinds == [wire.Lookup] + [wire.Lookup, wire.Release] * 5
    bench.connector.request_finished_all_groups(request, ())
    granted = [b"lease %d" % sent.id for sent in lookups(bench)]
    assert [sent.lease for sent in bench.client.sent if isinstance(sent, wire.Release)] == granted


def test_nobody_waits_for_ever(bench: Bench):
    """After ``tier_wait_s`` a request takes what is there, and does not begin to wait again."""
    request = bench.request(60)
    bench.client.now = 10.0
    assert ask(bench, request) is None
    bench.client.now += WAIT_S - 0.001
    assert ask(bench, request) is None
    bench.client.now += 0.002
    num_asked = len(lookups(bench))
    assert ask(bench, request) == 2 * CHUNK_TOKENS
    assert len(lookups(bench)) == num_asked + 1, "the last answer is a fresh one"
    bench.client.now += 0.1
    assert ask(bench, request) == 2 * CHUNK_TOKENS
    assert len(lookups(bench)) == num_asked + 1


def test_waiting_is_given_up_when_computing_would_have_been_sooner(bench: Bench):
    """Patience is what the tokens that are being read would take to be computed, worked out once."""
    know_pace(bench, chunk_s=0.5)
    request = bench.request(60)
    bench.client.now = 1.0
    assert ask(bench, request) is None
    bench.client.num_loading = 100
    bench.client.now = 1.49
    assert ask(bench, request) is None
    bench.client.now = 1.51
    assert ask(bench, request) == 2 * CHUNK_TOKENS


def test_what_the_engine_has_is_not_waited_for(bench: Bench):
    """A request whose own blocks reach as far as what is being read goes on at once, and asks no more."""
    request = bench.request(60)
    for _ in range(5):
        bench.client.now += 0.1
        assert ask(bench, request, 3 * CHUNK_TOKENS - 8) == 0
    assert len(lookups(bench)) <= 2


def test_an_engine_that_knows_its_pace_says_so(bench: Bench):
    """A lookup tells what a chunk costs; nothing before anything was computed."""
    bench.request(60)
    know_pace(bench, chunk_s=0.25)
    bench.request(60)
    assert [lookup.chunk_us for lookup in lookups(bench)] == [0, 250_000]


def test_the_pace_is_measured_from_the_first_step_to_the_answer(bench: Bench):
    """A prompt that is computed in two steps counts with both, and without what was loaded or already there."""
    bench.client.num_found = bench.client.num_loading = 0
    request = bench.request(112)
    assert ask(bench, request) == 0
    bench.client.now = 1.0
    bench.step(16, 48, [*range(1, 9)], [*range(10, 26)], is_new=True)
    bench.client.now = 2.0
    bench.step(64, 48, [*range(1, 15)], [*range(10, 38)])
    bench.client.now = 4.0
    request.all_token_ids.append(7)
    bench.step(112, 1, [*range(1, 16)], [*range(10, 39)])
    assert bench.side._pace.seconds(96) == pytest.approx(3.0)
    bench.client.now = 100.0
    request.all_token_ids.append(7)
    bench.step(113, 1, [*range(1, 16)], [*range(10, 39)])
    assert bench.side._pace.seconds(96) == pytest.approx(3.0)


def test_a_short_prompt_says_nothing_of_the_pace(bench: Bench):
    """What a step takes whatever it computes is no pace."""
    bench.side._pace.note(8, 1.0)
    assert bench.side._pace.seconds(1000) == 0


def test_an_engine_with_nothing_to_compute_rests(bench: Bench):
    """Steps that compute nothing while a request waits for a tier do not spin; all others are not held up."""
    request = bench.request(60)
    bench.step(0, 0)
    assert bench.client.rests == []
    bench.client.now = 0.1
    assert ask(bench, request) is None
    bench.step(0, 0)
    (rest,) = bench.client.rests
    assert 0 < rest <= 0.005
    bench.step(0, 8, [1], [10, 11], is_new=True)
    assert len(bench.client.rests) == 1
