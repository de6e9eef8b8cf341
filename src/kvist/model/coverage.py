"""Which prefix a set of present chunks can serve.

The law: a prefix is servable only if *every* layer group on *every* shard can go on from its end. Full groups need
all chunks of it; other kinds are refused by name until they are served.
"""

from __future__ import annotations

from collections.abc import Sequence

from kvist.errors import LayoutError
from kvist.model.layout import GroupKind, LayerGroup


def check_kinds(groups: Sequence[LayerGroup]) -> None:
    """Refuse what cannot be served.

    Raises:
        LayoutError: names the group and its kind.
    """
    for number, group in enumerate(groups):
        if group.kind is not GroupKind.FULL:
            raise LayoutError(
                f"layer group {number} is of kind {group.kind.value!r}; only groups of kind "
                f"{GroupKind.FULL.value!r} are served"
            )


def servable_chunks(num_leading: Sequence[int]) -> int:
    """Return the longest prefix, in chunks, that all rows can serve.

    ``num_leading`` has one entry per (group, shard): how many chunks are present there before the first gap.
    """
    return min(num_leading, default=0)
