"""Layouts admit exactly what lies inside its memory and apart, and name bytes in one order whatever the strides."""

import time
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvist.errors import LayoutError
from kvist.model.handles import MemoryHandle
from kvist.model.layout import GroupKind, KVLayout, LayerGroup, LayerPlane
from tests.support.layouts import (
    SAME_BYTES,
    Laid,
    Shape,
    block_outermost,
    hnd,
    kv_apart,
    nhd,
    opaque,
    row_starts,
)
from tests.support.strategies import random_layouts


@st.composite
def nearly_right(draw: st.DrawFn) -> LayerPlane | None:
    """A plane whose strides are about as wide as they must be; None where they were refused."""
    numbers = {"memory": draw(st.integers(0, 1)), "offset": draw(st.integers(0, 20))}
    extent = numbers["row_nbytes"] = draw(st.integers(1, 4))
    for axis in draw(st.permutations(["blocks", "kv", "tokens", "heads"])):
        count = numbers[f"num_{axis}"] = 3 if axis == "blocks" else draw(st.integers(1, 3))
        stride = max(0, extent + draw(st.sampled_from([0, 0, 1, 2, -1])))
        numbers[f"{axis.removesuffix('s')}_stride"] = stride
        extent += (count - 1) * stride
    try:
        return LayerPlane(**numbers)
    except LayoutError:
        return None


accepted = nearly_right().filter(bool)


def touched(plane: LayerPlane) -> list[tuple[int, int]]:
    """Return (allocation, offset) of every byte of a plane, one by one."""
    return [
        (plane.memory, start + byte)
        for block in range(plane.num_blocks)
        for _, start in row_starts(plane, block)
        for byte in range(plane.row_nbytes)
    ]


@given(accepted)
def test_accepted_planes_are_apart_and_end_where_they_say(plane: LayerPlane):
    """No two rows of an accepted plane share a byte, and ``end`` is behind the last."""
    bytes_touched = touched(plane)
    assert len(set(bytes_touched)) == len(bytes_touched)
    assert min(offset for _, offset in bytes_touched) == plane.offset
    assert max(offset for _, offset in bytes_touched) + 1 == plane.end
    assert len(bytes_touched) == plane.num_blocks * plane.page_nbytes


@given(st.lists(accepted, min_size=1, max_size=3), st.lists(st.integers(1, 300), min_size=1, max_size=2))
def test_accepted_groups_are_apart_and_in_bounds(planes_found: list[LayerPlane], memory_nbytes: list[int]):
    """An accepted layout touches no byte twice, and none outside its memory."""
    try:
        layout = KVLayout(tuple(memory_nbytes), (LayerGroup(GroupKind.FULL, 4, tuple(planes_found)),))
    except LayoutError:
        return
    bytes_touched = [place for plane in layout.groups[0].planes for place in touched(plane)]
    assert len(set(bytes_touched)) == len(bytes_touched)
    assert all(offset < memory_nbytes[memory] for memory, offset in bytes_touched)


@given(random_layouts())
def test_layouts_that_engines_use_are_accepted(laid: Laid):
    """Whatever nesting and padding, layers apart or interleaved by block: what fits and is disjoint is accepted."""
    KVLayout(laid.memory_nbytes, (laid.group,))


@pytest.mark.parametrize("lay", [nhd, kv_apart, hnd, block_outermost, opaque], ids=lambda lay: lay.__name__)
def test_layouts_of_engines_fill_their_memory(lay):
    """The usual layouts are accepted and leave no byte over; with one byte less they are refused."""
    laid = lay(Shape())
    KVLayout(laid.memory_nbytes, (laid.group,))
    assert laid.group.num_blocks * laid.group.block_nbytes == sum(laid.memory_nbytes)
    short = (*laid.memory_nbytes[:-1], laid.memory_nbytes[-1] - 1)
    with pytest.raises(LayoutError, match=rf"ends at byte {laid.memory_nbytes[-1]} .* which has {short[-1]}"):
        KVLayout(short, (laid.group,))


@given(accepted)
def test_runs_are_rows_joined_in_canonical_order(plane: LayerPlane):
    """The runs of a block, spelled out byte by byte, are its rows in the order kv, token, head."""
    starts, nbytes = plane.runs()
    assert starts.shape[0] == plane.num_kv
    found = [(kv, int(start) + byte) for kv in range(plane.num_kv) for start in starts[kv] for byte in range(nbytes)]
    assert found == [
        (kv, start - plane.offset + byte) for kv, start in row_starts(plane, 0) for byte in range(plane.row_nbytes)
    ]


