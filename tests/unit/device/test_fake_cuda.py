"""The fake driver is as strict as CUDA: what is wrong shows, and what it offers is what ``cuda.bindings`` offers."""

import enum
import inspect
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvist.device.cuda import driver
from kvist.device.cuda.tiles import TILE, chunk_tiles
from kvist.errors import DeviceError
from kvist.model.transfer import Direction
from kvist.units import MIB
from tests.contract.test_device import Case, opened
from tests.support import fake_names
from tests.support.fake_cuda import Machine, Process
from tests.support.fake_engine import FakeEngine, fake_rig
from tests.support.fake_kernels import tile_checksum
from tests.support.layouts import Shape, nhd
from tests.support.simulated import always
from tests.support.strategies import random_layouts
from tests.support.tiles import checksum


def entries() -> list[str]:
    return [name for name in dir(Process) if name.startswith("cu") and name[2].isupper()]


def test_names_and_values_are_those_of_the_bindings():
    """Every function, record, code and constant of the fake is one of cuda-bindings, with the same arguments."""
    real = pytest.importorskip("cuda.bindings.driver", reason="cuda-bindings is not installed")
    for name in entries():
        text = getattr(real, name).__doc__.splitlines()[0]
        num = len([part for part in text.split("(", 1)[1].rsplit(")", 1)[0].replace(", ", ",").split(",") if part])
        parameters = list(inspect.signature(getattr(Process, name)).parameters.values())[1:]
        if not any(parameter.kind is parameter.VAR_POSITIONAL for parameter in parameters):
            assert (name, len(parameters)) == (name, num)
    for name, kind in vars(fake_names).items():
        if isinstance(kind, type) and issubclass(kind, enum.IntEnum) and kind is not enum.IntEnum:
            assert {m.name: int(m) for m in kind} == {m.name: int(getattr(getattr(real, name), m.name)) for m in kind}
        elif name.startswith(("CUmem", "CUipc")):
            fields = {field for field in vars(kind()) if not field.startswith("_")}
            assert fields <= set(dir(getattr(real, name)()))
    for name, value in (("CU_STREAM_NON_BLOCKING", 1), ("CU_STREAM_DEFAULT", 0)):
        assert int(getattr(real.CUstream_flags, name)) == value


NUM_ORDERS = 12


@pytest.mark.parametrize("ignored", ["cuStreamWaitEvent", "cuEventSynchronize", "cuStreamSynchronize"])
@pytest.mark.parametrize("direction", list(Direction))
def test_a_missing_wait_shows(ignored: str, direction: Direction):
    """Without any one kind of wait, bytes are wrong for some order of the streams' work, whichever way they go."""
    num_right = 0
    for seed in range(NUM_ORDERS):
        with fake_rig(seed=seed) as rig:
            laid = nhd(Shape(num_layers=2, num_blocks=8, block_tokens=16, num_heads=4, row_nbytes=256))
            with opened(rig, laid) as memory:
                memory.stamp(b"wait")
                case = Case(memory, [[0, 1, 2, 3], [4, 5, 6, 7]], [0, 1 * MIB])
                sums = rig.device.gather(case.plan(Direction.GATHER), memory.bases, range(2), always)
                stored = rig.pool.copy()
                before = [array.copy() for array in memory.arrays]
                rig.machine.daemon.ignored = {ignored}
                if direction is Direction.GATHER:
                    rig.pool[:] = 0
                    found = rig.device.gather(case.plan(direction), memory.bases, range(2), always)
                    num_right += found == sums and np.array_equal(rig.pool, stored)
                else:
                    memory.fill(0)
                    rig.device.scatter(case.plan(direction), memory.bases, range(2), sums, always)
                    num_right += all(map(np.array_equal, memory.arrays, before))
                rig.machine.daemon.ignored = set()
                for pipe in rig.device._gpu.pipes.values():
                    pipe._settle()
    assert num_right < NUM_ORDERS


@given(random_layouts(), st.randoms(use_true_random=False))
def test_the_kernels_checksum_is_that_of_single_accesses(laid, random):
    """Summed up by columns, a chunk's checksum is what it is access by access."""
    tiles = chunk_tiles(laid.group, 2).tiles
    chunk = random.randbytes(laid.group.block_nbytes * 2)
    parts = [
        tile_checksum(tile, np.frombuffer(chunk, np.uint8)[tile["slot_offset"] :][: tile["nbytes"]]) for tile in tiles
    ]
    assert sum(map(int, parts)) % 2**64 == checksum(tiles, chunk)
    assert tiles.dtype == TILE


