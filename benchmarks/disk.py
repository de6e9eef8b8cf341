"""The disk tier beside plain direct I/O: chunks written and read, what it costs, and how it starts.

Ceiling of writes and reads: as many threads in a loop of ``pwritev`` or ``preadv`` (``O_DIRECT``) of the same sizes on
a preallocated file in the same folder, synced once at the end of a round as the tier has to. The two take turns; the
figure is the median of their ratios. Memory of a chunk: what a process gets larger by when it opens 100,000.
"""

from __future__ import annotations

import argparse
import gc
import json
import mmap
import os
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from common import quartiles, report
from kvist.model.keys import ChunkKey
from kvist.storage.base import StoredChunk
from kvist.storage.disk.directory import DiskDirectory
from kvist.storage.disk.files import OsFiles
from kvist.storage.disk.format import ENTRY, HAS_PARENT, NO_KEY, PAGE_NBYTES, PUT
from kvist.storage.disk.tier import DiskTier
from kvist.units import GIB, KIB, MIB, format_nbytes

DEPTH = 4
WINDOW = 128
"""Chunks under way at most, as the daemon bounds them."""
ROUND_NBYTES = 512 * MIB
TARGETS = {256 * KIB: 0.75, 4 * MIB: 0.9, 16 * MIB: 0.9, 32 * MIB: 0.9}
NUM_INDEXED = 100_000
INDEXED_NBYTES = 6 * GIB


@contextmanager
def folder(at: Path) -> Iterator[Path]:
    """Yield an empty folder on the disk to be measured."""
    path = Path(tempfile.mkdtemp(prefix="kvist-disk-", dir=at))
    try:
        yield path
    finally:
        shutil.rmtree(path)


def busy(work: Callable[[], None]) -> tuple[float, float]:
    """Return the seconds that something took, and the share of a core that it used."""
    before, begin = resource.getrusage(resource.RUSAGE_SELF), time.perf_counter()
    work()
    seconds = time.perf_counter() - begin
    after = resource.getrusage(resource.RUSAGE_SELF)
    used = after.ru_utime - before.ru_utime + after.ru_stime - before.ru_stime
    return seconds, used / seconds


