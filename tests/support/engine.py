"""A fake engine: KV memory in a sealed memfd, a client, and prompts whose chunks carry their own stamps."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from kvist.client.client import About, Client, Pending
from kvist.model.handles import HOST, MemoryHandle
from kvist.model.keys import Namespace, as_tokens, chain_digests, root_digest, split_digests
from kvist.model.rows import Row, RowMemory, row_memory
from kvist.wire import messages as wire
from kvist.wire.describing import describe_memory, describe_namespace, describe_row
from tests.support.layouts import ChunkMap, Laid, Shape, nhd
from tests.support.memory import GUARD, SharedMemory, stamp

NAMESPACE = Namespace("model", "revision", "bfloat16", "layout", "tp1", chunk_tokens=8)
SMALL = nhd(Shape(num_layers=2, num_blocks=64, block_tokens=4, num_heads=2, row_nbytes=64))
"""Chunks of two blocks and 4096 bytes; room for 32 of them."""


def describe(laid: Laid, request_id: int, *, chunk_tokens: int, shard: int = 0) -> wire.Register:
    """Return a layout of one row as it travels, with any ``chunk_tokens``: that they fit is for the daemon to say."""
    held = row_memory(Row(0, shard), laid.group, laid.group.block_tokens)
    return describe_rows([held], laid.memory_nbytes, request_id, chunk_tokens=chunk_tokens)


def describe_rows(
    rows: Sequence[RowMemory], memory_nbytes: Sequence[int], request_id: int, *, chunk_tokens: int
) -> wire.Register:
    """Return rows in host memory as they travel."""
    memory = describe_memory([MemoryHandle(HOST, nbytes) for nbytes in memory_nbytes])
    return wire.Register(request_id, chunk_tokens, memory, [describe_row(held) for held in rows])


def packed(chunks: Sequence[Sequence[int]]) -> bytes:
    """Return block ids as they travel."""
    return np.array([block for blocks in chunks for block in blocks], dtype="<i4").tobytes()


class FakeEngine:
    """One engine process's end of a session. Blocks are ``GUARD`` unless a request has them."""

    def __init__(
        self, path: str, *, laid: Laid = SMALL, namespace: Namespace = NAMESPACE, engine_id: str = "engine",
        name: str = "kvist-engine", deadline_s: float = 30.0, is_guarded: bool = True, about: About | None = None,
    ) -> None:  # fmt: skip
        self.laid = laid
        self.namespace = namespace
        self.tenant = ""
        """Whose its chunks are."""
        self.chunk_tokens = namespace.chunk_tokens
        self.blocks_per_chunk = self.chunk_tokens // laid.group.block_tokens
        self._map: ChunkMap | None = None
        self.memory = [SharedMemory(nbytes, name=name) for nbytes in laid.memory_nbytes]
        self.free_blocks = list(range(laid.group.num_blocks))
        for memory in self.memory if is_guarded else []:
            memory.bytes[:] = GUARD
        about = about or About(describe_namespace(namespace), (wire.NeedSpec("full"),), {"engine": "fake 1"})
        self.client = Client(
            path, engine_id=engine_id, name=name, about=about, deadline_s=deadline_s, registrar=self._registration
        )

    def __enter__(self) -> FakeEngine:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self.client.close()
        for memory in self.memory:
            memory.close()

    @property
    def map(self) -> ChunkMap:
        """Where a chunk's bytes lie; worked out when it is first asked for."""
        if self._map is None:
            self._map = ChunkMap(self.laid, self.blocks_per_chunk)
        return self._map

    def digests(self, prompt: Sequence[int]) -> list[bytes]:
        """Return the digests of a prompt's whole chunks."""
        root = root_digest(self.namespace)
        return [bytes(one) for one in split_digests(chain_digests(root, as_tokens(prompt), self.chunk_tokens))]

    def content(self, digest: bytes) -> bytes:
        """Return what the chunk of this name must hold."""
        return stamp(digest, self.map.nbytes)

    def submit_store(self, prompt: Sequence[int], *, first: int = 0) -> tuple[Pending, list[list[int]]]:
        """Write a prompt's chunks from ``first`` on into blocks, and ask for them to be kept."""
        digests = self.digests(prompt)
        wanted = digests[first:]
        chunks = self.take_chunks(len(wanted))
        for blocks, digest in zip(chunks, wanted, strict=True):
            self.map.write(self.arrays, blocks, self.content(digest))
        parent = digests[first - 1] if first else b""
        tenant = self.tenant
        pending = self.client.submit(
            lambda number: wire.Store(number, b"".join(wanted), parent, packed(chunks), tenant=tenant)
        )
        return pending, chunks

    def store(self, prompt: Sequence[int], *, first: int = 0) -> wire.StoreReply:
        """Have a prompt's chunks kept, and overwrite their blocks as soon as it is answered."""
        pending, chunks = self.submit_store(prompt, first=first)
        self.client.wait(pending)
        self.give_back(chunks)
        assert isinstance(pending.reply, wire.StoreReply), pending
        return pending.reply

    def look_up(self, prompt: Sequence[int]) -> wire.LookupReply:
        reply = self.client.call(lambda number: wire.Lookup(number, b"".join(self.digests(prompt))))
        assert isinstance(reply, wire.LookupReply)
        return reply

    def num_found(self, prompt: Sequence[int]) -> int:
        """Return how many chunks of a prompt are there; nothing stays held."""
        found = self.look_up(prompt)
        self.release(found.lease)
        return found.num_chunks

    def release(self, lease: bytes) -> None:
        assert isinstance(self.client.call(lambda number: wire.Release(number, lease)), wire.Released)

    def load(self, prompt: Sequence[int], found: wire.LookupReply, *, first: int = 0) -> list[int]:
        """Load what a lookup found, from chunk ``first`` on; return which chunks of the prompt failed.

        Every other chunk has been compared, byte by byte, with what its name says.
        """
        chunks = self.take_chunks(found.num_chunks - first)
        reply = self.client.call(lambda number: wire.Retrieve(number, found.lease, first, packed(chunks)))
        assert isinstance(reply, wire.RetrieveReply)
        assert reply.num_chunks == len(chunks)
        for number, (blocks, digest) in enumerate(zip(chunks, self.digests(prompt)[first:], strict=False)):
            is_right = self.map.read(self.arrays, blocks) == self.content(digest)
            assert is_right is (number not in reply.failed), f"chunk {first + number} of {prompt}"
        self.give_back(chunks)
        return [first + number for number in reply.failed]

    @property
    def arrays(self) -> list[np.ndarray]:
        return [memory.bytes for memory in self.memory]

    def is_untouched(self) -> bool:
        """Say whether every byte is ``GUARD``: so it must be when no request has any block."""
        return all((array == GUARD).all() for array in self.arrays)

    def take_chunks(self, num: int) -> list[list[int]]:
        """Take blocks for ``num`` chunks."""
        return [[self.free_blocks.pop() for _ in range(self.blocks_per_chunk)] for _ in range(num)]

    def give_back(self, chunks: Sequence[Sequence[int]]) -> None:
        """Fill blocks with ``GUARD`` and call them free."""
        for blocks in chunks:
            self.map.write(self.arrays, blocks, bytes([GUARD]) * self.map.nbytes)
            self.free_blocks[:0] = blocks

    def _registration(self, request_id: int) -> tuple[wire.Register, list[int]]:
        message = describe(self.laid, request_id, chunk_tokens=self.chunk_tokens)
        return message, [memory.fd for memory in self.memory]
