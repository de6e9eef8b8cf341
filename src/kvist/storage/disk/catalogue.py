"""Which chunks a tier holds, as a forest of prefixes, in few bytes each.

The laws: a chunk's parent is in the catalogue for as long as the chunk is. Evictions take the longest unused leaf
that is settled and that nobody holds, so a prefix is eaten from its end. A row that is held when its chunk goes is
not used for another until it is let go.

A chunk is a row of columns, at 52 bytes, and an entry of one dictionary; what is read with its bytes stays on disk.
"""

from __future__ import annotations

import enum
import heapq
from array import array
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

from kvist.model.keys import ChunkKey

NO_ROW: Final = -1
_SCAN: Final = 256
"""How many victims one look at all rows finds."""

Rows = npt.NDArray[np.int64]


class RowState(enum.IntEnum):
    """Of a row: what has come of its chunk."""

    FREE = 0
    PENDING = 1
    """Being written: not found, not evicted."""
    SETTLED = 2
    """Found."""
    GONE = 3
    """Out of the catalogue while it was held."""


@dataclass(frozen=True, slots=True)
class Columns:
    """Rows at one instant, one array each, shape ``[n]``: a copy."""

    keys: list[ChunkKey]
    parents: npt.NDArray[np.int32]
    """Rows of the parents; ``NO_ROW`` without one."""
    pages: npt.NDArray[np.uint32]
    nbytes: npt.NDArray[np.uint32]
    slot_nbytes: npt.NDArray[np.uint32]
    header_pages: npt.NDArray[np.uint16]
    directories: npt.NDArray[np.uint8]
    states: npt.NDArray[np.uint8]
    last_used: npt.NDArray[np.int64]
    owners: npt.NDArray[np.uint16]


