"""The supervisor hears each state once, in systemd's words, at whatever kind of address it listens."""

import logging
import secrets
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvist.server.readiness import Supervisor

Listener = tuple[socket.socket, str]


@pytest.fixture(params=["path", "abstract"])
def listener(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Listener]:
    """Return a socket that waits for what is said, and the text that names it in the environment."""
    name = f"@kvist-{secrets.token_hex(8)}" if request.param == "abstract" else str(tmp_path / "notify")
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sock:
        sock.bind("\0" + name[1:] if name.startswith("@") else name)
        sock.settimeout(10)
        yield sock, name


def test_each_state_is_one_datagram(listener: Listener):
    """A start, its end and a stop are said in the order and with the words that systemd reads."""
    sock, name = listener
    supervisor = Supervisor({"NOTIFY_SOCKET": name})
    supervisor.starting("making 4 GiB present")
    supervisor.ready("serving /s")
    supervisor.stopping("finishing 2 copies")
    assert [sock.recv(1000) for _ in range(3)] == [
        b"STATUS=making 4 GiB present",
        b"READY=1\nSTATUS=serving /s",
        b"STOPPING=1\nSTATUS=finishing 2 copies",
    ]


def test_nobody_who_does_not_listen_stops_the_daemon(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    """Without an address nothing is said or logged; an address where nobody listens costs one warning."""
    with caplog.at_level(logging.WARNING):
        Supervisor({}).ready("serving /s")
        Supervisor({"NOTIFY_SOCKET": ""}).ready("serving /s")
        assert not caplog.records
        Supervisor({"NOTIFY_SOCKET": str(tmp_path / "nobody")}).ready("serving /s")
    assert [record.getMessage().split(" error=")[0] for record in caplog.records] == [
        f"supervisor not told address='{tmp_path}/nobody' state=READY=1"
    ]
