"""Several engines on a small pool, in any order of everything: right bytes or an exact failure, and nothing is left.

Each run is one seed. A step is an engine's request, a slice of a copy, an engine's answer to an order, a message from
the device's thread to the loop, a death, a corrupt byte, or time. After every step the service's own laws are checked;
each retrieve is compared byte for byte with what the digests' stamps say; no slot changes hands while an engine's
process may be writing to it; and when all sessions are over, nothing is held any more.
"""

import random
from collections import Counter
from collections.abc import Callable

import pytest

from kvist.model.owners import Quotas
from kvist.tiering import staging
from kvist.tiering.controller import WritePolicy
from kvist.units import MIB
from tests.simulation.tenants import check_tenants, step_purge
from tests.simulation.tiers import empty_pool, fill_tiers, step_tier, trouble_tier
from tests.simulation.world import STEPS, World
from tests.support import kinds
from tests.support.memory_tier import MemoryTier
from tests.support.simulated import SimulatedDaemon, SimulatedEngine

NUM_SLOTS = 12
STEPS_OF_TIERS = {step_tier: 25, trouble_tier: 0.3}
STEPS_OF_SLOW_TIERS = {
    step_tier: 3, trouble_tier: 0.05, empty_pool: 3, World.look_up: 25, World.connect: 3, World.die: 3,
    World.pass_time: 8, World.expire: 4,
}  # fmt: skip


def run(
    seed: int, num_steps: int, *, has_rows: bool = False, num_tiers: int = 0, is_slow: bool = False,
    quotas: Quotas | None = None,
) -> Counter[str]:  # fmt: skip
    """Let a world run, end all of it, and return what was seen. Where engines have rows, there is more to copy.

    Slow tiers have much at the start, and the pool loses its chunks before what is asked for has been read.
    """
    chance = random.Random(seed)
    tiers = [MemoryTier(f"tier {number}") for number in range(num_tiers)]
    daemon = SimulatedDaemon(
        (NUM_SLOTS - 4 * bool(tiers)) * (3 if has_rows else 1), queue_max=chance.choice([2, 1000]), tiers=tiers,
        policy=chance.choice(list(WritePolicy)) if tiers else WritePolicy.ALWAYS, quotas=quotas,
    )  # fmt: skip
    number = seed % len(kinds.KINDS_OF_ROWS)
    others = kinds.KINDS_OF_ROWS[:number] + kinds.KINDS_OF_ROWS[number + 1 :]
    of_rows = [kinds.KINDS_OF_ROWS[number], chance.choice(others)]  # In as many seeds as there are kinds, all of them.
    world = World(chance, daemon, of_rows if has_rows else chance.sample(kinds.KINDS, 3))
    steps = make_steps(has_rows=has_rows, has_tiers=bool(tiers), is_slow=is_slow)
    if quotas is not None:
        world.has_tenants = True
        steps = {**steps, step_purge: 0.3}
    everyone = world.engines
    for _ in range(8):
        world.connect()
    if is_slow:
        fill_tiers(world)
    for step in chance.choices(list(steps), list(steps.values()), k=num_steps):
        step(world)
        world.bury()
        world.take_in()
        daemon.service.check_invariants()
        check_tenants(world)
        assert daemon.status().pool_used_nbytes <= daemon.pool.nbytes
    ended = [engine for _, engine in everyone] + world.ghosts
    if chance.random() < 0.5:
        daemon.service.begin_draining()
    for engine in ended:
        engine.end()
    daemon.settle()
    if not daemon.service.is_draining:
        check_held(daemon, ended)
        for engine in ended:
            engine.end_process()
        daemon.settle()
    daemon.service.check_invariants()
    check_quiet(daemon, ended)
    for counter in (
        "chunks_promoted", "promotions_given_up", "chunks_demoted", "demotions_passed_over", "demotions_refused"
    ):  # fmt: skip
        world.num_seen[counter] += daemon.status().counters.get(counter, 0)
    daemon.close()
    return world.num_seen


def make_steps(*, has_rows: bool, has_tiers: bool, is_slow: bool) -> dict[Callable[[World], None], float]:
    """Return what may happen, and how often."""
    steps = {**STEPS, World.slice: 40, World.deliver: 40, World.corrupt: 4} if has_rows else STEPS
    if has_tiers:  # What was stored is evicted soon, and asked for often.
        steps = {**steps, World.look_up: 12, World.store: 8, World.corrupt: 0.5, **STEPS_OF_TIERS}
    return {**steps, **STEPS_OF_SLOW_TIERS} if is_slow else steps


def check_held(daemon: SimulatedDaemon, engines: list[SimulatedEngine]) -> None:
    """Of lost engines, exactly those are left that have orders open, with their slots."""
    held = [engine for engine in engines if engine.slots_in_hand()]
    assert [engine for engine in engines if not engine.is_closed] == held
    status = daemon.status()
    assert status.num_sessions == status.num_registered == len(held)
    assert status.pool_used_nbytes >= len(daemon.ordered_slots()) * 4096


