"""The daemon's configuration: one frozen tree, from defaults, a TOML file, the environment and flags, in this order.

The law: an unknown key or a value that does not fit stops the start, with the name of the key and of its source. This
is the only module that reads the environment.
"""

from __future__ import annotations

import math
import os
import tomllib
import typing
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import msgspec

from kvist.errors import ConfigError, KeyInvalid
from kvist.model.owners import Quotas
from kvist.server.web import parse_address
from kvist.tiering.controller import WritePolicy
from kvist.units import GIB, parse_nbytes
from kvist.wire.address import SOCKET_PATH_NBYTES_MAX, default_socket_path

_ENVIRONMENT_PREFIX: Final = "KVIST_"
_POOL_NBYTES_MIN: Final = 1 << 16
_SIZES: Final = ("pool", "disk_size")


class ServeConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Options of ``kvist serve``."""

    socket: str = ""
    """Path of the Unix socket; empty for the user's default."""
    pool: int = 4 * GIB
    """Bytes of host memory for chunks."""
    lease_ttl_s: float = 30.0
    """How long a looked-up prefix is held for an engine that neither loads nor releases it."""
    allow_uids: tuple[int, ...] = ()
    """Users besides the daemon's own (and root) who may connect."""
    socket_group: str = ""
    """A group, by name or number, whose members may connect too; empty for none."""
    copy_threads: int = 2
    """Threads that copy host memory."""
    sessions_max: int = 256
    """Open connections; a vLLM engine takes one for its scheduler and one for each worker."""
    requests_max: int = 1024
    """Unanswered requests of one session; beyond them it is overloaded."""
    copies_max: int = 1024
    """Queued copies of one device; beyond them requests are refused as overloaded."""
    tenant_quota: tuple[str, ...] = ()
    """``NAME=BYTES``: most that a tenant has of the pool. ``*`` is every other tenant that has a name, ``""`` those
    who have none."""
    isolate: bool = False
    """Give no engine the pool: the daemon alone copies, and tenants that must not see each other can share it."""
    disk: tuple[str, ...] = ()
    """Directories that keep chunks beyond the pool and beyond this process, one on each drive."""
    disk_size: int = 0
    """Bytes on disk, in all directories together."""
    disk_write: str = WritePolicy.ALWAYS.value
    """When a chunk is written to disk: ``always`` or on its ``second-use``."""
    drain_s: float = 10.0
    """How long a stop waits for copies that have begun, and for the disk."""
    http: str = "127.0.0.1:8437"
    """Where HTTP is answered, as ``host:port``, or ``off``."""
    http_token_file: str = ""
    """A file with what HTTP callers must present; needed where other machines can reach ``http``."""
    log_level: str = "info"
    """``debug``, ``info``, ``warning`` or ``error``."""

    def __post_init__(self) -> None:
        for key in ("copy_threads", "sessions_max", "requests_max", "copies_max", "lease_ttl_s", "drain_s"):
            if not 0 < getattr(self, key) < math.inf:
                raise ConfigError(f"{key}: {getattr(self, key)} is not a positive number")
        if self.pool < _POOL_NBYTES_MIN:
            raise ConfigError(f"pool: {self.pool} bytes are too few; the least is {_POOL_NBYTES_MIN}")
        if self.disk_size < 0:
            raise ConfigError(f"disk_size: {self.disk_size} bytes")
        parse_quotas(self.tenant_quota)
        policies = [policy.value for policy in WritePolicy]
        if self.disk_write not in policies:
            raise ConfigError(f"disk_write: {self.disk_write!r} is none of {', '.join(policies)}")
        if self.log_level not in ("debug", "info", "warning", "error"):
            raise ConfigError(f"log_level: {self.log_level!r} is none of debug, info, warning, error")
        parse_address(self.http)
        if len(self.socket_path.encode()) > SOCKET_PATH_NBYTES_MAX:
            raise ConfigError(
                f"socket: {self.socket_path!r} is longer than the {SOCKET_PATH_NBYTES_MAX} bytes of a Unix address"
            )

    @property
    def quotas(self) -> Quotas:
        """What tenants may have of the pool."""
        return parse_quotas(self.tenant_quota)

    @property
    def socket_path(self) -> str:
        """Where the daemon listens."""
        return self.socket or default_socket_path(os.getuid())


