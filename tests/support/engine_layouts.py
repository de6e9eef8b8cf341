"""Tensors as engines lay them out, small, each under the axes that ``docs/layouts.md`` gives it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kvist.model.tensors import Layer, TensorView
from tests.support.views import lay, moved

NUM_BLOCKS = 6
SIZES = {"NL": 3, "NB": NUM_BLOCKS, "BS": 4, "NH": 3, "HS": 8, "2HS": 16, "C": 20, "KB": 2, "PBS": 24, "NHHS": 24}


@dataclass(frozen=True, slots=True)
class Case:
    """One engine's layers, which make up one group."""

    name: str
    layers: Sequence[Layer]

    def __str__(self) -> str:
        return self.name


def each(view: Layer, num_layers: int = 3) -> list[Layer]:
    """Return as many layers, each in an allocation of its own."""
    step = 2 if isinstance(view, tuple) else 1
    return [moved(view, number * step) for number in range(num_layers)]


def per_layer(name: str, axes: str, **more) -> Case:
    return Case(name, each(lay(axes, SIZES, **more)))


def whole(name: str, axes: str, order: str = "", **more) -> Case:
    return Case(name, [lay(axes, SIZES, order=order, **more)])


def lists(name: str, axes: str, **more) -> Case:
    """K and V as tensors of their own, each in an allocation of its own."""
    return Case(name, each((lay(axes, SIZES, **more), lay(axes, SIZES, memory=1, **more))))


def _one_pool_of_lists() -> Case:
    """K of all layers, then V of all layers, in one allocation."""
    nbytes = 6 * 4 * 3 * 8 * 2
    views = [lay("NB BS NH HS", SIZES, offset=64 + number * nbytes) for number in range(6)]
    return Case("SGLang K list and V list in one allocation", list(zip(views[:3], views[3:], strict=True)))


def _deepseek_v32() -> Case:
    """MLA latents and fp8 indexer pages, packed into one block."""
    latent = lay("NB 1 BS C", SIZES | {"BS": 64, "C": 656}, itemsize=1, gaps={"NB": 8448})
    indexer = TensorView(0, 64 + 64 * 656, (6, 64, 132), (64 * 656 + 8448, 132, 1), 1, "NB PAGE PAGE")
    return Case("vLLM DSv3.2: MLA and indexer", [latent, indexer])


def _mamba_lists() -> Case:
    """Convolution and recurrent state as two tensors of different types that share padded pages."""
    conv = TensorView(0, 64, (6, 3, 40), (1024, 80, 2), 2, "NB PAGE PAGE")
    ssm = TensorView(0, 64 + 240, (6, 2, 4, 8), (1024, 128, 32, 4), 4, "NB PAGE PAGE PAGE")
    return Case("vLLM Mamba 0.20-0.28, list of states", [conv, ssm])


_MAMBA = TensorView(0, 64, (6, 1, 1, 18688), (65536, 18688, 18688, 1), 1, "NB PAGE PAGE PAGE")
_INDEXER = TensorView(0, 64, (6, 64, 132), (20000, 132, 1), 1, "NB PAGE PAGE")
_TURNED = TensorView(0, 64, (6, 3, 4, 16), (384, 32, 96, 2), 2, "NB PAGE PAGE PAGE")

