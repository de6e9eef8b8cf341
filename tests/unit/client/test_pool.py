"""Whatever ends the opening or the use of a pool, nothing of it stays open."""

import os
import threading

import pytest

from kvist.client.pool import OpenPool
from kvist.errors import DeviceError, LayoutError
from tests.support.memory import SharedMemory
from tests.support.twin import TwinDevice

NBYTES = 4096


class Recorded(TwinDevice):
    """Notes when it is closed."""

    closed: list[object] = []  # noqa: RUF012

    def close(self) -> None:
        super().close()
        self.closed.append(self)


class Unusable(Recorded):
    def hold(self) -> None:
        raise DeviceError(f"{self.kind} cannot be used")


class Unclosable(TwinDevice):
    def close(self) -> None:
        raise DeviceError(f"{self.kind} cannot be closed")


def unmakeable(fd: int, nbytes: int) -> TwinDevice:
    raise DeviceError(f"no device for {fd} and {nbytes} cannot be used")


@pytest.fixture
def fds() -> list[int]:
    """A descriptor of a pool, which whoever gets it closes."""
    Recorded.closed = []
    with SharedMemory(NBYTES) as memory:
        return [os.dup(memory.fd)]


def check_nothing_left(fds: list[int]) -> None:
    """Assert that descriptors are closed, and that no thread of a pool is left."""
    for fd in fds:
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.fstat(fd)
    assert not [thread for thread in threading.enumerate() if thread.name == "kvist-twin"]


@pytest.mark.parametrize("num_fds", [0, 2, 3])
def test_a_pool_is_one_descriptor(fds: list[int], num_fds: int):
    """A daemon that sends none, or more than one, is refused with the number, and what it has sent is closed."""
    given = [os.dup(fds[0]) for _ in range(num_fds)]
    os.close(fds.pop())
    with pytest.raises(LayoutError, match=f"with {num_fds} descriptors"):
        OpenPool(given, NBYTES, Recorded)
    check_nothing_left(given)
    assert Recorded.closed == []


@pytest.mark.parametrize("make_device", [Unusable, unmakeable])
def test_a_device_that_fails_leaves_nothing(fds: list[int], make_device):
    """The device's own error is raised; a device that was made is closed, and so is the descriptor."""
    with pytest.raises(DeviceError, match="cannot be used"):
        OpenPool(fds, NBYTES, make_device)
    check_nothing_left(fds)
    assert len(Recorded.closed) == (make_device is Unusable)


def test_a_pool_closes_once(fds: list[int]):
    """Threads, device and descriptor go with the first close; a second does nothing."""
    pool = OpenPool(fds, NBYTES, Recorded)
    pool.close()
    check_nothing_left(fds)
    pool.close()
    assert len(Recorded.closed) == 1


def test_a_device_that_cannot_be_closed(fds: list[int]):
    """Its error is raised, and everything else is closed all the same."""
    pool = OpenPool(fds, NBYTES, Unclosable)
    with pytest.raises(DeviceError, match="cannot be closed"):
        pool.close()
    check_nothing_left(fds)
