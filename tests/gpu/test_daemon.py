"""A real daemon and engines with GPU memory, each in a process of its own, in both lanes."""

from base64 import b64decode, b64encode
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvist.units import KIB, MIB
from tests.support.daemon import Daemon
from tests.support.gpu_worker import GpuWorker
from tests.support.memory import stamp
from tests.support.waiting import wait_until

NUM_BLOCKS = 64
PAGE_NBYTES = 64 * KIB
LAYER_NBYTES = NUM_BLOCKS * PAGE_NBYTES
LANES = pytest.mark.parametrize("lane", ["daemon", "engine"])


@pytest.fixture
def daemon(tmp_path: Path) -> Iterator[Daemon]:
    with Daemon(tmp_path, pool="64MiB") as daemon:
        yield daemon


@pytest.fixture
def workers() -> Iterator[list[GpuWorker]]:
    workers = [GpuWorker(), GpuWorker()]
    yield workers
    for worker in workers:
        worker.close()


def digests(num_chunks: int, seed: int = 1) -> str:
    return b64encode(stamp(b"digests" + bytes([seed]), 16 * num_chunks)).decode()


def start(worker: GpuWorker, daemon: Daemon, lane: str) -> int:
    return worker.ask("engine", socket=daemon.path, lane=lane, num_blocks=NUM_BLOCKS, page_nbytes=PAGE_NBYTES)


def fill(worker: GpuWorker, address: int, name: str) -> None:
    worker.ask("stamp", address=address, nbytes=2 * LAYER_NBYTES, name=name)


def read(worker: GpuWorker, address: int, block: int) -> list[bytes]:
    places = [address + layer * LAYER_NBYTES + block * PAGE_NBYTES for layer in range(2)]
    return [b64decode(worker.ask("read", address=place, nbytes=PAGE_NBYTES)) for place in places]


@LANES
def test_one_engine_gets_what_another_has_computed(daemon: Daemon, workers: list[GpuWorker], lane: str):
    """Blocks of one process arrive in other blocks of another, byte for byte; other blocks stay as they were."""
    writer, reader = workers
    source, target = (start(worker, daemon, lane) for worker in workers)
    fill(writer, source, "writer")
    fill(reader, target, "reader")
    given, taken = [3, 9, 5, 60, 1, 2], [8, 7, 40, 41, 42, 63]
    untouched = read(reader, target, 6)
    assert writer.ask("store", digests=digests(3), blocks=given) == [3, 0, 0]
    assert reader.ask("load", digests=digests(3), blocks=taken) == []
    for one, other in zip(given, taken, strict=True):
        assert read(reader, target, other) == read(writer, source, one)
    assert read(reader, target, 6) == untouched


@LANES
def test_a_wrong_byte_in_the_pool_fails_its_chunk(daemon: Daemon, workers: list[GpuWorker], lane: str):
    """A byte that changed in the pool fails exactly its chunk, which is dropped; its neighbours are loaded."""
    worker = workers[0]
    address = start(worker, daemon, lane)
    fill(worker, address, "right")
    assert worker.ask("store", digests=digests(3), blocks=[1, 2, 3, 4, 5, 6]) == [3, 0, 0]
    wait_until(lambda: daemon.status().num_sealed == 3)
    daemon.poison(read(worker, address, 3)[0], place=70)
    assert worker.ask("load", digests=digests(3), blocks=[11, 12, 13, 14, 15, 16]) == [1]
    wait_until(lambda: daemon.count("chunks_corrupt") == 1)
    assert read(worker, address, 12) == read(worker, address, 2)
    assert daemon.status().num_sealed == 1


@LANES
def test_a_store_waits_for_the_engine(daemon: Daemon, workers: list[GpuWorker], lane: str):
    """What the engine's stream has yet to write when a store is sent is what is stored."""
    worker, other = workers
    address, target = start(worker, daemon, lane), start(other, daemon, lane)
    fill(worker, address, "old")
    worker.ask("queue_slow_stamp", address=address + PAGE_NBYTES, nbytes=PAGE_NBYTES, name="new")
    assert worker.ask("store", digests=digests(1), blocks=[1, 2], is_fenced=lane == "daemon") == [1, 0, 0]
    assert other.ask("load", digests=digests(1), blocks=[5, 6]) == []
    assert read(other, target, 5)[0] == stamp(b"new", PAGE_NBYTES)


@LANES
def test_a_killed_engine_gives_its_memory_back(daemon: Daemon, workers: list[GpuWorker], lane: str):
    """Within a moment of its end, nothing of an engine is left on the GPU, in either process; what it stored is."""
    heir, observer = workers
    heir.ask("uuid")  # Has a context of its own from now on.
    before = observer.ask("free_nbytes")
    engine = GpuWorker()
    address = start(engine, daemon, lane)
    fill(engine, address, "gone")
    assert engine.ask("store", digests=digests(2), blocks=[1, 2, 3, 4]) == [2, 0, 0]
    wait_until(lambda: daemon.status().num_sealed == 2)
    engine.close()
    wait_until(lambda: daemon.status().num_registered == 0, deadline_s=1.0)
    wait_until(lambda: observer.ask("free_nbytes") >= before - 2 * MIB, deadline_s=2.0)
    address = start(heir, daemon, lane)
    assert heir.ask("load", digests=digests(2), blocks=[1, 2, 3, 4]) == []
    expected = stamp(b"gone", 2 * LAYER_NBYTES)
    assert read(heir, address, 2)[0] == expected[2 * PAGE_NBYTES : 3 * PAGE_NBYTES]


def test_an_isolated_daemon_copies_itself(tmp_path: Path, workers: list[GpuWorker]):
    """With ``--isolate`` an engine that would copy for itself is refused with the option's name."""
    with Daemon(tmp_path, pool="64MiB", arguments=["--isolate"]) as daemon:
        with pytest.raises(RuntimeError, match="--isolate"):
            start(workers[0], daemon, "engine")
        address = start(workers[1], daemon, "daemon")
        fill(workers[1], address, "alone")
        assert workers[1].ask("store", digests=digests(1), blocks=[1, 2]) == [1, 0, 0]
