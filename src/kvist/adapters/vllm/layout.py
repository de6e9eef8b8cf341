"""vLLM's KV memory in our words: where each group's blocks lie, and which rows of a prefix a worker holds in them.

All that differs between vLLM versions, back ends and models is here and in ``formats.py``. The law: what this module
cannot describe with certainty it refuses, with a sentence that names it; nothing is guessed from sizes. Groups overlay
the same bytes: a block belongs to one of them at a time. Sources: vLLM 0.20 to 0.33, ``v1/kv_cache_interface.py``,
``v1/worker/utils.py``, ``v1/worker/gpu_model_runner.py``, ``v1/core/block_pool.py``, ``v1/attention/backends``.
"""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from typing import Any, Final

import torch

from kvist.adapters.vllm.formats import RowFormat, layout_name, minor_version, row_format
from kvist.adapters.vllm.groups import EngineGroup, specs_of
from kvist.adapters.vllm.namespace import fingerprint_files
from kvist.adapters.vllm.shards import Cut, check_alike
from kvist.errors import LayoutError
from kvist.model.content import describe
from kvist.model.layout import LayerGroup, LayerPlane, slice_heads
from kvist.model.rows import Row, RowMemory, row_memory
from kvist.model.tensors import TensorView, planes

NULL_BLOCK: Final = 0
_DEVICES: Final = ("cpu", "cuda")
_SET_OPAQUE: Final = 'set "pages": "opaque" in kv_connector_extra_config to share it with engines of its kind alone'


def device_type(vllm_config: Any) -> str:
    """Return the type of device that the engine runs on, such as ``cuda``."""
    return str(vllm_config.device_config.device_type)


def check_served(vllm_config: Any) -> None:
    """Refuse settings that are not served.

    Raises:
        LayoutError: names the setting, and the option to change where there is one.
    """
    device = device_type(vllm_config)
    if device not in _DEVICES:
        raise LayoutError(f"KV memory on {device!r} is not served; served are {list(_DEVICES)}")
    model = vllm_config.model_config
    if getattr(model, "enable_sleep_mode", False):
        raise LayoutError(f"{model.model}: sleep mode takes KV memory away; start without --enable-sleep-mode")
    if getattr(vllm_config.cache_config, "calculate_kv_scales", False):
        raise LayoutError(
            f"{model.model}: scales of KV differ from start to start; start without --calculate-kv-scales"
        )


@dataclass(frozen=True, slots=True)
class WorkerMemory:
    """One worker's KV memory."""

    rows: tuple[RowMemory, ...]
    """Group by group, its shards in order."""
    storages: tuple[Any, ...]
    """What ``LayerPlane.memory`` counts."""
    texts: tuple[str, ...]
    """The groups, for people."""

    def rows_of_group(self, groups: Sequence[EngineGroup]) -> dict[int, list[int]]:
        """Return the places of each group's rows in ``rows``, by the group's number in vLLM."""
        places: dict[int, list[int]] = {group.number: [] for group in groups}
        for place, held in enumerate(self.rows):
            places[groups[held.row.group].number].append(place)
        return places


def describe_memory(vllm_config: Any, kv_caches: Mapping[str, Any], kv_cache_config: Any, cut: Cut) -> WorkerMemory:
    """Return the rows that a worker holds, and the storages that they lie in.

    Raises:
        LayoutError: a layer's tensor is not what the configuration says, or its blocks lie in pieces that no plane can
            name.
    """
    rows: list[RowMemory] = []
    storages: dict[int, tuple[int, Any]] = {}
    texts = []
    rank = int(vllm_config.parallel_config.rank)
    for number, (group, sharding) in enumerate(zip(cut.groups, cut.shardings, strict=True)):
        shards = sharding.shards_of(rank)
        reader = _Reader(vllm_config, kv_cache_config, group, cut.is_opaque, storages)
        views = reader.views(kv_caches)
        found = reader.layers(views)
        texts.append(_describe_group(views, group))
        count = found.planes[0].num_heads // len(shards)
        for place, shard in enumerate(shards):
            part = found if len(shards) == 1 else slice_heads(found, place * count, count)
            rows.append(row_memory(Row(number, shard), part, cut.chunk_tokens))
    return WorkerMemory(tuple(rows), tuple(storage for _, storage in storages.values()), tuple(texts))


def knows_block_outermost() -> bool:
    """Return whether this vLLM has layouts with the block outermost (0.29 and later)."""
    return importlib.util.find_spec("vllm.v1.kv_cache_layout") is not None


def hold_blocks(pool: Any, block_ids: Iterable[int]) -> list[Any]:
    """Add a reference to each block, so that vLLM does not give it to another request; return them."""
    blocks = [pool.blocks[block_id] for block_id in block_ids]
    pool.touch(blocks)
    return blocks


