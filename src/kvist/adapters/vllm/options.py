"""What a user may set in ``kv_connector_extra_config``, and per request in ``kv_transfer_params["kvist"]``."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from typing import Any, Final

import msgspec

from kvist.errors import ConfigError, KeyInvalid
from kvist.model.owners import check_tenant
from kvist.wire.address import default_socket_path

CONNECTOR: Final = "KvistConnector"
MODULE_PATH: Final = "kvist.adapters.vllm"
FLAG: Final = (
    f'--kv-transfer-config \'{{"kv_connector":"{CONNECTOR}","kv_role":"kv_both",'
    '"kv_load_failure_policy":"recompute"}\''
)


class Options(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One engine's options."""

    socket: str = ""
    """The daemon's socket; empty for the user's default."""
    chunk_tokens: int = 0
    """Tokens per chunk, a multiple of the engine's block; 0 chooses."""
    deadline_s: float = 1.0
    """Longest that a request waits for the daemon before its prompt is computed instead."""
    tier_wait_s: float = 5.0
    """Longest that a request waits for chunks that the daemon reads from disk; less if computing them is sooner."""
    lane: str = ""
    """Who copies a GPU's blocks: ``engine`` (threads in the worker) or ``daemon``; empty chooses."""
    decode_slowdown_max: float = 0.03
    """How much longer steps that decode may take while KV is stored beside them, as a part; stores wait for it."""
    head_shards: int = 0
    """Parts that KV heads are cut into, each kept by itself; 0 for what tensor-parallel ranks hold.

    Engines share chunks if they cut alike, whatever their numbers of ranks.
    """
    pages: str = ""
    """``opaque`` keeps blocks as their kernels pack them, for engines of the same kind alone; empty chooses."""
    weights_version: str = ""
    """Names weights that the model's name and revision do not tell apart."""
    tenant: str = ""
    """Whose prompts these are, unless a request says otherwise: tenants share nothing, and may have quotas."""

    def __post_init__(self) -> None:
        if self.chunk_tokens < 0 or self.deadline_s <= 0:
            raise ConfigError(f"chunk_tokens must not be negative, and deadline_s must be positive: {self}")
        if not 0 <= self.tier_wait_s < math.inf:
            raise ConfigError(f"tier_wait_s must be a number of seconds, 0 or more: {self.tier_wait_s}")
        if self.decode_slowdown_max <= 0:
            raise ConfigError(f"decode_slowdown_max must be positive: {self.decode_slowdown_max}")
        if self.lane not in ("", "engine", "daemon"):
            raise ConfigError(f"lane {self.lane!r} is none of 'engine', 'daemon'")
        if self.head_shards < 0:
            raise ConfigError(f"head_shards must not be negative: {self.head_shards}")
        if self.pages not in ("", "opaque"):
            raise ConfigError(f"pages {self.pages!r} is neither empty nor 'opaque'")
        try:
            check_tenant(self.tenant)
        except KeyInvalid as error:
            raise ConfigError(f"tenant: {error}") from error

    @property
    def socket_path(self) -> str:
        """Where the daemon listens."""
        return self.socket or default_socket_path(os.getuid())


class RequestOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What one request allows."""

    read: bool = True
    """Its prefix may come from the cache."""
    write: bool = True
    """Its KV may be kept."""
    tenant: str = ""
    """Whose it is; the engine's where it does not say."""


def parse_options(extra: Mapping[str, Any]) -> Options:
    """Read an engine's options.

    Raises:
        ConfigError: an unknown key, or a value that does not fit; names it.
    """
    try:
        return msgspec.convert(dict(extra), Options, strict=False)
    except msgspec.ValidationError as error:
        known = ", ".join(Options.__struct_fields__)
        raise ConfigError(f"kv_connector_extra_config: {error}; known keys: {known}") from error


def parse_request_options(parameters: Mapping[str, Any] | None, tenant: str = "") -> RequestOptions:
    """Read a request's options; ``tenant`` is the engine's.

    Raises:
        ConfigError: an unknown key, or a value that does not fit; names it.
        KeyInvalid: its tenant cannot have this name.
    """
    try:
        options = msgspec.convert((parameters or {}).get("kvist") or {}, RequestOptions)
    except msgspec.ValidationError as error:
        known = ", ".join(RequestOptions.__struct_fields__)
        raise ConfigError(f"kv_transfer_params['kvist']: {error}; known keys: {known}") from error
    check_tenant(options.tenant)
    return options if options.tenant else msgspec.structs.replace(options, tenant=tenant)
