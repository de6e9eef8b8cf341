"""Files in memory that remember what was synced, so that a test can stop the machine between any two calls.

The law of a crash: what was synced is there. Of what was not, any pieces of 4,096 bytes are, and of changes to names a
beginning of them.
"""

from __future__ import annotations

import errno
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from kvist.storage.disk.files import Buffer

PAGE_NBYTES = 4096


@dataclass(eq=False)
class Inode:
    content: bytearray = field(default_factory=bytearray)
    num_names: int = 1


@dataclass(frozen=True)
class Change:
    """What one call did to the disk."""

    kind: str
    """``write``, ``resize``, ``sync``; ``create``, ``rename``, ``remove``, ``sync names``."""
    inode: Inode | None = None
    offset: int = 0
    content: bytes = b""
    path: Path = Path()
    target: Path = Path()


def write_into(content: bytearray, offset: int, raw: bytes) -> None:
    if len(content) < offset:
        content.extend(bytes(offset - len(content)))
    content[offset : offset + len(raw)] = raw


def resize(content: bytearray, nbytes: int) -> None:
    del content[nbytes:]
    content.extend(bytes(nbytes - len(content)))


class SimulatedFiles:
    """``Files`` in memory. ``fail(call, path)`` may return an error number with which a call fails."""

    def __init__(self, contents: dict[Path, bytes] | None = None) -> None:
        self.names = {path: Inode(bytearray(raw)) for path, raw in (contents or {}).items()}
        self.start = {inode: bytes(inode.content) for inode in self.names.values()}
        self.start_names = dict(self.names)
        self.changes: list[Change] = []
        self.fail: Callable[[str, Path], int | None] = lambda call, path: None
        self.short = False
        """Whether writes and reads do a page at a time."""
        self.offers_direct = True
        self._open: dict[int, tuple[Inode, Path]] = {}
        self._locked: dict[Inode, int] = {}
        """By which descriptor."""
        self._next = 3

    def contents(self) -> dict[Path, bytes]:
        return {path: bytes(inode.content) for path, inode in self.names.items()}

    def make_directory(self, path: Path) -> None:
        self._check("make_directory", path)

    def open(self, path: Path, *, is_created: bool = True) -> int:
        self._check("open", path)
        if path not in self.names:
            if not is_created:
                raise OSError(errno.ENOENT, "no such file")
            self.names[path] = Inode()
            self._note(Change("create", self.names[path], path=path))
        return self._take(path)

    def open_direct(self, path: Path) -> int | None:
        self._check("open_direct", path)
        return self._take(path) if self.offers_direct else None

    def close(self, fd: int) -> None:
        inode, _ = self._open.pop(fd)
        if self._locked.get(inode) == fd:
            del self._locked[inode]

    def lock(self, fd: int) -> bool:
        inode = self._open[fd][0]
        return self._locked.setdefault(inode, fd) == fd

    def nbytes(self, fd: int) -> int:
        return len(self._find("nbytes", fd).content)

    def is_linked(self, fd: int) -> bool:
        inode = self._find("is_linked", fd)
        return any(inode is named for named in self.names.values())

    def free_nbytes(self, path: Path) -> int:
        return 12345

    def allocate(self, fd: int, nbytes: int) -> None:
        inode = self._find("allocate", fd)
        if len(inode.content) < nbytes:
            self._resize(inode, nbytes)

    def truncate(self, fd: int, nbytes: int) -> None:
        self._resize(self._find("truncate", fd), nbytes)

    def write(self, fd: int, buffers: Sequence[Buffer], offset: int) -> int:
        inode = self._find("write", fd)
        raw = b"".join(buffers)
        if self.short:
            raw = raw[:PAGE_NBYTES]
        write_into(inode.content, offset, raw)
        self._note(Change("write", inode, offset, raw))
        return len(raw)

    def read(self, fd: int, buffers: Sequence[bytearray | memoryview], offset: int) -> int:
        content = self._find("read", fd).content
        begin = offset
        for buffer in buffers:
            part = content[offset : offset + min(len(buffer), PAGE_NBYTES if self.short else len(buffer))]
            buffer[: len(part)] = part
            offset += len(part)
            if len(part) < len(buffer):
                break
        return offset - begin

    def sync(self, fd: int) -> None:
        self._note(Change("sync", self._find("sync", fd)))

    def rename(self, source: Path, target: Path) -> None:
        self._check("rename", source)
        self.names[target] = self.names.pop(source)
        self._note(Change("rename", path=source, target=target))

    def remove(self, path: Path) -> None:
        self._check("remove", path)
        if self.names.pop(path, None) is not None:
            self._note(Change("remove", path=path))

    def sync_directory(self, path: Path) -> None:
        self._check("sync_directory", path)
        self._note(Change("sync names"))

    def _take(self, path: Path) -> int:
        self._next += 1
        self._open[self._next] = (self.names[path], path)
        return self._next

    def _find(self, call: str, fd: int) -> Inode:
        inode, path = self._open[fd]
        self._check(call, path)
        return inode

    def _check(self, call: str, path: Path) -> None:
        number = self.fail(call, path)
        if number is not None:
            raise OSError(number, errno.errorcode[number])

    def _resize(self, inode: Inode, nbytes: int) -> None:
        resize(inode.content, nbytes)
        self._note(Change("resize", inode, nbytes))

    def _note(self, change: Change) -> None:
        self.changes.append(change)


