"""``kvist doctor`` on real misconfigurations: each is named by its code, with the one thing to change."""

from __future__ import annotations

import json
import os
import resource
import signal
import socket
import subprocess
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import pytest

from kvist.adapters.vllm.options import FLAG
from kvist.server.config import process_environment
from kvist.storage.disk.tier import DiskTier
from kvist.units import MIB
from kvist.wire import messages as wire
from kvist.wire.codec import encode
from tests.e2e.conftest import Connect
from tests.support.daemon import Daemon, command
from tests.support.waiting import wait_until

TRANSFER = json.loads(FLAG.partition(" ")[2].strip("'"))


@dataclass
class Report:
    """What the program says."""

    findings: dict[str, dict[str, str]]
    facts: dict[str, object]

    @classmethod
    def of(cls, done: subprocess.CompletedProcess[str]) -> Report:
        """Read what it has printed as JSON, and compare with its exit code."""
        assert done.stdout, done.stderr
        said = json.loads(done.stdout)
        is_amiss = any(finding["level"] in ("warning", "problem") for finding in said["findings"])
        assert done.returncode == (1 if is_amiss else 0)
        return cls({finding["code"]: finding for finding in said["findings"]}, said["facts"])

    def change(self, code: str) -> str:
        """Return what to change, as the finding with this code says."""
        assert code in self.findings, sorted(self.findings)
        return self.findings[code]["change"]

    @property
    def problems(self) -> list[str]:
        return [code for code, finding in self.findings.items() if finding["level"] == "problem"]


def run(*arguments: str, **more: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command("doctor", *arguments), capture_output=True, text=True, timeout=100, **more)


def doctor(*arguments: object, **more: object) -> Report:
    return Report.of(run("--json", "--no-gpu", *map(str, arguments), **more))


def vllm(path: str, flags: str = "", *, extra: dict[str, object] | None = None, **transfer: str) -> str:
    """Return what follows ``vllm serve``."""
    config = {**TRANSFER, **transfer, "kv_connector_extra_config": {"socket": path, **(extra or {})}}
    return f"model {flags} --kv-transfer-config '{json.dumps(config)}'"


@contextmanager
def listening(path: str, answer: Callable[[socket.socket], None]) -> Iterator[None]:
    """Let ``answer`` meet whoever connects."""

    def serve() -> None:
        with suppress(OSError):
            while True:
                peer, _ = listener.accept()
                with peer, suppress(OSError):
                    answer(peer)

    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(path)
        listener.listen()
        thread = threading.Thread(target=serve)
        thread.start()
        try:
            yield
        finally:
            listener.shutdown(socket.SHUT_RDWR)
            thread.join()


def test_a_healthy_setup_has_no_problem(tmp_path: Path, connect: Connect, prompt: list[int]):
    """Engine and daemon, disk and arguments: everything that was looked at is in order, and is said to be."""
    disk = tmp_path / "disk"
    with Daemon(tmp_path, arguments=["--disk", str(disk), "--disk-size", "64MiB"]) as daemon:
        engine = connect(daemon)
        engine.store(prompt)
        assert engine.num_found(prompt) == 5
        report = doctor("--socket", daemon.path, "--disk", disk, "--vllm", vllm(daemon.path))
        assert report.problems == []
        assert {"socket.ok", "daemon.ok", "service.ok", "lane.ok", "vllm.ok", "host.ok"} <= set(report.findings)
        assert report.facts["daemon"]["status"]["pid"] == daemon.pid
        assert report.facts["disks"][0]["user"] == str(daemon.pid)
        wait_until(lambda: daemon.status().num_sessions == 2)
        assert daemon.status().num_registered == 1


def test_no_daemon(tmp_path: Path):
    """Nothing at the path: the command that starts a daemon there."""
    path = str(tmp_path / "kvist.sock")
    report = doctor("--socket", path)
    assert f"kvist serve --socket {path}" in report.change("socket.missing")
    assert report.problems == ["socket.missing"]


def test_a_dead_daemon(daemon: Daemon):
    """Its socket is still there, and nobody listens."""
    daemon.kill()
    assert "kvist serve" in doctor("--socket", daemon.path).change("socket.dead")


def test_a_frozen_daemon(daemon: Daemon):
    """It takes the connection, since the kernel does, and says nothing."""
    daemon.signal(signal.SIGSTOP)
    try:
        assert f"process {daemon.pid}" in doctor("--socket", daemon.path).change("daemon.silent")
    finally:
        daemon.signal(signal.SIGCONT)


def test_a_directory_for_everybody(tmp_path: Path):
    """Where others may write, on both sides."""
    folder = tmp_path / "open"
    folder.mkdir()
    folder.chmod(0o777)
    for side in ((), ("--serve", "--pool", "1MiB")):
        report = doctor(*side, "--socket", folder / "s")
        assert f"chmod go-w {folder}" in report.change("socket.open-folder")


