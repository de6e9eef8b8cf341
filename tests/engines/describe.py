"""Describes KV memory of every layout that vLLM has had, and says whether the description finds every byte.

Runs in vLLM's own environment; prints one JSON object, the cases of ``test_layout.py`` by name. Memory is that of fake
engines: tensors of this process's CPU, in the shapes and strides of a version, filled with numbers that a model of one
seed would have at each layer, token and head.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import product
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
import vllm
from vllm.v1.kv_cache_interface import (
    ChunkedLocalAttentionSpec,
    CircularBufferSpec,
    CrossAttentionSpec,
    FullAttentionSpec,
    KVQuantMode,
    MambaSpec,
    MLAAttentionSpec,
    SlidingWindowSpec,
    UniformTypeKVCacheSpecs,
)

from kvist.adapters.vllm import layout
from kvist.adapters.vllm.groups import choose_chunk_tokens, engine_groups
from kvist.adapters.vllm.namespace import describe_namespace
from kvist.adapters.vllm.options import Options
from kvist.adapters.vllm.shards import Cut, choose_sharding
from kvist.errors import ConfigError, LayoutError
from tests.support.layouts import chunk_bytes, chunk_places

LAYERS, BLOCKS, HEADS, SIZE, CHUNK = 3, 9, 4, 8, 64
BF16 = torch.bfloat16
KV = np.random.default_rng(7).integers(-(2**15), 2**15, (LAYERS, 2, CHUNK, HEADS, SIZE), dtype=np.int16)
"""K and V of a chunk: what the model computes, whatever the engine."""
BLOCK_IDS = {16: [5, 2, 8, 3], 32: [7, 4], 64: [6]}
NAMES = [f"layer.{number}" for number in range(LAYERS)]


@contextmanager
def version(name: str) -> Iterator[None]:
    """Pretend to be another vLLM."""
    before, vllm.__version__ = vllm.__version__, name
    try:
        yield
    finally:
        vllm.__version__ = before


def full(block: int = 16, heads: int = HEADS, **more: Any) -> Any:
    return FullAttentionSpec(block_size=block, num_kv_heads=heads, head_size=SIZE, dtype=BF16, **more)


def window(tokens: int, block: int = 16, **more: Any) -> Any:
    return SlidingWindowSpec(
        block_size=block, num_kv_heads=HEADS, head_size=SIZE, dtype=BF16, sliding_window=tokens, **more
    )


def latent(block: int = 16, **more: Any) -> Any:
    return MLAAttentionSpec(block_size=block, num_kv_heads=1, head_size=SIZE, dtype=BF16, **more)


def mamba(block: int = 16, mode: str = "align", **more: Any) -> Any:
    shapes, dtypes = ((3, 5), (2, 4)), (BF16, torch.float32)
    return MambaSpec(block_size=block, shapes=shapes, dtypes=dtypes, mamba_cache_mode=mode, **more)


def caches_config(*specs: Any, names: Sequence[Sequence[str]] = (), order: str = "", **more: Any) -> Any:
    groups = [
        SimpleNamespace(layer_names=list(names[number]) if names else list(NAMES), kv_cache_spec=spec, **more)
        for number, spec in enumerate(specs)
    ]
    return SimpleNamespace(num_blocks=BLOCKS, kv_cache_groups=groups, kv_cache_layout=order or None)


def engine(
    device: str = "cuda", backend: str = "FLASH_ATTN", *, tp: int = 1, pp: int = 1, rank: int = 0, heads: int = HEADS,
    wanted: str | None = None, cache_dtype: str = "auto", **more: Any,
) -> Any:  # fmt: skip
    """Return vLLM's configuration of a model with ``heads`` KV heads; ``wanted`` is the back end that the user set."""
    layer = SimpleNamespace(get_attn_backend=lambda: SimpleNamespace(get_name=lambda: backend))
    names = [*NAMES, "state.0", "window.0", "draft.0"]
    config = SimpleNamespace(to_dict=lambda: {"num_key_value_heads": heads}, **more.pop("config", {}))
    model = SimpleNamespace(
        model="tiny", revision="1", quantization=None, hf_config=config, seed=0, dtype="torch.bfloat16",
        get_total_num_kv_heads=lambda: heads, **more.pop("model", {}),
    )  # fmt: skip
    parallel = {"tensor_parallel_size": tp, "pipeline_parallel_size": pp, "rank": rank, **more.pop("parallel", {})}
    cache = {"cache_dtype": cache_dtype, **more.pop("cache", {})}
    return SimpleNamespace(
        device_config=SimpleNamespace(device_type=device),
        model_config=model,
        parallel_config=SimpleNamespace(**parallel),
        cache_config=SimpleNamespace(**cache),
        attention_config=SimpleNamespace(backend=wanted),
        load_config=SimpleNamespace(load_format="auto"),
        compilation_config=SimpleNamespace(static_forward_context=dict.fromkeys(names, layer)),
        speculative_config=more.pop("speculative", None),
    )