class Plain:
    """The ceiling: threads that write and read slots of a file, and nothing else."""

    def __init__(self, path: Path, memory: memoryview, nbytes: int) -> None:
        self.fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_DIRECT)
        os.posix_fallocate(self.fd, 0, ROUND_NBYTES)
        self.views = [memory[at : at + nbytes] for at in range(0, len(memory) - nbytes + 1, nbytes)]
        self.offsets = list(range(0, ROUND_NBYTES - nbytes + 1, nbytes))

    def run(self, operation: Callable[[int, list[memoryview], int], int], *, depth: int) -> None:
        pending = list(zip(self.offsets, self.views * len(self.offsets), strict=False))

        def loop() -> None:
            while pending:
                try:
                    offset, view = pending.pop()
                except IndexError:
                    return
                assert operation(self.fd, [view], offset) == len(view)

        threads = [threading.Thread(target=loop) for _ in range(depth)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    def write(self) -> None:
        self.run(os.pwritev, depth=DEPTH - 1)
        os.fdatasync(self.fd)

    def read(self) -> None:
        self.run(os.preadv, depth=DEPTH)


class Ours:
    """The tier, with chunks of one size in no prefix, replaced round by round."""

    def __init__(self, path: Path, memory: memoryview, nbytes: int) -> None:
        self.tier = DiskTier([path], ROUND_NBYTES * 2, num_threads=DEPTH, queue_nbytes=ROUND_NBYTES, queue_s=1e9)
        self.views = [memory[at : at + nbytes] for at in range(0, len(memory) - nbytes + 1, nbytes)]
        self.nbytes = nbytes
        self.keys: list[ChunkKey] = []
        self.round = 0

    def write(self) -> None:
        self.round += 1
        num = ROUND_NBYTES // self.nbytes
        self.keys = [ChunkKey(os.urandom(20)) for _ in range(num)]
        done = Countdown(num)
        checksum = bytes(8 * (self.nbytes // (192 * KIB) + 1))
        for number, key in enumerate(self.keys):
            chunk = StoredChunk(key, None, self.nbytes, self.nbytes, checksum)
            done.begin()
            assert self.tier.offer(chunk, self.views[number % len(self.views)], done)
        done.wait()

    def read(self) -> None:
        done = Countdown(len(self.keys))
        for number, key in enumerate(self.keys):
            done.begin()
            self.tier.fetch(key, self.views[number % len(self.views)], done)
        done.wait()


class Countdown:
    """Waits for as many completions, each of which must be a success, with a bounded number under way."""

    def __init__(self, num: int) -> None:
        self._left = num
        self._lock = threading.Lock()
        self._is_over = threading.Event()
        self._places = threading.Semaphore(WINDOW)

    def begin(self) -> None:
        self._places.acquire()

    def __call__(self, result: object) -> None:
        assert result
        self._places.release()
        with self._lock:
            self._left -= 1
            if not self._left:
                self._is_over.set()

    def wait(self) -> None:
        assert self._is_over.wait(120)


def copies(at: Path, nbytes: int, rounds: int) -> list[tuple[str, float, float, float]]:
    """Report writes and reads of chunks of one size."""
    memory = memoryview(mmap.mmap(-1, max(64 * MIB, 4 * nbytes)))
    memory[:] = os.urandom(MIB) * (len(memory) // MIB)
    figures: dict[str, list[tuple[float, float, float, float]]] = {"write": [], "read": []}
    with folder(at) as path:
        plain, ours = Plain(path / "plain", memory, nbytes), Ours(path / "tier", memory, nbytes)
        for number in range(rounds + 2):  # The first two write into space that was never written, which costs more.
            for direction in figures:
                order = [plain, ours] if number % 2 else [ours, plain]
                took = {type(side): busy(getattr(side, direction)) for side in order}
                if number > 1:
                    figures[direction].append((*took[Plain], *took[Ours]))
        ours.tier.close()
        os.close(plain.fd)
    rows = []
    for direction, values in figures.items():
        ratios = [plain_s / ours_s for plain_s, _, ours_s, _ in values]
        cpu = statistics.median(share for *_, share in values)
        report(
            f"disk {direction} of {format_nbytes(nbytes)}",
            share_of_direct_io=statistics.median(ratios), quartiles=quartiles(ratios), target=TARGETS[nbytes],
            gb_s=ROUND_NBYTES / statistics.median(v[2] for v in values) / 1e9,
            share_of_a_core=cpu, target_core=0.25, direct_share_of_a_core=statistics.median(v[1] for v in values),
            core_s_per_gb=statistics.median(v[2] * v[3] for v in values) * 1e9 / ROUND_NBYTES,
        )  # fmt: skip
        rows.append((f"{direction} {format_nbytes(nbytes)}", statistics.median(ratios), TARGETS[nbytes], cpu))
    return rows


def fill_log(path: Path, *, num_batches: int) -> None:
    """Write a directory whose log names ``NUM_INDEXED`` chunks, in prefixes of 100, in one or in many batches."""
    DiskTier([path], INDEXED_NBYTES, num_threads=0).close()
    directory = DiskDirectory(OsFiles(), path, is_created=False)
    directory.plan(INDEXED_NBYTES)
    directory.prepare(b"")
    entries = np.zeros(NUM_INDEXED, dtype=ENTRY)
    keys = [number.to_bytes(4, "big") * 5 for number in range(1, NUM_INDEXED + 1)]
    entries["kind"], entries["flags"], entries["header_pages"] = PUT, HAS_PARENT, 1
    entries["key"] = keys
    entries["parent"] = [keys[number - 1] if number % 100 else NO_KEY for number in range(NUM_INDEXED)]
    entries["flags"][::100] = 0
    entries["nbytes"] = entries["slot_nbytes"] = 2 * PAGE_NBYTES
    offsets = [directory.slots.allocate(3 * PAGE_NBYTES) for _ in keys]
    entries["offset"] = np.array(offsets) + directory.data_offset
    entries["last_used"] = np.arange(1, NUM_INDEXED + 1)
    if num_batches == 1:
        directory.rewrite_log(entries.tobytes())
    else:
        for part in np.array_split(entries, num_batches):
            directory.append(part.tobytes())
    directory.close()


def opening(path: Path) -> dict[str, float]:
    """Open in a process of its own; return seconds and bytes."""
    command = [sys.executable, __file__, "--open", str(path)]
    return json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)


def open_once(path: Path) -> None:
    """Print how long opening takes, and how much larger this process gets by it."""
    before = resident_nbytes()
    begin, cpu_begin = time.perf_counter(), time.process_time()
    tier = DiskTier([path], INDEXED_NBYTES)
    seconds, cpu_s = time.perf_counter() - begin, time.process_time() - cpu_begin
    gc.collect()
    figures = {"seconds": seconds, "cpu_s": cpu_s, "nbytes": resident_nbytes() - before}
    print(json.dumps({**figures, "num": tier.stats().num_chunks}))
    os._exit(0)


def resident_nbytes() -> int:
    """Return this process's private and shared memory."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def starts(at: Path) -> list[tuple[str, float, float, float]]:
    """Report how long a start takes, and what a chunk takes in memory."""
    rows = []
    with folder(at) as path:
        for case, num_batches, target_s in (("snapshot", 1, 0.2), ("log", 25_000, 1.0)):
            fill_log(path / case, num_batches=num_batches)
            results = [opening(path / case) for _ in range(7)]
            empty = path / "empty"
            nothing = [opening(empty) for _ in range(7)]
            seconds = [result["seconds"] for result in results]
            base = statistics.median(result["seconds"] for result in nothing)
            per_chunk = [(r["nbytes"] - n["nbytes"]) / NUM_INDEXED for r, n in zip(results, nothing, strict=True)]
            assert results[-1]["num"] == NUM_INDEXED
            report(
                f"disk start from {case}, {NUM_INDEXED:,} chunks", seconds=statistics.median(seconds),
                quartiles=quartiles(seconds), target_s=target_s, empty_s=base,
                processor_s=statistics.median(result["cpu_s"] for result in results),
                bytes_per_chunk=statistics.median(per_chunk), target_bytes=250,
            )  # fmt: skip
            rows.append((f"start {case} s", statistics.median(seconds), target_s, 0.0))
            shutil.rmtree(path / case)
    return rows


def main() -> None:
    """Measure and report."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--at", type=Path, default=Path("/tmp"), help="a folder on the disk to be measured")
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--open", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.open:
        open_once(options.open)
    rows = starts(options.at)
    for nbytes in TARGETS:
        rows += copies(options.at, nbytes, options.rounds)
    print(f"\n{'case':<20}{'figure':>8}{'target':>8}{'core':>7}")
    for case, figure, target, cpu in rows:
        print(f"{case:<20}{figure:>8.2f}{target:>8.2f}{cpu:>7.2f}")


if __name__ == "__main__":
    main()
