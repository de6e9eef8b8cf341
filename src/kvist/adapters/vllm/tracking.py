"""One request as the scheduler's side sees it: its keys, its lookup, its blocks.

The law: state is a function of what the engine says in this step, never of how often it has asked. A key is worked out
once; a lookup is remembered for as long as its lease surely holds, and its lease is given back by whatever ends it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from kvist.adapters.vllm.options import RequestOptions
from kvist.client.client import Pending
from kvist.model.keys import DIGEST_NBYTES, Digest, MediaItem, as_tokens, chain_digests, tail_digests
from kvist.wire.messages import LookupReply


@dataclass(slots=True, eq=False)
class Lookup:
    """One question to the daemon about one request."""

    asked: tuple[int, int]
    """Whole chunks, and tails that may follow them."""
    pending: Pending
    is_claimed: bool = False
    """Its lease belongs to a load now."""

    @property
    def reply(self) -> LookupReply | None:
        """The answer; None while there is none, or if it was no answer to a lookup."""
        return self.pending.reply if isinstance(self.pending.reply, LookupReply) else None


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

    def lose_blocks(self) -> None:
        """Forget its blocks: they are another's now, or not written yet."""
        self.tables = []
        self.num_computed_tokens = 0

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
