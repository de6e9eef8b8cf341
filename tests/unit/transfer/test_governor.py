"""Copies beside a decoding engine keep its steps within a budget, and get the whole link from one that is idle."""

import math
import random

import pytest

from kvist.transfer.governor import RATE_MIN, Governor

CHUNK = 32 << 20
LINK = 55e9
STEP_S = 0.008


class Engine:
    """Decodes; every byte that is copied during a step costs it a little."""

    def __init__(self, governor: Governor, *, cost_per_byte: float, noise: float = 0.0) -> None:
        self.governor = governor
        self.now = 100.0
        self.copied = 0
        self._cost = cost_per_byte
        self._noise = noise
        self._rng = random.Random(1)
        self._copies_free_at = 0.0

    def step(self, *, is_copying: bool, kind: int = 32) -> float:
        """Decode one step, with as many copies in it as the governor and the link let begin."""
        seconds = STEP_S * (1 + self._noise * self._rng.uniform(-1, 1))
        end = self.now + seconds
        at = max(self.now, self._copies_free_at)
        while is_copying and at < end:
            wait_s = self.governor.turn(at, CHUNK)
            at += wait_s + CHUNK / LINK
            seconds += CHUNK * self._cost
            self.copied += CHUNK
        self._copies_free_at = at
        self.now = max(self.now + seconds, self.now)
        self.governor.step(self.now, seconds, kind)
        return seconds


def settle(engine: Engine) -> None:
    """Let the governor see what steps take alone."""
    for _ in range(50):
        engine.step(is_copying=False)


@pytest.mark.parametrize("budget", [0.03, 0.1])
@pytest.mark.parametrize("slowdown_at_full_rate", [0.05, 0.1, 0.5, 2.0])
def test_steps_stay_within_the_budget(budget: float, slowdown_at_full_rate: float):
    """Whatever a byte costs, steps beside copies soon take no more than the budget, and copies use most of it."""
    cost = slowdown_at_full_rate * STEP_S / (LINK * STEP_S)
    engine = Engine(Governor(budget), cost_per_byte=cost, noise=0.002)
    settle(engine)
    for _ in range(100):
        engine.step(is_copying=True)
    engine.copied, begin = 0, engine.now
    steps = [engine.step(is_copying=True) for _ in range(400)]
    mean = sum(steps) / len(steps) / STEP_S - 1
    least = slowdown_at_full_rate * RATE_MIN / LINK
    assert mean < max(budget, least) * 1.25
    rate = engine.copied / (engine.now - begin)
    affordable = min(LINK, LINK * budget / slowdown_at_full_rate)
    assert rate > 0.5 * affordable


def test_an_idle_engine_gives_the_whole_link():
    """Without steps no copy waits, however slow copies had to be before."""
    engine = Engine(Governor(0.03), cost_per_byte=2.0 / LINK)
    settle(engine)
    for _ in range(100):
        engine.step(is_copying=True)
    assert engine.governor.rate < LINK
    assert engine.governor.turn(engine.now, CHUNK) + engine.governor.turn(engine.now, CHUNK) > 0
    idle = engine.now + 0.06
    assert [engine.governor.turn(idle + number * 1e-3, CHUNK) for number in range(20)] == [0.0] * 20


def test_cheap_copies_are_not_spaced():
    """Copies that cost less than the budget go at the link's speed."""
    engine = Engine(Governor(0.03), cost_per_byte=0.01 / LINK)
    settle(engine)
    for _ in range(100):
        engine.step(is_copying=True)
    assert math.isinf(engine.governor.rate)


def test_nothing_is_held_against_steps_that_are_not_known():
    """Until enough steps of a kind were seen without copies, copies are not spaced for them."""
    engine = Engine(Governor(0.03), cost_per_byte=2.0 / LINK)
    for _ in range(30):
        engine.step(is_copying=True)
    assert math.isinf(engine.governor.rate)
    settle(engine)
    for _ in range(30):
        engine.step(is_copying=True, kind=64)
    assert math.isinf(engine.governor.rate)


def test_other_steps_say_nothing():
    """Bytes that were copied beside a prefill are not held against, or for, the decode step that follows."""
    engine = Engine(Governor(0.03), cost_per_byte=0.0)
    settle(engine)
    engine.governor.turn(engine.now, 1000 * CHUNK)
    engine.governor.pass_over()
    engine._cost = 2.0 / LINK
    for _ in range(20):
        engine.step(is_copying=True)
    assert engine.governor.rate < 2e9


def test_every_copy_ends():
    """However much copies cost, they get ``RATE_MIN``."""
    engine = Engine(Governor(0.001), cost_per_byte=100.0 / LINK)
    settle(engine)
    for _ in range(200):
        engine.step(is_copying=True)
    assert engine.governor.rate == RATE_MIN
    waits = [engine.governor.turn(engine.now, CHUNK) for _ in range(10)]
    assert waits[-1] <= 10 * CHUNK / RATE_MIN + 1e-9


def test_the_rate_recovers():
    """When copies become cheap, for instance because decoding got lighter, they soon go at full speed again."""
    engine = Engine(Governor(0.03), cost_per_byte=2.0 / LINK)
    settle(engine)
    for _ in range(100):
        engine.step(is_copying=True)
    engine._cost = 0.001 / LINK
    for _ in range(100):
        engine.step(is_copying=True)
    assert math.isinf(engine.governor.rate)
