"""A prompt that comes back after a restart, from disk: kvist and LMCache, in turns, in real vLLM on the CPU.

usage: disk_peer.py [--rounds N] [--at FOLDER] [--direct] [--lmcache-python PYTHON]

One random prompt of 4,000 tokens and the real SmolLM2-135M. Each system computes and writes it once, and stops. In
every round each system, first and second in turn, starts anew, its server and its engine, with its files out of the
page cache; it answers the prompt from disk, and then, with the engine's own cache emptied, from memory. LMCache
(0.5.6, its multiprocess server, chunks of 128 tokens) uses its adapter ``fs`` as it comes, with ``--direct`` once more
with direct I/O; it needs an environment of its own: ``make peers``. What was read is what the kernel says of the
server's process.
"""

from __future__ import annotations

import argparse
import os
import random
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from common import daemon, quartiles, report, wait_until
from ttft import (
    LMCACHE_VARIABLES,
    MODEL,
    NUM_TOKENS,
    ROOT,
    EngineProcess,
    engine_options,
    lmcache_options,
    start_lmcache,
)

KV_NBYTES = 1 << 30
QUIET_S = 2.0
"""A server that has written nothing for so long has written all."""


@dataclass(frozen=True)
class System:
    """One cache and the engine beside it."""

    serve: Callable[[ExitStack], tuple[int, dict[str, Any]]]
    """Start the server; return its pid and the engine's options."""
    python: Path
    variables: dict[str, str]
    folder: Path


@dataclass(frozen=True)
class Restored:
    """One answer after a restart."""

    start_s: float
    """Until the server answers."""
    disk_s: float
    memory_s: float
    """To the first token."""
    read_nbytes: int


def io_nbytes(pid: int, name: str) -> int:
    """Return what a process has read from or written to storage."""
    lines = Path(f"/proc/{pid}/io").read_text().splitlines()
    return int(dict(line.split(": ") for line in lines)[name])


def wait_written(pid: int) -> int:
    """Wait until a server has written all that it will; return how much that was."""
    last, since = 0, time.monotonic()

    def is_quiet() -> bool:
        nonlocal last, since
        written = io_nbytes(pid, "write_bytes")
        if written != last:
            last, since = written, time.monotonic()
        return last > 0 and time.monotonic() - since > QUIET_S

    wait_until(is_quiet, 120)
    return last


def leave_page_cache(folder: Path) -> None:
    """Let the kernel forget the contents of files."""
    os.sync()
    for path in folder.rglob("*"):
        if path.is_file():
            fd = os.open(path, os.O_RDONLY)
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(fd)


def make_systems(at: Path, lmcache_python: Path, *, has_direct: bool) -> dict[str, System]:
    """Return what is compared, each with a folder of its own."""
    options = engine_options(MODEL, socket=None, kv_nbytes=KV_NBYTES)

    def kvist(stack: ExitStack) -> tuple[int, dict[str, Any]]:
        socket, pid = stack.enter_context(daemon("1GiB", "--disk", str(at / "kvist"), "--disk-size", "2GiB"))
        return pid, engine_options(MODEL, socket=socket, kv_nbytes=KV_NBYTES)

    def lmcache(stack: ExitStack, name: str, more: str) -> tuple[int, dict[str, Any]]:
        adapter = f'{{"type": "fs", "base_path": "{at / name}"{more}}}'
        return start_lmcache(stack, lmcache_python, "--l2-adapter", adapter), lmcache_options(options)

    systems = {"kvist": System(kvist, ROOT / ".venv-vllm" / "bin" / "python", {}, at / "kvist")}
    if not lmcache_python.exists():
        print(f"no LMCache at {lmcache_python}: `make peers` installs it; measured without it")
        return systems
    peers = {"lmcache": ""} | ({"lmcache direct": ', "use_odirect": true'} if has_direct else {})
    for name, more in peers.items():
        systems[name] = System(
            lambda stack, name=name, more=more: lmcache(stack, name, more),  # type: ignore[misc]
            lmcache_python, LMCACHE_VARIABLES, at / name,
        )  # fmt: skip
    return systems


