"""The catalogue against a model: closed under prefixes, the longest unused leaf first, rows used once."""

from __future__ import annotations

import sys
from array import array

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kvist.storage.disk import catalogue as module
from kvist.storage.disk.catalogue import NO_ROW, Catalogue, RowState, closed_rows
from tests.support.tiers import key_of

NAMES = [f"{number}" for number in range(14)]


class CatalogueMachine(RuleBasedStateMachine):
    @initialize(scan=st.sampled_from([1, 2, 256]))
    def begin(self, scan: int) -> None:
        module._SCAN = scan
        self.catalogue = Catalogue()
        self.parents: dict[str, str | None] = {}
        self.settled: set[str] = set()
        self.holds: dict[str, int] = {}
        self.gone: dict[int, int] = {}
        self.used: dict[str, int] = {}
        self.clock = 0

    def row(self, name: str) -> int:
        row = self.catalogue.get(key_of(name))
        assert row is not None
        return row

    def leaves(self) -> list[str]:
        above = set(self.parents.values())
        free = [n for n in self.settled if n not in above and not self.holds.get(n)]
        return sorted(free, key=lambda name: self.used[name])

    @rule(name=st.sampled_from(NAMES), data=st.data())
    def insert(self, name: str, data: st.DataObject) -> None:
        if name in self.parents:
            return
        parent = data.draw(st.sampled_from([None, *sorted(self.parents)]))
        self.catalogue.insert(key_of(name), NO_ROW if parent is None else self.row(parent), 100, 4096, 1)
        self.clock += 1
        self.parents[name] = parent
        self.used[name] = self.clock

    @rule(data=st.data())
    def settle(self, data: st.DataObject) -> None:
        ready = [n for n, p in self.parents.items() if n not in self.settled and (p is None or p in self.settled)]
        if ready:
            name = data.draw(st.sampled_from(sorted(ready)))
            self.catalogue.settle(self.row(name))
            self.settled.add(name)

    @rule(data=st.data())
    def touch(self, data: st.DataObject) -> None:
        prefix: list[str] = []
        name = data.draw(st.sampled_from([None, *sorted(self.parents)]))
        while name is not None:
            prefix.insert(0, name)
            name = self.parents[name]
        self.catalogue.touch([key_of(name) for name in prefix])
        self.clock += len(prefix)
        for depth, name in enumerate(prefix):
            self.used[name] = self.clock - depth

    @precondition(lambda self: self.settled)
    @rule(data=st.data())
    def hold(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(self.settled)))
        self.catalogue.hold(self.row(name))
        self.holds[name] = self.holds.get(name, 0) + 1

    @rule(data=st.data())
    def let_go(self, data: st.DataObject) -> None:
        held = sorted(name for name, num in self.holds.items() if num)
        if held:
            name = data.draw(st.sampled_from(held))
            assert not self.catalogue.let_go(self.row(name))
            self.holds[name] -= 1

    @rule()
    def let_go_of_what_is_gone(self) -> None:
        for row in list(self.gone):
            self.gone[row] -= 1
            assert self.catalogue.let_go(row) is (self.gone[row] == 0)
            if not self.gone[row]:
                del self.gone[row]
                self.catalogue.free(row)

    @rule()
    def evict(self) -> None:
        leaves = self.leaves()
        victim = self.catalogue.next_victim()
        assert (victim is None) == (not leaves)
        if victim is not None:
            assert self.catalogue.keys[victim] == key_of(leaves[0])
            self.remove_one(leaves[0])

    @precondition(lambda self: self.parents)
    @rule(data=st.data())
    def drop(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(self.parents)))
        below = [name]
        for node in below:
            below += [child for child, parent in self.parents.items() if parent == node]
        rows = self.catalogue.subtree(self.row(name))
        assert sorted(rows) == sorted(self.row(node) for node in below)
        assert rows[0] == self.row(name)
        for node in reversed(below):
            self.remove_one(node)

    def remove_one(self, name: str) -> None:
        row = self.row(name)
        self.catalogue.remove(row)
        num = self.holds.pop(name, 0)
        if num:
            self.gone[row] = num
        else:
            self.catalogue.free(row)
        del self.parents[name]
        self.settled.discard(name)

    @rule()
    def reload(self) -> None:
        """A catalogue that is written down and read again is the same, if all is settled."""
        if self.gone or any(self.holds.values()) or set(self.parents) != self.settled:
            return
        columns = self.catalogue.columns()
        rows = np.flatnonzero(columns.states == RowState.SETTLED)
        places = {row: place for place, row in enumerate(rows.tolist())}
        kept = module.Columns(
            keys=[columns.keys[row] for row in rows.tolist()],
            parents=np.array([places.get(row, NO_ROW) for row in columns.parents[rows].tolist()], dtype=np.int32),
            pages=columns.pages[rows], nbytes=columns.nbytes[rows], slot_nbytes=columns.slot_nbytes[rows],
            header_pages=columns.header_pages[rows], directories=columns.directories[rows],
            states=columns.states[rows], last_used=columns.last_used[rows], owners=columns.owners[rows],
        )  # fmt: skip
        self.catalogue = Catalogue()
        self.catalogue.load(kept)
        self.clock = self.catalogue._clock

    @invariant()
    def agrees(self) -> None:
        if hasattr(self, "catalogue"):
            self.catalogue.check_invariants()
            found = self.catalogue.find([key_of(name) for name in NAMES])
            assert [size is not None for size in found] == [name in self.settled for name in NAMES]
            assert len(self.catalogue) == len(self.parents)
            assert self.catalogue.settled_nbytes == 100 * len(self.settled)

    def teardown(self) -> None:
        module._SCAN = 256


TestCatalogue = CatalogueMachine.TestCase
TestCatalogue.settings = settings(max_examples=80, stateful_step_count=50)


def test_only_whole_prefixes_are_kept():
    """Whatever is missing, what is kept has all that is above it, at any depth."""
    chance = np.random.default_rng(3)
    for num in (0, 1, 2, 700):
        parents = np.array([chance.integers(-1, row) if row else NO_ROW for row in range(num)], dtype=np.int32)
        parents[num // 2 :] = np.arange(num // 2, num) - 1
        is_there = chance.random(num) > 0.01
        expected = is_there.copy()
        for row in range(num):
            expected[row] &= parents[row] == NO_ROW or expected[parents[row]]
        assert np.array_equal(closed_rows(parents, is_there), expected)


def test_a_chunk_takes_few_bytes():
    """Columns, dictionary and key of a chunk are at most 250 bytes."""
    catalogue = Catalogue()
    num = 90_000
    for number in range(num):
        catalogue.insert(key_of(f"{number}"), NO_ROW, 100, 4096, 1)
    columns = sum(sys.getsizeof(value) for value in vars(catalogue).values() if isinstance(value, array | list))
    whole = columns + sys.getsizeof(catalogue._rows) + num * (sys.getsizeof(key_of("1")) + sys.getsizeof(num))
    assert whole / num <= 250
