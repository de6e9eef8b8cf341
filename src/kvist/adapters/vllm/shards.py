"""Which shards of a prefix each worker holds.

The law: both sides of the connector compute the same numbers from the configuration. A shard is one part of the KV
heads in one stage of the pipeline; workers that hold the same heads hold the same shard. Where it is not certain that
they do, each has a shard of its own: the same bytes are then kept more than once, and never taken for each other.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

from kvist.adapters.vllm.formats import row_format
from kvist.adapters.vllm.groups import EngineGroup, served_groups, specs_of
from kvist.errors import LayoutError

_LATENT_SPECS: Final = ("MLAAttentionSpec", "SlidingWindowMLASpec")
_KEYS_OF_HEADS: Final = re.compile(r"kv_heads|key_value_heads|block_configs|head_num|attention_other_setting|n_head_kv")


@dataclass(frozen=True, slots=True)
class Sharding:
    """How one engine's KV is cut."""

    num_ranks: int
    """Tensor-parallel ones."""
    num_stages: int
    """Pipeline-parallel ones."""
    num_readers: int
    """Tensor-parallel ranks, one behind another, that hold the same heads."""
    num_parts: int
    """Of the heads, over all ranks."""

    @property
    def num_shards(self) -> int:
        """Of one prefix."""
        return self.num_parts * self.num_stages

    @property
    def parts_per_rank(self) -> int:
        """Parts that one rank holds."""
        return self.num_parts * self.num_readers // self.num_ranks

    def shards_of(self, rank: int) -> range:
        """Return the shards that a worker holds, in the order of its heads."""
        stage, place = divmod(rank % (self.num_ranks * self.num_stages), self.num_ranks)
        first = stage * self.num_parts + place // self.num_readers * self.parts_per_rank
        return range(first, first + self.parts_per_rank)


@dataclass(frozen=True, slots=True)
class Cut:
    """What both sides of the connector have worked out from the configuration."""

    groups: tuple[EngineGroup, ...]
    sharding: Sharding
    chunk_tokens: int
    is_opaque: bool
    """All blocks are kept as their kernels pack them."""


def choose_sharding(vllm_config: Any, kv_cache_config: Any, *, head_shards: int, is_opaque: bool) -> Sharding:
    """Return how an engine's KV is cut.

    Raises:
        LayoutError: it cannot be cut into so many parts.
    """
    parallel = vllm_config.parallel_config
    num_ranks = int(parallel.tensor_parallel_size)
    groups = served_groups(kv_cache_config)
    num_readers = math.gcd(num_ranks, *(num_replicas(vllm_config, _first_spec(group)) for _, group in groups))
    num_distinct = num_ranks // num_readers
    num_parts = head_shards or num_distinct
    if num_parts % num_distinct:
        raise LayoutError(
            f"head_shards {num_parts} is no multiple of the {num_distinct} different parts of the KV heads that "
            f"{num_ranks} tensor-parallel ranks hold"
        )
    per_rank = num_parts // num_distinct
    for number, group in groups if per_rank > 1 else ():
        found = row_format(vllm_config, _first_spec(group), is_opaque=is_opaque)
        if found is None or found.is_latent:
            raise LayoutError(
                f"head_shards {num_parts} would cut what a rank holds into {per_rank} parts, and KV cache group "
                f"{number} has no heads that can be told apart; set it to {num_distinct}, or leave it out"
            )
        if found.num_heads % per_rank:
            raise LayoutError(
                f"head_shards {num_parts} would cut the {found.num_heads} KV heads of KV cache group {number} on each "
                f"rank into {per_rank} parts, which must be equal"
            )
    return Sharding(num_ranks, int(parallel.pipeline_parallel_size), num_readers, num_parts)


def num_replicas(vllm_config: Any, spec: Any) -> int:
    """Return how many tensor-parallel ranks, one behind another, surely hold the same of a layer."""
    num_ranks = int(vllm_config.parallel_config.tensor_parallel_size)
    if hasattr(spec, "shapes"):
        return num_ranks if getattr(spec, "tp_replicated", False) else 1
    if type(spec).__name__ in _LATENT_SPECS:
        return max(1, num_ranks // (getattr(spec, "max_tp_shards", None) or 1))
    num_heads = _total_heads(vllm_config)
    if num_heads is None or num_heads >= num_ranks or num_ranks % num_heads or int(spec.num_kv_heads) != 1:
        return 1
    return num_ranks // num_heads


def check_alike(vllm_config: Any, specs: Sequence[Any], *, number: int) -> None:
    """Refuse layers of one group that are cut differently: the scheduler's side sees the first of them only.

    Raises:
        LayoutError: some are replicated, and others are not.
    """
    found = {num_replicas(vllm_config, spec) for spec in specs}
    if len(found) > 1:
        raise LayoutError(
            f"layers of KV cache group {number} are the same on {sorted(found)} tensor-parallel ranks; one number for "
            f"all layers is served"
        )


def _first_spec(group: Any) -> Any:
    return specs_of(group.kv_cache_spec)[0]


def _total_heads(vllm_config: Any) -> int | None:
    """Return how many KV heads each layer has over all ranks; None if layers may differ."""
    model = vllm_config.model_config
    if getattr(vllm_config, "speculative_config", None) is not None:
        return None  # A draft's layers may have others.
    config = getattr(model, "hf_text_config", None) or model.hf_config
    if [key for key in config.to_dict() if _KEYS_OF_HEADS.search(key)] != ["num_key_value_heads"]:
        return None
    return int(model.get_total_num_kv_heads())
