"""Whatever happens to chunks in whatever order: the forest stays whole, and each slot comes back exactly once."""

from dataclasses import dataclass, field

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kvist.index.chunk_index import Chunk, ChunkIndex, ChunkState
from kvist.index.eviction import LeastRecentlyUsed
from kvist.model.keys import ChunkKey

Path = tuple[int, ...]
PATHS = [(a, *rest) for a in range(2) for rest in ((), (0,), (1,), (0, 0), (0, 1), (0, 0, 0), (0, 0, 1), (0, 0, 0, 0))]
"""Prefixes of prompts: two roots, each with a few branches."""


@dataclass(eq=False)
class Known:
    """What the model knows of a chunk, in the catalogue or doomed."""

    path: Path
    chunk: Chunk
    slot: int
    parent: "Known | None"
    is_sealed: bool = False
    is_dropped: bool = False
    pins: int = 0
    last_used: int = 0
    children: list["Known"] = field(default_factory=list)


class Forest(RuleBasedStateMachine):
    """Drives an index and a plain tree side by side.

    A slot is a running number; its bytes are 100 + the number, of which a tail fills half.
    """

    def __init__(self) -> None:
        super().__init__()
        self.index = ChunkIndex(LeastRecentlyUsed(), self.slot_came_back)
        self.live_slots: set[int] = set()
        self.num_slots = 0
        self.present: dict[Path, Known] = {}
        self.doomed: list[Known] = []
        self.now = 0
        self.num_evicted = 0

    def slot_came_back(self, slot: int, nbytes: int) -> None:
        assert nbytes == 100 + slot
        assert slot in self.live_slots, "freed twice, or never given out"
        self.live_slots.remove(slot)

    @initialize()
    def begin(self) -> None:
        assert self.index.evict() is None

    @rule(path=st.sampled_from(PATHS), is_tail=st.booleans())
    def reserve(self, path: Path, *, is_tail: bool) -> None:
        parent = self.present.get(path[:-1])
        if path in self.present or (len(path) > 1 and parent is None):
            return
        self.num_slots += 1
        self.live_slots.add(self.num_slots)
        above = parent.chunk if parent else None
        slot_nbytes = 100 + self.num_slots
        nbytes = slot_nbytes // 2 if is_tail else slot_nbytes
        chunk = self.index.reserve(ChunkKey(bytes(path)), above, self.num_slots, nbytes, slot_nbytes)
        self.now += 1
        known = self.present[path] = Known(path, chunk, self.num_slots, parent, last_used=self.now)
        if parent:
            parent.children.append(known)

    @precondition(lambda self: self.being_written())
    @rule(data=st.data())
    def seal(self, data: st.DataObject) -> None:
        known = data.draw(st.sampled_from(self.being_written()))
        assert self.index.seal(known.chunk, b"sum") is not known.is_dropped
        known.is_sealed = True
        self.forget_if_unheld(known)

    @precondition(lambda self: self.being_written())
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        known = data.draw(st.sampled_from(self.being_written()))
        self.index.abort(known.chunk)
        if not known.is_dropped:
            known.is_sealed = True  # Its copy is over: nothing holds it any more.
            self.drop_in_model(known)
        else:
            self.doomed.remove(known)

    @precondition(lambda self: self.sealed())
    @rule(data=st.data())
    def pin(self, data: st.DataObject) -> None:
        known = data.draw(st.sampled_from(self.sealed()))
        self.index.pin(known.chunk)
        known.pins += 1

    @precondition(lambda self: self.pinned())
    @rule(data=st.data())
    def unpin(self, data: st.DataObject) -> None:
        known = data.draw(st.sampled_from(self.pinned()))
        self.index.unpin(known.chunk)
        known.pins -= 1
        self.forget_if_unheld(known)

    @precondition(lambda self: self.present or self.doomed)
    @rule(data=st.data())
    def drop(self, data: st.DataObject) -> None:
        known = data.draw(st.sampled_from([*self.present.values(), *self.doomed]))
        self.index.drop(known.chunk)
        if not known.is_dropped:
            self.drop_in_model(known)

    @rule(path=st.sampled_from(PATHS))
    def look_up(self, path: Path) -> None:
        prefixes = [path[:length] for length in range(1, len(path) + 1)]
        found = self.index.match([ChunkKey(bytes(prefix)) for prefix in prefixes])
        expected = []
        for prefix in prefixes:
            known = self.present.get(prefix)
            if known is None or not known.is_sealed:
                break
            expected.append(known)
        assert found == [known.chunk for known in expected]
        self.index.touch(found)
        self.now += 1
        for known in expected:
            known.last_used = self.now

    @rule()
    def evict(self) -> None:
        leaves = [known for known in self.sealed() if not known.pins and not known.children]
        nbytes = self.index.evict()
        if not leaves:
            assert nbytes is None
            return
        (victim,) = [known for known in leaves if known.chunk.state is ChunkState.DROPPED]
        assert nbytes == 100 + victim.slot
        assert victim.last_used == min(known.last_used for known in leaves)
        self.num_evicted += 1
        self.drop_in_model(victim)

    @invariant()
    def laws_hold(self) -> None:
        self.index.check_invariants()
        held = {known.slot for known in (*self.present.values(), *self.doomed)}
        assert self.live_slots == held
        stats = self.index.stats()
        assert stats.num_sealed == len(self.sealed())
        assert stats.num_reserved == len(self.present) - len(self.sealed())
        assert stats.num_pinned == len(self.pinned())
        assert stats.num_doomed == len(self.doomed)
        assert stats.num_evicted == self.num_evicted
        for path, known in self.present.items():
            assert self.index.get(ChunkKey(bytes(path))) is known.chunk
            assert known.chunk.pins == known.pins

    def teardown(self) -> None:
        """Once everything is let go, everything can be evicted, and every slot is back."""
        for known in self.being_written():
            self.index.seal(known.chunk, b"sum")
        for known in (*self.present.values(), *self.doomed):
            for _ in range(known.pins):
                self.index.unpin(known.chunk)
        while self.index.evict() is not None:
            self.index.check_invariants()
        assert not self.live_slots
        assert self.index.stats().num_sealed == self.index.stats().num_pinned == self.index.stats().num_doomed == 0

    def being_written(self) -> list[Known]:
        return [known for known in (*self.present.values(), *self.doomed) if not known.is_sealed]

    def sealed(self) -> list[Known]:
        return [known for known in self.present.values() if known.is_sealed]

    def pinned(self) -> list[Known]:
        return [known for known in (*self.present.values(), *self.doomed) if known.pins]

    def drop_in_model(self, known: Known) -> None:
        for child in [*known.children]:
            self.drop_in_model(child)
        del self.present[known.path]
        if known.parent:
            known.parent.children.remove(known)
        known.is_dropped = True
        self.doomed.append(known)
        self.forget_if_unheld(known)

    def forget_if_unheld(self, known: Known) -> None:
        if known.is_dropped and known.is_sealed and not known.pins:
            self.doomed.remove(known)


