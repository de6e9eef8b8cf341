"""Copies on two streams, kernels on one and the link on the other, as many slices in flight as there are buffers.

A copy engine that is fed without a break serves nobody else: the few bytes that an engine's step sends and fetches then
wait for milliseconds. Where the link is shared, it is therefore left idle for a moment after every slice.

A kernel moves blocks from or to staging buffers, and the link moves those. Where a layout's runs are long and an engine
may be computing, the copy engine moves them between blocks and slots by itself, and a kernel only reads the blocks for
their checksums: such copies cost a decode least. One pipe copies in one direction, on one thread. The laws: a copy that
returns, or raises, has no byte in flight; a buffer is filled again only after it was drained; nothing is allocated
after a pipe is made.
"""

from __future__ import annotations

import ctypes
import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from kvist.device.base import GoOn, IsShared
from kvist.device.cuda.driver import EVENT_DISABLE_TIMING, STREAM_NON_BLOCKING, call, take
from kvist.device.cuda.tiles import TILE, ChunkTiles, Slice, cut_into_slices
from kvist.device.kernels import THREADS
from kvist.device.runs import chunk_pattern
from kvist.model.layout import Int64s
from kvist.model.transfer import BLOCKS_MAX, CHUNKS_MAX, CopyPlan, Direction, split_checksums
from kvist.units import KIB, MIB

NUM_BUFFERS: Final = 2
SLICE_NBYTES_MAX: Final = 32 * MIB
"""The link idles for some microseconds between two slices: few and large ones reach most of its speed."""
NUM_SHARED_BUFFERS: Final = 8
SHARED_NBYTES_MAX: Final = 8 * MIB
"""What the link carries between two pauses where others need it: they wait half as long for it on average."""
_PAUSE_NBYTES: Final = 64
_PADDING_NBYTES: Final = 4096
"""Behind a slice: room for the place of its first byte inside a vector."""
_FIRST_NBYTES: Final = 8 * MIB
DIRECT_NBYTES_MIN = 256 * KIB
"""Shortest run that the copy engine moves by itself: shorter ones would leave the link idle between them."""


class _SliceArguments(ctypes.Structure):
    """``struct Slice`` of ``kernels/paged_copy.cu``."""

    _fields_ = (
        ("tiles", ctypes.c_uint64), ("block_ids", ctypes.c_uint64), ("staging", ctypes.c_uint64),
        ("checksums", ctypes.c_uint64), ("start", ctypes.c_uint64), ("chunk_stride", ctypes.c_uint64),
        ("first_chunk", ctypes.c_uint32), ("blocks_per_chunk", ctypes.c_uint32),
        ("num_skipped_blocks", ctypes.c_uint32),
    )  # fmt: skip


@dataclass(frozen=True, slots=True)
class _Buffer:
    address: int
    filled: Any
    """Event: the bytes of a slice are in it."""
    drained: Any
    """Event: they are where they belong."""


@dataclass(frozen=True, slots=True)
class PlacedTiles:
    """A group's tiles on the GPU, for an engine whose allocations lie at ``bases``."""

    tiles: ChunkTiles
    address: int
    bases: tuple[int, ...]
    shortest_run_nbytes: int
    """Of the pieces in which a chunk's bytes lie."""


@dataclass(frozen=True, slots=True)
class Turns:
    """What a copy asks while it runs."""

    go_on: GoOn
    is_shared: IsShared


