"""A long run of prompts through the whole service, with a pool of a few percent of what they hold: what is found.

Conversations come back longer, share their beginnings, and are interrupted by long prompts that come once. How much
must be found follows from the trace alone (``tests/support/traces.py``), by brute force.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from kvist.model.keys import Digest, chunk_keys
from kvist.storage.disk.tier import DiskTier
from kvist.units import MIB
from kvist.wire import messages as wire
from tests.support.named import connect, digests, look_up, store
from tests.support.simulated import SimulatedDaemon, SimulatedEngine
from tests.support.simulated_files import SimulatedFiles
from tests.support.traces import Prompt, make_trace, plain_lru_hits, prefix_lru_hits, unbounded_hits

NUM_REQUESTS = 400
NUM_SLOTS = 48
DISK_NBYTES = 2 * MIB
CHECKED_EACH = 20


class SteppedDisk(DiskTier):
    """A tier on a simulated disk that does its work when it is told to."""

    def __init__(self) -> None:
        super().__init__([Path("/disk")], DISK_NBYTES, num_threads=0, files=SimulatedFiles(), queue_s=1e9)

    @property
    def is_busy(self) -> bool:
        stats = self.stats()
        return bool(stats.num_queued_reads or stats.num_queued_writes)

    def step(self) -> None:
        self.advance()


def serve(engine: SimulatedEngine, prompt: Prompt) -> int:
    """Look a prompt up, wait for what a tier has of it, store the rest; return how many chunks were found."""
    while (found := look_up(engine, *prompt)).num_loading:
        release(engine, found.lease)
    release(engine, found.lease)
    num = found.num_chunks
    if num < len(prompt):
        store(engine, *prompt[num:], parent=prompt[num - 1] if num else "")
    return num


def release(engine: SimulatedEngine, lease: bytes) -> None:
    engine.call(lambda number: wire.Release(number, lease))


def check_ends(daemon: SimulatedDaemon, trace: list[Prompt]) -> int:
    """Assert that of each prompt a first part is there, in the pool and in each tier; return how many are cut."""
    num_cut = 0
    for prompt in trace:
        packed = digests(*prompt)
        names = [Digest(packed[at : at + 16]) for at in range(0, len(packed), 16)]
        keys = chunk_keys(names, group=0, shard=0)
        for there in (daemon.service._index.find_sealed(keys), *(tier.find(keys) for tier in daemon.tiers)):
            present = [chunk is not None for chunk in there]
            assert present == sorted(present, reverse=True), (prompt, present)
            num_cut += 0 < sum(present) < len(prompt)
    return num_cut


def replay(daemon: SimulatedDaemon, trace: list[Prompt]) -> list[int]:
    """Return how many chunks of each prompt were found."""
    engine = connect(daemon)
    hits, num_cut = [], 0
    for number, prompt in enumerate(trace):
        hits.append(serve(engine, prompt))
        if number % CHECKED_EACH == 0:
            daemon.service.check_invariants()
            num_cut += check_ends(daemon, trace[: number + 1])
    assert num_cut > 0, "no prompt was eaten in part, so nothing was shown"
    return hits


@pytest.mark.parametrize("seed", range(2))
def test_a_pool_finds_what_its_size_allows(seed: int):
    """What is found is exactly what the least recently used prefixes are, eaten from their ends, prompt by prompt."""
    trace = make_trace(seed, NUM_REQUESTS)
    num_distinct = len({chunk for prompt in trace for chunk in prompt})
    assert num_distinct > 20 * NUM_SLOTS
    daemon = SimulatedDaemon(NUM_SLOTS)
    hits = replay(daemon, trace)
    assert hits == prefix_lru_hits(trace, NUM_SLOTS)
    assert sum(plain_lru_hits(trace, NUM_SLOTS)) < sum(hits) < sum(unbounded_hits(trace))
    daemon.close()


@pytest.mark.parametrize("seed", range(2))
def test_a_disk_behind_a_pool_finds_what_both_allow(seed: int):
    """With a disk behind it, a pool finds nearly what one of the disk's size would, and nothing that was not stored."""
    trace = make_trace(seed, NUM_REQUESTS)
    disk = SteppedDisk()
    daemon = SimulatedDaemon(NUM_SLOTS, tiers=[disk])  # type: ignore[list-item]
    hits = replay(daemon, trace)
    stats = disk.stats()
    num_on_disk = stats.capacity_nbytes // (stats.used_nbytes // stats.num_chunks)
    assert 4 * NUM_SLOTS < num_on_disk < 6 * NUM_SLOTS
    assert sum(hits) >= 0.95 * sum(prefix_lru_hits(trace, num_on_disk))
    assert sum(hits) > 1.3 * sum(prefix_lru_hits(trace, NUM_SLOTS))
    assert all(ours <= most for ours, most in zip(hits, unbounded_hits(trace), strict=True))
    daemon.close()
    disk.close()
