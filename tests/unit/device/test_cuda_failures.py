"""Whichever call of the driver fails, the error has CUDA's words, and nothing is lost that could be given back."""

import os
from collections.abc import Callable
from itertools import count

import numpy as np
import pytest

from kvist.device.checksum import vector_checksum
from kvist.device.cuda.driver import Context
from kvist.device.cuda.memory import OpenedMemory
from kvist.errors import DeviceError, LayoutError
from kvist.model.handles import CUDA_IPC, CUDA_VMM
from kvist.model.transfer import Direction
from kvist.units import MIB
from tests.contract.test_device import Case, opened
from tests.support.fake_cuda import GPU, Machine, Process
from tests.support.fake_engine import FakeEngine, FakeRig, fake_rig
from tests.support.fake_memory import SEGMENT_NBYTES
from tests.support.layouts import Shape, nhd
from tests.support.memory import GUARD, num_fds, num_mappings
from tests.support.simulated import always
from tests.support.tiles import strided_chunk

KINDS = [CUDA_IPC, CUDA_VMM]
WORDS = "returned 999: CUDA_ERROR_UNKNOWN: unknown"


def attempt(process: Process, number: int, action: Callable[[], object]) -> tuple[str, str]:
    """Let one of an action's calls fail; return its name and the error's text, both empty where there is none."""
    start, text = len(process.calls), ""
    process.fail_call(number)
    try:
        action()
    except (DeviceError, LayoutError) as error:
        text = str(error)
    process.fail_nothing()
    return "".join(process.calls[start + number :][:1]), text


def test_a_device_that_fails_to_open_is_not_open():
    """Whatever fails while a GPU and the first memory on it are opened, all that was made is given back."""
    with fake_rig() as rig:
        peer, daemon = rig.allocate(4096), rig.machine.daemon
        for number in count():
            mappings, fds = num_mappings(os.getpid(), "kvist-rig"), num_fds(os.getpid())
            name, text = attempt(daemon, number, lambda: rig.device.open_memory(peer.handle, peer.fds))
            if not name:
                break
            assert f"{name} {WORDS}" in text
            assert daemon.left() == daemon.lost == []
            assert (num_mappings(os.getpid(), "kvist-rig"), num_fds(os.getpid())) == (mappings, fds)
        assert number > 40
        rig.device.close_memory(next(iter(rig.device._gpu.opened._opened)), 4096)


@pytest.mark.parametrize("direction", list(Direction))
def test_a_copy_that_fails_has_nothing_in_flight(direction: Direction):
    """Whichever call of a copy fails, none of its work is left to be done, and the next copy is right.

    Where waiting itself fails there is no telling; then the other stream has been waited for.
    """
    for number in count():
        with fake_rig(seed=number, liveliness=0.1) as rig, opened(rig, _laid()) as memory:
            daemon = rig.machine.daemon
            memory.stamp(b"fails")
            case = Case(memory, [[0, 1], [2, 3]], [0, 1 * MIB])
            wanted = contents(case)
            sums = [vector_checksum(chunk).to_bytes(8, "little") for chunk in wanted]
            for slot, chunk in zip(case.slots, wanted, strict=True):
                rig.pool[slot : slot + len(chunk)] = np.frombuffer(chunk, dtype=np.uint8)

            def copy(case: Case = case, rig: FakeRig = rig, sums: list[bytes] = sums) -> None:
                plan, bases = case.plan(direction), case.engine.bases
                if direction is Direction.GATHER:
                    assert rig.device.gather(plan, bases, range(2), always) == sums
                else:
                    assert rig.device.scatter(plan, bases, range(2), sums, always) == [True, True]

            name, text = attempt(daemon, number, copy)
            if name:
                assert f"{name} {WORDS}" in text
                num_busy = sum(bool(stream.queue) for stream in daemon.context.all_streams)
                assert num_busy <= (name == "cuStreamSynchronize")
                rig.device._gpu.pipes[direction]._settle()
            if direction is Direction.GATHER:
                rig.pool[:] = GUARD
            else:
                memory.fill(GUARD)
            copy()
            assert contents(case) == wanted
        if not name:
            break
    assert number > 20


def test_a_device_that_fails_to_close_gives_the_rest_back():
    """Whichever call fails when the last memory is closed, it is not raised, and at most that call's thing is lost.

    What is lost in a context ends with it.
    """
    for number in count():
        with fake_rig() as rig:
            daemon = rig.machine.daemon
            peer = rig.allocate(4096)
            base = rig.device.open_memory(peer.handle, peer.fds)
            case = Case(_placed(base), [[0]], [0])
            rig.device.gather(case.plan(Direction.GATHER), [base], range(1), always)
            mappings = num_mappings(os.getpid(), "kvist-rig")

            def close(rig: FakeRig = rig, base: int = base) -> None:
                rig.device.close_memory(base, 4096)

            name, text = attempt(daemon, number, close)
            assert not text
            assert num_mappings(os.getpid(), "kvist-rig") == mappings - 1
            if name == "cuDevicePrimaryCtxRelease":
                assert daemon.left() == ["context of GPU 0"]
                daemon.cuDevicePrimaryCtxRelease(0)
            assert daemon.left() == []
            assert len(daemon.lost) <= (name not in ("", "cuCtxSetCurrent", "cuStreamSynchronize"))
            daemon.lost.clear()
            rig.device.close_memory(rig.device.open_memory(peer.handle, peer.fds), 4096)
        if not name:
            break
    assert number > 30


