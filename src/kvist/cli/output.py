"""What all commands print alike: JSON for programs, errors for people."""

from __future__ import annotations

import sys

import msgspec
from rich.console import Console

errors = Console(stderr=True)
output = Console()


def print_json(value: object) -> None:
    """Write a value as JSON to the standard output."""
    sys.stdout.write(msgspec.json.format(msgspec.json.encode(value)).decode() + "\n")


def print_error(error: Exception) -> None:
    """Say what went wrong, in one line of its own words."""
    errors.print(f"kvist: {error}", style="red", highlight=False, soft_wrap=True)
