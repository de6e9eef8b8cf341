"""``kvist purge``: drop what is cached, of a tenant, of a model, or all of it."""

from __future__ import annotations

from typing import Annotated

import typer

from kvist.cli.asking import Json, Socket, asked
from kvist.cli.output import output, print_error, print_json
from kvist.errors import ConfigError
from kvist.units import format_nbytes
from kvist.wire import messages as wire

EPILOG = "Example: kvist purge --model Qwen/Qwen3-8B"
_DEADLINE_S = 60.0


def purge(
    tenant: Annotated[str | None, typer.Option(help="Only what this tenant has; '' for those without a name.")] = None,
    model: Annotated[str | None, typer.Option(help="Only what is of this model.")] = None,
    everything: Annotated[bool, typer.Option("--all", help="Everything.")] = False,
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask.")] = False,
    socket: Socket = None,
    json: Json = False,
) -> None:
    """Drop what is cached, in memory and in all tiers. What an engine is loading or storing just now stays."""
    if everything == (tenant is not None or model is not None):
        print_error(ConfigError("name a --tenant, a --model, or both; or say --all"))
        raise typer.Exit(2)
    if everything and not yes and not json:
        typer.confirm("Drop everything that is cached?", abort=True)
    with asked(socket) as daemon:
        reply = daemon.ask(lambda number: wire.Purge(number, tenant, model), wire.PurgeReply, deadline_s=_DEADLINE_S)
    if json:
        print_json(reply)
        return
    tiers = "".join(f", {num_chunks} from {name}" for name, num_chunks in reply.tiers.items())
    kept = f"; {reply.num_kept} are in use and stay" if reply.num_kept else ""
    output.print(f"{reply.num_chunks} chunks dropped ({format_nbytes(reply.nbytes)}){tiers}{kept}", highlight=False)
