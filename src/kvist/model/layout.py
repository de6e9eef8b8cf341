"""Where a block's bytes lie inside an engine's KV memory.

Every layout is one affine formula, in bytes::

    address(block, kv, token, head) = base + offset + block * block_stride
                                           + kv * kv_stride + token * token_stride + head * head_stride

and at each address lies one *row* of ``row_nbytes`` contiguous bytes. A page whose inside only its engine
understands is the same formula with one row as long as the page. Everything is checked when a value is made: no
address of an accepted layout leaves its memory, and no two rows share a byte. After that, ``row_offsets`` is the only
question that anybody asks.

A chunk's *canonical* order is ``[layer][kv][block][token][head]``, rows one behind another, whatever the strides. Its
blocks are those that its group needs in order to go on: all of them, or the last ones only.
"""

from __future__ import annotations

import enum
import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from kvist.errors import LayoutError

Int64s = npt.NDArray[np.int64]


class GroupKind(enum.Enum):
    """What a layer group needs of a prefix in order to go on from its end."""

    FULL = "full"
    """All of it."""
    WINDOW = "window"
    """The last tokens only."""
    CHUNKED = "chunked"
    """The current attention chunk only."""
    RECURRENT = "recurrent"
    """One state, taken exactly at its end."""

    @property
    def has_window(self) -> bool:
        """Whether only what lies in a window, or in an attention chunk, is looked at."""
        return self in (GroupKind.WINDOW, GroupKind.CHUNKED)


def first_overlap(nbytes: int, steps: Iterable[tuple[int, int]]) -> tuple[int, int] | None:
    """Look for a step that is shorter than what it steps over, so that pieces of ``nbytes`` might share bytes.

    ``steps`` are counts and strides; the smaller must fit inside the larger. Returns a stride and the bytes that it
    should clear, None where no two pieces share a byte.
    """
    extent = nbytes
    for stride, count in sorted((stride, count) for count, stride in steps if count > 1):
        if stride < extent:
            return stride, extent
        extent += (count - 1) * stride
    return None


@dataclass(frozen=True, slots=True)
class LayerPlane:
    """How one layer's rows lie in one registered allocation. Sizes, offsets and strides are in bytes."""

    memory: int
    """Which of the registered allocations."""
    offset: int
    """Of block 0's first row from that allocation's start."""
    num_blocks: int
    block_stride: int
    row_nbytes: int
    num_kv: int = 1
    """2 where K and V rows lie apart, 1 where they are fused, latent or opaque."""
    kv_stride: int = 0
    num_tokens: int = 1
    """Rows along the block's tokens; 1 for an opaque page."""
    token_stride: int = 0
    num_heads: int = 1
    head_stride: int = 0

    def __post_init__(self) -> None:
        if min(self.num_blocks, self.row_nbytes, self.num_kv, self.num_tokens, self.num_heads) <= 0:
            raise LayoutError(f"counts and row_nbytes must be positive: {self}")
        if min(self.memory, self.offset, *(stride for _, stride in self._steps())) < 0:
            raise LayoutError(f"offsets and strides must not be negative: {self}")
        if (overlap := first_overlap(self.row_nbytes, self._steps())) is not None:
            raise LayoutError(f"a stride of {overlap[0]} bytes overlaps rows that span {overlap[1]}: {self}")

    @property
    def page_nbytes(self) -> int:
        """Payload bytes of one block in this layer."""
        return self.num_kv * self.num_tokens * self.num_heads * self.row_nbytes

    @property
    def end(self) -> int:
        """Offset of the first byte behind the last row of the last block."""
        return self.offset + self.row_nbytes + sum((count - 1) * stride for count, stride in self._steps())

    @property
    def page_extent_nbytes(self) -> int:
        """Bytes from the first to behind the last row of one block, gaps included."""
        return self.row_nbytes + sum((count - 1) * stride for count, stride in self._steps()[1:])

    def joined_rows(self) -> tuple[int, tuple[int, int], tuple[int, int]]:
        """Join neighbouring rows of one block's K or V to runs.

        Returns the bytes of a run, and count and stride of the two steps between runs, outer and inner, in canonical
        order; a step that is not needed has the count 1 and the stride 0.
        """
        nbytes = self.row_nbytes
        steps = [(self.num_tokens, self.token_stride), (self.num_heads, self.head_stride)]
        while steps and (steps[-1][0] == 1 or steps[-1][1] == nbytes):
            nbytes *= steps.pop()[0]
        outer, inner = [(count, stride if count > 1 else 0) for count, stride in [*steps, (1, 0), (1, 0)][:2]]
        return nbytes, outer, inner

    def runs(self) -> tuple[Int64s, int]:
        """Return where one block's contiguous runs start, and how long each is.

        Neighbouring rows are joined. Shape ``[num_kv, runs per kv]``, offsets from the block's first row, in canonical
        order.
        """
        nbytes, *steps = self.joined_rows()
        starts: Int64s = np.zeros(1, dtype=np.int64)
        for count, stride in steps:
            starts = (starts[:, None] + np.arange(count, dtype=np.int64) * stride).ravel()
        kv = np.arange(self.num_kv, dtype=np.int64) * self.kv_stride
        return kv[:, None] + starts[None, :], nbytes

    def _steps(self) -> list[tuple[int, int]]:
        return [
            (self.num_blocks, self.block_stride),
            (self.num_kv, self.kv_stride),
            (self.num_tokens, self.token_stride),
            (self.num_heads, self.head_stride),
        ]


