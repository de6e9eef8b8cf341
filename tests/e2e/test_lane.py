"""Threads of an engine's process copy by the daemon's order: nothing is lost, leaked, or touched at the wrong time."""

import gc
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvist.client.client import Pending
from kvist.errors import DeviceError, LayoutError, PoolKept, Unreachable
from kvist.wire import messages as wire
from tests.support.copier import NBYTES, ROOT
from tests.support.daemon import Daemon
from tests.support.engine import packed
from tests.support.lane_engine import Gate, LaneEngine, wait_over
from tests.support.memory import GUARD, num_fds, num_mappings, stamp
from tests.support.twin import TwinDevice
from tests.support.waiting import wait_until

NAMES = ("one", "two", "three")
SHORT_S = 0.3
POOL = "kvist-pool"


@pytest.fixture
def engine(daemon: Daemon) -> Iterator[LaneEngine]:
    """An engine that has registered."""
    with LaneEngine(daemon.path) as engine:
        engine.lane.register(20)
        yield engine


@pytest.fixture
def impatient(daemon: Daemon) -> Iterator[LaneEngine]:
    """An engine that has registered, and waits for a short time only. Its daemon may be stopped."""
    with LaneEngine(daemon.path, deadline_s=SHORT_S) as engine:
        engine.lane.register(20)
        yield engine
        if daemon.process.poll() is None:
            daemon.signal(signal.SIGCONT)


@pytest.fixture
def gate() -> Iterator[Gate]:
    """A gate that is open in the end, so that whoever waits for a copy is not kept."""
    gate = Gate()
    yield gate
    gate.open()


def stamps(names: tuple[str, ...]) -> list[bytes]:
    return [stamp(name.encode(), NBYTES) for name in names]


def check_lets_go(daemon: Daemon) -> None:
    """Wait until the daemon holds nothing, and assert that it was never answered an order that it did not give."""
    wait_until(lambda: not held(daemon), what=str(daemon.status()))
    assert daemon.count("refused_malformed") == 0


def held(daemon: Daemon) -> int:
    status = daemon.status()
    return status.num_reserved + status.num_pinned + status.num_leases + status.num_copies_in_flight


def num_pools() -> int:
    gc.collect()  # A twin's mapping goes with the last view of it.
    return num_mappings(os.getpid(), POOL)


# ── copies ──────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_bytes_come_back_in_other_blocks(daemon: Daemon, engine: LaneEngine):
    """What was stored is what is loaded, byte by byte, and no block that a request does not name is touched."""
    engine.check_works(NAMES)
    assert engine.load(NAMES, is_ahead=True) == (stamps(NAMES), wire.RetrieveReply(0, 3, []))
    assert engine.is_untouched()
    engine.fences.check_all_back()
    check_lets_go(daemon)
    assert (daemon.count("chunks_stored"), daemon.count("chunks_loaded")) == (3, 6)


def test_skipped_blocks_are_not_written(engine: LaneEngine):
    """The leading blocks that a load skips keep what they hold; all others get their chunk's bytes."""
    engine.store(NAMES)
    engine.wait_found(NAMES)
    pending, chunks = engine.submit_load(engine.look_up(NAMES).lease, len(NAMES), num_skipped_blocks=1)
    wait_over(pending)
    assert pending.reply == wire.RetrieveReply(0, len(NAMES), [])
    first, *others = engine.read(chunks)
    assert others == stamps(NAMES)[1:]
    is_skipped = engine.map.position == 0
    assert all(
        byte == (GUARD if skipped else right)
        for byte, skipped, right in zip(first, is_skipped, stamps(NAMES)[0], strict=True)
    )


