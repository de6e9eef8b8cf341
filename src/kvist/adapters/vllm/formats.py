"""What the rows of a group's layers are, or that only the engine understands its blocks.

The law: both sides of the connector decide this from the configuration alone, and alike, because the scheduler's side
names what the workers store. A worker that finds something else in its memory is refused. Rows are named where the
order of every element is known: by back end and version of vLLM; anything else is an opaque page. Sources: vLLM 0.20 to
0.33, ``v1/kv_cache_interface.py``, ``v1/attention/backends``, ``model_executor/layers/attention``.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any, Final

import vllm
from vllm.platforms import current_platform

from kvist.model.content import DTYPES, content
from kvist.model.tensors import TensorView

VERSIONS: Final = range(20, 34)
"""Minor numbers of the versions whose back ends' shapes are known."""
_KV_BACKENDS: Final = frozenset({"FLASH_ATTN", "FLASHINFER", "TRITON_ATTN"})
_LATENT_BACKENDS: Final = frozenset({"CUTLASS_MLA", "FLASHINFER_MLA", "FLASHMLA", "FLASH_ATTN_MLA", "TRITON_MLA"})
_KV_SPECS: Final = frozenset({"ChunkedLocalAttentionSpec", "FullAttentionSpec", "SlidingWindowSpec"})
_LATENT_SPECS: Final = frozenset({"MLAAttentionSpec"})
_PLAIN_MODES: Final = (0, 1)
"""``KVQuantMode``: none, and one scale for a whole tensor, which belongs to the weights."""
_FP8: Final = {"fp8": "float8_e4m3fn", "fp8_e4m3": "float8_e4m3fn", "fp8_e5m2": "float8_e5m2"}


@dataclass(frozen=True, slots=True)
class RowFormat:
    """The rows of one layer."""

    dtype: str
    """One of ``model.content.DTYPES``."""
    num_heads: int
    head_size: int
    """Elements of a row: one head of K or of V, or a token's latent state."""
    is_latent: bool

    @property
    def backends(self) -> frozenset[str]:
        """The attention back ends that write such rows."""
        return _LATENT_BACKENDS if self.is_latent else _KV_BACKENDS

    def axes(self, backend: str) -> str:
        """Return what the axes of a layer's tensor are."""
        version = minor_version()
        assert version is not None
        if self.is_latent:
            return "NB BS C" if version < 29 else "NB NH BS C"
        if version >= 26:
            return "NB NH BS 2HS"
        return "2 NB BS NH HS" if version <= 22 and backend == "FLASH_ATTN" else "NB 2 BS NH HS"

    def content(self, num_parts: int = 1) -> str:
        """Name what the rows of one of ``num_parts`` parts of the heads mean."""
        axes = "NB NH BS C" if self.is_latent else "NB NH BS 2HS"
        itemsize, heads = DTYPES[self.dtype], self.num_heads // num_parts
        row = self.head_size * (1 if self.is_latent else 2)
        view = TensorView(
            0, 0, (1, heads, 1, row), (heads * row * itemsize, row * itemsize, 0, itemsize), itemsize, axes
        )
        return content(
            view, self.dtype, holds="latent" if self.is_latent else "", scales="checkpoint" if itemsize == 1 else ""
        )


def row_format(vllm_config: Any, spec: Any, *, is_opaque: bool) -> RowFormat | None:
    """Return what the rows of a layer are; None if its blocks are opaque pages."""
    name = type(spec).__name__
    if is_opaque or name not in _KV_SPECS | _LATENT_SPECS or not _has_known_kernels(vllm_config):
        return None
    is_latent = name in _LATENT_SPECS
    dtype = _dtype_of(spec, str(vllm_config.cache_config.cache_dtype))
    if dtype is None or not _is_plain(spec, is_latent=is_latent):
        return None
    found = RowFormat(dtype, int(spec.num_kv_heads), int(spec.head_size), is_latent)
    wanted = getattr(getattr(vllm_config, "attention_config", None), "backend", None)
    if wanted is not None and str(getattr(wanted, "name", wanted)) not in found.backends:
        return None
    return found


def layout_name(kv_cache_config: Any) -> str:
    """Return the order of layer, block, head, token and content in memory, such as ``LBNHC``; empty before 0.29."""
    chosen = getattr(kv_cache_config, "kv_cache_layout", None)
    return str(getattr(chosen, "name", chosen or ""))


def minor_version() -> int | None:
    """Return the minor number of this vLLM; None if it is none of ``VERSIONS``."""
    found = re.match(r"0\.(\d+)\.", vllm.__version__)
    return int(found[1]) if found and int(found[1]) in VERSIONS else None


def _has_known_kernels(vllm_config: Any) -> bool:
    model = vllm_config.model_config
    config = getattr(model, "hf_text_config", None) or model.hf_config
    # An indexer's pages hold all values and then all scales; the scheduler's side does not see that it is there.
    has_indexer = getattr(config, "index_topk", None) is not None
    is_nvidia = str(vllm_config.device_config.device_type) == "cuda" and not current_platform.is_rocm()
    return is_nvidia and not has_indexer and minor_version() is not None


def _is_plain(spec: Any, *, is_latent: bool) -> bool:
    """Return whether a state is a token's, and holds K and V, or a latent state, and nothing else."""
    if int(getattr(spec, "kv_quant_mode", 0)) not in _PLAIN_MODES:
        return False
    if getattr(spec, "tokens_per_state", 1) != 1 or getattr(spec, "compress_ratio", 1) != 1:
        return False
    if any(getattr(spec, field, None) is not None for field in ("num_head_slots", "state_content_bytes")):
        return False
    if is_latent:
        name = str(getattr(spec, "cache_dtype_str", None) or "")
        return getattr(spec, "model_version", None) is None and not name.endswith("ds_mla") and spec.num_kv_heads == 1
    return getattr(spec, "head_size_v", None) in (None, spec.head_size)


def _dtype_of(spec: Any, cache_dtype: str) -> str | None:
    """Name how the bits of an element are read: fp8 may lie in tensors of another type."""
    name = str(spec.dtype).removeprefix("torch.")
    if DTYPES.get(name, 0) > 1:
        return name
    return _FP8.get(cache_dtype) if DTYPES.get(name) == 1 else None
