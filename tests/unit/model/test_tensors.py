"""Declared axes alone decide what an engine's bytes are; what planes cannot say is refused in a sentence."""

import re
from dataclasses import replace
from itertools import permutations
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvist.errors import LayoutError
from kvist.model.layout import GroupKind, LayerGroup, LayerPlane
from kvist.model.tensors import AXES, TensorView, kernel_blocks, planes, token_blocks
from tests.support.engine_layouts import CASES, Case
from tests.support.layouts import chunk_bytes
from tests.support.views import Tensors, lay, views_of

RIGHT = TensorView(0, 0, (2, 10, 16, 8, 64), (163840, 16384, 1024, 128, 2), 2, "2 NB BS NH HS")


def view(
    axes: str, shape: tuple[int, ...], strides: tuple[int, ...] = (), itemsize: int = 2, **more: int
) -> TensorView:
    """Return a view with strides in elements, dense ones if none are given."""
    dense = [int(np.prod(shape[number + 1 :])) for number in range(len(shape))]
    strides = tuple(stride * itemsize for stride in strides or dense)
    return TensorView(more.pop("memory", 0), more.pop("offset", 0), shape, strides, itemsize, axes, **more)


def check_rows(case: Case) -> None:
    """Check planes, walked byte by byte, against plain indexing of the views."""
    tensors = Tensors(case.layers)
    tensors.stamp()
    found = planes(*case.layers)
    blocks = [3 % found[0].num_blocks, 0]
    walked = b"".join(
        chunk_bytes(LayerGroup(GroupKind.FULL, plane.num_tokens, (plane,)), blocks, tensors.memory) for plane in found
    )
    assert walked == tensors.canonical(blocks)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_planes_name_the_rows_that_indexing_finds(case: Case):
    """The rows of all planes, one behind another, are the views' elements in canonical order."""
    check_rows(case)


@given(st.data())
def test_any_nesting_of_axes_with_any_gaps_is_named_right(data: st.DataObject):
    """Axes may be declared and lie in memory in any order, each with gaps: bytes follow from the names."""
    rows = data.draw(st.sampled_from(["HS", "2HS", "C"]))
    names = ["NB", *data.draw(st.sets(st.sampled_from(["NL", "BS", "NH", "1", "2"][: 4 if rows == "2HS" else 5])))]
    sizes = {name: data.draw(st.integers(1, 3), label=name) for name in names} | {"1": 1, "2": 2}
    sizes |= {rows: 2 * data.draw(st.integers(1, 3))}
    gaps = {name: 2 * data.draw(st.integers(0, 2)) for name in names}
    axes = " ".join(data.draw(st.permutations([*names, rows])))
    order = " ".join([*data.draw(st.permutations(names)), rows])
    check_rows(Case("drawn", [lay(axes, sizes, order=order, gaps=gaps)]))


def test_equal_sizes_are_not_mistaken_for_each_other():
    """Two blocks, tokens, heads and elements: every order of the names has bytes of its own, all of them right."""
    sizes = dict.fromkeys(("NB", "BS", "NH", "HS"), 2)
    memory, found = None, set()
    for order in permutations(["2", "NB", "BS", "NH"]):
        axes = " ".join([*order, "HS"])
        check_rows(Case("small", [lay(axes, sizes)]))
        tensors = Tensors([lay(axes, sizes)])
        memory = memory or [np.random.default_rng(1).integers(0, 256, len(tensors.memory[0]), dtype=np.uint8)]
        tensors.memory = memory
        found.add(tensors.canonical([0, 1]))
    assert len(found) == 24


