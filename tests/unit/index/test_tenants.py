"""Tenants on one pool: none has more than its quota, and room is made by the one that uses most of its share."""

from __future__ import annotations

from collections.abc import Callable
from fractions import Fraction

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kvist.index.chunk_index import Chunk, ChunkIndex, ChunkState
from kvist.index.eviction import LeastRecentlyUsed
from kvist.index.tenants import Tenants
from kvist.model.keys import ChunkKey
from kvist.model.owners import Owner, Quotas, owned_by

POOL_NBYTES = 1000
OWNERS = [Owner("", ""), Owner("", "m"), Owner("a", "m"), Owner("a", "n"), Owner("b", ""), Owner("c", "m")]
QUOTAS = Quotas({"a": 250, "*": 400})


class Pool(RuleBasedStateMachine):
    """An index without slots: its bytes are counted here, chunk by chunk."""

    @initialize(has_quotas=st.booleans())
    def begin(self, *, has_quotas: bool) -> None:
        self.quotas = QUOTAS if has_quotas else Quotas()
        self.tenants = Tenants(self.quotas, POOL_NBYTES, slot_alignment=10)
        self.taken: dict[int, Chunk] = {}
        self.index = ChunkIndex(LeastRecentlyUsed(), self.freed, self.tenants)
        self.num_slots = 0

    def freed(self, slot: int, nbytes: int) -> None:
        assert self.taken.pop(slot).slot_nbytes == nbytes

    def used(self, tenant: str) -> int:
        taken = [chunk for chunk in self.taken.values() if chunk.owner.tenant == tenant]
        return sum(-(-chunk.slot_nbytes // 10) * 10 for chunk in taken)

    def leaves(self, tenant: str | None = None) -> list[Chunk]:
        """Return what may be evicted, of one tenant or of all."""
        return [
            chunk
            for chunk in self.taken.values()
            if chunk.state is ChunkState.SEALED and not chunk.pins and not list(chunk.children())
            and tenant in (None, chunk.owner.tenant)
        ]  # fmt: skip

    def chunks(self, *states: ChunkState) -> list[Chunk]:
        return [chunk for chunk in self.taken.values() if chunk.state in states]

    def evicted(self, act: Callable[[], object]) -> list[Chunk]:
        """Return what went while something was done."""
        before = dict(self.taken)
        act()
        return [chunk for slot, chunk in before.items() if slot not in self.taken]

    @rule(
        stores=st.lists(
            st.tuples(st.sampled_from(OWNERS), st.sampled_from("xyz"), st.sampled_from([35, 40, 95, 300])), min_size=1
        ),
        is_sealed=st.booleans(),
    )
    def store(self, stores: list[tuple[Owner, str, int]], *, is_sealed: bool) -> None:
        """Store the next chunk of each of some prompts."""
        for owner, stem, nbytes in stores:
            parent = None
            for depth in range(4):
                key = ChunkKey(f"{owner} {stem}{depth}".encode())
                if (there := self.index.get(key)) is None:
                    self.store_one(owner, key, parent, nbytes)
                    break
                parent = there
        if is_sealed:
            self.land_all()

    def store_one(self, owner: Owner, key: ChunkKey, parent: Chunk | None, nbytes: int) -> None:
        """Make room in the quota, and reserve: what goes is the tenant's own, the longest unused first."""
        quota = self.quotas.of(owner.tenant)
        leaves = self.leaves(owner.tenant)
        oldest = min((leaf.last_used for leaf in leaves), default=0)
        is_pinned = parent is not None and parent.state is ChunkState.SEALED
        if is_pinned and parent is not None:
            self.index.pin(parent)
        outcome: list[bool] = []
        gone = self.evicted(lambda: outcome.append(self.index.make_room(owner.tenant, nbytes)))
        assert all(chunk.owner.tenant == owner.tenant for chunk in gone)
        assert not gone or quota is not None
        if quota is not None and nbytes > quota:
            assert not gone
        if len(gone) == 1 and not is_pinned:
            assert gone[0].last_used == oldest
        has_room = quota is None or self.used(owner.tenant) + -(-nbytes // 10) * 10 <= quota
        assert outcome == [has_room]
        assert has_room or nbytes > (quota or 0) or not self.leaves(owner.tenant)
        if has_room:
            self.num_slots += 1
            chunk = self.index.reserve(key, parent, self.num_slots, nbytes, owner=owner)
            self.taken[self.num_slots] = chunk
        if is_pinned and parent is not None:
            self.index.unpin(parent)

    @precondition(lambda self: self.chunks(ChunkState.RESERVED))
    @rule(data=st.data(), is_sealed=st.booleans())
    def land(self, data: st.DataObject, *, is_sealed: bool) -> None:
        chunk = data.draw(st.sampled_from(self.chunks(ChunkState.RESERVED)))
        if is_sealed:
            self.index.seal(chunk, b"")
        else:
            self.index.abort(chunk)

    @rule()
    def land_all(self) -> None:
        for chunk in self.chunks(ChunkState.RESERVED):
            self.index.seal(chunk, b"")

    @precondition(lambda self: self.chunks(ChunkState.SEALED))
    @rule(data=st.data())
    def pin(self, data: st.DataObject) -> None:
        self.index.pin(data.draw(st.sampled_from(self.chunks(ChunkState.SEALED))))

    @rule()
    def unpin_all(self) -> None:
        for chunk in list(self.taken.values()):
            for _ in range(chunk.pins):
                self.index.unpin(chunk)

    @precondition(lambda self: self.chunks(ChunkState.SEALED))
    @rule(data=st.data())
    def touch(self, data: st.DataObject) -> None:
        self.index.touch([data.draw(st.sampled_from(self.chunks(ChunkState.SEALED)))])

    @precondition(lambda self: self.chunks(ChunkState.SEALED))
    @rule(data=st.data())
    def drop(self, data: st.DataObject) -> None:
        self.index.drop(data.draw(st.sampled_from(self.chunks(ChunkState.SEALED))))

    @rule(num=st.integers(1, 4))
    def evict(self, num: int) -> None:
        """What goes is the longest unused leaf of the tenant that uses most of its share, of those that have one."""
        for _ in range(num):
            leaves = self.leaves()
            there = {chunk.owner.tenant for chunk in self.taken.values()}
            equal = Fraction(POOL_NBYTES, max(len(there), 1))
            use = {tenant: Fraction(self.used(tenant)) / (self.quotas.of(tenant) or equal) for tenant in there}
            gone = self.evicted(self.index.evict)
            assert len(gone) == bool(leaves)
            if gone:
                victim = gone[0]
                assert victim in leaves
                assert use[victim.owner.tenant] == max(use[leaf.owner.tenant] for leaf in leaves)
                own = [leaf for leaf in leaves if leaf.owner.tenant == victim.owner.tenant]
                assert victim.last_used == min(leaf.last_used for leaf in own)
                if len({use[leaf.owner.tenant] for leaf in leaves}) == 1:
                    assert victim.last_used == min(leaf.last_used for leaf in leaves)

    @rule(names=st.sampled_from([(None, None), ("a", None), (None, "m"), ("", "m"), ("nobody", None)]))
    def purge(self, names: tuple[str | None, str | None]) -> None:
        """All of an owner goes that is not held, or above what is; that is counted."""
        is_owner = owned_by(*names)
        kept = 0

        def run() -> None:
            nonlocal kept
            kept = sum(step.num_kept for step in self.index.purge(is_owner))

        gone = self.evicted(run)
        assert all(is_owner(chunk.owner) for chunk in gone)
        left = self.chunks(ChunkState.SEALED, ChunkState.RESERVED)
        left = [chunk for chunk in left if is_owner(chunk.owner)]
        assert len(left) == kept
        assert not any(is_owner(chunk.owner) for chunk in self.leaves())

    @invariant()
    def laws_hold(self) -> None:
        if not hasattr(self, "index"):
            return
        self.index.check_invariants()
        there = {chunk.owner.tenant for chunk in self.taken.values()}
        assert {tenant.name for tenant in self.tenants} == there
        for tenant in self.tenants:
            assert tenant.nbytes == self.used(tenant.name)
            assert tenant.num_chunks == sum(chunk.owner.tenant == tenant.name for chunk in self.taken.values())
            quota = self.quotas.of(tenant.name)
            assert quota is None or tenant.nbytes <= quota
        num_evicted = sum(tenant.num_evicted for tenant in self.tenants) + self.tenants.num_evicted_before
        assert num_evicted == self.index.stats().num_evicted


TestPool = Pool.TestCase
TestPool.settings = settings(max_examples=150, stateful_step_count=50)


@pytest.mark.parametrize("num_tenants", [1, 3, 1000])
def test_ever_so_many_evictions_are_fair(num_tenants: int):
    """While all store as much, all keep as much, and each its last: nobody's part is off by more than a chunk."""
    num_slots = num_tenants * 4
    free = list(range(num_slots))
    index = ChunkIndex(LeastRecentlyUsed(), lambda slot, _: free.append(slot), Tenants(Quotas(), num_slots))
    for number in range(num_slots * 3):
        while not free:
            assert index.evict() == 1
        owner = Owner(f"tenant {number % num_tenants}", "")
        index.seal(index.reserve(ChunkKey(b"%d" % number), None, free.pop(), 1, owner=owner), b"")
    assert {tenant.num_chunks for tenant in index.tenants} <= {3, 4, 5}
    assert all(index.get(ChunkKey(b"%d" % number)) for number in range(num_slots * 2 + num_tenants, num_slots * 3))


def test_what_is_being_written_counts_at_once():
    """A tenant whose chunks are still being written uses what they take, and gives up what it has before another."""
    index = ChunkIndex(LeastRecentlyUsed(), lambda slot, nbytes: None, Tenants(Quotas(), 10))
    for name in ("a0", "a1", "a2", "a3", "b0", "b1", "b2"):
        index.seal(index.reserve(ChunkKey(name.encode()), None, 0, 1, owner=Owner(name[0], "")), b"")
    assert index.evict() == 1
    assert index.get(ChunkKey(b"a0")) is None
    index.reserve(ChunkKey(b"b3"), None, 0, 1, owner=Owner("b", ""))
    assert index.evict() == 1
    assert index.get(ChunkKey(b"b0")) is None


def test_one_who_floods_takes_from_itself():
    """A tenant that stores without end leaves others their part, as small as it is."""
    free = list(range(10))
    index = ChunkIndex(LeastRecentlyUsed(), lambda slot, _: free.append(slot), Tenants(Quotas(), 10))

    def store(name: str, tenant: str) -> None:
        while not free:
            assert index.evict() == 1
        index.seal(index.reserve(ChunkKey(name.encode()), None, free.pop(), 1, owner=Owner(tenant, "")), b"")

    for number in range(3):
        store(f"quiet {number}", "quiet")
    for number in range(100):
        store(f"loud {number}", "loud")
    assert all(index.get(ChunkKey(b"quiet %d" % number)) for number in range(3))
    assert [number for number in range(100) if index.get(ChunkKey(b"loud %d" % number))] == [*range(93, 100)]
