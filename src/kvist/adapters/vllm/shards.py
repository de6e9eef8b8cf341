"""Which shards of a prefix each worker holds.

The law: both sides of the connector compute the same numbers from the configuration. A shard is one part of a group's
KV heads in one stage of the pipeline, and of its tokens where ranks of context parallelism deal these out; workers that
hold the same heads and tokens hold the same shard. Where it is not certain that they do, each has a shard of its own:
the same bytes are then kept more than once, and never taken for each other.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

from kvist.adapters.vllm.formats import row_format
from kvist.adapters.vllm.groups import EngineGroup, served_groups, specs_of
from kvist.errors import LayoutError
from kvist.model.coverage import Need

_LATENT_SPECS: Final = ("MLAAttentionSpec", "SlidingWindowMLASpec")
_KEYS_OF_HEADS: Final = re.compile(r"kv_heads|key_value_heads|block_configs|head_num|attention_other_setting|n_head_kv")


@dataclass(frozen=True, slots=True)
class Sharding:
    """How one group's KV is cut."""

    num_ranks: int
    """Tensor-parallel ones."""
    num_stages: int
    """Pipeline-parallel ones."""
    num_readers: int
    """Tensor-parallel ranks that hold the same shards."""
    num_parts: int
    """Of the heads, over all ranks."""
    num_turns: int = 1
    """Ranks, one behind another, that take turns with the tokens of the same heads."""

    @property
    def num_shards(self) -> int:
        """Of one prefix."""
        return self.num_parts * self.num_turns * self.num_stages

    @property
    def parts_per_rank(self) -> int:
        """Parts that one rank holds."""
        return self.num_parts * self._num_alike // self.num_ranks

    def shards_of(self, rank: int) -> list[int]:
        """Return the shards that a worker holds, in the order of its heads."""
        stage, place = divmod(rank % (self.num_ranks * self.num_stages), self.num_ranks)
        first = stage * self.num_parts + place // self._num_alike * self.parts_per_rank
        return [part * self.num_turns + place % self.num_turns for part in range(first, first + self.parts_per_rank)]

    @property
    def _num_alike(self) -> int:
        """Ranks, one behind another, that hold the same heads."""
        return self.num_readers * self.num_turns


@dataclass(frozen=True, slots=True)
class Cut:
    """What both sides of the connector have worked out from the configuration."""

    groups: tuple[EngineGroup, ...]
    shardings: tuple[Sharding, ...]
    """Of each group: heads may be the same on ranks that have a state each."""
    chunk_tokens: int
    is_opaque: bool
    """All blocks are kept as their kernels pack them."""

    @property
    def needs(self) -> tuple[Need, ...]:
        """What each group needs of a prefix, over all its shards."""
        return tuple(
            replace(group.need, num_shards=sharding.num_shards, num_readers=sharding.num_readers)
            for group, sharding in zip(self.groups, self.shardings, strict=True)
        )


def choose_shardings(
    vllm_config: Any, kv_cache_config: Any, groups: Sequence[EngineGroup], *, head_shards: int, is_opaque: bool
) -> tuple[Sharding, ...]:
    """Return how each group's KV is cut: into ``head_shards`` parts, or all its heads if these are fewer.

    Raises:
        LayoutError: a group cannot be cut into so many parts, or none has so many heads.
    """
    by_number = dict(served_groups(kv_cache_config))
    found = tuple(
        _choose_sharding(vllm_config, group, by_number[group.number], head_shards=head_shards, is_opaque=is_opaque)
        for group in groups
    )
    most = max(sharding.num_parts for sharding in found)
    if most < head_shards:
        raise LayoutError(f"head_shards {head_shards} is more than the {most} KV heads of any group; set it to {most}")
    return found


def num_replicas(vllm_config: Any, spec: Any) -> int:
    """Return how many tensor-parallel ranks, one behind another, surely hold the same heads of a layer."""
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


def _choose_sharding(
    vllm_config: Any, group: EngineGroup, found: Any, *, head_shards: int, is_opaque: bool
) -> Sharding:
    parallel = vllm_config.parallel_config
    num_ranks, num_stages = int(parallel.tensor_parallel_size), int(parallel.pipeline_parallel_size)
    spec = specs_of(found.kv_cache_spec)[0]
    num_alike, num_turns = num_replicas(vllm_config, spec), group.num_turns
    if num_ranks % num_alike:
        num_alike = 1
    if num_alike % num_turns:
        num_alike = num_turns = 1  # Whatever heads and tokens a rank holds, they are its own.
    num_distinct = num_ranks // num_alike
    num_parts = num_distinct
    if head_shards:
        rows = row_format(vllm_config, spec, is_opaque=is_opaque)
        num_heads = None if rows is None or rows.is_latent else rows.num_heads * num_distinct
        num_parts = min(head_shards, num_heads or head_shards)
        _check_parts(group.number, num_parts, num_distinct, num_heads, num_ranks)
    return Sharding(num_ranks, num_stages, num_alike // num_turns, num_parts, num_turns)


def _check_parts(number: int, num_parts: int, num_distinct: int, num_heads: int | None, num_ranks: int) -> None:
    if num_parts % num_distinct:
        raise LayoutError(
            f"head_shards {num_parts} is no multiple of the {num_distinct} different parts of the KV heads of KV cache "
            f"group {number} that {num_ranks} tensor-parallel ranks hold"
        )
    if num_parts == num_distinct:
        return
    if num_heads is None:
        raise LayoutError(
            f"head_shards {num_parts} would cut what a rank holds into {num_parts // num_distinct} parts, and KV cache "
            f"group {number} has no heads that can be told apart; set it to {num_distinct}, or leave it out"
        )
    if num_heads % num_parts:
        raise LayoutError(
            f"head_shards {num_parts} would cut the {num_heads} KV heads of KV cache group {number} into parts that "
            f"are not equal"
        )


def _total_heads(vllm_config: Any) -> int | None:
    """Return how many KV heads each layer has over all ranks; None if layers may differ."""
    model = vllm_config.model_config
    if getattr(vllm_config, "speculative_config", None) is not None:
        return None  # A draft's layers may have others.
    config = getattr(model, "hf_text_config", None) or model.hf_config
    if [key for key in config.to_dict() if _KEYS_OF_HEADS.search(key)] != ["num_key_value_heads"]:
        return None
    return int(model.get_total_num_kv_heads())
