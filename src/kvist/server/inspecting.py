"""What people and their tools are told: who is connected, and where chunks are.

The law: looking changes nothing. No lease, no use, no read comes of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from kvist.index.chunk_index import ChunkIndex
from kvist.index.prefixes import longest
from kvist.index.tenants import Tenants
from kvist.model.coverage import Need
from kvist.model.keys import Digest, chunk_keys
from kvist.model.owners import OTHERS
from kvist.model.rows import Row, RowMemory
from kvist.server.sessions import Session
from kvist.storage.base import TierStats
from kvist.tiering.controller import TierController
from kvist.wire import messages as wire

_TENANTS_MAX: Final = 64
"""Lines of a status, the largest tenants'."""
_NOWHERE, _POOL, _FIRST_TIER = 0, 1, 2


def describe_session(session: Session, now: float) -> wire.SessionStatus:
    """Return what is known of a connected process."""
    registration = session.registration
    hello = session.hello
    return wire.SessionStatus(
        id=session.id,
        pid=session.peer.pid,
        uid=session.peer.uid,
        engine_id=hello.engine_id,
        name=hello.name,
        connected_s=now - session.connected_at,
        serves=hello.serves,
        needs=hello.needs,
        facts=hello.facts,
        lane="" if registration is None else "daemon" if registration.orders is None else "engine",
        memory="" if registration is None else registration.handles[0].lane,
        rows=[] if registration is None else [_describe_row(held) for held in registration.rows],
        texts=[] if registration is None else list(registration.texts),
        num_copies_in_flight=len(session.jobs),
        counters=dict(session.counters),
    )


def locate(
    request_id: int, digests: Sequence[Digest], needs: Sequence[Need], index: ChunkIndex, tiers: TierController
) -> wire.Found:
    """Return where the chunks of a prefix are, row by row."""
    places: dict[Row, list[int]] = {}
    for group, need in enumerate(needs):
        for shard in range(need.num_shards):
            keys = chunk_keys(digests, group=group, shard=shard)
            behind = tiers.locate(keys)
            places[Row(group, shard)] = [
                _POOL if chunk is not None else _NOWHERE if tier is None else _FIRST_TIER + tier
                for chunk, tier in zip(index.find_sealed(keys), behind, strict=True)
            ]
    return wire.Found(
        request_id,
        longest(places, needs, len(digests), lambda place: place == _POOL),
        longest(places, needs, len(digests), bool),
        [name for name, _ in tiers.stats()],
        [wire.FoundRow(row.group, row.shard, bytes(there)) for row, there in places.items()],
    )


def describe_tier(name: str, stats: TierStats) -> wire.TierStatus:
    """Return a tier's figures as they travel."""
    return wire.TierStatus(
        name, stats.capacity_nbytes, stats.used_nbytes, stats.num_chunks, stats.read_rate, stats.write_rate,
        stats.num_queued_reads, stats.num_queued_writes, stats.off_reason, stats.counters,
    )  # fmt: skip


def describe_tenants(tenants: Tenants) -> list[wire.TenantStatus]:
    """Return a line for each of the largest tenants, and one for all others."""
    lines = [
        wire.TenantStatus(one.name, one.nbytes, one.num_chunks, one.quota_nbytes or 0, one.num_evicted)
        for one in sorted(tenants, key=lambda one: one.nbytes, reverse=True)
    ]
    lines, others = lines[:_TENANTS_MAX], lines[_TENANTS_MAX:]
    num_evicted = tenants.num_evicted_before + sum(one.num_evicted for one in others)
    if others or num_evicted:
        nbytes, num_chunks = sum(one.nbytes for one in others), sum(one.num_chunks for one in others)
        lines.append(wire.TenantStatus(OTHERS, nbytes, num_chunks, 0, num_evicted))
    return lines


def _describe_row(held: RowMemory) -> wire.SessionRow:
    group = held.group
    return wire.SessionRow(
        held.row.group, held.row.shard, group.kind.value, group.block_tokens, group.window, len(group.planes),
        group.num_blocks, held.chunk_nbytes,
    )  # fmt: skip
