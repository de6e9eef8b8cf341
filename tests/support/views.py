"""Tensors of fake engines, stamped, and what their chunks must be: numpy indexing, none of the product's arithmetic.

Every element holds a number made of (layer, K or V, token, head, place in the row), so that two layouts of one model
hold the same numbers under the same names, wherever these lie.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from kvist.model.tensors import Layer, TensorView
from tests.support.memory import GUARD

Bytes = npt.NDArray[np.uint8]
Ints = npt.NDArray[np.int64]
GUARD_NBYTES = 64
RANK = {"NL": 0, "2": 1, "NB": 2, "PBS": 2, "KB": 3, "BS": 4, "NH": 5, "NHHS": 5, "1": 7} | dict.fromkeys(
    ("HS", "2HS", "C", "PAGE"), 6
)
"""The canonical order of axes."""


def lay(
    axes: str,
    sizes: Mapping[str, int],
    *,
    order: str = "",
    gaps: Mapping[str, int] | None = None,
    itemsize: int = 2,
    memory: int = 0,
    offset: int = GUARD_NBYTES,
    **more: int,
) -> TensorView:
    """Return a view whose memory order is ``order``, with ``gaps`` bytes behind each entry of an axis."""
    sizes = {"1": 1, "2": 2, **sizes}
    strides, extent = {}, itemsize
    for name in reversed((order or axes).split()):
        strides[name] = extent + (gaps or {}).get(name, 0)
        extent = strides[name] * sizes[name]
    names = axes.split()
    shape = tuple(sizes[name] for name in names)
    return TensorView(memory, offset, shape, tuple(strides[name] for name in names), itemsize, axes, **more)


def views_of(layers: Sequence[Layer]) -> Iterator[tuple[int, int, TensorView]]:
    """Yield (number of the layer, 0 for K and 1 for V, view)."""
    number = 0
    for layer in layers:
        for kv, view in enumerate(layer if isinstance(layer, tuple) else (layer,)):
            yield number, kv, view
        number += sizes_of(view)[0]


def sizes_of(view: TensorView) -> list[int]:
    """Return how many layers, K and V, blocks, kernel blocks, tokens, heads, K and V in a head, and elements it has."""
    names = view.axes.split()
    size = dict(zip(names, view.shape, strict=True))
    row = int(np.prod([count for name, count in zip(names, view.shape, strict=True) if name in ("HS", "C", "PAGE")]))
    heads, blocks, tokens, kv_inside = size.get("NH", 1), size.get("NB", 1), size.get("BS", 1), 1
    if "2HS" in size:
        kv_inside, row = 2, size["2HS"] // 2
    if "NHHS" in size:
        heads, row = view.num_heads, size["NHHS"] // view.num_heads
    if "PBS" in size:
        blocks, tokens = size["PBS"] // view.block_tokens, view.block_tokens
    return [size.get("NL", 1), size.get("2", 1), blocks, size.get("KB", 1), tokens, heads, kv_inside, row]


class Tensors:
    """An engine's layers and the memory that they lie in, full of ``GUARD`` at first."""

    def __init__(self, layers: Sequence[Layer]) -> None:
        self.layers = list(layers)
        ends: dict[int, int] = {}
        for _, _, view in views_of(layers):
            steps = zip(view.shape, view.strides, strict=True)
            end = view.offset + view.itemsize + sum((size - 1) * stride for size, stride in steps if size > 1)
            ends[view.memory] = max(ends.get(view.memory, 0), end + GUARD_NBYTES)
        self.memory_nbytes = tuple(ends[number] for number in range(len(ends)))
        self.memory: list[Bytes] = [np.full(nbytes, GUARD, dtype=np.uint8) for nbytes in self.memory_nbytes]

    def stamp(self) -> None:
        """Write every element's number into it."""
        for layer, kv, view in views_of(self.layers):
            layers, kvs, blocks, kernel, tokens, heads, kv_inside, row = np.ogrid[*map(slice, sizes_of(view))]
            _, _, _, num_kernel, num_tokens, *_ = sizes_of(view)
            number = (layer + layers) * 2 + kv + kvs + kv_inside
            number = number * (1 << 20) + (blocks * num_kernel + kernel) * num_tokens + tokens
            number = (number * (1 << 10) + heads) * (1 << 20) + row
            array = self._in_order(view)
            array[...] = _spread(number, view.itemsize).reshape(array.shape)

    def canonical(self, blocks: Sequence[int]) -> bytes:
        """Return the bytes of a chunk that consists of ``blocks``: [layer][kv][block][token][head]."""
        parts: dict[tuple[int, int], bytes] = {}
        for layer, kv, view in views_of(self.layers):
            sizes = sizes_of(view)
            values = self._in_order(view).reshape(*sizes, view.itemsize)
            for inner, outside, inside in np.ndindex(sizes[0], sizes[1], sizes[6]):
                picked = values[inner, outside][list(blocks)][:, :, :, :, inside]
                parts[layer + inner, kv + outside + inside] = picked.tobytes()
        return b"".join(parts[name] for name in sorted(parts))

    def is_payload(self, blocks: Sequence[int]) -> list[npt.NDArray[np.bool_]]:
        """Return, for each allocation, which bytes belong to ``blocks``."""
        mask = replace_memory(self, [np.zeros(nbytes, dtype=np.uint8) for nbytes in self.memory_nbytes])
        for _, _, view in views_of(self.layers):
            array, names = mask._view(view), view.axes.split()
            for block in blocks:
                tokens = slice(block * (view.block_tokens or 1), (block + 1) * (view.block_tokens or 1))
                at = {"NB": block, "PBS": tokens}
                array[tuple(at.get(name, slice(None)) for name in names)] = 1
        return [memory.astype(np.bool_) for memory in mask.memory]

    def _view(self, view: TensorView) -> Bytes:
        return np.ndarray(
            (*view.shape, view.itemsize), np.uint8, self.memory[view.memory], view.offset, (*view.strides, 1)
        )

    def _in_order(self, view: TensorView) -> Bytes:
        """Return a view's array with its axes in canonical order, those of a page as they lie in memory."""
        names = view.axes.split()

        def place(number: int) -> tuple[int, int]:
            return RANK[names[number]], -view.strides[number]

        return self._view(view).transpose(*sorted(range(len(names)), key=place), -1)


def replace_memory(tensors: Tensors, memory: list[Bytes]) -> Tensors:
    """Return the same layers over other memory."""
    other = Tensors(tensors.layers)
    other.memory = memory
    return other


def moved(layer: Layer, memory: int, nbytes: int = 0) -> Layer:
    """Return a layer in another allocation, or further behind in it."""
    if isinstance(layer, tuple):
        return tuple(replace(view, memory=view.memory + memory, offset=view.offset + nbytes) for view in layer)
    return replace(layer, memory=layer.memory + memory, offset=layer.offset + nbytes)


def _spread(number: Ints, itemsize: int) -> Bytes:
    """Return numbers as elements, mixed so that each of their bytes depends on all of the number."""
    mixed = number.astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    mixed ^= mixed >> np.uint64(29)
    mixed *= np.uint64(0xBF58476D1CE4E5B9)
    mixed ^= mixed >> np.uint64(32)
    return np.ascontiguousarray(mixed)[..., None].view(np.uint8)[..., :itemsize]
