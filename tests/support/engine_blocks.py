"""A scheduler's blocks as vLLM keeps them: references, a queue of free ones, windows that move on, states that move.

The rules are vLLM's (0.24 to 0.33, ``v1/core/block_pool.py``, ``v1/core/single_type_kv_cache_manager.py``), written
down once more in as few lines as they take: when a block is let go of decides what a connector may name.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass, field
from typing import Any

from kvist.model.layout import GroupKind


@dataclass(eq=False)
class Block:
    block_id: int
    ref_cnt: int = 0
    content: Hashable = None
    """What it is known to hold in the engine's own cache."""


class Pool:
    """Has the face of vLLM's block pool. Block 0 is the null block."""

    def __init__(self, num_blocks: int, on_taken: Callable[[int], None]) -> None:
        self.blocks = [Block(number) for number in range(num_blocks)]
        self.free = deque(self.blocks[1:])
        self.cached: dict[Hashable, Block] = {}
        self._on_taken = on_taken

    def touch(self, blocks: Iterable[Block]) -> None:
        for block in blocks:
            assert block.block_id, "the null block has no references"
            if not block.ref_cnt:
                self.free.remove(block)
            block.ref_cnt += 1

    def free_blocks(self, blocks: Iterable[Block]) -> None:
        for block in blocks:
            if block.block_id:
                block.ref_cnt -= 1
                assert block.ref_cnt >= 0
                if not block.ref_cnt:
                    self.free.append(block)

    def take(self) -> Block:
        """Return a block that nobody has; what the engine's own cache knew of it is gone."""
        block = self.free.popleft()
        if self.cached.get(block.content) is block:
            del self.cached[block.content]
        block.content = None
        block.ref_cnt = 1
        self._on_taken(block.block_id)
        return block

    def remember(self, block: Block, content: Hashable) -> None:
        """Let later requests find a block by its content."""
        if block.block_id and content not in self.cached:
            block.content = content
            self.cached[content] = block

    def forget(self) -> None:
        self.cached.clear()


@dataclass(eq=False)
class Table:
    """One request's blocks of one group."""

    group: Any
    pool: Pool
    blocks: list[Block] = field(default_factory=list)

    @property
    def ids(self) -> list[int]:
        return [block.block_id for block in self.blocks]

    def num_skipped(self, num_tokens: int) -> int:
        """Return how many blocks the next token behind ``num_tokens`` does not look at."""
        match self.group.kind:
            case GroupKind.FULL:
                skipped = 0
            case GroupKind.WINDOW:
                skipped = max(0, num_tokens - self.group.window + 1)
            case GroupKind.CHUNKED:
                skipped = num_tokens // self.group.window * self.group.window
            case GroupKind.RECURRENT:
                skipped = max(0, num_tokens - 1)
        return skipped // self.group.block_tokens

    def let_go(self, num_tokens: int) -> None:
        """Let go of what is not looked at any more."""
        null = self.pool.blocks[0]
        for at in range(min(self.num_skipped(num_tokens), len(self.blocks))):
            self.pool.free_blocks([self.blocks[at]])
            self.blocks[at] = null

    def num_missing(self, num_tokens: int) -> int:
        """Return how many blocks must be taken to have room for ``num_tokens``."""
        missing = -(-num_tokens // self.group.block_tokens) - len(self.blocks)
        return max(0, missing if self.group.kind is not GroupKind.RECURRENT else min(1, missing))

    def grow(self, num_tokens: int) -> None:
        """Take blocks for ``num_tokens``; of states, one for the last."""
        missing = -(-num_tokens // self.group.block_tokens) - len(self.blocks)
        if self.group.kind is GroupKind.RECURRENT:
            self.blocks += [self.pool.blocks[0]] * max(0, missing - 1)
            missing = min(1, missing)
        self.blocks += [self.pool.take() for _ in range(missing)]

    def adopt(self, local: list[Block], num_tokens: int) -> None:
        """Begin with what the engine has itself, null where a prefix of ``num_tokens`` does not need it."""
        assert not self.blocks
        skipped = self.num_skipped(num_tokens)
        local = local[skipped:]
        self.pool.touch([block for block in local if block.block_id])
        self.blocks = [self.pool.blocks[0]] * skipped + local

    def clear(self) -> None:
        self.pool.free_blocks(reversed(self.blocks))
        self.blocks = []
