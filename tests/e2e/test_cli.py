"""Commands against a daemon that runs, with an engine that works."""

import contextlib
import json
import os
import pty
import select
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import msgspec

from kvist.cli.bench import Result
from kvist.client.locating import Located
from kvist.server.config import process_environment
from kvist.wire import messages as wire
from tests.e2e.conftest import Connect
from tests.support.daemon import Daemon, command
from tests.support.engine import NAMESPACE, FakeEngine

ENVIRONMENT = {**process_environment(), "COLUMNS": "200"}


def run(daemon: Daemon, *words: str, code: int = 0) -> str:
    done = subprocess.run(
        command(*words, "--socket", daemon.path),
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
        env=ENVIRONMENT,
    )
    assert done.returncode == code, done.stderr
    return done.stdout if not code else done.stderr


def tokens_file(folder: Path, prompt: list[int]) -> str:
    (folder / "tokens.json").write_text(json.dumps(prompt))
    return str(folder / "tokens.json")


def test_status_and_top_show_what_was_done(daemon: Daemon, connect: Connect, prompt: list[int]):
    """Hits in tokens, and the engine by its name, in one look as in the live display's only frame."""
    engine = connect(daemon, engine_id="engine-a")
    engine.store(prompt)
    assert engine.num_found(prompt) == 5
    asked = f"{5 * NAMESPACE.chunk_tokens} tokens asked for, 100.0% in the pool"
    for shown in (run(daemon, "status"), run(daemon, "top", "--once", "--interval", "0.1")):
        assert asked in shown
        assert "engine-a" in shown
    assert "chunks_stored" in run(daemon, "status", "--counters")


def test_engines_are_described(daemon: Daemon, connect: Connect):
    """Model, layers and bytes of what has registered; a name that nobody has ends with 1 and tells who is there."""
    engine = connect(daemon, engine_id="engine-a")
    shown = run(daemon, "describe", "engine-a")
    assert "model · engine-a" in shown
    row = engine.laid.group
    assert f"{row.block_tokens} tokens" in shown
    assert "daemon (the daemon copies)" in shown
    (session,) = json.loads(run(daemon, "describe", "model", "--json"))
    assert msgspec.convert(session, wire.SessionStatus).serves.chunk_tokens == NAMESPACE.chunk_tokens
    assert "engine-a (model)" in run(daemon, "describe", "engine-b", code=1)


def test_a_prompt_is_located(daemon: Daemon, connect: Connect, prompt: list[int], tmp_path: Path):
    """What the engine has stored is found by tokens alone; another salt finds nothing, for people and programs."""
    connect(daemon).store(prompt)
    tokens = tokens_file(tmp_path, prompt)
    num_tokens = 5 * NAMESPACE.chunk_tokens
    assert f"{num_tokens} of {len(prompt)} tokens (93%) can be loaded now" in run(daemon, "lookup", "--tokens", tokens)
    found = msgspec.json.decode(run(daemon, "lookup", "--tokens", tokens, "--json"), type=Located)
    assert (found.num_tokens_now, found.rows[0].num_chunks) == (num_tokens, {"nowhere": 0, "pool": 5})
    other = msgspec.json.decode(run(daemon, "lookup", "--tokens", tokens, "--salt", "x", "--json"), type=Located)
    assert (other.num_tokens_now, other.rows[0].num_chunks) == (0, {"nowhere": 5, "pool": 0})
    assert "less than a chunk" in run(daemon, "lookup", "--tokens", tokens_file(tmp_path, [1]))
    assert daemon.status().num_leases == 0


def test_a_bench_moves_and_verifies(tmp_path: Path):
    """It measures against a living daemon, finds its own bytes again, and leaves no session behind."""
    with Daemon(tmp_path, pool="64MiB") as daemon:
        words = ["--tokens", "512", "--layers", "4", "--heads", "2", "--head-size", "64", "--rounds", "3"]
        result = msgspec.json.decode(run(daemon, "bench", *words, "--json"), type=Result)
        assert (result.num_rounds, result.nbytes) == (3, 512 * 4 * 2 * 2 * 64 * 2)
        assert min(result.store_rate, result.load_rate, result.memcpy_rate) > 0
        assert daemon.count("chunks_loaded") == 2 * 4
        assert "every byte verified" in run(daemon, "bench", *words)
        assert daemon.status().num_sessions == 1
        large = ["--tokens", "65536", *words[2:]]
        assert "128 MiB do not fit into the pool of 64 MiB" in run(daemon, "bench", *large, code=1)


def test_top_is_live(daemon: Daemon, connect: Connect, prompt: list[int]):
    """On a terminal it shows what happens while it runs, survives the daemon's end, and ends with q."""
    engine = connect(daemon)
    master, slave = pty.openpty()
    shown = subprocess.Popen(
        command("top", "--interval", "0.1", "--socket", daemon.path), stdin=slave, stdout=slave, stderr=slave,
        env={**ENVIRONMENT, "TERM": "xterm-256color", "LINES": "50"},
    )  # fmt: skip
    os.close(slave)
    try:
        seen = read_until(master, lambda text: "nothing was asked for" in text)
        assert f"pid {daemon.pid}" in seen
        work(engine, prompt)
        read_until(master, lambda text: f"{5 * NAMESPACE.chunk_tokens} tokens asked for" in text)
        daemon.stop()
        read_until(master, lambda text: "does not answer" in text)
        os.write(master, b"q")
        read_rest(master)
        assert shown.wait(10) == 0
    finally:
        shown.kill()
        shown.wait()
        os.close(master)


def work(engine: FakeEngine, prompt: list[int]) -> None:
    engine.store(prompt)
    assert engine.num_found(prompt) == 5


def read_until(master: int, is_enough: Callable[[str], bool], deadline_s: float = 30.0) -> str:
    """Read what a terminal shows until it is enough."""
    text, end = "", time.monotonic() + deadline_s
    while not is_enough(text):
        assert time.monotonic() < end, text[-2000:]
        if select.select([master], [], [], 0.1)[0]:
            text += os.read(master, 1 << 16).decode(errors="replace")
    return text


def read_rest(master: int) -> None:
    """Read what a program still has to say, which waits for a reader, until the last one at the terminal has ended."""
    with contextlib.suppress(OSError):
        while os.read(master, 1 << 16):
            pass
