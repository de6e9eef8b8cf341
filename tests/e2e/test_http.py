"""HTTP is a process beside the daemon: it tells the truth, ends with the daemon, and never keeps it from anything."""

import os
import re
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from tests.e2e.conftest import Connect
from tests.e2e.test_start import serve
from tests.support.daemon import Daemon, command
from tests.support.http import JSON, request, samples
from tests.support.waiting import wait_until

TOKEN = "0123456789abcdef"
ROUTES = (
    ("GET", "/healthz"), ("GET", "/readyz"), ("GET", "/status"), ("GET", "/metrics"), ("GET", "/openapi.json"),
    ("GET", "/api/sessions"), ("POST", "/api/lookup"),
)  # fmt: skip


def is_running(pid: int) -> bool:
    """Say whether a process is there, and not merely waiting to be forgotten."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def code(url: str, path: str = "/healthz") -> int:
    return request(url, path).code


@pytest.fixture
def web(tmp_path: Path) -> Iterator[Daemon]:
    """A daemon with HTTP at a port that was free, which answers."""
    with Daemon(tmp_path, arguments=["--http", "127.0.0.1:0"]) as daemon:
        wait_until(lambda: code(daemon.url) == 200)
        yield daemon


def test_what_is_shown_is_what_has_happened(web: Daemon, connect: Connect, prompt: list[int]):
    """After stores, hits and misses all that was asked for was in the pool, in a tier, or nowhere."""
    engine = connect(web)
    engine.store(prompt)
    found = engine.look_up(prompt)
    assert engine.load(prompt, found) == []
    assert engine.num_found([one + 1 for one in prompt]) == 0
    status = web.status()
    wait_until(lambda: samples(request(web.url, "/metrics").body.decode())["kvist_lookups_total", ()] == 2)
    values = samples(request(web.url, "/metrics").body.decode())
    parts = {result: values["kvist_lookup_chunks_total", (("result", result),)] for result in ("pool", "tier", "miss")}
    assert parts == {"pool": 5, "tier": 0, "miss": 5}
    assert values["kvist_asked_chunks_total", ()] == 10
    assert values["kvist_loaded_chunks_total", (("kind", "full"),)] == 5
    assert values["kvist_bytes_total", (("direction", "load"),)] == status.counters["bytes_loaded"] == 5 * 4096
    assert values["kvist_load_seconds_count", ()] == 1
    assert values["kvist_pool_used_bytes", ()] == status.pool_used_nbytes


def test_http_and_the_command_line_say_the_same(web: Daemon):
    """``/status`` has the keys of ``kvist status --json``, and the values where these do not move."""
    done = subprocess.run(
        command("status", "--socket", web.path, "--json"), capture_output=True, text=True, check=True, timeout=60
    )
    printed, shown = msgspec.json.decode(done.stdout), request(web.url, "/status").json
    assert list(printed) == list(shown)
    for key in ("pid", "boot_id", "pool_nbytes", "version", "lane_rates"):
        assert printed[key] == shown[key]


def test_whoever_has_the_token_may_purge(tmp_path: Path, connect: Connect, prompt: list[int]):
    """By model, by tenant, or all of it; nothing without the token, and nothing that is not named."""
    token = tmp_path / "token"
    token.write_text(TOKEN)
    token.chmod(0o600)
    with Daemon(tmp_path, arguments=["--http", "127.0.0.1:0", "--http-token-file", str(token)]) as web:
        wait_until(lambda: code(web.url) == 200)
        engine = connect(web)
        engine.store(prompt)

        def purge(body: bytes, **headers: str) -> tuple[int, object]:
            answer = request(web.url, "/api/purge", method="POST", headers={**JSON, **headers}, body=body)
            return answer.code, answer.json

        known = {"authorization": f"Bearer {TOKEN}"}
        assert purge(b'{"everything": true}')[0] == 401
        for body in (b"{}", b'{"everything": true, "model": "model"}', b'{"what": 1}'):
            assert purge(body, **known)[0] == 400
        assert purge(b'{"model": "another"}', **known)[1]["num_chunks"] == 0
        assert engine.num_found(prompt) == 5
        assert purge(b'{"model": "model"}', **known) == (
            200, {"type": "purge_reply", "id": 2, "num_chunks": 5, "nbytes": 5 * 4096, "num_kept": 0, "tiers": {}}
        )  # fmt: skip
        assert engine.num_found(prompt) == 0
        assert web.count("chunks_purged") == 5


def test_a_process_that_dies_is_started_again(web: Daemon):
    """Killed, it comes back at the same address, with a line in the log; the daemon goes on meanwhile."""
    first = web.http_pid
    for number in (signal.SIGKILL, signal.SIGTERM):
        pid = web.http_pid
        os.kill(pid, number)
        wait_until(lambda pid=pid: web.http_pid != pid)
        assert web.status().pid == web.pid
        assert code(web.url, "/metrics") == 200
    assert web.num_logged("http process ended reason=exit code -9") == 1
    assert not is_running(first)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_it_ends_with_the_daemon(web: Daemon, number: int):
    """Whatever ends the daemon ends it too, within a second of the daemon's own end, and the address is free again."""
    pid, url = web.http_pid, web.url
    web.signal(number)
    assert web.process.wait(20) == (-9 if number == signal.SIGKILL else 0)
    wait_until(lambda: not is_running(pid), deadline_s=1.0)
    with pytest.raises(ConnectionRefusedError):
        request(url, "/healthz")


