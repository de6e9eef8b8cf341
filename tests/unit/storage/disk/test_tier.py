"""The disk tier over starts and stops: what it keeps, in which order, in how many bytes; and what it refuses."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvist.storage.disk.directory import plan_budget
from kvist.storage.disk.tier import DiskTier
from kvist.units import GIB, KIB, MIB
from tests.support.simulated_files import SimulatedFiles
from tests.support.tiers import Done, aligned, fetch, found, key_of, make_chunk, store

ROOT = Path("/disk")


def open_tier(paths: list[Path], nbytes: int = MIB, **options: object) -> DiskTier:
    return DiskTier(paths, nbytes, **{"queue_s": 1e9, **options})  # type: ignore[arg-type]


def disk_nbytes(*paths: Path) -> int:
    return sum(file.stat().st_blocks * 512 for path in paths for file in path.iterdir())


@pytest.mark.parametrize("num_directories", [1, 3])
def test_what_was_stored_is_there_after_a_start(tmp_path: Path, num_directories: int):
    """After a stop and a start all chunks are found, bytes and figures equal; also once more."""
    paths = [tmp_path / f"{number}" for number in range(num_directories)]
    names = [("a0", None), ("a1", "a0"), ("a2", "a1"), ("b0", None), ("b1", "b0")]
    tier = open_tier(paths, 3 * MIB)
    for name, parent in names:
        assert store(tier, name, parent, nbytes=8000)
    before = tier.stats()
    for _ in range(2):
        tier.close()
        tier = open_tier(paths, 3 * MIB)
        after = tier.stats()
        assert (after.num_chunks, after.used_nbytes) == (before.num_chunks, before.used_nbytes)
        assert all(fetch(tier, name) == make_chunk(name, parent, nbytes=8000) for name, parent in names)
    tier.close()


def test_the_order_of_use_survives_a_start():
    """What was touched before the stop goes after what was not, in one directory and over several."""
    for paths in ([ROOT], [Path("/one"), Path("/two")]):
        files = SimulatedFiles()
        tier = open_tier(paths, len(paths) * MIB, files=files)
        for number in range(6):
            assert store(tier, f"n{number}")
        tier.touch([key_of("n0")])
        tier.touch([key_of("n3")])
        tier.close()
        tier = open_tier(paths, len(paths) * MIB, files=files_after(files))
        order, number = ["n1", "n2", "n4", "n5", "n0", "n3"], 0
        kept = [True] * 6
        while any(kept):
            assert store(tier, f"new{number}")
            number += 1
            kept = found(tier, *order)
            assert kept == sorted(kept)
        tier.close()


def files_after(files: SimulatedFiles) -> SimulatedFiles:
    """Return the same files, as another process finds them."""
    return SimulatedFiles(files.contents())


def test_a_start_when_it_is_full_evicts(tmp_path: Path):
    """What is on the disk is counted before the first store, so a full tier stays within its size."""
    path = tmp_path / "disk"
    tier = open_tier([path], 2 * MIB)
    number = 0
    while tier.stats().counters.get("chunks_evicted", 0) == 0:
        assert store(tier, f"n{number}")
        number += 1
    tier.close()
    tier = open_tier([path], 2 * MIB)
    for more in range(10):
        assert store(tier, f"m{more}")
        assert disk_nbytes(path) <= 2 * MIB
    assert tier.stats().counters["chunks_evicted"] >= 8
    tier.close()


@pytest.mark.parametrize(("first_nbytes", "second_nbytes"), [(8 * MIB, 3 * MIB), (3 * MIB, 8 * MIB), (64 * MIB, MIB)])
def test_another_size_keeps_what_fits(tmp_path: Path, first_nbytes: int, second_nbytes: int):
    """The files take no more than the new size from the start on; each hit is right; there is room for new chunks."""
    path = tmp_path / "disk"
    tier = open_tier([path], first_nbytes)
    names = [f"n{number}" for number in range(100)]
    assert all(store(tier, name) for name in names)
    tier.close()
    tier = open_tier([path], second_nbytes)
    assert disk_nbytes(path) <= second_nbytes
    kept = [name for name, is_found in zip(names, found(tier, *names), strict=True) if is_found]
    assert all(fetch(tier, name) == make_chunk(name) for name in kept)
    assert len(kept) == tier.stats().num_chunks
    assert bool(kept) is (first_nbytes < 64 * MIB)
    assert all(store(tier, f"m{number}") for number in range(20))
    assert disk_nbytes(path) <= second_nbytes
    tier.close()


@pytest.mark.parametrize("nbytes", [MIB, 3 * MIB + 12345, 200 * GIB, 16_000 * GIB])
def test_a_share_is_divided_without_a_rest_too_many(nbytes: int):
    """Slab, the longest log, the next log beside it and the lock's block fit into the share."""
    budget = plan_budget(nbytes)
    next_log_nbytes = 4096 + 24 + 80 * budget.chunks_max
    assert budget.slab_nbytes + budget.log_nbytes_max + next_log_nbytes + 4096 <= nbytes
    assert budget.slab_nbytes >= nbytes * 0.7
    assert budget.chunks_max >= nbytes // (80 * KIB) or nbytes > GIB


