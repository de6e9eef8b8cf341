"""How fast the dead are forgotten: an engine that is killed, and a daemon that is killed under load and comes back.

Engine processes here are stand-ins with registered memory; ``tests/engines/test_trouble.py`` does the same to vLLM.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

from common import DEADLINE_S, FakeEngine, Shape, daemon, make_digests, make_tokens, report, wait_until
from kvist.client.client import Client
from kvist.wire import messages as wire

SHAPE = Shape("1 GiB of KV", num_layers=32, page_nbytes=524_288, num_blocks=64)
ROUNDS = 10


def hold_everything(socket: str) -> None:
    """Be an engine that has registered memory and holds a lease, until killed."""
    engine = FakeEngine(socket, SHAPE, name="victim")
    engine.memory[:] = 1
    digests = make_digests(make_tokens(16 * SHAPE.block_tokens, seed=0), SHAPE.block_tokens)
    blocks = np.arange(1, 17, dtype="<i4").tobytes()
    engine.client.call(lambda number: wire.Store(number, digests, b"", blocks), DEADLINE_S)
    engine.client.call(lambda number: wire.Lookup(number, digests), DEADLINE_S)
    print("ready", flush=True)
    for _ in range(10_000):
        lookup = engine.client.call(lambda number: wire.Lookup(number, digests), DEADLINE_S)
        assert isinstance(lookup, wire.LookupReply)
        engine.client.call(lambda number, lease=lookup.lease: wire.Retrieve(number, lease, 0, blocks), DEADLINE_S)


def is_mapped(pid: int) -> bool:
    """Return whether a daemon has an engine's memory mapped."""
    return "kvist-kv" in Path(f"/proc/{pid}/maps").read_text()


def engine_killed() -> None:
    """Kill engines in the middle of a load; time until the daemon has neither lease nor mapping of theirs.

    The kernel takes a killed process's memory down before it closes its sockets: that much time is not the daemon's.
    """
    times = []
    with daemon("1GiB") as (socket, pid):
        observer = Client(socket, engine_id="observer", name="observer", deadline_s=DEADLINE_S)

        def num_leases() -> int:
            reply = observer.call(wire.Status)
            assert isinstance(reply, wire.StatusReply)
            return reply.num_leases

        for _ in range(ROUNDS):
            victim = subprocess.Popen([sys.executable, __file__, socket], stdout=subprocess.PIPE)
            assert victim.stdout is not None
            victim.stdout.readline()
            assert is_mapped(pid)
            assert num_leases() > 0
            begin = time.monotonic()
            victim.send_signal(signal.SIGKILL)
            victim.wait()
            end = time.monotonic()
            wait_until(lambda: not is_mapped(pid) and num_leases() == 0, 10)
            times.append(((time.monotonic() - begin) * 1e3, (end - begin) * 1e3, (time.monotonic() - end) * 1e3))
        since_kill, kernel, since_end = (max(column) for column in zip(*times, strict=True))
        report(
            "engine killed: leases and mappings gone", worst_ms=since_kill, target_ms=100, rounds=ROUNDS,
            kernel_ends_the_process_ms=kernel, worst_after_its_end_ms=since_end,
        )  # fmt: skip


def daemon_killed() -> None:
    """Kill a daemon under load; time until the client's calls are over, and until a new daemon serves it again."""
    endings, returns = [], []
    with tempfile.TemporaryDirectory(prefix="kvist-bench-") as folder:
        socket = f"{folder}/kvist.sock"
        command = [sys.executable, "-m", "kvist", "serve", "--pool", "256MiB", "--socket", socket, "--http", "off"]
        process = subprocess.Popen(command, stderr=subprocess.DEVNULL)
        wait_until(lambda: os.path.exists(socket), 60)
        engine = FakeEngine(socket, SHAPE)
        client = engine.client
        digests = make_digests(make_tokens(8 * SHAPE.block_tokens, seed=0), SHAPE.block_tokens)
        blocks = np.arange(1, 9, dtype="<i4").tobytes()
        for _ in range(ROUNDS):
            pending = [client.submit(lambda number: wire.Store(number, digests, b"", blocks)) for _ in range(4)]
            begin = time.monotonic()
            process.kill()
            process.wait()
            while not all(request.is_over for request in pending):
                client.poll(0.01)
            endings.append((time.monotonic() - begin) * 1e3)
            process = subprocess.Popen(command, stderr=subprocess.DEVNULL)
            # The socket's file is there at once, left by the dead; the new daemon answers when its pool is ready.
            observer = Client(socket, engine_id="observer", name="observer")
            wait_until(lambda: not observer.submit(wire.Ping).is_lost, 60)
            observer.close()
            begin = time.monotonic()
            wait_until(lambda: has_hit(client, digests, blocks), 30)
            returns.append((time.monotonic() - begin) * 1e3)
        process.terminate()
        process.wait()
    report("daemon killed under load: calls over", worst_ms=max(endings), rounds=ROUNDS, target_ms=1000)
    report("daemon back: stored and found again", worst_ms=max(returns), rounds=ROUNDS, target_ms=2000)


def has_hit(client: Client, digests: bytes, blocks: bytes) -> bool:
    """Store a prompt and look it up, without telling the client that its daemon is another one."""
    stored = client.submit(lambda number: wire.Store(number, digests, b"", blocks))
    found = client.submit(lambda number: wire.Lookup(number, digests))
    client.wait(stored, 1.0)
    client.wait(found, 1.0)
    return isinstance(found.reply, wire.LookupReply) and found.reply.num_chunks > 0


if __name__ == "__main__":
    if len(sys.argv) > 1:
        hold_everything(sys.argv[1])
    else:
        engine_killed()
        daemon_killed()
