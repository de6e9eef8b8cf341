"""``kvist serve`` and ``kvist status``: arguments in, exit codes and text for people out.

Exit codes: 0 done, 1 the daemon is not there or refused, 2 wrong arguments or configuration.
"""

from __future__ import annotations

import logging
import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table

from kvist import __version__
from kvist.cli import disk
from kvist.cli.output import errors, output, print_error, print_json
from kvist.client.client import Client
from kvist.errors import ConfigError, KvistError
from kvist.server.config import ServeConfig, load_config, process_environment
from kvist.server.daemon import run
from kvist.units import format_nbytes
from kvist.wire import messages as wire

app = typer.Typer(add_completion=False, no_args_is_help=True, help="A KV-cache service for LLM inference engines.")
app.add_typer(disk.app, name="disk")

Socket = Annotated[str | None, typer.Option("--socket", help="Path of the daemon's Unix socket.")]


@app.command()
def serve(  # noqa: PLR0913 -- an argument is an option
    pool: Annotated[str | None, typer.Option(help="Host memory for the cache, such as 8GiB.")] = None,
    socket: Socket = None,
    lease_ttl_s: Annotated[float | None, typer.Option(help="Seconds that a looked-up prefix is held.")] = None,
    isolate: Annotated[
        bool | None,
        typer.Option(help="Give the pool to no engine: the daemon alone copies."),
    ] = None,
    tenant_quota: Annotated[
        list[str] | None,
        typer.Option(help="Most bytes of the pool for a tenant; repeat it. * is every other.", metavar="NAME=BYTES"),
    ] = None,
    disk: Annotated[
        list[str] | None,
        typer.Option(help="A directory for chunks beyond the pool; repeat it for more drives.", metavar="PATH"),
    ] = None,
    disk_size: Annotated[str | None, typer.Option(help="Bytes on disk, in all, such as 200GiB.")] = None,
    disk_write: Annotated[str | None, typer.Option(help="Write a chunk always, or on its second-use.")] = None,
    log_level: Annotated[str | None, typer.Option(help="debug, info, warning or error.")] = None,
    config: Annotated[Path | None, typer.Option(help="A TOML file with any of the options.")] = None,
) -> None:
    """Run the daemon of this host until it is told to stop (SIGTERM, Ctrl-C)."""
    flags = {
        "pool": pool, "socket": socket, "lease_ttl_s": lease_ttl_s, "isolate": isolate, "log_level": log_level,
        "tenant_quota": tenant_quota or None, "disk": disk or None, "disk_size": disk_size, "disk_write": disk_write,
    }  # fmt: skip
    try:
        options = load_config(config, flags, process_environment())
        _configure_logging(options.log_level)
        run(options, on_progress=_Progress(options), on_ready=lambda: errors.print("kvist: ready", highlight=False))
    except ConfigError as error:
        print_error(error)
        raise typer.Exit(2) from None


@app.command()
def status(
    socket: Socket = None,
    json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
) -> None:
    """Show what the daemon holds and has done."""
    logging.disable()
    try:
        path = load_config(None, {"socket": socket}, process_environment()).socket_path
        client = Client(path, engine_id="kvist-status", name="kvist status")
        reply = client.call(wire.Status, deadline_s=5.0)
    except KvistError as error:
        print_error(error)
        raise typer.Exit(1) from None
    assert isinstance(reply, wire.StatusReply)
    if json:
        print_json(reply)
    else:
        output.print(_status_table(reply))


@app.command()
def version() -> None:
    """Show the versions of this program and of its protocol."""
    output.print(f"kvist {__version__}, protocol {wire.PROTOCOL_VERSION}", highlight=False)


class _Progress:
    """Tells how much of the pool is present: a line a tenth."""

    def __init__(self, options: ServeConfig) -> None:
        self._nbytes = options.pool
        self._tenth = 0

    def __call__(self, nbytes: int) -> None:
        tenth = 10 * nbytes // self._nbytes
        if tenth > self._tenth:
            self._tenth = tenth
            of = f"{format_nbytes(min(nbytes, self._nbytes))} of {format_nbytes(self._nbytes)}"
            errors.print(f"kvist: pool {of}", highlight=False)


def _status_table(reply: wire.StatusReply) -> Table:
    table = Table("", "now", title=f"kvist daemon, pid {reply.pid}", title_justify="left")
    used = f"{format_nbytes(reply.pool_used_nbytes)} of {format_nbytes(reply.pool_nbytes)}"
    table.add_row("pool", used + (" (draining)" if reply.is_draining else ""))
    table.add_row("chunks", f"{reply.num_sealed} sealed, {reply.num_reserved} being written, {reply.num_pinned} pinned")
    table.add_row("sessions", f"{reply.num_sessions}, {reply.num_registered} with KV memory")
    table.add_row("leases", str(reply.num_leases))
    table.add_row("copies in flight", str(reply.num_copies_in_flight))
    for tenant in reply.tenants if len(reply.tenants) > 1 or any(one.quota_nbytes for one in reply.tenants) else ():
        table.add_row(f"tenant {tenant.name or '(no name)'}", _tenant_line(tenant))
    for tier in reply.tiers:
        table.add_row(tier.name, f"off: {tier.off_reason}" if tier.off_reason else _tier_line(tier))
    table.add_section()
    for name, value in sorted(reply.counters.items()):
        table.add_row(name, format_nbytes(value) if name.startswith("bytes_") else str(value))
    return table


def _tenant_line(tenant: wire.TenantStatus) -> str:
    quota = f" of {format_nbytes(tenant.quota_nbytes)}" if tenant.quota_nbytes else ""
    return f"{format_nbytes(tenant.nbytes)}{quota}, {tenant.num_chunks} chunks; {tenant.num_evicted} evicted"


def _tier_line(tier: wire.TierStatus) -> str:
    used = f"{format_nbytes(tier.used_nbytes)} of {format_nbytes(tier.capacity_nbytes)}, {tier.num_chunks} chunks"
    rates = f"reads {format_nbytes(int(tier.read_rate))}/s, writes {format_nbytes(int(tier.write_rate))}/s"
    return f"{used}; {rates}; {tier.num_queued_reads} reads and {tier.num_queued_writes} writes are queued"


def _configure_logging(level: str) -> None:
    logging.basicConfig(  # noqa: TID251 -- this is the place
        level=level.upper(), stream=sys.stderr, format="%(asctime)s %(levelname)s %(name)s %(message)s"
    )
