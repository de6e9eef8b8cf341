"""Kinds of engines, by their layer groups, for the scheduler of ``scheduled.py``."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from kvist.model.coverage import need_of
from kvist.model.layout import GroupKind, LayerGroup, LayerPlane
from tests.support.fake_vllm import adapter

PAGE_NBYTES = 512
CHUNK_TOKENS = 16


@dataclass(frozen=True)
class Sort:
    """What kind of engine it is."""

    groups: tuple[tuple[GroupKind, int, int | None, bool], ...]
    """(kind, block tokens, window, whether it is a draft's)"""
    num_blocks: int
    is_told: bool = True
    """The connector is told block tables (vLLM 0.29), and not what is new of them."""
    is_v2: bool = True
    """Resumed requests come as new ones."""

    def layer_groups(self) -> list[LayerGroup]:
        plane = LayerPlane(0, 0, self.num_blocks, PAGE_NBYTES, PAGE_NBYTES)
        return [
            LayerGroup(kind, block_tokens, (plane,), null_block=0, window=window)
            for kind, block_tokens, window, _ in self.groups
        ]

    def engine_groups(self) -> tuple[Any, ...]:
        make = adapter("groups").EngineGroup
        return tuple(
            make(
                number, group.kind, group.block_tokens, group.window, group.blocks_per_chunk(CHUNK_TOKENS),
                group.stored_blocks_per_chunk(CHUNK_TOKENS), need_of(group, CHUNK_TOKENS), self.groups[number][3],
            )
            for number, group in enumerate(self.layer_groups())
        )  # fmt: skip
