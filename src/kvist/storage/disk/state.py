"""What the disk tier knows and decides; no thread, no clock, no file.

The laws: a chunk is found only after its bytes and its record are durable, and its parent is found. A slot is free
only after nobody reads or writes it and no record that is durable names it. Each read and each write that was taken on
ends once. Callers hold the tier's lock; nothing here takes longer than memory does.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Final

import numpy as np
from xxhash import xxh3_64_intdigest

from kvist.model.keys import ChunkKey
from kvist.model.owners import IsOwner, Owner, Owners
from kvist.storage.base import StoredChunk
from kvist.storage.disk.catalogue import NO_ROW, Catalogue, Columns, RowState
from kvist.storage.disk.format import PAGE_NBYTES, chunk_header_nbytes, encode_drop, encode_put
from kvist.storage.disk.names import LogNames
from kvist.storage.slots import SlotAllocator
from kvist.units import MIB, align_up

_COMMIT_ENTRIES: Final = 64
_COMMIT_NBYTES: Final = 64 * MIB
_PURGE_WORK: Final = 1024
"""Rows that one step of a purge looks at; one that is removed counts for several."""
_REMOVAL_WORK: Final = 8
_VICTIMS_MAX: Final = 64
"""How many chunks are evicted for one write before the disk is asked to let go of them."""


@dataclass(slots=True, eq=False)
class Read:
    """A chunk on its way from the disk."""

    key: ChunkKey
    target: memoryview
    """As long as the payload."""
    on_done: Callable[[StoredChunk | None], None]
    row: int
    """``NO_ROW`` if there is nothing to read."""
    offset: int
    header_nbytes: int
    slot_nbytes: int


@dataclass(slots=True, eq=False)
class Write:
    """A chunk on its way to the disk."""

    chunk: StoredChunk
    source: memoryview
    on_done: Callable[[bool], None]
    row: int
    disk_nbytes: int
    """Of its slot."""
    offset: int = 0
    """0 as long as it has no slot."""
    is_dropped: bool = False
    has_record: bool = False
    followers: list[Write] = field(default_factory=list)
    """Below this one, with durable records, waiting to be found."""


@dataclass(frozen=True, slots=True)
class Drop:
    """A record that must be undone before its slot is used again."""

    key: ChunkKey
    offset: int
    disk_nbytes: int


@dataclass(frozen=True, slots=True)
class Commit:
    """What becomes durable together."""

    drops: list[Drop]
    writes: list[Write]
    entries: bytes


@dataclass(slots=True, eq=False)
class Lane:
    """One directory's work."""

    number: int
    data_offset: int
    slots: SlotAllocator
    chunks_max: int
    names: LogNames
    num_slots: int = 0
    off_reason: str = ""
    reads: deque[Read] = field(default_factory=deque)
    writes: deque[Write] = field(default_factory=deque)
    """With slots."""
    waiting: deque[Write] = field(default_factory=deque)
    """For slots."""
    written: deque[Write] = field(default_factory=deque)
    """Not yet durable."""
    written_nbytes: int = 0
    drops: deque[Drop] = field(default_factory=deque)
    ended: deque[Callable[[], None]] = field(default_factory=deque)
    """Completions to be called without the lock."""
    num_writing: int = 0
    num_retiring: Counter[int] = field(default_factory=Counter)
    """Slots that are free after a commit, by their bytes."""
    num_waiting: Counter[int] = field(default_factory=Counter)
    num_errors: int = 0
    """Reads that failed one behind another."""

    @property
    def num_entries(self) -> int:
        """Of a log that has just been written anew."""
        return self.num_slots + self.names.num_entries


