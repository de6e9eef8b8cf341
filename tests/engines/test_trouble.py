"""Whatever happens to the daemon or to a request, every request is answered, in time, with the right tokens."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from tests.engines.conftest import CHUNK_TOKENS, StartEngine, make_prompts
from tests.support.daemon import Daemon
from tests.support.waiting import wait_until

NUM_TOKENS = 8
DEADLINE_S = 1.0


def ask(engine: Any, prompts: list[list[int]], **more: Any) -> dict[str, Any]:
    return engine.ask("generate", prompts=prompts, num_tokens=NUM_TOKENS, **more)


def assert_nothing_held(engine: Any) -> dict[str, int]:
    counts = engine.ask("counts")
    assert counts["held"] == counts["used_blocks"] == 0
    assert counts["counts"].get("different", 0) == 0
    return counts["counts"]


def test_daemon_is_killed_stopped_and_frozen_during_loads(daemon: Daemon, start_engine: StartEngine) -> None:
    """A daemon that dies, leaves or freezes under a load costs at most the deadline, and no token; it is used again
    within 2 s of its return, by the same engine.
    """
    prompts = make_prompts(8, longest=900, seed=11)
    prompts = [prompt for prompt in prompts if len(prompt) > 2 * CHUNK_TOKENS]
    engine = start_engine("llama", daemon.path)
    expected = [ask(engine, [prompt])["tokens"][0] for prompt in prompts]
    assert engine.ask("forget")["ok"]
    begin = time.monotonic()
    assert ask(engine, prompts)["tokens"] == expected
    usual_s = time.monotonic() - begin

    for number in (signal.SIGKILL, signal.SIGTERM, signal.SIGSTOP):
        assert engine.ask("forget")["ok"]
        engine.ask("counts")
        engine.ask("signal_at_load", pid=daemon.pid, number=int(number))
        begin = time.monotonic()
        engine.send("generate", prompts=prompts, num_tokens=NUM_TOKENS)
        is_frozen = number == signal.SIGSTOP
        reply = engine_answer_while_frozen(engine, daemon) if is_frozen else engine.answer()
        # Computing instead of loading takes its time as well; it is bounded by three times the usual here.
        assert time.monotonic() - begin < DEADLINE_S + 3 * usual_s + 3
        assert reply["tokens"] == expected
        assert set(reply["finish"]) == {"length"}
        if number == signal.SIGSTOP:
            assert ask(engine, prompts)["tokens"] == expected
        else:
            daemon.stop()
            daemon.start()
            assert_hits_again(engine, prompts, expected)
        assert_nothing_held(engine)


def engine_answer_while_frozen(engine: Any, daemon: Daemon) -> dict[str, Any]:
    """Wake the daemon only after the deadline, so that its late copies meet the engine's later steps."""
    wait_until(lambda: is_stopped(daemon.pid))
    frozen_at = time.monotonic()
    wait_until(lambda: time.monotonic() - frozen_at > 2 * DEADLINE_S)
    os.kill(daemon.pid, signal.SIGCONT)
    return engine.answer()


def is_stopped(pid: int) -> bool:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"


def assert_hits_again(engine: Any, prompts: list[list[int]], expected: list[list[int]]) -> None:
    """Within 2 s of the daemon's return a prompt is stored and found, without a restart of the engine."""
    deadline = time.monotonic() + 2
    while True:
        assert ask(engine, prompts[:1])["tokens"] == expected[:1]
        assert engine.ask("forget")["ok"]
        reply = ask(engine, prompts[:1])
        assert reply["tokens"] == expected[:1]
        assert engine.ask("forget")["ok"]
        if reply["cached"][0]:
            return
        assert time.monotonic() < deadline, "no hit within 2 s of the daemon's return"


def test_poisoned_chunk_is_a_miss(daemon: Daemon, start_engine: StartEngine) -> None:
    """A chunk whose bytes changed in the pool is reported as failed, computed again, and never seen in a token."""
    prompt = (make_prompts(1, longest=3000, seed=12)[0] * 9)[: 6 * CHUNK_TOKENS + 50]
    engine = start_engine("llama", daemon.path)
    expected = ask(engine, [prompt])["tokens"]
    assert engine.ask("forget")["ok"]
    poison(daemon.pid)
    assert ask(engine, [prompt])["tokens"] == expected
    counts = assert_nothing_held(engine)
    assert counts["failed"] == 6
    assert daemon.count("chunks_corrupt") == 6
    assert engine.ask("forget")["ok"]
    healed = ask(engine, [prompt])
    assert healed["tokens"] == expected


def poison(pid: int) -> None:
    """Flip a bit in every page of the daemon's pool that was written."""
    for entry in Path(f"/proc/{pid}/fd").iterdir():
        if "kvist-pool" in os.readlink(entry):
            with entry.open("r+b") as pool:
                data = bytearray(pool.read(64 << 20))
                for at in range(0, len(data), 4096):
                    if any(data[at : at + 4096]):
                        data[at + 100] ^= 1
                pool.seek(0)
                pool.write(data)
            return
    pytest.fail("the daemon has no pool")


