"""What cannot be run stops the start with exit code 2 and the reason; a path belongs to one living daemon."""

import os
import signal
import socket
import subprocess
from pathlib import Path

import pytest

from kvist.server.config import process_environment
from tests.e2e.conftest import Connect
from tests.support.daemon import Daemon, command
from tests.support.waiting import wait_until


def serve(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run the program until it gives up."""
    surrounding = {"PATH": "/usr/bin:/bin", "COLUMNS": "500", "KVIST_HTTP": "off", **environment}
    return subprocess.run(
        command("serve", *arguments), capture_output=True, text=True, timeout=60, check=False, env=surrounding
    )


def test_what_cannot_be_run_stops_the_start(tmp_path: Path):
    """An unknown key, an impossible value, a pool larger than memory: exit code 2, and the message names it."""
    config = tmp_path / "kvist.toml"
    config.write_text('pol = "1GiB"\n')
    path = str(tmp_path / "s")
    for done, named in (
        (serve("--config", str(config), "--socket", path), ("unknown key 'pol'", "kvist.toml", "known keys")),
        (serve("--socket", path, KVIST_POL="1"), ("unknown key 'pol'", "the environment")),
        (serve("--socket", path, "--pool", "1000000GiB"), ("a pool of 976.6 TiB does not fit", "leaves", "--pool")),
        (serve("--socket", "/tmp/" + "x" * 200), ("xxx", "107 bytes", "the command line")),
    ):
        assert done.returncode == 2, done.stderr
        for text in named:
            assert text in done.stderr
        assert "Traceback" not in done.stderr
    assert os.listdir(tmp_path) == ["kvist.toml"]


def test_a_path_in_use_names_its_daemon(daemon: Daemon):
    """A second daemon on the same path gives up, and says whose the path is; the first one does not notice."""
    done = serve("--pool", "1MiB", "--socket", daemon.path)
    assert done.returncode == 2
    assert f"socket {daemon.path} is in use by a kvist daemon (pid {daemon.pid})" in done.stderr
    assert daemon.status().pid == daemon.pid


def test_a_path_of_another_program_is_left_alone(tmp_path: Path):
    """A socket on which somebody else listens, and a file of another kind, are neither removed nor used."""
    path = str(tmp_path / "s")
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(path)
        listener.listen()
        done = serve("--pool", "1MiB", "--socket", path)
        assert (done.returncode, f"another program (pid {os.getpid()})" in done.stderr) == (2, True), done.stderr
        assert os.path.exists(path)
    os.unlink(path)
    Path(path).write_text("mine")
    done = serve("--pool", "1MiB", "--socket", path)
    assert (done.returncode, "a file of another kind" in done.stderr) == (2, True), done.stderr
    assert Path(path).read_text() == "mine"


def test_a_directory_for_everybody_is_refused(tmp_path: Path):
    """Where others may write, they could put a socket of their own in place of the daemon's."""
    folder = tmp_path / "open"
    folder.mkdir()
    folder.chmod(0o777)
    done = serve("--pool", "1MiB", "--socket", str(folder / "s"))
    assert (done.returncode, f"others may write to {folder}" in done.stderr) == (2, True)
    assert os.listdir(folder) == []


def test_the_path_of_a_dead_daemon_is_taken_over(daemon: Daemon, connect: Connect, prompt: list[int]):
    """What a killed daemon left behind does not keep the next one from its path; the cache begins empty."""
    first = connect(daemon)
    first.store(prompt)
    boot_id = daemon.status().boot_id
    daemon.kill()
    assert os.path.exists(daemon.path)
    daemon.start()
    assert daemon.status().boot_id != boot_id
    second = connect(daemon)
    assert second.num_found(prompt) == 0
    assert second.store(prompt).num_stored == 5


def test_two_daemons_share_nothing(tmp_path: Path, connect: Connect, prompt: list[int]):
    """Each daemon has its own path and its own chunks, and clients see the one that they were told of."""
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    with Daemon(tmp_path / "a") as one, Daemon(tmp_path / "b") as other:
        connect(one).store(prompt)
        assert connect(one).num_found(prompt) == 5
        assert connect(other).num_found(prompt) == 0


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_stop_is_clean(tmp_path: Path, connect: Connect, prompt: list[int], number: int):
    """Asked to stop, a daemon ends its sessions, gives its path up, and exits with 0."""
    daemon = Daemon(tmp_path)
    engine = connect(daemon)
    engine.store(prompt)
    engine.look_up(prompt)
    daemon.signal(number)
    assert daemon.process.wait(20) == 0
    assert not os.path.exists(daemon.path)
    wait_until(lambda: engine.client.poll(0.1) or not engine.client.is_connected)
    assert "Traceback" not in daemon.log.read_text()


def test_a_daemon_starts_below_a_new_directory(tmp_path: Path):
    """The directory of the socket is made, for the user alone."""
    with Daemon(tmp_path, socket="new/kvist.sock") as daemon:
        assert os.stat(os.path.dirname(daemon.path)).st_mode & 0o777 == 0o700


def test_whoever_started_it_is_told(tmp_path: Path):
    """``READY=1`` comes when a client can connect and not before, ``STOPPING=1`` with the stop."""
    address, path = str(tmp_path / "notify"), str(tmp_path / "s")
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as notified:
        notified.bind(address)
        notified.settimeout(30)
        surrounding = {**process_environment(), "NOTIFY_SOCKET": address}
        arguments = command("serve", "--pool", "1MiB", "--socket", path)
        with subprocess.Popen(arguments, env=surrounding, stderr=subprocess.DEVNULL) as process:
            try:
                assert notified.recv(1000) == b"STATUS=making a pool of 1 MiB present"
                assert notified.recv(1000) == f"READY=1\nSTATUS=serving {path} with a pool of 1 MiB".encode()
                with socket.socket(socket.AF_UNIX) as client:
                    client.connect(path)
            finally:
                process.send_signal(signal.SIGTERM)
            assert notified.recv(1000) == b"STOPPING=1\nSTATUS=finishing 0 copies"
            assert process.wait(20) == 0
