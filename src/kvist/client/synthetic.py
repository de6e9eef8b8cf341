"""An engine without a model: KV memory as an engine has it, stored and loaded through a living daemon, and verified.

The laws: what is loaded goes into other blocks than it came from, and is compared byte for byte. Every run has keys of
its own, so that it finds nothing of others, and nothing of it is found. What it stores stays until it is evicted.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final, TypeVar

import numpy as np
import numpy.typing as npt

from kvist.client.client import Build, Client, expect
from kvist.errors import LayoutError, ProtocolError
from kvist.model.handles import HOST, MemoryHandle
from kvist.model.keys import Digest, as_tokens, chain_digests
from kvist.model.layout import GroupKind, LayerGroup, LayerPlane
from kvist.model.rows import Row, RowMemory, row_memory
from kvist.wire import messages as wire
from kvist.wire.describing import describe_memory, describe_row

_SEALS: Final = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW
_DEADLINE_S: Final = 60.0
_TOKENS_END: Final = 1 << 20

Bytes = npt.NDArray[np.uint8]
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Shape:
    """The KV of a model with one layer group, and the prompt to move."""

    num_tokens: int
    num_layers: int
    num_heads: int
    head_size: int
    element_nbytes: int
    block_tokens: int
    chunk_tokens: int

    def __post_init__(self) -> None:
        for name in self.__slots__:
            if getattr(self, name) <= 0:
                raise LayoutError(f"{name} is {getattr(self, name)}; it must be positive")
        if self.chunk_tokens % self.block_tokens:
            raise LayoutError(
                f"a chunk of {self.chunk_tokens} tokens is no whole number of blocks of {self.block_tokens}"
            )
        if self.num_tokens < self.chunk_tokens:
            raise LayoutError(f"{self.num_tokens} tokens are less than a chunk of {self.chunk_tokens}")

    @property
    def num_chunks(self) -> int:
        """Whole chunks of the prompt."""
        return self.num_tokens // self.chunk_tokens

    @property
    def blocks_per_prompt(self) -> int:
        """Blocks that the prompt's whole chunks fill."""
        return self.num_chunks * self.chunk_tokens // self.block_tokens

    @property
    def token_nbytes(self) -> int:
        """Bytes of one token over all layers."""
        return 2 * self.num_layers * self.num_heads * self.head_size * self.element_nbytes

    @property
    def nbytes(self) -> int:
        """Bytes of the prompt's whole chunks."""
        return self.num_chunks * self.chunk_tokens * self.token_nbytes


@dataclass(frozen=True, slots=True)
class Round:
    """What one store and one load took, in seconds, beside one thread that copies the same blocks."""

    store_s: float
    lookup_s: float
    load_s: float
    memcpy_s: float


