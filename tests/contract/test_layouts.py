"""Engines' tensors through a device: stamped memory into slots in canonical order, and back into other blocks."""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from math import lcm

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvist.model.content import content
from kvist.model.layout import GroupKind, KVLayout, LayerGroup
from kvist.model.tensors import kernel_blocks, planes, token_blocks
from kvist.model.transfer import CopyPlan, Direction
from kvist.units import MIB
from tests.contract.test_device import HostRig
from tests.support.engine_layouts import CASES, NUM_BLOCKS, Case, each
from tests.support.memory import GUARD
from tests.support.simulated import always
from tests.support.views import Tensors, lay

SLOT = 1 * MIB


@pytest.fixture(scope="module")
def rig() -> Iterator[HostRig]:
    rig = HostRig(num_threads=1)
    yield rig
    rig.device.close()


class Engine:
    """Layers in memory that is open on a device."""

    def __init__(self, rig: HostRig, case: Case) -> None:
        self._rig = rig
        self.tensors = Tensors(case.layers)
        found = planes(*case.layers)
        block_tokens = lcm(*(plane.num_tokens for plane in found))
        self.group = LayerGroup(GroupKind.FULL, block_tokens, found)
        KVLayout(self.tensors.memory_nbytes, (self.group,))
        self.bases: list[int] = []

    @property
    def block_nbytes(self) -> int:
        return self.group.block_nbytes

    @contextmanager
    def opened(self) -> Iterator["Engine"]:
        with ExitStack() as stack:
            for number, nbytes in enumerate(self.tensors.memory_nbytes):
                peer = self._rig.allocate(nbytes)
                stack.callback(peer.close)
                peer.bytes[:] = GUARD
                self.tensors.memory[number] = peer.bytes
                self.bases.append(self._rig.device.open_memory(peer.handle, peer.fds))
                stack.callback(self._rig.device.close_memory, self.bases[-1], nbytes)
            yield self
            self.tensors.memory.clear()

    def gather(self, chunks: Sequence[Sequence[int]]) -> list[bytes]:
        """Copy chunks into slots; return the slots' bytes, after a look at the bytes around them."""
        self._rig.pool[:] = GUARD
        self.checksums = self._rig.device.gather(
            self._plan(Direction.GATHER, chunks), self.bases, range(len(chunks)), always
        )
        nbytes = self.block_nbytes * len(chunks[0])
        slots = self._rig.pool[: len(chunks) * SLOT].reshape(len(chunks), SLOT)
        assert np.all(slots[:, nbytes:] == GUARD)
        assert np.all(self._rig.pool[len(chunks) * SLOT :] == GUARD)
        return [slot[:nbytes].tobytes() for slot in slots]

    def scatter(self, chunks: Sequence[Sequence[int]], checksums: Sequence[bytes]) -> None:
        """Copy slots into blocks."""
        plan = self._plan(Direction.SCATTER, chunks)
        assert self._rig.device.scatter(plan, self.bases, range(len(chunks)), checksums, always) == [True] * len(chunks)

    def _plan(self, direction: Direction, chunks: Sequence[Sequence[int]]) -> CopyPlan:
        slots = np.arange(len(chunks), dtype=np.int64) * SLOT
        return CopyPlan(direction, self.group, np.array(chunks, dtype=np.int64), slots, 0)


def check_round_trip(rig: HostRig, case: Case, chunks: list[list[int]], targets: list[list[int]]) -> list[bytes]:
    """Gather stamped chunks, scatter them into other blocks of empty memory; return the slots' bytes."""
    with Engine(rig, case).opened() as engine:
        engine.tensors.stamp()
        wanted = [engine.tensors.canonical(blocks) for blocks in chunks]
        before = [memory.copy() for memory in engine.tensors.memory]
        slots = engine.gather(chunks)
        assert slots == wanted
        assert len(set(slots)) == len(chunks)
        assert all(map(np.array_equal, engine.tensors.memory, before))
        for memory in engine.tensors.memory:
            memory[:] = GUARD
        engine.scatter(targets, engine.checksums)
        assert [engine.tensors.canonical(blocks) for blocks in targets] == wanted
        payload = engine.tensors.is_payload([block for blocks in targets for block in blocks])
        assert sum(map(np.count_nonzero, payload)) == sum(map(len, wanted))
        for memory, is_payload in zip(engine.tensors.memory, payload, strict=True):
            assert np.all(memory[~is_payload] == GUARD)
        return slots


@pytest.mark.parametrize("case", CASES, ids=str)
def test_every_engines_blocks_come_back_in_other_blocks(rig: HostRig, case: Case):
    """A slot is what plain indexing of the declared axes says; it comes back whole; no gap or guard byte changes."""
    assert Engine(rig, case).group.num_blocks >= NUM_BLOCKS
    check_round_trip(rig, case, [[4, 1], [0, 3]], [[2, 5], [1, 0]])


TOKENS = 128


