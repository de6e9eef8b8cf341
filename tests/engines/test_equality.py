"""With kvist an engine says what it says without, whoever computed the KV."""

from __future__ import annotations

from typing import Any

import pytest

from tests.engines.conftest import CHUNK_TOKENS, StartEngine, make_prompts
from tests.support.daemon import Daemon

NUM_TOKENS = 4


def ask_each(engine: Any, prompts: list[list[int]]) -> tuple[list[list[int]], list[int]]:
    """Answer one prompt at a time, so that no answer depends on what else was in its batch."""
    answers, cached = [], []
    for prompt in prompts:
        reply = engine.ask("generate", prompts=[prompt], num_tokens=NUM_TOKENS)
        answers += reply["tokens"]
        cached += reply["cached"]
    return answers, cached


@pytest.mark.parametrize(
    ("model", "count", "longest"), [("llama", 110, 1400), ("qwen3", 90, 1400), ("smollm2", 6, 450)]
)
def test_tokens_and_bytes_survive_the_engine(
    model: str, count: int, longest: int, daemon: Daemon, start_engine: StartEngine
) -> None:
    """Loaded blocks equal stored ones byte for byte, and tokens those of an engine without kvist, in a new process."""
    prompts = make_prompts(count, longest=longest, seed=count)
    kv_mib = 512 if model == "smollm2" else 256
    alone = start_engine(model, None, kv_mib=kv_mib)
    expected, _ = ask_each(alone, prompts)
    alone.close()

    first = start_engine(model, daemon.path, kv_mib=kv_mib)
    assert ask_each(first, prompts)[0] == expected
    assert first.ask("forget")["ok"]
    assert ask_each(first, prompts)[0] == expected
    counts = first.ask("counts")
    stamps = first.ask("stamps")["stamps"]
    first.kill()
    assert counts["counts"].get("different", 0) == counts["counts"].get("failed", 0) == 0
    assert counts["counts"]["equal"] > 0
    assert counts["held"] == counts["tracked"] == 0

    second = start_engine(model, daemon.path, kv_mib=kv_mib)
    second.ask("stamps", known=stamps)
    answers, cached = ask_each(second, prompts)
    assert answers == expected
    assert all(
        found >= (len(prompt) - 1) // CHUNK_TOKENS * CHUNK_TOKENS for prompt, found in zip(prompts, cached, strict=True)
    )
    counts = second.ask("counts")["counts"]
    assert counts["equal"] > 0
    assert counts.get("different", 0) == counts.get("failed", 0) == counts.get("unknown", 0) == 0


def test_batches_hit_too(daemon: Daemon, start_engine: StartEngine) -> None:
    """Prompts that arrive together, many with one beginning, are answered as one by one; nothing stays held."""
    prompts = make_prompts(24, longest=900, seed=5)
    engine = start_engine("llama", daemon.path, max_num_batched_tokens=256)  # So that prefills come in parts.
    expected, _ = ask_each(engine, prompts)
    for _ in range(2):
        assert engine.ask("forget")["ok"]
        reply = engine.ask("generate", prompts=prompts, num_tokens=NUM_TOKENS)
        assert reply["tokens"] == expected
        assert sum(reply["cached"]) > 0
    counts = engine.ask("counts")
    assert counts["counts"].get("different", 0) == counts["counts"].get("failed", 0) == 0
    assert counts["held"] == counts["used_blocks"] == 0
    status = daemon.status()
    assert (status.num_leases, status.num_pinned, status.num_reserved) == (0, 0, 0)


def test_worker_in_its_own_process(daemon: Daemon, start_engine: StartEngine) -> None:
    """An engine of vLLM's default, scheduler and worker in processes of their own, hits what another stored."""
    prompts = make_prompts(6, longest=900, seed=6)
    answers = []
    for is_one_process in (True, False):
        engine = start_engine("llama", daemon.path, is_probed=False, is_one_process=is_one_process)
        tokens, cached = ask_each(engine, prompts)
        answers.append(tokens)
        engine.kill()
    assert answers[0] == answers[1]
    assert all(
        found >= (len(prompt) - 1) // CHUNK_TOKENS * CHUNK_TOKENS for prompt, found in zip(prompts, cached, strict=True)
    )


def test_full_hit_computes_one_token(daemon: Daemon, start_engine: StartEngine) -> None:
    """A prompt that is whole chunks and wholly cached is loaded whole, and answered as if it were computed."""
    prompt = make_prompts(1, longest=4000, seed=7)[0]
    prompt = (prompt * 8)[: 5 * CHUNK_TOKENS]
    engine = start_engine("llama", daemon.path)
    cold = engine.ask("generate", prompts=[prompt], num_tokens=40)
    assert engine.ask("forget")["ok"]
    warm = engine.ask("generate", prompts=[prompt], num_tokens=40)
    assert warm["tokens"] == cold["tokens"]
    assert daemon.count("chunks_loaded") == 5
    counts = engine.ask("counts")["counts"]
    assert (counts["equal"], counts.get("different", 0)) == (5, 0)
