"""An engine that speculates keeps nothing but what it has verified, and a hit says what it says without kvist.

Answers are long enough for chunks to end among their tokens, in steps that compute drafts as well; then the
conversations go on from there. Drafts are looked up in the text, or come from a model whose layers are kept beside the
target's: the target itself, whose drafts are taken, another, or a head for EAGLE. Those of the others hardly ever are.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from child import EngineProcess
from tests.engines import conftest
from tests.engines.conftest import CHUNK_TOKENS, launch_engine
from tests.engines.families import Ledger
from tests.support.daemon import Daemon

MODELS = ("llama", "qwen3", "llama_eagle")
NUM_TOKENS = 150
LENGTHS = (200, 333, 520, 700)
"""Of the prompts: no block ends in the last steps of an answer, which nobody sees."""
SPECULATIONS: dict[str, dict[str, Any]] = {
    "text": {"method": "ngram", "prompt_lookup_min": 1, "prompt_lookup_max": 3},
    "itself": {"method": "draft_model", "model": str(conftest.MODELS / "llama")},
    "another": {"method": "draft_model", "model": str(conftest.MODELS / "qwen3")},
    "head": {"method": "eagle", "model": str(conftest.MODELS / "llama_eagle")},
}
NUM_LAYERS = {"text": 4, "itself": 8, "another": 8, "head": 5}


def answer(engine: EngineProcess, prompts: Sequence[list[int]], ledger: Ledger | None = None) -> list[dict[str, Any]]:
    """Answer prompts one by one, without the help of the engine's own cache."""
    replies = []
    for prompt in prompts:
        assert engine.ask("forget")["ok"]
        reply = engine.ask("answer", prompt=prompt, num_tokens=NUM_TOKENS)
        if ledger is not None:
            ledger.enter(prompt + reply["tokens"], reply)
        replies.append(reply)
    return replies


def tokens_of(replies: Sequence[dict[str, Any]]) -> list[list[int]]:
    return [reply["tokens"] for reply in replies]


@pytest.mark.parametrize("name", SPECULATIONS)
def test_conversations_go_on(name: str, tmp_path: Path) -> None:
    """Every token is that of an engine without kvist, every loaded block, a draft's too, one that was computed."""
    chance = random.Random(name)
    prompts = [[chance.randrange(3, 1000) for _ in range(length)] for length in LENGTHS]
    words = [[chance.randrange(3, 1000) for _ in range(40)] for _ in prompts]
    speculation = {**SPECULATIONS[name], "num_speculative_tokens": 3}

    def start(number: int, socket: str | None, **options: Any) -> EngineProcess:
        log = tmp_path / f"engine-{number}.log"
        return launch_engine("llama", socket, log, script="blocks.py", kv_mib=128, **options)

    def go_on(replies: Sequence[dict[str, Any]]) -> list[list[int]]:
        return [p + reply["tokens"] + more for p, reply, more in zip(prompts, replies, words, strict=True)]

    with Daemon(tmp_path, pool="512MiB") as daemon:
        with ThreadPoolExecutor(1) as pool, start(0, None, speculative_config=speculation) as alone:
            starting = pool.submit(start, 1, daemon.path, speculative_config=speculation)
            expected = answer(alone, prompts)
            expected_later = answer(alone, go_on(expected))
            first = starting.result()
        with first:
            (group,) = first.ask("groups")["groups"]
            assert len(group["layers"][0]) == NUM_LAYERS[name]
            ledger = Ledger([group["block_tokens"]])
            cold = answer(first, prompts, ledger)
            later = answer(first, go_on(cold), ledger)
            first.kill()
        # Drafts from the text have no layers, so the chunks are those of an engine that does not speculate.
        with start(2, daemon.path, **({} if name == "text" else {"speculative_config": speculation})) as second:
            again = answer(second, go_on(cold), ledger)
            assert "runs WITHOUT a cache" not in second.log.read_text()
    assert tokens_of(cold) == tokens_of(expected)
    assert tokens_of(later) == tokens_of(again) == tokens_of(expected_later)
    assert [reply["cached"] for reply in cold] == [0] * len(prompts)
    for replies, texts in ((later, prompts), (again, go_on(cold))):
        known = [len(text) + (NUM_TOKENS - 1 if texts is prompts else -1) for text in texts]
        for reply, num_tokens in zip(replies, known, strict=True):
            assert reply["cached"] >= num_tokens // CHUNK_TOKENS * CHUNK_TOKENS
    assert ledger.wrong == []
    num_drafted, num_steps = (sum(reply[key] for reply in cold) for key in ("drafted", "steps"))
    num_taken = len(prompts) * NUM_TOKENS - num_steps
    assert num_drafted > 50
    assert num_taken > num_drafted / 2 if name == "itself" else num_taken < num_drafted / 2
