"""The log of one directory: which chunks lie where, in batches that are whole or not there.

The laws: what ``append`` or ``rewrite`` has returned from is durable. A log is replaced by a complete one or stays as
it was. No bytes make ``load`` raise; what is behind the first batch that is not whole is counted.
"""

from __future__ import annotations

import secrets
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

import numpy as np

from kvist.errors import ConfigError
from kvist.model.keys import ChunkKey
from kvist.model.owners import Owner
from kvist.storage.disk.files import Files, read_all, write_all
from kvist.storage.disk.format import (
    BATCH_NBYTES,
    DROP,
    ENTRY,
    FORMAT_VERSION,
    LOG,
    NAME,
    PAGE_NBYTES,
    PUT,
    Entries,
    FileHeader,
    FileKind,
    encode_batch,
    encode_file_header,
    find_version,
    parse_file_header,
    parse_names,
    replay,
)  # fmt: skip

LOG_NAME: Final = "kvist.log"
NEW_LOG_NAME: Final = "kvist.log.new"
_SLACK_NBYTES: Final = 64 * 1024
"""How much longer than twice what it need be a log gets, so that short ones are not written anew all the time."""


@dataclass(frozen=True, slots=True)
class Loaded:
    """What a log says, and the chunks that are there."""

    header: FileHeader
    rows: dict[ChunkKey, int]
    """Which entry is whose."""
    entries: Entries
    """Puts, one for each chunk."""
    owners: dict[int, Owner]
    """By the numbers that the entries have for them."""
    num_batches: int
    end: int
    """Of the whole batches, in the file."""
    num_torn_nbytes: int


def check_version(raw: bytearray, kind: FileKind, path: Path) -> None:
    """Refuse a file of a newer version.

    Raises:
        ConfigError: names the file and both versions.
    """
    version = find_version(raw, kind)
    if version is not None and version > FORMAT_VERSION:
        raise ConfigError(
            f"{path} has format version {version}, this kvist knows {FORMAT_VERSION}: nothing was changed; run the "
            f"newer kvist, name another directory with --disk, or give this one up with kvist disk purge {path.parent}"
        )


def read_file(files: Files, fd: int, nbytes: int) -> bytearray:
    """Return the first bytes of a file, or all that there are.

    Raises:
        OSError: as read(2).
    """
    raw = bytearray(min(nbytes, files.nbytes(fd)))
    is_whole = read_all(files, fd, [memoryview(raw)], 0)
    return raw if is_whole else bytearray()


def load(files: Files, fd: int, path: Path) -> Loaded | None:
    """Read a log; None if it has no header.

    Raises:
        OSError: as read(2).
        ConfigError: it is of a newer version.
    """
    raw = read_file(files, fd, files.nbytes(fd))
    check_version(raw, LOG, path)
    header = parse_file_header(raw, LOG)
    if header is None:
        return None
    result = replay(memoryview(raw)[PAGE_NBYTES:], header.seed)
    rows, entries, owners = _live(result.entries)
    return Loaded(header, rows, entries, owners, result.num_batches, PAGE_NBYTES + result.end, result.num_torn_nbytes)


class DiskLog:
    """A log that is written to, by one thread."""

    def __init__(self, files: Files, directory: Path, header: FileHeader) -> None:
        """Take the log of a directory over; ``attach`` or ``rewrite`` comes before anything else."""
        self._files = files
        self._directory = directory
        self._header = header
        self._fd = -1
        self._number = 0
        self.nbytes = 0

    def attach(self, fd: int, loaded: Loaded) -> None:
        """Go on behind what was loaded from an open log, which is whole."""
        assert loaded.num_torn_nbytes == 0
        self._fd = fd
        self._number = loaded.num_batches
        self.nbytes = loaded.end

    def append(self, entries: bytes) -> None:
        """Make some entries durable, together.

        Raises:
            OSError: they may be there or not.
        """
        raw = encode_batch(self._number, entries, self._header.seed)
        write_all(self._files, self._fd, [raw], self.nbytes)
        self._files.sync(self._fd)
        self._number += 1
        self.nbytes += len(raw)

    def rewrite(self, entries: bytes) -> None:
        """Put a log in this one's place that has just these puts.

        Raises:
            OSError: the old one may still be there.
        """
        header = replace(self._header, seed=secrets.randbits(64))
        raw = encode_file_header(header)
        if entries:
            raw += encode_batch(0, entries, header.seed)
        new = self._directory / NEW_LOG_NAME
        self._files.remove(new)
        fd = self._files.open(new)
        try:
            write_all(self._files, fd, [raw], 0)
            self._files.sync(fd)
            self._files.rename(new, self._directory / LOG_NAME)
            self._files.sync_directory(self._directory)
        except OSError:
            self._files.close(fd)
            raise
        self.close()
        self._fd = fd
        self._header = header
        self._number = 1 if entries else 0
        self.nbytes = len(raw)

    def is_linked(self) -> bool:
        """Return whether the file still has a name."""
        return self._files.is_linked(self._fd)

    def close(self) -> None:
        """Let go of the file. Idempotent."""
        if self._fd >= 0:
            self._files.close(self._fd)
            self._fd = -1


def rewritten_nbytes(num_chunks: int) -> int:
    """Return how long a log of so many chunks is when it has just been written."""
    return PAGE_NBYTES + BATCH_NBYTES + num_chunks * ENTRY.itemsize


def is_due(nbytes: int, num_chunks: int) -> bool:
    """Return whether a log of so many bytes is worth writing anew."""
    return nbytes > 2 * rewritten_nbytes(num_chunks) + _SLACK_NBYTES


def _live(raw: bytes | memoryview) -> tuple[dict[ChunkKey, int], Entries, dict[int, Owner]]:
    """Return the puts that no drop undid, which is whose, and the owners' numbers."""
    entries = np.frombuffer(raw, dtype=ENTRY)
    is_name = entries["kind"] == NAME
    owners = parse_names(entries[is_name])
    entries = entries[~is_name] if is_name.any() else entries
    keys: list[ChunkKey] = entries["key"].tolist()
    kinds = entries["kind"]
    if (kinds == PUT).all():
        rows = dict(zip(keys, range(len(keys)), strict=True))
        if len(rows) == len(keys):
            return rows, entries, owners
    offsets = entries["offset"].tolist()
    live: dict[ChunkKey, int] = {}
    for row, (kind, key) in enumerate(zip(kinds.tolist(), keys, strict=True)):
        before = live.get(key)
        if kind == PUT:
            live[key] = row
        elif kind == DROP and before is not None and offsets[before] == offsets[row]:
            del live[key]
    entries = entries[list(live.values())]
    return dict(zip(live, range(len(live)), strict=True)), entries, owners