class Pipe:
    """Streams, staging and tables for one direction. Every call needs the context to be current."""

    def __init__(self, direction: Direction, kernels: Mapping[str, Any], slots_address: int) -> None:
        """Allocate everything that a copy needs; ``slots_address`` is where pinned slot 0 lies in this process."""
        self._direction = direction
        self._kernel = kernels[direction.value]
        self._check = kernels["check"]
        self._slots_address = slots_address
        with ExitStack() as stack:
            lowest, highest = call("cuCtxGetStreamPriorityRange")
            self.kernels, self._link = _new_stream(stack, lowest), _new_stream(stack, lowest)
            self._pauses = _new_stream(stack, highest)
            cuts = ((NUM_BUFFERS, SLICE_NBYTES_MAX), (NUM_SHARED_BUFFERS, SHARED_NBYTES_MAX))
            nbytes = max(num * (slice_nbytes + _PADDING_NBYTES) for num, slice_nbytes in cuts)
            staging = int(take(stack, "cuMemFree", "cuMemAlloc", nbytes))
            self._whole, self._shared = (
                [
                    _Buffer(staging + number * (slice_nbytes + _PADDING_NBYTES), _new_event(stack), _new_event(stack))
                    for number in range(num)
                ]
                for num, slice_nbytes in cuts
            )
            self._begun, self._left, self._resumed = _new_event(stack), _new_event(stack), _new_event(stack)
            self._scrap = int(take(stack, "cuMemFree", "cuMemAlloc", _PAUSE_NBYTES))
            self._tables = _Tables(stack)
            self._held = stack.pop_all()
        self._free: Iterator[_Buffer] = iter(())
        self._arguments = _SliceArguments(checksums=self._tables.sums_address)
        self._argument_pointers = (ctypes.c_void_p * 1)(ctypes.addressof(self._arguments))

    def close(self) -> None:
        """Give everything back; whatever of that fails, the rest is done."""
        with self._held:
            self._settle()

    def copy(
        self, plan: CopyPlan, placed: PlacedTiles, chunks: range, turns: Turns, *, spares_kernels: bool
    ) -> npt.NDArray[np.uint64]:
        """Copy chunks; return the checksum of each that was copied, which are the first of ``chunks``.

        Where kernels are to be spared, they move nothing that the copy engine can move by itself.
        """
        # What is skipped must be verified without being written, for which it has to pass through a staging buffer.
        is_skipping = plan.num_skipped_blocks > 0 and chunks.start == 0
        is_direct = spares_kernels and not is_skipping and placed.shortest_run_nbytes >= DIRECT_NBYTES_MIN
        # All are free, since no byte is in flight; the two sets share their memory.
        is_shared = turns.is_shared()
        self._free = itertools.cycle(self._shared if is_shared or is_direct else self._whole)
        try:
            if is_direct:
                num_done = self._issue_runs(plan, placed, chunks, turns)
            else:
                nbytes_max = SHARED_NBYTES_MAX if is_shared else SLICE_NBYTES_MAX
                num_done = self._issue_slices(plan, placed, chunks, turns, nbytes_max)
            self._tables.fetch_sums(num_done, self.kernels)
        finally:
            self._settle()
        return self._tables.sums[:num_done].copy()

    def _send_ids(self, plan: CopyPlan, chunks: range) -> None:
        """Bring the kernels what they all need."""
        block_ids = plan.block_ids[chunks.start : chunks.stop]
        self._arguments.blocks_per_chunk = block_ids.shape[1]
        self._arguments.num_skipped_blocks = plan.num_skipped_blocks if chunks.start == 0 else 0
        self._tables.send_ids(block_ids, self.kernels)
        self._arguments.block_ids = self._tables.ids_address

    def _issue_runs(self, plan: CopyPlan, placed: PlacedTiles, chunks: range, turns: Turns) -> int:
        """Let the copy engine move every run of every chunk, and a kernel read the blocks."""
        pattern = chunk_pattern(plan.group, int(plan.block_ids.shape[1]))
        block_ids = plan.block_ids[chunks.start : chunks.stop]
        addresses = pattern.addresses(block_ids, np.asarray(placed.bases, dtype=np.uint64)).tolist()
        offsets, sizes = pattern.slot_offsets.tolist(), pattern.run_nbytes.tolist()
        slots = (plan.slot_offsets[chunks.start : chunks.stop] + self._slots_address).tolist()
        self._arguments.tiles = placed.address
        self._send_ids(plan, chunks)
        # Whatever the kernels' stream waits for, such as the engine's own work, the link must wait for too.
        call("cuEventRecord", self._begun, self.kernels)
        call("cuStreamWaitEvent", self._link, self._begun, 0)
        for number, runs in enumerate(addresses):
            if not turns.go_on():
                return number
            buffer = self._take_buffer()  # Only its events are used: so many chunks may be under way.
            in_slot = [slots[number] + offset for offset in offsets]
            if self._direction is Direction.GATHER:
                self._launch_check(placed, number)
                self._move("cuMemcpyDtoHAsync", zip(in_slot, runs, sizes, strict=True), turns)
                call("cuEventRecord", buffer.drained, self._link)
            else:
                self._move("cuMemcpyHtoDAsync", zip(runs, in_slot, sizes, strict=True), turns)
                call("cuEventRecord", buffer.filled, self._link)
                call("cuStreamWaitEvent", self.kernels, buffer.filled, 0)
                self._launch_check(placed, number)
                call("cuEventRecord", buffer.drained, self.kernels)
        return len(addresses)

    def _issue_slices(
        self, plan: CopyPlan, placed: PlacedTiles, chunks: range, turns: Turns, nbytes_max: int
    ) -> int:  # fmt: skip
        """Let a kernel move blocks from or to staging buffers, and the link move those."""
        slots = plan.slot_offsets[chunks.start : chunks.stop].tolist()
        arguments, tiles = self._arguments, placed.tiles
        is_gather = self._direction is Direction.GATHER
        num_done, is_begun = 0, False
        first_nbytes = min(_FIRST_NBYTES, nbytes_max)
        slices = cut_into_slices(tiles, len(chunks), first_nbytes=first_nbytes, nbytes_max=nbytes_max)
        for part in slices:
            if not part.first_tile and not turns.go_on():
                break
            buffer = self._take_buffer()
            if not is_gather:
                self._fill(part, buffer, slots)
            if not is_begun:  # Behind the first bytes, which the link can bring without them; but before the second.
                self._send_ids(plan, chunks)
                is_begun = True
            if not is_gather:
                call("cuEventRecord", buffer.filled, self._link)
                call("cuStreamWaitEvent", self.kernels, buffer.filled, 0)
            arguments.tiles = placed.address + part.first_tile * TILE.itemsize
            arguments.staging = buffer.address
            arguments.start = part.start - part.padding
            arguments.chunk_stride = part.chunk_stride
            arguments.first_chunk = part.first_chunk
            self._launch(self._kernel, part.num_tiles, part.num_chunks)
            if is_gather:
                self._drain(part, buffer, slots)
            else:
                call("cuEventRecord", buffer.drained, self.kernels)
            self._pause_if(turns)
            if part.is_last:
                num_done = part.first_chunk + part.num_chunks
        return num_done

    def _move(self, name: str, runs: Iterable[tuple[int, int, int]], turns: Turns) -> None:
        """Let the link move runs: (target, source, bytes). It may rest after as many bytes as a shared slice has."""
        moved_nbytes = 0
        for target, source, nbytes in runs:
            call(name, target, source, nbytes, self._link)
            moved_nbytes += nbytes
            if moved_nbytes >= SHARED_NBYTES_MAX:
                self._pause_if(turns)
                moved_nbytes = 0
        if moved_nbytes:
            self._pause_if(turns)

    def _pause_if(self, turns: Turns) -> None:
        """Leave the link idle for a moment, if others need it, without anybody waiting for it here."""
        if turns.is_shared():
            call("cuEventRecord", self._left, self._link)
            call("cuStreamWaitEvent", self._pauses, self._left, 0)
            call("cuMemsetD8Async", self._scrap, 0, _PAUSE_NBYTES, self._pauses)
            call("cuEventRecord", self._resumed, self._pauses)
            call("cuStreamWaitEvent", self._link, self._resumed, 0)

    def _take_buffer(self) -> _Buffer:
        buffer = next(self._free)
        call("cuEventSynchronize", buffer.drained)
        return buffer

    def _fill(self, part: Slice, buffer: _Buffer, slots: Sequence[int]) -> None:
        """Let the link bring a slice."""
        for slot, staging, nbytes in _pieces(part, slots):
            call("cuMemcpyHtoDAsync", buffer.address + staging, self._slots_address + slot, nbytes, self._link)

    def _drain(self, part: Slice, buffer: _Buffer, slots: Sequence[int]) -> None:
        """Let the link wait for the kernels, and take a slice away."""
        call("cuEventRecord", buffer.filled, self.kernels)
        call("cuStreamWaitEvent", self._link, buffer.filled, 0)
        for slot, staging, nbytes in _pieces(part, slots):
            call("cuMemcpyDtoHAsync", self._slots_address + slot, buffer.address + staging, nbytes, self._link)
        call("cuEventRecord", buffer.drained, self._link)

    def _launch_check(self, placed: PlacedTiles, chunk: int) -> None:
        self._arguments.first_chunk = chunk
        self._launch(self._check, len(placed.tiles.ends), 1)

    def _launch(self, kernel: Any, num_tiles: int, num_chunks: int) -> None:
        call(
            "cuLaunchKernel", kernel, num_tiles, num_chunks, 1, THREADS, 1, 1, 0, self.kernels,
            ctypes.addressof(self._argument_pointers), 0,
        )  # fmt: skip

    def _settle(self) -> None:
        try:
            call("cuStreamSynchronize", self.kernels)
        finally:
            call("cuStreamSynchronize", self._link)


