"""``kvist serve``: the daemon, its progress for people, and what was measured at its start."""

from __future__ import annotations

import logging
import sys
from collections.abc import Mapping
from typing import Any

import typer

from kvist.cli.flags import ConfigFile, with_flags
from kvist.cli.output import errors, print_error
from kvist.errors import ConfigError
from kvist.server.config import ServeConfig, load_config, process_environment
from kvist.server.daemon import run
from kvist.units import format_nbytes

EPILOG = "Example: kvist serve --pool 64GiB --disk /nvme/kvist --disk-size 500GiB"


@with_flags
def serve(flags: Mapping[str, Any], config: ConfigFile = None) -> None:
    """Run the daemon of this host until it is told to stop (SIGTERM, Ctrl-C)."""
    try:
        options = load_config(config, flags, process_environment())
        _configure_logging(options.log_level)
        run(options, on_progress=_Progress(options), on_ready=_print_ready)
    except ConfigError as error:
        print_error(error)
        raise typer.Exit(2) from None


def _print_ready(url: str) -> None:
    if url:
        errors.print(f"kvist: {url}", highlight=False)
    errors.print("kvist: ready", highlight=False)


class _Progress:
    """Tells how much of the pool is present: a line a tenth."""

    def __init__(self, options: ServeConfig) -> None:
        self._nbytes = options.pool
        self._tenth = 0

    def __call__(self, nbytes: int) -> None:
        tenth = 10 * nbytes // self._nbytes
        if tenth > self._tenth:
            self._tenth = tenth
            of = f"{format_nbytes(min(nbytes, self._nbytes))} of {format_nbytes(self._nbytes)}"
            errors.print(f"kvist: pool {of}", highlight=False)


def _configure_logging(level: str) -> None:
    logging.basicConfig(  # noqa: TID251 -- this is the place
        level=level.upper(), stream=sys.stderr, format="%(asctime)s %(levelname)s %(name)s %(message)s"
    )
