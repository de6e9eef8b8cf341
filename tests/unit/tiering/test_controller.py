"""Chunks between a pool and its tiers, in any order of everything: each slot comes back once, each byte is right."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from kvist.index.chunk_index import Chunk, ChunkIndex, ChunkState
from kvist.index.eviction import LeastRecentlyUsed
from kvist.index.leases import SessionId
from kvist.index.tenants import Tenants
from kvist.model.coverage import Need, first_needed
from kvist.model.keys import Digest, chunk_keys
from kvist.model.layout import GroupKind
from kvist.model.owners import Owner, Quotas
from kvist.model.rows import Row
from kvist.server.purging import Purger
from kvist.server.sessions import Peer
from kvist.storage.base import StoredChunk
from kvist.storage.slots import SlotAllocator
from kvist.tiering.controller import TierController, TiersBehind, WritePolicy
from kvist.tiering.promoting import Wanted
from kvist.tiering.reserving import NoSlot, Reserver
from kvist.wire import messages as wire
from tests.support.memory import stamp
from tests.support.memory_tier import MemoryTier

NUM_SLOTS = 10
PATIENCE_S = 3
SLOT_NBYTES = 4096
NEEDS = (Need(GroupKind.FULL), Need(GroupKind.WINDOW, 2), Need(GroupKind.RECURRENT))
ROWS = [Row(group, 0) for group in range(len(NEEDS))]
PROMPTS = [[Digest(bytes([stem] * 8 + [number] * 8)) for number in range(5)] for stem in range(2)]
OWNERS = (Owner("a", "model"), Owner("b", ""))
"""Of the prompts."""


def key_of(row: Row, digest: Digest):
    return chunk_keys([digest], group=row.group, shard=row.shard)[0]


class Tiering(RuleBasedStateMachine):
    """A controller, two tiers that answer when told, and somebody who stores and looks up."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = np.zeros(NUM_SLOTS * SLOT_NBYTES, dtype=np.uint8)
        self.slots = SlotAllocator(self.pool.nbytes)
        self.index = ChunkIndex(
            LeastRecentlyUsed(), self.slots.free, Tenants(Quotas({"a": 6 * SLOT_NBYTES}), self.slots.nbytes)
        )  # fmt: skip
        self.tiers = [MemoryTier("fast"), MemoryTier("slow", must_wait_for_parents=True)]
        self.posted: deque[Callable[[], None]] = deque()
        self.reserver = Reserver(self.index, self.slots)
        self.num_quiet = 0
        self.now = 0
        self.controller = TierController(
            TiersBehind(self.pool.data, self.tiers, WritePolicy.ALWAYS), self.index, self.reserver, self.posted.append,
            on_quiet=self.note_quiet,
        )  # fmt: skip
        self.purger = Purger(self.index, self.controller, self.posted.append)
        self.held: list[list[Chunk]] = []
        self.num_stored = dict.fromkeys(OWNERS, 0)

    @initialize()
    def begin_with_full_tiers(self) -> None:
        """Let both tiers have both prompts, and the pool nothing."""
        for prompt, owner in zip(PROMPTS, OWNERS, strict=True):
            for row in ROWS:
                parent = None
                for digest in prompt:
                    key = key_of(row, digest)
                    stored = StoredChunk(key, parent, SLOT_NBYTES, SLOT_NBYTES, key, owner)
                    for tier in self.tiers:
                        tier.chunks[key] = stored, stamp(key, SLOT_NBYTES)
                    parent = key if NEEDS[row.group].kind is GroupKind.FULL else None

    def note_quiet(self) -> None:
        assert self.controller.is_quiet
        self.num_quiet += 1

    @rule(prompt=st.sampled_from(PROMPTS), row=st.sampled_from(ROWS), end=st.integers(1, 5))
    def store(self, prompt: list[Digest], row: Row, end: int) -> None:
        """Keep the first chunks of a prompt in a row, as far as there is room."""
        parent = None
        owner = OWNERS[PROMPTS.index(prompt)]
        sealed = []
        for digest in prompt[:end]:
            key = key_of(row, digest)
            chunk = self.index.get(key)
            if chunk is None:
                offset = self.reserver.allocate(SLOT_NBYTES, below=parent, owner=owner)
                if isinstance(offset, NoSlot):
                    break
                chunk = self.index.reserve(key, parent, offset, SLOT_NBYTES, owner=owner)
                self.num_stored[owner] += 1
                self.pool[offset : offset + SLOT_NBYTES] = np.frombuffer(stamp(key, SLOT_NBYTES), dtype=np.uint8)
                self.index.seal(chunk, key)
                sealed.append(chunk)
            else:
                self.controller.note_present([chunk])
            parent = chunk if NEEDS[row.group].kind is GroupKind.FULL else None
        self.controller.note_stored([chunk for chunk in sealed if chunk.state is ChunkState.SEALED])

    @rule(prompt=st.sampled_from(PROMPTS), num=st.integers(1, 5), is_held=st.booleans(), session=st.integers(1, 2))
    def look_up(self, prompt: list[Digest], num: int, is_held: bool, session: int) -> None:
        """Ask for a prompt that nothing of is found, or all that is needed of the first chunk at most."""
        found = [chunk for chunk in self.index.find_sealed([key_of(row, prompt[0]) for row in ROWS]) if chunk]
        num_found = int(len(found) == len(ROWS))
        chunks = found if num_found else []
        for chunk in chunks:
            self.index.pin(chunk)
        loading = self.controller.look_up(
            Wanted(prompt[:num], NEEDS, SessionId(session), self.now + PATIENCE_S),
            [[chunk] for chunk in chunks], num_found=num_found, tail_found=0,
        )  # fmt: skip
        end = num_found + loading.num_chunks
        for row, need in zip(ROWS, NEEDS, strict=True) if loading.num_chunks else ():
            for number in range(first_needed(need, end), end):
                assert self.index.get(key_of(row, prompt[number])) is not None
        if is_held and chunks:
            self.held.append(chunks)
        else:
            self.let_go(chunks)

    @rule()
    def release(self) -> None:
        """Let somebody give back what was found."""
        if self.held:
            self.let_go(self.held.pop(0))

    @rule(passed_s=st.integers(1, 3), session=st.none() | st.integers(1, 2))
    def give_up(self, passed_s: int, session: int | None) -> None:
        """Let time pass, or a session end; nothing stored goes, and no read waits that nobody wants or needs."""
        self.now += passed_s
        sealed = [chunk for chunk in self.index._chunks.values() if chunk.state is ChunkState.SEALED]
        if session is None:
            self.controller.expire(self.now)
        else:
            self.controller.forget(SessionId(session), self.now)
        assert all(chunk.state is ChunkState.SEALED for chunk in sealed)
        for fetch in self.controller._promoter._queue:
            assert fetch.wanted_until > self.now or any(fetch.chunk.children())
            assert session is None or session not in fetch.asked

    def let_go(self, chunks: list[Chunk]) -> None:
        for chunk in chunks:
            self.index.unpin(chunk)

    @rule(number=st.integers(0, 1), outcome=st.sampled_from(["right", "right", "right", "damaged", "another chunk"]))
    def end_one(self, number: int, outcome: str) -> None:
        """Let a tier end a read or a write."""
        tier = self.tiers[number]
        if outcome == "another chunk" and tier.reads:
            key, _, on_done = tier.reads.popleft()
            on_done(StoredChunk(key_of(ROWS[1], PROMPTS[0][0]), key, SLOT_NBYTES, SLOT_NBYTES, b"wrong"))
            return
        tier.is_failing = outcome == "damaged"
        tier.step()
        tier.is_failing = False

    @rule()
    def deliver(self) -> None:
        """Let the loop hear of one end."""
        if self.posted:
            self.posted.popleft()()

    @rule(prompt=st.sampled_from(PROMPTS), row=st.sampled_from(ROWS), number=st.integers(0, 4))
    def prove_wrong(self, prompt: list[Digest], row: Row, number: int) -> None:
        """Drop a chunk whose bytes an engine has found wrong."""
        key = key_of(row, prompt[number])
        chunk = self.index.get(key)
        if chunk is not None and chunk.state is ChunkState.SEALED:
            self.index.drop(chunk)
            self.controller.drop([key])
            assert all(tier.find([key]) == [None] for tier in self.tiers)

    @rule(number=st.integers(0, 1), is_by_tenant=st.booleans())
    def purge(self, number: int, is_by_tenant: bool) -> None:
        """Begin to purge an owner; when it is over no tier has anything of it, and the pool what was kept."""
        owner, before = OWNERS[number], dict(self.num_stored)

        def check(reply: wire.PurgeReply) -> None:
            assert not any(chunk.owner == owner for tier in self.tiers for chunk, _ in tier.chunks.values())
            num_left = sum(chunk.owner == owner for chunk in self.index._chunks.values())
            assert num_left <= reply.num_kept + self.num_stored[owner] - before[owner]
            assert reply.nbytes == reply.num_chunks * SLOT_NBYTES

        by = {"tenant": owner.tenant} if is_by_tenant else {"model": owner.model}
        self.purger.begin(Peer(1, os.getuid()), wire.Purge(1, **by), check)

    @rule(number=st.integers(0, 1), is_off=st.booleans(), writes_max=st.integers(0, 3))
    def trouble(self, number: int, is_off: bool, writes_max: int) -> None:
        """Let a tier be off for a while, or take less."""
        self.tiers[number].off_reason = "gone" if is_off and number else ""
        self.tiers[number].writes_max = writes_max + 1

    @rule(num=st.integers(1, NUM_SLOTS))
    def make_room(self, num: int) -> None:
        """Evict something."""
        for _ in range(num):
            self.index.evict()

    @invariant()
    def laws_hold(self) -> None:
        """Everything adds up, and what can be read is what was stored."""
        self.index.check_invariants()
        self.controller.check_invariants()
        stats = self.index.stats()
        num_taken = stats.num_sealed + stats.num_reserved + stats.num_doomed
        assert self.slots.used_nbytes == num_taken * SLOT_NBYTES
        for key, chunk in self.index._chunks.items():
            if chunk.state is ChunkState.SEALED:
                found = self.pool[chunk.slot_offset : chunk.slot_offset + chunk.nbytes].tobytes()
                assert (found, chunk.checksum) == (stamp(key, SLOT_NBYTES), key)
            assert chunk.owner == OWNERS[[key[:16] in prompt for prompt in PROMPTS].index(True)]
        for tier in self.tiers:
            assert all(content == stamp(key, SLOT_NBYTES) for key, (_, content) in tier.chunks.items())
            parents = [chunk.parent for chunk, _ in tier.chunks.values() if chunk.parent is not None]
            assert all(parent in tier.chunks for parent in parents)

    def teardown(self) -> None:
        """In the end nothing is held, and whoever waits for that is told."""
        while self.held:
            self.release()
        is_busy = not self.controller.is_quiet
        before = self.num_quiet
        while self.posted or any(tier.is_busy for tier in self.tiers):
            for tier in self.tiers:
                tier.step()
            self.deliver()
        self.laws_hold()
        assert self.controller.is_quiet
        assert self.num_quiet > before or not is_busy
        stats = self.index.stats()
        assert (stats.num_reserved, stats.num_pinned, stats.num_doomed) == (0, 0, 0)


Tiering.TestCase.settings = settings(stateful_step_count=60)
TestTiering = Tiering.TestCase
TestTiering.__doc__ = """Whatever is stored, asked for, evicted, failed and lost: the laws of ``tiering`` hold."""
