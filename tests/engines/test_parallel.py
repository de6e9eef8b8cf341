"""What several workers of one engine have stored, each its part, a new engine of as many finds whole.

Workers are processes of vLLM's own, on the CPU: two tensor-parallel ranks with half of the KV heads each, and two that
hold the same latent KV. Pages of vLLM's CPU kernels are opaque, so chunks are not shared between numbers of workers:
that they are where heads can be told apart is held by ``tests/e2e/test_rows.py``. Stages of a pipeline are not tried:
where nothing is compiled, vLLM 0.32 ends on CPUs with the first request to two stages, with kvist and without.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.engines.conftest import launch_engine, make_prompts
from tests.engines.families import Ledger, answer_each
from tests.support.daemon import Daemon

MODELS = ("llama", "deepseek_v2")


@dataclass(frozen=True, slots=True)
class Case:
    """A model, how its engine is cut, and what its daemon then keeps."""

    model: str
    options: dict[str, int]
    chunk_tokens: int
    num_shards: int
    """Of each prefix."""
    num_readers: int
    """Of each shard."""


CASES = {
    "heads": Case("llama", {"tensor_parallel_size": 2}, 128, 2, 1),
    "latent": Case("deepseek_v2", {"tensor_parallel_size": 2}, 256, 1, 2),
}


@pytest.mark.parametrize("name", CASES)
def test_two_workers(name: str, tmp_path: Path) -> None:
    """Tokens are those without kvist, and loaded blocks are computed ones on each worker, in a new engine too; what all
    workers hold is kept once.
    """
    case = CASES[name]
    prompts = [prompt for prompt in make_prompts(8, longest=1100, seed=51) if len(prompt) > case.chunk_tokens]

    def start(number: int, socket: str | None):
        log = tmp_path / f"engine-{number}.log"
        options = {"kv_mib": 96, "distributed_executor_backend": "mp", **case.options}
        return launch_engine(case.model, socket, log, script="blocks.py", **options)

    with Daemon(tmp_path, pool="256MiB") as daemon:
        with ThreadPoolExecutor(1) as pool, start(0, None) as alone:
            starting = pool.submit(start, 1, daemon.path)
            expected = answer_each(alone, prompts).tokens
            first = starting.result()
        with first:
            ledger = Ledger([group["block_tokens"] for group in first.ask("groups")["groups"]])
            assert answer_each(first, prompts, ledger).tokens == expected
            kept = daemon.status()
            hits = answer_each(first, prompts, ledger, is_own_kept=False)
            first.kill()
        with start(2, daemon.path) as second:
            again = answer_each(second, prompts, ledger, is_own_kept=False)
            assert "runs WITHOUT a cache" not in second.log.read_text()
        status = daemon.status()
    assert hits.tokens == again.tokens == expected
    num_whole = [(len(prompt) - 1) // case.chunk_tokens for prompt in prompts]
    for answers in (hits, again):
        assert all(found >= number * case.chunk_tokens for found, number in zip(answers.cached, num_whole, strict=True))
    assert ledger.wrong == []
    assert ledger.found[0] > 0

    whole = {tuple(prompt[:end]) for prompt in prompts for end in ends_of(prompt, case.chunk_tokens)}
    most = len(whole) + len(prompts)  # A sequence may end with one more: a chunk, or a tail.
    assert case.num_shards * len(whole) <= kept.num_sealed <= case.num_shards * most
    assert status.counters["chunks_loaded"] >= 2 * case.num_shards * case.num_readers * sum(num_whole)
    assert (status.num_leases, status.num_pinned, status.num_reserved) == (0, 0, 0)


def ends_of(prompt: list[int], chunk_tokens: int) -> range:
    return range(chunk_tokens, len(prompt) + 1, chunk_tokens)
