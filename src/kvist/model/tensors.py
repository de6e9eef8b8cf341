"""From an engine's tensors to layer planes, by axes that whoever knows the engine declares.

The law: nothing is guessed. Every axis of a tensor has a name and every name one meaning (``AXES``), so no shape can be
read in two ways, however equal its sizes are; the bytes of a chunk follow from the names alone, strides only say where
they lie. A view that overlaps itself, or whose rows a ``LayerPlane`` cannot name, is refused when it is made.

A view covers one layer or, with ``NL``, several; a layer whose K and V are tensors of their own is a pair of views.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from math import prod
from typing import Final

import numpy as np

from kvist.errors import LayoutError
from kvist.model.layout import Int64s, LayerPlane, first_overlap

AXES: Final = {
    "NL": "layers",
    "NB": "blocks",
    "KB": "kernel blocks of one block, where kernels see smaller blocks than the engine's block table names",
    "BS": "tokens, or states, of one block",
    "PBS": "tokens of all blocks, one block behind another, block_tokens each",
    "2": "K, then V",
    "NH": "heads",
    "1": "nothing: its size is 1",
    "HS": "elements of one head: a row",
    "2HS": "elements of one head's K, then as many of its V: two rows",
    "NHHS": "elements of all heads, one head behind another, num_heads of them: a row each",
    "C": "content of one token and head that only the engine understands: a row",
    "PAGE": "content of one block that only the engine understands: a row; may be several axes",
}
"""What each name means. Outermost first, separated by spaces, they are the ``axes`` of a view."""

_ROWS: Final = ("HS", "2HS", "NHHS", "C", "PAGE")
_REPEATED: Final = ("1", "PAGE")
_NEVER_WITH: Final = {"PBS": ("NB", "KB", "BS", "PAGE"), "PAGE": ("BS",), "2HS": ("2",), "NHHS": ("NH",)}


@dataclass(frozen=True, slots=True)
class TensorView:
    """One tensor of KV memory, and what each of its axes is. Offset and strides are in bytes."""

    memory: int
    """Which of the registered allocations."""
    offset: int
    """Of the first element from that allocation's start."""
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    """An axis of size 1 may have any."""
    itemsize: int
    axes: str
    """Names of ``AXES``, such as ``"2 NB BS NH HS"``."""
    block_tokens: int | None = None
    """With the axis ``PBS`` only: tokens of one block."""
    num_heads: int | None = None
    """With the axis ``NHHS`` only."""

    def __post_init__(self) -> None:
        _check_names(self)
        _check_numbers(self)
        _check_merged(self, "PBS", "block_tokens", self.block_tokens)
        _check_merged(self, "NHHS", "num_heads", self.num_heads)
        if first_overlap(self.itemsize, zip(self.shape, self.strides, strict=True)) is not None:
            raise LayoutError(f"elements overlap: the strides {self.strides} of {self} are too small for its shape")
        _check_rows(self)

    @property
    def names(self) -> list[str]:
        """The names of the axes, one by one."""
        return self.axes.split()

    def step(self, name: str) -> tuple[int, int]:
        """Return size and stride of an axis; (1, 0) if there is none, or if its size is 1."""
        for found, size, stride in zip(self.names, self.shape, self.strides, strict=True):
            if found == name and size > 1:
                return size, stride
        return 1, 0

    @property
    def num_layers(self) -> int:
        """Layers that this tensor holds."""
        return self.step("NL")[0]

    @property
    def kv_step(self) -> tuple[int, int]:
        """How many of K and V are rows of their own, 1 or 2, and the bytes from K to V."""
        size, _ = self.step("2HS")
        return (2, size // 2 * self.itemsize) if size > 1 else self.step("2")

    @property
    def head_step(self) -> tuple[int, int]:
        """Number of heads, and the bytes from one to the next."""
        if self.num_heads is None:
            return self.step("NH")
        return self.num_heads, self.row_nbytes if self.num_heads > 1 else 0

    @property
    def row_nbytes(self) -> int:
        """Bytes of one row."""
        sizes = [size for name, size in zip(self.names, self.shape, strict=True) if name in _ROWS]
        parts = 2 if "2HS" in self.names else self.num_heads or 1
        pages = self.step("KB")[0] if "PAGE" in self.names else 1
        return prod(sizes) // parts * pages * self.itemsize

    @property
    def block_steps(self) -> tuple[tuple[int, int], tuple[int, int]]:
        """Number and stride of the blocks, and of one block's tokens; an opaque page counts as one token."""
        if self.block_tokens is not None:
            size, stride = self.step("PBS")
            num_blocks, num_tokens = size // self.block_tokens, self.block_tokens
            block_stride = num_tokens * stride if num_blocks > 1 else 0
            return (num_blocks, block_stride), (num_tokens, stride if num_tokens > 1 else 0)
        kernel, tokens = self.step("KB"), self.step("BS")
        if "PAGE" in self.names or kernel[0] == 1:
            return self.step("NB"), tokens
        return self.step("NB"), (kernel[0] * tokens[0], tokens[1] or kernel[1])


Layer = TensorView | tuple[TensorView, TensorView]
"""One tensor of a layer or of several, or one layer's K and V as tensors of their own."""


def planes(*layers: Layer) -> tuple[LayerPlane, ...]:
    """Return the planes of layers in their order; layers that share another's memory come once.

    A view with K and V is one plane of ``num_kv == 2`` for each layer, or a plane of K and one of V where these lie
    outside its layers. A pair is a plane of K and one of V, or one plane where V's rows lie between K's. The canonical
    bytes of a chunk are the same either way, since K comes before V in both.

    Raises:
        LayoutError: the views of a pair cannot be K and V of one layer, or overlap.
    """
    found = (plane for layer in layers for plane in _planes_of(layer))
    return tuple(dict.fromkeys(found))


def token_blocks(start: int, end: int, block_tokens: int) -> Int64s:
    """Return the block ids of tokens ``[start, end)`` of a cache whose tokens lie one behind another.

    Raises:
        LayoutError: the range does not consist of whole blocks.
    """
    if block_tokens <= 0 or not 0 <= start <= end or start % block_tokens or end % block_tokens:
        raise LayoutError(f"tokens [{start}, {end}) are no whole blocks of {block_tokens}")
    return np.arange(start // block_tokens, end // block_tokens, dtype=np.int64)


def kernel_blocks(block_ids: Int64s, num_parts: int) -> Int64s:
    """Name blocks by the kernel blocks that they consist of, ``num_parts`` each: ``[..., n]`` to ``[..., n * parts]``.

    For layouts whose kernel blocks no token stride joins, such as ``NB 2 BS NH HS``: they are declared as the blocks.

    Raises:
        LayoutError: blocks of less than one part.
    """
    if num_parts < 1:
        raise LayoutError(f"a block cannot consist of {num_parts} kernel blocks")
    ids = block_ids[..., None] * num_parts + np.arange(num_parts, dtype=np.int64)
    return ids.reshape(*block_ids.shape[:-1], -1)


def check_pair(k: TensorView, v: TensorView) -> None:
    """Refuse two views that cannot be one layer's K and V.

    Raises:
        LayoutError: they differ in more than their memory, strides and head size, or are no K and V.
    """
    for view in (k, v):
        if view.kv_step[0] != 1 or view.num_layers != 1:
            raise LayoutError(f"K and V of one layer are tensors of their own, and {view} holds more")

    def alike(view: TensorView) -> list[tuple[str, int]]:
        return [pair for pair in zip(view.names, view.shape, strict=True) if pair[0] != "HS"]

    if alike(k) != alike(v) or _meaning(k) != _meaning(v):
        raise LayoutError(f"K and V may differ in memory, strides and head size only: {k} and {v}")
    if (k.memory, k.offset) == (v.memory, v.offset):
        raise LayoutError(f"K and V are the same memory: {k}")


def _planes_of(layer: Layer) -> Iterable[LayerPlane]:
    if isinstance(layer, TensorView):
        return _planes_of_view(layer)
    check_pair(*layer)
    (k,), (v,) = (tuple(_planes_of_view(view)) for view in layer)
    distance = v.offset - k.offset
    is_alike = replace(v, offset=k.offset) == k
    if is_alike and 0 < distance < k.page_extent_nbytes:
        return (replace(k, num_kv=2, kv_stride=distance),)
    return k, v


def _planes_of_view(view: TensorView) -> Iterator[LayerPlane]:
    (num_blocks, block_stride), (num_tokens, token_stride) = view.block_steps
    num_layers, layer_stride = view.step("NL")
    num_kv, kv_stride = view.kv_step
    num_heads, head_stride = view.head_step
    # Where V of the first layer lies behind K of the last, planes of K and of V each lie apart from all others.
    is_split = kv_stride > layer_stride > 0
    for layer in range(num_layers):
        for kv in range(num_kv if is_split else 1):
            yield LayerPlane(
                memory=view.memory,
                offset=view.offset + layer * layer_stride + kv * kv_stride,
                num_blocks=num_blocks,
                block_stride=block_stride,
                row_nbytes=view.row_nbytes,
                num_kv=1 if is_split else num_kv,
                kv_stride=0 if is_split else kv_stride,
                num_tokens=num_tokens,
                token_stride=token_stride,
                num_heads=num_heads,
                head_stride=head_stride,
            )


def _meaning(view: TensorView) -> tuple[int, int | None, int | None]:
    return view.itemsize, view.block_tokens, view.num_heads


def _check_names(view: TensorView) -> None:
    names = view.names
    if not len(names) == len(view.shape) == len(view.strides):
        raise LayoutError(
            f"{len(names)} axes {view.axes!r}, {len(view.shape)} sizes {view.shape} and {len(view.strides)} strides "
            f"{view.strides}: name each axis once"
        )
    for name in names:
        if name not in AXES:
            raise LayoutError(f"unknown axis {name!r} in {view.axes!r}; known are {list(AXES)}")
        if names.count(name) > 1 and name not in _REPEATED:
            raise LayoutError(f"axis {name} appears {names.count(name)} times in {view.axes!r}")
    for name, others in _NEVER_WITH.items():
        if name in names and not set(names).isdisjoint(others):
            raise LayoutError(f"axis {name} says what {sorted(set(names) & set(others))} say too: {view.axes!r}")
    if len(set(names) & set(_ROWS)) != 1:
        raise LayoutError(f"{view.axes!r} must have one of the axes {list(_ROWS)}, which say what a row is")
    if set(names).isdisjoint({"NB", "PBS"}):
        raise LayoutError(f"{view.axes!r} has no blocks: name the axis NB or PBS")
    if "KB" in names and set(names).isdisjoint({"BS", "PAGE"}):
        raise LayoutError(f"{view.axes!r} has kernel blocks KB and neither tokens BS nor a PAGE in them")


def _check_numbers(view: TensorView) -> None:
    if min(view.memory, view.offset) < 0 or view.itemsize <= 0:
        raise LayoutError(f"memory and offset must not be negative, and itemsize must be positive: {view}")
    fixed = {"2": 2, "1": 1}
    for name, size, stride in zip(view.names, view.shape, view.strides, strict=True):
        if size <= 0:
            raise LayoutError(f"axis {name} has the size {size}; sizes must be positive: {view}")
        if size != fixed.get(name, size):
            raise LayoutError(f"axis {name} has the size {size}, which must be {fixed[name]}: {view}")
        if name == "2HS" and size % 2:
            raise LayoutError(f"axis 2HS has the size {size}, which must be even: {view}")
        if size == 1:
            continue
        if stride == 0:
            raise LayoutError(f"axis {name} is expanded: its {size} entries are the same memory (stride 0): {view}")
        if stride < 0:
            raise LayoutError(f"axis {name} has the stride {stride}; strides must not be negative: {view}")
        if stride % view.itemsize:
            raise LayoutError(f"axis {name} has a stride of {stride} bytes, no multiple of the itemsize: {view}")


def _check_merged(view: TensorView, name: str, field: str, count: int | None) -> None:
    """Check what an axis that stands for two is made of."""
    if name not in view.names:
        if count is not None:
            raise LayoutError(f"{field} {count} is for the axis {name}, which is not in {view.axes!r}")
        return
    size = view.shape[view.names.index(name)]
    if count is None or count <= 0 or size % count:
        raise LayoutError(f"axis {name} of {size} needs {field} that divides it, not {count}: {view}")


def _check_rows(view: TensorView) -> None:
    """Refuse rows that are not contiguous, and kernel blocks that do not follow each other."""
    (kernel, kernel_stride), (tokens, token_stride) = view.step("KB"), view.step("BS")
    is_page = "PAGE" in view.names
    inside = {"PAGE", "KB"} if is_page else set(_ROWS)
    steps = [
        (size, stride)
        for name, size, stride in zip(view.names, view.shape, view.strides, strict=True)
        if name in inside
    ]
    nbytes = view.itemsize
    for stride, size in sorted((stride, size) for size, stride in steps if size > 1):
        if stride != nbytes:
            if is_page:
                raise LayoutError(f"a page's content has gaps: a stride of {stride} bytes over {nbytes}: {view}")
            raise LayoutError(
                f"a row's elements are {stride} bytes apart, not {nbytes}; declare a block's inside as PAGE: {view}"
            )
        nbytes *= size
    if is_page and kernel > 1 and kernel_stride * kernel != nbytes:
        raise LayoutError(f"kernel blocks are {kernel_stride} bytes apart inside a page of {nbytes}: {view}")
    if not is_page and kernel > 1 and tokens > 1 and kernel_stride != tokens * token_stride:
        raise LayoutError(
            f"kernel blocks of {tokens} tokens, {token_stride} bytes apart, are {kernel_stride} bytes apart: no single "
            f"stride leads over a block's tokens; declare kernel blocks as NB and name them by kernel_blocks(): {view}"
        )