def test_a_call_needs_a_context_on_its_own_thread():
    """A context that is current on one thread is not on another."""
    with Machine().installed() as machine, ThreadPoolExecutor(1) as threads:
        engine = FakeEngine(machine)
        engine.call("cuMemAlloc", 64)
        with pytest.raises(DeviceError, match="CUDA_ERROR_INVALID_CONTEXT"):
            threads.submit(engine.call, "cuMemAlloc", 64).result()
        engine.end()
        with pytest.raises(DeviceError, match="CUDA_ERROR_CONTEXT_IS_DESTROYED"):
            engine.call("cuMemAlloc", 64)
        assert engine.process.lost == ["64 bytes allocated"]


@pytest.mark.parametrize(
    ("make", "end"),
    [
        (("cuMemAlloc", 64), "cuMemFree"),
        (("cuMemHostAlloc", 64, 0), "cuMemFreeHost"),
        (("cuEventCreate", 2), "cuEventDestroy"),
        (("cuStreamCreateWithPriority", 1, 0), "cuStreamDestroy"),
        (("cuModuleLoadData", b"fake cubin for sm_90"), "cuModuleUnload"),
    ],
)
def test_things_are_destroyed_once(make: tuple[object, ...], end: str):
    """What was destroyed cannot be destroyed again, nor can what never was."""
    with Machine().installed() as machine:
        engine = FakeEngine(machine)
        thing = engine.call(*make)
        assert len(engine.process.left()) == 2
        engine.call(end, thing)
        assert len(engine.process.left()) == 1
        for wrong in (thing, 12345):
            with pytest.raises(DeviceError, match=f"{end} returned"):
                engine.call(end, wrong)


def test_a_copy_touches_only_what_is_reachable():
    """Host memory that is not registered, and a byte behind an allocation, are refused.

    What is freed before a copy comes to it ends that copy, and with it everything else in the context.
    """
    with Machine(liveliness=0).installed() as machine:
        engine = FakeEngine(machine)
        gpu, pinned = engine.allocate(5000), int(engine.call("cuMemHostAlloc", 8192, 0))
        stream = engine.new_stream()
        engine.call("cuMemcpyHtoDAsync", gpu, pinned, 5000, stream)
        host = np.zeros(5000, dtype=np.uint8)
        for arguments in [(gpu, pinned, 5001), (gpu, host.ctypes.data, 5000), (pinned, gpu, 1), (gpu, 16, 1)]:
            with pytest.raises(DeviceError, match="CUDA_ERROR_ILLEGAL_ADDRESS"):
                engine.call("cuMemcpyHtoDAsync", *arguments, stream)
        engine.call("cuStreamSynchronize", stream)
        engine.call("cuMemcpyHtoDAsync", gpu, pinned, 5000, stream)
        engine.call("cuMemFree", gpu)
        with pytest.raises(DeviceError, match="CUDA_ERROR_ILLEGAL_ADDRESS"):
            engine.call("cuStreamSynchronize", stream)
        with pytest.raises(DeviceError, match="CUDA_ERROR_ILLEGAL_ADDRESS"):
            engine.call("cuMemAlloc", 64)


def test_a_handle_is_opened_once_and_elsewhere():
    """A process cannot open its own handle, nor another's twice before it has closed it."""
    with Machine().installed() as machine:
        owner, user = FakeEngine(machine), FakeEngine(machine)
        handle = owner.call("cuIpcGetMemHandle", owner.allocate(4096))
        with pytest.raises(DeviceError, match="cuIpcOpenMemHandle returned 1"):
            owner.call("cuIpcOpenMemHandle", handle, driver.LAZY_PEER_ACCESS)
        for _ in range(2):
            address = user.call("cuIpcOpenMemHandle", handle, driver.LAZY_PEER_ACCESS)
            with pytest.raises(DeviceError, match="CUDA_ERROR_ALREADY_MAPPED"):
                user.call("cuIpcOpenMemHandle", handle, driver.LAZY_PEER_ACCESS)
            user.call("cuIpcCloseMemHandle", address)


def test_an_event_that_was_never_recorded_is_not_waited_for():
    """As in CUDA, such a wait does nothing."""
    with Machine().installed() as machine:
        engine = FakeEngine(machine)
        stream, event = engine.new_stream(), engine.call("cuEventCreate", 2)
        engine.call("cuStreamWaitEvent", stream, event, 0)
        engine.call("cuEventSynchronize", event)
        engine.call("cuStreamSynchronize", stream)
        assert engine.process.num_pending == 0
