"""Engines in one process, the daemon in another: what one stores, another loads, byte for byte, and nothing else."""

import subprocess
from dataclasses import replace

import msgspec
import pytest

from kvist.errors import UnknownLease
from kvist.wire import messages as wire
from tests.e2e.conftest import Connect
from tests.support.daemon import Daemon, command
from tests.support.engine import NAMESPACE, SMALL, packed
from tests.support.layouts import Shape, hnd
from tests.support.memory import GUARD, num_mappings
from tests.support.waiting import wait_until


def test_what_one_engine_stores_another_loads(shared: Daemon, connect: Connect, prompt: list[int]):
    """A prompt's whole chunks come back in another engine, in other blocks; the tail is not cached."""
    with_prompt, other = connect(shared), connect(shared, engine_id="other")
    before = shared.num_fds()
    assert other.num_found(prompt) == 0
    assert with_prompt.store(prompt).num_stored == 5
    found = other.look_up(prompt)
    assert found.num_chunks == 5
    assert other.load(prompt, found) == []
    assert with_prompt.is_untouched()
    assert other.is_untouched()
    assert other.num_found(prompt[: 3 * NAMESPACE.chunk_tokens]) == 3
    assert other.num_found([7, *prompt[1:]]) == 0
    shared.check_quiet(num_fds=before, num_sessions=3)


def test_a_prompt_that_grows_is_stored_bit_by_bit(shared: Daemon, connect: Connect, prompt: list[int]):
    """Each store hangs its chunks below the last; a part of a found prefix can be loaded by itself."""
    engine = connect(shared)
    for num in range(1, 6):
        assert engine.store(prompt[: num * NAMESPACE.chunk_tokens], first=num - 1).num_stored == 1
    assert engine.store(prompt).num_present == 5
    found = engine.look_up(prompt)
    assert engine.load(prompt, found, first=3) == []
    assert engine.is_untouched()


def test_layouts_share_and_block_sizes_differ(shared: Daemon, connect: Connect, prompt: list[int]):
    """An engine with another order of heads and tokens, and larger blocks, loads what the first one stored."""
    writer = connect(shared)
    reader = connect(shared, laid=hnd(Shape(2, 40, 8, 2, 64)), engine_id="other")
    assert (writer.blocks_per_chunk, reader.blocks_per_chunk) == (2, 1)
    writer.store(prompt)
    assert reader.load(prompt, reader.look_up(prompt)) == []


@pytest.mark.parametrize("change", [{"dtype": "float8_e4m3fn"}, {"revision": "b"}, {"chunk_tokens": 16}], ids=str)
def test_namespaces_share_nothing(shared: Daemon, connect: Connect, prompt: list[int], change: dict):
    """The same tokens under another dtype, revision or chunk are another thing: no hit, while the control hits."""
    engine = connect(shared)
    engine.store(prompt)
    other = connect(shared, namespace=replace(NAMESPACE, **change), engine_id="other")
    control = connect(shared, namespace=replace(NAMESPACE), engine_id="control")
    assert other.num_found(prompt) == 0
    assert control.num_found(prompt) == 5
    assert other.store(prompt).num_present == 0
    assert other.load(prompt, other.look_up(prompt)) == []
    assert control.load(prompt, control.look_up(prompt)) == []


def test_skipped_blocks_stay_as_they_were(shared: Daemon, connect: Connect, prompt: list[int]):
    """Blocks that an engine says it has are not written, whoever reads them meanwhile."""
    engine = connect(shared)
    engine.store(prompt)
    found = engine.look_up(prompt)
    chunks = engine.take_chunks(5)
    reply = engine.client.call(
        lambda number: wire.Retrieve(number, found.lease, 0, packed(chunks), num_skipped_blocks=1)
    )
    assert isinstance(reply, wire.RetrieveReply)
    loaded = engine.map.read(engine.arrays, chunks[0])
    right = engine.content(engine.digests(prompt)[0])
    for place, (found_byte, right_byte) in enumerate(zip(loaded, right, strict=True)):
        assert found_byte == (GUARD if engine.map.position[place] == 0 else right_byte)


def test_a_poisoned_chunk_is_reported_exactly(shared: Daemon, connect: Connect, prompt: list[int]):
    """A byte that changes in the daemon's memory fails its chunk, is not loaded, and ends the next lookup there."""
    engine = connect(shared)
    engine.store(prompt)
    shared.poison(engine.content(engine.digests(prompt)[3]), place=2345)
    assert engine.load(prompt, engine.look_up(prompt)) == [3]
    assert engine.num_found(prompt) == 3
    assert shared.count("chunks_corrupt") == 1
    assert engine.store(prompt).num_stored == 2
    assert engine.load(prompt, engine.look_up(prompt)) == []


