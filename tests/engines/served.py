"""``vllm serve`` as a process of its own, asked over a Unix socket as its users ask it."""

from __future__ import annotations

import http.client
import json
import os
import signal
import socket
import subprocess
from pathlib import Path
from typing import Any

from prometheus_client.parser import text_string_to_metric_families

from kvist.server.config import process_environment
from tests.support.waiting import wait_until

START_S = 300.0


class _Connection(http.client.HTTPConnection):
    def __init__(self, path: str) -> None:
        super().__init__("localhost", timeout=120.0)
        self._path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX)
        self.sock.settimeout(self.timeout)
        self.sock.connect(self._path)


class Served:
    """One server. Leave it as a context to end it."""

    def __init__(self, python: Path, model: Path, folder: Path, *arguments: str, environment: dict[str, str]) -> None:
        self.model = str(model)
        self.log = folder / "serve.log"
        self._path = str(folder / "vllm.sock")
        variables = {
            **process_environment(), "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1",
            "VLLM_LOGGING_STREAM": "ext://sys.stderr", **environment,
        }  # fmt: skip
        # What `vllm serve` runs; the command itself ends where vLLM comes from the package for CPUs (seen in 0.32).
        module = "vllm.entrypoints.openai.api_server"
        command = [str(python), "-m", module, "--model", self.model, "--uds", self._path, *arguments]
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(command, stdout=log, stderr=log, env=variables, start_new_session=True)

    def __enter__(self) -> Served:
        wait_until(lambda: self.process.poll() is not None or self._is_ready(), deadline_s=START_S, what=self.tail())
        assert self.process.poll() is None, self.tail()
        return self

    def __exit__(self, *_: object) -> None:
        self.process.terminate()
        try:
            self.process.wait(30)
        except subprocess.TimeoutExpired:
            os.killpg(self.process.pid, signal.SIGKILL)  # It leads a group of its own.
            self.process.wait()

    def complete(self, prompt: list[int], **more: Any) -> dict[str, Any]:
        """Answer a prompt of token ids with eight tokens, decoded greedily."""
        body = {"model": self.model, "prompt": prompt, "max_tokens": 8, "temperature": 0, "ignore_eos": True, **more}
        answer: dict[str, Any] = json.loads(self._ask("POST", "/v1/completions", json.dumps(body)))
        return answer

    def metrics(self, prefix: str) -> dict[str, float]:
        """Return the samples of ``/metrics`` whose names begin so, by the rest of their names, of all engines."""
        found: dict[str, float] = {}
        for family in text_string_to_metric_families(self._ask("GET", "/metrics")):
            for sample in family.samples:
                if sample.name.startswith(prefix) and "le" not in sample.labels:
                    name = sample.name.removeprefix(prefix)
                    found[name] = found.get(name, 0.0) + sample.value
        return found

    def tail(self) -> str:
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-30:])

    def _is_ready(self) -> bool:
        try:
            self._ask("GET", "/health")
        except (OSError, http.client.HTTPException):
            return False
        return True

    def _ask(self, method: str, path: str, body: str | None = None) -> str:
        connection = _Connection(self._path)
        try:
            connection.request(method, path, body, {"Content-Type": "application/json"})
            reply = connection.getresponse()
            text = reply.read().decode()
            assert reply.status == http.client.OK, f"{reply.status} {text}"
            return text
        finally:
            connection.close()