class Catalogue:
    """Rows of chunks. Callers see to it that one thread at a time is here."""

    def __init__(self) -> None:
        self._rows: dict[ChunkKey, int] = {}
        self.keys: list[ChunkKey] = []
        self.parent = array("i")
        self._first_child = array("i")
        self._next = array("i")
        """The next sibling; in a free row, the next free one."""
        self._previous = array("i")
        self.page = array("I")
        """Where the slot begins, in pages."""
        self.nbytes = array("I")
        self.slot_nbytes = array("I")
        self.header_pages = array("H")
        self.directory = array("B")
        self.state = array("B")
        self.holds = array("H")
        self.last_used = array("q")
        self.owner = array("H")
        """A number that its callers give."""
        self._free = NO_ROW
        self._clock = 0
        self._victims: list[tuple[int, int]] = []
        """A heap of ``(last_used, row)``: all leaves up to ``_horizon`` that may be evicted, and some that may not."""
        self._horizon = -1
        self.settled_nbytes = 0

    def __len__(self) -> int:
        return len(self._rows)

    def get(self, key: ChunkKey) -> int | None:
        """Return the row of a chunk, whatever has come of it so far."""
        return self._rows.get(key)

    def find(self, keys: Iterable[ChunkKey]) -> list[int | None]:
        """Return ``slot_nbytes`` of each settled chunk; None for others."""
        rows, state, slot_nbytes = self._rows, self.state, self.slot_nbytes
        settled = RowState.SETTLED
        return [slot_nbytes[row] if row is not None and state[row] == settled else None for row in map(rows.get, keys)]

    def touch(self, keys: Sequence[ChunkKey]) -> None:
        """Record one use of a whole prefix: the deeper a chunk, the older it is."""
        self._clock += len(keys)
        clock, last_used = self._clock, self.last_used
        for depth, row in enumerate(map(self._rows.get, keys)):
            if row is not None:
                last_used[row] = clock - depth

    def insert(
        self, key: ChunkKey, parent: int, nbytes: int, slot_nbytes: int, header_pages: int, owner: int = 0
    ) -> int:
        """Add a pending chunk below a row, or ``NO_ROW``; return its row."""
        assert key not in self._rows
        assert parent == NO_ROW or self.state[parent] in (RowState.PENDING, RowState.SETTLED)
        row = self._take_row()
        self._rows[key] = row
        self.keys[row] = key
        self.nbytes[row] = nbytes
        self.slot_nbytes[row] = slot_nbytes
        self.header_pages[row] = header_pages
        self.owner[row] = owner
        self.state[row] = RowState.PENDING
        self._clock += 1
        self.last_used[row] = self._clock
        self.parent[row] = parent
        self._first_child[row] = self._previous[row] = self._next[row] = NO_ROW
        if parent != NO_ROW:
            after = self._first_child[parent]
            self._next[row] = after
            if after != NO_ROW:
                self._previous[after] = row
            self._first_child[parent] = row
        return row

    def settle(self, row: int) -> None:
        """Let a pending chunk, whose parent is settled, be found."""
        assert self.state[row] == RowState.PENDING
        assert self.parent[row] == NO_ROW or self.state[self.parent[row]] == RowState.SETTLED
        self.state[row] = RowState.SETTLED
        self.settled_nbytes += self.nbytes[row]
        self._offer(row)

    def hold(self, row: int) -> None:
        """Keep a settled chunk's row from eviction and re-use."""
        assert self.state[row] == RowState.SETTLED
        self.holds[row] += 1

    def let_go(self, row: int) -> bool:
        """Undo one ``hold``; return whether the chunk was removed meanwhile and nobody holds its row any more."""
        assert self.holds[row] > 0
        self.holds[row] -= 1
        if self.holds[row]:
            return False
        if self.state[row] == RowState.GONE:
            return True
        self._offer(row)
        return False

    def subtree(self, row: int) -> list[int]:
        """Return a row and all below it, each behind its parent."""
        below = [row]
        for node in below:
            child = self._first_child[node]
            while child != NO_ROW:
                below.append(child)
                child = self._next[child]
        return below

    def is_leaf_of(self, row: int, owners: Collection[int], *, or_above: bool) -> bool:
        """Return whether a row has a chunk of some owners with nothing below it, or, if that does not matter, any."""
        if row == NO_ROW or self.state[row] not in (RowState.PENDING, RowState.SETTLED):
            return False
        return self.owner[row] in owners and (or_above or self._first_child[row] == NO_ROW)

    def remove(self, row: int) -> None:
        """Take a leaf out of the catalogue. Its row stays as it is until ``free`` or, if held, the last ``let_go``."""
        assert self._first_child[row] == NO_ROW
        assert self.state[row] in (RowState.PENDING, RowState.SETTLED)
        if self.state[row] == RowState.SETTLED:
            self.settled_nbytes -= self.nbytes[row]
        del self._rows[self.keys[row]]
        before, after, parent = self._previous[row], self._next[row], self.parent[row]
        if before != NO_ROW:
            self._next[before] = after
        elif parent != NO_ROW:
            self._first_child[parent] = after
        if after != NO_ROW:
            self._previous[after] = before
        self.parent[row] = self._previous[row] = self._next[row] = NO_ROW
        self.state[row] = RowState.GONE
        if parent != NO_ROW:
            self._offer(parent)

    def free(self, row: int) -> None:
        """Let a removed row be used again."""
        assert self.state[row] == RowState.GONE
        assert self.holds[row] == 0
        self.state[row] = RowState.FREE
        self.keys[row] = ChunkKey(b"")
        self._next[row] = self._free
        self._free = row

    def next_victim(self) -> int | None:
        """Return the settled leaf, held by nobody, that was unused for longest; None if there is none."""
        while True:
            while self._victims:
                last_used, row = self._victims[0]
                if self._is_evictable(row) and self.last_used[row] == last_used:
                    return row
                heapq.heappop(self._victims)
                self._offer(row)
            if not self._scan():
                return None

    def columns(self) -> Columns:
        """Return a copy of all rows, to be looked at by another thread."""
        return Columns(
            keys=self.keys[:],
            parents=np.array(self.parent, dtype=np.int32),
            pages=np.array(self.page, dtype=np.uint32),
            nbytes=np.array(self.nbytes, dtype=np.uint32),
            slot_nbytes=np.array(self.slot_nbytes, dtype=np.uint32),
            header_pages=np.array(self.header_pages, dtype=np.uint16),
            directories=np.array(self.directory, dtype=np.uint8),
            states=np.array(self.state, dtype=np.uint8),
            last_used=np.array(self.last_used, dtype=np.int64),
            owners=np.array(self.owner, dtype=np.uint16),
        )

    def load(self, columns: Columns, rows: dict[ChunkKey, int] | None = None) -> None:
        """Fill an empty catalogue with settled chunks, each of whose parents is among them.

        ``rows``, which the catalogue keeps, says which is whose, if that is known already.
        """
        assert not self.keys
        num = len(columns.keys)
        self._rows = rows if rows is not None else dict(zip(columns.keys, range(num), strict=True))
        assert len(self._rows) == num
        self.keys = columns.keys
        self.parent.frombytes(columns.parents.tobytes())
        self.page.frombytes(columns.pages.tobytes())
        self.nbytes.frombytes(columns.nbytes.tobytes())
        self.slot_nbytes.frombytes(columns.slot_nbytes.tobytes())
        self.header_pages.frombytes(columns.header_pages.tobytes())
        self.directory.frombytes(columns.directories.tobytes())
        self.state.frombytes(np.full(num, RowState.SETTLED, dtype=np.uint8).tobytes())
        self.holds.frombytes(bytes(2 * num))
        self.last_used.frombytes(columns.last_used.tobytes())
        self.owner.frombytes(columns.owners.tobytes())
        self._clock = int(columns.last_used.max(initial=0))
        first, following, previous = _link(columns.parents)
        self._first_child.frombytes(first.tobytes())
        self._next.frombytes(following.tobytes())
        self._previous.frombytes(previous.tobytes())
        self.settled_nbytes = int(columns.nbytes.sum(dtype=np.int64))

    def check_invariants(self) -> None:
        """Assert the module's laws over all rows. For tests."""
        assert all(self.keys[row] == key for key, row in self._rows.items())
        live = set(self._rows.values())
        settled = 0
        for row in range(len(self.keys)):
            if row not in live:
                assert self.state[row] in (RowState.FREE, RowState.GONE)
                continue
            settled += self.nbytes[row] * (self.state[row] == RowState.SETTLED)
            parent = self.parent[row]
            if parent != NO_ROW:
                assert parent in live, "a chunk outlived its parent"
                assert self.state[row] == RowState.PENDING or self.state[parent] == RowState.SETTLED
                assert row in self.subtree(parent)
        assert settled == self.settled_nbytes

    def _take_row(self) -> int:
        row = self._free
        if row != NO_ROW:
            self._free = self._next[row]
            return row
        self.keys.append(ChunkKey(b""))
        for column in (
            self.parent, self._first_child, self._next, self._previous, self.page, self.nbytes, self.slot_nbytes,
            self.header_pages, self.directory, self.state, self.holds, self.last_used, self.owner,
        ):  # fmt: skip
            column.append(0)
        return len(self.keys) - 1

    def _is_evictable(self, row: int) -> bool:
        return self.state[row] == RowState.SETTLED and self._first_child[row] == NO_ROW and self.holds[row] == 0

    def _offer(self, row: int) -> None:
        """Note a leaf that the last look at all rows may have missed."""
        if self.last_used[row] <= self._horizon and self._is_evictable(row):
            if len(self._victims) > 4 * _SCAN:
                self._victims = []
                self._horizon = -1
                return
            heapq.heappush(self._victims, (self.last_used[row], row))

    def _scan(self) -> bool:
        """Look at all rows for the next victims; return whether there are any."""
        state = np.frombuffer(self.state, dtype=np.uint8)
        first_child = np.frombuffer(self._first_child, dtype=np.int32)
        holds = np.frombuffer(self.holds, dtype=np.uint16)
        last_used = np.frombuffer(self.last_used, dtype=np.int64)
        leaves = np.flatnonzero((state == RowState.SETTLED) & (first_child == NO_ROW) & (holds == 0))
        if len(leaves) > _SCAN:
            leaves = leaves[np.argpartition(last_used[leaves], _SCAN)[:_SCAN]]
        self._victims = sorted(zip(last_used[leaves].tolist(), leaves.tolist(), strict=True))
        self._horizon = self._victims[-1][0] if self._victims else -1
        return bool(self._victims)