def test_a_store_larger_than_the_pool_keeps_what_fits(tmp_path, connect: Connect):
    """One request for more than there is keeps its beginning, and says ``pool full``; what was kept can be loaded."""
    with Daemon(tmp_path, pool="64KiB") as daemon:
        engine = connect(daemon)
        prompt = list(range(24 * NAMESPACE.chunk_tokens))
        reply = engine.store(prompt)
        assert (reply.num_stored, reply.num_refused, reply.reason) == (16, 8, "pool full")
        found = engine.look_up(prompt)
        assert found.num_chunks == 16
        assert engine.load(prompt, found) == []
        assert daemon.status().pool_used_nbytes == daemon.status().pool_nbytes == 64 * 1024


def test_a_pool_under_pressure_goes_on(tmp_path, connect: Connect):
    """Three times what fits is stored: never more than the pool is used, the newest is whole, the oldest is gone."""
    with Daemon(tmp_path, pool="256KiB") as daemon:
        engine = connect(daemon)
        prompts = [[start, *range(100, 100 + 8 * NAMESPACE.chunk_tokens)] for start in range(24)]
        for prompt in prompts:
            assert engine.store(prompt).num_stored == 8
            assert engine.load(prompt, engine.look_up(prompt)) == []
            assert daemon.status().pool_used_nbytes <= 256 * 1024
        assert engine.num_found(prompts[0]) == 0
        assert daemon.count("chunks_evicted") == (24 - 8) * 8


def test_held_chunks_are_not_evicted(tmp_path, connect: Connect, prompt: list[int]):
    """What a lease holds survives any pressure, and goes when the lease has gone back."""
    with Daemon(tmp_path, pool="64KiB") as daemon:
        engine = connect(daemon)
        engine.store(prompt)
        held = engine.look_up(prompt)
        for start in range(20):
            engine.store([start, *range(100, 100 + 6 * NAMESPACE.chunk_tokens)])
        assert engine.load(prompt, held) == []
        for start in range(20, 40):
            engine.store([start, *range(100, 100 + 6 * NAMESPACE.chunk_tokens)])
        assert engine.num_found(prompt) == 0


def test_an_expired_lease_holds_nothing(tmp_path, connect: Connect, prompt: list[int]):
    """A lease that nobody claims ends by itself, and says so to whoever comes later."""
    with Daemon(tmp_path, arguments=["--lease-ttl-s", "0.2"]) as daemon:
        engine = connect(daemon)
        engine.store(prompt)
        found = engine.look_up(prompt)
        assert daemon.status().num_leases == 1
        wait_until(lambda: daemon.status().num_leases == 0)
        with pytest.raises(UnknownLease, match=f"{found.lease.hex()} has expired"):
            engine.load(prompt, found)
        assert daemon.count("leases_expired") == 1
        assert engine.num_found(prompt) == 5


def test_the_daemon_maps_what_is_registered_and_no_more(shared: Daemon, connect: Connect):
    """Each allocation is mapped once; nothing stays mapped of an engine that has gone in peace."""
    engine = connect(shared, name="kvist-watched")
    assert num_mappings(shared.pid, "kvist-watched") == len(SMALL.memory_nbytes)
    engine.client.close()
    wait_until(lambda: shared.status().num_sessions == 1)
    assert num_mappings(shared.pid, "kvist-watched") == 0


def test_status_is_shown_to_people_and_programs(daemon: Daemon, connect: Connect, prompt: list[int]):
    """``kvist status`` says what is there, as a table and as JSON; without a daemon it says so and exits with 1."""
    engine = connect(daemon)
    engine.store(prompt)
    shown = subprocess.run(command("status", "--socket", daemon.path), capture_output=True, text=True, check=True)
    assert f"pid {daemon.pid}" in shown.stdout
    assert "5 sealed" in shown.stdout
    raw = subprocess.run(command("status", "--json", "--socket", daemon.path), capture_output=True, check=True)
    status = msgspec.json.decode(raw.stdout, type=wire.StatusReply)
    assert (status.pid, status.num_sealed, status.counters["chunks_stored"]) == (daemon.pid, 5, 5)
    daemon.stop()
    gone = subprocess.run(command("status", "--socket", daemon.path), capture_output=True, text=True, check=False)
    assert (gone.returncode, daemon.path in gone.stderr) == (1, True)
