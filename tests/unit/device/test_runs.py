"""The runs of a chunk, one behind another, are its canonical bytes, and lie where the layout says."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvist.device.runs import chunk_pattern, shortest_run
from tests.support.layouts import Laid, Shape, block_outermost, chunk_places, hnd, kv_apart, nhd, opaque
from tests.support.strategies import random_layouts

BASES = np.array([10**6, 2**40, 2**63], dtype=np.uint64)


@given(random_layouts(), st.data())
def test_runs_spell_out_every_byte_of_a_chunk(laid: Laid, data: st.DataObject):
    """Walked byte by byte, the runs name the addresses that plain loops over the layout name, in the same order."""
    blocks_per_chunk = data.draw(st.integers(1, 3))
    chunks = [
        data.draw(st.permutations(range(laid.group.num_blocks)))[:blocks_per_chunk]
        for _ in range(data.draw(st.integers(1, 2)))
    ]
    blocks_per_chunk = len(chunks[0])
    pattern = chunk_pattern(laid.group, blocks_per_chunk)
    addresses = pattern.addresses(np.array(chunks), BASES)
    assert addresses.dtype == np.uint64
    for blocks, starts in zip(chunks, addresses.tolist(), strict=True):
        found = [
            (start + byte, position)
            for start, position, nbytes in zip(
                starts, pattern.position.tolist(), pattern.run_nbytes.tolist(), strict=True
            )
            for byte in range(nbytes)
        ]
        assert found == [
            (int(BASES[memory]) + offset, position) for memory, offset, position in chunk_places(laid.group, blocks)
        ]


@given(random_layouts(), st.integers(1, 3))
def test_runs_fill_a_slot_without_gaps(laid: Laid, blocks_per_chunk: int):
    """Each run begins in the slot where the one before it ended; together they are the chunk."""
    pattern = chunk_pattern(laid.group, blocks_per_chunk)
    ends = np.cumsum(pattern.run_nbytes)
    assert pattern.slot_offsets.tolist() == [0, *ends[:-1].tolist()]
    assert ends[-1] == laid.group.block_nbytes * blocks_per_chunk
    assert shortest_run(laid.group, blocks_per_chunk) == pattern.run_nbytes.min()


@pytest.mark.parametrize(
    ("lay", "num_runs"),
    [(nhd, 2 * 2 * 3), (kv_apart, 2 * 2 * 3), (hnd, 2 * 2 * 3 * 8), (block_outermost, 2 * 2 * 3), (opaque, 2 * 3)],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_neighbours_are_one_run(lay, num_runs: int):
    """Rows that are neighbours in a block and in the chunk are copied together."""
    assert len(chunk_pattern(lay(Shape()).group, 3).run_nbytes) == num_runs
