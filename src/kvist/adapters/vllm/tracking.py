"""One request as the scheduler's side sees it: its keys, its lookup, its blocks.

The law: state is a function of what the engine says in this step, never of how often it has asked. A key is worked out
once; a lookup is remembered for as long as its lease surely holds, and its lease is given back by whatever ends it. A
request waits for a tier once, and for no longer than was said when it began to.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

from kvist.adapters.vllm.options import RequestOptions
from kvist.client.client import Pending
from kvist.model.keys import DIGEST_NBYTES, Digest, MediaItem, as_tokens, chain_digests, tail_digests
from kvist.wire.messages import LookupReply

_REPEAT_S_MIN: Final = 0.004
_REPEAT_S_MAX: Final = 0.25
"""Between two questions for what tiers are reading."""


@dataclass(slots=True, eq=False)
class Lookup:
    """One question to the daemon about one request."""

    asked: tuple[int, int]
    """Whole chunks, and tails that may follow them."""
    pending: Pending
    is_claimed: bool = False
    """Its lease belongs to a load now."""
    is_counted: bool = False
    """Of the lookups of one request the first that is answered counts, and those that are lost before it."""
    ask_again_at: float = math.inf
    """When more may have come from a tier; infinity if nobody waits for that."""

    @property
    def reply(self) -> LookupReply | None:
        """The answer; None while there is none, or if it was no answer to a lookup."""
        return self.pending.reply if isinstance(self.pending.reply, LookupReply) else None

    @property
    def is_loading(self) -> bool:
        """More is being read from a tier, as far as the answer says."""
        return self.reply is not None and self.reply.num_loading > 0


class Prefill(NamedTuple):
    """A prompt that is being computed."""

    began_at: float
    num_before: int
    """Tokens that needed no computing."""
    num_tokens: int
    """In all; the request has more when its answer has begun."""


@dataclass(slots=True, eq=False)
class Tracked:
    """One request between its arrival and its end."""

    request: Any
    options: RequestOptions
    root: Digest
    chunk_tokens: int
    media: Sequence[MediaItem]
    digests: bytearray = field(default_factory=bytearray)
    """Of all chunks that are whole so far, packed."""
    lookup: Lookup | None = None
    was_asked: bool = False
    """The daemon was asked for it: it counts the first time."""
    give_up_at: float | None = None
    """Until when it waits for what tiers are reading; None if it has not begun to."""
    prefill: Prefill | None = None
    """Its prompt, while it is being computed."""
    num_local_tokens: int = 0
    """What the engine had itself when it last asked."""
    tables: list[list[int]] = field(default_factory=list)
    """Block ids by group, where the engine tells only what is new of them."""
    num_computed_tokens: int = 0
    """After the last step that it was part of; 0 while its blocks are being loaded, or taken from it."""
    num_offered: dict[int, int] = field(default_factory=dict)
    """By group: chunks, from the first, that the daemon has, was asked to store, or will never be asked to store."""
    has_failed: bool = False
    """A load of it has failed: it is computed."""

    def note_found(self, num_chunks: int) -> None:
        """Take note of chunks that the daemon has."""
        for group, num_offered in self.num_offered.items():
            self.num_offered[group] = max(num_offered, num_chunks)

    def note_failed(self) -> None:
        """Load nothing of it any more, and offer again what was thought to be there."""
        self.has_failed = True
        self.num_offered = dict.fromkeys(self.num_offered, 0)

    @property
    def num_loading_tokens(self) -> int:
        """Tokens that the engine does not have and that can be found when tiers have been read."""
        if self.lookup is None or self.lookup.reply is None:
            return 0
        num_chunks, num_loading = self.lookup.reply.num_chunks, self.lookup.reply.num_loading
        end = (num_chunks + num_loading) * self.chunk_tokens
        return end - max(num_chunks * self.chunk_tokens, self.num_local_tokens)

    def begin_waiting(self) -> None:
        """Let a lookup that was made when the request came be repeated now, if it found that tiers are read."""
        if self.lookup is not None and self.lookup.is_loading and self.give_up_at is None:
            self.lookup.ask_again_at = self.lookup.pending.sent_at + _REPEAT_S_MIN

    def waits_for_tier(self, now: float, patience_s: float) -> bool:
        """Return whether to wait for what is being read, and say when to ask for it again; at first, for how long."""
        if self.lookup is None or self.lookup.reply is None or not self.lookup.is_loading:
            return False
        if self.give_up_at is None:
            self.give_up_at = now + patience_s
        if now >= self.give_up_at or self.num_loading_tokens < self.chunk_tokens:
            self.lookup.ask_again_at = math.inf
            return False
        # What is expected halves with each question, so that the last one comes soon after what it asks for.
        pause_s = min(max(_REPEAT_S_MIN, self.lookup.reply.loading_ms / 2e3), _REPEAT_S_MAX)
        self.lookup.ask_again_at = min(self.lookup.pending.sent_at + pause_s, self.give_up_at)
        return True

    def note_step(self, now: float, num_before: int) -> Prefill | None:
        """Take note of a step that begins behind so many tokens; return the prompt that is over by now, if one is."""
        over = self.end_prefill()
        if over is None and self.prefill is None and num_before < int(self.request.num_tokens) - 1:
            self.prefill = Prefill(now, num_before, int(self.request.num_tokens))
        return over

    def end_prefill(self) -> Prefill | None:
        """Return the prompt that was being computed and whose answer has begun since; once."""
        if self.prefill is None or int(self.request.num_tokens) <= self.prefill.num_tokens:
            return None
        over, self.prefill = self.prefill, None
        return over

    def lose_blocks(self) -> None:
        """Forget its blocks: they are another's now, or not written yet."""
        self.tables = []
        self.num_computed_tokens = 0
        self.prefill = None

    def set_blocks(self, tables: Sequence[Sequence[int]]) -> None:
        """Replace all block tables."""
        self.tables = [list(table) for table in tables]

    def add_blocks(self, tables: Sequence[Sequence[int]]) -> None:
        """Append to all block tables, if they are known."""
        for table, new in zip(self.tables, tables, strict=False):
            table.extend(new)

    def num_whole_chunks(self) -> int:
        """Return how many chunks of verified tokens there are, after hashing those that are new."""
        num_chunks = int(self.request.num_tokens) // self.chunk_tokens
        num_known = len(self.digests) // DIGEST_NBYTES
        if num_chunks > num_known:
            start = num_known * self.chunk_tokens
            tokens = as_tokens(self.request.all_token_ids[start : num_chunks * self.chunk_tokens])
            parent = self.digest(num_known - 1)
            self.digests += chain_digests(parent, tokens, self.chunk_tokens, start=start, media=self.media)
        return num_chunks

    def tails(self, num_tokens: int, block_tokens: int) -> bytes:
        """Return the digests of the tails of the first ``num_tokens``, one block and more, as they travel."""
        num_chunks = num_tokens // self.chunk_tokens
        start = num_chunks * self.chunk_tokens
        tokens = as_tokens(self.request.all_token_ids[start:num_tokens])
        return tail_digests(self.digest(num_chunks - 1), tokens, block_tokens, start=start, media=self.media)

    def digest(self, chunk: int) -> Digest:
        """Return the digest of a chunk; of the root for -1."""
        return Digest(bytes(self.packed(chunk, chunk + 1))) if chunk >= 0 else self.root

    def packed(self, first: int, end: int) -> bytes:
        """Return the digests of chunks ``[first, end)``, as they travel."""
        return bytes(self.digests[first * DIGEST_NBYTES : end * DIGEST_NBYTES])


