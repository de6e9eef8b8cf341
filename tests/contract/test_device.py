"""What every ``Device`` must do. An implementation is a subclass of ``DeviceContract`` with a ``rig`` of its own."""

import fcntl
import os
import socket
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from typing import Protocol

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvist.device.base import Device
from kvist.device.host import HostDevice
from kvist.errors import LayoutError
from kvist.model.handles import MemoryHandle
from kvist.model.transfer import CopyPlan, Direction
from kvist.units import KIB, MIB
from tests.support.layouts import (
    SAME_BYTES,
    Bytes,
    Laid,
    Shape,
    chunk_bytes,
    chunk_places,
    nhd,
    opaque,
)
from tests.support.memory import GUARD, SEALS, SharedMemory, num_fds, num_mappings, stamp
from tests.support.simulated import always
from tests.support.strategies import random_layouts

POOL_NBYTES = 8 * MIB


class PeerMemory(Protocol):
    """An allocation as an engine owns it, seen from the test."""

    handle: MemoryHandle
    fds: Sequence[int]
    bytes: Bytes

    def close(self) -> None:
        """Give it back."""
        ...


class Rig(Protocol):
    """A device, the pool that it copies from and to, and engines' memory of its kind."""

    device: Device
    pool: Bytes
    writes_only_what_is_right: bool
    """Bytes are verified before they are written; else their chunk is only named."""

    def allocate(self, nbytes: int) -> PeerMemory:
        """Return new memory, which the caller closes."""
        ...


@dataclass
class Engine:
    """Memory of one layout, open on the device."""

    laid: Laid
    memory: list[PeerMemory]
    bases: list[int]

    @property
    def arrays(self) -> list[Bytes]:
        return [peer.bytes for peer in self.memory]

    def fill(self, value: int) -> None:
        for peer in self.memory:
            peer.bytes[:] = value

    def stamp(self, name: bytes) -> None:
        """Let every byte, gaps included, name its place."""
        for number, peer in enumerate(self.memory):
            peer.bytes[:] = np.frombuffer(stamp(name + bytes([number]), len(peer.bytes)), dtype=np.uint8)

    def chunk(self, blocks: Sequence[int]) -> bytes:
        return chunk_bytes(self.laid.group, blocks, self.arrays)


@dataclass
class Case:
    """Chunks of an engine's blocks, each with a slot in the pool."""

    engine: Engine
    chunks: list[list[int]]
    slots: list[int]

    @property
    def chunk_nbytes(self) -> int:
        return self.engine.laid.group.block_nbytes * len(self.chunks[0])

    def plan(self, direction: Direction, chunks: list[list[int]] | None = None, num_skipped: int = 0) -> CopyPlan:
        block_ids = np.array(self.chunks if chunks is None else chunks, dtype=np.int64)
        return CopyPlan(direction, self.engine.laid.group, block_ids, np.array(self.slots, dtype=np.int64), num_skipped)


