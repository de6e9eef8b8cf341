"""What a plan names has been checked: block ids off the wire are refused with the value that is wrong."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvist.errors import InvalidBlocks
from kvist.model.layout import GroupKind, LayerGroup, LayerPlane
from kvist.model.transfer import Direction
from kvist.transfer.plan import parse_block_ids, plan_copy, stored_block_ids, stored_blocks_to_skip

GROUP = LayerGroup(GroupKind.FULL, 4, (LayerPlane(0, 0, num_blocks=100, block_stride=16, row_nbytes=16),))
WITH_NULL = replace(GROUP, null_block=0)


def packed(*ids: int) -> bytes:
    return np.array(ids, dtype="<i4").tobytes()


@given(st.integers(1, 4), st.integers(0, 6), st.data())
def test_right_ids_come_back_as_chunks_of_blocks(blocks_per_chunk: int, num_chunks: int, data: st.DataObject):
    """Distinct ids inside the group come back in order, a row a chunk, as int64."""
    ids = data.draw(st.permutations(range(1, 100)))[: num_chunks * blocks_per_chunk]
    parsed = parse_block_ids(packed(*ids), WITH_NULL, num_chunks=num_chunks, blocks_per_chunk=blocks_per_chunk)
    assert parsed.dtype == np.int64
    assert parsed.shape == (num_chunks, blocks_per_chunk)
    assert parsed.ravel().tolist() == ids


@pytest.mark.parametrize(
    ("block_ids", "named"),
    [
        (packed(1, 2, 3, 100), r"block id 100 is outside \[0, 100\)"),
        (packed(1, 2, 3, 2**31 - 1), "block id 2147483647 is outside"),
        (packed(1, -1, 3, 4), "block id -1 is outside"),
        (packed(1, -(2**31), 100, 4), "block id -2147483648 is outside"),
        (packed(1, 7, 3, 7), "block id 7 appears 2 times"),
        (packed(5, 5, 5, 5), "block id 5 appears 4 times"),
        (packed(1, 2, 3), "3 block ids for 2 chunks of 2 blocks; 4 are needed"),
        (packed(1, 2, 3, 4, 5), "5 block ids for 2 chunks of 2 blocks; 4 are needed"),
        (b"", "0 block ids for 2 chunks"),
        (packed(1, 0, 3, 4), "block id 0 is the engine's null block"),
        (packed(1, 2, 3, 4)[:-1], "15 bytes"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_wrong_ids_are_refused_by_name(block_ids: bytes, named: str):
    """Out of range, negative, twice, too few, too many, null or ragged: each refusal names what it saw."""
    with pytest.raises(InvalidBlocks, match=named):
        parse_block_ids(block_ids, WITH_NULL, num_chunks=2, blocks_per_chunk=2)


def test_skipped_blocks_may_be_null():
    """Among the blocks that are skipped the null block is no fault, however often; behind them it is, like any twin."""
    told = {"num_chunks": 2, "blocks_per_chunk": 3, "num_skipped_blocks": 2}
    assert parse_block_ids(packed(0, 0, 1, 2, 3, 4), WITH_NULL, **told).tolist() == [[0, 0, 1], [2, 3, 4]]
    assert parse_block_ids(packed(9, 0, 1, 2, 3, 4), WITH_NULL, **told).tolist() == [[9, 0, 1], [2, 3, 4]]
    for ids, named in (
        ((0, 0, 0, 2, 3, 4), "block id 0 is the engine's null block"),
        ((0, 0, 1, 2, 0, 4), "block id 0 is the engine's null block"),
        ((5, 5, 1, 2, 3, 4), "block id 5 appears 2 times"),
        ((0, 5, 1, 2, 3, 5), "block id 5 appears 2 times"),
    ):
        with pytest.raises(InvalidBlocks, match=named):
            parse_block_ids(packed(*ids), WITH_NULL, **told)
    with pytest.raises(InvalidBlocks, match="block id 0 appears 2 times"):
        parse_block_ids(packed(0, 0, 1, 2, 3, 4), GROUP, **told)


def test_block_0_is_a_block_where_there_is_no_null_block():
    """Only what the engine declared as null is refused as such."""
    assert parse_block_ids(packed(0), GROUP, num_chunks=1, blocks_per_chunk=1).tolist() == [[0]]


@given(st.binary(max_size=80), st.integers(0, 5), st.integers(1, 3))
def test_whatever_bytes_come_the_ids_are_right_or_refused(block_ids: bytes, num_chunks: int, blocks_per_chunk: int):
    """Any bytes are ids that are distinct and inside, in the number that was asked for, or are refused."""
    try:
        parsed = parse_block_ids(block_ids, WITH_NULL, num_chunks=num_chunks, blocks_per_chunk=blocks_per_chunk)
    except InvalidBlocks:
        return
    ids = parsed.ravel().tolist()
    assert len(set(ids)) == len(ids) == num_chunks * blocks_per_chunk
    assert set(ids) <= set(range(1, 100))


@pytest.mark.parametrize("num_skipped_blocks", [-1, 2, 3])
def test_blocks_to_skip_stay_inside_the_first_chunk(num_skipped_blocks: int):
    """Some of the first chunk's blocks may be skipped, never all, never fewer than none."""
    block_ids = parse_block_ids(packed(1, 2, 3, 4), GROUP, num_chunks=2, blocks_per_chunk=2)
    slots = np.array([0, 4096])
    assert plan_copy(Direction.SCATTER, GROUP, block_ids, slots, num_skipped_blocks=1).num_skipped_blocks == 1
    with pytest.raises(InvalidBlocks, match=f"^{num_skipped_blocks} blocks to skip in a chunk of 2"):
        plan_copy(Direction.SCATTER, GROUP, block_ids, slots, num_skipped_blocks=num_skipped_blocks)