def take_steps(all_tracked: Mapping[str, Tracked], scheduler_output: Any, *, is_told: bool) -> list[tuple[str, int]]:
    """Return (request, tokens computed when this step is over); bring block tables up to date unless ``is_told``.

    vLLM before 0.29 tells the blocks that are new. All that is said of a new or a resumed request replaces what was
    known of it: with Model Runner V2 a resumed request comes as a new one.
    """
    num_scheduled = scheduler_output.num_scheduled_tokens
    steps = []
    for new in scheduler_output.scheduled_new_reqs:
        steps.append((new.req_id, new.num_computed_tokens + num_scheduled.get(new.req_id, 0)))
        if not is_told and (tracked := all_tracked.get(new.req_id)) is not None:
            tracked.set_blocks(new.block_ids)
    cached = scheduler_output.scheduled_cached_reqs
    for request_id, block_ids, computed in zip(
        cached.req_ids, cached.new_block_ids, cached.num_computed_tokens, strict=True
    ):
        steps.append((request_id, computed + num_scheduled.get(request_id, 0)))
        if is_told or block_ids is None or (tracked := all_tracked.get(request_id)) is None:
            continue
        if request_id in cached.resumed_req_ids:
            tracked.set_blocks(block_ids)
        else:
            tracked.add_blocks(block_ids)
    return steps