def test_many_requests_at_once(daemon: Daemon, engine: LaneEngine, gate: Gate):
    """Stores and loads that are under way together, in both directions, each end as they would alone."""
    engine.store(NAMES)
    engine.wait_found(NAMES)
    engine.before_copy = gate
    leases = [engine.look_up(NAMES).lease for _ in range(3)]
    stores = [engine.submit_store((f"a{number}", f"b{number}")) for number in range(4)]
    loads = [engine.submit_load(lease, len(NAMES)) for lease in leases]
    wait_until(lambda: daemon.status().num_copies_in_flight == len(stores) + len(loads))
    gate.open()
    wait_over(*(pending for pending, _ in [*stores, *loads]))
    assert [pending.reply for pending, _ in stores] == [wire.StoreReply(0, 2, 0)] * len(stores)
    assert [pending.reply for pending, _ in loads] == [wire.RetrieveReply(0, len(NAMES), [])] * len(loads)
    assert [engine.read(chunks) for _, chunks in loads] == [stamps(NAMES)] * len(loads)
    for _, chunks in [*stores, *loads]:
        engine.give_back(chunks)
    check_lets_go(daemon)
    for number in range(4):
        assert engine.load((f"a{number}", f"b{number}"))[0] == stamps((f"a{number}", f"b{number}"))
    assert engine.is_untouched()
    engine.fences.check_all_back()


def test_a_corrupt_slot_is_named_and_dropped(daemon: Daemon, engine: LaneEngine):
    """A chunk whose bytes have changed in the pool is reported, no other is, and it is found no more."""
    engine.store(NAMES)
    engine.wait_found(NAMES)
    pool = engine.devices[0].pool
    pool[pool.tobytes().index(stamps(NAMES)[1]) + 99] ^= 1
    chunks, reply = engine.load(NAMES)
    assert reply == wire.RetrieveReply(0, len(NAMES), [1])
    assert [chunks[0], chunks[2]] == [stamps(NAMES)[0], stamps(NAMES)[2]]
    wait_until(lambda: engine.num_found(NAMES) == 1)
    assert daemon.count("chunks_corrupt") == 1


# ── fences ──────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_copies_wait_for_what_was_computed(engine: LaneEngine):
    """A request's fence is recorded when it is submitted, and waited for before its copy touches a block."""
    seen: list[list[object]] = []
    engine.before_copy = lambda _: seen.append([fence for _, fence in engine.devices[0].waited])
    first = engine.fences.num_recorded + 1
    pending, _ = engine.submit_store(NAMES)
    assert engine.fences.num_recorded == first
    wait_over(pending)
    engine.wait_found(NAMES)
    engine.load(NAMES)
    assert seen == [[first], [first, first + 1]]
    engine.fences.check_all_back()


