"""Starting and driving ``engine.py`` from another Python, which needs no vLLM."""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import signal
import subprocess
import time
from pathlib import Path
from typing import Any, Final

CONNECTOR: Final = {
    "kv_connector": "KvistConnector",
    "kv_connector_module_path": "kvist.adapters.vllm",
    "kv_role": "kv_both",
    "kv_load_failure_policy": "recompute",
}
_HERE: Final = Path(__file__).parent
_BF16_FLAGS: Final = {"avx512_bf16", "amx_bf16", "bf16"}


class EngineDied(Exception):
    """The engine's process ended, or did not answer in time; the end of its log follows."""


def cpu_dtype() -> str:
    """Return the element type in which this CPU multiplies matrices fast."""
    cpuinfo = Path("/proc/cpuinfo")
    flags = set(cpuinfo.read_text().split()) if cpuinfo.exists() else set()
    return "bfloat16" if flags & _BF16_FLAGS else "float32"


def engine_options(model: Path, *, socket: str | None, kv_nbytes: int, **options: Any) -> dict[str, Any]:
    """Return options of ``vllm.LLM`` for a CPU; with a socket, those that make it use kvist.

    ``kvist`` and ``transfer`` add to the connector's own options and to vLLM's options of the connector.
    """
    extra, transfer = options.pop("kvist", {}), options.pop("transfer", {})
    chosen: dict[str, Any] = {
        "model": str(model), "dtype": cpu_dtype(), "max_model_len": 8192, "enforce_eager": True, "max_num_seqs": 8,
        "kv_cache_memory_bytes": kv_nbytes, "enable_prefix_caching": True, "disable_log_stats": False,
        "skip_tokenizer_init": True, **options,
    }  # fmt: skip
    if socket is not None:
        chosen["kv_transfer_config"] = {
            **CONNECTOR,
            **transfer,
            "kv_connector_extra_config": {"socket": socket, **extra},
        }
    return chosen


class EngineProcess:
    """One engine. Use as a context: leaving it stops the process."""

    def __init__(
        self, python: Path, options: dict[str, Any], log: Path, *, script: Path = _HERE / "engine.py",
        is_one_process: bool = True, start_s: float = 240.0, environment: dict[str, str] | None = None,
    ) -> None:  # fmt: skip
        imported = [str(_HERE), *filter(None, [os.environ.get("PYTHONPATH")])]
        variables = {
            **os.environ, "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1",
            "VLLM_LOGGING_STREAM": "ext://sys.stderr", "PYTHONPATH": os.pathsep.join(imported),
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0" if is_one_process else "1", **(environment or {}),
        }  # fmt: skip
        self.log = log
        with log.open("wb") as errors:
            self.process = subprocess.Popen(
                [str(python), str(script), json.dumps(options)],
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, env=variables, start_new_session=True,
            )  # fmt: skip
        assert self.process.stdout is not None
        os.set_blocking(self.process.stdout.fileno(), False)
        self._received = b""
        self._answer(start_s)

    @property
    def pid(self) -> int:
        return self.process.pid

    def ask(self, do: str, *, timeout_s: float = 300.0, **arguments: Any) -> dict[str, Any]:
        """Send a command and return its answer."""
        self.send(do, **arguments)
        return self._answer(timeout_s)

    def send(self, do: str, **arguments: Any) -> None:
        """Send a command; ``answer`` gets what it returns."""
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps({"do": do, **arguments}).encode() + b"\n")
        self.process.stdin.flush()

    def answer(self, timeout_s: float = 300.0) -> dict[str, Any]:
        """Return the answer to the oldest command that has none yet."""
        return self._answer(timeout_s)

    def kill(self) -> None:
        """End the process and the children that vLLM gave it, as ``kill -9`` does."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)  # It leads a group of its own.
        self.process.wait()

    def close(self) -> None:
        """Stop the process, in order if it still listens. Idempotent."""
        if self.process.poll() is None:
            try:
                self.send("stop")
                self.process.wait(30)
            except (OSError, subprocess.TimeoutExpired):
                pass
        self.kill()
        for pipe in (self.process.stdin, self.process.stdout):
            if pipe is not None:
                pipe.close()

    def __enter__(self) -> EngineProcess:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _answer(self, timeout_s: float) -> dict[str, Any]:
        deadline = time.monotonic() + timeout_s
        assert self.process.stdout is not None
        with selectors.DefaultSelector() as selector:
            selector.register(self.process.stdout, selectors.EVENT_READ)
            while True:
                line, found, rest = self._received.partition(b"\n")
                if found:
                    self._received = rest
                    if line.startswith(b"@"):
                        answer: dict[str, Any] = json.loads(line[1:])
                        return answer
                    continue
                if not selector.select(max(0.0, deadline - time.monotonic())):
                    raise EngineDied(f"no answer in {timeout_s:.0f} s\n{self._tail()}")
                data = os.read(self.process.stdout.fileno(), 1 << 16)
                if not data:
                    raise EngineDied(f"exit code {self.process.wait()}\n{self._tail()}")
                self._received += data

    def _tail(self) -> str:
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-30:])
