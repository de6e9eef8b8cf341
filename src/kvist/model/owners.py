"""Whose a chunk is: a tenant's, of one model; and what a tenant may have.

The laws: an owner is no part of a chunk's bytes; that two tenants do not find each other's chunks is the matter of
their keys. Every name is bounded, and ``*`` is nobody's: it stands for all tenants that are not named.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Final

from kvist.errors import KeyInvalid
from kvist.model.keys import FIELD_NBYTES_MAX

TENANT_CHARS_MAX: Final = 256
OWNERS_MAX: Final = 4096
"""How many owners have numbers at one time."""
OTHERS: Final = "*"


@dataclass(frozen=True, slots=True)
class Owner:
    """A tenant and one of its models."""

    tenant: str
    """``""`` for those who name none."""
    model: str
    """``""`` where the engine did not say."""

    def __post_init__(self) -> None:
        check_tenant(self.tenant)
        if _nbytes("model", self.model) > FIELD_NBYTES_MAX:
            raise KeyInvalid(f"a model's name of {len(self.model)} characters; at most {FIELD_NBYTES_MAX} bytes")


IsOwner = Callable[[Owner], bool]
"""Chooses among owners."""


def check_tenant(name: str) -> None:
    """Make sure that a tenant can have this name.

    Raises:
        KeyInvalid: it is too long, no text, or stands for all others.
    """
    _nbytes("tenant", name)
    if len(name) > TENANT_CHARS_MAX:
        raise KeyInvalid(f"a tenant's name of {len(name)} characters; at most {TENANT_CHARS_MAX}")
    if name == OTHERS:
        raise KeyInvalid(f"{OTHERS!r} stands for all tenants that are not named; choose another name")


def owned_by(tenant: str | None, model: str | None) -> IsOwner:
    """Choose the owners of a tenant, of a model, or of both; None is any."""
    return lambda owner: tenant in (None, owner.tenant) and model in (None, owner.model)


@dataclass(frozen=True, slots=True)
class Quotas:
    """Most bytes that tenants may have."""

    nbytes: Mapping[str, int] = field(default_factory=dict)
    """By tenant; that of ``*`` is for every other tenant that has a name."""

    def __post_init__(self) -> None:
        for name, nbytes in self.nbytes.items():
            if name != OTHERS:
                check_tenant(name)
            if nbytes <= 0:
                raise KeyInvalid(f"a quota of {nbytes} bytes for tenant {name!r}; it must be positive")

    def of(self, tenant: str) -> int | None:
        """Return a tenant's quota; None if nothing bounds it."""
        found = self.nbytes.get(tenant)
        return self.nbytes.get(OTHERS) if found is None and tenant else found


class Owners:
    """Numbers for owners, so that a chunk's owner takes two bytes. A number is never another owner's."""

    def __init__(self) -> None:
        self._owners = [NOBODY]
        self._numbers = {NOBODY: 0}

    def number(self, owner: Owner) -> int | None:
        """Return an owner's number, a new one if it has none; None if all are taken."""
        number = self._numbers.get(owner)
        if number is None and len(self._owners) < OWNERS_MAX:
            number = self._numbers[owner] = len(self._owners)
            self._owners.append(owner)
        return number

    def __getitem__(self, number: int) -> Owner:
        """Return whose a number is."""
        return self._owners[number]

    def numbers_of(self, is_owner: IsOwner) -> frozenset[int]:
        """Return the numbers of some owners."""
        return frozenset(number for number, owner in enumerate(self._owners) if is_owner(owner))


def _nbytes(what: str, name: str) -> int:
    try:
        return len(name.encode())
    except UnicodeEncodeError as error:
        raise KeyInvalid(f"a {what}'s name is no text: {error}") from error


NOBODY: Final = Owner("", "")
