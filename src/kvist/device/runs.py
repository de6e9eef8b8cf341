"""A plan as contiguous pieces, for devices that copy piece by piece. Pure arithmetic, in numpy.

The law: the runs of a chunk, one behind another, are its canonical bytes; each lies inside the plane that it came from.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kvist.model.layout import Int64s
from kvist.model.transfer import CopyPlan


@dataclass(frozen=True, slots=True)
class Runs:
    """A plan as contiguous pieces. Piece ``j`` of every chunk has the same length and place in its slot."""

    device_addresses: npt.NDArray[np.uint64]
    """shape ``[num_chunks, num_runs]``"""
    slot_offsets: Int64s
    """shape ``[num_runs]``, from the slot's start; ascending and without gaps"""
    run_nbytes: Int64s
    """shape ``[num_runs]``"""
    is_skipped: npt.NDArray[np.bool_]
    """shape ``[num_runs]``: pieces of the *first* chunk that must not be written"""


def expand(plan: CopyPlan, bases: npt.NDArray[np.uint64]) -> Runs:
    """Spell a plan out as runs, in canonical order, neighbours joined.

    ``bases`` holds the address of each registered allocation. Cost: one pass of numpy per layer plane, about 10 ns a
    run; no Python loop over blocks.
    """
    num_chunks, blocks = plan.block_ids.shape
    is_skipped_block = np.arange(blocks) < plan.num_skipped_blocks
    addresses, lengths, skipped = [], [], []
    for plane in plan.group.planes:
        inside, nbytes = plane.runs()
        # Shape [num_chunks, kv, block, run], which is the canonical order of a slot.
        offsets = plan.block_ids[:, None, :, None] * plane.block_stride + inside[None, :, None, :]
        start = bases[plane.memory] + np.uint64(plane.offset)
        addresses.append(offsets.reshape(num_chunks, -1).astype(np.uint64) + start)
        shape = (inside.shape[0], blocks, inside.shape[1])
        lengths.append(np.full(inside.size * blocks, nbytes, dtype=np.int64))
        skipped.append(np.broadcast_to(is_skipped_block[None, :, None], shape).ravel())
    return _join(np.concatenate(addresses, axis=1), np.concatenate(lengths), np.concatenate(skipped))


def _join(addresses: npt.NDArray[np.uint64], run_nbytes: Int64s, is_skipped: npt.NDArray[np.bool_]) -> Runs:
    """Join runs that follow each other in the device's memory in every chunk; in a slot they always do."""
    follows = addresses[:, :-1] + run_nbytes[:-1].astype(np.uint64) == addresses[:, 1:]
    is_joined = follows.all(axis=0) & (is_skipped[:-1] == is_skipped[1:])
    firsts = np.flatnonzero(np.concatenate([[True], ~is_joined]))
    slot_offsets = np.concatenate([[0], np.cumsum(run_nbytes)[:-1]]).astype(np.int64)
    return Runs(
        device_addresses=addresses[:, firsts],
        slot_offsets=slot_offsets[firsts],
        run_nbytes=np.add.reduceat(run_nbytes, firsts),
        is_skipped=is_skipped[firsts],
    )
