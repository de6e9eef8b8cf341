"""What a layer's bytes mean, for fingerprints and for people.

The law: two layers have the same content exactly if their canonical bytes mean the same to a model; where a layer lies,
in which order its axes are and how large its blocks are does not enter. What axes do not say (a type's name, the inside
of a row that only the engine understands, the scales of small types) is named by the caller and never left out.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from kvist.errors import LayoutError
from kvist.model.tensors import Layer, TensorView, check_pair, planes
from kvist.units import ceil_div

DTYPES: Final = {
    "bfloat16": 2,
    "float16": 2,
    "float32": 4,
    "float8_e4m3fn": 1,
    "float8_e5m2": 1,
    "uint8": 1,
    "int8": 1,
}
"""Bytes of one element of each type that is served. A name says how bits are read, not how an engine stores them."""

_TIMES: Final = "\N{MULTIPLICATION SIGN}"
_NAME: Final = re.compile(r"[A-Za-z0-9_.+-]+")


def content(layer: Layer, dtype: str, *, holds: str = "", scales: str = "") -> str:
    """Name what the rows of a layer mean, for ``LayerGroup.fingerprint``.

    ``holds`` names what a row holds where the axes do not: the packing of ``C`` and ``PAGE``, such as ``fp8_ds_mla``,
    or which of K and V a lone ``HS`` is. ``scales`` names where the scales of one-byte elements come from, such as
    ``checkpoint``; those that lie inside a row are part of what it holds.

    Raises:
        LayoutError: a type that is not served or of another size, a name that is missing, superfluous or no plain word.
    """
    view = _first(layer)
    itemsize = DTYPES.get(dtype)
    if itemsize is None:
        raise LayoutError(f"KV of type {dtype!r} is not served; served are {list(DTYPES)}")
    if itemsize != view.itemsize:
        raise LayoutError(f"{dtype} has {itemsize} bytes, and elements of {view} have {view.itemsize}")
    for field, name in (("holds", holds), ("scales", scales)):
        if name and not _NAME.fullmatch(name):
            raise LayoutError(f"{field} {name!r} must be made of letters, digits and any of _.+-")
    is_opaque = not {"C", "PAGE"}.isdisjoint(view.names)
    is_kv = isinstance(layer, tuple) or view.kv_step[0] == 2
    if is_opaque or not is_kv:
        if not holds:
            raise LayoutError(f"axes {view.axes!r} do not say what a row holds; name it, as holds")
    elif holds:
        raise LayoutError(f"axes {view.axes!r} say that rows hold K and V; holds {holds!r} is superfluous")
    if itemsize == 1 and not is_opaque and not scales:
        raise LayoutError(f"K and V of type {dtype} mean nothing without their scales; name where these come from")
    views = layer if isinstance(layer, tuple) else (layer,)
    rows = [f"{one.head_step[0]}x{one.row_nbytes // itemsize}" for one in views]
    order = "k,v" if is_kv else ""
    words = [dtype, order, holds, ",".join(dict.fromkeys(rows)), scales and f"scales={scales}"]
    return " ".join(word for word in words if word)


@dataclass(frozen=True, slots=True)
class Description:
    """The KV of one group of layers, for people."""

    symbolic: tuple[str, ...]
    """How many tensors have which axes, such as 32 times ``[2, NB, BS, NH, HS]``, in the order of first appearance."""
    concrete: tuple[str, ...]
    """The same with sizes, such as 32 times ``[2, 2048, 16, 8, 128]``."""
    token_nbytes: int
    """Rounded up."""
    block_nbytes: int
    chunk_nbytes: int


def describe(layers: Sequence[Layer], *, block_tokens: int, blocks_per_chunk: int) -> Description:
    """Describe a group of layers whose chunks consist of ``blocks_per_chunk`` blocks of ``block_tokens`` tokens.

    Raises:
        LayoutError: no layers, or counts that are not positive.
    """
    if not layers or min(block_tokens, blocks_per_chunk) <= 0:
        raise LayoutError(
            f"{len(layers)} layers, {block_tokens} tokens a block and {blocks_per_chunk} blocks a chunk: none may be 0"
        )
    counts = Counter((_spell(layer, sized=False), _spell(layer, sized=True)) for layer in dict.fromkeys(layers))
    block_nbytes = sum(plane.page_nbytes for plane in planes(*layers))
    return Description(
        symbolic=tuple(f"{count} {_TIMES} {symbolic}" for (symbolic, _), count in counts.items()),
        concrete=tuple(f"{count} {_TIMES} {concrete}" for (_, concrete), count in counts.items()),
        token_nbytes=ceil_div(block_nbytes, block_tokens),
        block_nbytes=block_nbytes,
        chunk_nbytes=block_nbytes * blocks_per_chunk,
    )


def _first(layer: Layer) -> TensorView:
    if isinstance(layer, TensorView):
        return layer
    check_pair(*layer)
    return layer[0]


def _spell(layer: Layer, *, sized: bool) -> str:
    if isinstance(layer, tuple):
        k, v = (_spell(view, sized=sized) for view in layer)
        return f"K, V {k}" if k == v else f"K {k}, V {v}"
    return f"[{', '.join(map(str, layer.shape) if sized else layer.names)}]"
