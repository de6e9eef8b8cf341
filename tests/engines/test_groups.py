"""Models with several groups of layers: a load is right for all of them, or the request is computed from its start.

gemma3 has five layers with a window of 256 tokens to one that looks at everything. vLLM is told of a failed load as a
whole there: block by block it would end the engine.
"""

from __future__ import annotations

import os
import signal
from typing import Any

import pytest

from tests.engines.conftest import CHUNK_TOKENS, StartEngine, make_prompts
from tests.engines.test_trouble import NUM_TOKENS, ask, assert_nothing_held, is_stopped, poison
from tests.support.daemon import Daemon
from tests.support.waiting import wait_until

MODEL = "gemma3"


def long_prompts(seed: int) -> list[list[int]]:
    return [prompt for prompt in make_prompts(10, longest=1100, seed=seed) if len(prompt) > 3 * CHUNK_TOKENS]


def test_all_groups_are_loaded_as_they_were_stored(daemon: Daemon, start_engine: StartEngine) -> None:
    """Chunks of every group come back byte for byte, in batches too, and of windows only what the prompt needs."""
    prompts = long_prompts(41)
    engine = start_engine(MODEL, daemon.path, max_num_batched_tokens=512)
    expected = [ask(engine, [prompt])["tokens"][0] for prompt in prompts]
    for batches in ([[prompt] for prompt in prompts], [prompts]):
        assert engine.ask("forget")["ok"]
        replies = [ask(engine, batch) for batch in batches]
        assert [tokens for reply in replies for tokens in reply["tokens"]] == expected
        assert sum(found for reply in replies for found in reply["cached"]) > 0
    counts = assert_nothing_held(engine)
    assert counts["equal"] > 0
    assert counts.get("failed", 0) == counts.get("unknown", 0) == 0
    assert daemon.count("chunks_loaded_window") > 0
    assert daemon.count("chunks_loaded_full") + daemon.count("chunks_loaded_window") == daemon.count("chunks_loaded")
    status = daemon.status()
    assert (status.num_leases, status.num_pinned, status.num_reserved) == (0, 0, 0)


def test_poisoned_chunk_fails_the_request_as_a_whole(daemon: Daemon, start_engine: StartEngine) -> None:
    """With a wrong byte in any group's chunk the prompt is computed from its start, and found again afterwards."""
    prompt = (make_prompts(1, longest=3000, seed=42)[0] * 9)[: 6 * CHUNK_TOKENS + 50]
    engine = start_engine(MODEL, daemon.path)
    expected = ask(engine, [prompt])["tokens"]
    assert engine.ask("forget")["ok"]
    poison(daemon.pid)
    assert ask(engine, [prompt])["tokens"] == expected
    assert assert_nothing_held(engine)["failed"] > 0
    assert daemon.count("chunks_corrupt") > 0
    assert engine.ask("forget")["ok"]
    healed = ask(engine, [prompt])
    assert healed["tokens"] == expected
    assert healed["cached"][0] >= 6 * CHUNK_TOKENS


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_daemon_is_lost_during_loads(number: int, daemon: Daemon, start_engine: StartEngine) -> None:
    """A daemon that dies or freezes under a load of several groups costs no token, and no engine."""
    prompts = long_prompts(43)
    engine = start_engine(MODEL, daemon.path)
    expected = [ask(engine, [prompt])["tokens"][0] for prompt in prompts]
    assert engine.ask("forget")["ok"]
    engine.ask("counts")
    engine.ask("signal_at_load", pid=daemon.pid, number=int(number))
    engine.send("generate", prompts=prompts, num_tokens=NUM_TOKENS)
    if number == signal.SIGSTOP:
        wait_until(lambda: is_stopped(daemon.pid))
    reply: dict[str, Any] = engine.answer()
    assert reply["tokens"] == expected
    assert set(reply["finish"]) == {"length"}
    if number == signal.SIGSTOP:
        os.kill(daemon.pid, signal.SIGCONT)
        assert ask(engine, prompts)["tokens"] == expected
    assert_nothing_held(engine)


def test_preemption_with_few_blocks(daemon: Daemon, start_engine: StartEngine) -> None:
    """Requests that lose the blocks of all groups and get others go on with the right tokens."""
    prompts = make_prompts(8, longest=1000, seed=44)
    plenty = start_engine(MODEL, None, max_model_len=2048)
    expected = [plenty.ask("generate", prompts=[prompt], num_tokens=150)["tokens"][0] for prompt in prompts]
    plenty.close()
    options = {"num_gpu_blocks_override": 60, "max_model_len": 2048, "max_num_batched_tokens": 512}
    engine = start_engine(MODEL, daemon.path, **options)
    num_preempted = 0
    for _ in range(2):
        assert engine.ask("generate", prompts=prompts, num_tokens=150)["tokens"] == expected
        num_preempted += assert_nothing_held(engine).get("preempted", 0)
        assert engine.ask("forget")["ok"]
    assert num_preempted > 0
    assert daemon.count("chunks_loaded_window") > 0
