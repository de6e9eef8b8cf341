"""Real vLLM processes and daemons for the tests beside this file, which are skipped where vLLM is not installed."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tools" / "vllm"))

from child import EngineProcess, engine_options  # noqa: E402
from tests.support.daemon import Daemon  # noqa: E402

PYTHON = ROOT / ".venv-vllm" / "bin" / "python"
READY = ROOT / ".venv-vllm" / ".ready"
"""There as soon as all of it is installed."""
MODELS = ROOT / ".models"
MODELS_OF_ALL = ("smollm2", "llama", "qwen3", "gemma3")
"""Those that tests need which are not of one family of models, unless their module names its ``MODELS``."""
CHUNK_TOKENS = 128


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    reason = (
        "vLLM is not installed in .venv-vllm, or a model is missing; `make engines` and `make families` set both up"
    )
    for item in items:
        if Path(item.fspath).parent == Path(__file__).parent:
            item.add_marker(pytest.mark.engines)
            item.add_marker(pytest.mark.timeout(900))
            family = item.callspec.params.get("run") if hasattr(item, "callspec") else None
            names = [family.name] if family is not None else getattr(item.module, "MODELS", MODELS_OF_ALL)
            if not READY.exists() or not all((MODELS / name / ".ready").exists() for name in names):
                item.add_marker(pytest.mark.skip(reason=reason))


@pytest.fixture
def daemon(tmp_path: Path) -> Iterator[Daemon]:
    with Daemon(tmp_path, pool="512MiB") as daemon:
        yield daemon


StartEngine = Callable[..., EngineProcess]


@pytest.fixture
def start_engine(tmp_path: Path) -> Iterator[StartEngine]:
    """Return a function that starts engines of a tiny or small model, all of which end with the test."""
    engines: list[EngineProcess] = []

    def start(model: str, socket: str | None, *, is_probed: bool = True, **options: Any) -> EngineProcess:
        script = "probe.py" if is_probed and socket else None
        log = tmp_path / f"engine-{len(engines)}.log"
        engines.append(launch_engine(model, socket, log, script=script, **options))
        return engines[-1]

    yield start
    for engine in engines:
        engine.close()


def launch_engine(
    model: str, socket: str | None, log: Path, *, script: str | None = None, kv_mib: int = 256, **options: Any
) -> EngineProcess:
    """Start an engine, with a script of this folder where one is named; the caller closes it."""
    is_one_process = options.pop("is_one_process", True)
    chosen = engine_options(MODELS / model, socket=socket, kv_nbytes=kv_mib << 20, **options)
    scripts = {"script": Path(__file__).with_name(script)} if script else {}
    # Threads that spin for each other are many times slower as soon as anything else runs; tiny models need one.
    one_thread = {"OMP_NUM_THREADS": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"} if model != "smollm2" else {}
    return EngineProcess(
        PYTHON, chosen, log, is_one_process=is_one_process, environment=one_thread, start_s=300.0, **scripts
    )


def make_prompts(count: int, *, longest: int, seed: int) -> list[list[int]]:
    """Return prompts of mixed length, in families that share their beginnings."""
    chance = random.Random(seed)
    stems = [[chance.randrange(3, 1000) for _ in range(longest)] for _ in range(max(2, count // 6))]
    prompts = []
    for _ in range(count):
        stem = chance.choice(stems)
        shared = chance.randrange(0, longest * 3 // 4)
        tail = chance.randrange(1, longest - shared)
        prompts.append(stem[:shared] + [chance.randrange(3, 1000) for _ in range(tail)])
    return prompts