@pytest.mark.parametrize(
    ("lay", "num_runs"),
    [(nhd, 1), (kv_apart, 1), (hnd, 8), (opaque, 1)],
    ids=lambda value: getattr(value, "__name__", str(value)),
)
def test_neighbouring_rows_are_one_run(lay, num_runs: int):
    """Rows that lie one behind another are copied as one."""
    starts, nbytes = lay(Shape(block_tokens=4, num_heads=2)).group.planes[0].runs()
    assert starts.shape[1] == num_runs
    assert starts.size * nbytes == lay(Shape()).group.planes[0].page_nbytes


STRIDES = ("block_stride", "kv_stride", "token_stride", "head_stride")
FIRST = LayerPlane(0, 0, num_blocks=4, block_stride=64, row_nbytes=16)


@pytest.mark.parametrize(
    "second",
    [
        replace(FIRST, offset=15),
        replace(FIRST, offset=63),
        replace(FIRST, offset=64),
        replace(FIRST, offset=49),
        replace(FIRST, offset=32, block_stride=60),
        replace(FIRST, offset=16, row_nbytes=49, block_stride=64),
        replace(FIRST, offset=207),
    ],
    ids=lambda plane: f"{plane.offset}+{plane.row_nbytes}/{plane.block_stride}",
)
def test_layers_that_share_a_byte_are_refused(second: LayerPlane):
    """Two planes of a group that overlap, or that cannot be shown not to, are refused with both."""
    assert LayerGroup(GroupKind.FULL, 4, (FIRST, replace(FIRST, offset=16)))
    for pair in ((FIRST, second), (second, FIRST)):
        with pytest.raises(LayoutError, match="two layers overlap in allocation 0"):
            LayerGroup(GroupKind.FULL, 4, pair)
    assert LayerGroup(GroupKind.FULL, 4, (FIRST, replace(second, memory=1)))


def test_heads_outside_layers():
    """Layers whose heads lie between each other's are apart if they are alike and lie at equal steps."""
    layers = [
        LayerPlane(0, 32 * at, 4, 192, 16, num_tokens=2, token_stride=16, num_heads=2, head_stride=96)
        for at in range(3)
    ]
    assert LayerGroup(GroupKind.FULL, 4, tuple(layers)).block_nbytes == 192
    for other in (replace(layers[2], offset=65), replace(layers[2], num_tokens=1), replace(layers[2], head_stride=95)):
        with pytest.raises(LayoutError, match="two layers overlap"):
            LayerGroup(GroupKind.FULL, 4, (*layers[:2], other))
    with pytest.raises(LayoutError, match="two layers overlap"):
        LayerGroup(GroupKind.FULL, 4, tuple(replace(layer, offset=16 * at) for at, layer in enumerate(layers)))


def test_many_layers_are_checked_in_no_time():
    """Thousands of interleaved layers are accepted within a second, and two that overlap are found among them."""
    num = 4096
    layers = [LayerPlane(0, 16 * number, num_blocks=4, block_stride=16 * num, row_nbytes=16) for number in range(num)]
    began = time.monotonic()
    assert LayerGroup(GroupKind.FULL, 4, tuple(layers)).block_nbytes == 16 * num
    layers[3000] = replace(layers[3000], offset=layers[3000].offset - 1)
    with pytest.raises(LayoutError, match="two layers overlap"):
        LayerGroup(GroupKind.FULL, 4, tuple(layers))
    assert time.monotonic() - began < 1


def test_one_block_pages_that_share_a_byte_are_refused():
    """With a single block, too, two layers must lie apart."""
    page = LayerPlane(0, 0, num_blocks=1, block_stride=0, row_nbytes=16)
    assert LayerGroup(GroupKind.FULL, 4, (page, replace(page, offset=16)))
    with pytest.raises(LayoutError, match="two layers overlap"):
        LayerGroup(GroupKind.FULL, 4, (page, replace(page, offset=15)))


@pytest.mark.parametrize(
    "change",
    [
        {"num_blocks": 0},
        {"row_nbytes": 0},
        {"num_kv": 0},
        {"num_tokens": -1},
        {"num_heads": 0},
        {"offset": -1},
        {"memory": -1},
        {"block_stride": -64},
        {"block_stride": 15},
        {"block_stride": 0},
        {"num_heads": 2, "head_stride": 15},
        {"num_heads": 2, "head_stride": 0},
        {"num_heads": 5, "head_stride": 16},
    ],
    ids=str,
)
def test_planes_that_cannot_be_are_refused(change: dict[str, int]):
    """Counts below one, places below zero and steps that overlap are refused with the whole plane."""
    with pytest.raises(LayoutError, match=r"LayerPlane\(memory="):
        replace(FIRST, **change)


