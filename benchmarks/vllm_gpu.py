"""Real vLLM on one GPU: what a returning prompt costs, and what its return costs the others.

usage: vllm_gpu.py [--rounds N] [--python PYTHON] [--lane engine|daemon] [--lengths N,N] [--only-returns]

Three engines side by side, each on processor cores of its own: without a connector, with vLLM's own offloading to the
host's memory, with kvist. In every round each answers a new prompt of each length: computed, from its own prefix cache,
and after that was emptied. Then 32 requests decode while four prompts of 30,000 tokens come back. At last a second
engine takes over what the first has stored, and an heir what a killed one has. Written for vLLM 0.24.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from common import daemon, quartiles, report

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tools" / "vllm"))

from child import CONNECTOR, EngineProcess  # noqa: E402

MODEL: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 4096, "intermediate_size": 14336,
    "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128,
    "vocab_size": 128256, "max_position_embeddings": 131072, "rms_norm_eps": 1e-5, "rope_theta": 500000.0,
    "torch_dtype": "bfloat16", "hidden_act": "silu", "bos_token_id": 1, "eos_token_id": 2,
    "tie_word_embeddings": False,
}  # fmt: skip
NUM_BLOCKS = 4608
BLOCK_NBYTES = 2 << 20
POOL_NBYTES = 24 << 30
LENGTHS = (2048, 8192, 32768, 65536)
ROUNDS_MAX = 24
TAIL_TOKENS = 8
"""Behind each length: no cache gives a part of a block, so that every hit leaves the same tokens to be computed."""
RETURNING_TOKENS = 30_000
NUM_DECODING = 32
NUM_PLACES = 4
"""Three engines beside each other, or two, and the daemon."""


class Engines:
    """Starts engines, several at once."""

    def __init__(self, stack: ExitStack, python: Path, folder: Path) -> None:
        self._stack = stack
        self._python = python
        self._folder = folder
        cores = sorted(os.sched_getaffinity(0))
        self._cores = [cores[at::NUM_PLACES] for at in range(NUM_PLACES)]
        """Of one engine each: else they get in each other's way, which the shortest prompts show."""
        self._num_started = 0
        (folder / "config.json").write_text(json.dumps(MODEL))

    def start(self, transfers: dict[str, dict[str, Any] | None]) -> dict[str, EngineProcess]:
        """Start one engine for each name, with its connector's configuration."""
        places = range(self._num_started, self._num_started + len(transfers))
        self._num_started += len(transfers)
        with ThreadPoolExecutor(len(transfers)) as threads:
            started = threads.map(self._start, transfers.keys(), transfers.values(), places)
            engines = dict(zip(transfers, started, strict=True))
        for engine in engines.values():
            self._stack.callback(engine.close)
        return engines

    def _start(self, name: str, transfer: dict[str, Any] | None, place: int) -> EngineProcess:
        os.sched_setaffinity(0, self._cores[place % NUM_PLACES])  # This thread's, and of the process that it starts.
        options: dict[str, Any] = {
            "model": str(self._folder), "load_format": "dummy", "skip_tokenizer_init": True, "max_model_len": 70_000,
            "seed": 0, "gpu_memory_utilization": 0.2, "kv_cache_memory_bytes": NUM_BLOCKS * BLOCK_NBYTES,
            "num_gpu_blocks_override": NUM_BLOCKS, "enable_prefix_caching": True,
            "compilation_config": {
                "mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY", "cudagraph_capture_sizes": [1, 32, 33, 34, 40]
            },
        }  # fmt: skip
        if transfer is not None:
            options["kv_transfer_config"] = transfer
        paths = [str(ROOT / "tools" / "vllm"), os.environ.get("PYTHONPATH", "")]
        variables = {"PYTHONPATH": ":".join(paths), "PYTHONHASHSEED": "0", "VLLM_USE_FLASHINFER_SAMPLER": "0"}
        return EngineProcess(
            self._python, options, self._folder / f"{name}.log", script=ROOT / "benchmarks" / "gpu_engine.py",
            environment=variables,
        )  # fmt: skip


def random_prompt(rng: random.Random, num_tokens: int) -> list[int]:
    """Return token ids that share no prefix with anything."""
    return [rng.randrange(10, 120_000) for _ in range(num_tokens)]


def rotated(engines: dict[str, EngineProcess], number: int) -> list[tuple[str, EngineProcess]]:
    """Return the engines so that each comes first in turn."""
    order = list(engines.items())
    return order[number % len(order) :] + order[: number % len(order)]


def forget(engine: EngineProcess) -> None:
    """Empty an engine's own prefix cache."""
    if not engine.ask("forget")["ok"]:
        raise SystemExit(f"the engine of pid {engine.pid} does not give its blocks back")


