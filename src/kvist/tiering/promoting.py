"""From the tiers into the pool: what a lookup could have soon, and the reads that bring it.

The laws: a chunk is read by one fetch at a time, whoever asks for it. Its slot is reserved in the index from the moment
that the fetch is queued, and published by ``seal`` only with bytes that the tier has verified; a fetch that fails
aborts, and what hangs below goes with it. Each fetch gives its slot back or publishes it exactly once. Parents are read
before their children, and no chunk of the prefix that is being promoted is evicted for another one of it. A read that
has not begun is given up when nobody waits for it any more: all who have asked are gone, or none has asked again in
time; unless somebody has stored what builds on it.
"""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, TypeGuard

from kvist.index.chunk_index import Chunk, ChunkIndex, ChunkState
from kvist.index.leases import SessionId
from kvist.index.prefixes import cover, longest
from kvist.model.coverage import Need, first_needed
from kvist.model.keys import ChunkKey, Digest, chunk_keys
from kvist.model.layout import GroupKind
from kvist.model.rows import Row
from kvist.storage.base import StoredChunk
from kvist.tiering.reserving import NoSlot, Reserver
from kvist.tiering.staging import Staging

_MATCHED_AT_ONCE = 256
"""Keys that are asked for before it is looked whether any of them was missing."""


class Stored(NamedTuple):
    """A chunk that a tier holds and the pool does not."""

    tier: int
    slot_nbytes: int


Place = Chunk | Stored
"""Where a chunk is: in the pool or on its way there, or in a tier."""
Places = Mapping[Row, Sequence[Place | None]]


class Loading(NamedTuple):
    """What is on its way."""

    num_chunks: int = 0
    """That could be served when it is there, beyond those that can be served now."""
    seconds: float = 0.0
    """Until then, as far as rates are known; 0 if they are not."""
    keys: Sequence[ChunkKey] = ()
    """Of all that the longer prefix needs."""


@dataclass(slots=True, eq=False)
class _Fetch:
    chunk: Chunk
    tier: int
    parent: ChunkKey | None
    slot_nbytes: int
    asked_at: float
    asked: dict[SessionId, float] = field(default_factory=dict)
    """Who may wait for it, and until when."""

    @property
    def wanted_until(self) -> float:
        return max(self.asked.values(), default=-math.inf)


@dataclass(frozen=True, slots=True)
class Wanted:
    """The prefix of one lookup."""

    digests: Sequence[Digest]
    needs: Sequence[Need]
    session: SessionId
    """Who asks."""
    until: float
    """When its answer is too old to be relied on; who still waits has asked again before."""
    tails: Sequence[Digest] = ()
    chunk_s: float = 0.0
    """What computing one chunk costs who asks; 0 if that is not known."""
    asked_at: float = 0.0

    def key(self, row: Row, number: int) -> ChunkKey:
        """Return the key of a chunk by its place in the prefix."""
        return chunk_keys([self.digests[number]], group=row.group, shard=row.shard)[0]


