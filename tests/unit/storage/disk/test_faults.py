"""A disk that fails, lies, is cut or written to by others: misses, with a reason; no wrong bytes, no exception."""

from __future__ import annotations

import contextlib
import errno
import os
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvist.errors import ConfigError
from kvist.storage.disk.files import Buffer, OsFiles
from kvist.storage.disk.tier import DiskTier
from kvist.units import GIB, MIB
from tests.support.simulated_files import SimulatedFiles
from tests.support.tiers import Done, aligned, fetch, found, key_of, make_chunk, store
from tests.support.waiting import wait_until

ROOT = Path("/disk")
SLAB, LOG = ROOT / "kvist.slab", ROOT / "kvist.log"
CHAIN = [("a0", None), ("a1", "a0"), ("a2", "a1"), ("b0", None)]


@contextmanager
def opened(
    files: SimulatedFiles, paths: Sequence[Path] = (ROOT,), *, nbytes: int = MIB, num_threads: int = 1
) -> Iterator[DiskTier]:
    tier = DiskTier(paths, nbytes, num_threads=num_threads, files=files, queue_s=1e9)
    try:
        yield tier
    finally:
        tier.close()


@contextmanager
def filled(
    files: SimulatedFiles | None = None, paths: Sequence[Path] = (ROOT,)
) -> Iterator[tuple[DiskTier, SimulatedFiles]]:
    files = files or SimulatedFiles()
    with opened(files, paths, nbytes=MIB * len(paths)) as tier:
        for name, parent in CHAIN:
            assert store(tier, name, parent)
        yield tier, files


def place_of(files: SimulatedFiles, name: str) -> int:
    """Return where the slab has a chunk's slot."""
    place = files.names[SLAB].content.find(bytes(key_of(name))) - 40
    assert place > 0
    return place


def failing(
    *calls: str, number: int = errno.EIO, path: Path = ROOT, times: int = 1 << 30
) -> Callable[[str, Path], int | None]:
    left = [times]

    def fail(call: str, at: Path) -> int | None:
        if call in calls and (at == path or path in at.parents) and left[0] > 0:
            left[0] -= 1
            return number
        return None

    return fail


@pytest.mark.parametrize("at", [0, 20, 40, 59, 90, 4096, 4096 + 2500, 4096 + 4999], ids=str)
def test_a_damaged_chunk_is_a_miss_with_all_below_it(at: int):
    """A wrong byte in header or payload: None, the chunk and what builds on it are dropped and counted, others stay."""
    with filled() as (tier, files):
        files.names[SLAB].content[place_of(files, "a1") + at] ^= 0x10
        assert fetch(tier, "a1") == (None, b"")
        assert found(tier, "a0", "a1", "a2", "b0") == [True, False, False, True]
        assert tier.stats().counters["chunks_damaged"] == 1
        assert tier.stats().off_reason == ""
        assert store(tier, "a1", "a0", version=2)
        assert fetch(tier, "a1") == make_chunk("a1", "a0", version=2)


def test_a_chunk_in_anothers_place_is_a_miss():
    """Bytes of slot A copied over slot B, whole and sound, are not served as B."""
    with filled() as (tier, files):
        content = files.names[SLAB].content
        one, other = place_of(files, "a0"), place_of(files, "b0")
        content[other : other + 12288] = content[one : one + 12288]
        assert fetch(tier, "b0") == (None, b"")
        assert fetch(tier, "a0") == make_chunk("a0")


def test_a_slab_that_was_cut_is_a_miss():
    """A chunk behind the end of the file is a miss, now and after a start."""
    with filled() as (tier, files):
        del files.names[SLAB].content[place_of(files, "a2") + 5000 :]
        assert fetch(tier, "a2") == (None, b"")
    with opened(files) as tier:
        assert found(tier, "a0", "a1", "a2") == [True, True, False]
        assert fetch(tier, "a1") == make_chunk("a1", "a0")


def test_one_failed_read_costs_one_chunk():
    """EIO once: that chunk is a miss and dropped. Again and again: the tier turns itself off, and says why."""
    with filled() as (tier, files):
        files.fail = failing("read", times=1)
        assert fetch(tier, "b0") == (None, b"")
        assert found(tier, "a2", "b0") == [True, False]
        assert fetch(tier, "a0") == make_chunk("a0")
        assert tier.stats().counters["read_errors"] == 1
        files.fail = failing("read")
        for name in ("a2", "a1", "a0"):
            assert tier.stats().off_reason == ""
            assert fetch(tier, name) == (None, b"")
        assert store(tier, "c0")
        assert fetch(tier, "c0") == (None, b"")
        assert tier.stats().off_reason == "reading in /disk failed: EIO"


