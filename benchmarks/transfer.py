"""Store and retrieve of GPU memory through the daemon, against plain copies between pinned memory and the GPU.

Engine and daemon are two processes. Blocks are random, the checksum is always on, and the time is the client's, from
its call to the daemon's answer. Each repetition stands beside a plain copy of as many bytes in the same run.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import numpy as np

from common import DEADLINE_S, daemon, make_digests, make_tokens, quartiles, report
from gpu import LLAMA_8B, OTHERS, GpuEngine, GpuLayout, Link, median_ratio
from kvist.client.client import Client
from kvist.device.cuda import driver
from kvist.wire import messages as wire

CHUNK_TOKENS = 256
TOKENS = (256, 1_024, 4_096, 16_384)


class Case:
    """One layout and one number of tokens."""

    def __init__(self, engine: GpuEngine, num_tokens: int) -> None:
        self.engine = engine
        self.num_chunks = num_tokens // CHUNK_TOKENS
        self.num_tokens = num_tokens
        self.nbytes = num_tokens * engine.layout.token_nbytes
        self._rng = np.random.default_rng(num_tokens)
        self._seeds = iter(range(num_tokens, 1 << 30, 100_003))

    def digests(self) -> bytes:
        """Return keys that no earlier store has used."""
        return make_digests(make_tokens(self.num_tokens, next(self._seeds)), CHUNK_TOKENS, self.engine.layout.name)

    def blocks(self) -> bytes:
        """Return random blocks for all chunks."""
        num = self.num_tokens // self.engine.layout.block_tokens
        return self._rng.permutation(np.arange(1, self.engine.num_blocks, dtype="<i4"))[:num].tobytes()

    def lease(self, digests: bytes) -> bytes:
        found = self.engine.client.call(lambda i: wire.Lookup(i, digests), DEADLINE_S)
        assert isinstance(found, wire.LookupReply) and found.num_chunks == self.num_chunks, found
        return found.lease


def timed(call: Callable[[], object]) -> tuple[float, object]:
    """Return a call's seconds and its answer."""
    begin = time.perf_counter()
    answer = call()
    return time.perf_counter() - begin, answer


def store(client: Client, case: Case, digests: bytes, blocks: bytes) -> float:
    """Return the seconds of a store."""
    seconds, reply = timed(lambda: client.call(lambda i: wire.Store(i, digests, b"", blocks), DEADLINE_S))
    assert isinstance(reply, wire.StoreReply) and reply.num_stored == case.num_chunks, reply
    return seconds


def retrieve(client: Client, lease: bytes, blocks: bytes) -> float:
    """Return the seconds of a retrieve."""
    seconds, reply = timed(lambda: client.call(lambda i: wire.Retrieve(i, lease, 0, blocks), DEADLINE_S))
    assert isinstance(reply, wire.RetrieveReply) and not reply.failed, reply
    return seconds


def both(client: Client, case: Case, digests: bytes, lease: bytes) -> float:
    """Return the seconds of a store and a retrieve that were sent together."""
    blocks = case.blocks()
    more = case.blocks()
    begin = time.perf_counter()
    stored = client.submit(lambda i: wire.Store(i, digests, b"", blocks))
    loaded = client.submit(lambda i: wire.Retrieve(i, lease, 0, more))
    client.wait(stored, DEADLINE_S)
    client.wait(loaded, DEADLINE_S)
    seconds = time.perf_counter() - begin
    assert isinstance(stored.reply, wire.StoreReply) and stored.reply.num_stored == case.num_chunks, stored
    assert isinstance(loaded.reply, wire.RetrieveReply) and not loaded.reply.failed, loaded
    return seconds


def measure(case: Case, link: Link, rounds: int) -> None:
    """Measure one case, each repetition beside its ceiling."""
    client = case.engine.client
    times: dict[str, list[float]] = {name: [] for name in ("store", "retrieve", "both", "out", "in", "two_way")}
    for number in range(rounds + 1):
        digests, blocks = case.digests(), case.blocks()
        times["out"].append(link.out_s(case.nbytes))
        times["store"].append(store(client, case, digests, blocks))
        lease = case.lease(digests)
        times["in"].append(link.in_s(case.nbytes))
        times["retrieve"].append(retrieve(client, lease, blocks))
        times["two_way"].append(link.both_s(case.nbytes))
        times["both"].append(both(client, case, case.digests(), case.lease(digests)))
        if not number:  # Tables and caches are filled by the first.
            for series in times.values():
                series.clear()
    shares = {
        "store": median_ratio(times["out"], times["store"]),
        "retrieve": median_ratio(times["in"], times["retrieve"]),
        "both": median_ratio(times["two_way"], times["both"]),
    }
    report(
        f"{case.engine.layout.name}, {case.num_tokens} tokens",
        **{f"{name}_share": share for name, share in shares.items()},
        store_gb_per_s=case.nbytes / statistics.median(times["store"]) / 1e9,
        retrieve_gb_per_s=case.nbytes / statistics.median(times["retrieve"]) / 1e9,
        both_gb_per_s=2 * case.nbytes / statistics.median(times["both"]) / 1e9,
        store_beyond_us=(statistics.median(times["store"]) - statistics.median(times["out"])) * 1e6,
        retrieve_beyond_us=(statistics.median(times["retrieve"]) - statistics.median(times["in"])) * 1e6,
        retrieve_ms_quartiles=quartiles([seconds * 1e3 for seconds in times["retrieve"]]),
        ceiling_gb_per_s=[case.nbytes / statistics.median(times[name]) / 1e9 for name in ("out", "in")],
        nbytes=case.nbytes,
    )


def check(engine: GpuEngine) -> None:
    """Store everything of a layer's blocks, clear it, retrieve it, and compare every byte."""
    case = Case(engine, (engine.num_blocks * engine.layout.block_tokens // CHUNK_TOKENS - 1) * CHUNK_TOKENS)
    digests, blocks = case.digests(), case.blocks()
    before = engine.read(3)
    store(engine.client, case, digests, blocks)
    lease = case.lease(digests)
    engine.clear(3)
    retrieve(engine.client, lease, blocks)
    after = engine.read(3)
    share = case.num_tokens / engine.layout.block_tokens / engine.num_blocks
    assert np.all((after == before) | (after == 0)) and np.count_nonzero(after) > 0.98 * share * len(after)


def main() -> None:
    """Measure and report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pool", default="12GiB")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--tokens", default=",".join(map(str, TOKENS)))
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
            report(f"{layout.name}: allocated and registered", seconds=time.perf_counter() - begin)
            check(engine)
            for num_tokens in tokens:
                measure(Case(engine, num_tokens), link, arguments.rounds)
            engine.close()


if __name__ == "__main__":
    main()
