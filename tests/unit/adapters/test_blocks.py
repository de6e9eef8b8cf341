"""What a load writes and a store reads, for every kind of group, against block tables told block by block."""

from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvist.errors import InvalidBlocks
from kvist.model.coverage import first_needed, need_of
from kvist.model.layout import GroupKind, LayerGroup, LayerPlane
from tests.support.engine_blocks import Pool, Table
from tests.support.fake_vllm import adapter

CHUNK_TOKENS = 32
FULL, WINDOW, CHUNKED, RECURRENT = GroupKind.FULL, GroupKind.WINDOW, GroupKind.CHUNKED, GroupKind.RECURRENT
GROUPS = [
    (FULL, 8, None), (FULL, 32, None), (WINDOW, 4, 8), (WINDOW, 8, 32), (WINDOW, 8, 33), (WINDOW, 4, 50),
    (WINDOW, 16, 96), (CHUNKED, 8, 96), (CHUNKED, 8, 16), (RECURRENT, 32, None), (RECURRENT, 16, None),
]  # fmt: skip


def engine_group(kind: GroupKind, block_tokens: int, window: int | None) -> Any:
    plane = LayerPlane(0, 0, 1000, 8, 8)
    group = LayerGroup(kind, block_tokens, (plane,), window=window)
    return adapter("groups").EngineGroup(
        3, kind, block_tokens, window, group.blocks_per_chunk(CHUNK_TOKENS),
        group.stored_blocks_per_chunk(CHUNK_TOKENS), need_of(group, CHUNK_TOKENS),
    )  # fmt: skip


def plan(group: Any, table: Sequence[int], *, num_chunks: int, num_local_tokens: int = 0) -> Any:
    return adapter("blocks").plan_load(
        group, table, num_chunks=num_chunks, chunk_tokens=CHUNK_TOKENS, num_local_tokens=num_local_tokens
    )


@given(st.sampled_from(GROUPS), st.integers(1, 12), st.data())
def test_a_load_writes_what_is_needed_and_not_there(sort: Any, num_chunks: int, data: st.DataObject):
    """Written is each block that there is behind the engine's own, of each chunk that is needed, as far as it is kept;
    what is not written of the first chunk comes before the rest.
    """
    group = engine_group(*sort)
    num_local = data.draw(st.integers(0, (num_chunks - 1) * CHUNK_TOKENS // group.block_tokens)) * group.block_tokens
    table = Table(group, Pool(1000, lambda _: None))
    table.adopt([table.pool.take() for _ in range(num_local // group.block_tokens)], num_chunks * CHUNK_TOKENS)
    table.grow(num_chunks * CHUNK_TOKENS)
    part = plan(group, table.ids, num_chunks=num_chunks, num_local_tokens=num_local)
    expected = [
        table.ids[at]
        for chunk in range(first_needed(group.need, num_chunks), num_chunks)
        for at in range((chunk + 1) * group.blocks_per_chunk)[-group.stored_blocks_per_chunk :]
        if at * group.block_tokens >= num_local and table.ids[at]
    ]
    if not expected:
        assert part is None
        return
    assert list(part.block_ids[part.num_skipped_blocks :]) == expected
    assert part.group == 3
    assert 0 <= part.num_skipped_blocks < group.stored_blocks_per_chunk
    assert len(part.block_ids) == (num_chunks - part.first_chunk) * group.stored_blocks_per_chunk
    assert part.first_chunk >= first_needed(group.need, num_chunks)


@pytest.mark.parametrize(
    ("sort", "table"),
    [
        ((FULL, 16, None), [0, 2, 3, 4]),
        ((FULL, 16, None), [1, 2, 0, 4]),
        ((WINDOW, 16, 64), [0, 2, 0, 4]),
        ((WINDOW, 16, 64), [0, 0, 0, 0]),
        ((WINDOW, 16, 64), [1, 2, 3]),
        ((RECURRENT, 32, None), [1, 0]),
        ((RECURRENT, 32, None), []),
    ],
)
def test_a_needed_block_that_is_not_there_is_a_fault(sort: Any, table: list[int]):
    """A hole, nothing at all, or a table that is too short is refused with its numbers: it is no load."""
    with pytest.raises(InvalidBlocks, match="block"):
        plan(engine_group(*sort), table, num_chunks=2)


def test_leading_blocks_outside_a_window_are_skipped():
    """Of a window of 50 tokens in chunks of 32, the blocks before the window are passed over, and whole chunks of them
    are not asked for.
    """
    table = [0] * 11 + list(range(1, 14))
    part = plan(engine_group(WINDOW, 4, 50), table, num_chunks=3)
    assert (part.first_chunk, part.num_skipped_blocks) == (1, 3)
    assert part.block_ids == (0, 0, 0, *range(1, 14))
    part = plan(engine_group(WINDOW, 8, 33), [0] * 8 + [1, 2, 3, 4], num_chunks=3)
    assert (part.first_chunk, part.num_skipped_blocks, part.block_ids) == (2, 0, (1, 2, 3, 4))


def test_nothing_is_loaded_where_an_attention_chunk_begins():
    """A prefix that ends where an attention chunk does needs nothing of a group of such chunks."""
    assert plan(engine_group(CHUNKED, 8, 96), [0] * 12, num_chunks=3) is None


def test_a_store_reads_whole_chunks_that_are_there():
    """The kept blocks of a chunk are read if all are there; one that was let go of spoils the chunk, and no other."""
    stored_blocks = adapter("blocks").stored_blocks
    group = engine_group(WINDOW, 4, 8)
    table = [0, 0, 0, 0, 0, 0, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16, 17, 18]
    assert stored_blocks(group, table, 0) == [7, 8]
    assert stored_blocks(group, table, 1) == [15, 16]
    assert stored_blocks(group, table, 2) is None
    assert stored_blocks(group, [*table[:6], 0, 8], 0) is None
