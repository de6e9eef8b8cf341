"""The ``kvist`` command: which commands there are. Each is a module of its own."""

from __future__ import annotations

import typer

from kvist import __version__
from kvist.cli import bench, config, describe, disk, doctor, lookup, purge, serve, status, top
from kvist.cli.asking import Json
from kvist.cli.output import output, print_json
from kvist.wire import messages as wire

app = typer.Typer(no_args_is_help=True, help="A KV-cache service for LLM inference engines.")
app.command(epilog=serve.EPILOG)(serve.serve)
app.command(epilog=status.EPILOG)(status.status)
app.command(epilog=describe.EPILOG)(describe.describe)
app.command(epilog=top.EPILOG)(top.top)
app.command(epilog=lookup.EPILOG)(lookup.lookup)
app.command(epilog=purge.EPILOG)(purge.purge)
app.command("config", epilog=config.EPILOG)(config.config_command)
app.command(epilog=bench.EPILOG)(bench.bench)
app.add_typer(disk.app, name="disk")
app.command("doctor", epilog=doctor.EPILOG)(doctor.command)


@app.command(epilog="Example: kvist version --json")
def version(json: Json = False) -> None:
    """Show the versions of this program and of its protocol."""
    if json:
        print_json({"version": __version__, "protocol": wire.PROTOCOL_VERSION})
    else:
        output.print(f"kvist {__version__}, protocol {wire.PROTOCOL_VERSION}", highlight=False)