def closed_rows(parents: npt.NDArray[np.int32], is_there: npt.NDArray[np.bool_]) -> npt.NDArray[np.bool_]:
    """Return which rows are there with all that is above them, shape ``[n]``.

    ``parents`` are rows, ``NO_ROW`` for none. As many steps as the deepest prefix has bits, not chunks.
    """
    is_closed = is_there.copy()
    above = np.where(parents == NO_ROW, np.arange(len(parents)), parents)
    while True:
        is_closed &= is_closed[above]
        further = above[above]
        if np.array_equal(further, above):
            return is_closed
        above = further


def _link(parents: npt.NDArray[np.int32]) -> tuple[npt.NDArray[np.int32], ...]:
    """Return first child, next and previous sibling of each row."""
    num = len(parents)
    first, following, previous = (np.full(num, NO_ROW, dtype=np.int32) for _ in range(3))
    children = np.flatnonzero(parents != NO_ROW)
    children = children[np.argsort(parents[children], kind="stable")]
    above = parents[children]
    is_next = above[1:] == above[:-1]
    following[children[:-1][is_next]] = children[1:][is_next]
    previous[children[1:][is_next]] = children[:-1][is_next]
    starts = np.ones(len(children), dtype=np.bool_)
    starts[1:] = ~is_next
    first[above[starts]] = children[starts]
    return first, following, previous