def engines(block_tokens: int, num_heads: int, head_size: int, itemsize: int) -> dict[str, Case]:
    """Return one model's KV of 256 tokens as different engines hold it."""
    sizes = {"NL": 2, "NB": 2 * TOKENS // block_tokens, "BS": block_tokens, "NH": num_heads, "HS": head_size}
    sizes |= {"2HS": 2 * head_size, "PBS": 2 * TOKENS, "NHHS": num_heads * head_size}

    def view(axes: str, order: str = "", **more: int):
        return lay(axes, sizes, order=order, itemsize=itemsize, **more)

    def pair(axes: str, **more: int):
        return view(axes, **more), view(axes, memory=1, **more)

    return {
        "NHD": Case("", each(view("2 NB BS NH HS"), 2)),
        "HND": Case("", each(view("NB 2 BS NH HS", "NB 2 NH BS HS"), 2)),
        "fused": Case("", each(view("NB NH BS 2HS"), 2)),
        "fused NHD": Case("", each(view("NB BS NH 2HS"), 2)),
        "K list": Case("", each(pair("NB BS NH HS"), 2)),
        "K list of tokens": Case("", each(pair("PBS NH HS", block_tokens=block_tokens), 2)),
        "block outermost": Case("", [view("NL NB NH BS 2HS", "NB NL NH BS 2HS")]),
        "head outermost in a block": Case("", [view("NL NB NH BS 2HS", "NB NH NL BS 2HS")]),
        "TensorRT-LLM": Case("", [view("NB NL 2 NH BS HS")]),
        "plain": Case("", [view("2 NL PBS NHHS", block_tokens=block_tokens, num_heads=num_heads)]),
    }


@settings(max_examples=15)
@given(st.integers(1, 4), st.integers(1, 12), st.sampled_from([1, 2, 4]), st.permutations([16, 32, 64, 128]), st.data())
def test_all_engines_make_the_same_slots(rig: HostRig, num_heads, head_size, itemsize, block_sizes, data):
    """One model's KV is the same bytes, whatever the layout and the block size that an engine holds it in."""
    names = data.draw(st.permutations(list(engines(16, 1, 1, 1))))
    slots = []
    for name, block_tokens in zip(names[:4], block_sizes, strict=True):
        blocks = token_blocks(TOKENS, 2 * TOKENS, block_tokens)
        with Engine(rig, engines(block_tokens, num_heads, head_size, itemsize)[name]).opened() as engine:
            engine.tensors.stamp()
            slots += engine.gather([blocks.tolist()])
    assert len(set(slots)) == 1


def test_all_engines_name_their_slots_alike():
    """One model's KV has one fingerprint in every layout and block size; another number of heads has another."""

    def names(num_heads: int) -> set[str]:
        found = set()
        for case in (case for block in (16, 128) for case in engines(block, num_heads, 8, 2).values()):
            layers = planes(*case.layers)
            group = LayerGroup(GroupKind.FULL, layers[0].num_tokens, layers)
            found.add(group.fingerprint(content(case.layers[0], "bfloat16")))
        return found

    assert len(names(4)) == 1
    assert names(4) != names(2)


@pytest.mark.parametrize("writer", engines(16, 1, 1, 1))
def test_what_one_engine_stores_every_other_can_load(rig: HostRig, writer: str):
    """A slot of one layout, scattered into another layout with other blocks, is that layout's own stamped KV."""
    with Engine(rig, engines(32, 3, 8, 2)[writer]).opened() as source:
        source.tensors.stamp()
        for reader, case in engines(64, 3, 8, 2).items():
            with Engine(rig, case).opened() as target:
                target.tensors.stamp()
                wanted = target.tensors.canonical([2, 3])
                target.gather([[2, 3]])
                checksums = target.checksums
                for memory in target.tensors.memory:
                    memory[:] = GUARD
                assert source.gather([token_blocks(TOKENS, 2 * TOKENS, 32).tolist()]) == [wanted], reader
                target.scatter([[0, 1]], checksums)
                assert target.tensors.canonical([0, 1]) == wanted


def test_kernel_blocks_that_no_stride_joins_are_the_blocks(rig: HostRig):
    """An engine block of two HND kernel blocks, named by both, makes the slot of one block twice as long."""
    small = Case("kernel blocks", each(lay("NB 2 NH BS HS", {"NB": 12, "NH": 3, "BS": 4, "HS": 8})))
    large = Case("blocks", each(lay("NB 2 NH BS HS", {"NB": 6, "NH": 3, "BS": 8, "HS": 8})))
    chunks, targets = [[4, 1], [0, 3]], [[2, 5], [1, 0]]
    named = [kernel_blocks(np.array(blocks), 2).tolist() for blocks in (chunks, targets)]
    assert named[0] == [[8, 9, 2, 3], [0, 1, 6, 7]]
    assert check_round_trip(rig, small, *named) == check_round_trip(rig, large, chunks, targets)


def test_layers_that_share_kv_are_copied_once(rig: HostRig):
    """A layer under which another's memory is registered again adds nothing to a chunk."""
    layers = each(lay("2 NB BS NH HS", {"NB": 6, "BS": 4, "NH": 2, "HS": 8}), 2)
    shared = Case("shared", [*layers, replace(layers[0]), layers[1]])
    chunks, targets = [[4, 1]], [[2, 5]]
    with Engine(rig, shared).opened() as engine:
        assert engine.block_nbytes == 2 * 2 * 4 * 2 * 8 * 2
    assert len(check_round_trip(rig, Case("owners", layers), chunks, targets)[0]) == 2 * engine.block_nbytes