class Promoter:
    """Owns every read from a tier. The daemon's loop is its only caller."""

    def __init__(
        self,
        index: ChunkIndex,
        reserver: Reserver,
        staging: Staging,
        *,
        reserved_nbytes_max: int,
        on_promoted: Callable[[float], None],
    ) -> None:
        """Read into the pool of ``staging``; reads that are queued or begun take at most so many bytes of it.

        ``on_promoted`` is told of each chunk that has come when it was first asked for.
        """
        self._on_promoted = on_promoted
        self._index = index
        self._reserver = reserver
        self._staging = staging
        self._reserved_nbytes_max = reserved_nbytes_max
        self._fetches: dict[ChunkKey, _Fetch] = {}
        """All that have not ended."""
        self._queue: deque[_Fetch] = deque()
        self._expires_at = math.inf
        """Nothing that is queued can be unwanted before, unless a session ends."""
        self._queued_nbytes: Counter[int] = Counter()
        """By tier: what no tier was asked for yet."""
        self._reserved_nbytes = 0
        self._reading_nbytes: Counter[int] = Counter()
        self.counters: Counter[str] = Counter()

    @property
    def num_fetches(self) -> int:
        """Reads that are queued or begun."""
        return len(self._fetches)

    def promote(self, wanted: Wanted, *, num_found: int, tail_found: int = 0) -> Loading:
        """Begin to read what a longer prefix than ``num_found`` chunks needs, as far as that is worth it.

        Reads that take longer than computing the same chunks are not begun. Where all chunks are there or on their way,
        so is the longest tail.
        """
        num_total, found = cover(self._match, self._find, wanted.digests, wanted.needs)
        places = {row: list(there) for row, there in found.items()}
        target = self._worthwhile(wanted, places, num_found, num_total)
        held = [chunk for chunk in _needed(wanted, places, target) if _is_sealed(chunk)]
        for chunk in held:
            self._index.pin(chunk)
        if target > num_found:
            self._reserve_prefix(wanted, places, target)
            target = max(num_found, longest(places, wanted.needs, target, _is_coming))
        if wanted.tails and target == len(wanted.digests):
            self._reserve_tail(wanted, places, tail_found)
        for chunk in held:
            self._index.unpin(chunk)
        self.pump()
        if target == num_found:
            return Loading()
        keys = [place.key for place in _needed(wanted, places, target) if isinstance(place, Chunk)]
        self._note_asked(wanted, keys)
        return Loading(target - num_found, self._seconds(Counter()), keys)

    def forget(self, session: SessionId, now: float) -> None:
        """Begin no read that only this session waits for."""
        for fetch in self._queue:
            fetch.asked.pop(session, None)
        self._give_up_unwanted(now)

    def expire(self, now: float) -> None:
        """Begin no read that nobody waits for any more."""
        if now >= self._expires_at:
            self._give_up_unwanted(now)

    def give_up_queued(self) -> None:
        """Begin no further read."""
        while self._queue:
            self._end(self._queue.popleft(), None, "promotions_given_up")

    def pump(self) -> None:
        """Ask tiers for what is queued, as far as staging is free."""
        while self._queue and self._staging.has_room(self._reading_nbytes.total(), self._queue[0].slot_nbytes):
            fetch = self._queue.popleft()
            if fetch.chunk.state is ChunkState.DROPPED:
                self._end(fetch, None, "promotions_failed")
                continue
            self._queued_nbytes[fetch.tier] -= fetch.slot_nbytes
            self._reading_nbytes[fetch.tier] += fetch.slot_nbytes
            self._begin(fetch)

    def check_invariants(self) -> None:
        """Assert the module's laws. For tests."""
        is_queued, queued, reading = set(map(id, self._queue)), Counter[int](), Counter[int]()
        for key, fetch in self._fetches.items():
            assert fetch.chunk.key == key
            assert fetch.chunk.state is not ChunkState.SEALED
            (queued if id(fetch) in is_queued else reading)[fetch.tier] += fetch.slot_nbytes
        assert (queued, reading) == (+self._queued_nbytes, +self._reading_nbytes)
        assert self._reserved_nbytes == queued.total() + reading.total()

    def _give_up_unwanted(self, now: float) -> None:
        queue, self._queue, self._expires_at = self._queue, deque(), math.inf
        while queue:
            fetch = queue.pop()  # Children first: a parent is of use to each that is left.
            until = fetch.wanted_until
            if until <= now and fetch.chunk.first_child is None:
                self._end(fetch, None, "promotions_given_up")
                continue
            self._queue.appendleft(fetch)
            if until > now:
                self._expires_at = min(self._expires_at, until)
        self.pump()

    # ── what there is ───────────────────────────────────────────────────────────────────────────────────────────

    def _match(self, keys: Sequence[ChunkKey]) -> list[Place]:
        leading: list[Place] = list(self._index.match(keys))
        for start in range(len(leading), len(keys), _MATCHED_AT_ONCE):
            places = self._find(keys[start : start + _MATCHED_AT_ONCE])
            there = [place for place in places if place is not None]
            if len(there) < len(places):
                return leading + there[: places.index(None)]
            leading += there
        return leading

    def _find(self, keys: Sequence[ChunkKey]) -> list[Place | None]:
        places: list[Place | None] = list(self._index.find_sealed(keys))
        for number, tier in enumerate(self._staging.tiers):
            missing = [at for at, place in enumerate(places) if place is None]
            for at, nbytes in zip(missing, tier.find([keys[at] for at in missing]), strict=True):
                if nbytes is not None:
                    places[at] = self._place(keys[at], Stored(number, nbytes))
        return places

    def _place(self, key: ChunkKey, stored: Stored) -> Place | None:
        """Return where a chunk is that a tier holds and nobody can read in the pool."""
        chunk = self._index.get(key)
        if chunk is not None:
            return chunk
        # A read whose chunk was dropped must end before the next one begins.
        return stored if key not in self._fetches and self._reserver.fits(stored.slot_nbytes) else None

    # ── what is worth it ────────────────────────────────────────────────────────────────────────────────────────

    def _worthwhile(self, wanted: Wanted, places: Places, num_found: int, num_total: int) -> int:
        """Return the longest prefix that is read sooner than computed, or no more than is found."""
        target = num_total
        while target > num_found:
            nbytes = Counter[int]()
            for _, _, stored in _missing(wanted, places, target):
                nbytes[stored.tier] += stored.slot_nbytes
            if not wanted.chunk_s or self._seconds(nbytes) <= (target - num_found) * wanted.chunk_s:
                return target
            half = num_found + (target - num_found) // 2
            target = longest(places, wanted.needs, half, lambda place: place is not None)
        return num_found

    def _seconds(self, nbytes: Counter[int]) -> float:
        """Return how long it takes to read so many bytes of each tier behind all that is queued."""
        return max(
            (
                tier.read_seconds(nbytes[number] + self._queued_nbytes[number])
                for number, tier in enumerate(self._staging.tiers)
                if nbytes[number] + self._queued_nbytes[number] + self._reading_nbytes[number]
            ),
            default=0.0,
        )

    # ── reading ─────────────────────────────────────────────────────────────────────────────────────────────────

    def _reserve_prefix(self, wanted: Wanted, places: dict[Row, list[Place | None]], target: int) -> None:
        """Reserve what a prefix lacks, in its order, until there is no more room; ``places`` is brought up to date."""
        for number, row, stored in _missing(wanted, places, target):
            is_chained = wanted.needs[row.group].kind is GroupKind.FULL
            parent = places[row][number - 1] if is_chained and number else None
            assert not isinstance(parent, Stored)
            chunk = self._reserve(wanted, wanted.key(row, number), parent, stored)
            if chunk is None:
                return
            places[row][number] = chunk

    def _reserve_tail(self, wanted: Wanted, places: Places, tail_found: int) -> None:
        for number in range(len(wanted.tails), tail_found, -1):
            keys = [chunk_keys([wanted.tails[number - 1]], group=row.group, shard=row.shard)[0] for row in places]
            tails = self._find(keys)
            if None in tails:
                continue
            for there, key, place in zip(places.values(), keys, tails, strict=True):
                parent = there[len(wanted.digests) - 1] if wanted.digests else None
                if isinstance(place, Stored) and not isinstance(parent, Stored):
                    self._reserve(wanted, key, parent, place)
            self._note_asked(wanted, keys)
            return

    def _note_asked(self, wanted: Wanted, keys: Sequence[ChunkKey]) -> None:
        for key in keys if self._fetches else ():
            if (fetch := self._fetches.get(key)) is not None:
                fetch.asked[wanted.session] = wanted.until
        self._expires_at = min(self._expires_at, wanted.until)

    def _reserve(self, wanted: Wanted, key: ChunkKey, parent: Chunk | None, stored: Stored) -> Chunk | None:
        """Queue a read; None if there is no room for it."""
        has_room = self._reserved_nbytes + stored.slot_nbytes <= self._reserved_nbytes_max
        owner = self._staging.tiers[stored.tier].owner(key) if has_room else None
        if owner is None or isinstance(
            slot_offset := self._reserver.allocate(stored.slot_nbytes, below=parent, owner=owner), NoSlot
        ):
            self.counters["promotions_refused"] += 1
            return None
        chunk = self._index.reserve(key, parent, slot_offset, stored.slot_nbytes, owner=owner)
        parent_key = parent.key if parent is not None else None
        fetch = _Fetch(chunk, stored.tier, parent_key, stored.slot_nbytes, wanted.asked_at)
        self._fetches[key] = fetch
        self._note_asked(wanted, [key])
        self._queue.append(fetch)
        self._queued_nbytes[fetch.tier] += fetch.slot_nbytes
        self._reserved_nbytes += fetch.slot_nbytes
        return chunk

    def _begin(self, fetch: _Fetch) -> None:
        target = self._staging.view(fetch.chunk.slot_offset, fetch.slot_nbytes)
        tier = self._staging.tiers[fetch.tier]
        tier.fetch(fetch.chunk.key, target, self._staging.on_loop(lambda stored: self._fetched(fetch, stored)))

    def _fetched(self, fetch: _Fetch, stored: StoredChunk | None) -> None:
        self._reading_nbytes[fetch.tier] -= fetch.slot_nbytes
        self._queued_nbytes[fetch.tier] += fetch.slot_nbytes
        self._end(fetch, stored, "promotions_failed")
        self.pump()

    def _end(self, fetch: _Fetch, stored: StoredChunk | None, failure: str) -> None:
        """Publish or abort a read that is over, and that was counted as queued."""
        self._queued_nbytes[fetch.tier] -= fetch.slot_nbytes
        self._reserved_nbytes -= fetch.slot_nbytes
        del self._fetches[fetch.chunk.key]
        if stored is None or not _is_as_expected(fetch, stored):
            self.counters[failure] += 1
            self._index.abort(fetch.chunk)
        elif self._index.seal(fetch.chunk, stored.checksum, stored.nbytes):
            self.counters["chunks_promoted"] += 1
            self.counters["bytes_promoted"] += stored.nbytes
            self._on_promoted(fetch.asked_at)