class DeviceContract:
    """The suite."""

    @pytest.fixture(scope="class")
    @classmethod
    def rig(cls) -> Iterator[Rig]:
        raise NotImplementedError

    @settings(max_examples=50)
    @given(st.data())
    def test_a_gather_puts_canonical_bytes_into_slots(self, rig: Rig, data: st.DataObject):
        """A slot holds its chunk in canonical order; the engine's memory and the rest of the pool are as they were."""
        with drawn_case(rig, data) as case:
            case.engine.stamp(b"before")
            before = [array.copy() for array in case.engine.arrays]
            rig.pool[:] = GUARD
            checksums = rig.device.gather(
                case.plan(Direction.GATHER), case.engine.bases, range(len(case.chunks)), always
            )
            expected = np.full(len(rig.pool), GUARD, dtype=np.uint8)
            for slot, blocks in zip(case.slots, case.chunks, strict=True):
                expected[slot : slot + case.chunk_nbytes] = list(case.engine.chunk(blocks))
            assert np.array_equal(rig.pool, expected)
            assert all(map(np.array_equal, case.engine.arrays, before))
            assert len(checksums) == len(case.chunks)
            assert all(type(checksum) is bytes for checksum in checksums)

    @settings(max_examples=50)
    @given(st.data())
    def test_a_scatter_puts_every_byte_back(self, rig: Rig, data: st.DataObject):
        """What was gathered arrives in other blocks, byte for byte; no other byte changes, gaps included.

        Skipped blocks of the first chunk are not written either.
        """
        with drawn_case(rig, data) as case:
            num_skipped = data.draw(st.integers(0, len(case.chunks[0]) - 1), label="skipped")
            targets = draw_chunks(data, case.engine.laid, len(case.chunks[0]), len(case.chunks))
            case.engine.stamp(b"source")
            wanted = [case.engine.chunk(blocks) for blocks in case.chunks]
            everything = range(len(case.chunks))
            checksums = rig.device.gather(case.plan(Direction.GATHER), case.engine.bases, everything, always)
            case.engine.fill(GUARD)
            plan = case.plan(Direction.SCATTER, targets, num_skipped)
            assert rig.device.scatter(plan, case.engine.bases, everything, checksums, always) == [True] * len(
                case.chunks
            )
            expected = [np.full(len(array), GUARD, dtype=np.uint8) for array in case.engine.arrays]
            for number, (blocks, chunk) in enumerate(zip(targets, wanted, strict=True)):
                places = chunk_places(case.engine.laid.group, blocks)
                for (memory, offset, position), value in zip(places, chunk, strict=True):
                    if number > 0 or position >= num_skipped:
                        expected[memory][offset] = value
            assert all(map(np.array_equal, case.engine.arrays, expected))

    @settings(max_examples=50)
    @given(st.data())
    def test_a_range_of_chunks_is_that_range(self, rig: Rig, data: st.DataObject):
        """Copied range by range, a plan does what it does at once; each range answers for its own chunks only."""
        with drawn_case(rig, data) as case:
            num = len(case.chunks)
            cuts = sorted({0, num, *data.draw(st.lists(st.integers(0, num), max_size=2))})
            case.engine.stamp(b"ranges")
            whole = rig.device.gather(case.plan(Direction.GATHER), case.engine.bases, range(num), always)
            pool = rig.pool.copy()
            rig.pool[:] = GUARD
            parts = [
                rig.device.gather(case.plan(Direction.GATHER), case.engine.bases, range(*cut), always)
                for cut in pairwise(cuts)
            ]
            assert [checksum for part in parts for checksum in part] == whole
            for slot in case.slots:
                assert np.array_equal(rig.pool[slot : slot + case.chunk_nbytes], pool[slot : slot + case.chunk_nbytes])
            wanted = [array.copy() for array in case.engine.arrays]
            case.engine.fill(GUARD)
            plan = case.plan(Direction.SCATTER)
            for start, end in pairwise(cuts):
                found = rig.device.scatter(plan, case.engine.bases, range(start, end), whole[start:end], always)
                assert found == [True] * (end - start)
            for blocks in case.chunks:
                assert case.engine.chunk(blocks) == chunk_bytes(case.engine.laid.group, blocks, wanted)

    @settings(max_examples=30)
    @given(st.data())
    def test_a_copy_ends_where_it_is_told(self, rig: Rig, data: st.DataObject):
        """A copy that may not go on returns what became of its first chunks; the others can be copied later."""
        with drawn_case(rig, data) as case:
            num = len(case.chunks)
            case.engine.stamp(b"interrupted")
            wanted = [case.engine.chunk(blocks) for blocks in case.chunks]
            permits = iter(range(data.draw(st.integers(0, num))))

            def go_on() -> bool:
                return next(permits, None) is not None

            gather = partial(rig.device.gather, case.plan(Direction.GATHER), case.engine.bases)
            checksums = gather(range(num), go_on)
            checksums += gather(range(len(checksums), num), always)
            assert checksums == gather(range(num), always)
            case.engine.fill(GUARD)
            permits = iter(range(data.draw(st.integers(0, num))))
            scatter = partial(rig.device.scatter, case.plan(Direction.SCATTER), case.engine.bases)
            found = scatter(range(num), checksums, go_on)
            assert [case.engine.chunk(blocks) for blocks in case.chunks[: len(found)]] == wanted[: len(found)]
            found += scatter(range(len(found), num), checksums[len(found) :], always)
            assert found == [True] * num
            assert [case.engine.chunk(blocks) for blocks in case.chunks] == wanted

    @settings(max_examples=50)
    @given(st.data())
    def test_one_wrong_byte_fails_exactly_its_chunk(self, rig: Rig, data: st.DataObject):
        """A byte that changed in a slot fails that chunk and no other, and is not written into any block.

        Skipped blocks are verified like all others.
        """
        with drawn_case(rig, data) as case:
            num_skipped = data.draw(st.integers(0, len(case.chunks[0]) - 1), label="skipped")
            case.engine.stamp(b"right")
            everything = range(len(case.chunks))
            wanted = [case.engine.chunk(blocks) for blocks in case.chunks]
            checksums = rig.device.gather(case.plan(Direction.GATHER), case.engine.bases, everything, always)
            bad = data.draw(st.integers(0, len(case.chunks) - 1), label="bad chunk")
            place = data.draw(st.integers(0, case.chunk_nbytes - 1), label="bad byte")
            right = wanted[bad][place]
            wrong = data.draw(st.sampled_from(sorted({*range(256)} - {right, GUARD})), label="wrong value")
            rig.pool[case.slots[bad] + place] = wrong
            case.engine.fill(GUARD)
            plan = case.plan(Direction.SCATTER, num_skipped=num_skipped)
            found = rig.device.scatter(plan, case.engine.bases, everything, checksums, always)
            assert found == [number != bad for number in everything]
            after = case.engine.chunk(case.chunks[bad])
            if rig.writes_only_what_is_right:
                assert all(value in (GUARD, expected) for value, expected in zip(after, wanted[bad], strict=True))
            for number in everything:
                if number not in (0, bad):
                    assert case.engine.chunk(case.chunks[number]) == wanted[number]

    @settings(max_examples=50)
    @given(st.data())
    def test_swapped_bytes_are_not_the_same(self, rig: Rig, data: st.DataObject):
        """A checksum is of bytes in their order: a chunk in which two bytes are exchanged does not match."""
        with drawn_case(rig, data) as case:
            case.engine.stamp(b"order")
            checksums = rig.device.gather(
                case.plan(Direction.GATHER), case.engine.bases, range(len(case.chunks)), always
            )
            slot = case.slots[0]
            first, second = sorted(data.draw(st.tuples(*[st.integers(0, case.chunk_nbytes - 1)] * 2)))
            pair = rig.pool[[slot + first, slot + second]]
            rig.pool[[slot + second, slot + first]] = pair
            plan = case.plan(Direction.SCATTER)
            found = rig.device.scatter(plan, case.engine.bases, range(1), checksums[:1], always)
            assert found == [bool(pair[0] == pair[1])]

    @settings(max_examples=15)
    @given(st.integers(1, 3), st.integers(1, 9), st.sampled_from([8, 1000, 20 * KIB]), st.integers(1, 3), st.data())
    def test_a_chunk_means_the_same_to_every_layout(
        self, rig: Rig, num_heads: int, block_tokens: int, row_nbytes: int, ratio: int, data: st.DataObject
    ):
        """A checksum depends on canonical bytes alone: engines with other strides and blocks can read the chunk.

        Each engine cuts the same tokens into blocks of its own size, and lays them out in its own way.
        """
        ways = data.draw(st.permutations(list(SAME_BYTES)))[:2]
        layouts = [
            SAME_BYTES[way](Shape(2, 2 * blocks, block_tokens * ratio // blocks, num_heads, row_nbytes))
            for way, blocks in zip(ways, (ratio, 1), strict=True)
        ]
        with opened(rig, layouts[0]) as writer, opened(rig, layouts[1]) as reader:
            writer.stamp(b"writer")
            given_blocks, taken_blocks = list(range(ratio)), [1]
            case = Case(writer, [given_blocks], [4096])
            checksums = rig.device.gather(case.plan(Direction.GATHER), writer.bases, range(1), always)
            other = Case(reader, [taken_blocks], [4096])
            assert other.chunk_nbytes == case.chunk_nbytes
            assert rig.device.scatter(other.plan(Direction.SCATTER), reader.bases, range(1), checksums, always) == [
                True
            ]
            assert rig.device.gather(other.plan(Direction.GATHER), reader.bases, range(1), always) == checksums
            slot = rig.pool[4096 : 4096 + case.chunk_nbytes].copy()
            rig.device.gather(case.plan(Direction.GATHER), writer.bases, range(1), always)
            assert np.array_equal(rig.pool[4096 : 4096 + case.chunk_nbytes], slot)

    @pytest.mark.parametrize("lay", [*SAME_BYTES.values(), opaque], ids=lambda lay: lay.__name__)
    def test_large_chunks_come_back(self, rig: Rig, lay):
        """Chunks of a megabyte, cut and joined as the device likes, come back, and a byte anywhere in them counts."""
        laid = lay(Shape(num_layers=3, num_blocks=12, block_tokens=16, num_heads=4, row_nbytes=712))
        with opened(rig, laid) as engine:
            engine.stamp(b"large")
            case = Case(engine, [[3, 1, 4], [5, 9, 2]], [0, 2 * MIB])
            before = [array.copy() for array in engine.arrays]
            checksums = rig.device.gather(case.plan(Direction.GATHER), engine.bases, range(2), always)
            engine.fill(GUARD)
            assert rig.device.scatter(case.plan(Direction.SCATTER), engine.bases, range(2), checksums, always) == [
                True,
                True,
            ]
            block_nbytes = laid.group.block_nbytes
            changed = [np.flatnonzero(array != GUARD) for array in engine.arrays]
            assert all(np.array_equal(a[at], b[at]) for a, b, at in zip(engine.arrays, before, changed, strict=True))
            assert sum(map(len, changed)) > 6 * block_nbytes * 0.99
            for place in (0, case.chunk_nbytes // 2, case.chunk_nbytes - 1):
                rig.pool[2 * MIB + place] ^= 1
                engine.fill(GUARD)
                found = rig.device.scatter(case.plan(Direction.SCATTER), engine.bases, range(2), checksums, always)
                assert found == [True, False]
                if rig.writes_only_what_is_right:
                    for after, right in zip(engine.arrays, before, strict=True):
                        assert np.all((after == GUARD) | (after == right))
                rig.pool[2 * MIB + place] ^= 1

    def test_live_memory_is_read(self, rig: Rig):
        """What an engine writes after its memory was opened is what is stored: nothing is copied ahead of time."""
        with opened(rig, nhd(Shape())) as engine:
            case = Case(engine, [[2]], [0])
            for name in (b"one", b"two"):
                engine.stamp(name)
                rig.device.gather(case.plan(Direction.GATHER), engine.bases, range(1), always)
                assert bytes(rig.pool[: case.chunk_nbytes]) == engine.chunk([2])

    def test_memory_of_another_kind_is_refused(self, rig: Rig):
        """A handle of a kind that the device does not open is refused by name."""
        peer = rig.allocate(4096)
        with pytest.raises(LayoutError, match="'abacus'"):
            rig.device.open_memory(replace(peer.handle, kind="abacus"), peer.fds)

    def test_what_was_opened_can_be_opened_again(self, rig: Rig):
        """Open, close, and open anew, many times: nothing is used up."""
        peer = rig.allocate(1 * MIB)
        for _ in range(50):
            address = rig.device.open_memory(peer.handle, peer.fds)
            rig.device.close_memory(address, peer.handle.nbytes)


@contextmanager
def opened(rig: Rig, laid: Laid) -> Iterator[Engine]:
    """Allocate a layout's memory, and keep it open on the device."""
    with ExitStack() as stack:
        engine = Engine(laid, [], [])
        for nbytes in laid.memory_nbytes:
            peer = rig.allocate(nbytes)
            stack.callback(peer.close)
            engine.memory.append(peer)
            engine.bases.append(rig.device.open_memory(peer.handle, peer.fds))
            stack.callback(rig.device.close_memory, engine.bases[-1], peer.handle.nbytes)
        yield engine


@contextmanager
def drawn_case(rig: Rig, data: st.DataObject) -> Iterator[Case]:
    """Draw a layout, disjoint chunks of it, and a slot for each."""
    laid = data.draw(random_layouts(), label="layout")
    blocks_per_chunk = data.draw(st.integers(1, min(3, laid.group.num_blocks)), label="blocks per chunk")
    num_chunks = data.draw(st.integers(1, laid.group.num_blocks // blocks_per_chunk), label="chunks")
    chunks = draw_chunks(data, laid, blocks_per_chunk, num_chunks)
    slots = data.draw(st.permutations(range(8)), label="slots")[:num_chunks]
    with opened(rig, laid) as engine:
        yield Case(engine, chunks, [slot * 4096 for slot in slots])


def draw_chunks(data: st.DataObject, laid: Laid, blocks_per_chunk: int, num_chunks: int) -> list[list[int]]:
    """Draw chunks that share no block."""
    blocks = data.draw(st.permutations(range(laid.group.num_blocks)), label="blocks")
    return [blocks[number * blocks_per_chunk : (number + 1) * blocks_per_chunk] for number in range(num_chunks)]


class HostMemory(SharedMemory):
    """A sealed memfd as an engine hands it over."""

    @property
    def handle(self) -> MemoryHandle:
        return MemoryHandle("host", self.nbytes)

    @property
    def fds(self) -> list[int]:
        return [self.fd]


class HostRig:
    """A ``HostDevice`` over a pool of its own."""

    writes_only_what_is_right = True

    def __init__(self, num_threads: int) -> None:
        self._memory = SharedMemory(POOL_NBYTES, name="kvist-rig")
        self.pool = self._memory.bytes
        self.device = HostDevice(self.pool.data, self.pool.ctypes.data, num_threads=num_threads)

    def allocate(self, nbytes: int) -> HostMemory:
        return HostMemory(nbytes)


class HostContract(DeviceContract):
    """What holds besides for host memory."""

    num_threads: int

    @pytest.fixture(scope="class")
    @classmethod
    def rig(cls) -> Iterator[HostRig]:
        rig = HostRig(cls.num_threads)
        yield rig
        rig.device.close()

    @pytest.mark.parametrize("seals", [0, fcntl.F_SEAL_SHRINK, fcntl.F_SEAL_GROW], ids=["none", "shrink", "grow"])
    def test_memory_that_could_be_taken_away_is_refused(self, rig: HostRig, seals: int):
        """Without both seals the owner could shrink it under the daemon's feet: refused, with the seals seen."""
        with SharedMemory(8192, seals=seals) as memory, pytest.raises(LayoutError, match=f"its seals are {seals:#x}"):
            rig.device.open_memory(MemoryHandle("host", 8192), [memory.fd])

    def test_memory_that_cannot_be_written_is_refused(self, rig: HostRig):
        """A memfd that is sealed against writing, or came as a read-only descriptor, is refused."""
        fd = os.memfd_create("kvist-test", os.MFD_ALLOW_SEALING)
        os.ftruncate(fd, 8192)
        read_only = os.open(f"/proc/self/fd/{fd}", os.O_RDONLY)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, SEALS)
        with pytest.raises(LayoutError, match="Permission denied"):
            rig.device.open_memory(MemoryHandle("host", 8192), [read_only])
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE)
        with pytest.raises(LayoutError, match="cannot be mapped"):
            rig.device.open_memory(MemoryHandle("host", 8192), [fd])
        os.close(read_only)
        os.close(fd)

    def test_memory_that_is_too_small_is_refused(self, rig: HostRig):
        """A handle that claims a byte more than there is is refused with both numbers; one that claims less is not."""
        with SharedMemory(8192) as memory:
            with pytest.raises(LayoutError, match="declared with 8193 bytes and has 8192"):
                rig.device.open_memory(MemoryHandle("host", 8193), [memory.fd])
            rig.device.close_memory(rig.device.open_memory(MemoryHandle("host", 5000), [memory.fd]), 5000)

    def test_what_is_no_memfd_is_refused(self, rig: HostRig, tmp_path):
        """A file, a pipe, a socket, a device, a directory: none can be sealed, so none is mapped."""
        (tmp_path / "file").write_bytes(bytes(8192))
        pipe = os.pipe()
        with socket.socket() as sock:
            paths = [tmp_path / "file", tmp_path, "/dev/zero"]
            opened_fds = [os.open(path, os.O_RDONLY) for path in paths]
            for fd in (*opened_fds, *pipe, sock.fileno()):
                with pytest.raises(LayoutError, match="KV memory must be"):
                    rig.device.open_memory(MemoryHandle("host", 4096), [fd])
        for fd in (*opened_fds, *pipe):
            os.close(fd)

    def test_close_unmaps_and_open_leaves_the_descriptor_alone(self, rig: HostRig):
        """Memory is mapped once an open, and not at all after the last close; the descriptor stays the caller's."""
        with SharedMemory(64 * KIB, name="kvist-watched") as memory:
            own = num_mappings(os.getpid(), "kvist-watched")
            fds = num_fds(os.getpid())
            handle = MemoryHandle("host", 64 * KIB)
            addresses = [rig.device.open_memory(handle, [memory.fd]) for _ in range(3)]
            assert num_mappings(os.getpid(), "kvist-watched") == own + 3
            assert num_fds(os.getpid()) == fds
            os.fstat(memory.fd)
            for address in addresses:
                rig.device.close_memory(address, handle.nbytes)
            assert num_mappings(os.getpid(), "kvist-watched") == own

    def test_a_refusal_leaves_nothing_mapped(self, rig: HostRig):
        """After a refused open there are as many mappings and descriptors as before."""
        with SharedMemory(8192, seals=0, name="kvist-watched") as memory:
            own, fds = num_mappings(os.getpid(), "kvist-watched"), num_fds(os.getpid())
            with pytest.raises(LayoutError):
                rig.device.open_memory(MemoryHandle("host", 8192), [memory.fd])
            assert (num_mappings(os.getpid(), "kvist-watched"), num_fds(os.getpid())) == (own, fds)


class TestHostDeviceOnOneThread(HostContract):
    """Copies on the caller's thread."""

    num_threads = 1


class TestHostDeviceOnTwoThreads(HostContract):
    """Copies on two threads of its own."""

    num_threads = 2