@dataclass(frozen=True, slots=True)
class LayerGroup:
    """Layers that share a block table and hit or miss together."""

    kind: GroupKind
    block_tokens: int
    planes: tuple[LayerPlane, ...]
    null_block: int | None = None
    """A block id that stands for "no block" and is never read or written."""
    window: int | None = None
    """Tokens that a ``WINDOW`` group looks back, or tokens of one attention chunk of a ``CHUNKED`` group."""
    block_nbytes: int = field(init=False, compare=False)
    """Payload bytes of one block over all layers."""
    _hash: int = field(init=False, compare=False, repr=False)
    """Asked for with every copy, and as long to work out as the model has layers."""

    def __post_init__(self) -> None:
        if self.block_tokens <= 0 or not self.planes:
            raise LayoutError(f"a group needs layers and a block of 1 token or more, not {self.block_tokens}")
        has_window = self.window is not None and self.window > 0
        if has_window is not self.kind.has_window or (self.window is not None and not has_window):
            raise LayoutError(
                f"a group of kind {self.kind.value!r} with a window of {self.window} tokens; groups of kind 'window' "
                f"and 'chunked' have one of 1 token or more, the others have none"
            )
        counts = {plane.num_blocks for plane in self.planes}
        if len(counts) > 1:
            raise LayoutError(f"layers of one group have different numbers of blocks: {sorted(counts)}")
        for num_slots in {plane.num_tokens for plane in self.planes}:
            if self.block_tokens % num_slots:
                raise LayoutError(
                    f"a block of {self.block_tokens} tokens in {num_slots} slots, which must pack as many tokens each"
                )
        _check_apart(self.planes)
        object.__setattr__(self, "block_nbytes", sum(plane.page_nbytes for plane in self.planes))
        parts = (self.kind, self.block_tokens, self.planes, self.null_block, self.window)
        object.__setattr__(self, "_hash", hash(parts))

    def __hash__(self) -> int:  # type: ignore[explicit-override] # ``typing.override`` came with Python 3.12
        return self._hash

    @property
    def num_blocks(self) -> int:
        """Block ids are in ``[0, num_blocks)``."""
        return self.planes[0].num_blocks

    @property
    def num_rows(self) -> int:
        """Rows of one block over all layers."""
        return sum(plane.page_nbytes // plane.row_nbytes for plane in self.planes)

    def blocks_per_chunk(self, chunk_tokens: int) -> int:
        """Return how many of the engine's blocks a chunk covers.

        Raises:
            LayoutError: ``chunk_tokens`` is no multiple of the block.
        """
        blocks, rest = divmod(chunk_tokens, self.block_tokens)
        if rest or blocks < 1:
            raise LayoutError(
                f"chunk_tokens {chunk_tokens} is no multiple of the engine's block of {self.block_tokens} tokens; "
                f"set it to {max(1, blocks) * self.block_tokens} or another multiple"
            )
        return blocks

    def stored_blocks_per_chunk(self, chunk_tokens: int) -> int:
        """Return how many of a chunk's blocks are kept: its last ones, as many as the group can need of it.

        Raises:
            LayoutError: ``chunk_tokens`` is no multiple of the block, or a window that is shorter than a chunk is none.
        """
        blocks = self.blocks_per_chunk(chunk_tokens)
        if self.kind is GroupKind.RECURRENT:
            return 1
        if self.kind is not GroupKind.WINDOW or self.window is None or self.window >= chunk_tokens:
            return blocks
        stored, rest = divmod(self.window, self.block_tokens)
        if rest:
            raise LayoutError(
                f"a window of {self.window} tokens in chunks of {chunk_tokens} is no multiple of the engine's block of "
                f"{self.block_tokens} tokens; set chunk_tokens to at most {self.window}"
            )
        return stored

    def fingerprint(self, content: str) -> str:
        """Name the canonical order of this group's chunks; ``content`` says what a row holds.

        Strides, offsets and block counts do not enter: engines that differ only in these share chunks. How many tokens
        share a row does: an opaque page is a row that all tokens of its block share.
        """
        rows = [
            f"{p.num_heads}x{p.row_nbytes}/{self.block_tokens // p.num_tokens}"
            for p in self.planes
            for _ in range(p.num_kv)
        ]
        window = "" if self.window is None else f" {self.window}"
        text = f"{self.kind.value}{window}|{content}|{';'.join(rows)}"
        return hashlib.sha256(text.encode()).hexdigest()[:32]


def slice_heads(group: LayerGroup, first: int, count: int) -> LayerGroup:
    """Return a group over the same memory that has only the KV heads ``[first, first + count)``.

    Its chunks are the same bytes as those of a worker that holds only these heads.

    Raises:
        LayoutError: heads are no step in this group's memory, or there are no such heads.
    """
    counts = {plane.num_heads for plane in group.planes}
    if 1 in counts:
        raise LayoutError(
            f"heads [{first}, {first + count}) cannot be told apart from others: a layer's rows hold all heads, as in "
            f"opaque pages and latent KV"
        )
    if len(counts) > 1:
        raise LayoutError(f"layers with {sorted(counts)} heads in one group: a slice needs one number of heads")
    (num_heads,) = counts
    if not 0 <= first < first + count <= num_heads:
        raise LayoutError(f"heads [{first}, {first + count}) of {num_heads}")
    planes = tuple(
        replace(plane, offset=plane.offset + first * plane.head_stride, num_heads=count) for plane in group.planes
    )
    return replace(group, planes=planes)


@dataclass(frozen=True, slots=True)
class KVLayout:
    """The KV memory of one engine worker."""

    memory_nbytes: tuple[int, ...]
    """Size of each registered allocation."""
    groups: tuple[LayerGroup, ...]

    def __post_init__(self) -> None:
        if not self.groups or not self.memory_nbytes:
            raise LayoutError(f"{len(self.memory_nbytes)} allocations, {len(self.groups)} groups: neither may be 0")
        for plane in (plane for group in self.groups for plane in group.planes):
            if plane.memory >= len(self.memory_nbytes):
                raise LayoutError(f"a plane names allocation {plane.memory} of {len(self.memory_nbytes)}")
            if plane.end > self.memory_nbytes[plane.memory]:
                raise LayoutError(
                    f"a plane ends at byte {plane.end} of allocation {plane.memory}, which has "
                    f"{self.memory_nbytes[plane.memory]}"
                )


def _check_apart(planes: Sequence[LayerPlane]) -> None:
    """Refuse planes of one group that share a byte, or that cannot be shown not to."""
    ordered = sorted(planes, key=lambda plane: (plane.memory, plane.offset))
    if _is_one_nest(ordered):
        return
    first, end = ordered[0], ordered[0].end
    for previous, plane in pairwise(ordered):
        if plane.memory != first.memory or plane.offset >= end:
            first, end = plane, plane.end
            continue
        # Spans may interleave where the block is outermost: then each block's pages must lie apart, inside one stride.
        is_alike = plane.block_stride == first.block_stride and plane.num_blocks == first.num_blocks > 1
        is_behind = previous.offset + previous.page_extent_nbytes <= plane.offset
        is_inside = plane.offset + plane.page_extent_nbytes <= first.offset + first.block_stride
        if not (is_alike and is_behind and is_inside):
            raise LayoutError(f"two layers overlap in allocation {plane.memory}: {previous} and {plane}")
        end = max(end, plane.end)


def _is_one_nest(ordered: Sequence[LayerPlane]) -> bool:
    """Return whether planes differ by an even step of offset alone, which nests with their own steps."""
    first, step = ordered[0], ordered[1].offset - ordered[0].offset if len(ordered) > 1 else 0
    if any(replace(first, offset=first.offset + number * step) != plane for number, plane in enumerate(ordered)):
        return False
    steps = [(len(ordered), step), *first._steps()]  # noqa: SLF001 -- of the same module
    return first_overlap(first.row_nbytes, steps) is None
