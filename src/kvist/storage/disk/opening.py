"""Directories of the disk tier to a catalogue, and back to what their logs say.

The laws: what is in the catalogue lies in a slot of its own, inside the slab, and its parent is in the catalogue,
wherever it lies. What is not is in no log either before anything new is written.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import repeat
from pathlib import Path
from typing import Final

import numpy as np
import numpy.typing as npt

from kvist.device.libc import trim_memory
from kvist.model.keys import ChunkKey
from kvist.model.owners import NOBODY, Owner, Owners
from kvist.storage.disk.catalogue import NO_ROW, Catalogue, Columns, RowState, closed_rows
from kvist.storage.disk.directory import DiskDirectory
from kvist.storage.disk.files import Files
from kvist.storage.disk.format import (
    ENTRY,
    HAS_PARENT,
    NO_KEY,
    PAGE_NBYTES,
    PUT,
    Entries,
    encode_names,
    num_name_entries,
)  # fmt: skip
from kvist.storage.disk.log import Loaded
from kvist.storage.slots import SlotAllocator

logger = logging.getLogger(__name__)

_UNKNOWN_PARENT: Final = -2
_CHUNK_NBYTES_MAX: Final = 2**32 - 1


@dataclass(frozen=True, slots=True)
class Opened:
    """Directories that are ready to be used, and what they hold."""

    directories: list[DiskDirectory]
    catalogue: Catalogue
    owners: Owners
    named: list[dict[int, Owner]]
    """Whose numbers each directory's log says."""
    num_lost: int
    """Chunks that a log named and that are not there, or of no use."""
    num_torn_nbytes: int
    """Of logs, behind the last whole batch."""
    num_begun_anew: int
    """Directories that were damaged."""