CASES = [
    per_layer("vLLM FLASH_ATTN 0.20-0.22, NHD", "2 NB BS NH HS"),
    per_layer("vLLM FLASH_ATTN 0.20-0.22, HND strides", "2 NB BS NH HS", order="2 NB NH BS HS"),
    per_layer("vLLM CPU 0.20-0.22, FLASH_ATTN HND", "2 NB NH BS HS"),
    per_layer("vLLM FlashInfer, Triton 0.20-0.25, FLASH_ATTN 0.23-0.25, NHD", "NB 2 BS NH HS"),
    per_layer("vLLM FlashInfer 0.20-0.25, HND strides", "NB 2 BS NH HS", order="NB 2 NH BS HS"),
    per_layer("vLLM FlashInfer HND", "NB 2 NH BS HS"),
    per_layer("vLLM 0.20-0.22 over block-first memory", "2 NB BS NH HS", order="NB 2 BS NH HS"),
    per_layer("vLLM CPU 0.23-0.33, 0.26-0.28 HND, LBHNC", "NB NH BS 2HS"),
    per_layer("vLLM 0.26-0.28 NHD strides", "NB NH BS 2HS", order="NB BS NH 2HS"),
    per_layer("vLLM fused NHD, padded blocks", "NB BS NH 2HS", gaps={"NB": 40}),
    per_layer("vLLM fused HND, padded blocks", "NB NH BS 2HS", gaps={"NB": 40}),
    per_layer("deprecated fused HND", "NB NH BS 2 HS"),
    per_layer("deprecated fused NHD", "NB BS NH 2 HS"),
    per_layer("gaps behind each row and each token", "NB BS NH 2HS", gaps={"NH": 6, "BS": 2}),
    per_layer("vLLM fp8", "NB NH BS 2HS", itemsize=1),
    per_layer("vLLM int8 or NVFP4 with inline scales", "NB NH BS C", itemsize=1),
    per_layer("vLLM, ATOM, SGLang MLA", "NB BS C"),
    per_layer("vLLM MLA, padded blocks", "NB BS C", gaps={"NB": 24}),
    Case("vLLM 0.29-0.33 MLA", each(lay("NB NH BS C", SIZES | {"NH": 1, "C": 576}, order="NB BS NH C"))),
    whole("vLLM cross-layer 0.20-0.25", "NB NL 2 BS NH HS"),
    whole("vLLM cross-layer 0.20-0.25, logical", "NL NB 2 BS NH HS", "NB NL 2 BS NH HS"),
    whole("vLLM cross-layer 0.26-0.28 NHD", "NL NB NH BS 2HS", "NB NL BS NH 2HS"),
    whole("vLLM cross-layer 0.26-0.28 HND", "NL NB NH BS 2HS", "NB NH NL BS 2HS"),
    whole("vLLM 0.29-0.33 LBNHC", "NL NB NH BS 2HS", "NL NB BS NH 2HS"),
    whole("vLLM 0.29-0.33 LBHNC", "NL NB NH BS 2HS"),
    whole("vLLM 0.29-0.33 LHBNC", "NL NB NH BS 2HS", "NL NH NB BS 2HS"),
    whole("vLLM 0.29-0.33 BLNHC", "NL NB NH BS 2HS", "NB NL BS NH 2HS"),
    whole("vLLM 0.29-0.33 BLHNC, padded blocks", "NL NB NH BS 2HS", "NB NL NH BS 2HS", gaps={"NB": 64}),
    whole("vLLM 0.29-0.33 BHLNC", "NL NB NH BS 2HS", "NB NH NL BS 2HS"),
    Case("vLLM Mamba 0.29-0.33, 18,688 of 65,536 bytes", each(_MAMBA, 2)),
    _mamba_lists(),
    Case("vLLM, SGLang DSA indexer", each(_INDEXER)),
    _deepseek_v32(),
    Case("vLLM DSv4 states", each(lay("NB BS C", SIZES | {"BS": 64, "C": 584}, itemsize=1, gaps={"NB": 64}), 2)),
    Case("vLLM opaque page, its inside in any order", each(_TURNED)),
    per_layer("vLLM kernel blocks", "NB KB BS NH 2HS"),
    per_layer("vLLM kernel blocks, K and V apart", "2 NB KB BS NH HS"),
    Case("vLLM kernel blocks of pages", each(TensorView(0, 64, (6, 2, 48), (200, 96, 2), 2, "NB KB PAGE"))),
    lists("SGLang MHA in process", "PBS NH HS", block_tokens=4),
    lists("SGLang MHA, K list and V list", "NB BS NH HS"),
    lists("SGLang MHA, padded blocks", "NB BS NH HS", gaps={"NB": 10}),
    _one_pool_of_lists(),
    per_layer("SGLang MLA in process", "PBS 1 C", block_tokens=4),
    per_layer("SGLang unified components", "NB BS NH HS"),
    whole("TensorRT-LLM pool", "NB NL 2 NH BS HS"),
    whole("K and V outside the layers of a block", "NB 2 NL BS NH HS"),
    whole("plain cache, heads merged", "2 NL PBS NHHS", block_tokens=4, num_heads=3),
    whole("plain cache, blocks of one token", "2 NL PBS NHHS", block_tokens=1, num_heads=3),
    whole("plain cache, layers outermost", "NL 2 PBS NH HS", block_tokens=4),
]
