"""An engine that schedules as vLLM does, with the adapter and a daemon, in any order of everything.

Each run is one seed. Held after every step: a block that is named has a reference until the daemon has answered, holds
the bytes that its digest says if it is stored, and changes no hands; a load writes exactly what is needed; all that is
computed is computed from right bytes; every load is reported once. When all requests are over, nothing is held, and
what the connector has counted is what the daemon has.
"""

import random
from collections import Counter

import pytest

from kvist.model.layout import GroupKind
from tests.support.engine_sorts import CHUNK_TOKENS, Sort
from tests.support.memory_tier import MemoryTier
from tests.support.scheduled import Engine
from tests.support.simulated import LEASE_TTL_S, SimulatedDaemon
from tests.support.simulated_client import DEADLINE_S

FULL, WINDOW, CHUNKED, RECURRENT = GroupKind.FULL, GroupKind.WINDOW, GroupKind.CHUNKED, GroupKind.RECURRENT
SORTS = {
    "one full group, before 0.29": Sort(((FULL, 4, None, False),), 60, is_told=False, is_v2=False),
    "one full group": Sort(((FULL, 4, None, False),), 60),
    "one full group with a draft": Sort(((FULL, 4, None, True),), 60),
    "a window shorter than a chunk": Sort(((FULL, 8, None, False), (WINDOW, 4, 8, False)), 54, is_v2=False),
    "windows longer than a chunk": Sort(((FULL, 8, None, False), (WINDOW, 4, 41, False), (WINDOW, 8, 33, False)), 84),
    "windows alone": Sort(((WINDOW, 4, 24, False),), 36),
    "states": Sort(((FULL, 8, None, False), (RECURRENT, 16, None, False)), 30, is_v2=False),
    "attention chunks and a draft": Sort(((FULL, 8, None, False), (CHUNKED, 8, 48, False), (FULL, 4, None, True)), 84),
}
NUM_STEPS = 120


def prompt(chance: random.Random) -> list[int]:
    """Return a prompt that shares its beginning with others, or is one of them again; whole chunks, often."""
    stem, branch = chance.randrange(2), chance.randrange(3)
    length, fork = chance.choice([16, 33, 48, 64, 80, 91, 112]), chance.choice([20, 40, 64])
    tokens = [(token * 5 + stem) % 11 for token in range(fork)] + [(token * 3 + branch) % 7 for token in range(112)]
    return tokens[:length]


def run(sort: Sort, seed: int, *tiers: MemoryTier) -> Counter[str]:
    chance = random.Random(seed)
    daemon = SimulatedDaemon(64, tiers=tiers)
    engine = Engine(daemon, sort, chance)
    for _ in range(NUM_STEPS):
        happen(engine, daemon, chance)
        engine.step(chance.choice([0, 1, 16, 40, 64, 200]))
        daemon.service.check_invariants()
    for _ in range(400):
        daemon.settle()
        daemon.now += 0.01
        engine.step(200)
        if not engine.running and not engine.waiting and not engine.connector.has_pending_push_work():
            break
    engine.check_idle()
    assert daemon.status().num_reserved == daemon.status().num_copies_in_flight == 0
    check_figures(engine, daemon)
    engine.seen["promoted"] += daemon.status().counters.get("chunks_promoted", 0)
    engine.seen["promotions failed"] += daemon.status().counters.get("promotions_failed", 0)
    engine.close()
    daemon.close()
    return engine.seen


def check_figures(engine: Engine, daemon: SimulatedDaemon) -> None:
    """Hold what the connector has told, step by step, against the daemon's counters."""
    told, counted = Counter(engine.stats.data), Counter(daemon.status().counters)
    assert told["lookups"] == counted["lookups"]
    for name in ("asked", "found", "loading"):
        assert told[f"tokens_{name}"] == counted[f"chunks_{name}"] * CHUNK_TOKENS, name
    for name in ("loaded", "stored", "present", "refused"):
        assert told[f"chunks_{name}"] == counted[f"chunks_{name}"], name
    assert told["requests_not_cached"] == 0
    num_loads = len(engine.stats.data.get("load_seconds", ()))
    assert engine.seen["loaded"] <= num_loads
    assert bool(told["tokens_loaded"]) is (num_loads > told["loads_failed"])


def happen(engine: Engine, daemon: SimulatedDaemon, chance: random.Random) -> None:
    """Let some of what is not the engine's doing happen between two steps."""
    if chance.random() < 0.3 and len(engine.waiting) < 6:
        said = [tokens for tokens in engine.sequences if len(tokens) <= 112]
        is_turn = bool(said) and chance.random() < 0.3
        tokens = [*chance.choice(said), *([1] * chance.randrange(6))] if is_turn else prompt(chance)
        engine.add(tokens, chance.randrange(1, 24))
    if chance.random() < 0.06 and (there := [*engine.running, *engine.waiting]):
        engine.end(chance.choice(there))
    if chance.random() < 0.1:
        engine.pool.forget()
    if chance.random() < 0.03:
        daemon.pool.bytes[chance.randrange(daemon.pool.nbytes)] ^= 1
    daemon.now += chance.choices([0.001, 0.1, DEADLINE_S * 0.7, LEASE_TTL_S], [20, 6, 2, 1])[0]
    daemon.service.expire_leases()
    if chance.random() < 0.7:
        for _ in range(chance.randrange(12)):
            chance.choice([daemon.deliver, daemon.executor.step])()
    for tier in daemon.tiers:
        while chance.random() < 0.95 and daemon.service._index.evict() is not None:
            pass
        tier.is_failing = chance.random() < 0.1
        for _ in range(chance.choice([0, 0, 1, 5, 30])):
            tier.step()
        tier.is_failing = False


@pytest.mark.parametrize("name", SORTS)
def test_right_bytes_whatever_happens(name: str):
    """Whatever its groups, an engine names only what is its own, and computes from right bytes alone."""
    seen: Counter[str] = Counter()
    for seed in range(5):
        seen += run(SORTS[name], seed)
    assert min(seen[what] for what in ("answered", "loaded", "preempted")) > 0, seen
    kinds = {kind.value for kind, *_ in SORTS[name].groups}
    assert all(seen[f"stored {kind}"] for kind in kinds), seen
    has_tails = SORTS[name].groups == ((FULL, 4, None, False),)
    assert (seen["stored a tail"] > 0, seen["asked for a tail"] > 0) == (has_tails, has_tails), seen


@pytest.mark.parametrize("name", SORTS)
def test_right_bytes_from_a_tier_whatever_happens(name: str):
    """An engine may wait for what is read from a tier, and loads it once it is there; nobody waits for ever."""
    seen: Counter[str] = Counter()
    for seed in range(5):
        seen += run(SORTS[name], seed, MemoryTier(read_rate=1e6))
    for what in ("answered", "loaded", "promoted", "promotions failed", "put off"):
        assert seen[what] > 0, seen
