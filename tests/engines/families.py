"""Families of models by how their layers keep KV, prompts that try each of them, and a record of computed blocks.

The law of the record: what an engine finds in a cache is, block by block, what an engine computed for the same tokens.
"""

from __future__ import annotations

import hashlib
import random
from array import array
from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, Final

from child import EngineProcess, cpu_dtype
from kvist.wire import messages as wire

NUM_TOKENS: Final = 6
LONGEST: Final = 1500
_NUM_STEMS: Final = 4
_LOADED: Final = "chunks_loaded_"


@dataclass(frozen=True, slots=True)
class Family:
    """A tiny model, made by ``tools/vllm/models.py``."""

    name: str
    kinds: frozenset[str] = frozenset({"full"})
    """The kinds of its groups of layers."""
    chunk_tokens: int = 128
    window: int = 0
    """Tokens of its window, if it has layers with one."""
    dtype: str = field(default_factory=cpu_dtype)
    unsteady_in: frozenset[str] = frozenset()
    """Element types in which rounding alone changes its later tokens when a prefill is resumed."""
    has_plain_rotation: bool = False
    """Whether positions are rotated in by vLLM's plain implementation. Its CPU kernel (0.32) confuses the positions of
    tokens at a step's beginning for queries given by heads, so that KV depends on where a prefill is resumed.
    """

    @property
    def is_steady(self) -> bool:
        """Whether a resumed prefill gives exactly the tokens of one that was computed at once."""
        return self.dtype not in self.unsteady_in

    @property
    def options(self) -> dict[str, Any]:
        """The engine's options that it needs."""
        plain = {"compilation_config": {"custom_ops": ["all", "-rotary_embedding"]}} if self.has_plain_rotation else {}
        return {"dtype": self.dtype, **plain}


_WINDOWED: Final = frozenset({"full", "window"})
_RECURRENT: Final = frozenset({"full", "recurrent"})
FAMILIES: Final = (
    Family("llama"),
    Family("qwen3"),
    Family("gemma3", _WINDOWED, window=256),
    Family("gpt_oss", _WINDOWED, window=128),
    Family("deepseek_v2", chunk_tokens=256),
    Family("deepseek_v3", chunk_tokens=256, unsteady_in=frozenset({"bfloat16"})),
    # vLLM's gated delta net computes in bfloat16 alone on CPUs.
    Family("qwen3_next", _RECURRENT, chunk_tokens=256, dtype="bfloat16"),
    Family("lfm2", _RECURRENT, has_plain_rotation=True),
)


@dataclass(frozen=True, slots=True)
class Prompts:
    """What an engine is asked."""

    first: list[list[int]]
    """Beginnings of some texts, many of which share a prefix; they end at, before and behind chunks and windows."""
    later: list[list[int]]
    """The same beginnings, from some point on another text: part of them was asked before."""

    @property
    def all(self) -> list[list[int]]:
        return self.first + self.later


def make_prompts(family: Family) -> Prompts:
    """Return 28 prompts of 100 to 1,500 tokens."""
    chance = random.Random(family.name)
    stems = [_draw(chance, LONGEST) for _ in range(_NUM_STEMS)]
    chunk, window = family.chunk_tokens, family.window or family.chunk_tokens
    first = [stem[: chance.randrange(100, LONGEST + 1)] for stem in stems for _ in range(3)]
    edges = [2 * chunk - 1, 2 * chunk, 2 * chunk + 1, 3 * chunk, 3 * chunk + window // 2, 4 * chunk + window - 1]
    edged = _draw(chance, max(edges))
    first += [edged[:end] for end in edges]
    later = []
    for at in range(10):
        text = first[at]
        shared = chance.randrange(min(chunk, len(text)), len(text) + 1)
        later.append(text[:shared] + _draw(chance, chance.randrange(100, 300)))
    return Prompts(first, later)


def _draw(chance: random.Random, count: int) -> list[int]:
    return [chance.randrange(3, 1000) for _ in range(count)]


@dataclass(slots=True)
class Ledger:
    """What engines computed for a prefix, and whether what they found in a cache was that."""

    block_tokens: list[int]
    """By group."""
    computed: dict[tuple[int, bytes], set[str]] = field(default_factory=lambda: defaultdict(set))
    found: Counter[int] = field(default_factory=Counter)
    """Blocks that came from a cache and are right, by group."""
    wrong: list[str] = field(default_factory=list)

    def enter(self, prompt: list[int], reply: dict[str, Any]) -> None:
        """Take note of an answer's blocks; hold those that its engine had not computed against the earlier ones."""
        # The last token of a prompt is always computed, into a block that may have been loaded.
        num_found = min(reply["cached"], len(prompt) - 1)
        for place, digest in reply["digests"].items():
            group, index = map(int, place.split(":"))
            end = (index + 1) * self.block_tokens[group]
            if end > len(prompt):
                continue
            key = group, hashlib.sha256(array("i", prompt[:end])).digest()
            if end > num_found:
                self.computed[key].add(digest)
            elif digest in self.computed[key]:
                self.found[group] += 1
            else:
                self.wrong.append(f"group {group}, tokens to {end} of {len(prompt)}, {num_found} from a cache")


@dataclass(frozen=True, slots=True)
class Answers:
    """One engine's answers to some prompts, in order."""

    tokens: list[list[int]]
    cached: list[int]
    """How many tokens of each prompt came from a cache, the engine's own or kvist."""


def answer_each(
    engine: EngineProcess, prompts: Iterable[list[int]], ledger: Ledger | None = None, *, is_own_kept: bool = True
) -> Answers:
    """Ask one prompt at a time, so that no answer depends on its batch; empty the engine's own cache between them."""
    answers = Answers([], [])
    for prompt in prompts:
        if not is_own_kept:
            assert engine.ask("forget")["ok"]
        reply = engine.ask("answer", prompt=prompt, num_tokens=NUM_TOKENS)
        answers.tokens.append(reply["tokens"])
        answers.cached.append(reply["cached"])
        if ledger is not None:
            ledger.enter(prompt, reply)
    return answers


def hits_by_kind(status: wire.StatusReply) -> dict[str, int]:
    """Return how many chunks the daemon gave back, by kind of group."""
    return {name.removeprefix(_LOADED): count for name, count in status.counters.items() if name.startswith(_LOADED)}
