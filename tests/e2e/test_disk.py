"""What was stored is there after whatever ended the daemon; what is not there is missed, and nothing is wrong."""

import itertools
import random
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from kvist.wire import messages as wire
from tests.support.daemon import Daemon
from tests.support.engine import FakeEngine, packed
from tests.support.waiting import wait_until


@contextmanager
def connected(daemon: Daemon) -> Iterator[FakeEngine]:
    with FakeEngine(daemon.path) as engine:
        engine.client.register()
        yield engine


@pytest.fixture
def disk(tmp_path: Path) -> Path:
    folder = tmp_path / "disk"
    folder.mkdir()
    return folder


def arguments(disk: Path, *, size: str = "64MiB") -> list[str]:
    return ["--disk", str(disk), "--disk-size", size]


@pytest.fixture
def daemon(tmp_path: Path, disk: Path) -> Iterator[Daemon]:
    with Daemon(tmp_path, arguments=arguments(disk)) as daemon:
        yield daemon


def look_up_all(engine: FakeEngine, prompt: list[int]) -> wire.LookupReply:
    """Ask until nothing is on its way any more."""
    replies: list[wire.LookupReply] = []

    def is_there() -> bool:
        for reply in replies:
            engine.release(reply.lease)
        replies[:] = [engine.look_up(prompt)]
        return not replies[0].num_loading

    wait_until(is_there, what="a prefix that is loaded")
    return replies[0]


def test_a_restarted_daemon_serves_from_disk(daemon: Daemon, prompt: list[int]):
    """After a stop and a start, the first lookup says what is being read, a later one finds it, byte for byte."""
    with connected(daemon) as engine:
        assert engine.store(prompt).num_stored == 5
    assert daemon.stop() == 0
    daemon.start()
    with connected(daemon) as engine:
        first = engine.look_up(prompt)
        assert (first.num_chunks, first.num_loading, first.lease) == (0, 5, b"")
        found = look_up_all(engine, prompt)
        assert found.num_chunks == 5
        assert engine.load(prompt, found) == []
    status = daemon.status()
    assert status.counters["chunks_promoted"] == 5
    assert status.counters["chunks_asked"] == sum(
        status.counters[f"chunks_{outcome}"] for outcome in ("found", "loading", "missed")
    )
    assert [(tier.name, tier.num_chunks, tier.off_reason) for tier in status.tiers] == [("disk", 5, "")]


def test_what_the_pool_has_no_room_for_is_on_disk(tmp_path: Path, disk: Path):
    """Prompts of several times the pool, stored no faster than they are written, are all found again."""
    with Daemon(tmp_path, pool="1MiB", arguments=arguments(disk)) as daemon, connected(daemon) as engine:
        prompts = [list(range(start, start + 80)) for start in range(0, 80_000, 1000)]
        for number, prompt in enumerate(prompts, 1):
            assert engine.store(prompt).num_stored == 10
            wait_until(lambda num=10 * number: daemon.count("chunks_demoted") == num)
        assert daemon.count("chunks_evicted") > 0
        for prompt in prompts:
            found = look_up_all(engine, prompt)
            assert found.num_chunks == 10
            assert engine.load(prompt, found) == []
        assert daemon.count("chunks_promoted") > 0


def test_a_disk_of_another_daemon_is_refused(tmp_path: Path, disk: Path, daemon: Daemon):
    """A directory serves one daemon at a time; the second one says which process has it."""
    with pytest.raises(AssertionError, match=str(daemon.pid)):
        Daemon(tmp_path, socket="other.sock", arguments=arguments(disk))


def test_a_lost_drive_is_a_miss(daemon: Daemon, disk: Path, prompt: list[int]):
    """When the files are gone under the daemon, lookups miss or find what is right, and stores go on."""
    with connected(daemon) as engine:
        engine.store(prompt)
        for path in sorted(disk.rglob("*"), reverse=True):
            path.rmdir() if path.is_dir() else path.unlink()
        other = [token + 100_000 for token in prompt]
        assert engine.store(other).num_stored == 5
        assert engine.num_found(other) == engine.num_found(prompt) == 5


def test_killed_at_any_moment_the_disk_serves_right_bytes_or_none(
    tmp_path: Path, disk: Path, pytestconfig: pytest.Config
):
    """Killed while it stores, loads, writes and reads, a daemon leaves a disk of which every hit is what was stored."""
    chance = random.Random(7)
    prompts = [list(range(start, start + 8 * chance.randint(1, 12))) for start in range(1000, 61_000, 1000)]
    num_loaded = 0
    with Daemon(tmp_path, pool="1MiB", arguments=arguments(disk, size="16MiB")) as daemon:
        for _ in range(pytestconfig.getoption("--kills")):
            with connected(daemon) as engine:
                for prompt in chance.sample(prompts, 20):
                    found = look_up_all(engine, prompt)
                    assert engine.load(prompt, found) == [] if found.num_chunks else True
                    num_loaded += found.num_chunks
                    engine.store(prompt)
                wait_until(lambda: daemon.count("chunks_demoted") + daemon.count("chunks_promoted") > 0, deadline_s=60)
                for prompt in chance.sample(prompts, 10):  # Under load: requests and copies of all kinds are under way.
                    engine.client.submit(lambda i, p=prompt: wire.Lookup(i, b"".join(engine.digests(p))))
                for number in itertools.islice(itertools.count(chance.randrange(10**6)), chance.randint(0, 5)):
                    unasked = [10**6 + number * 100 + at for at in range(16)]
                    chunks = engine.take_chunks(2)
                    for blocks, digest in zip(chunks, engine.digests(unasked), strict=True):
                        engine.map.write(engine.arrays, blocks, engine.content(digest))
                    engine.client.submit(
                        lambda i, u=unasked, c=chunks: wire.Store(i, b"".join(engine.digests(u)), b"", packed(c))
                    )
                engine.client.poll()
                daemon.signal(signal.SIGKILL)
                daemon.process.wait()
            daemon.start()
        with connected(daemon) as engine:
            for prompt in prompts:
                found = look_up_all(engine, prompt)
                assert engine.load(prompt, found) == [] if found.num_chunks else True
                num_loaded += found.num_chunks
        assert num_loaded > 0
        assert daemon.count("chunks_promoted") > 0
        assert daemon.count("chunks_corrupt") == 0
