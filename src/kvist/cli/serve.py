"""``kvist serve``: the daemon, its progress for people, and what was measured at its start."""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Mapping
from typing import Any, Final

import typer

from kvist.cli.flags import ConfigFile, with_flags
from kvist.cli.output import errors, print_error
from kvist.errors import ConfigError
from kvist.server.config import ServeConfig, load_config, process_environment
from kvist.server.daemon import Started, run
from kvist.units import format_nbytes

EPILOG: Final = "Example: kvist serve --pool 64GiB --disk /nvme/kvist --disk-size 500GiB"
_QUIET_S: Final = 2.0
"""A start that takes longer shows how far it is."""


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


def started_lines(started: Started) -> list[str]:
    """Return a line for each tier, with what was measured at the start, and where to connect."""
    status = started.status
    rates = {name: f"{rate / 1e9:.2f} GB/s" for name, rate in status.lane_rates.items()}
    lines = [
        f"pool {format_nbytes(status.pool_nbytes)}, present at {rates['populate']}, one thread copies {rates['memcpy']}"
    ]
    for tier in status.tiers:
        measured = f"reads {tier.read_rate / 1e9:.2f} GB/s, writes {tier.write_rate / 1e9:.2f} GB/s"
        state = f"off: {tier.off_reason}" if tier.off_reason else measured
        lines.append(f"{tier.name} {format_nbytes(tier.capacity_nbytes)} with {tier.num_chunks} chunks, {state}")
    return [*lines, *([started.url] if started.url else []), "ready"]


def _print_ready(started: Started) -> None:
    for line in started_lines(started):
        _say(line)


def _say(line: str) -> None:
    errors.print(f"kvist: {line}", highlight=False, soft_wrap=True)


class _Progress:
    """Tells how much of the pool is present, a line a tenth, when that takes long enough to be waited for."""

    def __init__(self, options: ServeConfig) -> None:
        self._nbytes = options.pool
        self._tenth = 0
        self._begins_at = time.monotonic() + _QUIET_S

    def __call__(self, nbytes: int) -> None:
        tenth = 10 * nbytes // self._nbytes
        if tenth > self._tenth and time.monotonic() > self._begins_at:
            self._tenth = tenth
            _say(f"pool {format_nbytes(min(nbytes, self._nbytes))} of {format_nbytes(self._nbytes)}")


def _configure_logging(level: str) -> None:
    logging.basicConfig(  # noqa: TID251 -- this is the place
        level=level.upper(), stream=sys.stderr, format="%(asctime)s %(levelname)s %(name)s %(message)s"
    )