class _Tables:
    """Block ids on their way to the GPU, checksums on their way back: in pinned memory and on the GPU, side by side.

    The checksums of a copy lie in front, its block ids behind them, so that one upload clears the ones and brings the
    others.
    """

    def __init__(self, stack: ExitStack) -> None:
        """Allocate both; ``stack`` gives them back."""
        nbytes = 8 * CHUNKS_MAX + 4 * BLOCKS_MAX
        gpu = take(stack, "cuMemFree", "cuMemAlloc", nbytes)
        self._pinned = int(call("cuMemHostAlloc", nbytes, 0))
        stack.callback(call, "cuMemFreeHost", self._pinned)
        host = np.ctypeslib.as_array((ctypes.c_uint8 * nbytes).from_address(self._pinned))
        self._words = host.view("<i4")
        self.sums = host.view("<u8")
        """Valid when ``fetch_sums`` has landed, until the next copy."""
        self.sums_address = int(gpu)
        self.ids_address = 0

    def send_ids(self, block_ids: Int64s, stream: Any) -> None:
        """Send a copy's block ids, ``[num_chunks, blocks_per_chunk]``, and clear its checksums."""
        start = 2 * len(block_ids)
        self._words[:start] = 0
        self._words[start : start + block_ids.size] = block_ids.reshape(-1)
        self.ids_address = self.sums_address + 4 * start
        call("cuMemcpyHtoDAsync", self.sums_address, self._pinned, 4 * (start + block_ids.size), stream)

    def fetch_sums(self, count: int, stream: Any) -> None:
        """Fetch the checksums of the first chunks."""
        if count:
            call("cuMemcpyDtoHAsync", self._pinned, self.sums_address, 8 * count, stream)


