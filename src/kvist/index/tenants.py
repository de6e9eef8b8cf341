"""What each tenant has in the pool, and which of them gives something up when there is no room.

The laws: a tenant's bytes are those of its chunks' slots, from the moment that they are reserved until they are free.
The tenant that uses most of its share goes first, its share being its quota or, where it has none, an equal part of
the pool; of two that use as much, the one whose leaf ranks lower. A choice costs the logarithm of the number of
tenants, whatever they have.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable, Iterable, Iterator

from kvist.index.chunk import Account, Tenant
from kvist.model.owners import Owner, Quotas
from kvist.units import align_up

_HEAP_MIN = 64
_Key = tuple[float, int]
"""What is used of a share, negative, and the rank of the leaf that would go: the lowest goes first."""


class Tenants:
    """All tenants that have something in the pool."""

    def __init__(self, quotas: Quotas, pool_nbytes: int, *, slot_alignment: int = 1) -> None:
        """Begin with nothing; what a slot takes of the pool is a multiple of ``slot_alignment``."""
        self._quotas = quotas
        self._slot_alignment = slot_alignment
        self._pool_nbytes = pool_nbytes
        self._accounts: dict[Owner, Account] = {}
        self._tenants: dict[str, Tenant] = {}
        self._with_quota, self._without = _Ranking(), _Ranking()
        self.num_evicted_before = 0
        """Of tenants that had nothing left at some time."""

    def __iter__(self) -> Iterator[Tenant]:
        return iter(self._tenants.values())

    def get(self, name: str) -> Tenant | None:
        """Return a tenant; None if it has nothing."""
        return self._tenants.get(name)

    def taken_nbytes(self, slot_nbytes: int) -> int:
        """Return what a slot takes of the pool."""
        return align_up(slot_nbytes, self._slot_alignment)

    def has_room(self, name: str, nbytes: int) -> bool:
        """Return whether a tenant's quota has room for one more slot of so many bytes."""
        quota_nbytes = self._quotas.of(name)
        tenant = self._tenants.get(name)
        used_nbytes = tenant.nbytes if tenant is not None else 0
        return quota_nbytes is None or used_nbytes + self.taken_nbytes(nbytes) <= quota_nbytes

    def could_have_room(self, name: str, nbytes: int) -> bool:
        """Return whether it would if the tenant had nothing."""
        quota_nbytes = self._quotas.of(name)
        return quota_nbytes is None or self.taken_nbytes(nbytes) <= quota_nbytes

    def enter(self, owner: Owner, nbytes: int) -> Account:
        """Count one more slot for an owner; return its account."""
        account = self._accounts.get(owner)
        if account is None:
            tenant = self._tenants.get(owner.tenant)
            if tenant is None:
                tenant = self._tenants[owner.tenant] = Tenant(owner.tenant, self._quotas.of(owner.tenant))
            account = self._accounts[owner] = Account(owner, tenant)
        account.num_chunks += 1
        account.tenant.num_chunks += 1
        account.tenant.nbytes += self.taken_nbytes(nbytes)
        self.note(account.tenant)
        return account

    def leave(self, account: Account, nbytes: int) -> None:
        """Count one slot less."""
        tenant = account.tenant
        account.num_chunks -= 1
        tenant.num_chunks -= 1
        tenant.nbytes -= self.taken_nbytes(nbytes)
        if not account.num_chunks:
            del self._accounts[account.owner]
        if not tenant.num_chunks:
            del self._tenants[tenant.name]
            self.num_evicted_before += tenant.num_evicted

    def note(self, tenant: Tenant) -> None:
        """Take note that a tenant uses more, or has another leaf."""
        self._ranking(tenant).note(tenant)

    def choose(self, rank: Callable[[Tenant], int | None]) -> Tenant | None:
        """Return the tenant that gives something up; ``rank`` tells the rank of its first leaf, None without one."""
        bounded = self._with_quota.first(lambda tenant: _key(tenant, tenant.quota_nbytes or 1, rank))
        free = self._without.first(lambda tenant: _key(tenant, 1, rank))
        if bounded is None or free is None:
            chosen = bounded or free
            return chosen[1] if chosen is not None else None
        (used, lowest), tenant = free
        key = used * len(self._tenants) / self._pool_nbytes, lowest
        return tenant if key < bounded[0] else bounded[1]

    def check_invariants(self, chunks: Iterable[tuple[Account, int]]) -> None:
        """Assert the module's laws, given (account, bytes) of every slot that is taken. For tests."""
        nbytes: dict[str, int] = {}
        for account, slot_nbytes in chunks:
            assert self._accounts[account.owner] is account
            before = nbytes.get(account.owner.tenant, 0)
            nbytes[account.owner.tenant] = before + self.taken_nbytes(slot_nbytes)
        for tenant in self._tenants.values():
            assert tenant.nbytes >= nbytes.pop(tenant.name, 0)
            assert tenant.quota_nbytes is None or tenant.nbytes <= tenant.quota_nbytes
        assert not nbytes

    def _ranking(self, tenant: Tenant) -> _Ranking:
        return self._without if tenant.quota_nbytes is None else self._with_quota


class _Ranking:
    """Tenants by their keys: a heap in which each has one entry that counts, which may come too early, never too late.

    A key that falls must be noted; one that rises is found when its turn comes.
    """

    def __init__(self) -> None:
        self._heap: list[tuple[_Key, int, Tenant]] = []
        self._heap_max = _HEAP_MIN
        self._entered: dict[Tenant, _Key] = {}
        """The entries that count."""
        self._changed: dict[Tenant, None] = {}
        self._sequence = itertools.count()

    def note(self, tenant: Tenant) -> None:
        self._changed[tenant] = None

    def first(self, key: Callable[[Tenant], _Key | None]) -> tuple[_Key, Tenant] | None:
        """Return the tenant of the lowest key, with it."""
        if len(self._heap) > self._heap_max:
            self._changed |= dict.fromkeys(self._entered)
            self._entered.clear()
            self._heap.clear()
            self._heap_max = _HEAP_MIN + 4 * len(self._changed)
        for tenant in self._changed:
            current, entered = key(tenant), self._entered.get(tenant)
            if current is not None and (entered is None or current < entered):
                self._enter(tenant, current)
        self._changed.clear()
        while self._heap:
            noted, _, tenant = self._heap[0]
            if self._entered.get(tenant) != noted:
                heapq.heappop(self._heap)
                continue
            current = key(tenant)
            if current == noted:
                return noted, tenant
            heapq.heappop(self._heap)
            del self._entered[tenant]
            if current is not None:
                self._enter(tenant, current)
        return None

    def _enter(self, tenant: Tenant, key: _Key) -> None:
        self._entered[tenant] = key
        heapq.heappush(self._heap, (key, next(self._sequence), tenant))


def _key(tenant: Tenant, share: int, rank: Callable[[Tenant], int | None]) -> _Key | None:
    lowest = rank(tenant)
    return None if lowest is None else (-tenant.nbytes / share, lowest)
