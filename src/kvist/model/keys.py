"""Content addresses: which bytes a chunk is, independent of where they lie.

The law: two keys are equal only if everything that decides what the bytes mean is equal. A digest is a link of a
SHA-256 chain whose root names the namespace, the adapter, the salt and the tenant, and whose links name the tokens and
the media items of one chunk each; one equal digest therefore proves the whole prefix. Every field is tagged and
length-prefixed, so no two different inputs are written as the same bytes. Nothing depends on the process, the
machine, the Python version or an environment variable: golden vectors in the tests hold it.
"""

from __future__ import annotations

import array
import contextlib
import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Final, NewType

import numpy as np
import numpy.typing as npt

from kvist.errors import KeyInvalid

Digest = NewType("Digest", bytes)
"""The first 16 bytes of a SHA-256, over a prefix of tokens and all that decides their meaning."""

ChunkKey = NewType("ChunkKey", bytes)
"""``digest(16) + group(2) + shard(2)``, big-endian: flat bytes, so that millions stay cheap to hold."""

Tokens = npt.NDArray[np.int32]
"""Token ids, shape ``[n]``."""

DIGEST_NBYTES: Final = 16
FIELD_NBYTES_MAX: Final = 4096
"""Longest text in a key: model names, revisions, adapters, salts, media identifiers."""
_TOKEN_MAX: Final = 2**31 - 1
_TAIL_MARK: Final = (-1).to_bytes(4, "little", signed=True)
"""Stands where a chunk has its first token; no token is that."""


@dataclass(frozen=True, slots=True)
class Namespace:
    """Everything besides tokens, adapter, salt and tenant that decides what a chunk's bytes mean."""

    model: str
    revision: str
    """Commit, or fingerprint of the weights; ``""`` where the engine knows none."""
    dtype: str
    """Of the KV elements, with the scheme of their scales where there is one."""
    layout: str
    """Fingerprint of the canonical layout of a chunk; opaque pages name what packed them."""
    shards: str
    """How the KV is cut over ranks, such as ``tp2.pp1``."""
    chunk_tokens: int
    weights: str = ""
    """Anything more that changes the weights or their use: quantisation, overrides, an in-place update's number."""

    def __post_init__(self) -> None:
        if self.chunk_tokens <= 0:
            raise KeyInvalid(f"chunk_tokens must be positive, not {self.chunk_tokens}")
        for field in fields(self):
            _text(field.name, str(getattr(self, field.name)))


@dataclass(frozen=True, slots=True)
class MediaItem:
    """A non-text input (image, audio, embedding) that stands in the prompt at a range of token positions."""

    identifier: str
    """Content digest, as the engine gives it."""
    start: int
    """First token position that it fills."""
    num_tokens: int

    def __post_init__(self) -> None:
        _text("media identifier", self.identifier)
        if not self.identifier or self.start < 0 or self.num_tokens <= 0:
            raise KeyInvalid(f"a media item needs an identifier and a range of positions: {self}")


def root_digest(namespace: Namespace, *, adapter: str = "", salt: str = "", tenant: str = "") -> Digest:
    """Return the chain's root. No adapter, no salt and no tenant are the same as empty ones.

    A tenant's name is a part of its own, so that no salt of somebody else can stand for it.

    Raises:
        KeyInvalid: a text is longer than ``FIELD_NBYTES_MAX`` bytes.
    """
    parts = [_text("format", "kvist key 1")]
    for field in fields(namespace):
        parts += [_text("name", field.name), _text(field.name, str(getattr(namespace, field.name)))]
    parts += [_text("adapter", adapter), _text("salt", salt)]
    if tenant:
        parts.append(_text("tenant", tenant))
    return Digest(hashlib.sha256(b"".join(parts)).digest()[:DIGEST_NBYTES])


