"""Describes KV memory of every layout that vLLM has had, and says whether the description finds every byte.

Runs in vLLM's own environment; prints one JSON object, the cases of ``test_layout.py`` by name. Memory is that of fake
engines (``fake_workers.py``), in this process.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from vllm.v1.kv_cache_interface import (
    ChunkedLocalAttentionSpec,
    CircularBufferSpec,
    CrossAttentionSpec,
    FullAttentionSpec,
    KVQuantMode,
    UniformTypeKVCacheSpecs,
)

from kvist.adapters.vllm import layout
from kvist.adapters.vllm.groups import choose_chunk_tokens, engine_groups
from kvist.adapters.vllm.namespace import describe_namespace
from kvist.adapters.vllm.options import Options
from kvist.errors import ConfigError, LayoutError
from tests.engines.describe_cuts import find_round_trip, find_shards, find_turns
from tests.engines.fake_workers import (
    BF16,
    BLOCK_IDS,
    BLOCKS,
    CHUNK,
    HEADS,
    LAYERS,
    NAMES,
    SIZE,
    caches_config,
    context,
    cut,
    describe,
    engine,
    full,
    heads_bytes,
    latent,
    lay_out,
    mamba,
    read,
    version,
    window,
)

# version, back end, axes, order in memory, layout's name, block, kernel block
ROWS = {
    "0.22 FLASH_ATTN": ("0.22.1", "FLASH_ATTN", "2 NB BS NH HS", "", "", 16, 0),
    "0.22 FLASH_ATTN HND": ("0.22.1", "FLASH_ATTN", "2 NB BS NH HS", "2 NB NH BS HS", "", 16, 0),
    "0.22 beside states": ("0.22.1", "FLASH_ATTN", "2 NB BS NH HS", "NB 2 BS NH HS", "", 32, 0),
    "0.22 kernel blocks": ("0.22.1", "FLASH_ATTN", "2 NB BS NH HS", "", "", 32, 16),
    "0.22 FLASHINFER": ("0.22.1", "FLASHINFER", "NB 2 BS NH HS", "NB 2 NH BS HS", "", 16, 0),
    "0.24 FLASH_ATTN": ("0.24.0", "FLASH_ATTN", "NB 2 BS NH HS", "", "", 16, 0),
    "0.24 FLASH_ATTN HND": ("0.24.0", "FLASH_ATTN", "NB 2 BS NH HS", "NB 2 NH BS HS", "", 32, 0),
    "0.24 TRITON_ATTN": ("0.24.0", "TRITON_ATTN", "NB 2 BS NH HS", "", "", 64, 0),
    "0.26 NHD": ("0.26.0", "FLASH_ATTN", "NB NH BS 2HS", "NB BS NH 2HS", "", 16, 0),
    "0.26 HND": ("0.26.0", "FLASHINFER", "NB NH BS 2HS", "", "", 32, 0),
    "0.26 kernel blocks": ("0.26.0", "FLASHINFER", "NB NH BS 2HS", "NB BS NH 2HS", "", 64, 16),
    "LBNHC": ("0.32.0", "FLASH_ATTN", "NB NH BS 2HS", "NL NB BS NH 2HS", "LBNHC", 16, 0),
    "LBHNC": ("0.32.0", "FLASH_ATTN", "NB NH BS 2HS", "NL NB NH BS 2HS", "LBHNC", 32, 0),
    "LHBNC": ("0.32.0", "FLASH_ATTN", "NB NH BS 2HS", "NL NH NB BS 2HS", "LHBNC", 16, 0),
    "BLNHC": ("0.32.0", "FLASH_ATTN", "NB NH BS 2HS", "NB NL BS NH 2HS", "BLNHC", 16, 0),
    "BLHNC": ("0.33.0", "FLASHINFER", "NB NH BS 2HS", "NB NL NH BS 2HS", "BLHNC", 64, 0),
    "BHLNC": ("0.33.0", "TRITON_ATTN", "NB NH BS 2HS", "NB NH NL BS 2HS", "BHLNC", 32, 0),
}  # fmt: skip


def find_rows(case: str) -> dict[str, Any]:
    name, backend, axes, order, layout_name, block, kernel = ROWS[case]
    with version(name):
        caches = caches_config(full(block), order=layout_name)
        config = engine(backend=backend)
        found = describe(config, lay_out(axes, block, kernel, order), caches)
        space = describe_namespace(config, caches, cut(config, caches), version="")
        halves = describe(config, lay_out(axes, block, kernel, order), caches, head_shards=2)
    return {
        "is_right": read(found, 0, BLOCK_IDS[block]) == heads_bytes(0, HEADS),
        "halves_are_right": [read(halves, half, BLOCK_IDS[block]) == heads_bytes(2 * half, 2) for half in range(2)],
        "layout": space.layout,
        "text": found.texts[0],
    }


def find_latent() -> dict[str, Any]:
    """Return the chunk of latent states of a version with and one without an axis of heads."""
    states = np.random.default_rng(8).integers(0, 2**15, (LAYERS, CHUNK, SIZE), dtype=np.int16)
    found = {}
    for name, block, has_heads in (("0.24.0", 16, False), ("0.32.0", 32, True)):
        tensors = {}
        for layer, layer_name in enumerate(NAMES):
            memory = torch.zeros((BLOCKS, block, SIZE), dtype=BF16)
            for token in range(CHUNK):
                memory.view(torch.int16)[BLOCK_IDS[block][token // block], token % block] = torch.from_numpy(
                    states[layer, token]
                )
            tensors[layer_name] = memory.unsqueeze(1) if has_heads else memory
        with version(name):
            config, caches = engine(backend="FLASHMLA", tp=4, rank=3), caches_config(latent(block))
            memory_found = describe(config, tensors, caches)
            space = describe_namespace(config, caches, cut(config, caches), version="")
        found[name] = {
            "is_right": read(memory_found, 0, BLOCK_IDS[block]) == states.tobytes(),
            "row": memory_found.rows[0].row,
            "layout": space.layout,
        }
    return found


def find_pages(device: str, order: str, *, is_opaque: bool = True) -> dict[str, Any]:
    """Return what opaque pages become, whose inner order does not matter."""
    physical = " ".join({"L": "NL", "B": "NB", "H": "NH", "N": "BS", "C": "2HS"}[axis] for axis in order)
    tensors = lay_out("NB NH BS 2HS", 16, order=physical)
    caches = caches_config(full(), order=order)
    found = describe(engine(device), tensors, caches, is_opaque=is_opaque)
    is_right = True
    for block in range(BLOCKS):
        values = np.frombuffer(read(found, 0, [block]), dtype=np.int16)
        expected = [tensor.view(torch.int16).numpy()[block].ravel() for tensor in tensors.values()]
        is_right &= [sorted(part) for part in np.split(values, LAYERS)] == [sorted(part) for part in expected]
    return {"planes": len(found.rows[0].group.planes), "is_right": bool(is_right)}


def find_overlay(*, has_lists: bool) -> dict[str, Any]:
    """Return what a model with full, window and recurrent layers over the same bytes becomes."""
    page = 2 * HEADS * 16 * SIZE * 2
    memory = torch.zeros(BLOCKS * page, dtype=torch.int8)
    memory.copy_(torch.randint(-128, 128, memory.shape, dtype=torch.int8))
    attention = memory.view(BF16).view(BLOCKS, HEADS, 16, 2 * SIZE)
    spec = mamba(page_size_padded=page)
    payload = 30 + 32
    if has_lists:
        conv = memory.view(BF16).as_strided((BLOCKS, 3, 5), (page // 2, 5, 1), 0)
        # Not aligned for its type as a tensor of torch would be, so by bytes.
        ssm = memory.as_strided((BLOCKS, 2, 16), (page, 16, 1), 30)
        state: Any = [conv, ssm]
    else:
        state = memory.as_strided((BLOCKS, 1, 1, payload), (page, payload, payload, 1), 0)
    tensors = {"layer.0": attention, "window.0": attention, "state.0": state}
    caches = caches_config(full(), window(20), spec, names=[["layer.0"], ["window.0"], ["state.0"]])
    config = engine("cpu")
    chosen = cut(config, caches)
    found = layout.describe_memory(config, tensors, caches, chosen)
    pages = [memory[block * page : (block + 1) * page].numpy().tobytes() for block in range(BLOCKS)]
    return {
        "storages": len(found.storages),
        "stored": [held.blocks_per_chunk for held in found.rows],
        "kinds": [held.group.kind.value for held in found.rows],
        "window": found.rows[1].group.window,
        "rows_of_group": {str(key): value for key, value in found.rows_of_group(chosen.groups).items()},
        "is_right": [
            read(found, 0, [3, 1]) == pages[3] + pages[1],
            read(found, 1, [4]) == pages[4],
            read(found, 2, [7]) == pages[7][:payload],
        ],
        "texts": found.texts,
    }


def find_groups() -> dict[str, Any]:
    """Return what both sides say of groups of several block sizes."""
    names = [["layer.0"], ["window.0"], ["layer.1"], ["state.0"], ["layer.2"]]
    chunked = ChunkedLocalAttentionSpec(
        block_size=16, num_kv_heads=HEADS, head_size=SIZE, dtype=BF16, attention_chunk_size=128
    )
    ring = CircularBufferSpec(block_size=8, num_kv_heads=HEADS, head_size=SIZE, dtype=BF16)
    retained = window(33, extra_retained_tokens=3)
    caches = caches_config(full(32), ring, retained, mamba(64), chunked, names=names)
    caches.kv_cache_groups[2].is_eagle_group = True
    found = engine_groups(engine(), caches, CHUNK)
    keys = ("number", "block_tokens", "window", "blocks_per_chunk", "stored_blocks_per_chunk", "is_draft")
    several = caches_config(full(16), window(128, 32), names=[["layer.0"], ["window.0"]])
    return {
        "groups": [[group.kind.value, *(getattr(group, key) for key in keys), group.need.span] for group in found],
        "chunk_tokens": [
            choose_chunk_tokens(Options(), engine(), one)
            for one in (caches_config(full(16)), several, caches_config(full(128)), caches_config(full(96)), caches)
        ],
        "chosen": choose_chunk_tokens(Options(chunk_tokens=192), engine(), several),
        "refused": refusal(lambda: choose_chunk_tokens(Options(chunk_tokens=80), engine(), several)),
    }


def find_uniform() -> dict[str, Any]:
    """Return what layers of different sizes in one group, and layers that share memory, become."""
    small = torch.zeros((BLOCKS, 2, 16, 2 * SIZE), dtype=BF16)
    large = torch.zeros((BLOCKS, 4, 16, 2 * SIZE), dtype=BF16)
    specs = {"layer.0": full(heads=2), "layer.1": full(heads=4), "layer.2": full(heads=4)}
    caches = caches_config(UniformTypeKVCacheSpecs(block_size=16, kv_cache_specs=specs))
    tensors = {"layer.0": small, "layer.1": large, "layer.2": large}
    found = describe(engine(), tensors, caches)
    return {"heads": [plane.num_heads for plane in found.rows[0].group.planes], "text": found.texts[0]}


def find_namespaces() -> dict[str, str]:
    """Return the name of the KV of engines that differ in one thing each."""

    def name(config: Any, caches: Any, **more: Any) -> str:
        return str(describe_namespace(config, caches, cut(config, caches, **more), version=""))

    with version("0.32.0"):
        return {
            "block 16": name(engine(), caches_config(full())),
            "block 32 HND": name(engine(), caches_config(full(32), order="LBHNC")),
            "two parts of one rank": name(engine(), caches_config(full()), head_shards=2),
            "two ranks": name(engine(tp=2), caches_config(full(heads=2))),
            "opaque": name(engine(), caches_config(full()), is_opaque=True),
            "opaque in blocks of 32": name(engine(), caches_config(full(32)), is_opaque=True),
            "cpu": name(engine("cpu"), caches_config(full())),
            "fp8": name(engine(cache_dtype="fp8"), caches_config(fp8())),
            "fp8_e5m2": name(engine(cache_dtype="fp8_e5m2"), caches_config(fp8())),
            "window": name(engine(), caches_config(window(1000))),
            "other window": name(engine(), caches_config(window(2000))),
            "inline scales": name(engine(), caches_config(full(kv_quant_mode=KVQuantMode.INT8_PER_TOKEN_HEAD))),
            "fp8_ds_mla": name(engine(), caches_config(latent(cache_dtype_str="fp8_ds_mla"))),
            "indexer": name(engine(config={"index_topk": 64}), caches_config(latent())),
            "draft": name(engine(speculative=draft("a")), caches_config(full())),
            "other draft": name(engine(speculative=draft("b")), caches_config(full())),
            "unknown back end": name(engine(wanted="FLEX_ATTENTION"), caches_config(full())),
        }


def draft(name: str) -> Any:
    model = SimpleNamespace(model=name, revision="1", quantization=None, hf_config=SimpleNamespace(to_dict=dict))
    return SimpleNamespace(method="eagle", draft_model_config=model)


def fp8() -> Any:
    return FullAttentionSpec(
        block_size=16, num_kv_heads=HEADS, head_size=SIZE, dtype=torch.uint8, kv_quant_mode=KVQuantMode.FP8_PER_TENSOR
    )


def refusal(act: Callable[[], Any]) -> str:
    try:
        act()
    except (LayoutError, ConfigError) as error:
        return str(error)
    return "nothing was refused"


def find_refusals() -> dict[str, str]:
    """Return what is said of what is not served."""
    axes = "NB NH BS 2HS"
    rows = {name: torch.zeros((BLOCKS, HEADS, 16, 2 * SIZE), dtype=BF16) for name in NAMES}
    wrong = {name: torch.zeros((BLOCKS, 16, HEADS, 2 * SIZE), dtype=BF16) for name in NAMES}
    other_type = {name: tensor.to(torch.float16) for name, tensor in rows.items()}
    cross = CrossAttentionSpec(block_size=16, num_kv_heads=HEADS, head_size=SIZE, dtype=BF16)
    one_state = dict.fromkeys(["state.0"], torch.zeros((BLOCKS, 1, 1, 61), dtype=torch.int8))
    state = caches_config(mamba(), names=[["state.0"]])
    mixed = UniformTypeKVCacheSpecs(block_size=16, kv_cache_specs={"layer.0": latent(), "layer.1": full()})
    prefills = engine(parallel={"prefill_context_parallel_size": 2})
    hosted = caches_config(full(), host_resident=True)
    cases: dict[str, Callable[[], Any]] = {
        "cross attention": lambda: cut(engine(), caches_config(cross)),
        "no states": lambda: cut(engine(), caches_config(mamba(mode="none"), names=[["state.0"]])),
        "prefills in turns": lambda: cut(prefills, caches_config(full())),
        "windows in turns": lambda: cut(context(2, tp=2), caches_config(window(64))),
        "turns": lambda: cut(context(2, 3, tp=2), caches_config(full())),
        "host memory": lambda: cut(engine(), hosted),
        "role": lambda: cut(engine(), caches_config(full(), role="hisparse_indexer")),
        "nothing left": lambda: cut(engine(), caches_config(full(), enable_kv_transfer=False)),
        "sleep mode": lambda: layout.check_served(engine(model={"enable_sleep_mode": True})),
        "own scales": lambda: layout.check_served(engine(cache={"calculate_kv_scales": True})),
        "device": lambda: layout.check_served(engine("tpu")),
        "shape": lambda: describe(engine(), wrong, caches_config(full())),
        "type": lambda: describe(engine(), other_type, caches_config(full())),
        "back end": lambda: describe(engine(backend="FLEX_ATTENTION"), rows, caches_config(full())),
        "kernel blocks": lambda: describe(engine(), lay_out(axes, 32, 16), caches_config(full(32))),
        "missing layer": lambda: describe(engine(), {}, caches_config(full())),
        "empty stage": lambda: describe(engine(pp=2, rank=1), rows, caches_config(full(), names=[[]])),
        "state": lambda: describe(engine("cpu"), one_state, state),
        "pages in pieces": lambda: find_pages("cpu", "LHBNC"),
        "other pieces": lambda: find_pages("cuda", "BHLNC"),
        "unequal layers": lambda: describe(engine(tp=2, heads=8), rows, caches_config(mixed, names=[["layer.0"]])),
        "head_shards": lambda: cut(engine(tp=2, heads=8), caches_config(full()), head_shards=3),
        "head_shards of pages": lambda: cut(engine("cpu"), caches_config(full()), head_shards=2),
        "head_shards of latent KV": lambda: cut(engine(), caches_config(latent()), head_shards=2),
        "unequal parts": lambda: cut(engine(), caches_config(full()), head_shards=3),
        "too many parts": lambda: cut(engine(), caches_config(full()), head_shards=8),
    }
    with version("0.32.0"):
        return {name: refusal(case) for name, case in cases.items()}


def main() -> None:
    cases = {
        "rows": {case: find_rows(case) for case in ROWS},
        "latent": find_latent(),
        "pages": {order: find_pages("cpu", order) for order in ("LBNHC", "LBHNC", "BLNHC", "BLHNC")},
        "pages of a GPU": find_pages("cuda", "BLNHC"),
        "overlay": find_overlay(has_lists=False),
        "overlay of lists": find_overlay(has_lists=True),
        "groups": find_groups(),
        "uniform": find_uniform(),
        "shards": find_shards(),
        "turns": find_turns(),
        "round trip": find_round_trip(),
        "namespaces": find_namespaces(),
        "refusals": find_refusals(),
    }
    print(json.dumps(cases))


if __name__ == "__main__":
    main()
