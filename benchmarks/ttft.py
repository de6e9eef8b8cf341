"""Time to the first token of a hit, in real vLLM: kvist, a copy inside the worker's process, and LMCache, interleaved.

usage: ttft.py [--rounds N] [--peers inprocess,lmcache] [--lmcache-python PYTHON]

One random prompt of 4,000 tokens and the real SmolLM2-135M, each system in an engine of its own with vLLM's default of
several processes. In every round each engine empties its own prefix cache and answers the prompt again, so each answer
is a hit of the system beside it. LMCache (0.5.6, chunks of 128 tokens, as large as the engine's block) needs an
environment of its own: ``make peers``.
"""

from __future__ import annotations

import argparse
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from common import daemon, quartiles, report, wait_until

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tools" / "vllm"))

from child import EngineProcess, engine_options  # noqa: E402

MODEL = ROOT / ".models" / "smollm2"
NUM_TOKENS = 4000
SETTLE_S = 2.0
LMCACHE_PORT, LMCACHE_HTTP_PORT = 15555, 18089


def start_lmcache(stack: ExitStack, python: Path, *options: str) -> int:
    """Run an LMCache server on loopback until the stack unwinds; return its pid."""
    command = [
        str(python.with_name("lmcache")), "server", "--host", "127.0.0.1", "--port", str(LMCACHE_PORT),
        "--http-host", "127.0.0.1", "--http-port", str(LMCACHE_HTTP_PORT), "--l1-size-gb", "3",
        "--eviction-policy", "LRU", "--chunk-size", "128", "--supported-transfer-mode", "auto",
        "--shm-name", f"kvist_bench_{os.getpid()}", *options,
    ]  # fmt: skip
    variables = {**os.environ, "LMCACHE_TRACK_USAGE": "false", "LMCACHE_DISABLE_BANNER": "1", "HF_HUB_OFFLINE": "1"}
    process = subprocess.Popen(command, env=variables, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    stack.callback(process.wait, 30)
    stack.callback(process.terminate)

    def answers() -> bool:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{LMCACHE_HTTP_PORT}/healthcheck", timeout=1):
                return True
        except urllib.error.HTTPError:
            return True
        except OSError:
            return False

    wait_until(answers, 120)
    return process.pid


LMCACHE_VARIABLES = {"LMCACHE_TRACK_USAGE": "false", "LMCACHE_DISABLE_BANNER": "1"}
"""Of an engine beside an LMCache server."""


def lmcache_options(options: dict[str, Any]) -> dict[str, Any]:
    """Return an engine's options with LMCache's connector."""
    extra = {
        "lmcache.mp.host": "tcp://127.0.0.1", "lmcache.mp.port": LMCACHE_PORT, "lmcache.mp.mp_transfer_mode": "auto",
    }  # fmt: skip
    return {**options, **connector("LMCacheMPConnector", "lmcache.integration.vllm.lmcache_mp_connector", extra)}


def connector(name: str, module: str, extra: dict[str, Any]) -> dict[str, Any]:
    """Return vLLM's option for a peer's connector."""
    return {
        "kv_transfer_config": {
            "kv_connector": name, "kv_connector_module_path": module, "kv_role": "kv_both",
            "kv_connector_extra_config": extra,
        }
    }  # fmt: skip


def start_engines(stack: ExitStack, peers: list[str], lmcache_python: Path) -> dict[str, EngineProcess]:
    """Start one engine for each system."""
    folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="kvist-bench-")))
    socket, _ = stack.enter_context(daemon("1GiB"))
    options = engine_options(MODEL, socket=None, kv_nbytes=1 << 30)
    python = ROOT / ".venv-vllm" / "bin" / "python"
    systems: dict[str, tuple[Path, dict[str, Any], dict[str, str]]] = {
        "kvist": (python, engine_options(MODEL, socket=socket, kv_nbytes=1 << 30), {}),
    }
    if "inprocess" in peers:
        path = f"{ROOT / 'tools' / 'vllm'}:{ROOT / 'benchmarks' / 'peers'}"
        systems["inprocess"] = (
            python, {**options, **connector("InProcessCopyConnector", "inprocess", {})}, {"PYTHONPATH": path}
        )  # fmt: skip
    if "lmcache" in peers:
        start_lmcache(stack, lmcache_python)
        systems["lmcache"] = lmcache_python, lmcache_options(options), LMCACHE_VARIABLES
    engines = {}
    for name, (interpreter, chosen, variables) in systems.items():
        engine = EngineProcess(
            interpreter, chosen, folder / f"{name}.log", is_one_process=False, environment=variables
        )  # fmt: skip
        engines[name] = stack.enter_context(engine)
    return engines


def main() -> None:
    """Measure and report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--peers", default="inprocess,lmcache")
    parser.add_argument("--lmcache-python", type=Path, default=ROOT / ".venv-lmcache" / "bin" / "python")
    arguments = parser.parse_args()
    peers = arguments.peers.split(",")
    if "lmcache" in peers and not arguments.lmcache_python.exists():
        print(f"no LMCache at {arguments.lmcache_python}: `make peers` installs it; measured without it")
        peers.remove("lmcache")
    prompt = [random.Random(1).randrange(3, 1000) for _ in range(NUM_TOKENS)]
    hits: dict[str, list[float]] = {}
    with ExitStack() as stack:
        engines = start_engines(stack, peers, arguments.lmcache_python)
        answers = {}
        for name, engine in engines.items():
            cold = engine.ask("generate", prompts=[prompt], num_tokens=4)
            answers[name] = cold["tokens"]
            report(f"cold, {name}", ttft_s=cold["ttft_s"][0], tokens=NUM_TOKENS, cached=cold["cached"][0])
        assert all(answer == answers["kvist"] for answer in answers.values()), answers
        for number in range(arguments.rounds):
            order = list(engines.items())
            # Every system goes first in turn, after a pause: threads that still spin for the one before cost the next.
            for name, engine in order[number % len(order) :] + order[: number % len(order)]:
                time.sleep(SETTLE_S)
                while not engine.ask("forget")["ok"]:
                    time.sleep(0.05)
                hit = engine.ask("generate", prompts=[prompt], num_tokens=4)
                assert hit["tokens"] == answers["kvist"], (name, hit)
                assert hit["cached"][0] == 3968, (name, hit)
                hits.setdefault(name, []).append(hit["ttft_s"][0])
    for name, times in hits.items():
        against = {}
        if name != "kvist":
            ratios = [ours / theirs for ours, theirs in zip(hits["kvist"], times, strict=True)]
            against = {
                "kvist_over_this": statistics.median(ratios),
                "target": {"inprocess": 1.15, "lmcache": 1.0}[name],
            }
        report(f"hit, {name}", ttft_s=statistics.median(times), quartiles=quartiles(times), **against)


if __name__ == "__main__":
    main()
