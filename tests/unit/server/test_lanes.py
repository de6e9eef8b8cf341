"""A lane is made for each device that is named, of types that are known, and not without end."""

from collections.abc import Iterator
from importlib.metadata import EntryPoint

import pytest

from kvist.device.cuda.device import CudaDevice
from kvist.device.host import HostDevice
from kvist.errors import LayoutRefused
from kvist.model.transfer import Direction
from kvist.server import lanes
from kvist.server.lanes import LANES_MAX, DeviceContext, Lanes
from kvist.storage.pool import Pool, open_pool


@pytest.fixture
def pool() -> Iterator[Pool]:
    pool = open_pool(1 << 16, num_threads=1, on_progress=lambda _: None)
    yield pool
    pool.close()


@pytest.fixture
def found(pool: Pool) -> Iterator[Lanes]:
    found = Lanes(DeviceContext(pool, copy_threads=1), queue_max=4)
    yield found
    found.close()


def test_a_device_has_one_lane(found: Lanes):
    """The same name is the same lane; another GPU has one of its own, with an executor for each direction."""
    gpu = found["cuda:0d46afed-5ae8-3fc2-850e-fa7c3044e96b"]
    other = found["cuda:1d46afed-5ae8-3fc2-850e-fa7c3044e96b"]
    assert isinstance(gpu.device, CudaDevice)
    assert gpu is found["cuda:0d46afed-5ae8-3fc2-850e-fa7c3044e96b"] is not other
    assert gpu.executor(Direction.GATHER) is not gpu.executor(Direction.SCATTER)
    host = found["host"]
    assert isinstance(host.device, HostDevice)
    assert host.executor(Direction.GATHER) is host.executor(Direction.SCATTER)


def test_types_that_nobody_serves_are_refused(found: Lanes):
    """An unknown type is refused with those that are known."""
    with pytest.raises(LayoutRefused, match=r"'abacus' is not served; known types: \['cuda', 'host'\]"):
        found["abacus:1"]


def test_names_cost_no_threads_without_end(found: Lanes):
    """Beyond a bound that no host reaches, devices are refused with their number; those that are there go on."""
    for number in range(LANES_MAX):
        assert found[f"cuda:{number}"]
    with pytest.raises(LayoutRefused, match=f"after that of {LANES_MAX} devices"):
        found["cuda:one more"]
    assert found["cuda:0"]


def test_others_can_bring_a_type(pool: Pool, monkeypatch: pytest.MonkeyPatch):
    """A package that names a type by an entry point serves it, by what it is handed: UUID and pool."""
    point = EntryPoint("abacus", "tests.unit.server.test_lanes:make_abacus", lanes.ENTRY_POINTS)
    monkeypatch.setattr(lanes, "entry_points", lambda group: [point] if group == lanes.ENTRY_POINTS else [])
    found = Lanes(DeviceContext(pool, copy_threads=1), queue_max=4)
    device = found["abacus:7"].device
    assert isinstance(device, Abacus)
    assert (device.uuid, device.pool) == ("7", pool)
    found.close()


class Abacus(HostDevice):
    """A third party's device."""

    uuid = ""
    pool: Pool


def make_abacus(uuid: str, context: DeviceContext) -> Abacus:
    device = Abacus(context.pool.view, context.pool.address, num_threads=1)
    device.uuid, device.pool = uuid, context.pool
    return device