@dataclass(frozen=True, slots=True)
class Settings:
    """A configuration, and where each of its values comes from."""

    config: ServeConfig
    sources: Mapping[str, str]
    """By key: a file's path, ``the environment``, ``the command line`` or ``the default``."""


def load_config(file: Path | None, flags: Mapping[str, Any], environment: Mapping[str, str]) -> ServeConfig:
    """Return the configuration of ``load_settings``.

    Raises:
        ConfigError: as there.
    """
    return load_settings(file, flags, environment).config


def load_settings(file: Path | None, flags: Mapping[str, Any], environment: Mapping[str, str]) -> Settings:
    """Merge defaults, ``file``, environment (``KVIST_POOL=8GiB``) and ``flags``; later ones win.

    A flag of None is none.

    Raises:
        ConfigError: an unknown key, or a value that does not fit; names the key and where it came from.
    """
    values: dict[str, Any] = {}
    sources = dict.fromkeys(ServeConfig.__struct_fields__, "the default")
    for source, layer in (
        (str(file), _read_file(file)),
        ("the environment", _read_environment(environment)),
        ("the command line", {key: value for key, value in flags.items() if value is not None}),
    ):
        for key, value in layer.items():
            if key not in ServeConfig.__struct_fields__:
                known = ", ".join(ServeConfig.__struct_fields__)
                raise ConfigError(f"unknown key {key!r} in {source}; known keys: {known}")
            values[key] = _convert(key, value, source)
            sources[key] = source
    config = ServeConfig(**values)
    if config.disk and not config.disk_size:
        raise ConfigError(f"disk: say how much of {', '.join(config.disk)} may be used, such as --disk-size 200GiB")
    if config.disk_size and not config.disk:
        raise ConfigError(f"disk_size: {config.disk_size} bytes, but no directory to keep them in; add --disk PATH")
    return Settings(config, sources)


def parse_quotas(entries: Sequence[str]) -> Quotas:
    """Read ``NAME=BYTES``, once for each name.

    Raises:
        ConfigError: an entry is none, its name cannot be a tenant's, or is there twice.
    """
    quotas: dict[str, int] = {}
    for entry in entries:
        name, separator, nbytes = entry.rpartition("=")
        if not separator:
            raise ConfigError(f"tenant_quota: {entry!r} is no NAME=BYTES, such as team-a=20GiB")
        if name in quotas:
            raise ConfigError(f"tenant_quota: {name!r} is there twice")
        quotas[name] = parse_nbytes(nbytes)
    try:
        return Quotas(quotas)
    except KeyInvalid as error:
        raise ConfigError(f"tenant_quota: {error}") from error


def process_environment() -> Mapping[str, str]:
    """Return this process's environment."""
    return os.environ  # noqa: TID251 -- this is the place


def _convert(key: str, value: object, source: str) -> object:
    field = next(field for field in msgspec.structs.fields(ServeConfig) if field.name == key)
    try:
        if key in _SIZES and isinstance(value, str):
            converted: object = parse_nbytes(value)
        elif typing.get_origin(field.type) is tuple and isinstance(value, str):
            converted = msgspec.convert([part for part in value.split(",") if part], field.type, strict=False)
        else:
            converted = msgspec.convert(value, field.type, strict=False)
        ServeConfig(**{key: converted})  # type: ignore[arg-type]  # Alone, so that what is wrong has a source.
    except (msgspec.ValidationError, ConfigError) as error:
        raise ConfigError(f"{key} = {value!r} in {source}: {error}") from error
    return converted


def _read_file(file: Path | None) -> Mapping[str, Any]:
    if file is None:
        return {}
    try:
        return tomllib.loads(file.read_text())
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise ConfigError(f"{file} cannot be read: {error}") from error


def _read_environment(environment: Mapping[str, str]) -> Mapping[str, str]:
    prefix = _ENVIRONMENT_PREFIX
    return {name[len(prefix) :].lower(): value for name, value in environment.items() if name.startswith(prefix)}
