"""Show what kvist is for: a long prompt, answered by a new engine process from the KV that a dead one computed.

At last the daemon is another one as well, and the KV comes from disk.

The law of this program: it says only what it has just measured, and exits with 1 if a token differs from the cold
answer's or a hit was not served. Run it with ``make demo``.
"""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tools" / "vllm"))

import numpy as np
from rich.console import Console
from rich.table import Table

from child import EngineDied, EngineProcess, cpu_dtype, engine_options
from kvist.client.client import Client
from kvist.wire import messages as wire

PYTHON: Final = ROOT / ".venv-vllm" / "bin" / "python"
MODEL: Final = ROOT / ".models" / "smollm2"
DOCUMENT_TOKENS: Final = 4000
ANSWER_TOKENS: Final = 12
QUESTIONS: Final = ("What is kvist?", "What happens when an engine dies?")
console = Console(highlight=False, width=None if sys.stdout.isatty() else 110)


@dataclass(frozen=True)
class Row:
    """One engine's answers."""

    name: str
    ttft_s: float
    """Of the first question."""
    tokens: list[list[int]]
    num_cached: int
    """Tokens of the first question's prompt that were not computed."""
    loaded_nbytes: int
    """What the daemon wrote into the engine's memory for these answers."""
    loading_s: float


@contextmanager
def daemon(folder: Path) -> Iterator[str]:
    """Run ``kvist serve``; yield its socket."""
    socket = str(folder / "kvist.sock")
    command = [sys.executable, "-m", "kvist", "serve", "--pool", "1GiB", "--socket", socket, "--log-level", "warning"]
    process = subprocess.Popen([*command, "--http", "off", "--disk", str(folder / "disk"), "--disk-size", "1GiB"])
    try:
        deadline = time.monotonic() + 60
        while not os.path.exists(socket):
            if process.poll() is not None or time.monotonic() > deadline:
                raise SystemExit(f"the daemon did not start (exit code {process.poll()})")
            time.sleep(0.02)
        yield socket
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(30)


def counters(socket: str) -> dict[str, int]:
    """Return what the daemon has counted so far."""
    client = Client(socket, engine_id="demo", name="demo")
    reply = client.call(wire.Status, deadline_s=10)
    client.close()
    assert isinstance(reply, wire.StatusReply)
    return reply.counters


def answer(name: str, engine: EngineProcess, prompts: list[list[int]], socket: str) -> Row:
    """Let an engine answer all questions, one after another, and note what the daemon did for it."""
    before = counters(socket)
    tokens, ttft_s, num_cached = [], [], []
    for prompt in prompts:
        reply = engine.ask("generate", prompts=[prompt], num_tokens=ANSWER_TOKENS)
        tokens.append(reply["tokens"][0])
        ttft_s.append(reply["ttft_s"][0])
        num_cached.append(reply["cached"][0])
    after = counters(socket)
    loaded = after.get("bytes_loaded", 0) - before.get("bytes_loaded", 0)
    loading_s = (after.get("load_ns", 0) - before.get("load_ns", 0)) / 1e9
    row = Row(name, ttft_s[0], tokens, num_cached[0], loaded, loading_s)
    console.print(f"  {name}: first token after {row.ttft_s:.2f} s, {row.num_cached} tokens were not computed")
    return row


def start(name: str, socket: str, folder: Path) -> EngineProcess:
    """Start an engine with kvist's one flag."""
    console.print(f"starting engine process {name} (vLLM on the CPU, {cpu_dtype()}; some 20 s) ...")
    options = engine_options(MODEL, socket=socket, kv_nbytes=1 << 30)
    return EngineProcess(PYTHON, options, folder / f"engine-{name}.log")


def make_prompts(engine: EngineProcess) -> list[list[int]]:
    """Return each question behind a document of ``DOCUMENT_TOKENS`` tokens: this project's own pages."""
    text = "\n\n".join((ROOT / name).read_text() for name in ("README.md", "docs/architecture.md", "docs/glossary.md"))
    document = engine.ask("encode", text=text)["tokens"][:DOCUMENT_TOKENS]
    assert len(document) == DOCUMENT_TOKENS, f"the document has {len(document)} tokens"
    questions = [engine.ask("encode", text=f"\n\nQuestion: {question}\nAnswer:")["tokens"] for question in QUESTIONS]
    return [document + question for question in questions]