class DiskState:
    """All of the tier but its bytes."""

    def __init__(self, catalogue: Catalogue, owners: Owners, lanes: Sequence[Lane], *, writers_max: int) -> None:
        """Begin with what the directories held; ``writers_max`` writes of a lane run at once."""
        self.catalogue = catalogue
        self._owners = owners
        self.lanes = list(lanes)
        self.counters: Counter[str] = Counter()
        self.queued_read_nbytes = 0
        self.queued_write_nbytes = 0
        self._writes: dict[int, Write] = {}
        self.writers_max = writers_max

    @property
    def num_writes(self) -> int:
        """Writes that have not ended."""
        return len(self._writes)

    @property
    def used_nbytes(self) -> int:
        return sum(lane.slots.used_nbytes for lane in self.lanes if not lane.off_reason)

    def read(self, key: ChunkKey, target: memoryview, on_done: Callable[[StoredChunk | None], None]) -> Lane:
        """Queue a read; return the lane that carries it out, or says that there is nothing."""
        catalogue = self.catalogue
        row = catalogue.get(key)
        if row is None or catalogue.state[row] != RowState.SETTLED:
            lane = min(self.lanes, key=lambda lane: len(lane.reads))
            lane.reads.append(Read(key, target[:0], on_done, NO_ROW, 0, 0, 0))
            return lane
        nbytes = catalogue.nbytes[row]
        assert len(target) >= nbytes, f"{len(target)} bytes for a chunk of {nbytes}"
        catalogue.hold(row)
        self.queued_read_nbytes += nbytes
        lane = self.lanes[catalogue.directory[row]]
        offset, header_nbytes = catalogue.page[row] * PAGE_NBYTES, catalogue.header_pages[row] * PAGE_NBYTES
        read = Read(key, target[:nbytes], on_done, row, offset, header_nbytes, catalogue.slot_nbytes[row])
        lane.reads.append(read)
        return lane

    def refusal(self, chunk: StoredChunk, write_nbytes_max: float) -> str:
        """Return why a chunk is not taken on; empty if it is."""
        catalogue = self.catalogue
        lane = self._lane_of(chunk.key)
        if lane is None:
            return "off"
        if catalogue.get(chunk.key) is not None:
            return "known"
        if chunk.parent is not None and catalogue.get(chunk.parent) is None:
            return "parent"
        if _disk_nbytes(chunk) > lane.slots.extent_nbytes:
            return "too_large"
        number = self._owners.number(chunk.owner)
        if number is None or not lane.names.has_room(number, chunk.owner):
            return "owners"
        if self._writes and self.queued_write_nbytes + chunk.nbytes > write_nbytes_max:
            return "busy"
        return ""

    def write(self, chunk: StoredChunk, source: memoryview, on_done: Callable[[bool], None]) -> Lane:
        """Take a chunk on that is not refused; return its lane."""
        catalogue = self.catalogue
        lane = self._lane_of(chunk.key)
        assert lane is not None
        parent = NO_ROW if chunk.parent is None else catalogue.get(chunk.parent)
        assert parent is not None
        header_pages = chunk_header_nbytes(chunk.checksum) // PAGE_NBYTES
        owner = self._owners.number(chunk.owner)
        assert owner is not None
        lane.names.add(owner, chunk.owner)
        row = catalogue.insert(chunk.key, parent, chunk.nbytes, chunk.slot_nbytes, header_pages, owner)
        catalogue.directory[row] = lane.number
        write = Write(chunk, source, on_done, row, align_up(_disk_nbytes(chunk), PAGE_NBYTES))
        self._writes[row] = write
        self.queued_write_nbytes += chunk.nbytes
        lane.waiting.append(write)
        lane.num_waiting[write.disk_nbytes] += 1
        self._place_waiting(lane)
        return lane

    def drop(self, key: ChunkKey) -> None:
        """Forget a chunk and all below it."""
        row = self.catalogue.get(key)
        if row is not None:
            self.counters["chunks_dropped"] += self._remove(row)

    def owner(self, key: ChunkKey) -> Owner | None:
        """Return whose a settled chunk is; None if there is none."""
        row = self.catalogue.get(key)
        is_found = row is not None and self.catalogue.state[row] == RowState.SETTLED
        return self._owners[self.catalogue.owner[row]] if is_found and row is not None else None

    def purge(self, is_owner: IsOwner) -> Iterator[int]:
        """Forget what some owners have and all below it, a slice at each step; yield how many chunks they were.

        Leaves first: a prefix as a whole would be too much for one step.
        """
        catalogue, owners = self.catalogue, self._owners.numbers_of(is_owner)
        num_removed = work = 0
        for or_above in (False, True):
            start = 0
            while start < len(catalogue.keys):
                row = start
                while work < _PURGE_WORK and catalogue.is_leaf_of(row, owners, or_above=or_above):
                    above = catalogue.parent[row]
                    num_removed += self._remove(row)
                    work += _REMOVAL_WORK
                    row = above
                if work >= _PURGE_WORK:
                    self.counters["chunks_dropped"] += num_removed
                    yield num_removed
                    num_removed = work = 0
                else:
                    start += 1
                    work += 1
        self.counters["chunks_dropped"] += num_removed
        yield num_removed

    def begin_read(self, lane: Lane) -> Read | None:
        """Return the next read."""
        return lane.reads.popleft() if lane.reads else None

    def begin_write(self, lane: Lane) -> Write | None:
        """Return the next write, unless enough of them run."""
        while lane.writes and lane.num_writing < self.writers_max:
            write = lane.writes.popleft()
            if not write.is_dropped:
                lane.num_writing += 1
                return write
            self._abandon(lane, write)
        return None

    def end_read(self, lane: Lane, read: Read, chunk: StoredChunk | None) -> StoredChunk | None:
        """Take note of what was read; return what may be handed out."""
        if read.row == NO_ROW:
            return None
        catalogue, row = self.catalogue, read.row
        self.queued_read_nbytes -= len(read.target)
        is_right = chunk is not None and chunk.key == read.key and chunk.slot_nbytes == read.slot_nbytes
        is_here, owner = catalogue.state[row] == RowState.SETTLED, catalogue.owner[row]
        if is_here and not is_right and not lane.off_reason:
            self.counters["chunks_damaged"] += 1
            self.counters["chunks_dropped"] += self._remove(row)
        if catalogue.let_go(row):
            self._retire(row)
        if not is_here or not is_right:
            return None
        self.counters["chunks_read"] += 1
        self.counters["bytes_read"] += len(read.target)
        assert chunk is not None
        return replace(chunk, owner=self._owners[owner])

    def end_write(self, lane: Lane, write: Write) -> None:
        """Take note of bytes that were written: they are not durable yet."""
        lane.num_writing -= 1
        if write.is_dropped:
            self._abandon(lane, write)
        else:
            lane.written.append(write)
            lane.written_nbytes += write.disk_nbytes

    def is_commit_due(self, lane: Lane) -> bool:
        """Return whether it is time to make durable what was written and dropped: for much at once, or for what waits.

        A sync costs about as much for one chunk as for many, so it is put off while there is more to write.
        """
        if not (lane.written or lane.drops):
            return False
        if len(lane.written) + len(lane.drops) >= _COMMIT_ENTRIES or lane.written_nbytes >= _COMMIT_NBYTES:
            return True
        if lane.waiting and len(lane.writes) <= self.writers_max:
            return True
        return not lane.writes and not lane.num_writing

    def begin_commit(self, lane: Lane, num_max: int) -> Commit | None:
        """Return what is to be made durable now; None if nothing is."""
        drops = [lane.drops.popleft() for _ in range(min(len(lane.drops), num_max))]
        writes: list[Write] = []
        while lane.written and len(drops) + len(writes) < num_max:
            write = lane.written.popleft()
            lane.written_nbytes -= write.disk_nbytes
            if write.is_dropped:
                self._abandon(lane, write)
            else:
                writes.append(write)
        if not drops and not writes:
            return None
        return Commit(drops, writes, self._encode(lane, drops, writes))

    def end_commit(self, lane: Lane, commit: Commit) -> None:
        """Take note of what is durable: slots are free, chunks are found."""
        for drop in commit.drops:
            self._free_slot(lane, drop.offset, drop.disk_nbytes)
            lane.num_retiring[drop.disk_nbytes] -= 1
        for write in commit.writes:
            write.has_record = True
            if write.is_dropped:
                self._end(lane, write, is_found=False)
                self._retire(write.row)
            else:
                self._settle(write)
        self._place_waiting(lane)

    def turn_off(self, lane: Lane, reason: str, commit: Commit | None = None) -> None:
        """Give a directory up, with all that it holds and was to do; ``commit`` failed."""
        if not lane.off_reason:
            lane.off_reason = reason
            for row in self._rows_of(lane):
                if self.catalogue.state[row] in (RowState.PENDING, RowState.SETTLED):
                    self._remove(row)
        self.give_up(lane)
        for write in [*lane.written, *(commit.writes if commit is not None else ())]:
            self._abandon(lane, write)
        lane.written.clear()
        lane.written_nbytes = 0
        lane.drops.clear()

    def give_up(self, lane: Lane) -> None:
        """End all that has not begun."""
        for read in lane.reads:
            self._let_go(read)
            lane.ended.append(partial(read.on_done, None))
        for write in [*lane.writes, *lane.waiting]:
            self._abandon(lane, write)
        lane.reads.clear()
        lane.writes.clear()
        lane.waiting.clear()
        lane.num_waiting.clear()

    def columns(self) -> Columns:
        """Return a copy of the catalogue in which all chunks are settled that have a durable record."""
        columns = self.catalogue.columns()
        for row, write in self._writes.items():
            if write.has_record:
                columns.states[row] = RowState.SETTLED
        return columns

    def _lane_of(self, key: ChunkKey) -> Lane | None:
        lanes = [lane for lane in self.lanes if not lane.off_reason]
        return lanes[xxh3_64_intdigest(key) % len(lanes)] if lanes else None

    def _rows_of(self, lane: Lane) -> list[int]:
        columns = self.catalogue.columns()
        is_live = (columns.states == RowState.PENDING) | (columns.states == RowState.SETTLED)
        rows: list[int] = np.flatnonzero(is_live & (columns.directories == lane.number)).tolist()
        return rows

    def _place_waiting(self, lane: Lane) -> None:
        """Give slots to writes that wait for them, in their order; evict for those that must wait on."""
        while lane.waiting and not lane.off_reason:
            write = lane.waiting[0]
            if not write.is_dropped:
                offset = lane.slots.allocate(write.disk_nbytes) if lane.num_entries < lane.chunks_max else None
                if offset is None:
                    if self._evict(lane, write.disk_nbytes):
                        return
                    self.counters["refused_no_room"] += 1
                    self._remove(write.row)
                else:
                    lane.num_slots += 1
                    write.offset = lane.data_offset + offset
                    self.catalogue.page[write.row] = write.offset // PAGE_NBYTES
                    lane.writes.append(write)
            lane.waiting.popleft()
            lane.num_waiting[write.disk_nbytes] -= 1
            if not write.offset:
                self._abandon(lane, write)

    def _evict(self, lane: Lane, disk_nbytes: int) -> bool:
        """See to it that slots get free for what waits; return False if none will."""
        num_evicted = 0
        while lane.num_retiring[disk_nbytes] < lane.num_waiting[disk_nbytes] and num_evicted < _VICTIMS_MAX:
            victim = self.catalogue.next_victim()
            if victim is None:
                break
            self.counters["bytes_evicted"] += self.catalogue.nbytes[victim]
            self.counters["chunks_evicted"] += self._remove(victim)
            num_evicted += 1
        return any(number > 0 for number in lane.num_retiring.values())

    def _remove(self, row: int) -> int:
        """Take a chunk and all below it out of the catalogue; return how many they were."""
        catalogue = self.catalogue
        below = catalogue.subtree(row)
        for node in reversed(below):
            catalogue.remove(node)
            write = self._writes.get(node)
            if write is not None:
                write.is_dropped = True
                if not write.has_record:
                    continue
                self._end(self.lanes[catalogue.directory[node]], write, is_found=False)
            if not catalogue.holds[node]:
                self._retire(node)
        return len(below)

    def _retire(self, row: int) -> None:
        """See to it that the record of a removed chunk is undone, and then its slot is free."""
        catalogue = self.catalogue
        lane = self.lanes[catalogue.directory[row]]
        nbytes = catalogue.header_pages[row] * PAGE_NBYTES + align_up(catalogue.slot_nbytes[row], PAGE_NBYTES)
        if not lane.off_reason:
            lane.drops.append(Drop(catalogue.keys[row], catalogue.page[row] * PAGE_NBYTES, nbytes))
            lane.num_retiring[nbytes] += 1
        catalogue.free(row)

    def _settle(self, write: Write) -> None:
        """Let a durable chunk be found, and all that waited for it; or wait for its parent."""
        catalogue = self.catalogue
        ready = [write]
        for node in ready:
            if node.is_dropped:
                continue
            parent = catalogue.parent[node.row]
            if parent != NO_ROW and catalogue.state[parent] == RowState.PENDING:
                self._writes[parent].followers.append(node)
                continue
            catalogue.settle(node.row)
            self.counters["chunks_written"] += 1
            self.counters["bytes_written"] += node.chunk.nbytes
            self._end(self.lanes[catalogue.directory[node.row]], node, is_found=True)
            ready += node.followers

    def _abandon(self, lane: Lane, write: Write) -> None:
        """End a write that has no record."""
        assert not write.has_record
        if not write.is_dropped:
            self._remove(write.row)
        if write.offset and not lane.off_reason:
            self._free_slot(lane, write.offset, write.disk_nbytes)
        self._end(lane, write, is_found=False)
        self.catalogue.free(write.row)

    def _let_go(self, read: Read) -> None:
        if read.row != NO_ROW:
            self.queued_read_nbytes -= len(read.target)
            if self.catalogue.let_go(read.row):
                self._retire(read.row)

    def _end(self, lane: Lane, write: Write, *, is_found: bool) -> None:
        del self._writes[write.row]
        self.queued_write_nbytes -= write.chunk.nbytes
        lane.ended.append(partial(write.on_done, is_found))

    def _free_slot(self, lane: Lane, offset: int, disk_nbytes: int) -> None:
        lane.slots.free(offset - lane.data_offset, disk_nbytes)
        lane.num_slots -= 1

    def _encode(self, lane: Lane, drops: Sequence[Drop], writes: Sequence[Write]) -> bytes:
        catalogue = self.catalogue
        entries = [lane.names.take_unsaid(), *(encode_drop(drop.key, drop.offset) for drop in drops)]
        for write in writes:
            row = write.row
            header_pages, last_used = catalogue.header_pages[row], catalogue.last_used[row]
            entries.append(encode_put(write.chunk, catalogue.owner[row], header_pages, write.offset, last_used))
        return b"".join(entries)


def _disk_nbytes(chunk: StoredChunk) -> int:
    return chunk_header_nbytes(chunk.checksum) + chunk.slot_nbytes