def test_the_log_stays_short():
    """Thousands of stores and evictions leave a log that its chunks need, within its share; a start reads it."""
    files = SimulatedFiles()
    tier = open_tier([ROOT], MIB, files=files)
    longest = 0
    names = [f"n{number}" for number in range(2000)]
    for name in names:
        assert store(tier, name, nbytes=100, slot_nbytes=4096)
        longest = max(longest, len(files.names[ROOT / "kvist.log"].content))
    assert 64 * KIB < longest <= plan_budget(MIB).log_nbytes_max
    kept = found(tier, *names)
    again = open_tier([ROOT], MIB, files=files_after(files))
    assert found(again, *names) == kept
    tier.close()
    again.close()


def test_more_than_the_disk_writes_in_time_is_refused():
    """Queued bytes are bounded by what was asked for, and by the measured rate; the refusal is counted."""
    for options in ({"queue_nbytes": 20_000}, {"queue_s": 1e-9}):
        tier = open_tier([ROOT], MIB, files=SimulatedFiles(), num_threads=0, **options)
        taken = []
        for number in range(6):
            chunk, payload = make_chunk(f"n{number}")
            taken.append(tier.offer(chunk, aligned(payload), Done()))
        assert taken == sorted(taken, reverse=True)
        assert 1 <= sum(taken) <= 4
        assert tier.stats().counters["refused_busy"] == 6 - sum(taken)
        while tier.advance():
            pass
        assert store_by_hand(tier, "later")
        tier.close()


def store_by_hand(tier: DiskTier, name: str) -> bool:
    chunk, payload = make_chunk(name)
    done = Done()
    assert tier.offer(chunk, aligned(payload), done)
    while tier.advance():
        pass
    return done.results == [True]


def test_reads_come_before_writes():
    """A read that was asked for last is done first."""
    tier = open_tier([ROOT], MIB, files=SimulatedFiles(), num_threads=0)
    assert store_by_hand(tier, "a0")
    chunk, payload = make_chunk("b0")
    read, write = Done(), Done()
    assert tier.offer(chunk, aligned(payload), write)
    tier.fetch(key_of("a0"), aligned(b"", 8192), read)
    assert tier.advance()
    assert read.results == [make_chunk("a0")[0]]
    assert write.results == []
    tier.close()
    assert write.results == [False]


def test_what_is_read_or_written_is_not_evicted():
    """A full tier takes other chunks' places; a chunk whose parent is dropped while it is written ends with no."""
    tier = open_tier([ROOT], MIB, files=SimulatedFiles(), num_threads=0)
    number = 0
    while not tier.stats().counters.get("chunks_evicted"):
        assert store_by_hand(tier, f"n{number}")
        number += 1
    oldest = next(name for name in (f"n{i}" for i in range(number)) if found(tier, name) == [True])
    target, done = aligned(b"", 8192), Done()
    tier.fetch(key_of(oldest), target, done)
    chunk, payload = make_chunk("b0")
    assert tier.offer(chunk, aligned(payload), Done())
    assert found(tier, oldest) == [True]
    while tier.advance():
        pass
    assert done.results == [make_chunk(oldest)[0]]
    child, dropped = Done(), make_chunk("b1", "b0")
    assert tier.offer(dropped[0], aligned(dropped[1]), child)
    tier.drop([key_of("b0")])
    while tier.advance():
        pass
    assert child.results == [False]
    assert found(tier, "b0", "b1") == [False, False]
    tier.close()


def test_how_long_a_read_takes_is_known_from_the_start(tmp_path: Path):
    """The first look at the disk gives both rates; what is queued adds to the estimate."""
    tier = open_tier([tmp_path / "disk"], 8 * MIB, num_threads=0)
    stats = tier.stats()
    assert stats.read_rate > 0
    assert stats.write_rate > 0
    idle_s = tier.read_seconds(MIB)
    assert idle_s == pytest.approx(MIB / stats.read_rate)
    assert store_by_hand(tier, "a0")
    before = tier.read_seconds(MIB)
    tier.fetch(key_of("a0"), aligned(b"", 8192), Done())
    assert tier.read_seconds(MIB) > before
    tier.close()


def test_memory_that_is_not_aligned_is_copied(tmp_path: Path):
    """A source or target at any address gives the right bytes."""
    tier = open_tier([tmp_path / "disk"], MIB)
    chunk, payload = make_chunk("a0")
    done = Done()
    assert tier.offer(chunk, memoryview(bytearray(b"x" + payload))[1:], done)
    assert done.wait()
    target, read = memoryview(bytearray(8200))[3:8195], Done()
    tier.fetch(chunk.key, target, read)
    assert read.wait() == chunk
    assert bytes(target[: chunk.nbytes]) == payload
    tier.close()