class Crashes:
    """What may be found on the disk after a crash at a growing number of changes."""

    def __init__(self, files: SimulatedFiles) -> None:
        self._changes = files.changes
        self._at = 0
        self._durable = {inode: bytearray(raw) for inode, raw in files.start.items()}
        self._pending: dict[Inode, list[Change]] = {}
        self._names = dict(files.start_names)
        self._pending_names: list[Change] = []

    def at(self, num_changes: int, chance: random.Random) -> SimulatedFiles:
        """Return the disk after a crash behind so many changes, not fewer than the last time."""
        assert self._at <= num_changes
        for change in self._changes[self._at : num_changes]:
            self._apply(change)
        self._at = num_changes
        names = dict(self._names)
        for change in self._pending_names[: chance.randint(0, len(self._pending_names))]:
            _apply_name(names, change)
        return SimulatedFiles({path: self._torn(inode, chance) for path, inode in names.items()})

    def _apply(self, change: Change) -> None:
        if change.kind == "sync names":
            for earlier in self._pending_names:
                _apply_name(self._names, earlier)
            self._pending_names = []
        elif change.inode is None or change.kind == "create":
            self._pending_names.append(change)
        elif change.kind == "sync":
            content = self._durable.setdefault(change.inode, bytearray())
            for earlier in self._pending.pop(change.inode, []):
                _apply_content(content, earlier)
        else:
            self._pending.setdefault(change.inode, []).append(change)

    def _torn(self, inode: Inode, chance: random.Random) -> bytes:
        content = bytearray(self._durable.get(inode, b""))
        share = chance.choice((0.0, 0.5, 0.9, 1.0))
        for change in self._pending.get(inode, []):
            if change.kind == "resize":
                if chance.random() < share:
                    resize(content, change.offset)
                continue
            for at in range(0, len(change.content), PAGE_NBYTES):
                if chance.random() < share:
                    write_into(content, change.offset + at, change.content[at : at + PAGE_NBYTES])
        return bytes(content)


def _apply_name(names: dict[Path, Inode], change: Change) -> None:
    if change.kind == "create":
        assert change.inode is not None
        names[change.path] = change.inode
    elif change.kind == "rename":
        names[change.target] = names.pop(change.path)
    else:
        names.pop(change.path)


def _apply_content(content: bytearray, change: Change) -> None:
    if change.kind == "resize":
        resize(content, change.offset)
    else:
        write_into(content, change.offset, change.content)