def _is_as_expected(fetch: _Fetch, stored: StoredChunk) -> bool:
    return (
        (stored.key, stored.parent, stored.slot_nbytes) == (fetch.chunk.key, fetch.parent, fetch.slot_nbytes)
        and stored.owner == fetch.chunk.owner
        and 0 < stored.nbytes <= fetch.slot_nbytes
    )  # fmt: skip


def _is_coming(place: object) -> bool:
    """Return whether a chunk is in the pool or on its way, and was not evicted for others of the same prefix."""
    return isinstance(place, Chunk) and place.state is not ChunkState.DROPPED


def _is_sealed(place: Place | None) -> TypeGuard[Chunk]:
    return isinstance(place, Chunk) and place.state is ChunkState.SEALED


def _needed(wanted: Wanted, places: Places, target: int) -> Iterator[Place | None]:
    for row, there in places.items():
        yield from there[first_needed(wanted.needs[row.group], target) : target]


def _missing(wanted: Wanted, places: Places, target: int) -> list[tuple[int, Row, Stored]]:
    """Return what a prefix of so many chunks needs and only a tier has, in the order of the prefix."""
    missing = []
    for row, there in places.items():
        for number in range(first_needed(wanted.needs[row.group], target), target):
            place = there[number]
            if isinstance(place, Stored):
                missing.append((number, row, place))
    return sorted(missing, key=lambda one: one[0])
