"""Round trips without bytes: ping, lookup, keys, and what an idle engine costs.

Ceiling of a ping: the same two processes exchanging 40 bytes over a Unix socket with nothing else to do.
"""

from __future__ import annotations

import os
import socket
import statistics
import time

import numpy as np

from common import DEADLINE_S, FakeEngine, Shape, cpu_s, daemon, make_digests, make_tokens, quartiles, report
from kvist.wire import messages as wire

ROUNDS = 12
CHUNK_TOKENS = 256
SHAPE = Shape("small pages", num_layers=2, page_nbytes=4096, num_blocks=320, block_tokens=CHUNK_TOKENS)


def raw_round_trips(count: int) -> list[float]:
    """Return the seconds of a bare exchange with a child process."""
    ours, theirs = socket.socketpair()
    pid = os.fork()
    if not pid:
        ours.close()
        while data := theirs.recv(64):
            theirs.send(data)
        os._exit(0)
    theirs.close()
    times = []
    for _ in range(count):
        begin = time.perf_counter()
        ours.send(b"x" * 40)
        ours.recv(64)
        times.append(time.perf_counter() - begin)
    ours.close()
    os.waitpid(pid, 0)
    return times


def timed(call: object, count: int) -> list[float]:
    """Return the seconds of each of ``count`` calls."""
    assert callable(call)
    times = []
    for _ in range(count):
        begin = time.perf_counter()
        call()
        times.append(time.perf_counter() - begin)
    return times


def main() -> None:
    """Measure and report."""
    tokens = make_tokens(65_536, seed=1)
    with daemon("256MiB") as (path, pid):
        engine = FakeEngine(path, SHAPE)
        client = engine.client
        # The two take turns: on a shared machine their ratio says more than either.
        raw, pings = [], []
        for _ in range(ROUNDS):
            raw.append(statistics.median(raw_round_trips(500)))
            pings += [timed(lambda: client.call(wire.Ping), 500)]
        medians = [statistics.median(times) for times in pings]
        report(
            "ping", p50_us=statistics.median(medians) * 1e6, quartiles=quartiles([t * 1e6 for t in medians]),
            p99_us=float(np.percentile(pings, 99)) * 1e6, target_us=40, raw_socket_p50_us=statistics.median(raw) * 1e6,
        )  # fmt: skip

        keys = timed(lambda: make_digests(tokens, CHUNK_TOKENS), 50)
        report("keys of 65,536 tokens from a list", p50_ms=statistics.median(keys) * 1e3, target_ms=4)

        digests = make_digests(tokens, CHUNK_TOKENS)
        blocks = np.arange(1, 257, dtype="<i4").tobytes()
        stored = client.call(lambda number: wire.Store(number, digests, b"", blocks), DEADLINE_S)
        assert isinstance(stored, wire.StoreReply)
        assert stored.num_stored == 256, stored

        def look_up() -> None:
            reply = client.call(lambda number: wire.Lookup(number, digests))
            assert isinstance(reply, wire.LookupReply)
            assert reply.num_chunks == 256
            leases.append(reply.lease)

        leases: list[bytes] = []
        lookups = []
        for _ in range(300):
            lookups += timed(look_up, 1)
            lease = leases.pop()
            client.call(lambda number, lease=lease: wire.Release(number, lease))
        report(
            "lookup of 256 chunks",
            p50_ms=statistics.median(lookups) * 1e3,
            quartiles=quartiles([t * 1e3 for t in lookups]),
            target_ms=1,
        )

        before, begin = cpu_s(pid), time.monotonic()
        time.sleep(5)
        share = (cpu_s(pid) - before) / (time.monotonic() - begin)
        report("daemon with a registered, idle engine", share_of_a_core=share, target=0.002)


if __name__ == "__main__":
    main()
