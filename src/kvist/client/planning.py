"""A request and the places of its chunks as a checked copy. Pure.

The law: whatever a daemon says, a plan stays inside its pool and names only blocks that the request names.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from kvist.errors import LayoutError
from kvist.model.layout import Int64s
from kvist.model.rows import RowMemory
from kvist.model.transfer import CHECKSUM_NBYTES, CopyPlan, Direction
from kvist.transfer.executor import Job
from kvist.transfer.plan import parse_block_ids, plan_copy
from kvist.wire import messages as wire


class Places(NamedTuple):
    """Where the chunks of a load lie in the pool, and what was found there when they were stored."""

    slots: bytes
    """int64: offset of each chunk's slot"""
    checksums: bytes
    """8 bytes for each chunk"""

    def is_order(self, order: wire.CopyOrder) -> bool:
        """Return whether an order says the same, of all chunks."""
        positions = np.arange(len(self.slots) // 8, dtype="<i4").tobytes()
        return (order.slots, order.checksums, order.positions) == (self.slots, self.checksums, positions)


def plan_load(request: wire.Retrieve, places: Places, held: RowMemory, pool_nbytes: int) -> CopyPlan:
    """Return the copy of all chunks of a request.

    Raises:
        LayoutError: there are fewer or more places than chunks, or not all are in the pool.
        InvalidBlocks: the request's blocks are not the row's.
    """
    slots = _slots(places.slots, held, pool_nbytes)
    _check_checksums(places.checksums, slots.size)
    if slots.size != (num_chunks := num_chunks_of(request, held)):
        raise LayoutError(f"{slots.size} slots for {num_chunks} chunks")
    block_ids = request_blocks(request, held)
    return plan_copy(Direction.SCATTER, held.group, block_ids, slots, num_skipped_blocks=request.num_skipped_blocks)


def request_blocks(request: wire.Retrieve | wire.Store, held: RowMemory) -> Int64s:
    """Return the blocks of a request, ``[num_chunks, blocks_per_chunk]``.

    Raises:
        InvalidBlocks: they are not the row's.
    """
    return parse_block_ids(
        request.block_ids, held.group, num_chunks=num_chunks_of(request, held), blocks_per_chunk=held.blocks_per_chunk,
        num_skipped_blocks=_num_skipped_blocks(request),
    )  # fmt: skip


def plan_order(
    request: wire.Retrieve | wire.Store, block_ids: Int64s, order: wire.CopyOrder, held: RowMemory, pool_nbytes: int
) -> CopyPlan:
    """Return the copy that an order asks for, of a request's ``block_ids``.

    Raises:
        LayoutError: its slots are not in the pool, or its chunks not the request's.
    """
    is_load = isinstance(request, wire.Retrieve)
    num_skipped_blocks = _num_skipped_blocks(request)
    slots = _slots(order.slots, held, pool_nbytes)
    _check_checksums(order.checksums, slots.size if is_load else 0)
    positions = np.frombuffer(order.positions, dtype="<i4")
    if positions.size != slots.size:
        raise LayoutError(f"{slots.size} slots for {positions.size} chunks")
    num_chunks = len(block_ids)
    if positions.size and not 0 <= positions.min() <= positions.max() < num_chunks:
        raise LayoutError(f"chunks [{positions.min()}, {positions.max()}] of a request for {num_chunks}")
    if num_skipped_blocks and np.flatnonzero(positions == 0).tolist() not in ([], [0]):
        raise LayoutError(f"chunk 0, of which {num_skipped_blocks} blocks are skipped, is not ordered once and first")
    return plan_copy(
        Direction.SCATTER if is_load else Direction.GATHER, held.group, block_ids[positions], slots,
        num_skipped_blocks=num_skipped_blocks if positions.size and positions[0] == 0 else 0,
    )  # fmt: skip


def reply_to(request: wire.Retrieve | wire.Store, held: RowMemory, job: Job) -> wire.RetrieveReply | wire.StoreReply:
    """Return what a copy that is over means for its request: a load has failed in every chunk that is not right."""
    if isinstance(request, wire.Store):
        return wire.StoreReply(0, job.num_done, 0, job.plan.num_chunks - job.num_done)
    num_chunks = num_chunks_of(request, held)
    right = set(job.positions[: job.num_done]) - {job.positions[chunk] for chunk in job.failed}
    failed = [] if len(right) == num_chunks else [chunk for chunk in range(num_chunks) if chunk not in right]
    return wire.RetrieveReply(0, num_chunks, failed)


def num_chunks_of(request: wire.Retrieve | wire.Store, held: RowMemory) -> int:
    """Return how many chunks a request names blocks for."""
    return len(request.block_ids) // (4 * held.blocks_per_chunk)


def _slots(packed: bytes, held: RowMemory, pool_nbytes: int) -> Int64s:
    slots = np.frombuffer(packed, dtype="<i8").astype(np.int64)
    if slots.size and not 0 <= slots.min() <= slots.max() <= pool_nbytes - held.chunk_nbytes:
        raise LayoutError(f"slots [{slots.min()}, {slots.max()}] outside a pool of {pool_nbytes} bytes")
    return slots


def _check_checksums(packed: bytes, num: int) -> None:
    if len(packed) != CHECKSUM_NBYTES * num:
        raise LayoutError(f"{len(packed)} bytes of checksums, and not {num} of {CHECKSUM_NBYTES} bytes")


def _num_skipped_blocks(request: wire.Retrieve | wire.Store) -> int:
    return request.num_skipped_blocks if isinstance(request, wire.Retrieve) else 0
