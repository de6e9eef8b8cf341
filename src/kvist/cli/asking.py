"""How commands ask a daemon: one connection, one way to say that it is not there.

Exit codes of all of them: 0 done, 1 the daemon is not there or refused, 2 wrong arguments or configuration.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Annotated, Final, TypeVar

import typer

from kvist.cli.output import print_error
from kvist.client.client import Build, Client, expect
from kvist.errors import KvistError
from kvist.server.config import load_config, process_environment

T = TypeVar("T")

Socket = Annotated[str | None, typer.Option("--socket", help="Path of the daemon's Unix socket.", metavar="PATH")]
Json = Annotated[bool, typer.Option("--json", help="Print JSON instead of text.")]

DEADLINE_S: Final = 5.0
"""Longest wait for one answer."""


def socket_path(socket: str | None) -> str:
    """Return where the daemon listens: what was said, else what the environment says, else the default.

    Raises:
        ConfigError: it is no path of a socket.
    """
    return load_config(None, {"socket": socket}, process_environment()).socket_path


class Daemon:
    """A daemon, as a command sees it."""

    def __init__(self, path: str) -> None:
        self.path = path
        self._client = Client(path, engine_id="kvist-cli", name="kvist command")

    def ask(self, build: Build, expected: type[T], *, deadline_s: float = DEADLINE_S) -> T:
        """Send one request and return its reply.

        Raises:
            KvistError: the daemon refused, is not there, or answered something else.
        """
        return expect(self._client.call(build, deadline_s), expected)

    def close(self) -> None:
        """Leave. Idempotent."""
        self._client.close()


@contextmanager
def silenced() -> Iterator[None]:
    """Keep log lines from what a command prints: what goes wrong is said once, in its own words."""
    before = logging.root.manager.disable
    logging.disable()
    try:
        yield
    finally:
        logging.disable(before)


@contextmanager
def asked(socket: str | None) -> Iterator[Daemon]:
    """Yield the daemon at a socket; whatever goes wrong with it ends the command with its own words and 1."""
    with silenced():
        try:
            with contextlib.closing(Daemon(socket_path(socket))) as daemon:
                yield daemon
        except KvistError as error:
            print_error(error)
            raise typer.Exit(1) from None
