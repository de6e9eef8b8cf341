"""Requests as a cache sees them: conversations that come back longer, and long prompts that come once."""

from __future__ import annotations

import random
from collections.abc import Container, Sequence

Prompt = Sequence[str]
"""Names of its chunks, first to last; equal names have equal names before them."""


def make_trace(seed: int, num_requests: int) -> list[Prompt]:
    """Return prompts in their order: mostly turns of conversations behind one of a few beginnings, a part one-offs."""
    chance = random.Random(seed)
    conversations: list[list[str]] = []
    trace: list[Prompt] = []
    for number in range(num_requests):
        if chance.random() < 0.2:
            trace.append([f"once {number}.{depth}" for depth in range(chance.randint(6, 14))])
            continue
        if len(conversations) < 4 or chance.random() < 0.25:
            system = chance.randrange(3)
            conversations.append([f"system {system}.{depth}" for depth in range(2 + system)])
        # Those that began last come back most often; some come back after a long time.
        conversation = conversations[-1 - min(int(chance.expovariate(0.12)), len(conversations) - 1)]
        for _ in range(chance.randint(1, 2)):
            conversation.append(f"turn {number}.{len(conversation)}")
        del conversation[14:]
        trace.append(list(conversation))
    return trace


def unbounded_hits(trace: Sequence[Prompt]) -> list[int]:
    """Return how many leading chunks of each prompt a cache without a limit has."""
    seen: set[str] = set()
    hits = []
    for prompt in trace:
        hits.append(_num_leading(prompt, seen))
        seen.update(prompt)
    return hits


def prefix_lru_hits(trace: Sequence[Prompt], capacity: int) -> list[int]:
    """Return the same of a cache of so many chunks: the prompt unused for longest goes first, from its end.

    A prompt never takes room from itself: what does not fit is not kept.
    """
    used: dict[str, tuple[int, int]] = {}
    hits = []
    for number, prompt in enumerate(trace):
        hits.append(_num_leading(prompt, used))
        for depth, chunk in enumerate(prompt):
            if chunk not in used and len(used) == capacity:
                oldest = min(used, key=used.__getitem__)
                if used[oldest][0] == number:
                    break
                del used[oldest]
            used[chunk] = number, -depth
    return hits


def plain_lru_hits(trace: Sequence[Prompt], capacity: int) -> list[int]:
    """Return the same of a cache that touches a prompt from its first chunk to its last, and so loses that first."""
    used: dict[str, int] = {}
    hits, clock = [], 0
    for prompt in trace:
        hits.append(_num_leading(prompt, used))
        for chunk in prompt:
            clock += 1
            if chunk not in used and len(used) == capacity:
                del used[min(used, key=used.__getitem__)]
            used[chunk] = clock
    return hits


def _num_leading(prompt: Prompt, there: Container[str]) -> int:
    return next((number for number, chunk in enumerate(prompt) if chunk not in there), len(prompt))