def lay_out(axes: str, block: int, kernel: int = 0, order: str = "", heads: Sequence[int] = range(HEADS)) -> Any:
    """Return each layer's tensor of ``axes``, in memory in ``order``, with the model's KV in its blocks.

    An order with ``NL`` is of one allocation for all layers, others have one each.
    """
    kernel = kernel or block
    parts = block // kernel
    sizes = {"NL": LAYERS, "2": 2, "NB": BLOCKS * parts, "BS": kernel, "NH": len(heads), "HS": SIZE, "2HS": 2 * SIZE}
    order = order or axes
    has_all = "NL" in order.split()
    names = axes.split()
    memory = [torch.zeros([sizes[name] for name in order.split()], dtype=BF16) for _ in range(1 if has_all else LAYERS)]
    tensors = {}
    for layer, name in enumerate(NAMES):
        inner = [axis for axis in order.split() if axis != "NL"]
        taken = memory[0].select(order.split().index("NL"), layer) if has_all else memory[layer]
        tensors[name] = tensor = taken.permute([inner.index(axis) for axis in names])
        fill(tensor.view(torch.int16).numpy(), names, KV[layer][:, :, list(heads)], BLOCK_IDS[block], block, kernel)
    return tensors


def fill(array: Any, names: list[str], values: Any, block_ids: list[int], block: int, kernel: int) -> None:
    """Write one layer's values ``[kv, token, head, size]``."""
    parts = block // kernel
    for kv, token, head in product(*map(range, values.shape[:3])):
        number = block_ids[token // block] * parts + token % block // kernel
        at = {"2": kv, "NB": number, "BS": token % kernel, "NH": head, "HS": slice(None)}
        at["2HS"] = slice(kv * SIZE, (kv + 1) * SIZE)
        array[tuple(at[name] for name in names)] = values[kv, token, head]


def cut(config: Any, caches: Any, *, head_shards: int = 0, is_opaque: bool = False, chunk_tokens: int = CHUNK) -> Cut:
    groups = engine_groups(config, caches, chunk_tokens)
    sharding = choose_sharding(config, caches, head_shards=head_shards, is_opaque=is_opaque)
    return Cut(groups, sharding, chunk_tokens, is_opaque)


def describe(config: Any, tensors: Mapping[str, Any], caches: Any, **more: Any) -> layout.WorkerMemory:
    return layout.describe_memory(config, tensors, caches, cut(config, caches, **more))


def memory_of(found: layout.WorkerMemory) -> list[Any]:
    return [torch.empty(0, dtype=torch.uint8).set_(storage).numpy() for storage in found.storages]


def read(found: layout.WorkerMemory, row: int, block_ids: Sequence[int]) -> bytes:
    return chunk_bytes(found.rows[row].group, block_ids, memory_of(found))


def heads_bytes(first: int, count: int) -> bytes:
    return bytes(KV[:, :, :, first : first + count].tobytes())


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
            choose_chunk_tokens(Options(), one)
            for one in (caches_config(full(16)), several, caches_config(full(128)), caches_config(full(96)), caches)
        ],
        "chosen": choose_chunk_tokens(Options(chunk_tokens=192), several),
        "refused": refusal(lambda: choose_chunk_tokens(Options(chunk_tokens=80), several)),
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


