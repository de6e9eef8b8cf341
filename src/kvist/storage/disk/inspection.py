"""Directories of the disk tier, looked at and purged while nobody uses them.

The laws: looking changes nothing but the lock's text, and what ``verify`` does not name is what was stored. A purge by
owner leaves a log that names all others, or the log as it was.
"""

from __future__ import annotations

import mmap
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from kvist.errors import ConfigError
from kvist.model.owners import NOBODY, IsOwner
from kvist.storage.disk.chunk_io import Scratch
from kvist.storage.disk.directory import LOCK_NAME, SLAB_NAME, DiskDirectory, take_lock
from kvist.storage.disk.files import Files
from kvist.storage.disk.format import PAGE_NBYTES, encode_names
from kvist.storage.disk.log import LOG_NAME, NEW_LOG_NAME, DiskLog
from kvist.storage.disk.opening import sound_entries


@dataclass(frozen=True, slots=True)
class DirectoryFacts:
    """What a directory says of itself."""

    path: str
    slab_nbytes: int
    extent_nbytes: int
    num_chunks: int
    chunk_nbytes: int
    """Payloads of all chunks."""
    log_nbytes: int
    num_torn_nbytes: int
    """Of the log, behind the last whole batch: a crash left them, and the next start removes them."""
    is_damaged: bool
    """There are files, but they do not belong together; the next start begins anew."""


@dataclass(frozen=True, slots=True)
class BadChunk:
    """A chunk that the log names, and that is not there as written."""

    key: str
    """In hexadecimal digits."""
    offset: int
    reason: str


def describe(files: Files, path: Path) -> DirectoryFacts:
    """Return what a directory says of itself.

    Raises:
        ConfigError: it is no directory of the disk tier, in use, or of a newer version.
    """
    directory = DiskDirectory(files, path, is_created=False)
    try:
        loaded = directory.loaded
        return DirectoryFacts(
            path=str(path),
            slab_nbytes=directory.slab_nbytes,
            extent_nbytes=loaded.header.extent_nbytes if loaded is not None else 0,
            num_chunks=len(loaded.rows) if loaded is not None else 0,
            chunk_nbytes=int(loaded.entries["nbytes"].sum()) if loaded is not None else 0,
            log_nbytes=loaded.end if loaded is not None else 0,
            num_torn_nbytes=loaded.num_torn_nbytes if loaded is not None else 0,
            is_damaged=directory.is_damaged,
        )
    finally:
        directory.close()


def verify(files: Files, path: Path) -> list[BadChunk]:
    """Read all chunks of a directory, and return those that are not as written.

    Raises:
        ConfigError: as ``describe``.
    """
    directory = DiskDirectory(files, path, is_created=False)
    try:
        return _find_bad(directory)
    finally:
        directory.close()


def purge(files: Files, path: Path) -> None:
    """Remove all files of the disk tier from a directory, whatever their version.

    Raises:
        ConfigError: it is no directory of the disk tier, or in use.
    """
    try:
        lock = take_lock(files, path, is_created=False)
        try:
            for name in (LOG_NAME, NEW_LOG_NAME, SLAB_NAME, LOCK_NAME):
                files.remove(path / name)
            files.sync_directory(path)
        finally:
            files.close(lock)
    except OSError as error:
        raise ConfigError(f"{path} cannot be purged: {error.strerror or error}") from error


def purge_owned(files: Files, path: Path, is_owner: IsOwner) -> int:
    """Remove what some owners have from a directory's log; return how many chunks that were.

    Their bytes stay in the slab until others are written over them. What builds on them goes with the next start.

    Raises:
        ConfigError: as ``describe``, or the disk fails.
    """
    directory = DiskDirectory(files, path, is_created=False)
    try:
        loaded = directory.loaded
        if loaded is None:
            return 0
        owners = {0: NOBODY, **loaded.owners}
        purged = [number for number, owner in owners.items() if is_owner(owner)]
        is_kept = ~np.isin(loaded.entries["owner"], purged)
        kept = loaded.entries[is_kept]
        named = {number: owners[number] for number in np.unique(kept["owner"]).tolist() if number in loaded.owners}
        log = DiskLog(files, path, loaded.header)
        try:
            log.rewrite(encode_names(named) + kept.tobytes())
        finally:
            log.close()
        return int((~is_kept).sum())
    except OSError as error:
        raise ConfigError(f"{path} cannot be purged: {error.strerror or error}") from error
    finally:
        directory.close()


def _find_bad(directory: DiskDirectory) -> list[BadChunk]:
    loaded = directory.loaded
    if loaded is None:
        return []
    entries = loaded.entries
    is_sound = sound_entries(directory, loaded).tolist()
    largest = max((int(nbytes) for nbytes, sound in zip(entries["nbytes"], is_sound, strict=True) if sound), default=1)
    memory, scratch = memoryview(mmap.mmap(-1, largest)), Scratch()
    bad = []
    for key, row in loaded.rows.items():
        offset, nbytes = int(entries["offset"][row]), int(entries["nbytes"][row])
        header_nbytes = int(entries["header_pages"][row]) * PAGE_NBYTES
        reason = "" if is_sound[row] else "its place is outside the slab"
        try:
            chunk = directory.read(offset, header_nbytes, memory[:nbytes], scratch) if not reason else None
            if not reason and (chunk is None or chunk.key != key or chunk.slot_nbytes != entries["slot_nbytes"][row]):
                reason = "it is not what was written there"
        except OSError as error:
            reason = error.strerror or str(error)
        if reason:
            bad.append(BadChunk(key.hex(), offset, reason))
    return bad