def measure_returns(
    engines: dict[str, EngineProcess], lengths: Sequence[int], rounds_min: int, rng: random.Random
) -> None:
    """Report the time to the first token for every length; short ones, which vary most, in more rounds."""
    for length in lengths:
        rounds = max(rounds_min, min(ROUNDS_MAX, rounds_min * max(LENGTHS) // length // 2))
        seconds: dict[tuple[str, str], list[float]] = {}
        differing = dict.fromkeys(engines, 0)
        for number in range(rounds + 1):
            prompt = random_prompt(rng, length + TAIL_TOKENS)
            for name, engine in rotated(engines, number):
                forget(engine)
                found = {"computed": engine.ask("first", prompt=prompt)}
                if name != "plain":
                    found["GPU hit"] = engine.ask("first", prompt=prompt)
                    forget(engine)
                    found["returned"] = engine.ask("first", prompt=prompt)
                    assert found["returned"]["cached"] == length, (name, length, found["returned"]["cached"])
                    differing[name] += found["returned"]["tokens"] != found["GPU hit"]["tokens"]
                if number:  # The first round warms up.
                    for kind, answer in found.items():
                        seconds.setdefault((name, kind), []).append(answer["s"])
        base = seconds["plain", "computed"]
        for name in engines:
            figures: dict[str, Any] = {"computed_ms": ms(seconds[name, "computed"])}
            ratios = [ours / theirs for ours, theirs in zip(seconds[name, "computed"], base, strict=True)]
            figures["computed_over_plain"] = round(statistics.median(ratios), 4)
            if name != "plain":
                returned = seconds[name, "returned"]
                figures |= {"gpu_hit_ms": ms(seconds[name, "GPU hit"]), "returned_ms": ms(returned)}
                figures |= {"quartiles_ms": [round(one * 1e3, 1) for one in quartiles(returned)]}
                figures |= {"differing": differing[name], "rounds": rounds + 1}
            report(f"{length} tokens, {name}", **figures)


def check_that_kv_matters(engine: EngineProcess, rng: random.Random) -> None:
    """Stop unless tokens far from a prompt's end change its answer: else equal answers would prove nothing."""
    head, other, tail = (random_prompt(rng, 1024) for _ in range(3))
    answers = [engine.ask("first", prompt=prompt) for prompt in (head + tail, other + tail)]
    if answers[0]["tokens"] == answers[1]["tokens"]:
        raise SystemExit(f"the answer does not depend on the first {len(head)} tokens: {answers[0]['tokens']}")


def ms(seconds: Sequence[float]) -> float:
    """Return the median in milliseconds."""
    return round(statistics.median(seconds) * 1e3, 2)


def measure_beside(engines: dict[str, EngineProcess], rounds: int, rng: random.Random) -> None:
    """Report what decoding loses to prompts that come back."""
    for number in range(rounds):
        prompts = [random_prompt(rng, RETURNING_TOKENS) for _ in range(4)]
        for name, engine in rotated(engines, number):
            for prompt in prompts:
                engine.ask("first", prompt=prompt, num_tokens=1)
            forget(engine)
            found = engine.ask("beside", prompts=prompts, num_decoding=NUM_DECODING, num_alone=150)
            alone, loading = sorted(found["alone_ms"]), sorted(found["loading_ms"])
            base = alone[len(alone) // 2]
            report(
                f"decoding beside returns, {name}",
                alone_ms=[round(base, 2), round(alone[-1], 2)],
                loading_ms=[round(loading[len(loading) // 2], 2), round(loading[-1], 2)],
                lost_ms_per_load=round((sum(loading) - base * len(loading)) / len(prompts), 1),
                hit_ms=[round(hit["ms"]) for hit in found["hits"]], cached=[hit["cached"] for hit in found["hits"]],
                steps=len(loading),
            )  # fmt: skip


def measure_sharing(start: Engines, kvist: dict[str, Any], first: EngineProcess, rng: random.Random) -> None:
    """Report what a second engine, and the heir of a killed one, find."""
    prompts = [random_prompt(rng, 8192 + TAIL_TOKENS) for _ in range(2)]
    for prompt in prompts:
        first.ask("first", prompt=prompt)
    answers = [first.ask("first", prompt=prompt) for prompt in prompts]  # Computed in the same pieces as after a load.
    forget(first)
    second = start.start({"second": kvist})["second"]
    for kind, engine, number in (("a second engine beside it", second, 0), ("the second, its first killed", second, 1)):
        if number:
            first.kill()
        found = engine.ask("first", prompt=prompts[number])
        is_same = found["tokens"] == answers[number]["tokens"]
        report(kind, cached=found["cached"], first_token_ms=round(found["s"] * 1e3, 1), same_tokens=is_same)
    heir = start.start({"heir": kvist})["heir"]
    for prompt, answer in zip(prompts, answers, strict=True):
        found = heir.ask("first", prompt=prompt)
        is_same = found["tokens"] == answer["tokens"]
        report("the heir", cached=found["cached"], first_token_ms=round(found["s"] * 1e3, 1), same_tokens=is_same)


def main() -> None:
    """Measure and report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--python", type=Path, default=Path(sys.executable), help="an interpreter that has vLLM")
    parser.add_argument("--lane", default="", choices=["", "engine", "daemon"])
    parser.add_argument("--lengths", default=",".join(map(str, LENGTHS)))
    parser.add_argument("--only-returns", action="store_true", help="neither decodes nor heirs")
    arguments = parser.parse_args()
    rng = random.Random(7)
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="kvist-bench-")))
        socket, _ = stack.enter_context(daemon(f"{POOL_NBYTES >> 30}GiB"))
        start = Engines(stack, arguments.python, folder)
        kvist = {**CONNECTOR, "kv_connector_extra_config": {"socket": socket, "lane": arguments.lane}}
        native = {
            "kv_connector": "OffloadingConnector", "kv_role": "kv_both",
            "kv_connector_extra_config": {"cpu_bytes_to_use": POOL_NBYTES},
        }  # fmt: skip
        engines = start.start({"plain": None, "native": native, "kvist": kvist})
        try:
            check_that_kv_matters(engines["plain"], rng)
            lengths = [int(part) for part in arguments.lengths.split(",")]
            measure_returns(engines, lengths, arguments.rounds, rng)
            if arguments.only_returns:
                return
            measure_beside({name: engines[name] for name in ("native", "kvist")}, 2, rng)
            engines["plain"].close()
            engines["native"].close()
            measure_sharing(start, kvist, engines["kvist"], rng)
        finally:
            print((folder / "kvist.log").read_text()[-3000:], file=sys.stderr)


if __name__ == "__main__":
    main()
