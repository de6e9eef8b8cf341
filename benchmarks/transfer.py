"""Store and retrieve of GPU memory through the daemon, against plain copies between pinned memory and the GPU.

Engine and daemon are two processes. Blocks are random, the checksum is always on, and the time is the client's, from
its call to the answer. Plain copies of as many bytes are timed before and after each case.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import time
from collections.abc import Callable

import numpy as np

from common import DEADLINE_S, daemon, make_digests, make_tokens, quartiles, report
from gpu import LLAMA_8B, MANY_LAYERS, OTHERS, GpuEngine, GpuLayout, Link, start_lane
from kvist.client.client import Client, Pending
from kvist.client.lane import EngineLane
from kvist.client.planning import Places
from kvist.device.cuda import driver
from kvist.wire import messages as wire

CHUNK_TOKENS = 256
TOKENS = (256, 1_024, 4_096, 16_384)


class Case:
    """One layout, one number of tokens, one lane."""

    def __init__(self, engine: GpuEngine, num_tokens: int, lane: Client | EngineLane | None = None) -> None:
        self.engine = engine
        self.lane = lane or engine.client
        self.num_chunks = num_tokens // CHUNK_TOKENS
        self.num_tokens = num_tokens
        self.nbytes = num_tokens * engine.layout.token_nbytes
        self._rng = np.random.default_rng(num_tokens)
        self._seeds = itertools.count(num_tokens, 100_003)

    def digests(self) -> bytes:
        """Return keys that no earlier store has used."""
        return make_digests(make_tokens(self.num_tokens, next(self._seeds)), CHUNK_TOKENS, self.engine.layout.name)

    def blocks(self) -> bytes:
        """Return random blocks for all chunks."""
        num = self.num_tokens // self.engine.layout.block_tokens
        return self._rng.permutation(np.arange(1, self.engine.num_blocks, dtype="<i4"))[:num].tobytes()

    def find(self, digests: bytes) -> wire.LookupReply:
        """Return a lease on stored chunks; an engine lane's store is over a moment before they can be found."""
        while True:
            found = self.engine.client.call(lambda i: wire.Lookup(i, digests, wants_places=True), DEADLINE_S)
            assert isinstance(found, wire.LookupReply), found
            if found.num_chunks == self.num_chunks:
                return found
            self.engine.client.call(lambda i: wire.Release(i, found.lease), DEADLINE_S)

    def store(self, digests: bytes, blocks: bytes) -> Pending:
        """Begin a store."""
        return self.lane.submit(lambda i: wire.Store(i, digests, b"", blocks))

    def retrieve(self, found: wire.LookupReply, blocks: bytes) -> Pending:
        """Begin a retrieve, as the vLLM adapter does."""

        def build(number: int) -> wire.Request:
            return wire.Retrieve(number, found.lease, 0, blocks)

        if isinstance(self.lane, EngineLane):
            return self.lane.load(build, Places(found.places[0].slots, found.places[0].checksums))
        return self.lane.submit(build)

    def wait_s(self, *begin: Callable[[], Pending]) -> float:
        """Return how long it takes until requests that are sent now are over, and well."""
        start = time.perf_counter()
        running = [one() for one in begin]
        while not all(pending.is_over for pending in running):
            self.lane.poll(DEADLINE_S)
        seconds = time.perf_counter() - start
        for pending in running:
            reply = pending.reply
            is_stored = isinstance(reply, wire.StoreReply) and reply.num_stored == self.num_chunks
            assert is_stored or (isinstance(reply, wire.RetrieveReply) and not reply.failed), reply
        return seconds


