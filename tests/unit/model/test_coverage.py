"""What cannot be served is refused by name, and a prefix is as long as its shortest row."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvist.errors import LayoutError
from kvist.model.coverage import check_kinds, servable_chunks
from kvist.model.layout import GroupKind, LayerGroup, LayerPlane

PLANE = LayerPlane(0, 0, num_blocks=4, block_stride=64, row_nbytes=16)
FULL = LayerGroup(GroupKind.FULL, 4, (PLANE,))


@pytest.mark.parametrize(
    "kind", [kind for kind in GroupKind if kind is not GroupKind.FULL], ids=lambda kind: kind.value
)
def test_kinds_that_are_not_served_are_refused_by_name(kind: GroupKind):
    """A group that needs anything but its whole prefix is refused with its number and its kind."""
    check_kinds([FULL, FULL])
    with pytest.raises(LayoutError, match=f"layer group 1 is of kind '{kind.value}'"):
        check_kinds([FULL, LayerGroup(kind, 4, (PLANE,))])


@given(st.lists(st.integers(0, 10), min_size=1))
def test_a_prefix_is_servable_where_every_row_has_it(num_leading: list[int]):
    """The longest servable prefix is present in every row, and one chunk more is missing somewhere."""
    num = servable_chunks(num_leading)
    assert all(leading >= num for leading in num_leading)
    assert any(leading < num + 1 for leading in num_leading)


def test_nothing_is_servable_without_rows():
    """No row, no prefix."""
    assert servable_chunks([]) == 0
