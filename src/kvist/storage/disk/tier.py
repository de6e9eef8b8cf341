"""A tier on local disks: chunks that outlive the daemon.

The laws are those of ``Tier``, also when the process or the machine stops at any point (``docs/disk-format.md``). No
method waits for a disk: they take one lock, which nobody holds during I/O, and leave the rest to threads. No exception
leaves a thread: a disk that fails turns its directory off, and with the last one the tier.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Final

from kvist.errors import ConfigError
from kvist.model.keys import ChunkKey
from kvist.model.owners import IsOwner, Owner
from kvist.storage.base import StoredChunk, TierStats
from kvist.storage.disk.chunk_io import Scratch
from kvist.storage.disk.directory import BATCH_ENTRIES_MAX, DiskDirectory
from kvist.storage.disk.files import Files, OsFiles
from kvist.storage.disk.format import ENTRY
from kvist.storage.disk.meter import RateMeter
from kvist.storage.disk.names import LogNames
from kvist.storage.disk.opening import encode_log, open_directories
from kvist.storage.disk.state import Commit, DiskState, Lane, Read, Write
from kvist.units import MIB, format_nbytes

logger = logging.getLogger(__name__)

_READ_ERRORS_MAX: Final = 4
"""Reads that may fail one behind another before the disk is taken to be broken."""
_PROBE_S: Final = 0.2
_JOIN_S: Final = 30.0
"""A disk that does not answer for so long is left behind at a stop."""


class DiskTier:
    """A ``Tier`` in files of one or more directories, each on a drive of its own."""

    def __init__(
        self,
        directories: Sequence[Path],
        nbytes: int,
        *,
        num_threads: int = 4,
        queue_nbytes: int = 512 * MIB,
        queue_s: float = 4.0,
        files: Files | None = None,
    ) -> None:
        """Take ``nbytes`` of disk, shared equally, and go on with what is there.

        ``num_threads`` copy in each directory. Writes are refused when more than ``queue_nbytes``, or than what the
        disk writes in ``queue_s``, is queued. With no threads, ``advance`` does their work.

        Raises:
            ConfigError: a directory cannot be used, is in use, is too small, or was written by a newer version.
        """
        if not directories:
            raise ConfigError(f"a disk tier of {format_nbytes(nbytes)} needs a directory: name one with --disk")
        self._files = files or OsFiles()
        self._nbytes = nbytes
        self._queue_nbytes, self._queue_s = queue_nbytes, queue_s
        self._lock = threading.Lock()
        self._has_work = [threading.Condition(self._lock) for _ in directories]
        self._has_results = [threading.Condition(self._lock) for _ in directories]
        self._is_closing = self._is_draining = False
        self._reading, self._writing = RateMeter(), RateMeter()
        opened = open_directories(self._files, directories, nbytes)
        self._directories = opened.directories
        self._state = DiskState(
            opened.catalogue, opened.owners,
            [_make_lane(number, directory, opened.named[number]) for number, directory in enumerate(self._directories)],
            writers_max=max(num_threads - 1, 1),
        )  # fmt: skip
        self._state.counters.update(
            chunks_lost=opened.num_lost, log_bytes_torn=opened.num_torn_nbytes,
            directories_begun_anew=opened.num_begun_anew,
            directories_buffered=sum(not directory.is_direct for directory in opened.directories),
        )  # fmt: skip
        self._scratch = Scratch()
        self._measure()
        self._workers: list[threading.Thread] = []
        self._committers: list[threading.Thread] = []
        for lane in self._state.lanes if num_threads else ():
            self._start(lane, num_threads)

    @property
    def name(self) -> str:
        return "disk"

    def find(self, keys: Sequence[ChunkKey]) -> list[int | None]:
        with self._lock:
            return [None] * len(keys) if self._is_closing else self._state.catalogue.find(keys)

    def owner(self, key: ChunkKey) -> Owner | None:
        with self._lock:
            return self._state.owner(key)

    def touch(self, keys: Sequence[ChunkKey]) -> None:
        with self._lock:
            self._state.catalogue.touch(keys)

    def fetch(self, key: ChunkKey, target: memoryview, on_done: Callable[[StoredChunk | None], None]) -> None:
        with self._lock:
            is_taken = not self._is_closing
            if is_taken:
                lane = self._state.read(key, target, on_done)
                self._has_work[lane.number].notify()
        if not is_taken:
            on_done(None)

    def offer(self, chunk: StoredChunk, source: memoryview, on_done: Callable[[bool], None]) -> bool:
        assert 0 < chunk.nbytes <= chunk.slot_nbytes
        assert len(source) >= chunk.nbytes
        with self._lock:
            write_nbytes_max = min(self._queue_nbytes, self._writing.rate * self._queue_s)
            refusal = "closing" if self._is_closing else self._state.refusal(chunk, write_nbytes_max)
            if refusal:
                self._state.counters[f"refused_{refusal}"] += 1
                return False
            lane = self._state.write(chunk, source, on_done)
            self._wake(lane)
        return True

    def drop(self, keys: Sequence[ChunkKey]) -> None:
        with self._lock:
            for key in keys:
                self._state.drop(key)
            for lane in self._state.lanes:
                self._wake(lane)

    def purge(self, is_owner: IsOwner) -> Iterator[int]:
        steps = self._state.purge(is_owner)
        while True:
            with self._lock:
                num_chunks = next(steps, None)
                for lane in self._state.lanes:
                    self._wake(lane)
            if num_chunks is None:
                return
            yield num_chunks

    def read_seconds(self, nbytes: int) -> float:
        with self._lock:
            rate = self._reading.rate
            return (self._state.queued_read_nbytes + nbytes) / rate if rate else 0.0

    def stats(self) -> TierStats:
        with self._lock:
            state = self._state
            reasons = [lane.off_reason for lane in state.lanes if lane.off_reason]
            counters = dict(state.counters)
            counters["directories_off"] = len(reasons)
            return TierStats(
                capacity_nbytes=self._nbytes,
                used_nbytes=state.used_nbytes,
                num_chunks=len(state.catalogue),
                read_rate=self._reading.rate,
                write_rate=self._writing.rate,
                num_queued_reads=sum(len(lane.reads) for lane in state.lanes),
                num_queued_writes=state.num_writes,
                off_reason="; ".join(reasons) if len(reasons) == len(state.lanes) else "",
                counters=counters,
            )

    def close(self) -> None:
        with self._lock:
            if self._is_closing:
                return
            self._is_closing = True
            for lane in self._state.lanes:
                self._state.give_up(lane)
            self._wake_all()
        _join(self._workers)
        with self._lock:
            self._is_draining = True
            self._wake_all()
        _join(self._committers)
        while not self._committers and self.advance():
            pass
        if any(thread.is_alive() for thread in (*self._workers, *self._committers)):
            logger.warning("disk left behind, it does not answer")
            return
        columns = self._state.columns()
        for lane, directory in zip(self._state.lanes, self._directories, strict=True):
            try:
                if not lane.off_reason:
                    directory.rewrite_log(encode_log(columns, lane.number, lane.names.all()))
            except OSError as error:
                logger.warning("disk log not written anew path=%s error=%s", directory.path, error)
            directory.close()

    def advance(self, choose: Callable[[int], int] = lambda num: 0) -> bool:
        """Do one piece of the threads' work, where there are no threads; return whether there was any.

        ``choose(n)`` returns which of ``n`` pieces it is.
        """
        pieces: list[Callable[[], None]] = []
        for lane in self._state.lanes:
            if lane.reads or lane.writes:
                pieces.append(partial(self._copy_next, lane, self._scratch))
            if lane.written or lane.drops or lane.ended:
                pieces.append(partial(self._commit_next, lane))
        if pieces:
            pieces[choose(len(pieces))]()
        return bool(pieces)

    def _start(self, lane: Lane, num_threads: int) -> None:
        for number in range(num_threads):
            name = f"kvist-disk-{lane.number}-{number}"
            self._workers.append(threading.Thread(target=self._copy, args=(lane,), name=name, daemon=True))
        name = f"kvist-disk-{lane.number}-log"
        self._committers.append(threading.Thread(target=self._commit, args=(lane,), name=name, daemon=True))
        for thread in (*self._workers[-num_threads:], self._committers[-1]):
            thread.start()

    def _measure(self) -> None:
        for directory in self._directories:
            try:
                nbytes, write_s, read_s = directory.measure(_PROBE_S / len(self._directories), time.monotonic)
            except OSError as error:
                for opened in self._directories:
                    opened.close()
                raise ConfigError(f"{directory.path} cannot be used for chunks: {error.strerror or error}") from error
            for meter, seconds in ((self._writing, write_s), (self._reading, read_s)):
                meter.begin(0.0)
                meter.end(seconds, nbytes)
            how = "direct" if directory.is_direct else "buffered: the file system refuses direct I/O"
            logger.info(
                "disk ready path=%s io=%s write_mb_s=%.0f read_mb_s=%.0f",
                directory.path, how, nbytes / max(write_s, 1e-9) / 1e6, nbytes / max(read_s, 1e-9) / 1e6,
            )  # fmt: skip

    def _wake(self, lane: Lane) -> None:
        if lane.writes:
            self._has_work[lane.number].notify()
        if self._must_commit(lane):
            self._has_results[lane.number].notify()

    def _wake_all(self) -> None:
        for condition in (*self._has_work, *self._has_results):
            condition.notify_all()

    def _copy(self, lane: Lane) -> None:
        """Read and write, until there is nothing to do at a stop."""
        scratch = Scratch()
        condition = self._has_work[lane.number]
        while True:
            with self._lock:
                condition.wait_for(lambda: lane.reads or self._may_write(lane) or self._is_closing)
                if not (lane.reads or lane.writes):
                    return
            self._copy_next(lane, scratch)

    def _must_commit(self, lane: Lane) -> bool:
        if self._is_draining:
            return bool(lane.written or lane.drops or lane.ended)
        return bool(lane.ended) or self._state.is_commit_due(lane)

    def _may_write(self, lane: Lane) -> bool:
        return bool(lane.writes) and lane.num_writing < self._state.writers_max

    def _copy_next(self, lane: Lane, scratch: Scratch) -> None:
        with self._lock:
            read = self._state.begin_read(lane)
            write = self._state.begin_write(lane) if read is None else None
            if read is not None:
                self._reading.begin(time.monotonic())
            elif write is not None:
                self._writing.begin(time.monotonic())
            self._wake_results()
        if read is not None:
            self._carry_out_read(lane, read, scratch)
        elif write is not None:
            self._carry_out_write(lane, write, scratch)

    def _carry_out_read(self, lane: Lane, read: Read, scratch: Scratch) -> None:
        directory = self._directories[lane.number]
        chunk = None
        reason = ""
        is_error = False
        try:
            if read.header_nbytes:
                chunk = directory.read(read.offset, read.header_nbytes, read.target, scratch)
        except OSError as error:
            is_error = True
            logger.warning("disk read failed path=%s error=%s", directory.path, error)
            if lane.num_errors + 1 >= _READ_ERRORS_MAX:
                reason = _reason(directory, "reading", error)
        except Exception as error:  # The thread's boundary: what goes wrong here ends with the directory.
            logger.exception("disk read failed path=%s", directory.path)
            reason = _reason(directory, "reading", error)
        with self._lock:
            self._reading.end(time.monotonic(), len(read.target) if chunk is not None else 0)
            lane.num_errors = lane.num_errors + 1 if is_error else 0
            self._state.counters["read_errors"] += is_error
            if reason:
                self._turn_off(lane, reason)
            chunk = self._state.end_read(lane, read, chunk)
            self._wake_results()
        _call(read.on_done, chunk)

    def _carry_out_write(self, lane: Lane, write: Write, scratch: Scratch) -> None:
        directory = self._directories[lane.number]
        reason = _attempt(
            directory, "writing", lambda: directory.write(write.offset, write.chunk, write.source, scratch)
        )
        with self._lock:
            self._writing.end(time.monotonic(), 0 if reason else write.chunk.nbytes)
            if reason:
                self._turn_off(lane, reason)
            self._state.end_write(lane, write)
            self._wake(lane)

    def _commit(self, lane: Lane) -> None:
        """Make durable what was written and dropped, until there is nothing to do at a stop."""
        condition = self._has_results[lane.number]
        while True:
            with self._lock:
                condition.wait_for(lambda: self._must_commit(lane) or self._is_draining)
                if not self._must_commit(lane):
                    return
            self._commit_next(lane)

    def _commit_next(self, lane: Lane) -> None:
        with self._lock:
            commit = self._state.begin_commit(lane, BATCH_ENTRIES_MAX)
            if commit is not None:
                self._writing.begin(time.monotonic())
        if commit is not None:
            self._carry_out_commit(lane, commit)
        with self._lock:
            ended = list(lane.ended)
            lane.ended.clear()
        for on_done in ended:
            _call(on_done)

    def _carry_out_commit(self, lane: Lane, commit: Commit) -> None:
        reason = _attempt(self._directories[lane.number], "keeping the log", lambda: self._make_durable(lane, commit))
        with self._lock:
            self._writing.end(time.monotonic(), 0)
            if reason:
                self._turn_off(lane, reason, commit)
            else:
                self._state.end_commit(lane, commit)
            self._wake_results()
            if lane.writes:
                self._has_work[lane.number].notify_all()

    def _make_durable(self, lane: Lane, commit: Commit) -> None:
        directory = self._directories[lane.number]
        if commit.writes:
            directory.sync()
        num_entries = len(commit.entries) // ENTRY.itemsize
        if directory.is_log_due(lane.num_entries) or not directory.has_room(num_entries):
            with self._lock:
                columns, named = self._state.columns(), lane.names.all()
            directory.rewrite_log(encode_log(columns, lane.number, named))
        directory.append(commit.entries)

    def _turn_off(self, lane: Lane, reason: str, commit: Commit | None = None) -> None:
        if not lane.off_reason:
            logger.warning("disk turned off reason=%s", reason)
        self._state.turn_off(lane, reason, commit)

    def _wake_results(self) -> None:
        for lane in self._state.lanes:
            if self._must_commit(lane):
                self._has_results[lane.number].notify()


def _make_lane(number: int, directory: DiskDirectory, named: dict[int, Owner]) -> Lane:
    slots = directory.slots
    chunks_max = directory.budget.chunks_max
    names = LogNames(named, chunks_max)
    return Lane(number, directory.data_offset, slots, chunks_max, names, num_slots=slots.num_used)


def _attempt(directory: DiskDirectory, doing: str, act: Callable[[], None]) -> str:
    """Do something for which a directory has to work; return why it does not, or nothing."""
    try:
        act()
    except OSError as error:
        return _reason(directory, doing, error)
    except Exception as error:  # The thread's boundary: what goes wrong here ends with the directory.
        logger.exception("disk failed doing=%s path=%s", doing, directory.path)
        return _reason(directory, doing, error)
    return ""


def _reason(directory: DiskDirectory, doing: str, error: Exception) -> str:
    text = error.strerror if isinstance(error, OSError) and error.strerror else f"{type(error).__name__}: {error}"
    return f"{doing} in {directory.path} failed: {text}"


def _call(on_done: Callable[..., None], *arguments: object) -> None:
    try:
        on_done(*arguments)
    except Exception:  # The thread's boundary towards its callers.
        logger.exception("completion of a disk operation failed")


def _join(threads: Sequence[threading.Thread]) -> None:
    deadline = time.monotonic() + _JOIN_S
    for thread in threads:
        thread.join(max(deadline - time.monotonic(), 0.0))