@pytest.mark.parametrize("number", [errno.EIO, errno.ENOSPC, errno.EROFS, errno.EACCES, errno.ENOENT, errno.EDQUOT])
@pytest.mark.parametrize("call", ["write", "sync", "is_linked"])
def test_a_disk_that_takes_no_more_turns_the_tier_off(call: str, number: int):
    """A failed write, sync or record: what waited ends once with no, the reason is told, all is a miss then."""
    with filled() as (tier, files):
        files.fail = failing(call, number=number)
        dones = []
        for name in ("c0", "d0", "e0"):
            chunk, payload = make_chunk(name)
            dones.append(Done())
            if not tier.offer(chunk, aligned(payload), dones[-1]):
                dones.pop()
        assert not any(done.wait() for done in dones)
        assert errno.errorcode[number] in tier.stats().off_reason
        assert found(tier, "a0", "b0", "c0") == [False] * 3
        assert fetch(tier, "a0") == (None, b"")
        assert not store(tier, "f0")
        assert tier.stats().counters["refused_off"] >= 1
        assert (tier.stats().num_queued_writes, tier.stats().used_nbytes) == (0, 0)
    files.fail = lambda call, path: None
    with opened(files) as tier:
        assert fetch(tier, "a2") == make_chunk("a2", "a1")


def test_one_of_two_drives_may_fail():
    """The other one goes on, with its chunks that have all their parents, and takes new ones."""
    paths = [Path("/one"), Path("/two")]
    with filled(paths=paths) as (tier, files):
        for number in range(8):
            assert store(tier, f"c{number}")
        files.fail = failing("read", "write", "sync", path=paths[1])
        names = ["a0", "a1", "a2", "b0", *(f"c{number}" for number in range(8))]
        for number in range(40):
            store(tier, f"new{number}")
        wait_until(lambda: tier.stats().counters["directories_off"] == 1)
        assert tier.stats().off_reason == ""
        kept = [name for name, is_found in zip(names, found(tier, *names), strict=True) if is_found]
        assert 0 < len(kept) < len(names)
        assert all(fetch(tier, name)[0] for name in kept)
        assert all(store(tier, f"newer{number}") for number in range(8))


def test_a_lost_drive_takes_only_its_chunks():
    """A start without one drive's files keeps what the other has, but what builds on what is gone."""
    paths = [Path("/one"), Path("/two")]
    with filled(paths=paths) as (tier, files):
        for number in range(8):
            assert store(tier, f"c{number}")
    left = SimulatedFiles({path: raw for path, raw in files.contents().items() if paths[1] not in path.parents})
    with opened(left, paths, nbytes=2 * MIB) as tier:
        names = [f"c{number}" for number in range(8)]
        kept = [name for name, is_found in zip(names, found(tier, *names), strict=True) if is_found]
        assert 0 < len(kept) < 8
        assert all(fetch(tier, name) == make_chunk(name) for name in kept)
        chain = found(tier, "a0", "a1", "a2")
        assert chain == sorted(chain, reverse=True)


@pytest.mark.parametrize("gone", [[SLAB], [LOG], [SLAB, LOG]], ids=["slab", "log", "both"])
def test_files_that_were_removed_are_misses(gone: list[Path]):
    """Removed while in use: the next record turns the tier off. Removed while it was not: it begins anew."""
    with filled() as (tier, files):
        for path in gone:
            del files.names[path]
        assert not store(tier, "c0")
        assert "its files were removed" in tier.stats().off_reason
    with filled() as (_, files):
        pass
    contents = {path: raw for path, raw in files.contents().items() if path not in gone}
    with opened(SimulatedFiles(contents)) as tier:
        assert found(tier, "a0", "b0") == [False, False]
        assert store(tier, "a0", version=1)
        assert fetch(tier, "a0") == make_chunk("a0", version=1)