def _pieces(part: Slice, slots: Sequence[int]) -> Iterator[tuple[int, int, int]]:
    """Yield (offset from slot 0, offset in the buffer, bytes) of a slice, neighbours joined."""
    chunk = part.first_chunk
    end = part.first_chunk + part.num_chunks
    while chunk < end:
        first, slot = chunk, slots[chunk]
        while chunk + 1 < end and part.nbytes == part.chunk_stride and slots[chunk + 1] - slots[chunk] == part.nbytes:
            chunk += 1
        chunk += 1
        nbytes = (chunk - first) * part.nbytes
        yield slot + part.start, (first - part.first_chunk) * part.chunk_stride + part.padding, nbytes


def _new_stream(stack: ExitStack, priority: int) -> Any:
    return take(stack, "cuStreamDestroy", "cuStreamCreateWithPriority", STREAM_NON_BLOCKING, priority)


def _new_event(stack: ExitStack) -> Any:
    # Waiting for it spins, with the interpreter lock let go: a thread that sleeps is woken some 60 us late.
    return take(stack, "cuEventDestroy", "cuEventCreate", EVENT_DISABLE_TIMING)


def as_checksums(sums: npt.NDArray[np.uint64]) -> list[bytes]:
    """Return checksums as the index keeps them: 8 bytes each, little-endian."""
    return split_checksums(sums.astype("<u8").tobytes())


def which_match(sums: npt.NDArray[np.uint64], checksums: Sequence[bytes]) -> list[bool]:
    """Return which checksums are as expected; ``sums`` may be fewer."""
    return [found == expected for found, expected in zip(as_checksums(sums), checksums, strict=False)]