def check_quiet(daemon: SimulatedDaemon, engines: list[SimulatedEngine]) -> None:
    """Nothing is held, nothing is mapped, and the bytes in use are those of the chunks that can be read."""
    status = daemon.status()
    assert all(engine.is_closed for engine in engines)
    assert not any(engine.session.kept_fds for engine in daemon.engines)
    assert not daemon.device.open
    assert all(process.is_closed for process in daemon.processes)
    assert (status.num_sessions, status.num_registered, status.num_copies_in_flight) == (0, 0, 0)
    assert (status.num_leases, status.num_pinned, status.num_reserved) == (0, 0, 0)
    assert status.pool_used_nbytes == status.num_sealed * 4096


@pytest.mark.parametrize("part", range(6))
def test_whatever_happens_bytes_are_right_and_nothing_is_left(part: int):
    """Over many seeds: every byte that is called right is right, and a quiet service holds nothing.

    Everything that can happen has happened in every part, so that a service that does nothing does not pass.
    """
    seen: Counter[str] = Counter()
    for seed in range(part * 1000, part * 1000 + 20):
        seen += run(seed, 600)
    for outcome in (
        "stored", "pool full", "no parent", "copy failed", "hits", "misses", "loaded", "uncopied", "corrupt",
        "overloaded", "unknown_lease", "foreign_lease", "lease_claimed", "deaths with copies",
        "deaths with orders", "broken on an order", "lies", "false answers", "kept at a death", "too late",
        "loaded tails without a prefix", "loaded tails behind a prefix", "corrupt tails", "layout_refused",
    ):  # fmt: skip
        assert seen[outcome] > 0, outcome


@pytest.mark.parametrize("part", range(3))
def test_whatever_happens_to_rows_no_prefix_is_a_mix(part: int):
    """Over many seeds of several groups, shards and replicas: a lookup finds exactly what every row can go on from.

    Groups may have numbers of shards and readers of their own.
    Whatever was stored late, evicted, corrupted or lost with its worker makes a hit shorter, and never wrong.
    """
    seen: Counter[str] = Counter()
    for seed in range(part * 1000, part * 1000 + 2 * len(kinds.KINDS_OF_ROWS)):
        seen += run(seed, 1200, has_rows=True)
    for outcome in (
        "stored", "pool full", "no parent", "hits", "misses", "hits over a hole", "invalid_blocks", "lease_claimed",
        "loaded full", "loaded window", "loaded chunked", "loaded recurrent", "corrupt", "deaths with copies",
        "loaded of uneven groups", "loaded tails",
    ):  # fmt: skip
        assert seen[outcome] > 0, outcome


@pytest.mark.parametrize("part", range(4))
def test_whatever_happens_to_tiers_bytes_are_right_and_nothing_is_left(part: int, monkeypatch: pytest.MonkeyPatch):
    """Over many seeds with slow, failing and forgetful tiers: no byte is served that was not stored, none is left.

    A lookup says of each chunk whether it is here, on its way or neither; slots come back exactly once.
    """
    seen: Counter[str] = Counter()
    for seed in range(part * 1000, part * 1000 + 12):
        has_rows, is_slow = seed % 3 == 0, seed % 4 < 2
        monkeypatch.setattr(staging, "IN_FLIGHT_NBYTES_MAX", 1 if is_slow else MIB)  # One chunk, or many.
        seen += run(
            seed, 1200 if has_rows else 800, has_rows=has_rows, num_tiers=1 + seed % 2, is_slow=is_slow
        )  # fmt: skip
    for outcome in (
        "loading", "no room to promote", "reads failed", "lost by a tier", "chunks_promoted", "promotions_given_up",
        "chunks_demoted", "demotions_refused", "loaded",
    ):  # fmt: skip
        assert seen[outcome] > 0, outcome


@pytest.mark.parametrize("part", range(2))
def test_whatever_happens_to_tenants_none_has_more_than_its_quota(part: int):
    """Over many seeds with quotas and purges: no tenant is above its quota, and nothing purged is in a tier."""
    seen: Counter[str] = Counter()
    quotas = Quotas({"shared": 3 * 4096, "copied": 5 * 4096, "*": 8 * 4096})
    for seed in range(part * 1000, part * 1000 + 8):
        seen += run(seed, 800, has_rows=seed % 4 == 0, num_tiers=seed % 2, quotas=quotas)
    for outcome in (
        "stored", "pool full", "tenant quota", "hits", "loaded", "purged", "kept at a purge", "purged from a tier",
    ):  # fmt: skip
        assert seen[outcome] > 0, outcome


def test_the_same_seed_is_the_same_run():
    """A failing seed can be run again: nothing depends on time, threads or hashes."""
    assert run(42, 400) == run(42, 400)
