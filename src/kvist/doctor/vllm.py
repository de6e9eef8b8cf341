"""The arguments of ``vllm serve`` as facts. Pure, and without vLLM.

The law: what vLLM would read from these arguments is what is read here, as far as it concerns us; the last of several
equal flags counts, and underscores in a flag are dashes. Source: vLLM 0.32 ``utils/argparse_utils.py``,
``config/kv_transfer.py``, ``distributed/kv_transfer/kv_connector/factory.py``.
"""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Mapping
from typing import Any, Final

import msgspec

from kvist.adapters.vllm.options import CONNECTOR, MODULE_PATH, Options, parse_options
from kvist.doctor.facts import NotKnown, Transfer, Vllm
from kvist.errors import ConfigError

MODULE_PATHS: Final = (MODULE_PATH, f"{MODULE_PATH}.connector")
_TRANSFER: Final = "--kv-transfer-config"
_BARE_JSON: Final = re.compile(r"--kv[-_]transfer[-_]config[ =]\s*\{")
_PARENT: Final = "MultiConnector"


def read_arguments(text: str, version: str | NotKnown) -> Vllm:
    """Return what follows ``vllm serve`` as facts.

    Raises:
        ConfigError: it is no command line: a quotation that does not end.
    """
    try:
        flags = _read_flags(shlex.split(_quote_json(text)))
    except ValueError as error:
        raise ConfigError(f"--vllm: {error}; put all that follows 'vllm serve' between quotation marks") from error
    transfer = _read_transfer(flags)
    return Vllm(
        version=version,
        transfer=transfer,
        options=_read_options(transfer),
        has_arguments=True,
        is_prefix_caching_off=_is_on(flags, "--no-enable-prefix-caching", unless="--enable-prefix-caching"),
        is_hybrid_off=_is_on(flags, "--disable-hybrid-kv-cache-manager", unless="--no-disable-hybrid-kv-cache-manager"),
        has_sleep_mode=_is_on(flags, "--enable-sleep-mode", unless="--no-enable-sleep-mode"),
        has_computed_scales=_is_on(flags, "--calculate-kv-scales", unless="--no-calculate-kv-scales"),
        num_prefill_ranks=_read_number(flags.get("--prefill-context-parallel-size")) or 1,
        block_tokens=_read_number(flags.get("--block-size")),
        config_file=flags.get("--config", ""),
    )


def read_transfer(text: str, version: str | NotKnown) -> Vllm:
    """Return the value of ``--kv-transfer-config`` as facts."""
    transfer = _read_transfer({_TRANSFER: text})
    return Vllm(version, transfer, _read_options(transfer), has_arguments=False)


def _quote_json(text: str) -> str:
    """Put a bare JSON object behind our flag between quotation marks: around all of it there may be some already."""
    found = _BARE_JSON.search(text)
    if found is None:
        return text
    start = found.end() - 1
    try:
        _, end = json.JSONDecoder().raw_decode(text, start)
    except json.JSONDecodeError:
        return text
    return f"{text[:start]}{shlex.quote(text[start:end])}{text[end:]}"


def _read_flags(words: list[str]) -> dict[str, str]:
    """Return the flags and their values, in the order in which they were last given; empty where there is none."""
    flags: dict[str, str] = {}
    name = ""
    for word in words:
        if word.startswith("--"):
            name, _, value = word.partition("=")
            flag, dot, key = name.partition(".")
            name = flag.replace("_", "-") + dot + key
            flags.pop(name, None)
            flags[name] = value
        elif name and not flags[name]:
            flags[name] = word
    return flags


def _is_on(flags: dict[str, str], name: str, *, unless: str) -> bool:
    last = next((flag for flag in reversed(flags) if flag in (name, unless)), "")
    return last == name


def _read_number(text: str | None) -> int | None:
    return int(text) if text is not None and text.isdecimal() and int(text) else None


def _read_transfer(flags: Mapping[str, str]) -> Transfer | NotKnown | None:
    """Read the flag's JSON, and the flags that set one key of it each."""
    values: dict[str, Any] = {}
    try:
        if _TRANSFER in flags:
            values = msgspec.json.decode(flags[_TRANSFER], type=dict[str, Any])
        for name, text in flags.items():
            flag, _, path = name.partition(".")
            if flag == _TRANSFER and path:
                _set(values, path.replace("-", "_").split("."), text)
        return _own(values) if values else None
    except (msgspec.DecodeError, ConfigError) as error:
        return NotKnown(str(error))


def _set(values: dict[str, Any], path: list[str], text: str) -> None:
    *parents, key = path
    for parent in parents:
        values = values.setdefault(parent, {})
        if not isinstance(values, dict):
            raise ConfigError(f"{'.'.join(path)} = {text}: {parent} is {values!r}, which has no keys")
    try:
        values[key] = msgspec.json.decode(text)
    except msgspec.DecodeError:  # A bare word is a text.
        values[key] = text


def _own(values: dict[str, Any]) -> Transfer:
    """Return our connector's part; the whole where we have none."""
    whole = msgspec.convert(values, Transfer)
    if whole.kv_connector != _PARENT:
        return whole
    children = msgspec.convert(whole.kv_connector_extra_config.get("connectors", []), list[Transfer])
    own = next((child for child in children if child.kv_connector == CONNECTOR), None)
    # The policy is the scheduler's, which looks at the whole. Children are found by name alone.
    return msgspec.structs.replace(own, kv_load_failure_policy=whole.kv_load_failure_policy) if own else whole


def _read_options(transfer: Transfer | NotKnown | None) -> Options | NotKnown:
    if not isinstance(transfer, Transfer):
        return NotKnown("there is no --kv-transfer-config that can be read")
    if transfer.kv_connector != CONNECTOR:
        return NotKnown(f"the connector is {transfer.kv_connector!r}")
    try:
        return parse_options(transfer.kv_connector_extra_config)
    except ConfigError as error:
        return NotKnown(str(error))