def test_a_process_that_hangs_does_not_hold_the_stop_up(web: Daemon):
    """One that does not end when it is asked to is killed, and the daemon stops in order."""
    pid = web.http_pid
    os.kill(pid, signal.SIGSTOP)
    began_at = time.monotonic()
    assert web.stop() == 0
    assert time.monotonic() - began_at < 8
    assert not is_running(pid)


def test_a_daemon_that_hangs_is_not_healthy(web: Daemon):
    """Health is 503 some seconds after the daemon's last word, at once for who asks, and 200 when it goes on."""
    web.signal(signal.SIGSTOP)
    try:
        wait_until(lambda: code(web.url) == 503, deadline_s=10)
        began_at = time.monotonic()
        answer = request(web.url, "/readyz")
        assert (answer.code, bool(answer.json["error"])) == (503, True)
        assert time.monotonic() - began_at < 1
        assert samples(request(web.url, "/metrics").body.decode()) == {("kvist_up", ()): 0.0}
    finally:
        web.signal(signal.SIGCONT)
    wait_until(lambda: code(web.url) == code(web.url, "/readyz") == 200)


def test_an_address_in_use_stops_the_start(web: Daemon, tmp_path: Path):
    """A second daemon at the same address exits with 2 and says what to change, before it takes any memory."""
    place = web.url.removeprefix("http://")
    done = serve("--socket", str(tmp_path / "s"), "--http", place, "--pool", "1000000GiB")
    assert done.returncode == 2
    assert f"http: cannot listen on {place}: Address already in use" in done.stderr
    assert "--http off" in done.stderr
    assert "Traceback" not in done.stderr


def test_others_need_the_token(tmp_path: Path):
    """Where other machines can ask, only health and metrics are for all; without a token nothing starts."""
    done = serve("--socket", str(tmp_path / "s"), "--http", "0.0.0.0:0", "--pool", "1MiB")
    assert (done.returncode, "--http-token-file PATH" in done.stderr) == (2, True)
    token = tmp_path / "token"
    token.write_text(TOKEN)
    token.chmod(0o600)
    with Daemon(tmp_path, arguments=["--http", "0.0.0.0:0", "--http-token-file", str(token)]) as daemon:
        url = f"http://127.0.0.1:{daemon.url.rpartition(':')[2]}"
        wait_until(lambda: code(url) == 200)
        known = {"authorization": f"Bearer {TOKEN}"}
        for method, path in ROUTES:
            is_open = path in ("/healthz", "/readyz", "/metrics", "/openapi.json")
            assert (path, request(url, path, method=method).code) == (path, 200 if is_open else 401)
            wrong = request(url, path, method=method, headers={"authorization": "Bearer " + "x" * 16})
            assert (path, wrong.code) == (path, 200 if is_open else 401)
            assert request(url, path, method=method, headers=known).code in (200, 415)
        assert TOKEN not in daemon.log.read_text()
        assert TOKEN not in Path(f"/proc/{daemon.http_pid}/cmdline").read_text()


def test_nothing_of_the_process_is_shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """No route, asked rightly or wrongly, shows a word of the environment or of the files around it."""
    monkeypatch.setenv("CANARY", "canary-of-the-environment")
    with Daemon(tmp_path, arguments=["--http", "127.0.0.1:0"]) as daemon:
        wait_until(lambda: code(daemon.url) == 200)
        assert "canary-of-the-environment" in Path(f"/proc/{daemon.http_pid}/environ").read_text()
        shown = []
        for method, path in (*ROUTES, ("GET", "/../../etc/passwd"), ("GET", "/api/environ"), ("TRACE", "/status")):
            for body in (b"", b'{"tokens": [1, 2]}', b'{"tokens": {"__class__": "os"}}', b"\xff"):
                answer = request(daemon.url, path, method=method, body=body, headers=JSON)
                assert answer.code in (200, 400, 404, 405)
                shown.append(str(answer).lower())
        text = "\n".join(shown)
        assert "kvist_up" in text
        for word in ("canary", "python", "uvicorn", "starlette", "traceback", "root:", str(tmp_path).lower()):
            assert word not in text


def test_many_callers_are_no_load(web: Daemon):
    """Scrapes that come together cost the daemon one request for its status and one for its sessions, not one each."""
    wait_until(lambda: code(web.url) == 200)
    rests = web.num_rests()
    began_at = time.monotonic()
    for _ in range(200):
        assert code(web.url, "/metrics") == 200
    num_asked_max = 2 * (time.monotonic() - began_at) / 0.5 + 2 * (time.monotonic() - began_at) + 4
    num_ticks_max = 4 * (time.monotonic() - began_at) + 4
    assert web.num_rests() - rests < 3 * (num_asked_max + num_ticks_max)


def test_a_slow_caller_holds_nobody_up(web: Daemon):
    """Connections that say nothing, or half of something, are no obstacle to the next."""
    place = web.url.removeprefix("http://").split(":")
    with (
        socket.create_connection((place[0], int(place[1]))) as silent,
        socket.create_connection((place[0], int(place[1]))) as slow,
    ):
        slow.sendall(
            b"POST /api/lookup HTTP/1.1\r\nhost: localhost\r\n"
            b"content-type: application/json\r\ncontent-length: 9\r\n\r\n{"
        )
        assert code(web.url) == code(web.url, "/metrics") == 200
        silent.sendall(b"GET /healthz HTTP/1.1\r\nhost: localhost\r\n\r\n")
        assert re.match(rb"HTTP/1.1 200 ", silent.recv(4096))
