"""What ``vllm serve`` says of its cache is what the daemon says, and the daemon knows whom it serves.

The server has an engine of two workers: what they count must be summed, and what a request is counted for must not.
"""

from __future__ import annotations

import json
from pathlib import Path

from kvist.client.client import Client
from kvist.wire import messages as wire
from tests.engines.conftest import CHUNK_TOKENS, PYTHON, make_prompts
from tests.engines.conftest import MODELS as FOLDER
from tests.engines.served import Served
from tests.support.daemon import Daemon
from tests.support.waiting import wait_until

MODELS = ("llama",)
TRANSFER = {"kv_connector": "KvistConnector", "kv_role": "kv_both", "kv_load_failure_policy": "recompute"}
"""No module is named: vLLM knows the connector by its name, from the plugin."""
ALIKE = (
    "lookups", "tokens_asked", "tokens_found", "tokens_loading", "chunks_loaded", "chunks_stored", "chunks_present",
    "chunks_refused",
)  # fmt: skip
"""Figures that the daemon has under the same names."""
OTHERS = (
    "tokens_loaded", "tokens_stored", "loads_failed", "lookups_late", "lookups_lost", "requests_not_cached",
)  # fmt: skip
NUM_WORKERS = 2


def serve(daemon: Daemon, folder: Path) -> Served:
    """Start a server whose engine keeps no prefixes itself, so that every hit is the daemon's."""
    transfer = {**TRANSFER, "kv_connector_extra_config": {"socket": daemon.path}}
    return Served(
        PYTHON, FOLDER / "llama", folder, "--skip-tokenizer-init", "--dtype", "float32", "--max-model-len", "2048",
        "--enforce-eager", "--max-num-seqs", "4", "--kv-cache-memory-bytes", str(128 << 20),
        "--no-enable-prefix-caching", "--tensor-parallel-size", str(NUM_WORKERS),
        "--kv-transfer-config", json.dumps(transfer),
        environment={
            "OMP_NUM_THREADS": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind", "VLLM_LOG_STATS_INTERVAL": "1",
        },
    )  # fmt: skip


def tokens(server: Served, prompt: list[int]) -> list[int]:
    return server.complete(prompt, return_token_ids=True)["choices"][0]["token_ids"]


def figures(server: Served) -> dict[str, int]:
    found = server.metrics("vllm:kvist_")
    return {
        **{name: int(found[f"{name}_total"]) for name in (*ALIKE, *OTHERS)}, "loads": int(found["load_seconds_count"]),
    }  # fmt: skip


def test_metrics_are_the_daemons_counters(daemon: Daemon, tmp_path: Path) -> None:
    """What a server's processes count is in ``/metrics`` as the daemon has it, and in the log: tokens once, chunks for
    each worker. They all know the connector by its name, and the daemon can say who is connected.
    """
    prompts = [prompt for prompt in make_prompts(8, longest=900, seed=11) if len(prompt) > 2 * CHUNK_TOKENS][:3]
    num_chunks = sum(len(prompt) // CHUNK_TOKENS for prompt in prompts)
    num_known = num_chunks * CHUNK_TOKENS
    with serve(daemon, tmp_path) as server:
        assert set(figures(server).values()) == {0}
        answers = [tokens(server, prompt) for prompt in prompts]
        expect_figures(server, daemon, {
            "lookups": len(prompts), "tokens_asked": num_known,
            "chunks_stored": NUM_WORKERS * num_chunks, "tokens_stored": num_known,
        })  # fmt: skip
        assert [tokens(server, prompt) for prompt in prompts] == answers
        assert server.complete(prompts[0], kv_transfer_params={"kvist": {"no_such": 1}})["usage"]["prompt_tokens"]
        expect_figures(server, daemon, {
            "lookups": 2 * len(prompts), "tokens_asked": 2 * num_known, "tokens_found": num_known,
            "chunks_loaded": NUM_WORKERS * num_chunks, "chunks_stored": NUM_WORKERS * num_chunks,
            "tokens_loaded": num_known, "tokens_stored": num_known, "loads": len(prompts), "requests_not_cached": 1,
        })  # fmt: skip
        wait_until(lambda: "KV Transfer metrics: " in server.log.read_text(), what="the log tells of the cache")
        check_described(daemon, server.model)
    # Said once, though the engine asks about it several times.
    assert server.log.read_text().count("request is not cached") == 1


def expect_figures(server: Served, daemon: Daemon, expected: dict[str, int]) -> None:
    """Wait until the server says exactly this, and hold it against the daemon; what is not named is 0."""
    full = {**dict.fromkeys((*ALIKE, *OTHERS, "loads"), 0), **expected}
    try:
        wait_until(lambda: figures(server) == full, deadline_s=10.0)
    except AssertionError:
        assert figures(server) == full
    counters = daemon.status().counters
    assert {name: counters.get(name, 0) for name in ALIKE} == {name: full[name] for name in ALIKE}


def check_described(daemon: Daemon, model: str) -> None:
    """Assert that the daemon tells what each side of the engine serves, and which memory its workers have shared."""
    client = Client(daemon.path, engine_id="observer", name="test")
    reply = client.call(wire.Describe)
    client.close()
    assert isinstance(reply, wire.Description)
    by_name = {session.name: session for session in reply.sessions if session.serves is not None}
    workers = [by_name[f"vllm worker {rank}"] for rank in range(NUM_WORKERS)]
    sides = [by_name["vllm scheduler"], *workers]
    assert len(by_name) == len(sides)
    assert len({side.engine_id for side in sides}) == 1
    for side in sides:
        assert side.serves is not None
        assert (side.serves.model, side.serves.chunk_tokens) == (model, CHUNK_TOKENS)
        assert side.needs == (wire.NeedSpec("full", num_shards=NUM_WORKERS),)
        assert side.facts["engine"].startswith("vllm ")
        assert (side.facts["block_tokens"], side.facts["world_size"]) == (str(CHUNK_TOKENS), str(NUM_WORKERS))
        assert side.facts["kv_load_failure_policy"] == "recompute"
    for rank, worker in enumerate(workers):
        assert (worker.lane, worker.memory) == ("daemon", "host")
        assert [(row.group, row.shard, row.kind, row.block_tokens) for row in worker.rows] == [
            (0, rank, "full", CHUNK_TOKENS)
        ]
        (text,) = worker.texts
        assert text.startswith("group 0: full, ")
        assert text.endswith(f"{worker.rows[0].chunk_nbytes} B a chunk")
