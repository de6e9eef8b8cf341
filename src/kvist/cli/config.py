"""``kvist config``: the settings that a daemon would start with, and where each comes from."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec
import typer
from rich.table import Table

from kvist.cli.asking import Json
from kvist.cli.flags import ConfigFile, with_flags
from kvist.cli.output import output, print_error, print_json
from kvist.errors import ConfigError
from kvist.server.config import Settings, load_settings, process_environment

EPILOG = "Example: KVIST_POOL=8GiB kvist config --disk /nvme --disk-size 200GiB"


@with_flags
def config_command(flags: Mapping[str, Any], config: ConfigFile = None, json: Json = False) -> None:
    """Show the settings that kvist serve would start with, and where each comes from; exit with 2 if it would not."""
    try:
        settings = load_settings(config, flags, process_environment())
    except ConfigError as error:
        print_error(error)
        raise typer.Exit(2) from None
    values = msgspec.to_builtins(settings.config)
    if json:
        print_json({key: {"value": values[key], "source": source} for key, source in settings.sources.items()})
    else:
        output.print(settings_table(settings))


def settings_table(settings: Settings) -> Table:
    """Return a line for each key: its value, and where that comes from."""
    table = Table("key", "value", "from", box=None, padding=(0, 2, 0, 0))
    for key, source in settings.sources.items():
        value = getattr(settings.config, key)
        text = ", ".join(map(str, value)) if isinstance(value, tuple) else str(value)
        table.add_row(key, text or "(none)", source, style="dim" if source == "the default" else None)
    return table
