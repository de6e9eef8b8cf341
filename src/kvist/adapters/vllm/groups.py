"""vLLM's KV cache groups in our words, as far as both sides of the connector know them.

The law: a group's kind comes from its specification's type, never from sizes; a type that is not known is refused by
name. Both sides compute the same groups, from the configuration alone. A window that is shorter than a chunk is rounded
up to whole blocks: more is kept than the layers look at, and nothing is missing. Source: vLLM 0.24 to 0.33,
``v1/kv_cache_interface.py``, ``v1/core/kv_cache_utils.py``, ``v1/core/sched/scheduler.py``.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

from kvist.adapters.vllm.options import Options
from kvist.errors import ConfigError, LayoutError
from kvist.model.coverage import Need, need_of
from kvist.model.layout import GroupKind, LayerGroup, LayerPlane
from kvist.units import align_up

_KINDS: Final = {
    "FullAttentionSpec": GroupKind.FULL,
    "MLAAttentionSpec": GroupKind.FULL,
    "SlidingWindowSpec": GroupKind.WINDOW,
    "SlidingWindowMLASpec": GroupKind.WINDOW,
    "ChunkedLocalAttentionSpec": GroupKind.CHUNKED,
    "MambaSpec": GroupKind.RECURRENT,
}
_CHUNK_TOKENS: Final = 256
_LARGE_BLOCK_TOKENS: Final = 128
_ONE_PLANE: Final = (LayerPlane(memory=0, offset=0, num_blocks=1, block_stride=1, row_nbytes=1),)
"""Stands for the layers where only tokens and blocks are counted."""


@dataclass(frozen=True, slots=True)
class EngineGroup:
    """One of vLLM's KV cache groups.

    The daemon numbers the groups that are served by their order: needs and rows count by it.
    """

    number: int
    """Place in vLLM's tuples of block ids."""
    kind: GroupKind
    block_tokens: int
    """Tokens that a block id stands for, on all ranks that take turns with them."""
    window: int | None
    """Tokens: of a sliding window, in whole blocks where it is shorter than a chunk, or of an attention chunk."""
    blocks_per_chunk: int
    """Of the engine's blocks in one chunk, whether stored or not."""
    stored_blocks_per_chunk: int
    """How many of them are kept: the last ones."""
    need: Need
    """As on one shard with one reader."""
    is_draft: bool = False
    """Holds layers of a draft model, which may rewrite the last block while the engine decodes."""
    num_turns: int = 1
    """Ranks that take turns with the tokens of a block."""
    turn_tokens: int = 0
    """How many tokens a rank takes at its turn; 0 where none take turns."""

    @property
    def rank_block_tokens(self) -> int:
        """Tokens of a block that one rank holds."""
        return self.block_tokens // self.num_turns


@dataclass(frozen=True, slots=True)
class EngineFacts:
    """What does not change while the engine runs."""

    groups: tuple[EngineGroup, ...]
    needs: tuple[Need, ...]
    """Of each group, over all workers."""
    num_workers: int
    num_blocks: int
    held_share_max: float
    """Part of the blocks that unfinished stores may hold."""
    has_prefix_cache: bool
    """The engine itself keeps finished prompts' blocks for others."""
    is_copied_by_worker: bool = False
    """Workers copy for themselves, and can begin with what a lookup says."""

    @property
    def needs_last_token(self) -> bool:
        """A prompt must not be loaded whole: the engine would go back by a token, and a state or window does not."""
        return any(group.kind is not GroupKind.FULL for group in self.groups)


def engine_groups(vllm_config: Any, kv_cache_config: Any, chunk_tokens: int) -> tuple[EngineGroup, ...]:
    """Return the groups that are kept, in vLLM's order, in chunks of ``chunk_tokens``.

    Groups that vLLM rebuilds itself after a hit are left out.

    Raises:
        LayoutError: a group, or how it is cut over ranks, is not served; names it.
    """
    num_prefill = int(getattr(vllm_config.parallel_config, "prefill_context_parallel_size", 1))
    if num_prefill > 1:
        raise LayoutError(
            f"context parallelism of {num_prefill} ranks in prefills is not served: which rank holds a token when a "
            f"step ends is not known; start without --prefill-context-parallel-size"
        )
    return tuple(
        _describe(number, group, chunk_tokens, *_turns(vllm_config, number, group.kv_cache_spec))
        for number, group in served_groups(kv_cache_config)
    )


def num_turns(vllm_config: Any, spec: Any) -> int:
    """Return how many ranks of decode context parallelism take turns with the tokens of a group's blocks.

    Before vLLM said so of each group (``dcp_sharded``, 0.32), they did with those of full attention alone.
    """
    is_full = all(_KINDS.get(type(one).__name__) is GroupKind.FULL for one in specs_of(spec))
    is_dealt_out = getattr(spec, "dcp_sharded", is_full)
    return int(getattr(vllm_config.parallel_config, "decode_context_parallel_size", 1)) if is_dealt_out else 1


