"""KV layouts to test with, and the oracle: where each byte of a block lies, one byte at a time.

Nothing here uses the product's arithmetic: the oracle walks ``base + block + kv + token + head`` in plain loops.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kvist.model.layout import GroupKind, LayerGroup, LayerPlane

Bytes = npt.NDArray[np.uint8]


@dataclass(frozen=True, slots=True)
class Shape:
    """What a group's chunks mean, whatever their strides."""

    num_layers: int = 2
    num_blocks: int = 6
    block_tokens: int = 4
    num_heads: int = 2
    row_nbytes: int = 8


@dataclass(frozen=True, slots=True)
class Laid:
    """A group of layers, and the allocations that it lies in."""

    group: LayerGroup
    memory_nbytes: tuple[int, ...]


def row_starts(plane: LayerPlane, block: int) -> Iterator[tuple[int, int]]:
    """Yield (kv, offset in the allocation) of one block's rows, in canonical order."""
    for kv in range(plane.num_kv):
        for token in range(plane.num_tokens):
            for head in range(plane.num_heads):
                yield (
                    kv,
                    plane.offset
                    + block * plane.block_stride
                    + kv * plane.kv_stride
                    + token * plane.token_stride
                    + head * plane.head_stride,
                )


def chunk_places(group: LayerGroup, blocks: Sequence[int]) -> list[tuple[int, int, int]]:
    """Return (allocation, offset, position of the block) of every byte of a chunk, in canonical order."""
    places = []
    for plane in group.planes:
        for wanted in range(plane.num_kv):
            for position, block in enumerate(blocks):
                for kv, start in row_starts(plane, block):
                    if kv == wanted:
                        places += [(plane.memory, start + byte, position) for byte in range(plane.row_nbytes)]
    return places


def chunk_bytes(group: LayerGroup, blocks: Sequence[int], memory: Sequence[Bytes]) -> bytes:
    """Return a chunk's canonical bytes."""
    return bytes(int(memory[number][offset]) for number, offset, _ in chunk_places(group, blocks))


def nhd(shape: Shape) -> Laid:
    """One allocation a layer, ``[block][kv][token][head]``: K and V side by side in a block."""
    token = shape.num_heads * shape.row_nbytes
    kv = shape.block_tokens * token
    return _one_allocation_a_layer(shape, block=2 * kv, kv=kv, token=token, head=shape.row_nbytes)


def kv_apart(shape: Shape) -> Laid:
    """One allocation a layer, ``[kv][block][token][head]``: all of K, then all of V."""
    token = shape.num_heads * shape.row_nbytes
    block = shape.block_tokens * token
    return _one_allocation_a_layer(shape, block=block, kv=shape.num_blocks * block, token=token, head=shape.row_nbytes)


def hnd(shape: Shape) -> Laid:
    """One allocation a layer, ``[block][kv][head][token]``."""
    head = shape.block_tokens * shape.row_nbytes
    kv = shape.num_heads * head
    return _one_allocation_a_layer(shape, block=2 * kv, kv=kv, token=shape.row_nbytes, head=head)


def block_outermost(shape: Shape) -> Laid:
    """One allocation for all layers, ``[block][layer][kv][token][head]``."""
    token = shape.num_heads * shape.row_nbytes
    kv = shape.block_tokens * token
    block = shape.num_layers * 2 * kv
    planes = tuple(
        LayerPlane(
            0, layer * 2 * kv, shape.num_blocks, block, shape.row_nbytes, 2, kv, shape.block_tokens, token,
            shape.num_heads, shape.row_nbytes,
        )
        for layer in range(shape.num_layers)
    )  # fmt: skip
    return Laid(LayerGroup(GroupKind.FULL, shape.block_tokens, planes), (shape.num_blocks * block,))


def opaque(shape: Shape) -> Laid:
    """One allocation a layer, a page a block, which only the engine understands."""
    page = 2 * shape.block_tokens * shape.num_heads * shape.row_nbytes
    planes = tuple(LayerPlane(layer, 0, shape.num_blocks, page, page) for layer in range(shape.num_layers))
    group = LayerGroup(GroupKind.FULL, shape.block_tokens, planes)
    return Laid(group, (shape.num_blocks * page,) * shape.num_layers)


SAME_BYTES = {"nhd": nhd, "kv_apart": kv_apart, "hnd": hnd, "block_outermost": block_outermost}
"""Layouts of one shape whose chunks are the same bytes."""


def _one_allocation_a_layer(shape: Shape, *, block: int, kv: int, token: int, head: int) -> Laid:
    planes = tuple(
        LayerPlane(
            layer, 0, shape.num_blocks, block, shape.row_nbytes, 2, kv, shape.block_tokens, token, shape.num_heads, head
        )
        for layer in range(shape.num_layers)
    )
    nbytes = 2 * shape.num_blocks * shape.block_tokens * shape.num_heads * shape.row_nbytes
    return Laid(LayerGroup(GroupKind.FULL, shape.block_tokens, planes), (nbytes,) * shape.num_layers)


class ChunkMap:
    """Reads and writes whole chunks of a group in an engine's memory, by the oracle's places."""

    def __init__(self, laid: Laid, blocks_per_chunk: int) -> None:
        first = chunk_places(laid.group, [0] * blocks_per_chunk)
        second = chunk_places(laid.group, [1] * blocks_per_chunk)
        self._memory = np.array([memory for memory, _, _ in first])
        self.position = np.array([position for _, _, position in first])
        """Which of the chunk's blocks each byte lies in."""
        self._offset = np.array([offset for _, offset, _ in first])
        self._stride = np.array([offset for _, offset, _ in second]) - self._offset
        self.nbytes = len(first)

    def write(self, memory: Sequence[Bytes], blocks: Sequence[int], chunk: bytes) -> None:
        """Put a chunk's canonical bytes into blocks."""
        values = np.frombuffer(chunk, dtype=np.uint8)
        for number, (mask, offsets) in enumerate(self._places(blocks, len(memory))):
            memory[number][offsets] = values[mask]

    def read(self, memory: Sequence[Bytes], blocks: Sequence[int]) -> bytes:
        """Return the canonical bytes that lie in blocks."""
        chunk = np.empty(self.nbytes, dtype=np.uint8)
        for number, (mask, offsets) in enumerate(self._places(blocks, len(memory))):
            chunk[mask] = memory[number][offsets]
        return chunk.tobytes()

    def _places(self, blocks: Sequence[int], num_memory: int) -> Iterator[tuple[Bytes, Bytes]]:
        offsets = self._offset + np.asarray(blocks)[self.position] * self._stride
        for number in range(num_memory):
            mask = self._memory == number
            yield mask, offsets[mask]
