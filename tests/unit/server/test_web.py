"""Where HTTP is answered is what was asked for, or stops the start with the one thing to change."""

import asyncio
import re
import socket
import sys
from pathlib import Path

import pytest

from kvist.errors import ConfigError
from kvist.server import web
from kvist.server.config import load_config
from kvist.server.web import open_door, parse_address, read_token, supervise
from tests.support.waiting import wait_until

TOKEN = "0123456789abcdef"


@pytest.mark.parametrize(
    ("http", "place"),
    [
        ("127.0.0.1:8437", ("127.0.0.1", 8437)),
        ("localhost:0", ("localhost", 0)),
        ("[::1]:8437", ("::1", 8437)),
        ("0.0.0.0:65535", ("0.0.0.0", 65535)),
        ("off", None),
    ],
)
def test_an_address_is_host_and_port(http: str, place: tuple[str, int] | None):
    """A name or a number, a colon and a port; or nothing at all."""
    assert parse_address(http) == place


@pytest.mark.parametrize(
    "http", ["", "on", "8437", ":8437", "127.0.0.1", "127.0.0.1:", "a:-1", "a:65536", "a:x", "a:\uff11"]
)
def test_what_is_no_address_is_refused_with_its_source(http: str):
    """A wrong address stops the start, and is named with the place where it was written."""
    with pytest.raises(ConfigError, match=r"http = .* in the environment: http: .* is neither HOST:PORT"):
        load_config(None, {}, {"KVIST_HTTP": http})


def test_a_port_that_is_taken_is_named():
    """Two programs cannot have one address: the second is told whose option it is, and how to choose another."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        place = f"127.0.0.1:{taken.getsockname()[1]}"
        with pytest.raises(
            ConfigError, match=rf"http: cannot listen on {place}: Address already in use.*--http HOST:PORT"
        ):
            open_door(place, "")


@pytest.fixture
def token_file(tmp_path: Path) -> Path:
    path = tmp_path / "token"
    path.write_text(f"  {TOKEN}\n")
    path.chmod(0o600)
    return path


def test_a_host_that_is_not_this_machines_is_named(token_file: Path):
    """An address of another machine cannot be listened on."""
    with pytest.raises(ConfigError, match=r"http: cannot listen on 192\.0\.2\.1:0: .*assign requested address"):
        open_door("192.0.2.1:0", str(token_file))


@pytest.mark.parametrize("http", ["0.0.0.0:0", "[::]:0"])
def test_what_others_can_reach_needs_a_token(http: str, token_file: Path):
    """Beyond loopback nothing listens without a token; with one the door is open, and says where."""
    with pytest.raises(ConfigError, match=r"can be reached from other machines.*--http-token-file PATH"):
        open_door(http, "")
    door = open_door(http, str(token_file))
    assert door is not None
    port = door.listener.getsockname()[1]
    assert (door.url, door.token) == (f"http://{http.removesuffix(':0')}:{port}", TOKEN)
    with socket.create_connection(("127.0.0.1" if "[" not in http else "::1", port)):
        door.close()


def test_loopback_needs_none_and_off_is_nothing():
    """On loopback no token is asked for unless one is given; ``off`` opens nothing."""
    door = open_door("localhost:0", "")
    assert door is not None
    assert door.token == ""
    door.close()
    assert open_door("off", "") is None


def test_a_token_is_a_secret(token_file: Path):
    """A file that everybody can read or write holds no secret; its owner's group may read it."""
    assert read_token(str(token_file)) == TOKEN
    token_file.chmod(0o640)
    assert read_token(str(token_file)) == TOKEN
    for mode in (0o644, 0o602, 0o601):
        token_file.chmod(mode)
        with pytest.raises(ConfigError, match=rf"every user has access to .*token \(mode {mode:04o}\); chmod 600"):
            read_token(str(token_file))


@pytest.mark.parametrize(
    "text", ["", "short", "fifteen-letters", "0123456789 abcdef", "ünicode-is-no-token", "x" * 4097, "0" * 16 + "\n0"]
)
def test_what_is_no_token_is_refused(token_file: Path, text: str):
    """A token is long enough not to be guessed, and goes through a header as it is; no error shows it."""
    token_file.write_text(text)
    with pytest.raises(ConfigError, match="is no token of 16 to 4096 letters") as caught:
        read_token(str(token_file))
    assert len(text) < 5 or text not in str(caught.value)


def test_a_token_file_that_is_not_there_is_named(tmp_path: Path):
    """What cannot be read stops the start."""
    with pytest.raises(ConfigError, match=r"http_token_file: .*/none cannot be read: No such file"):
        open_door("127.0.0.1:0", str(tmp_path / "none"))


@pytest.mark.parametrize("program", ["/bin/false", "/does/not/exist"])
def test_a_child_that_cannot_live_harms_nothing(
    program: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    """One that ends at once, or cannot be started, is tried again less and less often, and the door stays open."""
    monkeypatch.setattr(sys, "executable", program)
    monkeypatch.setattr(web, "_PAUSE_MIN_S", 0.01)
    door = open_door("127.0.0.1:0", "")
    assert door is not None

    async def run() -> None:
        supervising = asyncio.create_task(supervise(door, "socket"))
        await asyncio.to_thread(wait_until, lambda: caplog.text.count("http process ended") >= 4)
        supervising.cancel()
        with pytest.raises(asyncio.CancelledError):
            await supervising

    asyncio.run(run())
    assert re.findall(r"next_start_s=([\d.]+)", caplog.text)[:4] == ["0.01", "0.02", "0.04", "0.08"]
    with socket.create_connection(door.listener.getsockname()):
        door.close()
