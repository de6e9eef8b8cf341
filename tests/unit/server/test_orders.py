"""An engine that copies for itself is told where, is believed only what can be, and keeps its slots to the end."""

import numpy as np
import pytest

from kvist.errors import Malformed, Overloaded
from kvist.model.transfer import Direction
from kvist.server.orders import Orders
from kvist.transfer.executor import Job
from kvist.transfer.plan import plan_copy
from kvist.wire import messages as wire
from tests.support.copying import CHECKSUM_NBYTES
from tests.support.named import LAID
from tests.support.simulated import Watched

NUM_CHUNKS = 3
QUEUE_MAX = 2
SLOTS = np.array([8192, 0, 4096], dtype=np.int64)
SUMS = [bytes([number]) * CHECKSUM_NBYTES for number in range(NUM_CHUNKS)]


class Desk:
    """A lane, and what came of its orders."""

    def __init__(self) -> None:
        self.process = Watched(1)
        self.sent: list[wire.CopyOrder] = []
        self.done: list[Job] = []
        self.lane = Orders(self.process, self.sent.append, queue_max=QUEUE_MAX)

    def order(self, number: int, direction: Direction = Direction.GATHER) -> Job:
        block_ids = np.arange(2 * NUM_CHUNKS, dtype=np.int64).reshape(NUM_CHUNKS, 2)
        job = Job(
            plan_copy(direction, LAID.group, block_ids, SLOTS), (), self.done.append, positions=[1, 4, 5],
            request_id=number, checksums=[] if direction is Direction.GATHER else list(SUMS),
        )  # fmt: skip
        self.lane.submit(job)
        return job


@pytest.fixture
def desk() -> Desk:
    return Desk()


def test_an_order_says_where_everything_goes(desk: Desk):
    """Slots, positions and, for a load, checksums are sent as they are laid down; both directions have one desk."""
    desk.order(7)
    desk.order(8, Direction.SCATTER)
    slots, positions = SLOTS.astype("<i8").tobytes(), np.array([1, 4, 5], dtype="<i4").tobytes()
    assert desk.sent == [
        wire.CopyOrder(7, slots, positions),
        wire.CopyOrder(8, slots, positions, b"".join(SUMS)),
    ]
    assert all(desk.lane.executor(direction) is desk.lane for direction in Direction)
    assert not desk.done


@pytest.mark.parametrize("num_done", range(NUM_CHUNKS + 1))
def test_an_answer_is_taken_in_as_it_is(desk: Desk, num_done: int):
    """A store ends with the checksums of what was copied, a load with what failed, each under its answer's own id."""
    store, load = desk.order(7), desk.order(8, Direction.SCATTER)
    failed = [0, 0] if num_done else []
    desk.lane.finish(wire.CopyDone(21, 8, num_done, failed=failed))
    desk.lane.finish(wire.CopyDone(22, 7, num_done, b"".join(SUMS[:num_done])))
    assert desk.done == [load, store]
    assert (load.request_id, load.num_done, load.failed) == (21, num_done, failed[:1])
    assert (store.request_id, store.num_done, store.checksums) == (22, num_done, SUMS[:num_done])