def test_a_file_of_another_kind(tmp_path: Path):
    """A path that is no socket."""
    (tmp_path / "s").write_text("mine")
    assert f"remove {tmp_path / 's'}" in doctor("--socket", tmp_path / "s").change("socket.other-file")
    assert (tmp_path / "s").read_text() == "mine"


@pytest.mark.parametrize("answer", [b"HTTP/1.1 400 Bad Request\r\n\r\n", b""])
def test_another_program(tmp_path: Path, answer: bytes):
    """It answers in another language, or with the end of the stream."""
    path = str(tmp_path / "s")
    with listening(path, lambda peer: peer.sendall(answer)):
        assert f"stop process {os.getpid()}" in doctor("--socket", path).change("daemon.other-program")


@pytest.mark.parametrize(
    ("code", "finding", "named"),
    [("version_mismatch", "daemon.version", "kvist version"), ("not_permitted", "daemon.refuses", "allow_uids")],
)
def test_a_daemon_that_refuses(tmp_path: Path, code: str, finding: str, named: str):
    """Another version, or another user: its words are shown, although it closes the connection at once."""
    path = str(tmp_path / "s")
    error = wire.Error(0, code, "the client speaks protocol 1, the daemon 9")
    with listening(path, lambda peer: peer.sendall(encode(error))):
        report = doctor("--socket", path)
    assert named in report.change(finding)
    assert error.detail in report.findings[finding]["what"]


def test_a_configuration_that_would_not_start(tmp_path: Path, daemon: Daemon):
    """Before a start: an unknown key, a pool that is too large, a path in use, a disk that is too small."""
    serve = ("--serve", "--socket", tmp_path / "new.sock")
    config = tmp_path / "kvist.toml"
    config.write_text('pol = "1GiB"\n')
    assert "message" in doctor(*serve, "--config", config).change("serve.config")
    assert "smaller `--pool`" in doctor(*serve, "--pool", "1000000GiB").change("serve.pool")
    report = doctor("--serve", "--pool", "1MiB", "--socket", daemon.path)
    assert f"stop process {daemon.pid}" in report.change("socket.in-use")
    report = doctor(*serve, "--pool", "1MiB", "--disk", tmp_path / "disk", "--disk-size", "1000000GiB")
    assert "`--disk-size` of at most" in report.change("disk.space")
    report = doctor(*serve, "--pool", "1MiB", "--disk", tmp_path / "disk", "--disk-size", "4MiB")
    assert report.problems == []
    assert not (tmp_path / "disk").exists()


def test_disks_that_cannot_be_used(tmp_path: Path):
    """A file, a directory inside nothing, one of a living process, one of a newer version."""
    (tmp_path / "file").write_text("mine")
    assert "chown" in doctor("--disk", tmp_path / "file").change("disk.not-writable")
    assert "mkdir -p" in doctor("--disk", tmp_path / "no" / "thing").change("disk.missing")
    folder = tmp_path / "disk"
    tier = DiskTier([folder], MIB)
    assert f"stop process {os.getpid()}" in doctor("--disk", folder).change("disk.in-use")
    tier.close()
    raw = bytearray((folder / "kvist.log").read_bytes())
    raw[8] = 9
    (folder / "kvist.log").write_bytes(raw)
    assert f"kvist disk purge {folder}" in doctor("--disk", folder).change("disk.unusable")
    assert (folder / "kvist.log").read_bytes() == raw


def test_a_disk_in_memory(tmp_path: Path):
    """A directory on a tmpfs takes the memory that the pool could have."""
    folder = Path(f"/dev/shm/kvist-doctor-{os.getpid()}-{tmp_path.name}")
    if not os.path.ismount("/dev/shm"):
        pytest.skip("/dev/shm is no file system of its own here")
    folder.mkdir()
    try:
        assert "raise `--pool`" in doctor("--disk", folder).change("disk.in-memory")
        assert os.listdir(folder) == []
    finally:
        folder.rmdir()


@pytest.mark.parametrize(
    ("arguments", "code", "named"),
    [
        ({"kv_load_failure_policy": "fail"}, "vllm.failure-policy", '"recompute"'),
        ({"kv_connector_module_path": "kvist.vllm"}, "vllm.module-path", '"kvist.adapters.vllm"'),
        ({"kv_role": "kv_consumer"}, "vllm.role", '"kv_both"'),
        ({"flags": "--no-enable-prefix-caching"}, "vllm.prefix-caching", "--no-enable-prefix-caching"),
        ({"flags": "--block-size 32", "extra": {"chunk_tokens": 100}}, "vllm.chunk-tokens", "to 128"),
        ({"extra": {"deadline": 3}}, "vllm.options", "kv_connector_extra_config"),
        ({"extra": {"socket": "/run/other.sock"}}, "vllm.socket", "kvist.sock"),
    ],
)
def test_arguments_of_vllm(shared: Daemon, arguments: dict[str, object], code: str, named: str):
    """What vLLM is told wrong is named, beside a daemon that is there and well."""
    report = doctor("--socket", shared.path, "--vllm", vllm(shared.path, **arguments))
    assert named in report.change(code)
    assert [name for name in report.findings if name.startswith("vllm.")] == [code]