def let_go_of_blocks(pool: Any, blocks: Sequence[Any]) -> None:
    """Undo ``hold_blocks``. The last ones are offered for re-use first, as vLLM itself does."""
    pool.free_blocks(reversed(blocks))


def media_of(request: Any) -> list[tuple[str, int, int]]:
    """Return (identifier, first token, number of tokens) of a request's images, sounds and the like."""
    return [
        (str(feature.identifier), int(feature.mm_position.offset), int(feature.mm_position.length))
        for feature in getattr(request, "mm_features", None) or ()
    ]


def adapter_of(request: Any) -> str:
    """Name a request's LoRA adapter; empty if it has none."""
    lora = getattr(request, "lora_request", None)
    if lora is None:
        return ""
    path = Path(str(getattr(lora, "lora_path", "")))
    return json.dumps([str(lora.lora_name), str(path), fingerprint_files(path)])


class _Reader:
    """Describes one group's tensors."""

    def __init__(
        self, vllm_config: Any, kv_cache_config: Any, group: EngineGroup, is_opaque: bool,
        storages: dict[int, tuple[int, Any]],
    ) -> None:  # fmt: skip
        """Number the allocations that are found in ``storages``, where those of other groups are already."""
        found = kv_cache_config.kv_cache_groups[group.number]
        self._vllm_config = vllm_config
        self._names = list(found.layer_names)
        specs = getattr(found.kv_cache_spec, "kv_cache_specs", None)
        self._specs = {name: specs[name] if specs else found.kv_cache_spec for name in self._names}
        self._group = group
        self._num_blocks = int(kv_cache_config.num_blocks)
        self._is_block_outermost = layout_name(kv_cache_config).startswith("BL")
        self._storages = storages
        if not self._names:
            raise LayoutError(
                f"KV cache group {group.number} has no layers on this pipeline stage (rank "
                f"{vllm_config.parallel_config.rank}); every stage needs layers of each group"
            )
        check_alike(vllm_config, specs_of(found.kv_cache_spec), number=group.number)
        first = specs_of(found.kv_cache_spec)[0]
        self._has_rows = row_format(vllm_config, first, is_opaque=is_opaque) is not None

    def views(self, kv_caches: Mapping[str, Any]) -> list[TensorView]:
        """Return the views of the layers in their order, several where a layer has several states."""
        found: list[TensorView] = []
        for name in self._names:
            if name not in kv_caches:
                raise LayoutError(f"layer {name} of KV cache group {self._group.number} has no KV memory")
            try:
                found += self._views_of(name, kv_caches[name])
            except LayoutError as error:
                raise LayoutError(f"layer {name}: {error}") from error
        return found

    def layers(self, views: Sequence[TensorView]) -> LayerGroup:
        """Return the group's planes: those of layers that share another's memory once."""
        group = self._group
        found = planes(*views)
        if self._is_block_outermost and not self._has_rows:
            found = _join(found)
        return LayerGroup(group.kind, group.block_tokens, found, null_block=NULL_BLOCK, window=group.window)

    def _views_of(self, name: str, tensors: Any) -> list[TensorView]:
        spec = self._specs[name]
        found = [self._place(tensor) for tensor in (tensors if isinstance(tensors, list | tuple) else [tensors])]
        if not self._has_rows:
            views = [self._page(tensor, memory) for tensor, memory in found]
            _check_pages(views, spec)
            return views
        rows = row_format(self._vllm_config, spec, is_opaque=False)
        if rows is None or len(found) != 1:
            raise LayoutError(
                f"its {type(spec).__name__} has {len(found)} tensors or blocks that only its kernels understand, and "
                f"other layers of its group do not; {_SET_OPAQUE}"
            )
        return [self._rows(name, rows, *found[0])]

    def _place(self, tensor: Any) -> tuple[torch.Tensor, int]:
        """Return a tensor, and the number of its allocation."""
        if not isinstance(tensor, torch.Tensor) or tensor.device.type not in _DEVICES:
            kind = tensor.device.type if isinstance(tensor, torch.Tensor) else type(tensor).__name__
            raise LayoutError(f"KV memory of kind {kind!r}; served are {list(_DEVICES)}")
        storage = tensor.untyped_storage()
        number, _ = self._storages.setdefault(storage.data_ptr(), (len(self._storages), storage))
        return tensor, number

    def _page(self, tensor: torch.Tensor, memory: int) -> TensorView:
        """Describe blocks that are opaque pages; kernels may see a block as several, which must follow each other."""
        parts = _parts(tensor.shape, 0, self._num_blocks)
        return _view(tensor, memory, " ".join(["NB", *["PAGE"] * (tensor.dim() - 1)]), parts)

    def _rows(self, name: str, rows: RowFormat, tensor: torch.Tensor, memory: int) -> TensorView:
        """Describe blocks whose rows are known."""
        layer = self._vllm_config.compilation_config.static_forward_context.get(name)
        backend = str(layer.get_attn_backend().get_name()) if layer is not None else "unknown"
        if backend not in rows.backends:
            raise LayoutError(
                f"its attention back end is {backend}, and the order of KV is known of {sorted(rows.backends)} only; "
                f"{_SET_OPAQUE}"
            )
        axes = rows.axes(backend)
        names = axes.split()
        shape = tuple(tensor.shape)
        parts = _parts(shape, names.index("NB"), self._num_blocks) if len(shape) == len(names) else 1
        size, tokens = rows.head_size, self._group.rank_block_tokens
        sizes = {"NB": self._num_blocks * parts, "2": 2, "BS": tokens // parts}
        sizes |= {"NH": rows.num_heads, "HS": size, "2HS": 2 * size, "C": size}
        expected = tuple(sizes[axis] for axis in names)
        dtype = self._specs[name].dtype
        if shape != expected or tensor.dtype != dtype or tokens % parts:
            raise LayoutError(
                f"{backend} of vLLM 0.{minor_version()} has KV of shape {list(expected)} ({axes}) and {dtype} in "
                f"blocks of {tokens} tokens, and this is {list(shape)} and {tensor.dtype}; "
                f"{_SET_OPAQUE}"
            )
        try:
            return _view(tensor, memory, axes, parts)
        except LayoutError as error:
            if parts == 1:
                raise
            raise LayoutError(
                f"{backend} sees a block of {tokens} tokens as {parts} of its own, whose tokens do "
                f"not follow each other (strides {tensor.stride()}); start with --block-size "
                f"{tokens // parts}, or {_SET_OPAQUE}"
            ) from error


def _view(tensor: torch.Tensor, memory: int, axes: str, parts: int) -> TensorView:
    """Declare a tensor's axes; with several kernel blocks in a block, these are an axis of their own."""
    itemsize = tensor.element_size()
    shape, strides = list(tensor.shape), [stride * itemsize for stride in tensor.stride()]
    names = axes.split()
    if parts > 1:
        at = names.index("NB")
        names.insert(at + 1, "KB")
        shape[at : at + 1] = [shape[at] // parts, parts]
        strides[at : at + 1] = [strides[at] * parts, strides[at]]
    offset = tensor.data_ptr() - tensor.untyped_storage().data_ptr()
    return TensorView(memory, offset, tuple(shape), tuple(strides), itemsize, " ".join(names))


def _parts(shape: Sequence[int], axis: int, num_blocks: int) -> int:
    """Return how many kernel blocks a block consists of."""
    parts, rest = divmod(shape[axis], num_blocks)
    if rest or not parts:
        raise LayoutError(f"{list(shape)} has {shape[axis]} blocks on axis {axis}, no multiple of {num_blocks}")
    return parts


def _check_pages(views: Sequence[TensorView], spec: Any) -> None:
    """Refuse pages that are not as long as their specification says; padding behind them does not count."""
    expected = _payload_nbytes(spec)
    found = sum(plane.page_nbytes for plane in planes(*views))
    if expected not in (None, found):
        raise LayoutError(
            f"a block of {type(spec).__name__} has {expected} bytes, and {[list(view.shape) for view in views]} have "
            f"{found}"
        )


def _payload_nbytes(spec: Any) -> int | None:
    """Return the bytes of one layer's block, without padding; None where a version does not say."""
    shapes = getattr(spec, "shapes", None)
    if shapes is not None:
        return int(sum(prod(shape) * dtype.itemsize for shape, dtype in zip(shapes, spec.dtypes, strict=True)))
    nbytes: int | None = getattr(spec, "unpadded_page_size_bytes", None)
    if nbytes is None and getattr(spec, "page_size_padded", None) is None:
        nbytes = spec.page_size_bytes
    return nbytes


def _join(found: tuple[LayerPlane, ...]) -> tuple[LayerPlane, ...]:
    """Return the layers of a block as one page, so that it is copied in one piece; as they are where they lie apart."""
    first, at = found[0], found[0].offset
    for plane in found:
        if (plane.memory, plane.offset, plane.block_stride) != (first.memory, at, first.block_stride):
            return found
        at += plane.row_nbytes
    return (replace(first, row_nbytes=at - first.offset),)


def _describe_group(views: Sequence[TensorView], group: EngineGroup) -> str:
    found = describe(views, block_tokens=group.block_tokens, blocks_per_chunk=group.stored_blocks_per_chunk)
    shapes = ", ".join(f"{names} = {sizes}" for names, sizes in zip(found.symbolic, found.concrete, strict=True))
    window = "" if group.window is None else f" of {group.window} tokens"
    return (
        f"group {group.number}: {group.kind.value}{window}, blocks of {group.block_tokens} tokens, "
        f"{group.stored_blocks_per_chunk} of {group.blocks_per_chunk} kept of a chunk: {shapes}; "
        f"{found.token_nbytes} B a token, {found.chunk_nbytes} B a chunk"
    )
