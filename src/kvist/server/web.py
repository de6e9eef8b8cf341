"""HTTP in a child process: its socket is opened here, before anything else, and handed over.

The laws: this process loads no web framework. The child never holds up the start or a request: when it ends it is
started again, after a pause that grows while it keeps ending. It ends with this process, however that ends: its
standard input is a pipe from here, whose first line is the token and whose end is the child's.
"""

from __future__ import annotations

import asyncio
import ipaddress
import logging
import os
import re
import socket
import subprocess
import sys
from dataclasses import dataclass
from typing import Final

from kvist.errors import ConfigError

logger = logging.getLogger(__name__)

OFF: Final = "off"
TOKEN_NBYTES_MIN: Final = 16
_TOKEN_NBYTES_MAX: Final = 4096
_TOKEN: Final = re.compile(r"[A-Za-z0-9._~+/=-]+")
_PAUSE_MIN_S: Final = 0.25
_PAUSE_MAX_S: Final = 30.0
_STEADY_S: Final = 60.0
"""A child that has lived so long has not failed to start: the next pause is the shortest again."""
_END_S: Final = 2.0
"""How long a child has to end by itself."""


@dataclass(frozen=True, slots=True)
class Door:
    """A socket that takes HTTP connections from now on, and what they must know."""

    listener: socket.socket
    token: str
    """What a caller has to present; empty for nothing."""

    @property
    def url(self) -> str:
        """Where it is."""
        host, port = self.listener.getsockname()[:2]
        return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"

    def close(self) -> None:
        """Take no more connections. Idempotent."""
        self.listener.close()


def parse_address(http: str) -> tuple[str, int] | None:
    """Return host and port of ``host:port`` or ``[host]:port``, None for ``off``.

    Raises:
        ConfigError: it is neither.
    """
    if http == OFF:
        return None
    host, _, port = http.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    if not host or not port.isascii() or not port.isdecimal() or int(port) > 0xFFFF:
        raise ConfigError(f"http: {http!r} is neither HOST:PORT, such as 127.0.0.1:8437 or [::1]:8437, nor {OFF}")
    return host, int(port)


def open_door(http: str, token_file: str) -> Door | None:
    """Listen where ``http`` says; None for ``off``. Port 0 is any that is free.

    Raises:
        ConfigError: the address cannot be had, or others could reach it without a token; nothing is left open.
    """
    place = parse_address(http)
    if place is None:
        return None
    token = read_token(token_file) if token_file else ""
    try:
        family, _, _, _, address = socket.getaddrinfo(*place, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
        if not ipaddress.ip_address(address[0]).is_loopback and not token:
            raise ConfigError(
                f"http: {http} can be reached from other machines; say with --http-token-file PATH what callers must "
                f"know, or listen on 127.0.0.1"
            )
        return Door(socket.create_server(address, family=family, backlog=128), token)
    except OSError as error:
        reason = error.strerror or str(error)
        raise ConfigError(
            f"http: cannot listen on {http}: {reason}; choose another address with --http HOST:PORT, or --http {OFF}"
        ) from error


def read_token(path: str) -> str:
    """Return what a token file holds, without the white space around it.

    Raises:
        ConfigError: it cannot be read, everybody can read it, or what it holds is no token.
    """
    try:
        with open(path, "rb") as file:
            mode = os.fstat(file.fileno()).st_mode & 0o777
            token = file.read(_TOKEN_NBYTES_MAX + 1).strip().decode("ascii", "replace")
    except OSError as error:
        raise ConfigError(f"http_token_file: {path} cannot be read: {error.strerror}") from error
    if mode & 0o007:
        raise ConfigError(f"http_token_file: every user has access to {path} (mode {mode:04o}); chmod 600 it")
    if not TOKEN_NBYTES_MIN <= len(token) <= _TOKEN_NBYTES_MAX or not _TOKEN.fullmatch(token):
        raise ConfigError(
            f"http_token_file: what {path} holds is no token of {TOKEN_NBYTES_MIN} to {_TOKEN_NBYTES_MAX} letters, "
            f"digits and . _ ~ + / = -"
        )
    return token


async def supervise(door: Door, socket_path: str) -> None:
    """Keep a child that answers at ``door`` and asks the daemon at ``socket_path``, until cancelled; then end it."""
    loop = asyncio.get_running_loop()
    pause_s = _PAUSE_MIN_S
    while True:
        began_at = loop.time()
        reason = await _run_child(door, socket_path)
        if loop.time() - began_at > _STEADY_S:
            pause_s = _PAUSE_MIN_S
        logger.warning("http process ended reason=%s next_start_s=%.2f", reason, pause_s)
        await asyncio.sleep(pause_s)
        pause_s = min(2 * pause_s, _PAUSE_MAX_S)


async def _run_child(door: Door, socket_path: str) -> str:
    """Return why the child has ended, or could not be started."""
    fd = door.listener.fileno()
    command = [sys.executable, "-P", "-m", "kvist.web", socket_path, str(fd)]
    try:
        # In a session of its own, so that Ctrl-C reaches this process alone, which ends the child when it is done.
        process = subprocess.Popen(  # noqa: S603, ASYNC220 -- our own program; it forks no address space (vfork)
            command, bufsize=0, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, pass_fds=[fd], start_new_session=True
        )
    except OSError as error:
        return str(error)
    assert process.stdin is not None
    try:
        process.stdin.write(f"{door.token}\n".encode())
        logger.info("http process started pid=%d url=%s", process.pid, door.url)
        await _wait_ended(process.pid)
    except OSError as error:
        return str(error)
    finally:
        await _end(process)
    return f"exit code {process.returncode}"


async def _end(process: subprocess.Popen[bytes]) -> None:
    """Ask a child to end, make it end, and forget it."""
    try:
        process.terminate()
        await asyncio.wait_for(_wait_ended(process.pid), _END_S)
    except (TimeoutError, OSError):
        process.kill()
    finally:
        process.wait()
        if process.stdin is not None:
            process.stdin.close()


async def _wait_ended(pid: int) -> None:
    """Return when a child has ended.

    Raises:
        OSError: there are no descriptors left to watch it with.
    """
    loop = asyncio.get_running_loop()
    fd = os.pidfd_open(pid)
    ended = asyncio.Event()
    loop.add_reader(fd, ended.set)
    try:
        await ended.wait()
    finally:
        loop.remove_reader(fd)
        os.close(fd)