@settings(max_examples=60)
@given(data=st.data())
def test_any_damage_to_the_files_is_survived(data: st.DataObject):
    """Whatever bytes of slab and log are changed or cut while nobody looks: it opens, and each hit is right."""
    with filled() as (_, files):
        pass
    contents = {path: bytearray(raw) for path, raw in files.contents().items()}
    for _ in range(data.draw(st.integers(1, 4))):
        raw = contents[data.draw(st.sampled_from([SLAB, LOG]))]
        limit = min(len(raw), 80_000)
        at = data.draw(st.integers(0, max(limit - 1, 0)))
        if data.draw(st.booleans()):
            del raw[at:]
        elif limit:
            raw[at : at + 1] = data.draw(st.binary(min_size=1, max_size=1))
    # A version that is newer, by a wrong bit, is refused: that is another law.
    for raw in (contents[SLAB], contents[LOG]):
        raw[8:12] = b"\1\0\0\0"[: len(raw[8:12])]
    with opened(SimulatedFiles({path: bytes(raw) for path, raw in contents.items()})) as tier:
        for name, parent in CHAIN:
            chunk, payload = fetch(tier, name)
            assert chunk is None or (chunk, payload) == make_chunk(name, parent)
        store(tier, "c0")
        assert fetch(tier, "c0") == make_chunk("c0")


@pytest.mark.parametrize("path", [SLAB, LOG], ids=["slab", "log"])
def test_a_newer_version_is_refused_and_kept(path: Path):
    """The file and both versions are named; no byte but the lock's text is changed."""
    with filled() as (_, files):
        pass
    files.names[path].content[8] = 2
    contents = {name: raw for name, raw in files.contents().items() if name.name != "kvist.lock"}
    again = SimulatedFiles(files.contents())
    with pytest.raises(ConfigError, match=f"{path} has format version 2, this kvist knows 1: nothing was changed"):
        DiskTier([ROOT], MIB, files=again)
    assert {name: raw for name, raw in again.contents().items() if name.name != "kvist.lock"} == contents


def test_a_directory_has_one_user(tmp_path: Path):
    """The second one is refused, with the first one's process id; when that is gone, it may."""
    tier = DiskTier([tmp_path / "disk"], MIB)
    with pytest.raises(ConfigError, match=f"disk is in use by the process with pid {os.getpid()}$"):
        DiskTier([tmp_path / "other", tmp_path / "disk"], 2 * MIB)
    tier.close()
    DiskTier([tmp_path / "disk", tmp_path / "other"], 2 * MIB).close()


def test_a_directory_that_cannot_be_used_is_refused(tmp_path: Path):
    """No directory, one inside nothing, one that is a file, too little for each: with what to change."""
    with pytest.raises(ConfigError, match="a disk tier of 1 MiB needs a directory"):
        DiskTier([], MIB)
    with pytest.raises(ConfigError, match=r"no/such cannot be used for chunks: No such file"):
        DiskTier([tmp_path / "no" / "such"], MIB)
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"file cannot be used for chunks: Not a directory"):
        DiskTier([tmp_path / "file"], MIB)
    with pytest.raises(ConfigError, match=r"would get 512 KiB; a directory of the disk tier takes 1 MiB or more"):
        DiskTier([tmp_path / "one", tmp_path / "two"], MIB)


def test_a_full_disk_is_refused_with_its_figures(tmp_path: Path):
    """What is free and what is needed are told; what was there before is not larger, and a smaller size will do."""
    files = SimulatedFiles()
    files.fail = failing("allocate", number=errno.ENOSPC)
    with pytest.raises(
        ConfigError, match=r"/disk has 12.06 KiB free, and 764 KiB more are needed .*smaller --disk-size"
    ):
        DiskTier([ROOT], MIB, files=files)
    free_nbytes = os.statvfs(tmp_path).f_bavail * os.statvfs(tmp_path).f_frsize
    with pytest.raises(ConfigError, match=r"free, and .* more are needed .*: choose a smaller --disk-size"):
        DiskTier([tmp_path / "disk"], 2 * free_nbytes + GIB)
    assert sum(path.stat().st_blocks for path in (tmp_path / "disk").iterdir()) * 512 < MIB
    DiskTier([tmp_path / "disk"], MIB).close()


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """Yield a file system of 8 MiB, in memory: no direct I/O."""
    done = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=8m", "none", tmp_path], capture_output=True, text=True)
    if done.returncode:
        pytest.skip(f"mounting is not allowed here: {done.stderr.strip()}")
    yield tmp_path
    subprocess.run(["umount", tmp_path], check=True)


def fill_up(path: Path) -> None:
    fd = os.open(path, os.O_WRONLY | os.O_CREAT)
    with contextlib.suppress(OSError):
        while os.write(fd, bytes(4096)):
            pass
    os.close(fd)
    assert os.statvfs(path).f_bavail == 0


