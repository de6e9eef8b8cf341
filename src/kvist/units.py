"""Byte units and integer rounding: the only helpers that everything may import."""

from __future__ import annotations

import re
from typing import Final

from kvist.errors import ConfigError

KIB: Final = 1024
MIB: Final = 1024 * KIB
GIB: Final = 1024 * MIB
TIB: Final = 1024 * GIB

_UNITS: Final = {
    "": 1, "b": 1, "kib": KIB, "mib": MIB, "gib": GIB, "tib": TIB, "kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12,
}  # fmt: skip
_BYTES: Final = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*")


def ceil_div(numerator: int, denominator: int) -> int:
    """Return ``numerator / denominator`` rounded up."""
    return -(-numerator // denominator)


def align_up(nbytes: int, alignment: int) -> int:
    """Return the smallest multiple of ``alignment`` that is at least ``nbytes``."""
    return ceil_div(nbytes, alignment) * alignment


def parse_nbytes(text: str) -> int:
    """Read ``8GiB``, ``512 MiB``, ``1.5GB`` or a plain number of bytes.

    Raises:
        ConfigError: ``text`` is none of these.
    """
    match = _BYTES.fullmatch(text)
    unit = match and _UNITS.get(match.group(2).lower())
    if not match or not unit:
        raise ConfigError(f"{text!r} is no number of bytes; write it as 8GiB, 512MiB or 1073741824")
    number = match.group(1)
    return int(float(number) * unit) if "." in number else int(number) * unit


def format_nbytes(nbytes: int) -> str:
    """Return ``nbytes`` for people, in the largest binary unit that keeps it at 1 or more."""
    for name, unit in (("TiB", TIB), ("GiB", GIB), ("MiB", MIB), ("KiB", KIB)):
        if nbytes >= unit:
            return f"{nbytes / unit:.4g} {name}"
    return f"{nbytes} B"
