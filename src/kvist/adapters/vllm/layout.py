"""vLLM's KV memory in our words: what a block is, where it lies, what its bytes mean.

All that differs between vLLM versions, back ends and models is here. The law: what this module cannot describe with
certainty it refuses, with a sentence that names it; nothing is guessed from sizes. Sources: vLLM 0.24 to 0.33,
``v1/kv_cache_interface.py``, ``v1/worker/utils.py``, ``v1/core/block_pool.py``, ``v1/attention/backends/cpu_attn.py``.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import platform
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import torch
import vllm
from vllm import envs
from vllm.platforms import current_platform

from kvist.errors import LayoutError
from kvist.model.keys import Namespace
from kvist.model.layout import GroupKind, LayerGroup, LayerPlane

NULL_BLOCK: Final = 0
_DEVICES: Final = ("cpu", "cuda")
_FULL_SPECS: Final = {"FullAttentionSpec", "MLAAttentionSpec"}
_NO_WEIGHTS: Final = {".log", ".md", ".txt", ".lock", ".pyc"}
"""Suffixes of files that say nothing of weights."""
_ISA_FLAGS: Final = ("amx_bf16", "amx_tile", "avx512_bf16", "avx512f", "avx2", "asimd", "bf16", "sve")


def device_type(vllm_config: Any) -> str:
    """Return the type of device that the engine runs on, such as ``cuda``."""
    return str(vllm_config.device_config.device_type)


def check_served(vllm_config: Any, kv_cache_config: Any) -> None:
    """Refuse what is not served yet.

    Raises:
        LayoutError: names the feature or the group, and the option to change where there is one.
    """
    device = device_type(vllm_config)
    if device not in _DEVICES:
        raise LayoutError(f"KV memory on {device!r} is not served; served are {list(_DEVICES)}")
    groups = kv_cache_config.kv_cache_groups
    kinds = [_spec_names(group.kv_cache_spec) for group in groups]
    if len(groups) != 1:
        raise LayoutError(f"the model has {len(groups)} KV cache groups ({kinds}); only models with one are served")
    if not kinds[0] <= _FULL_SPECS:
        raise LayoutError(
            f"a KV cache group of kind {sorted(kinds[0] - _FULL_SPECS)}; served are {sorted(_FULL_SPECS)}"
        )
    if getattr(groups[0], "is_eagle_group", False):
        raise LayoutError(
            f"speculative decoding with draft layers in group 0 ({groups[0].layer_names[-1]}) is not served"
        )
    parallel = vllm_config.parallel_config
    context = getattr(parallel, "decode_context_parallel_size", 1) * getattr(
        parallel, "prefill_context_parallel_size", 1
    )
    if context != 1:
        raise LayoutError(f"context parallelism of {context} ranks is not served")
    model = vllm_config.model_config
    if getattr(model, "enable_sleep_mode", False):
        raise LayoutError(f"{model.model}: sleep mode takes KV memory away; start without --enable-sleep-mode")


def block_tokens(kv_cache_config: Any) -> int:
    """Return the tokens of one block of the only group."""
    return int(kv_cache_config.kv_cache_groups[0].kv_cache_spec.block_size)


def describe(kv_caches: Mapping[str, torch.Tensor], kv_cache_config: Any) -> tuple[LayerGroup, list[Any]]:
    """Return the layers as planes, and the storages that they lie in, in the order of ``LayerPlane.memory``.

    A block's inside is known to its attention kernel alone, so a plane is one opaque page per block.

    Raises:
        LayoutError: a layer's blocks are not what vLLM's configuration says, or a page is not contiguous.
    """
    num_blocks = int(kv_cache_config.num_blocks)
    storages: dict[int, tuple[int, Any]] = {}
    planes: dict[tuple[int, int], LayerPlane] = {}
    for name, tensor in kv_caches.items():
        if not isinstance(tensor, torch.Tensor) or tensor.device.type not in _DEVICES:
            kind = tensor.device.type if isinstance(tensor, torch.Tensor) else type(tensor).__name__
            raise LayoutError(f"layer {name} has KV memory of kind {kind!r}; served are {list(_DEVICES)}")
        storage = tensor.untyped_storage()
        number, _ = storages.setdefault(storage.data_ptr(), (len(storages), storage))
        plane = _describe_layer(name, tensor, number, num_blocks)
        planes.setdefault((number, plane.offset), plane)  # Layers that share another's KV come once.
    ordered = tuple(planes.values())
    if is_block_outermost(kv_cache_config):
        ordered = (_join(ordered),)
    group = LayerGroup(GroupKind.FULL, block_tokens(kv_cache_config), ordered, null_block=NULL_BLOCK)
    return group, [storage for _, storage in storages.values()]


def knows_block_outermost() -> bool:
    """Return whether this vLLM has layouts with the block outermost (0.29 and later)."""
    return importlib.util.find_spec("vllm.v1.kv_cache_layout") is not None


def is_block_outermost(kv_cache_config: Any) -> bool:
    """Return whether all layers of a block lie behind one another, so that it is copied in one piece (vLLM 0.29)."""
    return _layout_name(kv_cache_config).startswith("BL")


def _layout_name(kv_cache_config: Any) -> str:
    """Return the order of layer, block, head, token and content in memory, such as ``LBNHC``; empty before 0.29."""
    chosen = getattr(kv_cache_config, "kv_cache_layout", None)
    return str(getattr(chosen, "name", chosen or ""))


def describe_namespace(vllm_config: Any, kv_cache_config: Any, *, chunk_tokens: int, version: str) -> Namespace:
    """Name everything besides tokens, adapter and salt that decides what this engine's KV bytes mean."""
    model = vllm_config.model_config
    parallel = vllm_config.parallel_config
    group = kv_cache_config.kv_cache_groups[0]
    content = {
        "engine": f"vllm {vllm.__version__}",
        "layers": group.layer_names,
        "spec": repr(group.kv_cache_spec),
        "block": block_tokens(kv_cache_config),
        "page": int(group.kv_cache_spec.page_size_bytes),
        "packed by": _packing(vllm_config),
        "order": _layout_name(kv_cache_config),
    }
    weights = {
        "version": version,
        "files": _fingerprint_files(Path(model.model)),
        "quantization": str(model.quantization),
        "hf_overrides": repr(getattr(model, "hf_overrides", None)),
        "config": _fingerprint(_text_config(model)),
        "load_format": str(vllm_config.load_config.load_format),
        "seed": model.seed if str(vllm_config.load_config.load_format).endswith("dummy") else None,
    }
    return Namespace(
        model=str(model.model),
        revision=str(model.revision or getattr(model.hf_config, "_commit_hash", None) or ""),
        dtype=f"{model.dtype}/{vllm_config.cache_config.cache_dtype}",
        layout=_fingerprint(content),
        shards=f"tp{parallel.tensor_parallel_size}.pp{parallel.pipeline_parallel_size}",
        chunk_tokens=chunk_tokens,
        weights=_fingerprint(weights),
    )


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
    return json.dumps([str(lora.lora_name), str(path), _fingerprint_files(path)])