@pytest.mark.parametrize(
    ("axes", "shape", "strides", "offset", "plane"),
    [
        (
            "2 NB BS NH HS", (2, 10, 16, 8, 64), (81920, 8192, 64, 1024, 1), 0,
            LayerPlane(0, 0, 10, 16384, 128, 2, 163840, 16, 128, 8, 2048),
        ),
        (
            "2 NB BS NH HS", (2, 10, 16, 8, 64), (8192, 16384, 512, 64, 1), 0,
            LayerPlane(0, 0, 10, 32768, 128, 2, 16384, 16, 1024, 8, 128),
        ),
        ("NB NH BS C", (10, 1, 16, 64), (4096, 64, 64, 1), 0, LayerPlane(0, 0, 10, 8192, 128, 1, 0, 16, 128)),
        ("NB BS C", (10, 16, 64), (5000, 64, 1), 0, LayerPlane(0, 0, 10, 10000, 128, 1, 0, 16, 128)),
        ("NB BS C", (10, 16, 64), (1024, 64, 1), 128, LayerPlane(0, 256, 10, 2048, 128, 1, 0, 16, 128)),
        (
            "NB 2 NH BS HS", (10, 2, 1, 16, 64), (2048, 1024, 2048, 64, 1), 0,
            LayerPlane(0, 0, 10, 4096, 128, 2, 2048, 16, 128),
        ),
        ("NB BS C", (10, 16, 64), (2048, 128, 1), 0, LayerPlane(0, 0, 10, 4096, 128, 1, 0, 16, 256)),
    ],
    ids=[
        "NHD over HND", "K and V first over block first", "padded, 1 head", "padded", "part of a pool", "1 head inside",
        "gaps inside",
    ],
)  # fmt: skip
def test_strides_are_taken_as_they_are(axes, shape, strides, offset, plane: LayerPlane):
    """Permuted, padded and shifted views become the planes that their strides say; a size of 1 has no stride."""
    assert planes(view(axes, shape, strides, offset=offset * 2)) == (plane,)


@pytest.mark.parametrize("stride", [0, 2, 3])
def test_strides_of_single_entries_do_not_count(stride: int):
    """Views that differ in the stride of an axis of size 1 are equal planes, be it 0, negative or odd."""
    strange = TensorView(0, 0, (1, 1, 16, 1, 64), (-7, stride, 128, 0, 2), 2, "NL NB BS NH HS")
    assert planes(strange) == (LayerPlane(0, 0, 1, 0, 128, 1, 0, 16, 128),)


def test_padding_behind_a_payload_is_not_part_of_a_page():
    """A state of 18,688 bytes in a page of 65,536 is a row of 18,688; an indexer's page of 64 tokens is one row."""
    state = TensorView(0, 0, (1024, 1, 1, 18688), (65536, 18688, 18688, 1), 1, "NB PAGE PAGE PAGE")
    assert planes(state) == (LayerPlane(0, 0, 1024, 65536, 18688),)
    indexer = TensorView(0, 0, (10, 64, 132), (20000, 132, 1), 1, "NB PAGE PAGE")
    assert planes(indexer) == (LayerPlane(0, 0, 10, 20000, 64 * 132),)


def test_kernel_blocks_that_follow_each_other_are_one_block():
    """Tokens of all kernel blocks of a block are one stride apart, or their pages are one page."""
    joined = planes(view("2 NB KB BS NH HS", (2, 6, 4, 16, 2, 8)))
    assert joined == planes(view("2 NB BS NH HS", (2, 6, 64, 2, 8)))
    assert planes(view("NB KB BS C", (6, 4, 1, 8))) == planes(view("NB BS C", (6, 4, 8)))
    assert planes(view("NB KB PAGE PAGE", (6, 4, 16, 8))) == planes(view("NB PAGE", (6, 512)))
    assert kernel_blocks(np.array([[5, 0]]), 3).tolist() == [[15, 16, 17, 0, 1, 2]]


def test_k_and_v_in_tensors_of_their_own_are_two_planes():
    """Lists of K and V become a plane of K and one of V, in one allocation or two; only woven rows are one plane."""
    k, v = (view("NB BS NH HS", (10, 16, 8, 64), memory=memory) for memory in (0, 1))
    assert planes((k, v)) == (*planes(k), *planes(v))
    behind = replace(k, offset=10 * 16384)
    assert planes((k, behind)) == (*planes(k), *planes(behind))
    assert planes((behind, k)) == (*planes(behind), *planes(k))
    fused = view("NB BS NH 2HS", (10, 16, 8, 128))
    halves = [replace(fused, shape=(10, 16, 8, 64), axes="NB BS NH HS", offset=offset) for offset in (0, 128)]
    assert planes(tuple(halves)) == planes(fused)
    narrow = view("NB BS NH HS", (10, 16, 8, 32), memory=1)
    assert [plane.row_nbytes for plane in planes((k, narrow))] == [128, 64]