def find_shards() -> dict[str, Any]:
    """Return numbers of shards and readers, and the shards of each rank."""
    caches = caches_config(full(heads=1))
    two = caches_config(full(heads=1), mamba(), names=[["layer.0"], ["state.0"]])
    cases = {
        "tp2": (engine(tp=2, heads=4), caches_config(full(heads=2)), 0),
        "tp2 in 4 parts": (engine(tp=2, heads=4), caches_config(full(heads=2)), 4),
        "tp1 in 2 parts": (engine(heads=4), caches_config(full()), 2),
        "tp2 pp2": (engine(tp=2, pp=2, heads=4), caches_config(full(heads=2)), 0),
        "replicated heads": (engine(tp=4, heads=2), caches, 0),
        "replicated heads of a draft": (engine(tp=4, heads=2, speculative=object()), caches, 0),
        "latent": (engine(tp=4), caches_config(latent()), 0),
        "latent and states": (engine(tp=2), caches_config(latent(), mamba(), names=[["layer.0"], ["state.0"]]), 0),
        "replicated heads and states": (engine(tp=4, heads=2), two, 0),
    }
    found = {}
    for name, (config, one, head_shards) in cases.items():
        sharding = choose_sharding(config, one, head_shards=head_shards, is_opaque=False)
        ranks = range(sharding.num_ranks * sharding.num_stages)
        found[name] = [sharding.num_shards, sharding.num_readers, [list(sharding.shards_of(rank)) for rank in ranks]]
    return found


def find_round_trip() -> dict[str, Any]:
    """Return whether chunks of 2 ranks are those of 1 rank with ``head_shards`` 2, and whether they can be put back."""
    with version("0.24.0"):
        alone = describe(engine(), lay_out("NB 2 BS NH HS", 32), caches_config(full(32)), head_shards=2)
        empty = {name: torch.zeros_like(tensor) for name, tensor in lay_out("NB 2 BS NH HS", 32).items()}
        target = describe(engine(), empty, caches_config(full(32)), head_shards=2)
        pair = [
            describe(
                engine(tp=2, rank=rank),
                lay_out("NB 2 BS NH HS", 16, heads=range(2 * rank, 2 * rank + 2)),
                caches_config(full(heads=2)),
            )
            for rank in range(2)
        ]
    chunks = [read(pair[rank], 0, BLOCK_IDS[16]) for rank in range(2)]
    memory = memory_of(target)
    for row, chunk in enumerate(chunks):
        places = chunk_places(target.rows[row].group, BLOCK_IDS[32])
        for byte, (number, offset, _) in zip(chunk, places, strict=True):
            memory[number][offset] = byte
    expected = lay_out("NB 2 BS NH HS", 32)
    bits = torch.int16
    return {
        "rows": [[tuple(held.row) for held in found.rows] for found in (alone, *pair)],
        "is_equal": [read(alone, rank, BLOCK_IDS[32]) == chunks[rank] for rank in range(2)],
        "is_put_back": all(torch.equal(empty[name].view(bits), expected[name].view(bits)) for name in NAMES),
    }


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
    context = engine(parallel={"decode_context_parallel_size": 2})
    hosted = caches_config(full(), host_resident=True)
    cases: dict[str, Callable[[], Any]] = {
        "cross attention": lambda: cut(engine(), caches_config(cross)),
        "no states": lambda: cut(engine(), caches_config(mamba(mode="none"), names=[["state.0"]])),
        "context parallelism": lambda: cut(context, caches_config(full())),
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
        "round trip": find_round_trip(),
        "namespaces": find_namespaces(),
        "refusals": find_refusals(),
    }
    print(json.dumps(cases))


if __name__ == "__main__":
    main()
