"""A prefix is servable where every row can go on from its end, and the longest such prefix is what is found."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvist.errors import LayoutError
from kvist.model.coverage import Need, first_needed, need_of, servable_chunks
from kvist.model.layout import GroupKind, LayerGroup, LayerPlane
from kvist.model.rows import ROWS_MAX

PLANE = LayerPlane(0, 0, num_blocks=4, block_stride=64, row_nbytes=16)
FULL = Need(GroupKind.FULL)
RECURRENT = Need(GroupKind.RECURRENT)


def window(span: int) -> Need:
    return Need(GroupKind.WINDOW, span)


def chunked(span: int) -> Need:
    return Need(GroupKind.CHUNKED, span)


needs = st.one_of(
    st.just(FULL), st.just(RECURRENT), st.builds(window, st.integers(1, 12)), st.builds(chunked, st.integers(1, 12))
)


def needed_tokens(need: Need, num_chunks: int) -> set[int]:
    """Say which chunks a group needs in order to compute the next token, by looking at each."""
    match need.kind:
        case GroupKind.FULL:
            return set(range(num_chunks))
        case GroupKind.WINDOW:
            return {chunk for chunk in range(num_chunks) if chunk + need.span >= num_chunks}
        case GroupKind.CHUNKED:
            return {chunk for chunk in range(num_chunks) if chunk // need.span == num_chunks // need.span}
        case GroupKind.RECURRENT:
            return {chunk for chunk in range(num_chunks) if chunk == num_chunks - 1}


def presence_of(*shards: str) -> np.ndarray:
    """Return the presence of one group from its shards, such as ``0110``."""
    return np.array([[mark == "1" for mark in shard] for shard in shards])


sharded_needs = st.builds(lambda need, num_shards: replace(need, num_shards=num_shards), needs, st.integers(1, 3))


@given(st.data(), st.lists(sharded_needs, min_size=1, max_size=4), st.integers(0, 14))
def test_the_longest_servable_prefix_is_found(data: st.DataObject, groups: list[Need], num: int):
    """No longer prefix has all that its groups need on every shard of theirs, and the one that is found has."""
    presence = []
    for need in groups:
        size = need.num_shards * num
        flags = data.draw(st.lists(st.integers(0, 4), min_size=size, max_size=size))
        presence.append(np.array(flags, dtype=np.int64).reshape(need.num_shards, num) > 0)

    def is_servable(length: int) -> bool:
        return all(
            is_there[shard, chunk]
            for need, is_there in zip(groups, presence, strict=True)
            for shard in range(need.num_shards)
            for chunk in needed_tokens(need, length)
        )

    assert servable_chunks(groups, presence) == max(filter(is_servable, range(num + 1)))


@given(needs, st.integers(0, 40))
def test_what_is_needed_is_a_stretch_to_the_end(need: Need, num_chunks: int):
    """A group needs the chunks from ``first_needed`` to the end of a prefix, and no others."""
    assert set(range(first_needed(need, num_chunks), num_chunks)) == needed_tokens(need, num_chunks)


@pytest.mark.parametrize(
    ("groups", "rows", "hit", "held"),
    [
        ([FULL, window(2)], ["11111", "00011"], 5, ["11111", "00011"]),
        ([FULL, window(2)], ["11111", "00010"], 0, ["00000", "00000"]),
        ([FULL, window(1)], ["11111", "01000"], 2, ["11000", "01000"]),
        ([FULL], ["11011"], 2, ["11000"]),
        ([FULL, window(3)], ["11111", "11000"], 2, ["11000", "11000"]),
        ([window(2)], ["01111"], 5, ["00011"]),
        ([FULL, window(2)], ["11111", "00110"], 4, ["11110", "00110"]),
        ([FULL, RECURRENT], ["11111", "10100"], 3, ["11100", "00100"]),
        ([RECURRENT], ["00010"], 4, ["00010"]),
        ([chunked(2)], ["00001"], 5, ["00001"]),
        ([FULL, chunked(2)], ["1111", "0000"], 4, ["1111", "0000"]),
        ([FULL, chunked(3)], ["11111", "00010"], 4, ["11110", "00010"]),
    ],
    ids=str,
)
def test_hits_and_what_they_hold(groups: list[Need], rows: list[str], hit: int, held: list[str]):
    """Observed hits: a window jumps over holes, what is held are its last chunks, a full row ends at its first gap."""
    assert servable_chunks(groups, [presence_of(row) for row in rows]) == hit
    num_chunks = len(rows[0])
    for need, expected in zip(groups, held, strict=True):
        first = first_needed(need, hit)
        assert "0" * first + "1" * (hit - first) + "0" * (num_chunks - hit) == expected


def test_one_missing_shard_shortens_the_hit():
    """What one shard lacks, all lack: bytes of different prefixes are never served together."""
    presence = [presence_of("111", "101")]
    for need, hit in ((FULL, 1), (RECURRENT, 3), (window(2), 1)):
        assert servable_chunks([replace(need, num_shards=2)], presence) == hit


def test_each_group_has_shards_of_its_own():
    """Two shards of heads and four of states: what any of the six lacks shortens the hit, and nothing else does."""
    groups = [replace(FULL, num_shards=2), replace(RECURRENT, num_shards=4)]
    heads, states = ["1111", "1111"], ["0011", "0111", "0011", "1011"]
    assert servable_chunks(groups, [presence_of(*heads), presence_of(*states)]) == 4
    assert servable_chunks(groups, [presence_of("1111", "1110"), presence_of(*states)]) == 3
    assert servable_chunks(groups, [presence_of(*heads), presence_of(*states[:3], "1010")]) == 3
    assert servable_chunks(groups, [presence_of(*heads), presence_of(*states[:3], "1000")]) == 0


def test_nothing_is_servable_of_nothing():
    """No group and no chunk, no prefix."""
    assert servable_chunks([], []) == 0
    assert servable_chunks([FULL], [np.ones((1, 0), dtype=np.bool_)]) == 0


@pytest.mark.parametrize(
    ("kind", "tokens", "chunk_tokens", "need"),
    [
        (GroupKind.FULL, None, 256, FULL),
        (GroupKind.RECURRENT, None, 256, RECURRENT),
        (GroupKind.WINDOW, 128, 256, window(1)),
        (GroupKind.WINDOW, 256, 256, window(1)),
        (GroupKind.WINDOW, 300, 256, window(2)),
        (GroupKind.WINDOW, 1024, 256, window(4)),
        (GroupKind.CHUNKED, 8192, 256, chunked(32)),
        (GroupKind.CHUNKED, 128, 256, chunked(1)),
    ],
    ids=str,
)
def test_needs_follow_from_groups(kind: GroupKind, tokens: int | None, chunk_tokens: int, need: Need):
    """A window of tokens spans as many chunks as it touches, an attention chunk as many as it consists of."""
    group = LayerGroup(kind, 4, (PLANE,), window=tokens)
    assert need_of(group, chunk_tokens) == need
    sharded = replace(need, num_shards=2, num_readers=3)
    assert need_of(group, chunk_tokens, num_shards=2, num_readers=3) == sharded


def test_attention_chunks_that_do_not_end_with_chunks_are_refused():
    """What a group needs must be whole chunks: the refusal has both numbers and what would do."""
    group = LayerGroup(GroupKind.CHUNKED, 4, (PLANE,), window=384)
    with pytest.raises(LayoutError, match="384 tokens do not end where chunks of 256 do; set chunk_tokens"):
        need_of(group, 256)


@pytest.mark.parametrize(
    ("kind", "span"),
    [
        (GroupKind.FULL, 1), (GroupKind.RECURRENT, 1), (GroupKind.WINDOW, None), (GroupKind.WINDOW, 0),
        (GroupKind.CHUNKED, None), (GroupKind.CHUNKED, -1), (GroupKind.FULL, 0),
    ],
)  # fmt: skip
def test_needs_that_cannot_be_are_refused(kind: GroupKind, span: int | None):
    """A span goes with windows and attention chunks, and is one chunk or more."""
    with pytest.raises(LayoutError, match=rf"'{kind.value}' that needs a span of {span} chunks"):
        Need(kind, span)


@pytest.mark.parametrize(("num_shards", "num_readers"), [(0, 1), (1, 0), (-1, 1), (ROWS_MAX + 1, 1), (1, ROWS_MAX + 1)])
def test_numbers_of_shards_and_readers_are_bounded(num_shards: int, num_readers: int):
    """A group has one shard or more, each read by one worker or more, and no more than there may be rows."""
    told = rf"'full' on {num_shards} shards with {num_readers} readers each; both lie in \[1, {ROWS_MAX}\]"
    with pytest.raises(LayoutError, match=told):
        replace(FULL, num_shards=num_shards, num_readers=num_readers)
    assert replace(FULL, num_shards=ROWS_MAX, num_readers=ROWS_MAX).num_shards == ROWS_MAX
