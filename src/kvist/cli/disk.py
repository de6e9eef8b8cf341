"""``kvist disk``: directories of the disk tier, while no daemon uses them.

Exit codes: 0 done, 1 there are bad chunks, 2 the directory cannot be looked at: not there, in use, of a newer version.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table

from kvist.cli.output import output, print_error, print_json
from kvist.errors import ConfigError
from kvist.model.owners import owned_by
from kvist.storage.disk.files import OsFiles
from kvist.storage.disk.inspection import BadChunk, DirectoryFacts, describe, purge, purge_owned, verify
from kvist.units import format_nbytes

app = typer.Typer(no_args_is_help=True, help="Look at directories of the disk tier while no daemon uses them.")

Directory = Annotated[Path, typer.Argument(metavar="PATH", help="What --disk named.")]
Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]


@app.command("verify")
def verify_command(path: Directory, json: Json = False) -> None:
    """Read all chunks and name those that are not as written."""
    with _explained():
        facts = describe(OsFiles(), path)
        bad = verify(OsFiles(), path)
    if json:
        print_json({"facts": facts, "bad": bad})
    else:
        _print_bad(facts, bad)
    if bad or facts.is_damaged:
        raise typer.Exit(1)


@app.command("stats")
def stats_command(path: Directory, json: Json = False) -> None:
    """Show what a directory holds."""
    with _explained():
        facts = describe(OsFiles(), path)
    if json:
        print_json(facts)
    else:
        output.print(_facts_table(facts))


@app.command("purge")
def purge_command(
    path: Directory,
    tenant: Annotated[str | None, typer.Option(help="Only what this tenant has; '' for those without a name.")] = None,
    model: Annotated[str | None, typer.Option(help="Only what is of this model.")] = None,
    json: Json = False,
) -> None:
    """Remove all chunks, and the files that they are in; or what is of a tenant, of a model, or of both."""
    num_chunks = None
    with _explained():
        if tenant is None and model is None:
            purge(OsFiles(), path)
        else:
            num_chunks = purge_owned(OsFiles(), path, owned_by(tenant, model))
    if json:
        print_json({"path": str(path), "purged": True, "num_chunks": num_chunks})
    else:
        what = "removed" if num_chunks is None else f"{num_chunks} chunks removed"
        output.print(f"{path}: {what}", highlight=False, soft_wrap=True)


@contextmanager
def _explained() -> Iterator[None]:
    try:
        yield
    except ConfigError as error:
        print_error(error)
        raise typer.Exit(2) from None


def _print_bad(facts: DirectoryFacts, bad: list[BadChunk]) -> None:
    for chunk in bad:
        output.print(f"{chunk.key} at {chunk.offset}: {chunk.reason}", highlight=False, soft_wrap=True)
    if facts.is_damaged:
        output.print("slab and log do not belong together", highlight=False)
    output.print(f"{facts.path}: {facts.num_chunks} chunks, {len(bad)} bad", highlight=False, soft_wrap=True)


def _facts_table(facts: DirectoryFacts) -> Table:
    table = Table(show_header=False, box=None)
    rows = (
        ("directory", facts.path),
        ("chunks", f"{facts.num_chunks} ({format_nbytes(facts.chunk_nbytes)})"),
        ("slab", f"{format_nbytes(facts.slab_nbytes)} in extents of {format_nbytes(facts.extent_nbytes)}"),
        ("log", f"{format_nbytes(facts.log_nbytes)}, {facts.num_torn_nbytes} bytes torn"),
        ("state", "damaged: slab and log do not belong together" if facts.is_damaged else "sound"),
    )
    for row in rows:
        table.add_row(*row)
    return table