TestForest = Forest.TestCase
TestForest.settings = settings(max_examples=120, stateful_step_count=40)


class Cache:
    """An index over ``num_slots_max`` slots, stored to and looked up as the service does it."""

    def __init__(self, num_slots_max: int) -> None:
        self.free = list(range(num_slots_max))
        self.index = ChunkIndex(LeastRecentlyUsed(), lambda slot, _: self.free.append(slot))

    def store(self, *names: str) -> list[Chunk]:
        parent: Chunk | None = None
        chunks = []
        for name in names:
            key = ChunkKey(name.encode())
            chunk = self.index.get(key)
            if chunk is None:
                while not self.free:
                    assert self.index.evict() is not None
                chunk = self.index.reserve(key, parent, self.free.pop(), 1)
                self.index.seal(chunk, b"")
            parent = chunk
            chunks.append(chunk)
        self.index.check_invariants()
        return chunks

    def look_up(self, *names: str) -> int:
        found = self.index.match([ChunkKey(name.encode()) for name in names])
        self.index.touch(found)
        return len(found)

    def holds(self, name: str) -> bool:
        return self.index.get(ChunkKey(name.encode())) is not None


@pytest.mark.parametrize("calls", [[("a1", "a2", "a3")], [("a1",), ("a1", "a2"), ("a1", "a2", "a3")]], ids=str)
def test_a_prefix_is_eaten_from_its_end(calls: list[tuple[str, ...]]):
    """With room for 3, a1..a3 and then b1 leave a1 and a2, however many calls stored them, and read or not."""
    for num_lookups in range(3):
        cache = Cache(3)
        for names in calls:
            cache.store(*names)
        for _ in range(num_lookups):
            assert cache.look_up("a1", "a2", "a3") == 3
        cache.store("b1")
        assert not cache.holds("a3")
        assert cache.look_up("a1", "a2", "a3") == 2
        assert cache.look_up("b1") == 1


def test_a_new_chunk_is_not_the_first_victim():
    """Being stored counts as a use: what was never read yet outlives what was read before it came."""
    cache = Cache(3)
    cache.store("a1")
    cache.store("b1")
    assert cache.look_up("a1") == cache.look_up("b1") == 1
    cache.store("c1")
    cache.store("d1")
    assert (cache.look_up("a1"), cache.look_up("b1"), cache.look_up("c1"), cache.look_up("d1")) == (0, 1, 1, 1)