@pytest.mark.parametrize(
    ("done", "named"),
    [
        (wire.CopyDone(9, 6, 0), "there is no order 6; 2 are open"),
        (wire.CopyDone(9, -7, 0), "there is no order -7"),
        (wire.CopyDone(9, 7, 4, SUMS[0] * 4), "4 of 3 chunks copied"),
        (wire.CopyDone(9, 7, 2**62), f"{2**62} of 3 chunks copied"),
        (wire.CopyDone(9, 7, -1), "-1 of 3 chunks copied"),
        (wire.CopyDone(9, 7, 2, SUMS[0]), "8 bytes of checksums of 2 chunks"),
        (wire.CopyDone(9, 7, 1, SUMS[0] * 2), "16 bytes of checksums of 1 chunks"),
        (wire.CopyDone(9, 7, 1, SUMS[0][:7]), "7 bytes of checksums of 1 chunks"),
        (wire.CopyDone(9, 7, 1), "0 bytes of checksums of 1 chunks"),
        (wire.CopyDone(9, 7, 1, SUMS[0], [0]), "1 chunks of a store do not match"),
        (wire.CopyDone(9, 8, 1, SUMS[0]), "8 bytes of checksums of 1 chunks"),
        (wire.CopyDone(9, 8, 4), "4 of 3 chunks copied"),
        (wire.CopyDone(9, 8, 2, failed=[2]), r"2 of 3 chunks copied, of which \[2\] failed"),
        (wire.CopyDone(9, 8, 3, failed=[-1]), r"of which \[-1\] failed"),
        (wire.CopyDone(9, 8, 0, failed=[0]), r"0 of 3 chunks copied, of which \[0\] failed"),
    ],
    ids=str,
)
def test_an_answer_that_cannot_be_changes_nothing(desk: Desk, done: wire.CopyDone, named: str):
    """What contradicts its order is refused with the numbers; the order stays open and can be answered."""
    store, load = desk.order(7), desk.order(8, Direction.SCATTER)
    with pytest.raises(Malformed, match=named):
        desk.lane.finish(done)
    assert not desk.done
    assert (store.request_id, store.num_done, store.checksums) == (7, 0, [])
    assert (load.request_id, load.num_done, load.failed, load.checksums) == (8, 0, [], SUMS)
    desk.lane.finish(wire.CopyDone(10, 7, 3, b"".join(SUMS)))
    desk.lane.finish(wire.CopyDone(11, 8, 3))
    assert desk.done == [store, load]


def test_an_order_is_answered_once(desk: Desk):
    """The second answer is one to no order, also when an order with the same number has been given since."""
    first = desk.order(7)
    desk.lane.finish(wire.CopyDone(20, 7, 0))
    with pytest.raises(Malformed, match="there is no order 7; 0 are open"):
        desk.lane.finish(wire.CopyDone(21, 7, 0))
    second = desk.order(7)
    desk.lane.finish(wire.CopyDone(22, 7, 0))
    assert desk.done == [first, second]


def test_orders_are_bounded(desk: Desk):
    """An engine that carries nothing out is given no more than the bound; each answer makes room for one."""
    for number in range(QUEUE_MAX):
        desk.lane.check_takes_work()
        desk.order(number)
    with pytest.raises(Overloaded, match="2 copies are ordered from the engine"):
        desk.lane.check_takes_work()
    desk.lane.finish(wire.CopyDone(9, 0, 0))
    desk.lane.check_takes_work()


def test_open_orders_are_told_apart(desk: Desk):
    """A request with the id of an open order is refused with it; when the order was answered, it is not."""
    desk.order(7)
    with pytest.raises(Malformed, match="request id 7 is that of an open order"):
        desk.lane.check_is_new(7)
    desk.lane.check_is_new(8)
    desk.lane.finish(wire.CopyDone(9, 7, 0))
    desk.lane.check_is_new(7)


def test_open_orders_end_with_the_process(desk: Desk):
    """While the process lives nothing is given up; when it has ended, every order is over, as not carried out, once."""
    store, load = desk.order(7), desk.order(8, Direction.SCATTER)
    desk.lane.end_with_process()
    assert not desk.done
    assert not desk.process.is_closed
    desk.process.end()
    assert sorted(desk.done, key=lambda job: job.request_id) == [store, load]
    assert [(job.num_done, job.failed) for job in desk.done] == [(0, []), (0, [])]
    assert store.checksums == []
    assert desk.process.is_closed
    desk.lane.give_up()
    assert len(desk.done) == 2


def test_a_process_without_orders_is_watched_no_longer(desk: Desk):
    """Where nothing is open, the end of the session is the end of the watch."""
    desk.order(7)
    desk.lane.finish(wire.CopyDone(9, 7, 0))
    desk.lane.end_with_process()
    assert desk.process.is_closed
    assert desk.process.callback is None


def test_a_stop_waits_for_no_process(desk: Desk):
    """A daemon that stops gives up what is open at once, also what was to end with the process."""
    desk.order(7)
    desk.lane.end_with_process()
    desk.lane.give_up()
    assert len(desk.done) == 1
    assert desk.process.is_closed
    desk.process.end()
    assert len(desk.done) == 1