def test_layouts_of_nothing_are_refused():
    """A group has layers of one number of blocks, a layout has groups and memory, a plane names some of it."""
    group = LayerGroup(GroupKind.FULL, 4, (FIRST,))
    with pytest.raises(LayoutError, match=r"different numbers of blocks: \[4, 5\]"):
        LayerGroup(GroupKind.FULL, 4, (FIRST, replace(FIRST, memory=1, num_blocks=5)))
    with pytest.raises(LayoutError, match="needs layers"):
        LayerGroup(GroupKind.FULL, 4, ())
    with pytest.raises(LayoutError, match="not 0"):
        LayerGroup(GroupKind.FULL, 0, (FIRST,))
    with pytest.raises(LayoutError, match="0 allocations"):
        KVLayout((), (group,))
    with pytest.raises(LayoutError, match="0 groups"):
        KVLayout((1 << 20,), ())
    with pytest.raises(LayoutError, match="allocation 1 of 1"):
        KVLayout((1 << 20,), (LayerGroup(GroupKind.FULL, 4, (replace(FIRST, memory=1),)),))
    with pytest.raises(LayoutError, match="of 0 bytes"):
        MemoryHandle("host", 0)


@given(st.integers(-40, 200), st.integers(1, 40))
def test_a_chunk_is_a_whole_number_of_blocks(chunk_tokens: int, block_tokens: int):
    """A chunk is one block or more; anything else is refused with both numbers and a number that would do."""
    group = LayerGroup(GroupKind.FULL, block_tokens, (FIRST,))
    if chunk_tokens > 0 and chunk_tokens % block_tokens == 0:
        assert group.blocks_per_chunk(chunk_tokens) * block_tokens == chunk_tokens
        return
    with pytest.raises(LayoutError, match=rf"chunk_tokens {chunk_tokens} .* {block_tokens} tokens") as refused:
        group.blocks_per_chunk(chunk_tokens)
    proposed = int(str(refused.value).split("set it to ")[1].split()[0])
    assert group.blocks_per_chunk(proposed) >= 1


@given(random_layouts(), st.data())
def test_fingerprints_ignore_where_bytes_lie(laid: Laid, data: st.DataObject):
    """Gaps, offsets, allocations and numbers of blocks leave a fingerprint alone; rows and content change it."""
    group = laid.group

    def moved(plane: LayerPlane, number: int) -> LayerPlane:
        wider = {name: getattr(plane, name) * 3 for name in STRIDES}
        return replace(plane, memory=number, offset=plane.offset + number, num_blocks=2, **wider)

    elsewhere = replace(group, planes=tuple(moved(plane, number) for number, plane in enumerate(group.planes)))
    assert elsewhere.fingerprint("bf16") == group.fingerprint("bf16")
    assert group.fingerprint("fp8") != group.fingerprint("bf16")
    number = data.draw(st.integers(0, len(group.planes) - 1))
    alone = [replace(plane, memory=place) for place, plane in enumerate(group.planes)]
    wide = {"block_stride": 10**9, "kv_stride": 10**8, "token_stride": 10**7, "head_stride": 10**6}
    alone[number] = replace(alone[number], num_heads=alone[number].num_heads + 1, **wide)
    assert replace(group, planes=tuple(alone)).fingerprint("bf16") != group.fingerprint("bf16")


def test_fingerprints_are_those_of_the_bytes():
    """Layouts whose chunks are the same bytes have one fingerprint; an opaque page, another kind or order has its own.

    A page that only its engine understands is never taken for one of another number of tokens.
    """
    same = {lay(Shape()).group.fingerprint("bf16") for lay in SAME_BYTES.values()}
    assert len(same) == 1
    assert nhd(Shape(block_tokens=8)).group.fingerprint("bf16") in same
    group = nhd(Shape()).group
    others = [
        opaque(Shape()).group,
        opaque(Shape(block_tokens=2, row_nbytes=16)).group,
        replace(group, kind=GroupKind.WINDOW, window=8),
        nhd(Shape(num_layers=3)).group,
        nhd(Shape(num_heads=1, row_nbytes=16)).group,
        nhd(Shape(num_heads=4, row_nbytes=4)).group,
    ]
    assert len({*same, *(other.fingerprint("bf16") for other in others)}) == 1 + len(others)