def test_a_read_prefix_outlives_an_unread_one():
    """A lookup makes all of a prefix the youngest."""
    cache = Cache(4)
    cache.store("a1", "a2")
    cache.store("b1", "b2")
    assert cache.look_up("a1", "a2") == 2
    cache.store("c1", "c2")
    assert (cache.look_up("a1", "a2"), cache.look_up("b1", "b2")) == (2, 0)


def test_a_pinned_chunk_is_never_evicted():
    """A pin keeps a chunk and all above it; the slots that are left are all that eviction yields."""
    cache = Cache(6)
    *_, a3 = cache.store("a1", "a2", "a3")
    cache.store("b1", "b2", "b3")
    cache.index.pin(a3)
    assert [cache.index.evict() for _ in range(4)] == [1, 1, 1, None]
    assert cache.look_up("a1", "a2", "a3") == 3
    cache.index.unpin(a3)
    assert [cache.index.evict() for _ in range(4)] == [1, 1, 1, None]


@pytest.mark.parametrize("end", ["seal", "abort"])
def test_a_chunk_that_is_being_written_protects_its_parent(end: str):
    """While a child is reserved its parent stays; when the write is over, either way, both may go again."""
    cache = Cache(2)
    (parent,) = cache.store("a1")
    child = cache.index.reserve(ChunkKey(b"a2"), parent, cache.free.pop(), 1)
    assert cache.index.evict() is None
    if end == "seal":
        cache.index.seal(child, b"")
    else:
        cache.index.abort(child)
    cache.index.check_invariants()
    while cache.index.evict() is not None:
        pass
    assert sorted(cache.free) == [0, 1]


def test_a_parent_can_be_evicted_once_its_child_was_dropped():
    """Dropping a leaf leaves its parent a leaf, which eviction finds."""
    cache = Cache(2)
    parent, child = cache.store("a1", "a2")
    cache.index.pin(child)
    assert cache.index.evict() is None
    cache.index.drop(child)
    cache.index.unpin(child)
    assert cache.index.evict() == 1
    assert parent.state is ChunkState.DROPPED


def test_dropped_chunks_give_their_slots_back_with_the_last_hold():
    """A corrupt chunk takes what hangs below it along, at once for readers, and for slots when the last pin goes."""
    cache = Cache(4)
    chunks = cache.store("a1", "a2", "a3", "a4")
    for chunk in (chunks[1], chunks[1], chunks[2]):
        cache.index.pin(chunk)
    cache.index.drop(chunks[1])
    assert cache.look_up("a1", "a2", "a3", "a4") == 1
    assert sorted(cache.free) == [chunks[3].slot_offset]
    cache.index.unpin(chunks[1])
    cache.index.unpin(chunks[2])
    assert sorted(cache.free) == sorted([chunks[3].slot_offset, chunks[2].slot_offset])
    cache.index.unpin(chunks[1])
    assert len(cache.free) == 3
    cache.index.check_invariants()
    assert cache.store("a1", "a2")[1] is not chunks[1]


WAYS_OUT = {
    "aborted": lambda index, chunk: index.abort(chunk),
    "dropped while it is written, then sealed": lambda index, chunk: (index.drop(chunk), index.seal(chunk, b"")),
    "dropped while it is written, then aborted": lambda index, chunk: (index.drop(chunk), index.abort(chunk)),
    "dropped": lambda index, chunk: (index.seal(chunk, b""), index.drop(chunk)),
    "dropped with its parent": lambda index, chunk: (index.seal(chunk, b""), index.drop(chunk.parent)),
    "evicted": lambda index, chunk: (index.seal(chunk, b""), index.evict()),
    "doomed": lambda index, chunk: (
        index.seal(chunk, b""), index.pin(chunk), index.drop(chunk), index.unpin(chunk)
    ),
}  # fmt: skip


@pytest.mark.parametrize("way_out", WAYS_OUT)
def test_a_slot_comes_back_as_large_as_it_was_given_out(way_out: str):
    """Whatever becomes of a tail, what is freed is its slot, once, and not the part of it that the tail fills."""
    freed: list[tuple[int, int]] = []
    index = ChunkIndex(LeastRecentlyUsed(), lambda slot, nbytes: freed.append((slot, nbytes)))
    parent = index.reserve(ChunkKey(b"a1"), None, 7, 300, 300)
    index.seal(parent, b"")
    tail = index.reserve(ChunkKey(b"tail"), parent, 8, 100, 300)
    assert (tail.nbytes, tail.slot_nbytes) == (100, 300)
    WAYS_OUT[way_out](index, tail)
    assert freed == ([(8, 300), (7, 300)] if way_out == "dropped with its parent" else [(8, 300)])
    index.check_invariants()
