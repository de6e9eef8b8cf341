"""``kvist lookup``: is a prompt cached, in which tier, for which shards."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Group, RenderableType
from rich.table import Table

from kvist.cli.asking import Json, Socket, asked
from kvist.cli.output import output, print_error, print_json
from kvist.client.locating import Located, locate
from kvist.errors import KeyInvalid
from kvist.wire import messages as wire

EPILOG = "Example: echo '[9707, 11, 1879]' | kvist lookup --tokens -"
_NUMBER = re.compile(r"-?\d+")
_BETWEEN = re.compile(r"[\s,\[\]]*")


def lookup(
    tokens: Annotated[Path, typer.Option(help="A file of token ids, as JSON or with blanks between; - for the input.")],
    engine: Annotated[str, typer.Option(help="In whose keys: an engine's id or a model's name.")] = "",
    adapter: Annotated[str, typer.Option(help="Name of the adapter (LoRA) that the request names.")] = "",
    salt: Annotated[str, typer.Option(help="The request's cache_salt.")] = "",
    socket: Socket = None,
    json: Json = False,
) -> None:
    """Show how much of a prompt is cached, and where. Changes nothing: no use is counted, nothing is read ahead."""
    try:
        ids = read_tokens(sys.stdin.read() if str(tokens) == "-" else tokens.read_text())
    except (OSError, UnicodeDecodeError, KeyInvalid) as error:
        print_error(error)
        raise typer.Exit(2) from None
    with asked(socket) as daemon:
        sessions = daemon.ask(wire.Describe, wire.Description).sessions
        found = locate(
            lambda build: daemon.ask(build, wire.Found), sessions, ids, engine=engine, adapter=adapter, salt=salt
        )
    if json:
        print_json(found)
    else:
        output.print(located_text(found))


def read_tokens(text: str) -> list[int]:
    """Read token ids: a JSON list, or numbers with blanks or commas between.

    Raises:
        KeyInvalid: there is something else.
    """
    rest = _BETWEEN.sub("", _NUMBER.sub("", text))
    if rest:
        raise KeyInvalid(f"token ids are numbers; found {rest[:40]!r}")
    return [int(number) for number in _NUMBER.findall(text)]


def located_text(found: Located) -> RenderableType:
    """Return where a prompt's chunks are, for people."""
    if found.num_tokens < found.chunk_tokens:
        return f"{found.num_tokens} tokens are less than a chunk of {found.chunk_tokens}: nothing of it has a key"
    share = f"{found.num_tokens_now / found.num_tokens:.0%}"
    lines: list[RenderableType] = [
        f"{found.model}: {found.num_tokens_now} of {found.num_tokens} tokens ({share}) can be loaded now"
    ]
    if found.num_tokens_with_tiers > found.num_tokens_now:
        lines.append(f"{found.num_tokens_with_tiers} tokens with what is in {', '.join(found.tiers)}")
    places = ["pool", *found.tiers, "nowhere"]
    table = Table("group", "shard", *places, box=None, padding=(0, 2, 0, 0))
    for row in found.rows:
        table.add_row(str(row.group), str(row.shard), *(f"{row.num_chunks[place]} chunks" for place in places))
    return Group(*lines, table)
