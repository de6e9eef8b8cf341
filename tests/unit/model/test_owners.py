"""Owners have bounded names and numbers of their own; a quota is that of the tenant's name, or of all others."""

import pytest

from kvist.errors import KeyInvalid
from kvist.model.keys import FIELD_NBYTES_MAX
from kvist.model.owners import NOBODY, OWNERS_MAX, TENANT_CHARS_MAX, Owner, Owners, Quotas, owned_by


@pytest.mark.parametrize(
    "names", [("x" * (TENANT_CHARS_MAX + 1), ""), ("*", ""), ("\ud800", ""), ("", "\ud800"), ("", "x" * 4097)], ids=repr
)
def test_a_name_that_nobody_can_have_is_refused(names: tuple[str, str]):
    """Too long, no text, or the name of all others."""
    with pytest.raises(KeyInvalid):
        Owner(*names)


def test_the_longest_names_are_taken():
    """A tenant's 256 characters, whatever their bytes, and as long a model's name as a key takes."""
    owner = Owner("\U0001f600" * TENANT_CHARS_MAX, "m" * FIELD_NBYTES_MAX)
    assert (len(owner.tenant), len(owner.model)) == (TENANT_CHARS_MAX, FIELD_NBYTES_MAX)


def test_a_choice_of_owners():
    """None is any; a name is that name alone, the empty one as well."""
    owners = [NOBODY, Owner("a", ""), Owner("a", "m"), Owner("", "m")]
    chosen = {
        (None, None): owners, ("a", None): owners[1:3], ("", None): [NOBODY, owners[3]], (None, "m"): owners[2:],
        ("a", "m"): [owners[2]], ("", ""): [NOBODY], ("b", None): [],
    }  # fmt: skip
    for names, expected in chosen.items():
        assert [owner for owner in owners if owned_by(*names)(owner)] == expected


def test_a_quota_is_the_tenants_own_or_that_of_all_others():
    """What is named counts first; ``*`` is for every other name, and those without one are not among them."""
    quotas = Quotas({"a": 5, "*": 7})
    assert [quotas.of(name) for name in ("a", "b", "")] == [5, 7, None]
    assert [Quotas({"": 3}).of(name) for name in ("a", "")] == [None, 3]
    with pytest.raises(KeyInvalid, match="must be positive"):
        Quotas({"a": 0})


def test_numbers_are_given_once():
    """An owner keeps its number, nobody has 0, and when all are taken there is none more."""
    owners = Owners()
    assert owners.number(NOBODY) == 0
    numbers = [owners.number(Owner(f"{number}", "m")) for number in range(OWNERS_MAX - 1)]
    assert numbers == list(range(1, OWNERS_MAX))
    assert owners.number(Owner("one more", "m")) is None
    assert owners.number(Owner("7", "m")) == 8
    assert owners[8] == Owner("7", "m")
    assert owners.numbers_of(owned_by("7", None)) == {8}
