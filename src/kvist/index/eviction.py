"""Which chunk goes first, among those that may go."""

from __future__ import annotations

from typing import Protocol


class EvictionPolicy(Protocol):
    """Ranks a tenant's chunks. The index offers only unpinned leaves of the prefix tree, so it never sees structure."""

    def rank(self, *, last_used: int, num_hits: int) -> int:
        """Return a chunk's rank; the lowest goes first.

        ``last_used`` is the index's clock, which advances by one with every touched prefix, when the chunk was last
        stored or looked up; ``num_hits`` counts its lookups. The rank of a chunk must not fall as either grows.
        """
        ...


class LeastRecentlyUsed:
    """The longest unused goes first. With leaves only, a prefix is eaten from its end."""

    def rank(self, *, last_used: int, num_hits: int) -> int:
        return last_used