def measure(name: str, case: Case, link: Link, rounds: int) -> None:
    """Measure one case, and the link before and after it: what else runs on a GPU must be switched to first."""
    series: dict[str, list[float]] = {kind: [] for kind in ("store", "retrieve", "both", "out", "in", "two_way")}

    def measure_link() -> None:
        for _ in range(rounds):
            series["out"].append(link.out_s(case.nbytes))
            series["in"].append(link.in_s(case.nbytes))
            series["two_way"].append(link.both_s(case.nbytes))

    measure_link()
    for number in range(rounds + 1):
        digests, blocks, more = case.digests(), case.blocks(), case.blocks()
        store_s = case.wait_s(lambda: case.store(digests, blocks))
        found = case.find(digests)
        retrieve_s = case.wait_s(lambda: case.retrieve(found, blocks))
        found, others = case.find(digests), case.digests()
        both_s = case.wait_s(lambda: case.store(others, blocks), lambda: case.retrieve(found, more))
        if number:  # Tables and caches are filled by the first.
            for kind, seconds in (("store", store_s), ("retrieve", retrieve_s), ("both", both_s)):
                series[kind].append(seconds)
    measure_link()
    median = {kind: statistics.median(values) for kind, values in series.items()}
    report(
        f"{case.engine.layout.name}, {case.num_tokens} tokens, {name} lane",
        store_share=median["out"] / median["store"],
        retrieve_share=median["in"] / median["retrieve"],
        both_share=median["two_way"] / median["both"],
        store_beyond_us=(median["store"] - median["out"]) * 1e6,
        retrieve_beyond_us=(median["retrieve"] - median["in"]) * 1e6,
        gb_per_s=[case.nbytes / median["store"] / 1e9, case.nbytes / median["retrieve"] / 1e9],
        both_gb_per_s=2 * case.nbytes / median["both"] / 1e9,
        ceiling_gb_per_s=[case.nbytes / median["out"] / 1e9, case.nbytes / median["in"] / 1e9],
        store_ms_quartiles=quartiles([seconds * 1e3 for seconds in series["store"]]),
        retrieve_ms_quartiles=quartiles([seconds * 1e3 for seconds in series["retrieve"]]),
        nbytes=case.nbytes,
    )


def check(engine: GpuEngine, lane: Client | EngineLane) -> None:
    """Store everything of a layer's blocks, clear it, retrieve it, and compare every byte."""
    num_tokens = (engine.num_blocks * engine.layout.block_tokens // CHUNK_TOKENS - 1) * CHUNK_TOKENS
    case = Case(engine, num_tokens, lane)
    digests, blocks = case.digests(), case.blocks()
    layer = engine.layout.num_layers // 2
    before = engine.read(layer)
    case.wait_s(lambda: case.store(digests, blocks))
    found = case.find(digests)
    engine.clear(layer)
    case.wait_s(lambda: case.retrieve(found, blocks))
    after = engine.read(layer)
    share = num_tokens / engine.layout.block_tokens / engine.num_blocks
    payload_nbytes = engine.layout.page_nbytes * engine.num_blocks
    assert np.all((after == before) | (after == 0))
    assert 0.98 * share * payload_nbytes < np.count_nonzero(after) <= share * payload_nbytes
    engine.write(layer, before)


def main() -> None:
    """Measure and report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pool", default="12GiB")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--tokens", default=",".join(map(str, TOKENS)))
    parser.add_argument("--lanes", default="engine,daemon")
    parser.add_argument("--layouts", default="", help="only those whose names contain this")
    arguments = parser.parse_args()
    context = driver.Context(next(iter(driver.devices())))
    context.use()
    tokens = [int(part) for part in arguments.tokens.split(",")]
    layouts: list[GpuLayout] = [layout for layout in LLAMA_8B + OTHERS if arguments.layouts in layout.name]
    link = Link(max(tokens) * max(layout.token_nbytes for layout in layouts))
    with daemon(arguments.pool) as (socket, _):
        for layout in layouts:
            begin = time.perf_counter()
            num_blocks = max(tokens) // layout.block_tokens + 40
            engine = GpuEngine(socket, layout, num_blocks, chunk_tokens=CHUNK_TOKENS, name=layout.name)
            report(
                f"{layout.name}: allocated and registered", seconds=time.perf_counter() - begin,
                of_which_registered=engine.registered_s,
            )  # fmt: skip
            for name in arguments.lanes.split(","):
                lane = start_lane(socket, engine) if name == "engine" else engine.client
                check(engine, lane)
                for num_tokens in tokens:
                    measure(name, Case(engine, num_tokens, lane), link, arguments.rounds)
                if name == "engine":
                    lane.close()
            engine.close()
        # The context is open already: what is left is 64 handles to export, send and open.
        first = GpuEngine(socket, LLAMA_8B[1], 40, chunk_tokens=CHUNK_TOKENS, name="first")
        second = GpuEngine(socket, MANY_LAYERS, 40, chunk_tokens=CHUNK_TOKENS, name="second")
        report("64 allocations opened", ms=second.registered_s * 1e3, target_ms=20)
        second.close()
        first.close()


if __name__ == "__main__":
    main()