def test_requests_without_a_copy_give_their_fences_back(daemon: Daemon, engine: LaneEngine):
    """Refused, lost, faulty, or with nothing to copy: the fence is given back once, and no device waits for it."""
    engine.store(NAMES)
    num_waited = len(engine.devices[0].waited)
    engine.wait_found(NAMES)
    present = engine.store(NAMES)
    assert isinstance(present, wire.StoreReply)
    assert (present.num_stored, present.num_present) == (0, len(NAMES))
    refused, _ = engine.submit_load(b"no lease", 1)
    wait_over(refused)
    assert isinstance(refused.reply, wire.Error)
    faulty = engine.lane.submit(lambda number: wire.Ping(number // 0))
    wait_over(faulty)
    assert faulty.is_lost
    daemon.kill()
    lost, _ = engine.submit_store(NAMES)
    wait_over(lost)
    assert lost.is_lost
    engine.fences.check_all_back()
    assert len(engine.devices[0].waited) == num_waited


def test_a_faulty_request_is_lost_alone(daemon: Daemon, engine: LaneEngine):
    """A request that cannot be made, or whose block ids are none, is lost or refused, and all others go on."""
    for _ in range(3):
        faulty = engine.lane.submit(lambda number: wire.Ping(number // 0))
        wrong = engine.lane.submit(lambda number: wire.Store(number, bytes(16), b"", packed([[1, 10**6]])))
        wait_over(faulty, wrong)
        assert faulty.is_lost
        assert isinstance(wrong.reply, wire.Error)
    engine.check_works(NAMES)
    check_lets_go(daemon)


# ── daemons that die, freeze and come back ──────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("is_load", [True, False], ids=["load", "store"])
def test_a_request_outlives_its_daemon(daemon: Daemon, engine: LaneEngine, gate: Gate, *, is_load: bool):
    """A daemon dies during a copy: its request is over when the copy has ended, not before; others are lost at once."""
    engine.store(NAMES)
    engine.wait_found(NAMES)
    engine.before_copy = gate
    lease = engine.look_up(NAMES).lease
    copying, _ = engine.submit_load(lease, len(NAMES)) if is_load else engine.submit_store(("other",))
    gate.wait_reached()
    daemon.signal(signal.SIGSTOP)
    waiting, _ = engine.submit_store(("never",))
    daemon.kill()
    wait_over(waiting)
    assert waiting.is_lost
    assert not copying.is_over
    lost, _ = engine.submit_store(("never",))
    wait_over(lost)
    assert lost.is_lost
    assert not copying.is_over
    gate.open()
    wait_over(copying)
    engine.fences.check_all_back()
    engine.devices.clear()
    wait_until(lambda: num_pools() == 0)  # The memory of a dead daemon's pool is what the next one needs.


def test_a_frozen_daemon_cannot_touch_blocks_later(daemon: Daemon, impatient: LaneEngine):
    """Requests are lost at the deadline; orders that come later are declined, and nothing stays reserved or held."""
    engine = impatient
    engine.check_works(NAMES)
    lease = engine.look_up(NAMES).lease
    daemon.signal(signal.SIGSTOP)
    began = time.monotonic()
    store, stored = engine.submit_store(("late 1", "late 2"))
    load, loaded = engine.submit_load(lease, len(NAMES))
    assert time.monotonic() - began < SHORT_S / 2
    wait_over(store, load)
    assert SHORT_S <= time.monotonic() - began < 10 * SHORT_S
    assert (store.is_lost, load.is_lost) == (True, True)
    engine.give_back([*stored, *loaded])
    engine.fences.check_all_back()
    num_waited = len(engine.devices[0].waited)
    daemon.signal(signal.SIGCONT)
    check_lets_go(daemon)
    assert engine.is_untouched()
    assert len(engine.devices[0].waited) == num_waited
    assert engine.num_found(("late 1",)) == 0
    engine.check_works(("new 1", "new 2"))


def test_an_answer_that_cannot_be_sent_is_sent_later(daemon: Daemon, engine: LaneEngine, gate: Gate):
    """A copy ends while no byte can be sent to the daemon: when it reads again it hears of it, and lets go."""
    engine.before_copy = gate
    pending, _ = engine.submit_store(NAMES)
    gate.wait_reached()
    daemon.signal(signal.SIGSTOP)
    sent = [one for nbytes in (1 << 20, 1 << 14, 1 << 8, 0) for one in send_until_full(engine, nbytes)]
    gate.open()
    wait_over(pending)
    assert pending.reply == wire.StoreReply(0, len(NAMES), 0)
    daemon.signal(signal.SIGCONT)
    wait_over(*sent)
    engine.wait_found(NAMES)
    check_lets_go(daemon)


def send_until_full(engine: LaneEngine, nbytes: int) -> list[Pending]:
    """Send requests of a size to a frozen daemon until one cannot be sent; return the others."""
    sent: list[Pending] = []
    while True:
        num_sent = engine.client.num_unanswered
        one = engine.lane.submit(lambda number: wire.Lookup(number, bytes(nbytes)) if nbytes else wire.Ping(number))
        wait_until(lambda one=one, num_sent=num_sent: one.is_over or engine.client.num_unanswered > num_sent)
        if one.is_over:
            return sent
        sent.append(one)


def test_a_restarted_daemon_is_used(daemon: Daemon, engine: LaneEngine):
    """The lane registers with the next daemon, maps its pool in place of the old one, and works."""
    engine.check_works(NAMES)
    daemon.kill()
    engine.scheduler.close()
    daemon.start()
    wait_until(lambda: engine.store(("again",)) is not None)
    engine.check_works(NAMES)
    assert len(engine.devices) == 2
    assert daemon.status().num_registered == 1
    engine.devices.pop(0)
    wait_until(lambda: num_pools() == 1)
    engine.fences.check_all_back()
    check_lets_go(daemon)


def test_orders_of_another_daemon_are_not_answered(daemon: Daemon, engine: LaneEngine, gate: Gate):
    """A copy that began under a daemon that died ends under the next: that one never hears of it, and serves on."""
    engine.before_copy = gate
    copying, chunks = engine.submit_store(NAMES)
    gate.wait_reached()
    daemon.kill()
    engine.scheduler.close()
    daemon.start()
    wait_until(lambda: engine.lane.submit(wire.Ping) and daemon.status().num_registered == 1)
    early, _ = engine.submit_store(("early",))
    assert not copying.is_over
    gate.open()
    wait_over(copying, early)
    engine.give_back(chunks)
    engine.lane.register(20)
    engine.check_works(NAMES)
    check_lets_go(daemon)


# ── registering ─────────────────────────────────────────────────────────────────────────────────────────────────────


def test_without_a_daemon_registering_fails_at_once(tmp_path: Path):
    """Nobody listens: that is said with the socket's path, and not only after the deadline."""
    with LaneEngine(str(tmp_path / "nobody")) as engine:
        began = time.monotonic()
        with pytest.raises(Unreachable, match="nobody"):
            engine.lane.register(30)
        assert time.monotonic() - began < 5
        engine.fences.check_all_back()


def test_a_refusal_is_raised_with_its_words(tmp_path: Path):
    """A daemon that gives no engine its pool says so, and what is submitted nevertheless is answered."""
    with Daemon(tmp_path, arguments=["--isolate"]) as daemon, LaneEngine(daemon.path) as engine:
        with pytest.raises(PoolKept, match="--isolate"):
            engine.lane.register(20)
        assert isinstance(engine.store(NAMES), wire.Error)
        engine.fences.check_all_back()


class Unholdable(TwinDevice):
    """A device that can be made and not used."""

    def hold(self) -> None:
        raise DeviceError(f"no such accelerator to {self.kind}")


def unmakeable(fd: int, nbytes: int) -> TwinDevice:
    raise DeviceError(f"no such accelerator for pool {os.fstat(fd).st_size == nbytes}")


def broken(fd: int, nbytes: int) -> TwinDevice:
    return TwinDevice(fd, 2 * nbytes)


@pytest.mark.parametrize(
    ("make_device", "words"),
    [(Unholdable, "no such accelerator"), (unmakeable, "for pool True"), (broken, "greater than file size")],
)
def test_a_device_that_cannot_be_opened(daemon: Daemon, make_device, words: str):
    """The device's words are raised, nothing stays open, and orders are declined: the daemon keeps no slot for them."""
    with LaneEngine(daemon.path, make_device=make_device) as engine:
        early, _ = engine.submit_store(NAMES)
        with pytest.raises(LayoutError if make_device is broken else DeviceError, match=words):
            engine.lane.register(20)
        for reply in (early, engine.submit_store(("other",))[0]):
            wait_over(reply)
            assert isinstance(reply.reply, wire.StoreReply)
            assert reply.reply.num_stored == 0
        engine.devices.clear()
        wait_until(lambda: num_pools() == 0)
        check_lets_go(daemon)
        engine.fences.check_all_back()


def test_submitting_does_not_wait_for_a_daemon(daemon: Daemon):
    """However frozen a daemon is, handing requests over takes no time; they are lost at the deadline."""
    daemon.signal(signal.SIGSTOP)
    try:
        with LaneEngine(daemon.path, deadline_s=SHORT_S) as engine:
            began = time.monotonic()
            pending = [engine.submit_store((name,))[0] for name in NAMES]
            assert time.monotonic() - began < SHORT_S / 2
            wait_over(*pending)
            assert time.monotonic() - began < 10 * SHORT_S
            assert all(one.is_lost for one in pending)
            with pytest.raises(Unreachable):
                engine.lane.register(SHORT_S)
            engine.fences.check_all_back()
    finally:
        daemon.signal(signal.SIGCONT)
    check_lets_go(daemon)


def test_opening_a_pool_keeps_nobody_waiting(daemon: Daemon, gate: Gate):
    """While a device opens, which takes long, requests are lost at their deadline; when it is open, it serves."""

    class Slow(TwinDevice):
        def hold(self) -> None:
            gate.is_reached.set()
            assert gate.may_pass.wait(60)
            super().hold()

    with LaneEngine(daemon.path, deadline_s=SHORT_S, make_device=Slow) as engine:
        with pytest.raises(Unreachable):
            engine.lane.register(SHORT_S)
        gate.wait_reached()
        pending, chunks = engine.submit_store(NAMES)
        wait_over(pending)
        assert pending.is_lost
        engine.give_back(chunks)
        check_lets_go(daemon)
        gate.open()
        engine.lane.register(20)
        engine.check_works(NAMES)
        engine.fences.check_all_back()


# ── the end ─────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_close_leaves_nothing(daemon: Daemon):
    """Neither thread, descriptor nor mapping is left of a lane, however often; a second close does nothing."""
    before = num_fds(os.getpid()), num_pools(), set(threading.enumerate())
    fds = daemon.num_fds()
    for number in range(5):
        with LaneEngine(daemon.path) as engine:
            engine.lane.register(20)
            engine.check_works((f"{number} a", f"{number} b"))
            engine.lane.close()
            engine.lane.close()
            late = engine.lane.submit(wire.Ping)
            assert late.is_lost
            engine.fences.check_all_back()
        del engine
        # Not at once: other threads of the runner open a file now and then.
        wait_until(lambda: (num_fds(os.getpid()), num_pools(), set(threading.enumerate())) == before)
    daemon.check_quiet(num_fds=fds)


def test_a_closed_lane_writes_to_no_descriptor(daemon: Daemon):
    """Whoever gets the numbers of a closed lane's descriptors next is not written to by it."""
    engine = LaneEngine(daemon.path)
    engine.lane.register(20)
    engine.close()
    counters = [os.eventfd(0, os.EFD_NONBLOCK) for _ in range(16)]
    engine.lane.submit(wire.Ping)
    engine.lane.close()
    for fd in counters:
        with pytest.raises(BlockingIOError):
            os.eventfd_read(fd)
        os.close(fd)


@pytest.fixture
def closing(engine: LaneEngine) -> Iterator[threading.Thread]:
    """A thread that closes the lane when it is started."""
    thread = threading.Thread(target=engine.lane.close)
    yield thread
    thread.join(20)
    assert not thread.is_alive()


def test_close_lets_copies_land(daemon: Daemon, engine: LaneEngine, gate: Gate, closing: threading.Thread):
    """It returns when the last chunk has landed and all orders are answered: the daemon waits for no process's end."""
    engine.before_copy = gate
    copying, _ = engine.submit_store(NAMES)
    gate.wait_reached()
    daemon.signal(signal.SIGSTOP)
    ordered_late, _ = engine.submit_store(("late",))
    closing.start()
    wait_over(ordered_late)
    assert ordered_late.is_lost
    daemon.signal(signal.SIGCONT)
    assert closing.is_alive()
    assert not copying.is_over
    gate.open()
    closing.join(20)
    assert copying.is_over
    assert engine.lane.submit(wire.Ping).is_lost
    engine.fences.check_all_back()
    check_lets_go(daemon)
    assert engine.num_found(("late",)) == 0


def test_close_does_not_wait_for_a_frozen_daemon(daemon: Daemon, impatient: LaneEngine):
    """It gives a daemon that does not answer the client's deadline, and then leaves it."""
    daemon.signal(signal.SIGSTOP)
    pending, _ = impatient.submit_store(NAMES)
    began = time.monotonic()
    impatient.lane.close()
    assert time.monotonic() - began < 10 * SHORT_S
    assert pending.is_lost


EXIT = """
import sys
from tests.support.lane_engine import LaneEngine
engine = LaneEngine(sys.argv[1])
engine.lane.register(20)
engine.check_works(["a", "b"])
"""


def test_an_engine_that_forgets_to_close_can_exit(daemon: Daemon):
    """A process that ends without a word to its lane ends, and the daemon is left in order."""
    done = subprocess.run([sys.executable, "-c", EXIT, daemon.path], cwd=ROOT, timeout=60, capture_output=True)
    assert (done.returncode, done.stderr) == (0, b"")
    wait_until(lambda: daemon.status().num_sessions == 1)
    check_lets_go(daemon)