def _describe_layer(name: str, tensor: torch.Tensor, memory: int, num_blocks: int) -> LayerPlane:
    """Describe one layer; kernels may see a block as several smaller ones, which must follow each other."""
    parts, rest = divmod(tensor.shape[0], num_blocks)
    part_nbytes = tensor[0].numel() * tensor.element_size()
    stride = tensor.stride(0) * tensor.element_size()
    if rest or not parts:
        raise LayoutError(f"layer {name}: {tuple(tensor.shape)} does not begin with {num_blocks} blocks")
    if not _is_dense(tensor[0]) or (parts > 1 and stride != part_nbytes):
        raise LayoutError(f"layer {name}: blocks of shape {tuple(tensor.shape)}, strides {tensor.stride()} have gaps")
    return LayerPlane(
        memory=memory,
        offset=tensor.data_ptr() - tensor.untyped_storage().data_ptr(),
        num_blocks=num_blocks,
        block_stride=stride * parts,
        row_nbytes=part_nbytes * parts,
    )


def _is_dense(block: torch.Tensor) -> bool:
    """Return whether a block's elements fill a stretch of memory, in whatever order."""
    expected = 1
    for stride, size in sorted((stride, size) for size, stride in zip(block.shape, block.stride(), strict=True)):
        if size > 1 and stride != expected:
            return False
        expected *= size
    return True


def _join(planes: Sequence[LayerPlane]) -> LayerPlane:
    """Return the layers of a block-outermost layout as one page per block."""
    first, at = planes[0], planes[0].offset
    for plane in planes:
        if (plane.memory, plane.offset, plane.block_stride) != (first.memory, at, first.block_stride):
            raise LayoutError(f"layers of a block do not follow each other: {plane} is not at {at}")
        at += plane.row_nbytes
    return replace(first, row_nbytes=at - first.offset)


def _spec_names(spec: Any) -> set[str]:
    """Return the kinds of a group's layers; a group of uniform kind holds one specification for each."""
    inner = getattr(spec, "kv_cache_specs", None)
    return {type(one).__name__ for one in inner.values()} if inner else {type(spec).__name__}


def _text_config(model: Any) -> Any:
    config = getattr(model, "hf_text_config", None) or model.hf_config
    values = dict(config.to_dict())
    for key in ("transformers_version", "_name_or_path", "dtype", "torch_dtype"):
        values.pop(key, None)
    return values


def _packing(vllm_config: Any) -> str:
    """Name what decides how attention kernels pack the inside of a block."""
    device = device_type(vllm_config)
    if device == "cpu":
        return _cpu_packing()
    backend = getattr(getattr(vllm_config, "attention_config", None), "backend", None)
    return f"{device} {current_platform.get_device_capability()} {backend} {envs.VLLM_KV_CACHE_LAYOUT}"


def _cpu_packing() -> str:
    """Name what decides how vLLM's CPU kernels pack the inside of a block."""
    flags: set[str] = set()
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.is_file():
        for line in cpuinfo.read_text().splitlines():
            if line.startswith(("flags", "Features")):
                flags = set(line.partition(":")[2].split())
                break
    return " ".join([platform.machine(), *(flag for flag in _ISA_FLAGS if flag in flags)])


def _fingerprint(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True, default=repr).encode()).hexdigest()


def _fingerprint_files(folder: Path) -> str:
    """Name the state of a local folder of weights; empty if it is none, such as a name on a hub.

    Logs, texts and hidden files do not enter: what is written there beside the weights must not cost every hit.
    """
    if not folder.is_dir():
        return ""
    files = sorted(
        path
        for path in folder.rglob("*")
        if path.is_file()
        and path.suffix not in _NO_WEIGHTS
        and not any(part.startswith(".") for part in path.relative_to(folder).parts)
    )
    return _fingerprint([(str(p.relative_to(folder)), p.stat().st_size, p.stat().st_mtime_ns) for p in files])
