"""What tests of tiers share: chunks whose bytes say whose they are, and what comes of what was asked for."""

from __future__ import annotations

import mmap
from dataclasses import dataclass, field

from kvist.model.keys import ChunkKey
from kvist.model.owners import NOBODY, Owner
from kvist.storage.base import StoredChunk, Tier
from kvist.units import align_up
from tests.support.memory import stamp
from tests.support.waiting import wait_until


def key_of(name: str) -> ChunkKey:
    return ChunkKey(stamp(b"key " + name.encode(), 20))


def aligned(raw: bytes, slot_nbytes: int | None = None) -> memoryview:
    """Return page-aligned memory that begins with some bytes."""
    nbytes = max(len(raw), slot_nbytes or 0)
    view = memoryview(mmap.mmap(-1, align_up(max(nbytes, 1), 4096)))[:nbytes]
    view[: len(raw)] = raw
    return view


def make_chunk(
    name: str, parent: str | None = None, *, nbytes: int = 5000, slot_nbytes: int = 8192, version: int = 0,
    owner: Owner = NOBODY,
) -> tuple[StoredChunk, bytes]:  # fmt: skip
    """Return a chunk and its payload; both say name and version."""
    label = f"{name} {version}".encode()
    above = None if parent is None else key_of(parent)
    checksum = stamp(b"sum " + label, 24)
    return StoredChunk(key_of(name), above, nbytes, slot_nbytes, checksum, owner), stamp(label, nbytes)


@dataclass
class Done:
    """Collects what completions were told."""

    results: list[object] = field(default_factory=list)

    def __call__(self, result: object) -> None:
        self.results.append(result)

    def wait(self, num: int = 1) -> object:
        wait_until(lambda: len(self.results) >= num, what="a completion")
        assert len(self.results) == num, "a completion was called twice"
        return self.results[-1]


def store(tier: Tier, name: str, parent: str | None = None, owner: Owner = NOBODY, **sizes: int) -> bool:
    """Offer a chunk and wait; return whether it can be found now."""
    chunk, payload = make_chunk(name, parent, owner=owner, **sizes)
    done = Done()
    if not tier.offer(chunk, aligned(payload), done):
        return False
    return bool(done.wait())


def fetch(tier: Tier, name: str) -> tuple[StoredChunk | None, bytes]:
    """Fetch a chunk that may be found, and wait; return it with its bytes."""
    (slot_nbytes,) = tier.find([key_of(name)])
    target = aligned(b"", slot_nbytes or 8192)
    done = Done()
    tier.fetch(key_of(name), target, done)
    chunk = done.wait()
    assert chunk is None or isinstance(chunk, StoredChunk)
    return chunk, bytes(target[: chunk.nbytes]) if chunk is not None else b""


def found(tier: Tier, *names: str) -> list[bool]:
    return [slot_nbytes is not None for slot_nbytes in tier.find([key_of(name) for name in names])]
