"""Tenants of a real daemon: who floods, who purges, and what a restart finds of it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from kvist.wire import messages as wire
from tests.e2e.test_disk import arguments, connected, look_up_all
from tests.support.daemon import Daemon
from tests.support.engine import FakeEngine
from tests.support.waiting import wait_until


def prompt_of(number: int) -> list[int]:
    """Return a prompt of five chunks of its own."""
    return list(range(1000 * number, 1000 * number + 40))


def purge(engine: FakeEngine, tenant: str | None = None, model: str | None = None) -> wire.PurgeReply:
    reply = engine.client.call(lambda number: wire.Purge(number, tenant, model))
    assert isinstance(reply, wire.PurgeReply)
    return reply


def test_a_tenant_that_floods_leaves_others_theirs(tmp_path: Path):
    """What one stores many times over the pool evicts its own, within its quota and without one."""
    for quota in ([], ["--tenant-quota", "loud=64KiB", "--tenant-quota", "*=128KiB"]):
        with Daemon(tmp_path, pool="256KiB", arguments=quota) as daemon, connected(daemon) as engine:
            engine.tenant = "quiet"
            assert engine.store(prompt_of(0)).num_stored == 5
            engine.tenant = "loud"
            for number in range(1, 60):
                assert engine.store(prompt_of(number)).num_refused == 0
            assert engine.num_found(prompt_of(0)) == 5
            assert engine.num_found(prompt_of(59)) == 5
            tenants = {tenant.name: tenant for tenant in daemon.status().tenants}
            assert tenants["quiet"].num_evicted == 0
            assert tenants["loud"].num_evicted > 200
            if quota:
                assert tenants["loud"].nbytes <= tenants["loud"].quota_nbytes == 64 * 1024


def test_a_purge_takes_the_named_and_leaves_what_is_held(tmp_path: Path):
    """By tenant, by model, then all of it: what a lease holds stays until it is released."""
    with Daemon(tmp_path) as daemon, connected(daemon) as engine:
        for number, tenant in enumerate(("a", "a", "b", "")):
            engine.tenant = tenant
            engine.store(prompt_of(number))
        found = engine.look_up(prompt_of(0))
        reply = purge(engine, "a")
        assert (reply.num_chunks, reply.num_kept) == (5, 5)
        assert [engine.num_found(prompt_of(number)) for number in range(4)] == [5, 0, 5, 5]
        assert engine.load(prompt_of(0), found) == []
        reply = purge(engine, "a")
        assert (reply.num_chunks, reply.num_kept) == (5, 0)
        assert purge(engine, model="unknown").num_chunks == 0
        assert (purge(engine, model="model", tenant="b").num_chunks, purge(engine).num_chunks) == (5, 5)
        assert daemon.status().pool_used_nbytes == 0


def test_what_was_purged_stays_away_after_a_restart(tmp_path: Path):
    """A purge takes a tenant's chunks from the disk, and a directory keeps whose the others are."""
    disk = tmp_path / "disk"
    disk.mkdir()
    with Daemon(tmp_path, arguments=arguments(disk)) as daemon:
        with connected(daemon) as engine:
            for number, tenant in enumerate(("a", "b", "c")):
                engine.tenant = tenant
                engine.store(prompt_of(number))
            wait_until(lambda: daemon.count("chunks_demoted") == 15, what="writes")
            assert purge(engine, "a").tiers == {"disk": 5}
        assert daemon.stop() == 0
        command = [sys.executable, "-m", "kvist", "disk", "purge", str(disk), "--tenant", "b", "--json"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
        assert json.loads(done.stdout) == {"path": str(disk), "purged": True, "num_chunks": 5}
        daemon.start()
        with connected(daemon) as engine:
            assert [look_up_all(engine, prompt_of(number)).num_chunks for number in range(3)] == [0, 0, 5]
            assert [(tenant.name, tenant.num_chunks) for tenant in daemon.status().tenants] == [("c", 5)]
            assert purge(engine, "c").tiers == {"disk": 5}


def test_the_command_line_shows_tenants(tmp_path: Path):
    """``kvist status`` has a line for each tenant where there are several."""
    with Daemon(tmp_path) as daemon, connected(daemon) as engine:
        for number, tenant in enumerate(("team-a", "")):
            engine.tenant = tenant
            engine.store(prompt_of(number))
        command = [sys.executable, "-m", "kvist", "status", "--socket", daemon.path]
        shown = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout
        lines = {words[0]: words[1:] for line in shown.splitlines() if (words := line.split())}
        assert lines["team-a"] == ["20", "KiB", "5", "0"]
        assert lines["(no"] == ["name)", "20", "KiB", "5", "0"]