def test_a_disk_that_fills_up_turns_the_tier_off(small_disk: Path):
    """What others leave no space for: the log cannot grow, the tier is off with the reason; freed, it starts again."""
    tier = DiskTier([small_disk / "disk"], 4 * MIB, queue_s=1e9)
    assert store(tier, "a0")
    fill_up(small_disk / "others")
    number = 0
    while store(tier, f"n{number}"):
        number += 1
        assert number < 10_000
    assert "No space left" in tier.stats().off_reason
    tier.close()
    (small_disk / "others").unlink()
    tier = DiskTier([small_disk / "disk"], 4 * MIB, queue_s=1e9)
    assert tier.stats().off_reason == ""
    assert all(fetch(tier, name)[0] for name in ("n0", f"n{number - 2}") if found(tier, name) == [True])
    assert store(tier, "b0")
    tier.close()


class SlowFiles(OsFiles):
    """Files whose calls of one kind wait until they are let go."""

    def __init__(self, call: str) -> None:
        self._call = call
        self.may_go = threading.Event()
        self.num_waiting = 0

    def wait(self, call: str) -> None:
        if call == self._call:
            self.num_waiting += 1
            assert self.may_go.wait(20)

    def write(self, fd: int, buffers: Sequence[Buffer], offset: int) -> int:
        self.wait("write")
        return super().write(fd, buffers, offset)

    def read(self, fd: int, buffers: Sequence[bytearray | memoryview], offset: int) -> int:
        self.wait("read")
        return super().read(fd, buffers, offset)

    def sync(self, fd: int) -> None:
        self.wait("sync")
        super().sync(fd)

    def is_linked(self, fd: int) -> bool:
        self.wait("is_linked")
        return super().is_linked(fd)


@pytest.mark.parametrize("call", ["read", "write", "sync", "is_linked"])
def test_a_disk_that_sleeps_blocks_nobody(tmp_path: Path, call: str):
    """While reads, writes, syncs or stats do not return, every call does, at once; later all end."""
    files = SlowFiles(call)
    files.may_go.set()
    tier = DiskTier([tmp_path / "disk"], 4 * MIB, files=files, queue_s=1e9)
    assert store(tier, "a0")
    files.may_go.clear()
    files.num_waiting = 0
    dones = [Done() for _ in range(12)]
    began = time.monotonic()
    for number in range(6):
        chunk, payload = make_chunk(f"n{number}")
        assert tier.offer(chunk, aligned(payload), dones[number])
        tier.fetch(key_of("a0"), aligned(b"", 8192), dones[6 + number])
    wait_until(lambda: files.num_waiting)
    for _ in range(20):
        assert found(tier, "a0", "n0")[0]
        tier.touch([key_of("a0")])
        tier.stats()
        tier.read_seconds(1)
    tier.drop([key_of("n5")])
    assert time.monotonic() - began < 5
    files.may_go.set()
    assert [bool(done.wait()) for done in dones] == [True] * 5 + [False] + [True] * 6
    tier.close()


def test_a_completion_that_raises_harms_nobody():
    """The threads go on, and others are told."""

    def broken(_: object) -> None:
        raise RuntimeError

    with filled() as (tier, _):
        chunk, payload = make_chunk("c0")
        assert tier.offer(chunk, aligned(payload), broken)
        tier.fetch(key_of("a0"), aligned(b"", 8192), broken)
        assert store(tier, "d0")
        assert fetch(tier, "d0") == make_chunk("d0")


def test_a_start_that_fails_lets_go_of_all():
    """A disk that fails its first measurement is refused, and its directory is free for the next start."""
    with filled() as (_, files):
        pass
    files.fail = failing("write", path=SLAB)
    with pytest.raises(ConfigError, match="/disk cannot be used for chunks: EIO"):
        DiskTier([ROOT], MIB, files=files)
    files.fail = lambda call, path: None
    with opened(files) as tier:
        assert fetch(tier, "a2") == make_chunk("a2", "a1")


def test_chunks_that_are_dropped_while_they_wait_end_once():
    """Stores whose prefix is dropped, and that were queued, placed, written or durable then, end with no."""
    for num_steps in range(12):
        with opened(SimulatedFiles(), num_threads=0) as tier:
            dones = []
            for depth in range(4):
                chunk, payload = make_chunk(f"a{depth}", f"a{depth - 1}" if depth else None)
                dones.append(Done())
                assert tier.offer(chunk, aligned(payload), dones[-1])
            for _ in range(num_steps):
                tier.advance()
            tier.drop([key_of("a0")])
            while tier.advance():
                pass
            told = [done.results for done in dones]
            assert all(len(results) == 1 for results in told)
            assert found(tier, "a0", "a1", "a2", "a3") == [False] * 4
            assert (tier.stats().used_nbytes, tier.stats().num_queued_writes) == (0, 0)
