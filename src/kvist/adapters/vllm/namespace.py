"""The name of everything besides tokens, adapter and salt that decides what an engine's KV bytes mean.

The law: two engines have the same namespace only if each can go on from the other's chunks. Where rows are known, their
content is named, and neither blocks nor their order in memory; an opaque page names all that decides how its kernel
packs it.
"""

from __future__ import annotations

import hashlib
import json
import platform
from pathlib import Path
from typing import Any, Final

import vllm
from vllm import envs
from vllm.platforms import current_platform

from kvist.adapters.vllm.formats import layout_name, row_format
from kvist.adapters.vllm.groups import EngineGroup, specs_of
from kvist.adapters.vllm.shards import Cut, Sharding
from kvist.client.client import About
from kvist.model.keys import Namespace
from kvist.wire import describing

_NO_WEIGHTS: Final = {".log", ".md", ".txt", ".lock", ".pyc"}
"""Suffixes of files that say nothing of weights."""
_WITHOUT_LAYERS: Final = ("ngram", "ngram_gpu", "suffix")
"""Ways to speculate that have no KV."""
_ISA_FLAGS: Final = ("amx_bf16", "amx_tile", "avx512_bf16", "avx512f", "avx2", "asimd", "bf16", "sve")


def describe_namespace(vllm_config: Any, kv_cache_config: Any, cut: Cut, *, version: str) -> Namespace:
    """Name an engine's KV. ``version`` is what the user calls its weights."""
    model = vllm_config.model_config
    num_stages = cut.shardings[0].num_stages
    content = {
        "groups": [
            _describe_group(vllm_config, kv_cache_config, group, sharding, is_opaque=cut.is_opaque)
            for group, sharding in zip(cut.groups, cut.shardings, strict=True)
        ],
        "stages": str(getattr(envs, "VLLM_PP_LAYER_PARTITION", None)) if num_stages > 1 else "",
    }
    weights = {
        "version": version,
        "files": fingerprint_files(Path(model.model)),
        "quantization": str(model.quantization),
        "hf_overrides": repr(getattr(model, "hf_overrides", None)),
        "config": _fingerprint(_text_config(model)),
        "load_format": str(vllm_config.load_config.load_format),
        "seed": model.seed if str(vllm_config.load_config.load_format).endswith("dummy") else None,
        "draft": _describe_draft(getattr(vllm_config, "speculative_config", None)),
    }
    return Namespace(
        model=str(model.model),
        revision=str(model.revision or getattr(model.hf_config, "_commit_hash", None) or ""),
        dtype=f"{model.dtype}/{vllm_config.cache_config.cache_dtype}",
        layout=_fingerprint(content),
        shards=f"heads{','.join(str(sharding.num_parts) for sharding in cut.shardings)}.pp{num_stages}",
        chunk_tokens=cut.chunk_tokens,
        weights=_fingerprint(weights),
    )


def describe_engine(vllm_config: Any, namespace: Namespace, cut: Cut) -> About:
    """Say what an engine serves, for people and their tools."""
    transfer = vllm_config.kv_transfer_config
    facts = {
        "engine": f"vllm {vllm.__version__}",
        "block_tokens": ",".join(str(group.block_tokens) for group in cut.groups),
        "prefix_caching": "on" if vllm_config.cache_config.enable_prefix_caching else "off",
        "kv_load_failure_policy": str(getattr(transfer, "kv_load_failure_policy", "fail")),
        "world_size": str(vllm_config.parallel_config.world_size),
    }
    return About(describing.describe_namespace(namespace), describing.describe_needs(cut.needs), facts)


def _describe_group(
    vllm_config: Any, kv_cache_config: Any, group: EngineGroup, sharding: Sharding, *, is_opaque: bool
) -> dict[str, Any]:
    found = kv_cache_config.kv_cache_groups[group.number]
    spec = specs_of(found.kv_cache_spec)[0]
    rows = row_format(vllm_config, spec, is_opaque=is_opaque)
    named = {
        "kind": group.kind.value,
        "window": group.window,
        "layers": found.layer_names,
        "turns": f"{group.turn_tokens} of {group.num_turns * group.turn_tokens} tokens" if group.turn_tokens else "",
    }
    if rows is not None:
        return {**named, "rows": rows.content(sharding.parts_per_rank)}
    return {
        **named,
        "engine": f"vllm {vllm.__version__}",
        "spec": repr(found.kv_cache_spec),
        "block": group.block_tokens,
        "page": int(found.kv_cache_spec.page_size_bytes),
        "packed by": _packing(vllm_config),
        "order": layout_name(kv_cache_config),
    }


def _describe_draft(speculative: Any) -> list[str]:
    """Name the model whose layers' KV is kept beside the target's, if there is one."""
    model = getattr(speculative, "draft_model_config", None)
    if model is None or str(speculative.method) in _WITHOUT_LAYERS:
        return []
    config = _fingerprint(_text_config(model))
    return [
        str(model.model),
        str(model.revision),
        str(model.quantization),
        fingerprint_files(Path(model.model)),
        config,
    ]


def _text_config(model: Any) -> Any:
    config = getattr(model, "hf_text_config", None) or model.hf_config
    values = dict(config.to_dict())
    for key in ("transformers_version", "_name_or_path", "dtype", "torch_dtype"):
        values.pop(key, None)
    return values


def _packing(vllm_config: Any) -> str:
    """Name what decides how attention kernels pack the inside of a block."""
    device = str(vllm_config.device_config.device_type)
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


def fingerprint_files(folder: Path) -> str:
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
