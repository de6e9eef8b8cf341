"""A read that has not begun is made if somebody waits for it or something builds on it, and otherwise is not."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator

import numpy as np
import pytest

from kvist.index.chunk_index import ChunkIndex, ChunkState
from kvist.index.eviction import LeastRecentlyUsed
from kvist.index.leases import SessionId
from kvist.model.coverage import Need
from kvist.model.keys import Digest, chunk_keys
from kvist.model.layout import GroupKind
from kvist.model.owners import Owner
from kvist.storage.base import StoredChunk
from kvist.storage.slots import SlotAllocator
from kvist.tiering.controller import TierController, TiersBehind
from kvist.tiering.promoting import Wanted
from kvist.tiering.reserving import Reserver
from tests.support.memory import stamp
from tests.support.memory_tier import MemoryTier

SLOT_NBYTES = 4096
NUM_SLOTS = 16
NEEDS = (Need(GroupKind.FULL),)
PROMPT = [Digest(bytes([7] * 15 + [number])) for number in range(6)]
KEYS = chunk_keys(PROMPT, group=0, shard=0)
NOBODY = Owner("", "")
ONE, TWO = SessionId(1), SessionId(2)


class Behind:
    """A controller over a tier that has all of ``PROMPT``, and a pool that has nothing and reads two at a time."""

    def __init__(self) -> None:
        self.slots = SlotAllocator(NUM_SLOTS * SLOT_NBYTES)
        self.index = ChunkIndex(LeastRecentlyUsed(), self.slots.free)
        self.tier = MemoryTier()
        self.posted: deque[Callable[[], None]] = deque()
        pool = np.zeros(NUM_SLOTS * SLOT_NBYTES, dtype=np.uint8)
        self.reserver = Reserver(self.index, self.slots)
        self.controller = TierController(
            TiersBehind(pool.data, [self.tier]), self.index, self.reserver, self.posted.append, on_quiet=lambda: None
        )
        for number, key in enumerate(KEYS):
            parent = KEYS[number - 1] if number else None
            stored = StoredChunk(key, parent, SLOT_NBYTES, SLOT_NBYTES, key)
            self.tier.chunks[key] = stored, stamp(key, SLOT_NBYTES)

    def ask(self, session: SessionId, num: int, *, until: float) -> int:
        """Let a session ask for the first chunks, of which nothing is found; return how many are on their way."""
        wanted = Wanted(PROMPT[:num], NEEDS, session, until)
        return self.controller.look_up(wanted, [], num_found=0, tail_found=0).num_chunks

    def settle(self) -> list[int]:
        """End every read; return the numbers of the chunks that can be found then, and check that nothing is held."""
        while self.tier.is_busy or self.posted:
            self.tier.step()
            while self.posted:
                self.posted.popleft()()
            self.controller.check_invariants()
            self.index.check_invariants()
        assert self.controller.is_quiet
        assert self.index.stats().num_reserved == 0
        return [number for number, chunk in enumerate(self.index.find_sealed(KEYS)) if chunk is not None]


@pytest.fixture
def behind() -> Iterator[Behind]:
    behind = Behind()
    yield behind
    behind.settle()
    assert behind.slots.used_nbytes == behind.index.stats().num_sealed * SLOT_NBYTES


def test_what_a_lost_session_has_asked_for_is_not_read(behind: Behind):
    """Reads that have begun end; the others are given up at once, with their slots."""
    assert behind.ask(ONE, 6, until=10) == 6
    behind.controller.forget(ONE, now=0)
    assert behind.slots.used_nbytes == len(behind.tier.reads) * SLOT_NBYTES
    assert behind.settle() == [0, 1]
    assert set(behind.tier.num_fetched) == set(KEYS[:2])
    assert behind.controller.counters["promotions_given_up"] == 4


def test_what_another_session_waits_for_is_read(behind: Behind):
    """Of a read that two have asked for, the end of one takes nothing; what only that one wanted is given up."""
    behind.ask(ONE, 6, until=10)
    behind.ask(TWO, 4, until=10)
    behind.controller.forget(ONE, now=0)
    assert behind.settle() == [0, 1, 2, 3]


def test_what_nobody_asks_for_again_is_not_read(behind: Behind):
    """A read is wanted until the last answer that named it is too old, by each who was told of it."""
    behind.ask(ONE, 6, until=10)
    behind.ask(TWO, 5, until=11)
    behind.ask(ONE, 3, until=12)
    behind.controller.expire(9.9)
    assert behind.slots.used_nbytes == 6 * SLOT_NBYTES
    behind.controller.expire(10)
    assert behind.slots.used_nbytes == 5 * SLOT_NBYTES
    behind.controller.expire(11)
    assert behind.slots.used_nbytes == 3 * SLOT_NBYTES
    assert behind.settle() == [0, 1, 2]


def test_what_something_stored_builds_on_is_read(behind: Behind):
    """Giving a read up takes nothing away that was stored meanwhile, so the reads above it are made."""
    behind.ask(ONE, 5, until=10)
    (new,) = chunk_keys([Digest(b"stored meanwhile")], group=0, shard=0)
    parent = behind.index.get(KEYS[3])
    offset = behind.reserver.allocate(SLOT_NBYTES, below=parent, owner=NOBODY)
    assert isinstance(offset, int)
    chunk = behind.index.reserve(new, parent, offset, SLOT_NBYTES, owner=NOBODY)
    behind.index.seal(chunk, b"")
    behind.controller.forget(ONE, now=0)
    assert behind.settle() == [0, 1, 2, 3]
    assert chunk.state is ChunkState.SEALED


def test_what_was_given_up_can_be_asked_for_again(behind: Behind):
    """Who comes back gets what was given up, read once."""
    behind.ask(ONE, 6, until=10)
    behind.controller.expire(10)
    assert behind.ask(ONE, 6, until=20) == 6
    assert behind.settle() == [0, 1, 2, 3, 4, 5]
    assert set(behind.tier.num_fetched.values()) == {1}