def test_a_plan_says_how_much_it_moves():
    """A plan pairs every chunk with a slot; its sizes are those of the group's blocks."""
    block_ids = parse_block_ids(packed(1, 2, 3, 4), GROUP, num_chunks=2, blocks_per_chunk=2)
    plan = plan_copy(Direction.GATHER, GROUP, block_ids, np.array([8192, 0]))
    assert (plan.num_chunks, plan.chunk_nbytes, plan.num_skipped_blocks) == (2, 32, 0)
    with pytest.raises(AssertionError):
        plan_copy(Direction.GATHER, GROUP, block_ids, np.array([0]))


def test_the_last_blocks_of_each_chunk_are_kept():
    """Of whole chunks of ids, the last ones of each are returned in order, and what was given is left as it is."""
    ids = [11, 12, 13, 14, 15, 16, 17, 18]
    given_ids = list(ids)
    assert stored_block_ids(given_ids, blocks_per_chunk=4, num_stored=2) == [13, 14, 17, 18]
    assert stored_block_ids(given_ids, blocks_per_chunk=4, num_stored=4) == ids
    assert stored_block_ids(given_ids, blocks_per_chunk=8, num_stored=1) == [18]
    assert stored_block_ids([], blocks_per_chunk=4, num_stored=2) == []
    assert given_ids == ids


@pytest.mark.parametrize(
    ("num_ids", "blocks_per_chunk", "num_stored", "named"),
    [
        (7, 4, 2, "7 block ids are no whole number of chunks of 4 blocks"),
        (8, 4, 0, "0 blocks to keep of a chunk of 4"),
        (8, 4, 5, "5 blocks to keep of a chunk of 4"),
    ],
)
def test_ragged_ids_and_empty_windows_are_refused(num_ids: int, blocks_per_chunk: int, num_stored: int, named: str):
    """A ragged tail, a window of nothing and one that is wider than a chunk are refused with the numbers."""
    with pytest.raises(InvalidBlocks, match=named):
        stored_block_ids(range(num_ids), blocks_per_chunk=blocks_per_chunk, num_stored=num_stored)


@pytest.mark.parametrize(
    ("blocks_per_chunk", "num_stored", "num_skipped", "expected"),
    [(4, 4, 3, 3), (4, 2, 0, 0), (4, 2, 2, 0), (4, 2, 3, 1), (4, 2, 4, 2), (4, 2, 5, 2), (4, 2, 7, 3), (8, 2, 15, 3)],
)
def test_skips_count_stored_blocks(blocks_per_chunk: int, num_stored: int, num_skipped: int, expected: int):
    """Blocks to skip, counted over all blocks of a prompt, become those of them that are stored."""
    found = stored_blocks_to_skip(num_skipped, blocks_per_chunk=blocks_per_chunk, num_stored=num_stored)
    assert found == expected
    ids = list(range(blocks_per_chunk * (num_skipped // blocks_per_chunk + 1)))
    stored = stored_block_ids(ids, blocks_per_chunk=blocks_per_chunk, num_stored=num_stored)
    assert found == sum(block < num_skipped for block in stored)


def test_skips_that_cannot_be_are_refused():
    """Fewer than no blocks cannot be skipped."""
    with pytest.raises(InvalidBlocks, match="-1 blocks to skip"):
        stored_blocks_to_skip(-1, blocks_per_chunk=4, num_stored=2)