def open_directories(files: Files, paths: Sequence[Path], nbytes: int) -> Opened:
    """Open directories that share ``nbytes`` of disk, and drop what does not fit or cannot be used.

    Raises:
        ConfigError: one of them cannot be used. The files of all are as they were, unless the disk itself refused.
    """
    with ExitStack() as undo:
        directories = []
        for path in paths:
            directory = DiskDirectory(files, path, is_created=True)
            undo.callback(directory.close)
            directories.append(directory)
        torn = [d.loaded.num_torn_nbytes if d.loaded is not None else 0 for d in directories]
        num_named = sum(len(d.loaded.rows) if d.loaded is not None else 0 for d in directories)
        num_begun_anew = sum(directory.is_damaged for directory in directories)
        for directory in directories:
            if directory.is_damaged:
                logger.warning("disk begun anew, its files do not belong together path=%s", directory.path)
            directory.plan(nbytes // len(directories))
        merged = _Merged.of(directories)
        columns, is_kept = merged.keep(directories)
        named = [_named(columns, number, merged.owners) for number in range(len(directories))]
        catalogue = Catalogue()
        catalogue.load(columns, merged.rows if is_kept.all() else None)
        for number, directory in enumerate(directories):
            is_whole = (
                bool(is_kept[merged.directories == number].all()) and torn[number] == 0 and directory.loaded is not None
            )
            is_whole = is_whole and not directory.is_loaded_log_due() and not merged.is_renumbered[number]
            directory.prepare(None if is_whole else encode_log(columns, number, named[number]))
        owners = merged.owners
        undo.pop_all()
    del merged, columns, is_kept
    trim_memory()  # Reading a log takes some times what is kept of it.
    num_lost = num_named - len(catalogue)
    if num_lost or any(torn):
        logger.warning("disk chunks lost chunks=%d torn_nbytes=%d", num_lost, sum(torn))
    return Opened(directories, catalogue, owners, named, num_lost, sum(torn), num_begun_anew)


def encode_log(columns: Columns, directory: int, named: Mapping[int, Owner]) -> bytes:
    """Return the entries of a log that names some owners, and all settled chunks of one directory."""
    rows = np.flatnonzero((columns.states == RowState.SETTLED) & (columns.directories == directory))
    entries = np.zeros(len(rows), dtype=ENTRY)
    keys, parents = columns.keys, columns.parents[rows]
    entries["kind"] = PUT
    entries["flags"] = np.where(parents != NO_ROW, HAS_PARENT, 0)
    entries["header_pages"] = columns.header_pages[rows]
    entries["key"] = [keys[row] for row in rows.tolist()]
    entries["parent"] = [keys[row] if row != NO_ROW else NO_KEY for row in parents.tolist()]
    entries["offset"] = columns.pages[rows].astype(np.int64) * PAGE_NBYTES
    entries["nbytes"] = columns.nbytes[rows]
    entries["slot_nbytes"] = columns.slot_nbytes[rows]
    entries["last_used"] = columns.last_used[rows]
    entries["owner"] = columns.owners[rows]
    return encode_names(named) + entries.tobytes()


@dataclass(frozen=True, slots=True)
class _Merged:
    """What all logs say, the longest unused first, shape ``[n]`` each."""

    keys: list[ChunkKey]
    rows: dict[ChunkKey, int]
    """Of ``keys``; of those that two directories have, the later one."""
    parents: npt.NDArray[np.int32]
    entries: Entries
    directories: npt.NDArray[np.uint8]
    is_there: npt.NDArray[np.bool_]
    owners: Owners
    """Whose the numbers in ``entries`` are."""
    is_renumbered: list[bool]
    """Of each directory: its log has other numbers for its owners."""
    num_names: list[int]
    """Entries that the names of its owners take."""

    @classmethod
    def of(cls, directories: Sequence[DiskDirectory]) -> _Merged:
        keys: list[ChunkKey] = []
        parts, owners, fits = [np.zeros(0, dtype=ENTRY)], [np.zeros(0, dtype=np.uint8)], [np.zeros(0, dtype=np.bool_)]
        numbers, is_renumbered, num_names = Owners(), [False] * len(directories), [0] * len(directories)
        for number, directory in enumerate(directories):
            loaded = directory.loaded
            if loaded is not None:
                keys += loaded.rows
                renumbered, is_named = _renumber(loaded, numbers)
                is_renumbered[number] = not np.array_equal(renumbered["owner"], loaded.entries["owner"])
                used = np.unique(loaded.entries["owner"]).tolist()
                num_names[number] = sum(num_name_entries(loaded.owners[n]) for n in used if n in loaded.owners)
                parts.append(renumbered)
                owners.append(np.full(len(loaded.rows), number, dtype=np.uint8))
                fits.append(sound_entries(directory, loaded) & is_named)
        entries, owner, is_there = np.concatenate(parts), np.concatenate(owners), np.concatenate(fits)
        last_used = entries["last_used"]
        rows = directories[0].loaded.rows if len(directories) == 1 and directories[0].loaded is not None else None
        is_moved = bool(np.any(last_used[1:] < last_used[:-1]))
        if is_moved:
            order = np.argsort(last_used, kind="stable")
            entries, owner, is_there = entries[order], owner[order], is_there[order]
            keys = [keys[row] for row in order.tolist()]
        rows = dict(zip(keys, range(len(keys)), strict=True)) if rows is None or is_moved else rows
        if len(rows) != len(keys):
            is_there &= np.fromiter(map(rows.__getitem__, keys), dtype=np.int64) == np.arange(len(keys))
        rows[NO_KEY] = NO_ROW
        parents: list[ChunkKey] = entries["parent"].tolist()
        above = np.fromiter(map(rows.get, parents, repeat(_UNKNOWN_PARENT)), dtype=np.int32, count=len(keys))
        del rows[NO_KEY]
        is_there &= above != _UNKNOWN_PARENT
        above[above == _UNKNOWN_PARENT] = NO_ROW
        return cls(keys, rows, above, entries, owner, is_there, numbers, is_renumbered, num_names)

    def keep(self, directories: Sequence[DiskDirectory]) -> tuple[Columns, npt.NDArray[np.bool_]]:
        """Take the slots of all chunks that can be used; return these, and which they were."""
        entries = self.entries
        offsets = entries["offset"].astype(np.int64)
        nbytes = _disk_nbytes(entries)
        is_kept = self.is_there
        while True:
            is_kept = closed_rows(self.parents, is_kept)
            wanted = is_kept.copy()
            for number, directory in enumerate(directories):
                rows = np.flatnonzero(wanted & (self.directories == number))
                directory.slots = SlotAllocator(directory.data_nbytes, extent_nbytes=directory.header.extent_nbytes)
                is_ours = directory.slots.take(offsets[rows] - directory.data_offset, nbytes[rows])
                is_ours[: max(len(rows) + self.num_names[number] - directory.budget.chunks_max, 0)] = False
                is_kept[rows[~is_ours]] = False
            if np.array_equal(is_kept, wanted):
                break
        return self._columns(is_kept), is_kept

    def _columns(self, is_kept: npt.NDArray[np.bool_]) -> Columns:
        entries = self.entries[is_kept]
        keys = self.keys
        numbers = np.cumsum(is_kept) - 1
        parents = self.parents[is_kept]
        return Columns(
            keys=keys if is_kept.all() else [keys[row] for row in np.flatnonzero(is_kept).tolist()],
            parents=np.where(parents == NO_ROW, NO_ROW, numbers[parents]).astype(np.int32),
            pages=(entries["offset"] // PAGE_NBYTES).astype(np.uint32),
            nbytes=entries["nbytes"].astype(np.uint32),
            slot_nbytes=entries["slot_nbytes"].astype(np.uint32),
            header_pages=entries["header_pages"].astype(np.uint16),
            directories=self.directories[is_kept],
            states=np.full(len(entries), RowState.SETTLED, dtype=np.uint8),
            last_used=entries["last_used"].astype(np.int64),
            owners=entries["owner"].astype(np.uint16),
        )


def _renumber(loaded: Loaded, owners: Owners) -> tuple[Entries, npt.NDArray[np.bool_]]:
    """Return a log's entries with the numbers that ``owners`` has, and which have an owner at all, shape ``[n]``."""
    found = loaded.entries["owner"]
    numbers = np.zeros(1 << 16, dtype=np.uint16)
    is_known = np.zeros(1 << 16, dtype=np.bool_)
    for number in np.unique(found).tolist():
        owner = loaded.owners.get(number, NOBODY if number == 0 else None)
        known = owners.number(owner) if owner is not None else None
        numbers[number], is_known[number] = known or 0, known is not None
    entries = loaded.entries.copy()
    entries["owner"] = numbers[found]
    return entries, is_known[found]


def _named(columns: Columns, directory: int, owners: Owners) -> dict[int, Owner]:
    """Return the owners of one directory's chunks that need a name, by their numbers."""
    used = np.unique(columns.owners[columns.directories == directory]).tolist()
    return {number: owners[number] for number in used if number}


def sound_entries(directory: DiskDirectory, loaded: Loaded) -> npt.NDArray[np.bool_]:
    """Return which entries of a log may be true: they name a place inside the slab, shape ``[n]``."""
    entries = loaded.entries
    nbytes, slot_nbytes = entries["nbytes"], entries["slot_nbytes"]
    is_sound = (nbytes > 0) & (nbytes <= slot_nbytes) & (slot_nbytes <= _CHUNK_NBYTES_MAX)
    is_sound &= (entries["header_pages"] > 0) & (entries["last_used"] < 2**62)
    return is_sound & directory.fits(entries["offset"].astype(np.int64), _disk_nbytes(entries))


def _disk_nbytes(entries: Entries) -> npt.NDArray[np.int64]:
    slot_nbytes = np.minimum(entries["slot_nbytes"], _CHUNK_NBYTES_MAX).astype(np.int64)
    nbytes: npt.NDArray[np.int64] = entries["header_pages"].astype(np.int64) * PAGE_NBYTES + slot_nbytes
    return nbytes