def test_aborts_leave_nothing_behind(daemon: Daemon, start_engine: StartEngine) -> None:
    """Requests aborted before, during and after their load are gone with their blocks and leases; others go on."""
    prompts = make_prompts(12, longest=900, seed=13)
    engine = start_engine("llama", daemon.path)
    expected = [ask(engine, [prompt])["tokens"][0] for prompt in prompts]
    for num_steps in (0, 1, 2, 3, 5):
        assert engine.ask("forget")["ok"]
        answers = engine.ask("abort", prompts=prompts, num_tokens=NUM_TOKENS, num_steps=num_steps)["tokens"]
        assert answers[::2] == expected[::2]
        assert_nothing_held(engine)
        status = daemon.status()
        assert (status.num_leases, status.num_pinned, status.num_copies_in_flight) == (0, 0, 0)


def test_preemption_with_few_blocks(daemon: Daemon, start_engine: StartEngine) -> None:
    """Requests that lose their blocks and get others go on with the right tokens, and what is stored is right."""
    prompts = make_prompts(10, longest=1000, seed=14)
    options = {"num_gpu_blocks_override": 20, "max_model_len": 2048, "max_num_batched_tokens": 512}
    plenty = start_engine("llama", None, max_model_len=2048)
    expected = [plenty.ask("generate", prompts=[p], num_tokens=150)["tokens"][0] for p in prompts]
    plenty.close()
    engine = start_engine("llama", daemon.path, **options)
    num_preempted = 0
    for _ in range(2):
        reply = engine.ask("generate", prompts=prompts, num_tokens=150)
        assert reply["tokens"] == expected
        num_preempted += assert_nothing_held(engine).get("preempted", 0)
        assert engine.ask("forget")["ok"]
    assert num_preempted > 0
    assert daemon.count("chunks_loaded") > 0


def test_a_prompt_that_is_most_of_the_memory(daemon: Daemon, start_engine: StartEngine) -> None:
    """A prompt longer than what stores may hold at once is stored step by step and at its end; no block stays held."""
    prompts = [(make_prompts(1, longest=900, seed=seed)[0] * 9)[: 15 * CHUNK_TOKENS + 9] for seed in (31, 32)]
    engine = start_engine(
        "llama", daemon.path, num_gpu_blocks_override=20, max_model_len=2048, max_num_batched_tokens=1024
    )
    tokens = []
    for prompt in prompts:  # So many steps that the daemon has the time to let go of blocks, however busy it is.
        tokens.append(engine.ask("generate", prompts=[prompt], num_tokens=100)["tokens"])
        assert assert_nothing_held(engine)["stored"] > 5
    for prompt, expected in zip(prompts, tokens, strict=True):
        assert engine.ask("forget")["ok"]
        reply = engine.ask("generate", prompts=[prompt], num_tokens=100)
        assert reply["tokens"] == expected
        assert reply["cached"][0] > 5 * CHUNK_TOKENS
        assert_nothing_held(engine)


def test_requests_choose_and_tenants_are_apart(daemon: Daemon, start_engine: StartEngine) -> None:
    """A request that may not read or not write does neither; a salt sees only what was stored under it."""
    prompt = (make_prompts(1, longest=900, seed=15)[0] * 5)[: 4 * CHUNK_TOKENS + 9]
    engine = start_engine("llama", daemon.path)

    def cached(**more: Any) -> int:
        assert engine.ask("forget")["ok"]
        return ask(engine, [prompt], **more)["cached"][0]

    assert cached(kvist={"write": False}) == 0
    assert daemon.count("chunks_stored") == 0
    assert cached() == 0
    assert cached(kvist={"read": False}) == 0
    assert cached() == 4 * CHUNK_TOKENS
    assert cached(salt="tenant") == 0
    assert cached(salt="tenant") == 4 * CHUNK_TOKENS
    assert cached(salt="other") == 0


def test_engine_runs_without_a_daemon_and_with_wrong_options(tmp_path: Path, start_engine: StartEngine) -> None:
    """Without a daemon, with an unknown option or a chunk that is no multiple of the block, it answers and says so."""
    prompt = make_prompts(1, longest=600, seed=16)[0]
    cases = [
        ({}, {"kv_load_failure_policy": "fail"}, ["no kvist daemon answers", '"kv_load_failure_policy":"recompute"']),
        ({"no_such": 1}, {}, ["no_such"]),
        ({"chunk_tokens": 200}, {}, ["200 is no multiple of the engine's blocks of 128 tokens"]),
    ]
    answers = []
    for kvist, transfer, texts in cases:
        engine = start_engine("llama", str(tmp_path / "nobody.sock"), is_probed=False, kvist=kvist, transfer=transfer)
        answers.append(ask(engine, [prompt, prompt])["tokens"])
        engine.close()
        log = engine.log.read_text()
        assert not [text for text in texts if text not in log]
    assert all(answer == answers[0] for answer in answers)
