"""``kvist describe``: which engines are connected, and how their KV lies in memory."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

import typer
from rich.console import Group, RenderableType
from rich.panel import Panel
from rich.table import Table

from kvist.cli.asking import Json, Socket, asked
from kvist.cli.output import output, print_json
from kvist.errors import UnknownEngine
from kvist.units import format_nbytes
from kvist.watching.figures import Engine, engines_of
from kvist.wire import messages as wire

EPILOG = "Example: kvist describe Qwen/Qwen3-8B"
_NAMED_MAX = 8


def describe(
    engine: Annotated[
        str | None, typer.Argument(metavar="[ENGINE]", help="The beginning of an engine's id, or a model's name.")
    ] = None,
    socket: Socket = None,
    json: Json = False,
) -> None:
    """Show the engines that are connected: models, layer groups, layouts, shards, bytes of a token and of a chunk."""
    with asked(socket) as daemon:
        sessions = daemon.ask(wire.Describe, wire.Description).sessions
        engines = meant(engines_of(sessions)[0], engine or "")
    if json:
        print_json([one for found in engines for one in found.processes])
    elif engines:
        output.print(Group(*map(engine_panel, engines)))
    else:
        output.print("no engine is connected")


def meant(engines: Sequence[Engine], name: str) -> list[Engine]:
    """Return the engines whose id begins with ``name``, or whose model is called so; all of them if it is empty.

    Raises:
        UnknownEngine: there is none, and some others are named.
    """
    found = [one for one in engines if one.engine_id.startswith(name) or one.model == name]
    if name and not found:
        there = ", ".join(f"{one.engine_id} ({one.model or 'model not told'})" for one in engines[:_NAMED_MAX])
        raise UnknownEngine(f"no engine {name!r} is connected; there is {there or 'none at all'}")
    return found


def engine_panel(engine: Engine) -> Panel:
    """Return what people want to know of one engine."""
    facts = Table(show_header=False, box=None, padding=(0, 2, 0, 0))
    serves = next((one.serves for one in engine.processes if one.serves is not None), None)
    told = {name: text for one in engine.processes for name, text in one.facts.items()}
    rows = [
        ("engine", told.pop("engine", "not told")),
        ("dtype", engine.dtype or "not told"),
        ("chunk", f"{engine.chunk_tokens} tokens" if engine.chunk_tokens else "not told"),
        ("shards", serves.shards if serves else "not told"),
        ("revision", serves.revision if serves and serves.revision else "not told"),
        ("memory", ", ".join(engine.memory) or "none registered"),
        ("lane", ", ".join(f"{lane} (the {lane} copies)" for lane in engine.lanes) or "none"),
        *((name.replace("_", " "), text) for name, text in sorted(told.items())),
    ]
    for name, text in rows:
        facts.add_row(name, text)
    layers = Table(
        "group", "shard", "kind", "block", "layers", "blocks", "bytes of a chunk", box=None, padding=(0, 2, 0, 0)
    )
    for row in _rows(engine):
        kind = row.kind if row.window is None else f"{row.kind} of {row.window} tokens"
        layers.add_row(
            str(row.group), str(row.shard), kind, f"{row.block_tokens} tokens", str(row.num_planes),
            str(row.num_blocks), format_nbytes(row.chunk_nbytes),
        )  # fmt: skip
    parts: list[RenderableType] = [facts, "", layers, *engine.texts]
    return Panel(Group(*parts), title=f"{engine.model or 'model not told'} · {engine.engine_id}", title_align="left")


def _rows(engine: Engine) -> list[wire.SessionRow]:
    rows = {(row.group, row.shard): row for one in engine.processes for row in one.rows}
    return [rows[key] for key in sorted(rows)]
