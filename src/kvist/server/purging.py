"""What some owners have, out of the pool and the tiers, while serving goes on.

The laws: what a purge has dropped is found no more, in no tier; what is pinned or being written stays, and is counted.
No turn of the loop takes longer for it than for a request. Each purge is answered once, when nothing is left to drop.
"""

from __future__ import annotations

import logging
import os
from collections import Counter
from collections.abc import Callable, Iterator

from kvist.errors import NotPermitted
from kvist.index.chunk_index import ChunkIndex
from kvist.model.owners import IsOwner, owned_by
from kvist.server.parsing import parse_owner
from kvist.server.sessions import Peer
from kvist.tiering.controller import TierController
from kvist.wire import messages as wire

logger = logging.getLogger(__name__)


class Purger:
    """Drops chunks by owner, a slice each time that the loop comes round to it."""

    def __init__(self, index: ChunkIndex, tiers: TierController, post: Callable[[Callable[[], None]], None]) -> None:
        self._index = index
        self._tiers = tiers
        self._post = post
        self.counters: Counter[str] = Counter()
        """Since the start."""

    def begin(self, peer: Peer, request: wire.Purge, on_done: Callable[[wire.PurgeReply], None]) -> None:
        """Begin a purge; ``on_done`` is called with what came of it.

        Raises:
            NotPermitted: the peer is neither root nor the daemon's own user.
            Malformed: nobody can have such a name.
        """
        if peer.uid not in (os.getuid(), 0):
            raise NotPermitted(f"user {peer.uid} may not purge; the daemon's user {os.getuid()} and root may")
        parse_owner(request.tenant or "", request.model or "")
        logger.info("purge begun pid=%d tenant=%r model=%r", peer.pid, request.tenant, request.model)
        self._go_on(self._purge(owned_by(request.tenant, request.model), request.id, on_done))

    def _go_on(self, steps: Iterator[None]) -> None:
        """Take the next step behind what else has come meanwhile, and so on."""
        self._post(lambda: self._go_on(steps) if next(steps, self) is not self else None)

    def _purge(self, is_owner: IsOwner, request_id: int, on_done: Callable[[wire.PurgeReply], None]) -> Iterator[None]:
        """Purge a slice at each step: the tiers first, so that what was on its way to them lets go of the pool."""
        num_of_tiers: Counter[str] = Counter()
        num_chunks = nbytes = num_kept = 0
        with self._tiers.barring(is_owner):
            for name, num in self._tiers.purge(is_owner):
                num_of_tiers[name] += num
                yield
            for purged in self._index.purge(is_owner):
                num_chunks += purged.num_dropped
                nbytes += purged.nbytes
                num_kept += purged.num_kept
                yield
        self.counters["chunks_purged"] += num_chunks
        logger.info("purge done chunks=%d nbytes=%d kept=%d tiers=%s", num_chunks, nbytes, num_kept, dict(num_of_tiers))
        on_done(wire.PurgeReply(request_id, num_chunks, nbytes, num_kept, dict(num_of_tiers)))
