"""The options of the daemon as flags: each key of its configuration is one, in every command that has them.

The law: the configuration tree is the only list of keys. A key without a line of help here fails the tests.
"""

from __future__ import annotations

import functools
import inspect
import typing
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, Final

import typer

from kvist.server.config import ServeConfig

HELP: Final = {
    "socket": "Path of the daemon's Unix socket.",
    "pool": "Host memory for the cache, such as 8GiB.",
    "lease_ttl_s": "Seconds that a looked-up prefix is held.",
    "allow_uids": "A user, besides your own and root, who may connect; repeat it for more.",
    "socket_group": "A group, by name or number, whose members may connect too.",
    "copy_threads": "Threads that copy host memory.",
    "sessions_max": "Most connections.",
    "requests_max": "Most unanswered requests of one connection.",
    "copies_max": "Most queued copies of one device.",
    "isolate": "Give the pool to no engine: the daemon alone copies.",
    "tenant_quota": "Most bytes of the pool for a tenant; repeat it. * is every other.",
    "disk": "A directory for chunks beyond the pool; repeat it for more drives.",
    "disk_size": "Bytes on disk, in all directories together, such as 200GiB.",
    "disk_write": "Write a chunk to disk always, or on its second-use.",
    "drain_s": "Seconds that a stop waits for what has begun.",
    "http": "HOST:PORT where HTTP is answered, or off.",
    "http_token_file": "A file with what HTTP callers must present.",
    "log_level": "debug, info, warning or error.",
}
METAVARS: Final = {
    "socket": "PATH",
    "disk": "PATH",
    "pool": "BYTES",
    "disk_size": "BYTES",
    "allow_uids": "UID",
    "socket_group": "GROUP",
    "tenant_quota": "NAME=BYTES",
    "http_token_file": "PATH",
}

ConfigFile = Annotated[Path | None, typer.Option("--config", help="A TOML file with any of the options.")]


def with_flags(command: Callable[..., None]) -> Callable[..., None]:
    """Give a command a flag for each key; it gets those that were used as its first argument, by key."""
    arguments = list(inspect.signature(command, eval_str=True).parameters.values())[1:]
    own = [argument.replace(kind=inspect.Parameter.KEYWORD_ONLY) for argument in arguments]
    flags = [_flag(name) for name in ServeConfig.__struct_fields__]

    @functools.wraps(command)
    def call(**arguments: Any) -> None:  # noqa: ANN401 -- options of many types
        used = {name: arguments.pop(name) for name in ServeConfig.__struct_fields__}
        command({name: value for name, value in used.items() if value not in (None, [])}, **arguments)

    call.__signature__ = inspect.Signature([*flags, *own])  # type: ignore[attr-defined]  # What typer reads.
    call.__annotations__ = {parameter.name: parameter.annotation for parameter in [*flags, *own]}
    return call


def _flag(name: str) -> inspect.Parameter:
    kind = typing.get_type_hints(ServeConfig)[name]
    is_list = typing.get_origin(kind) is tuple
    option = typer.Option(f"--{name.replace('_', '-')}", help=HELP[name], metavar=METAVARS.get(name))
    if kind is bool:
        option = typer.Option(f"--{name.replace('_', '-')}/--no-{name.replace('_', '-')}", help=HELP[name])
        annotation: Any = Annotated[bool | None, option]
    else:
        annotation = Annotated[list[str] | None if is_list else str | None, option]
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=annotation)