class SyntheticEngine:
    """KV memory of ``[2, blocks, tokens, heads, head]`` a layer, and a session with a daemon. The owner closes it."""

    def __init__(self, socket_path: str, shape: Shape) -> None:
        """Take memory for twice the prompt and connect at the first request."""
        self.shape = shape
        self._num_blocks = 2 * shape.blocks_per_prompt
        self._rng = np.random.default_rng()
        self._root = Digest(os.urandom(16))
        nbytes = self._num_blocks * shape.block_tokens * shape.token_nbytes
        self._fd = os.memfd_create("kvist-synthetic", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        os.ftruncate(self._fd, nbytes)
        fcntl.fcntl(self._fd, fcntl.F_ADD_SEALS, _SEALS)
        mapping = mmap.mmap(self._fd, nbytes, flags=mmap.MAP_SHARED | mmap.MAP_POPULATE)
        block_nbytes = shape.block_tokens * shape.num_heads * shape.head_size * shape.element_nbytes
        self._memory: Bytes = np.frombuffer(mapping, dtype=np.uint8).reshape(
            shape.num_layers, 2, self._num_blocks, block_nbytes
        )
        # As much as a copy moves: into a smaller one a copy would be one into the processor's cache.
        self._copy: Bytes = np.ones((shape.num_layers, 2, shape.blocks_per_prompt, block_nbytes), dtype=np.uint8)
        self._held = _row(shape, self._num_blocks)
        self._client = Client(
            socket_path, engine_id=f"kvist-bench-{os.getpid()}", name="kvist bench", registrar=self._registration
        )

    def register(self) -> wire.Registered:
        """Hand the memory over.

        Raises:
            KvistError: the daemon is not there, or refuses.
        """
        return self._client.register(_DEADLINE_S)

    def rounds(self) -> Iterator[Round]:
        """Store a new prompt and load it into other blocks, again and again.

        Raises:
            KvistError: the daemon refuses, or does not keep all of the prompt.
            ProtocolError: what came back is not what was stored.
        """
        while True:
            yield self._round()

    def close(self) -> None:
        """Leave the daemon, which unmaps the memory. Idempotent."""
        self._client.close()
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def _round(self) -> Round:
        shape = self.shape
        order = self._rng.permutation(self._num_blocks).astype("<i4")
        source, target = order[: shape.blocks_per_prompt], order[shape.blocks_per_prompt :]
        self._memory[:, :, source] = self._rng.integers(0, 256, self._memory[:, :, source].shape, dtype=np.uint8)
        self._memory[:, :, target] = 0
        tokens = as_tokens(self._rng.integers(0, _TOKENS_END, shape.num_chunks * shape.chunk_tokens, dtype=np.int32))
        digests = chain_digests(self._root, tokens, shape.chunk_tokens)
        memcpy_s = self._copy_once(source)
        store_s, stored = self._timed(
            lambda number: wire.Store(number, digests, b"", source.tobytes()), wire.StoreReply
        )
        if stored.num_stored != shape.num_chunks:
            raise ProtocolError(
                f"{stored.num_stored} of {shape.num_chunks} chunks were stored ({stored.reason}); the pool may be too "
                f"small for {shape.nbytes} bytes at once, use fewer --tokens"
            )
        lookup_s, found = self._timed(lambda number: wire.Lookup(number, digests), wire.LookupReply)
        load_s, loaded = self._timed(
            lambda number: wire.Retrieve(number, found.lease, 0, target.tobytes()), wire.RetrieveReply
        )
        if loaded.failed or not self._is_equal(source, target):
            raise ProtocolError(f"chunks {loaded.failed} were not loaded as they were stored")
        return Round(store_s, lookup_s, load_s, memcpy_s)

    def _timed(self, build: Build, expected: type[T]) -> tuple[float, T]:
        began_at = time.perf_counter()
        reply = self._client.call(build, _DEADLINE_S)
        seconds = time.perf_counter() - began_at
        return seconds, expect(reply, expected)

    def _copy_once(self, blocks: npt.NDArray[np.int32]) -> float:
        """Return what one thread takes to copy the same blocks, layer by layer."""
        began_at = time.perf_counter()
        for layer, copied in zip(self._memory, self._copy, strict=True):
            for pages, target in zip(layer, copied, strict=True):
                np.take(pages, blocks, axis=0, out=target, mode="clip")
        return time.perf_counter() - began_at

    def _is_equal(self, source: npt.NDArray[np.int32], target: npt.NDArray[np.int32]) -> bool:
        return all(np.array_equal(pages[source], pages[target]) for layer in self._memory for pages in layer)

    def _registration(self, request_id: int) -> tuple[wire.Register, tuple[int, ...]]:
        memory = describe_memory([MemoryHandle(HOST, self._memory.nbytes)])
        return wire.Register(request_id, self.shape.chunk_tokens, memory, [describe_row(self._held)]), (self._fd,)


def _row(shape: Shape, num_blocks: int) -> RowMemory:
    row_nbytes = shape.head_size * shape.element_nbytes
    token_stride = shape.num_heads * row_nbytes
    block_stride = shape.block_tokens * token_stride
    planes = tuple(
        LayerPlane(
            memory=0, offset=2 * layer * num_blocks * block_stride, num_blocks=num_blocks, block_stride=block_stride,
            row_nbytes=row_nbytes, num_kv=2, kv_stride=num_blocks * block_stride, num_tokens=shape.block_tokens,
            token_stride=token_stride, num_heads=shape.num_heads, head_stride=row_nbytes,
        )
        for layer in range(shape.num_layers)
    )  # fmt: skip
    return row_memory(Row(0, 0), LayerGroup(GroupKind.FULL, shape.block_tokens, planes), shape.chunk_tokens)
