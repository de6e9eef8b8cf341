"""What the index serves is the longest prefix that every row can go on from, and exactly what that needs is held."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from kvist.index.chunk_index import ChunkIndex
from kvist.index.eviction import LeastRecentlyUsed
from kvist.index.prefixes import add_tail, find_prefix
from kvist.model.coverage import Need, first_needed
from kvist.model.keys import Digest, chunk_keys
from kvist.model.layout import GroupKind
from kvist.model.rows import Row

NUM_CHUNKS = 7
DIGESTS = [Digest(bytes([number] * 16)) for number in range(NUM_CHUNKS)]
NUM_TAILS = 4
TAILS = [Digest(bytes([100 + number] * 16)) for number in range(NUM_TAILS)]

kinds = st.sampled_from(
    [Need(GroupKind.FULL), Need(GroupKind.WINDOW, 1), Need(GroupKind.WINDOW, 3), Need(GroupKind.CHUNKED, 2),
     Need(GroupKind.RECURRENT)]
)  # fmt: skip
needs = st.builds(
    lambda need, num_shards, num_readers: replace(need, num_shards=num_shards, num_readers=num_readers),
    kinds, st.integers(1, 3), st.integers(1, 3),
)  # fmt: skip


@given(st.data(), st.lists(needs, min_size=1, max_size=3))
def test_a_prefix_is_found_with_what_it_needs(data: st.DataObject, groups: list[Need]):
    """Reserved chunks do not count, no longer prefix could be served, and each row holds its chunks in order.

    A group's rows are those of its own shards, and each has as many readers as its group says.
    """
    index = ChunkIndex(LeastRecentlyUsed(), lambda _offset, _nbytes: None)
    rows = [Row(group, shard) for group, need in enumerate(groups) for shard in range(need.num_shards)]
    sealed: dict[Row, set[int]] = {}
    for row in rows:
        keys = chunk_keys(DIGESTS, group=row.group, shard=row.shard)
        marks = data.draw(st.lists(st.sampled_from("srsss-"), min_size=NUM_CHUNKS, max_size=NUM_CHUNKS))
        for key, mark in zip(keys, marks, strict=True):
            if mark != "-":
                chunk = index.reserve(key, None, 0, 1)
                assert mark == "r" or index.seal(chunk, b"")
        sealed[row] = {number for number, mark in enumerate(marks) if mark == "s"}

    def needed(row: Row, num: int) -> range:
        return range(first_needed(groups[row.group], num), num)

    num_chunks, held = find_prefix(index, DIGESTS, groups)
    servable = [num for num in range(NUM_CHUNKS + 1) if all(sealed[row].issuperset(needed(row, num)) for row in rows)]
    assert num_chunks == max(servable)
    assert not num_chunks or set(held) == set(rows)
    for row in rows if num_chunks else ():
        assert held[row].num_readers == groups[row.group].num_readers
        keys = chunk_keys(DIGESTS, group=row.group, shard=row.shard)
        assert range(held[row].first_chunk, held[row].end) == needed(row, num_chunks)
        assert [chunk.key for chunk in held[row].chunks] == [keys[number] for number in needed(row, num_chunks)]


@given(st.data(), st.lists(st.tuples(st.integers(1, 3), st.integers(1, 3)), min_size=1, max_size=3))
def test_the_longest_tail_that_all_rows_have_is_held(data: st.DataObject, groups: list[tuple[int, int]]):
    """Reserved tails do not count; each row holds the one tail behind its chunks, if there are any.

    Where no tail is there on all rows, nothing has changed.
    """
    index = ChunkIndex(LeastRecentlyUsed(), lambda _offset, _nbytes: None)
    whole = [Need(GroupKind.FULL, None, num_shards, num_readers) for num_shards, num_readers in groups]
    rows = [Row(group, shard) for group, need in enumerate(whole) for shard in range(need.num_shards)]
    digests = DIGESTS[: data.draw(st.integers(0, 2))]
    marked: dict[Row, str] = {}
    for row in rows:
        for key in chunk_keys(digests, group=row.group, shard=row.shard):
            assert index.seal(index.reserve(key, None, 0, 1), b"")
        marked[row] = "".join(data.draw(st.lists(st.sampled_from("ssssr-"), min_size=NUM_TAILS, max_size=NUM_TAILS)))
        for key, mark in zip(chunk_keys(TAILS, group=row.group, shard=row.shard), marked[row], strict=True):
            if mark != "-":
                chunk = index.reserve(key, None, 0, 1)
                assert mark == "r" or index.seal(chunk, b"")

    num_chunks, held = find_prefix(index, digests, whole)
    assert num_chunks == len(digests)
    before = dict(held)
    wanted = TAILS[: data.draw(st.integers(0, NUM_TAILS))]
    everywhere = [number for number in range(len(wanted)) if all(marked[row][number] == "s" for row in rows)]
    found = add_tail(index, held, wanted)
    assert found == max(everywhere, default=-1) + 1
    if not found:
        assert held == before
        return
    for row in rows:
        keys = chunk_keys([*digests, TAILS[found - 1]], group=row.group, shard=row.shard)
        assert [chunk.key for chunk in held[row].chunks] == keys
        assert (held[row].first_chunk, held[row].end, held[row].has_tail) == (0, num_chunks + 1, True)
        assert held[row].num_readers == whole[row.group].num_readers
