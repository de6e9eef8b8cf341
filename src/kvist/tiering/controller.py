"""A pool and the tiers behind it, as the service sees them.

The laws: of the chunks that a lookup asks for, each is found in the pool, is on its way there, or is missed. A chunk is
written to a tier at most while it is in the pool, and is dropped from all of them when it proves wrong. Of owners who
are being purged nothing is written. Nothing here waits: tiers answer on the loop, later. Without tiers nothing happens.
"""

from __future__ import annotations

import enum
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from kvist.index.chunk_index import Chunk, ChunkIndex, ChunkState
from kvist.index.leases import SessionId
from kvist.model.keys import ChunkKey
from kvist.model.owners import IsOwner, Owner
from kvist.storage.base import Tier, TierStats
from kvist.tiering.demoting import Demoter
from kvist.tiering.promoting import Loading, Promoter, Wanted
from kvist.tiering.reserving import Reserver
from kvist.tiering.staging import Staging

_RESERVED_SHARE_MAX = 2
"""Reads may take half of the pool: what engines store, and what was read for others, keeps the rest."""


class WritePolicy(enum.Enum):
    """When a chunk is first offered to the tiers."""

    ALWAYS = "always"
    """When it is stored."""
    SECOND_USE = "second-use"
    """When it is found by a lookup, or stored again."""


@dataclass(frozen=True, slots=True)
class TiersBehind:
    """What the process puts behind the pool."""

    pool: memoryview = field(default_factory=lambda: memoryview(b""))
    tiers: Sequence[Tier] = ()
    """The fastest first."""
    policy: WritePolicy = WritePolicy.ALWAYS


class TierController:
    """Composes index, slots and tiers. The daemon's loop is its only caller."""

    def __init__(
        self,
        behind: TiersBehind,
        index: ChunkIndex,
        reserver: Reserver,
        post: Callable[[Callable[[], None]], None],
        *,
        on_quiet: Callable[[], None],
        on_promoted: Callable[[float], None] = lambda _: None,
    ) -> None:
        """Begin; ``on_quiet`` is called when the last read or write has ended.

        ``on_promoted`` is told of each chunk that has come from a tier when it was first asked for.
        """
        self._tiers = behind.tiers
        self._policy = behind.policy
        self._on_quiet = on_quiet
        staging = Staging(behind.tiers, behind.pool, lambda call: post(lambda: self._answered(call)))
        reserved_nbytes_max = len(behind.pool) // _RESERVED_SHARE_MAX
        self._purges: list[IsOwner] = []
        """Those that have not ended."""
        self._promoter = Promoter(
            index, reserver, staging, reserved_nbytes_max=reserved_nbytes_max, on_promoted=on_promoted
        )
        self._demoters = [Demoter(index, staging, number, self._is_barred) for number in range(len(behind.tiers))]

    @property
    def is_quiet(self) -> bool:
        """Nothing is read or written, or waits for that."""
        return not self._promoter.num_fetches and not any(demoter.num_writes for demoter in self._demoters)

    def look_up(self, wanted: Wanted, found: Iterable[Sequence[Chunk]], *, num_found: int, tail_found: int) -> Loading:
        """Take note of a lookup and of the chunks that it was granted, row by row; promote what it lacks.

        The chunks are pinned.
        """
        if not self._tiers:
            return Loading()
        chunks = [chunk for row in found for chunk in row]
        is_whole = num_found == len(wanted.digests) and tail_found == len(wanted.tails)
        loading = Loading()
        if not is_whole:
            loading = self._promoter.promote(wanted, num_found=num_found, tail_found=tail_found)
        keys = loading.keys or [chunk.key for chunk in chunks]
        for tier in self._tiers if keys else ():
            tier.touch(keys)
        self._demote(chunks)
        return loading

    def note_stored(self, sealed: Sequence[Chunk]) -> None:
        """Take note of chunks that were stored just now."""
        if self._policy is WritePolicy.ALWAYS:
            self._demote(sealed)

    def note_present(self, chunks: Sequence[Chunk]) -> None:
        """Take note of chunks that were to be stored and are there already."""
        if self._tiers:
            self._demote([chunk for chunk in chunks if chunk.state is ChunkState.SEALED])

    def locate(self, keys: Sequence[ChunkKey]) -> list[int | None]:
        """Return the number of the fastest tier that holds each chunk, None where none does. Changes nothing."""
        places: list[int | None] = [None] * len(keys)
        for number, tier in enumerate(self._tiers):
            for place, slot_nbytes in enumerate(tier.find(keys)):
                if slot_nbytes is not None and places[place] is None:
                    places[place] = number
        return places

    def drop(self, keys: Sequence[ChunkKey]) -> None:
        """Forget chunks whose bytes have proved wrong, in every tier."""
        for tier in self._tiers:
            tier.drop(keys)

    @contextmanager
    def barring(self, is_owner: IsOwner) -> Iterator[None]:
        """Begin no write to a tier of what some owners have."""
        self._purges.append(is_owner)
        try:
            yield
        finally:
            self._purges.remove(is_owner)

    def purge(self, is_owner: IsOwner) -> Iterator[tuple[str, int]]:
        """Drop what some owners have in the tiers, a slice at each step; yield the tier's name and how many it had."""
        for tier in self._tiers:
            for num_chunks in tier.purge(is_owner):
                yield tier.name, num_chunks

    def forget(self, session: SessionId, now: float) -> None:
        """Begin no read that only this session waits for; it has ended."""
        self._answered(lambda: self._promoter.forget(session, now))

    def expire(self, now: float) -> None:
        """Begin no read that nobody has asked for again in time."""
        self._answered(lambda: self._promoter.expire(now))

    def begin_draining(self) -> None:
        """Read nothing more. What was stored is still written."""
        self._promoter.give_up_queued()

    def give_up(self) -> None:
        """Begin no more writes either."""
        for demoter in self._demoters:
            demoter.give_up_queued()

    def stats(self) -> list[tuple[str, TierStats]]:
        """Return each tier's name and figures."""
        return [(tier.name, tier.stats()) for tier in self._tiers]

    @property
    def counters(self) -> Counter[str]:
        """Since the start."""
        return sum((demoter.counters for demoter in self._demoters), Counter(self._promoter.counters))

    def check_invariants(self) -> None:
        """Assert the laws of this package. For tests."""
        self._promoter.check_invariants()
        for demoter in self._demoters:
            demoter.check_invariants()

    def _is_barred(self, owner: Owner) -> bool:
        return any(is_owner(owner) for is_owner in self._purges)

    def _demote(self, chunks: Sequence[Chunk]) -> None:
        for demoter in self._demoters if chunks else ():
            demoter.want(chunks)

    def _answered(self, call: Callable[[], None]) -> None:
        call()
        if self.is_quiet:
            self._on_quiet()