def memcpy_rate(nbytes: int) -> float:
    """Return how many bytes a second one thread copies here, in memory that is all present."""
    source, target = np.ones(nbytes, dtype=np.uint8), np.ones(nbytes, dtype=np.uint8)
    times = []
    for _ in range(5):
        begin = time.perf_counter()
        ctypes.memmove(target.ctypes.data, source.ctypes.data, nbytes)
        times.append(time.perf_counter() - begin)
    return nbytes / sorted(times)[2]


def show(rows: list[Row]) -> bool:
    """Print the table and the sentence; return whether all is as promised."""
    cold = rows[0]
    ceiling = memcpy_rate(max(row.loaded_nbytes for row in rows) or 1 << 27)
    table = Table(title=f"{len(QUESTIONS)} questions about a document of {DOCUMENT_TOKENS} tokens, SmolLM2-135M")
    for column in ("engine", "first token", "tokens identical", "tokens from kvist", "GB/s", "of one-thread memcpy"):
        table.add_column(column, justify="left" if column == "engine" else "right")
    for row in rows:
        rate = row.loaded_nbytes / row.loading_s if row.loading_s else 0.0
        table.add_row(
            row.name, f"{row.ttft_s:.2f} s",
            "the reference" if row is cold else "yes" if row.tokens == cold.tokens else "NO",
            str(row.num_cached) if row.loaded_nbytes else "0",
            f"{rate / 1e9:.1f}" if rate else "-", f"{rate / ceiling:.0%}" if rate else "-",
        )  # fmt: skip
    console.print(table)
    hits = rows[1:]
    is_served = all(row.num_cached and row.loaded_nbytes for row in hits) and not cold.num_cached
    is_equal = all(row.tokens == cold.tokens for row in hits)
    if is_served and is_equal:
        console.print(
            f"A new engine process answered {cold.ttft_s / rows[2].ttft_s:.0f} times sooner than the first one, with "
            f"the same tokens, from KV that the kvist daemon kept while the engine that had computed it was killed; "
            f"with a new daemon as well, from disk, {cold.ttft_s / rows[-1].ttft_s:.0f} times sooner."
        )
    else:
        console.print(f"[red]NOT as promised: hits served: {is_served}, tokens identical: {is_equal}[/red]")
    return is_served and is_equal


def main() -> int:
    """Run the demonstration; return the exit code."""
    begin = time.monotonic()
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="kvist-demo-")))
        (folder / "disk").mkdir()
        console.print("starting the daemon: kvist serve --pool 1GiB --disk PATH --disk-size 1GiB")
        first = stack.enter_context(ExitStack())
        socket = first.enter_context(daemon(folder))
        engine = stack.enter_context(start("A", socket, folder))
        prompts = make_prompts(engine)
        console.print("asking A; the document is computed, which takes a while on a CPU ...")
        rows = [answer("A, cold", engine, prompts, socket)]
        assert engine.ask("forget")["ok"], "the engine could not empty its own cache"
        rows.append(answer("A, its own cache emptied", engine, prompts, socket))
        console.print(f"kill -9 {engine.pid}")
        engine.kill()
        engine = stack.enter_context(start("B", socket, folder))
        rows.append(answer("B, a new process", engine, prompts, socket))
        console.print(f"kill -9 {engine.pid}, and stopping the daemon")
        engine.kill()
        first.close()
        socket = stack.enter_context(daemon(folder))
        engine = stack.enter_context(start("C", socket, folder))
        rows.append(answer("C, with a new daemon: from disk", engine, prompts, socket))
        is_good = show(rows)
    console.print(f"({time.monotonic() - begin:.0f} s in all)")
    return 0 if is_good else 1


if __name__ == "__main__":
    try:
        sys.exit(main())
    except EngineDied as error:
        console.print(f"[red]the engine died:[/red] {error}", markup=True)
        sys.exit(1)