def test_layers_of_one_tensor_are_planes_in_their_order():
    """``NL`` gives as many planes; K and V outside the layers are planes of their own, which lie apart."""
    pool = view("NB NL 2 NH BS HS", (10, 3, 2, 8, 16, 64))
    assert [plane.offset for plane in planes(pool)] == [0, 32768, 65536]
    plain = view("2 NL PBS NHHS", (2, 3, 100, 512), block_tokens=1, num_heads=8)
    assert [plane.offset // 102400 for plane in planes(plain)] == [0, 3, 1, 4, 2, 5]
    LayerGroup(GroupKind.FULL, 1, planes(plain))


def test_merged_axes_are_the_axes_that_they_are_made_of():
    """Tokens in a row and merged heads are planes equal to those of axes taken apart, also where one is of size 1."""
    for num_blocks, block_tokens, num_heads in [(10, 16, 8), (1, 16, 8), (10, 1, 8), (10, 16, 1), (1, 1, 1)]:
        merged = (2, num_blocks * block_tokens, num_heads * 64)
        apart = view("2 NB BS NH HS", (2, num_blocks, block_tokens, num_heads, 64))
        cache = view("2 PBS NHHS", merged, block_tokens=block_tokens, num_heads=num_heads)
        assert planes(cache) == planes(apart)


def test_layers_that_share_memory_are_one_plane():
    """The same memory, offset and strides under two layers come once, where they first appear."""
    first, second = view("NB BS C", (10, 16, 64)), view("NB BS C", (10, 16, 64), memory=1)
    assert planes(first, second, replace(first), second) == (*planes(first), *planes(second))


def test_tokens_of_a_plain_cache_are_blocks():
    """A range of whole blocks becomes their ids; blocks of one token make every range whole."""
    assert token_blocks(32, 80, 16).tolist() == [2, 3, 4]
    assert token_blocks(5, 8, 1).tolist() == [5, 6, 7]
    assert token_blocks(16, 16, 16).tolist() == []
    for start, end, block_tokens in [(8, 32, 16), (16, 40, 16), (32, 16, 16), (-16, 16, 16), (0, 16, 0)]:
        with pytest.raises(LayoutError, match=rf"tokens \[{start}, {end}\) are no whole blocks of {block_tokens}"):
            token_blocks(start, end, block_tokens)


REFUSED = {
    "4 axes .* name each axis once": {"axes": "2 NB BS NH"},
    "4 strides .* name each axis once": {"strides": (163840, 16384, 1024, 128)},
    "unknown axis 'HD' in '2 NB BS NH HD'; known are": {"axes": "2 NB BS NH HD"},
    "axis NB appears 2 times in '2 NB NB NH HS'": {"axes": "2 NB NB NH HS"},
    r"axis 2HS says what \['2'\] say too": {"axes": "2 NB BS NH 2HS"},
    r"axis NHHS says what \['NH'\] say too": {"axes": "2 NB BS NH NHHS"},
    r"axis PBS says what \['NB'\] say too": {"axes": "2 NB PBS NH HS"},
    r"axis PAGE says what \['BS'\] say too": {"axes": "2 NB BS NH PAGE"},
    "must have one of the axes .*'HS'": {"axes": "2 NB BS NH NL"},
    "must have one of the axes .*'C'": {"axes": "2 NB BS C HS"},
    "'2 NL BS NH HS' has no blocks: name the axis NB or PBS": {"axes": "2 NL BS NH HS"},
    "kernel blocks KB and neither tokens BS nor a PAGE": {"axes": "2 NB KB NH HS"},
    "memory and offset must not be negative": {"memory": -1},
    "offset must not be negative, and itemsize must be positive": {"offset": -2},
    "itemsize must be positive": {"itemsize": 0},
    "axis NB has the size 0; sizes must be positive": {"shape": (2, 0, 16, 8, 64)},
    "axis HS has the size 0; sizes must be positive": {"shape": (2, 10, 16, 8, 0)},
    "axis BS has the size -16; sizes must be positive": {"shape": (2, 10, -16, 8, 64)},
    "axis 2 has the size 3, which must be 2": {"shape": (3, 10, 16, 8, 64)},
    "axis 1 has the size 8, which must be 1": {"axes": "2 NB BS 1 HS"},
    "axis 2HS has the size 63, which must be even": {"axes": "NL NB BS NH 2HS", "shape": (2, 10, 16, 8, 63)},
    r"axis NB is expanded: its 10 entries are the same memory \(stride 0\)": {"strides": (163840, 0, 1024, 128, 2)},
    "axis BS has the stride -1024; strides must not be negative": {"strides": (163840, 16384, -1024, 128, 2)},
    "axis NH has a stride of 129 bytes, no multiple of the itemsize": {"strides": (163840, 16384, 1024, 129, 2)},
    r"elements overlap: the strides \(163840, 16000, 1024, 128, 2\)": {"strides": (163840, 16000, 1024, 128, 2)},
    "elements overlap": {"strides": (16384, 16384, 1024, 128, 2)},
    "block_tokens 16 is for the axis PBS, which is not in": {"block_tokens": 16},
    "num_heads 8 is for the axis NHHS, which is not in": {"num_heads": 8},
    "axis PBS of 10 needs block_tokens that divides it, not None": {"axes": "2 PBS NL NH HS"},
    "axis PBS of 10 needs block_tokens that divides it, not 4": {"axes": "2 PBS NL NH HS", "block_tokens": 4},
    "axis PBS of 10 needs block_tokens that divides it, not 0": {"axes": "2 PBS NL NH HS", "block_tokens": 0},
    "axis NHHS of 64 needs num_heads that divides it, not None": {"axes": "2 NB BS NL NHHS"},
    "axis NHHS of 64 needs num_heads that divides it, not 7": {"axes": "2 NB BS NL NHHS", "num_heads": 7},
    "a row's elements are 128 bytes apart, not 2; declare a block's inside as PAGE": {"axes": "2 NB BS HS NH"},
    "a page's content has gaps: a stride of 4 bytes over 2": {
        "axes": "2 NB NL NH PAGE", "shape": (2, 10, 16, 8, 32), "strides": (163840, 16384, 1024, 128, 4),
    },
    "a page's content has gaps: a stride of 1024 bytes over 128": {"axes": "2 NB PAGE NH PAGE"},
    "kernel blocks are 128 bytes apart inside a page of 16384": {"axes": "2 NB PAGE KB PAGE"},
    "kernel blocks of 8 tokens, 128 bytes apart, are 2048 bytes apart: .* by kernel_blocks": {
        "axes": "NL NB KB BS HS", "strides": (327680, 32768, 2048, 128, 2),
    },
}  # fmt: skip


@pytest.mark.parametrize("message", REFUSED)
def test_what_cannot_be_is_refused(message: str):
    """One wrong field of a right view is refused, with its number."""
    with pytest.raises(LayoutError, match=message):
        replace(RIGHT, **REFUSED[message])


ONE = view("NB BS NH HS", (10, 16, 8, 64))
DIFFER = "K and V may differ in memory, strides and head size only"


@pytest.mark.parametrize(
    ("v", "message"),
    [
        (ONE, "K and V are the same memory"),
        (replace(ONE, memory=1, axes="NB NH BS HS"), DIFFER),
        (view("NB BS NH HS", (10, 16, 4, 64), memory=1), DIFFER),
        (view("NB BS NH HS", (10, 16, 8, 64), itemsize=1, memory=1), DIFFER),
        (view("NB BS NH 2HS", (10, 16, 8, 64), memory=1), "K and V of one layer are tensors of their own"),
        (view("NL NB BS HS", (10, 16, 8, 64), memory=1), "K and V of one layer are tensors of their own"),
        (replace(ONE, offset=2), "a stride of 2 bytes overlaps rows that span 128"),
    ],
)  # fmt: skip
def test_pairs_that_are_none_are_refused(v: TensorView, message: str):
    """K and V that differ in more than where they lie, or are the same bytes, are refused."""
    with pytest.raises(LayoutError, match=message):
        planes((ONE, v))


def test_blocks_of_no_kernel_blocks_are_refused():
    """A block consists of one kernel block or more."""
    with pytest.raises(LayoutError, match="cannot consist of 0 kernel blocks"):
        kernel_blocks(np.array([1]), 0)


def test_every_axis_is_used_and_explained():
    """Each name in ``AXES`` is in a layout that an engine has, and no other is."""
    used = {name for case in CASES for _, _, view in views_of(case.layers) for name in view.names}
    assert used == set(AXES)


def test_the_page_on_layouts_names_those_that_are_tested():
    """Every layout that ``docs/layouts.md`` lists is one of the cases, and every case is listed."""
    page = (Path(__file__).parents[3] / "docs" / "layouts.md").read_text()
    table = page.partition("## Layouts of engines")[2].partition("## Rules")[0]
    rows = [row.split("|") for row in table.splitlines() if row.startswith("|")]
    listed = {axes for row in rows for axes in re.findall(r"`([A-Z0-9 ]+)`", row[2])}
    assert listed == {view.axes for case in CASES for _, _, view in views_of(case.layers)}
