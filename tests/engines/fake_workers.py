"""vLLM's configurations, specifications and tensors of fake engines, for ``describe.py``.

Tensors have the shapes and strides of a version, and hold what a model of one seed would have at each layer, token and
head. Runs in vLLM's own environment.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import product
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
import vllm
from vllm.v1.kv_cache_interface import FullAttentionSpec, MambaSpec, MLAAttentionSpec, SlidingWindowSpec

from kvist.adapters.vllm import layout
from kvist.adapters.vllm.groups import engine_groups
from kvist.adapters.vllm.shards import Cut, choose_shardings
from tests.support.layouts import chunk_bytes

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


def window(tokens: int, block: int = 16, heads: int = HEADS, **more: Any) -> Any:
    return SlidingWindowSpec(
        block_size=block, num_kv_heads=heads, head_size=SIZE, dtype=BF16, sliding_window=tokens, **more
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
    shardings = choose_shardings(config, caches, groups, head_shards=head_shards, is_opaque=is_opaque)
    return Cut(groups, shardings, chunk_tokens, is_opaque)


def describe(config: Any, tensors: Mapping[str, Any], caches: Any, **more: Any) -> layout.WorkerMemory:
    return layout.describe_memory(config, tensors, caches, cut(config, caches, **more))


def memory_of(found: layout.WorkerMemory) -> list[Any]:
    return [torch.empty(0, dtype=torch.uint8).set_(storage).numpy() for storage in found.storages]


def read(found: layout.WorkerMemory, row: int, block_ids: Sequence[int]) -> bytes:
    return chunk_bytes(found.rows[row].group, block_ids, memory_of(found))


def heads_bytes(first: int, count: int) -> bytes:
    return bytes(KV[:, :, :, first : first + count].tobytes())


def context(count: int, turn: int = 1, **more: Any) -> Any:
    """Return the configuration of an engine whose ranks take turns with tokens, ``turn`` at a time."""
    parallel = {"decode_context_parallel_size": count, "cp_kv_cache_interleave_size": turn}
    return engine(parallel=parallel, **more)