def start(stack: ExitStack, system: System, log: Path) -> tuple[int, float, EngineProcess]:
    """Start a server and an engine; return the server's pid, the seconds until it answered, and the engine."""
    begin = time.perf_counter()
    pid, options = system.serve(stack)
    start_s = time.perf_counter() - begin
    engine = EngineProcess(system.python, options, log, is_one_process=False, environment=system.variables)
    stack.enter_context(engine)
    engine.ask("generate", prompts=[[5] * 60], num_tokens=4)  # Less than a chunk, so that only the engine gets warm.
    return pid, start_s, engine


def compute(name: str, system: System, prompt: list[int], log: Path) -> list[list[int]]:
    """Let a system compute the prompt and write it; return the answer."""
    with ExitStack() as stack:
        pid, start_s, engine = start(stack, system, log)
        cold = engine.ask("generate", prompts=[prompt], num_tokens=4)
        assert not cold["cached"][0], (name, cold)
        written = wait_written(pid)
        report(f"cold, {name}", ttft_s=cold["ttft_s"][0], start_s=start_s, tokens=NUM_TOKENS, written_nbytes=written)
    answer: list[list[int]] = cold["tokens"]
    return answer


def restore(name: str, system: System, prompt: list[int], right: list[list[int]], log: Path) -> Restored:
    """Start a system again, and let it answer from disk, then from memory."""
    leave_page_cache(system.folder)
    with ExitStack() as stack:
        pid, start_s, engine = start(stack, system, log)
        before = io_nbytes(pid, "read_bytes")
        from_disk = engine.ask("generate", prompts=[prompt], num_tokens=4)
        read_nbytes = io_nbytes(pid, "read_bytes") - before
        while not engine.ask("forget")["ok"]:
            time.sleep(0.05)
        from_memory = engine.ask("generate", prompts=[prompt], num_tokens=4)
        for hit in (from_disk, from_memory):
            assert hit["tokens"] == right, (name, hit, right)
            if not hit["cached"][0]:
                print(f"{name}: nothing of the prompt came back: {hit}")
        restored = Restored(start_s, from_disk["ttft_s"][0], from_memory["ttft_s"][0], read_nbytes)
        report(
            f"round, {name}", start_s=start_s, disk_ttft_s=restored.disk_s, memory_ttft_s=restored.memory_s,
            read_nbytes=read_nbytes, cached=[from_disk["cached"][0], from_memory["cached"][0]],
        )  # fmt: skip
    return restored


def main() -> None:
    """Measure and report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--at", type=Path, default=Path(tempfile.gettempdir()), help="a folder on the disk to measure")
    parser.add_argument("--direct", action="store_true", help="also measure LMCache with direct I/O")
    parser.add_argument("--lmcache-python", type=Path, default=ROOT / ".venv-lmcache" / "bin" / "python")
    arguments = parser.parse_args()
    prompt = [random.Random(1).randrange(3, 1000) for _ in range(NUM_TOKENS)]
    folder = Path(tempfile.mkdtemp(prefix="kvist-disk-peer-", dir=arguments.at))
    try:
        systems = make_systems(folder, arguments.lmcache_python, has_direct=arguments.direct)
        answers = {name: compute(name, system, prompt, folder / "log") for name, system in systems.items()}
        results: dict[str, list[Restored]] = {name: [] for name in systems}
        for number in range(arguments.rounds):
            for name in list(systems)[:: -1 if number % 2 else 1]:
                results[name].append(restore(name, systems[name], prompt, answers[name], folder / "log"))
    finally:
        shutil.rmtree(folder)
    for name, rounds in results.items():
        report(
            f"from disk, {name}",
            ttft_s=statistics.median(one.disk_s for one in rounds),
            quartiles=quartiles([one.disk_s for one in rounds]),
            memory_ttft_s=statistics.median(one.memory_s for one in rounds),
            start_s=statistics.median(one.start_s for one in rounds),
            read_rate=statistics.median(one.read_nbytes / one.disk_s for one in rounds),
            kvist_over_this=statistics.median(
                ours.disk_s / one.disk_s for ours, one in zip(results["kvist"], rounds, strict=True)
            ),
        )


if __name__ == "__main__":
    main()
