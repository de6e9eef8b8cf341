"""A prompt outlives the engine that computed it and the daemon that kept it."""

from __future__ import annotations

from pathlib import Path

from tests.engines.conftest import CHUNK_TOKENS, StartEngine, make_prompts
from tests.engines.test_equality import ask_each
from tests.support.daemon import Daemon


def test_a_new_engine_and_a_new_daemon_serve_from_disk(tmp_path: Path, start_engine: StartEngine) -> None:
    """After both have ended, tokens are those of an engine without kvist, and the prompts' KV is read from disk.

    Every loaded block equals the one that was stored; while the disk is read the engine waits and does not compute.
    """
    prompts = make_prompts(12, longest=1400, seed=12)
    alone = start_engine("llama", None)
    expected, _ = ask_each(alone, prompts)
    alone.close()

    disk = tmp_path / "disk"
    disk.mkdir()
    with Daemon(tmp_path, pool="512MiB", arguments=["--disk", str(disk), "--disk-size", "1GiB"]) as daemon:
        first = start_engine("llama", daemon.path)
        assert ask_each(first, prompts)[0] == expected
        stamps = first.ask("stamps")["stamps"]
        first.kill()
        assert daemon.stop() == 0
        daemon.start()

        second = start_engine("llama", daemon.path)
        second.ask("stamps", known=stamps)
        answers, cached = ask_each(second, prompts)
        assert answers == expected
        assert all(
            found >= (len(prompt) - 1) // CHUNK_TOKENS * CHUNK_TOKENS
            for prompt, found in zip(prompts, cached, strict=True)
        )
        counts = second.ask("counts")
        assert counts["counts"]["equal"] > 0
        assert counts["counts"].get("different", 0) == counts["counts"].get("failed", 0) == 0
        assert counts["held"] == counts["tracked"] == 0
        assert daemon.count("chunks_promoted") > 0
        assert daemon.count("promotions_failed") == 0