def as_tokens(tokens: Sequence[int] | npt.NDArray[np.integer]) -> Tokens:
    """Return token ids as int32, shape ``[n]``.

    Raises:
        KeyInvalid: an id is negative or above 2**31 - 1, or ``tokens`` is not one-dimensional and integral.
    """
    if isinstance(tokens, list):
        # What engines keep. Twice as fast as through numpy, which has the words for what is wrong with the others.
        with contextlib.suppress(OverflowError, TypeError):
            ids = np.frombuffer(array.array("i", tokens), dtype=np.int32)
            if not ids.size or int(ids.min()) >= 0:
                return ids.astype("<i4", copy=False)
    try:
        wide = np.asarray(tokens, dtype=None if len(tokens) else np.int64)
    except OverflowError as error:
        raise KeyInvalid(f"token ids must fit in 31 bits: {error}") from error
    if wide.ndim != 1 or wide.dtype.kind not in "iu":
        raise KeyInvalid(f"tokens must be a flat row of integers, not {wide.dtype} of shape {wide.shape}")
    if wide.size and (int(wide.min()) < 0 or int(wide.max()) > _TOKEN_MAX):
        raise KeyInvalid(f"token ids must be in [0, 2**31): found {int(wide.min())}..{int(wide.max())}")
    return wide.astype("<i4", copy=False)


def chain_digests(
    parent: Digest, tokens: Tokens, chunk_tokens: int, *, start: int = 0, media: Sequence[MediaItem] = ()
) -> bytes:
    """Hash every whole chunk of ``tokens`` onto ``parent``; a partial last chunk has no digest.

    ``tokens[0]`` stands at position ``start`` of its prompt, and ``parent`` is the digest of all before it: a root, or
    the last digest of an earlier call, so that a prompt that grows hashes only what is new. Positions of ``media`` are
    those of the prompt. Returns the digests one behind another, ``DIGEST_NBYTES`` each.
    """
    assert chunk_tokens > 0
    assert start % chunk_tokens == 0
    raw = memoryview(tokens.tobytes())
    width = chunk_tokens * 4
    chain = bytearray()
    link: bytes = parent
    for at in range(0, len(raw) - width + 1, width):
        hasher = hashlib.sha256(link)
        hasher.update(raw[at : at + width])
        first = start + at // 4
        for item in media:
            hasher.update(_place(item, first, chunk_tokens))
        link = hasher.digest()[:DIGEST_NBYTES]
        chain += link
    return bytes(chain)


def tail_digests(
    parent: Digest, tokens: Tokens, block_tokens: int, *, start: int = 0, media: Sequence[MediaItem] = ()
) -> bytes:
    """Hash the first block of ``tokens`` onto ``parent``, then the first two, and so on: the tails that may follow it.

    ``tokens[0]`` stands at position ``start``, and ``parent`` is the digest of all before it. A tail is no link of the
    chain, so what is hashed begins as no link does, and with the number of tokens. Returns the digests as
    ``chain_digests`` does; a partial last block has none.
    """
    assert block_tokens > 0
    tails = bytearray()
    for num_tokens in range(block_tokens, len(tokens) + 1, block_tokens):
        hasher = hashlib.sha256(parent + _TAIL_MARK + num_tokens.to_bytes(8, "big") + tokens[:num_tokens].tobytes())
        for item in media:
            hasher.update(_place(item, start, num_tokens))
        tails += hasher.digest()[:DIGEST_NBYTES]
    return bytes(tails)


def split_digests(chain: bytes) -> list[Digest]:
    """Cut packed digests apart.

    Raises:
        KeyInvalid: the length is no multiple of ``DIGEST_NBYTES``.
    """
    if len(chain) % DIGEST_NBYTES:
        raise KeyInvalid(f"{len(chain)} bytes are no whole number of {DIGEST_NBYTES}-byte digests")
    return [Digest(chain[at : at + DIGEST_NBYTES]) for at in range(0, len(chain), DIGEST_NBYTES)]


def chunk_keys(digests: Sequence[Digest], *, group: int, shard: int) -> list[ChunkKey]:
    """Return the address of one layer group's bytes on one shard, for each digest."""
    suffix = group.to_bytes(2, "big") + shard.to_bytes(2, "big")
    return [ChunkKey(digest + suffix) for digest in digests]


def _place(item: MediaItem, start: int, num_tokens: int) -> bytes:
    """Return what an item says about the tokens from ``start`` on; nothing if it stands elsewhere."""
    if item.start >= start + num_tokens or item.start + item.num_tokens <= start:
        return b""
    place = (item.start - start).to_bytes(8, "big", signed=True) + item.num_tokens.to_bytes(8, "big")
    return _text("media", item.identifier) + place


def _text(name: str, value: str) -> bytes:
    raw = value.encode("utf-8", "surrogatepass")
    if len(raw) > FIELD_NBYTES_MAX:
        raise KeyInvalid(f"{name} is {len(raw)} bytes long; a key takes at most {FIELD_NBYTES_MAX}")
    return len(raw).to_bytes(4, "big") + raw