@pytest.mark.parametrize("kind", KINDS)
def test_memory_that_fails_to_open_leaves_nothing_mapped(kind: str):
    """Whichever call fails, there are as many ranges, segments and descriptors as before."""
    with Machine().installed() as machine:
        engine, opened_memory, context = FakeEngine(machine), OpenedMemory(), Context(GPU)
        context.use()
        one = _export(engine, kind)
        before, fds = machine.daemon.left(), num_fds(os.getpid())
        for number in count():
            name, text = attempt(
                machine.daemon, number, lambda: opened_memory.open(one.handle, one.fds, context.device)
            )
            if not name:
                break
            assert f"{name} {WORDS}" in text
            assert (machine.daemon.left(), num_fds(os.getpid()), len(opened_memory)) == (before, fds, 0)
        assert number == (2 if kind == CUDA_IPC else 6)
        one.close()


@pytest.mark.parametrize("kind", KINDS)
def test_memory_that_fails_to_close_gives_the_rest_back(kind: str):
    """Whichever call fails, it is not raised, every other one is made, and nothing is closed a second time."""
    with Machine().installed() as machine:
        engine, opened_memory, context = FakeEngine(machine), OpenedMemory(), Context(GPU)
        context.use()
        one = _export(engine, kind)
        for number in count():
            base = opened_memory.open(one.handle, one.fds, context.device)
            start, before = len(machine.daemon.calls), machine.daemon.left()
            name, text = attempt(machine.daemon, number, lambda base=base: opened_memory.close(base))
            made = machine.daemon.calls[start:]
            assert not text
            assert len(opened_memory) == 0
            assert sorted(made) == sorted(_releases(kind))
            if not name:
                break
            lost = 1 if name != "cuMemUnmap" else 2  # A range that something is mapped in cannot be freed.
            assert len(machine.daemon.left()) == len(before) - (len(made) - lost)
            if kind == CUDA_IPC:  # It can be opened once only.
                machine.daemon.cuIpcCloseMemHandle(base)
        assert number == len(made)
        one.close()


@pytest.mark.parametrize("kind", KINDS)
def test_an_export_that_fails_leaves_no_descriptor(kind: str):
    """Whichever call fails, no descriptor and no handle is left of what was exported until then.

    Whether memory is managed need not be known: what cannot be exported is refused anyway.
    """
    with Machine().installed() as machine:
        engine = FakeEngine(machine)
        spans = []
        for _ in range(2):
            if kind == CUDA_IPC:
                spans.append((engine.allocate(4096), 4096))
            else:
                spans.append((engine.allocate_virtual([SEGMENT_NBYTES] * 2), 2 * SEGMENT_NBYTES))
        before, fds = engine.process.left(), num_fds(os.getpid())
        for number in count():
            exported: list[object] = []
            name, text = attempt(engine.process, number, lambda e=exported: e.append(engine.export(*spans)))
            for one in exported[0][0] if exported else ():
                one.close()
            assert num_fds(os.getpid()) == fds
            assert len(engine.process.left()) == len(before) + (name == "cuMemRelease")
            before = engine.process.left()
            if not name:
                break
            if name == "cuPointerGetAttribute" and not text:
                continue
            if kind == CUDA_VMM and name == "cuIpcGetMemHandle":  # It fails for such memory anyway.
                continue
            assert f"{name} {WORDS}" in text
        assert number > 8


def contents(case: Case) -> list[bytes]:
    """Return the canonical bytes that lie in a case's blocks."""
    planes = case.engine.laid.group.planes
    return [strided_chunk(planes, blocks, case.engine.arrays) for blocks in case.chunks]


def _laid():
    return nhd(Shape(num_layers=2, num_blocks=4, block_tokens=16, num_heads=4, row_nbytes=192))


def _placed(base: int):
    class Placed:
        laid = nhd(Shape(num_layers=1))
        bases = (base,)

    return Placed


def _export(engine: FakeEngine, kind: str):
    nbytes = 2 * SEGMENT_NBYTES
    address = engine.allocate(nbytes) if kind == CUDA_IPC else engine.allocate_virtual([SEGMENT_NBYTES] * 2)
    (one,), _ = engine.export((address, nbytes))
    return one


def _releases(kind: str) -> list[str]:
    if kind == CUDA_IPC:
        return ["cuIpcCloseMemHandle"]
    return ["cuMemUnmap", "cuMemUnmap", "cuMemRelease", "cuMemRelease", "cuMemAddressFree"]