def test_vllm_without_the_flag(shared: Daemon):
    """Where there is nothing of us, the whole flag; the configuration alone can be given as well."""
    assert FLAG in doctor("--socket", shared.path, "--vllm", "model --port 8000").change("vllm.no-connector")
    assert FLAG in doctor("--socket", shared.path, "--vllm-config", "{").change("vllm.json")
    report = doctor("--vllm-config", json.dumps({**TRANSFER, "kv_connector_extra_config": {"socket": shared.path}}))
    assert {"vllm.ok", "daemon.ok"} <= set(report.findings)


def test_low_limits(shared: Daemon):
    """Of open files and of locked memory, as this process has them."""

    def limit() -> None:
        resource.setrlimit(resource.RLIMIT_NOFILE, (256, 256))
        resource.setrlimit(resource.RLIMIT_MEMLOCK, (65536, 65536))

    report = doctor("--socket", shared.path, preexec_fn=limit)
    assert "ulimit -Hn" in report.change("host.descriptors")
    assert "ulimit -l" in report.change("host.memlock")
    assert "64 KiB, and a pool of 16 MiB" in report.findings["host.memlock"]["what"]


def test_an_isolated_daemon(tmp_path: Path):
    """An engine that insists on copying for itself gets no pool; without the option the daemon copies."""
    with Daemon(tmp_path, arguments=["--isolate"]) as daemon:
        report = doctor("--vllm", vllm(daemon.path, extra={"lane": "engine"}))
        assert '"lane": "engine"' in report.change("lane.isolated")
        report = doctor("--vllm", vllm(daemon.path))
        assert "--isolate" in report.change("lane.daemon-copies")
        assert report.problems == []


def test_a_disk_that_is_off(tmp_path: Path, connect: Connect, prompt: list[int]):
    """Its reason is in the finding; serving goes on."""
    disk = tmp_path / "disk"
    with Daemon(tmp_path, arguments=["--disk", str(disk), "--disk-size", "64MiB"]) as daemon:
        engine = connect(daemon)
        for path in disk.iterdir():
            path.unlink()
        engine.store(prompt)
        wait_until(lambda: daemon.status().tiers[0].off_reason)
        report = doctor("--socket", daemon.path)
        assert "kvist disk verify" in report.change("service.tier-off")
        assert daemon.status().tiers[0].off_reason in report.findings["service.tier-off"]["what"]


def test_engines_that_share_nothing(tmp_path: Path, connect: Connect, prompt: list[int]):
    """Everything is stored and nothing found: the namespaces may differ."""
    with Daemon(tmp_path) as daemon:
        assert FLAG in doctor("--socket", daemon.path).change("service.no-engine")
        engine = connect(daemon)
        engine.store(prompt)
        assert engine.num_found([token + 50_000 for token in prompt]) == 0
        report = doctor("--socket", daemon.path)
        assert "one prompt twice" in report.change("service.no-hits")
        assert "namespace" in report.findings["service.no-hits"]["why"]


def test_gpus_are_looked_at_if_there_are_any(shared: Daemon):
    """Without a driver that is a note; with one, what was seen."""
    done = run("--json", "--socket", shared.path)
    assert {finding["code"] for finding in json.loads(done.stdout)["findings"]} & {"gpu.none", "gpu.ok", "gpu.sharing"}


def test_people_read_marks_and_what_to_change(tmp_path: Path):
    """Topic by topic, what, why and the change, and how many of each at the end."""
    done = run("--no-gpu", "--socket", str(tmp_path / "s"), "--vllm", f"model {FLAG}")
    lines = done.stdout.splitlines()
    assert done.returncode == 1
    at = lines.index("socket")
    assert lines[at + 1].startswith("  ✖ socket.missing: ")
    assert lines[at + 3].startswith("    change: start `kvist serve")
    assert any(line.startswith("  ✔ Linux ") for line in lines)
    assert lines[-1].startswith("2 problems, ")


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["--pool", "1GiB"], "--pool says how to serve; add --serve"),
        (["--disk-size", "1GiB"], "--disk-size says how to serve"),
        (["--vllm", "a", "--vllm-config", "{}"], "give one of them"),
        (["--vllm", "'a"], "No closing quotation"),
        (["--sokcet", "a"], "--sokcet"),
    ],
)
def test_wrong_arguments(arguments: list[str], named: str):
    """The exit code is 2, and the argument is named."""
    done = run(*arguments, env={**process_environment(), "COLUMNS": "300"})
    assert (done.returncode, done.stdout) == (2, "")
    assert named in done.stderr
