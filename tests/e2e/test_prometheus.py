"""A real Prometheus reads a real daemon with the files that are deployed, and its answers are the daemon's figures."""

import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import quote

import pytest

from tests.e2e.conftest import Connect
from tests.support.daemon import Daemon
from tests.support.http import request
from tests.support.waiting import wait_until

DEPLOYED = Path(__file__).parents[2] / "deploy" / "prometheus"

pytestmark = pytest.mark.skipif(
    shutil.which("prometheus") is None or shutil.which("promtool") is None,
    reason="no prometheus and promtool here (Debian's package is 'prometheus')",
)


def listening_port(pid: int) -> int | None:
    """Return the TCP port on which a process listens; None as long as there is none."""
    inodes = set()
    for link in Path(f"/proc/{pid}/fd").iterdir():
        try:
            inodes |= set(re.findall(r"socket:\[(\d+)\]", os.readlink(link)))
        except OSError:
            continue  # Closed since.
    for line in Path(f"/proc/{pid}/net/tcp").read_text().splitlines()[1:]:
        _, local, _, state, *rest = line.split()
        if state == "0A" and rest[5] in inodes:
            return int(local.rpartition(":")[2], 16)
    return None


@pytest.fixture
def web(tmp_path: Path) -> Iterator[Daemon]:
    with Daemon(tmp_path, arguments=["--http", "127.0.0.1:0"]) as daemon:
        yield daemon


@pytest.fixture
def prometheus(web: Daemon, tmp_path: Path) -> Iterator[str]:
    """Return where a Prometheus answers that scrapes the daemon twice a second."""
    text = (DEPLOYED / "prometheus.yml").read_text()
    text = text.replace("127.0.0.1:8437", web.url.removeprefix("http://")).replace("15s", "500ms")
    (tmp_path / "prometheus.yml").write_text(text)
    shutil.copy(DEPLOYED / "alerts.yml", tmp_path)
    command = [
        "prometheus", f"--config.file={tmp_path / 'prometheus.yml'}", f"--storage.tsdb.path={tmp_path / 'data'}",
        "--web.listen-address=127.0.0.1:0",
    ]  # fmt: skip
    with (tmp_path / "prometheus.log").open("wb") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log)
    try:
        wait_until(lambda: listening_port(process.pid), deadline_s=30)
        yield f"http://127.0.0.1:{listening_port(process.pid)}"
    finally:
        process.terminate()
        process.wait(30)


def value(prometheus: str, expression: str) -> float | None:
    """Return what an expression is now; None where it has no value, or Prometheus is not ready."""
    answer = request(prometheus, f"/api/v1/query?query={quote(expression)}")
    found = answer.json["data"]["result"] if answer.code == 200 else []
    return float(found[0]["value"][1]) if found else None


def test_prometheus_sees_what_the_daemon_counts(web: Daemon, prometheus: str, connect: Connect, prompt: list[int]):
    """Hits, misses and bytes come back from PromQL as they were counted; all rules load, and no alert is pending."""
    engine = connect(web)
    engine.store(prompt)
    assert engine.load(prompt, engine.look_up(prompt)) == []
    assert engine.num_found([one + 1 for one in prompt]) == 0
    wait_until(lambda: value(prometheus, "kvist_lookups_total") == 2, deadline_s=30)
    for expression, expected in (
        ('sum(kvist_lookup_chunks_total{result=~"pool|tier"}) / sum(kvist_asked_chunks_total)', 0.5),
        ("sum(kvist_asked_chunks_total) - sum(kvist_lookup_chunks_total)", 0),
        ('kvist_bytes_total{direction="load"}', 5 * 4096),
        ("histogram_quantile(1, kvist_load_seconds_bucket) > bool 0", 1),
        ("kvist_up", 1),
    ):
        assert (expression, value(prometheus, expression)) == (expression, expected)
    rules = request(prometheus, "/api/v1/rules").json["data"]["groups"][0]["rules"]
    assert [(one["name"], one["state"]) for one in rules if one["state"] != "inactive"] == []
    assert len(rules) == (DEPLOYED / "alerts.yml").read_text().count("- alert:")


@pytest.mark.parametrize(
    "arguments", [("check", "config", "prometheus.yml"), ("test", "rules", "alerts_test.yml")], ids=["config", "alerts"]
)
def test_what_is_deployed_is_right(arguments: tuple[str, ...]):
    """The configuration and the rules are valid; each alert fires when it should, and none while all is well."""
    done = subprocess.run(["promtool", *arguments], cwd=DEPLOYED, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
