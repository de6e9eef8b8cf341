"""What tenants may have in a world, and what a purge must leave of it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvist.wire import messages as wire

if TYPE_CHECKING:
    from tests.simulation.world import World


def step_purge(world: World) -> None:
    """Let somebody purge a tenant, or everything."""
    kind, engine = world.pick()
    tenant = world.chance.choice([kind.space, kind.space, None])
    engine.send(lambda number: wire.Purge(number, tenant))


def check_purged(world: World, request: wire.Request, reply: wire.PurgeReply) -> None:
    """No tier has anything left of the tenant."""
    assert isinstance(request, wire.Purge)
    for tier in world.daemon.tiers:
        assert not any(request.tenant in (None, chunk.owner.tenant) for chunk, _ in tier.chunks.values())
    world.num_seen["purged"] += reply.num_chunks
    world.num_seen["kept at a purge"] += reply.num_kept
    world.num_seen["purged from a tier"] += sum(reply.tiers.values())


def check_tenants(world: World) -> None:
    """Lines of the status are true: together they are what is taken, and nobody is above a quota."""
    status = world.daemon.status()
    assert sum(line.nbytes for line in status.tenants) == status.pool_used_nbytes
    assert all(line.nbytes <= (line.quota_nbytes or line.nbytes) for line in status.tenants)
    assert sum(line.num_evicted for line in status.tenants) == status.counters["chunks_evicted"]
