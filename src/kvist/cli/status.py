"""``kvist status``: what the daemon holds and has done, in one look."""

from __future__ import annotations

import time
from typing import Annotated

import typer
from rich.table import Table

from kvist.cli.asking import Json, Socket, asked
from kvist.cli.board import beginning, board
from kvist.cli.output import output, print_json
from kvist.units import format_nbytes
from kvist.watching.figures import work_out
from kvist.watching.watcher import Sample
from kvist.wire import messages as wire

EPILOG = "Example: kvist status --json | jq .counters.tokens_found"


def status(
    socket: Socket = None,
    json: Json = False,
    counters: Annotated[bool, typer.Option("--counters", help="Show every counter besides.")] = False,
) -> None:
    """Show what the daemon holds and has done."""
    with asked(socket) as daemon:
        reply = daemon.ask(wire.Status, wire.StatusReply)
        sessions = () if json else tuple(daemon.ask(wire.Describe, wire.Description).sessions)
    if json:
        print_json(reply)
        return
    sample = Sample(time.time(), reply, sessions)  # noqa: TID251 -- for people
    output.print(board(work_out([beginning(sample), sample]), has_rates=False))
    if counters:
        output.print(_counters(reply))


def _counters(reply: wire.StatusReply) -> Table:
    table = Table("counter", "since the start", box=None, padding=(0, 2, 0, 0))
    for name, value in sorted(reply.counters.items()):
        table.add_row(name, format_nbytes(value) if name.startswith("bytes_") else f"{value}")
    return table