def choose_chunk_tokens(options: Options, vllm_config: Any, kv_cache_config: Any) -> int:
    """Return the chunk size for an engine: a multiple of all groups' blocks, as vLLM's own hits are.

    Without the option 256 tokens, or what comes next below it as a multiple; one such block where it has 128 tokens or
    more, since smaller chunks leave less of a prompt's end to be computed again.

    Raises:
        ConfigError: the option is no multiple of the blocks.
    """
    specs = [group.kv_cache_spec for group in kv_cache_config.kv_cache_groups]
    sizes = sorted({int(spec.block_size) * num_turns(vllm_config, spec) for spec in specs})
    block = math.lcm(*sizes)
    if options.chunk_tokens % block:
        raise ConfigError(
            f"chunk_tokens {options.chunk_tokens} is no multiple of the engine's blocks of {_spell(sizes)} tokens; set "
            f"it to {align_up(options.chunk_tokens, block)}"
        )
    if options.chunk_tokens:
        return options.chunk_tokens
    return block if block >= _LARGE_BLOCK_TOKENS else _CHUNK_TOKENS // block * block


def served_groups(kv_cache_config: Any) -> list[tuple[int, Any]]:
    """Return vLLM's groups that are kept, with their places in its tuples of block ids.

    Left out is what vLLM fills itself after a load: replicas on the accelerator (``enable_kv_transfer`` is false), the
    last tokens of a window that it computes again, and rings of tokens that are not compressed yet, which are empty
    where a hit ends (``prefix_cacheable`` is false).

    Raises:
        LayoutError: a group lies in host memory or has a role, or none is left.
    """
    served = []
    for number, group in enumerate(kv_cache_config.kv_cache_groups):
        role = getattr(group, "role", None)
        if getattr(group, "host_resident", False):
            raise LayoutError(f"KV cache group {number} lies in vLLM's own host memory, which is not served")
        if not getattr(group, "enable_kv_transfer", True) or not getattr(group.kv_cache_spec, "prefix_cacheable", True):
            continue
        if role is not None and str(getattr(role, "value", role)) != "default":
            raise LayoutError(f"KV cache group {number} has the role {role!r}, which is not served")
        served.append((number, group))
    if not served:
        raise LayoutError(f"none of {len(kv_cache_config.kv_cache_groups)} KV cache groups can be kept")
    return served


def specs_of(spec: Any) -> list[Any]:
    """Return the specifications of a group's layers; one for all, unless it says that they differ in size."""
    return list((getattr(spec, "kv_cache_specs", None) or {"": spec}).values())


def kind_of(spec: Any) -> GroupKind:
    """Return the kind of a group's specification.

    Raises:
        LayoutError: it is of none that is served; names it.
    """
    names = {type(one).__name__ for one in specs_of(spec)}
    kinds = {_KINDS.get(name) for name in names}
    if len(kinds) != 1 or None in kinds:
        raise LayoutError(f"a KV cache group of {sorted(names)}; served are groups of one kind of {sorted(_KINDS)}")
    (kind,) = kinds
    assert kind is not None
    return kind


def _describe(number: int, group: Any, chunk_tokens: int, num_turns: int, turn_tokens: int) -> EngineGroup:
    spec = group.kv_cache_spec
    kind = kind_of(spec)
    first = specs_of(spec)[0]
    block_tokens = int(spec.block_size) * num_turns
    if kind is GroupKind.RECURRENT and str(first.mamba_cache_mode) == "none":
        raise LayoutError(
            f"KV cache group {number} ({group.layer_names[0]} and others) keeps no states where blocks end; start with "
            f"--mamba-cache-mode align and with prefix caching"
        )
    window = _window_of(first, kind, block_tokens, chunk_tokens)
    layers = LayerGroup(kind, block_tokens, _ONE_PLANE, window=window)
    return EngineGroup(
        number=number,
        kind=kind,
        block_tokens=block_tokens,
        window=window,
        blocks_per_chunk=layers.blocks_per_chunk(chunk_tokens),
        stored_blocks_per_chunk=layers.stored_blocks_per_chunk(chunk_tokens),
        need=need_of(layers, chunk_tokens),
        is_draft=bool(getattr(group, "is_eagle_group", False)),
        num_turns=num_turns,
        turn_tokens=turn_tokens,
    )


def _turns(vllm_config: Any, number: int, spec: Any) -> tuple[int, int]:
    """Return how many ranks take turns with a group's tokens, and how many tokens each takes at its turn."""
    count, kind = num_turns(vllm_config, spec), kind_of(spec)
    if count == 1:
        return 1, 0
    if kind is not GroupKind.FULL:
        raise LayoutError(
            f"KV cache group {number} of kind {kind.value!r} deals its tokens out to {count} ranks (decode context "
            f"parallelism); served are those of kind 'full'"
        )
    tokens, block_tokens = int(vllm_config.parallel_config.cp_kv_cache_interleave_size), int(spec.block_size)
    if tokens < 1 or block_tokens % tokens:
        raise LayoutError(
            f"ranks that take {tokens} tokens at their turn (cp_kv_cache_interleave_size) into blocks of "
            f"{block_tokens} tokens of KV cache group {number}, which must be a multiple"
        )
    return count, tokens


def _window_of(spec: Any, kind: GroupKind, block_tokens: int, chunk_tokens: int) -> int | None:
    if kind is GroupKind.CHUNKED:
        return int(spec.attention_chunk_size)
    if kind is not GroupKind.WINDOW:
        return None
    # Drafts of several modules go back behind the window by some tokens.
    window = int(spec.sliding_window) + int(getattr(spec, "extra_retained_tokens", 0))
    return align_up(window, block_tokens) if window < chunk_tokens else window


def _spell(sizes: Sequence[int]) -> str:
    return " and ".join(map(str, sizes))
