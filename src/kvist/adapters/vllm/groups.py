"""vLLM's KV cache groups in our words, as far as both sides of the connector know them.

The law: a group's kind comes from its specification's type, never from sizes; a type that is not known is refused by
name. Source: vLLM 0.24 to 0.33, ``v1/kv_cache_interface.py``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

from kvist.errors import LayoutError
from kvist.model.coverage import Need
from kvist.model.layout import GroupKind

_KINDS: Final = {
    "FullAttentionSpec": GroupKind.FULL,
    "MLAAttentionSpec": GroupKind.FULL,
    "SlidingWindowSpec": GroupKind.WINDOW,
    "SlidingWindowMLASpec": GroupKind.WINDOW,
    "ChunkedLocalAttentionSpec": GroupKind.CHUNKED,
    "MambaSpec": GroupKind.RECURRENT,
}


@dataclass(frozen=True, slots=True)
class EngineGroup:
    """One of vLLM's KV cache groups, whose block ids are those at ``number`` in every tuple of block ids."""

    number: int
    kind: GroupKind
    block_tokens: int
    window: int | None
    """Tokens: of a sliding window, or of an attention chunk."""
    blocks_per_chunk: int
    """Of the engine's blocks in one chunk, whether stored or not."""
    stored_blocks_per_chunk: int
    """How many of them are kept: the last ones."""
    need: Need
    is_draft: bool = False
    """Holds layers of a draft model, which may rewrite the last block while the engine decodes."""


def kind_of(spec: Any) -> GroupKind:
    """Return the kind of a group's specification.

    Raises:
        LayoutError: it is of none that is served; names it.
    """
    names = {type(one).__name__ for one in (getattr(spec, "kv_cache_specs", None) or {"": spec}).values()}
    kinds = {_KINDS.get(name) for name in names}
    if len(kinds) != 1 or None in kinds:
        raise LayoutError(f"a KV cache group of {sorted(names)}; served are groups of one kind of {sorted(_KINDS)}")
    (kind,) = kinds
    assert kind is not None
    return kind
