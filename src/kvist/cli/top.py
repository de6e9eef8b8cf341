"""``kvist top``: the daemon at work, live.

The law: a daemon that stops or starts anew is shown as such, and the display goes on.
"""

from __future__ import annotations

import contextlib
import select
import sys
import termios
import tty
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Annotated

import typer
from rich.console import RenderableType
from rich.live import Live

from kvist.cli.asking import Socket, silenced, socket_path
from kvist.cli.board import board
from kvist.cli.output import output, print_error
from kvist.errors import ConfigError
from kvist.watching.figures import work_out
from kvist.watching.watcher import Watcher

EPILOG = "Example: kvist top --interval 0.5; q ends it"


def top(
    socket: Socket = None,
    interval: Annotated[float, typer.Option(help="Seconds between two looks.", min=0.1)] = 1.0,
    once: Annotated[
        bool, typer.Option("--once", help="Print one frame and end, as where there is no terminal.")
    ] = False,
) -> None:
    """Show the daemon at work, live; q or Ctrl-C ends it."""
    try:
        watcher = Watcher(socket_path(socket))
    except ConfigError as error:
        print_error(error)
        raise typer.Exit(1) from None
    with silenced(), contextlib.closing(watcher):
        if once or not output.is_terminal:
            _print_once(watcher, interval)
        else:
            _run(watcher, interval)


def _print_once(watcher: Watcher, interval: float) -> None:
    """Print what happens between two looks."""
    if watcher.sample() is not None:
        _wait_for_key(interval)
        watcher.sample()
    output.print(_frame(watcher))
    if watcher.failure:
        raise typer.Exit(1)


def _run(watcher: Watcher, interval: float) -> None:
    watcher.sample()
    live = Live(_frame(watcher), console=output, screen=True, auto_refresh=False)
    with _keys(), contextlib.suppress(KeyboardInterrupt), live:
        while _wait_for_key(interval) != "q":
            watcher.sample()
            live.update(_frame(watcher), refresh=True)


def _frame(watcher: Watcher) -> RenderableType:
    return board(work_out(watcher.history), watcher.failure)


@contextmanager
def _keys() -> Iterator[None]:
    """Let single keys through, unseen, as long as this lasts."""
    if not sys.stdin.isatty():
        yield
        return
    before = termios.tcgetattr(sys.stdin)
    tty.setcbreak(sys.stdin)
    try:
        yield
    finally:
        termios.tcsetattr(sys.stdin, termios.TCSADRAIN, before)


def _wait_for_key(seconds: float) -> str:
    """Return the next key, or nothing after so many seconds."""
    if not sys.stdin.isatty():
        select.select([], [], [], seconds)
        return ""
    ready, _, _ = select.select([sys.stdin], [], [], seconds)
    return sys.stdin.read(1) if ready else ""
