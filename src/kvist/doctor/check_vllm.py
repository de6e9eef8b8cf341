"""What vLLM is told, to findings. Pure."""

from __future__ import annotations

import os.path
import re
from collections.abc import Iterator
from typing import Final

from kvist.adapters.vllm.options import CONNECTOR, FLAG, Options
from kvist.doctor import catalogue as kinds
from kvist.doctor.facts import Facts, NotKnown, Transfer, Vllm
from kvist.doctor.findings import Finding, fine
from kvist.doctor.vllm import MODULE_PATHS
from kvist.units import align_up

_VERSIONS: Final = ((0, 24), (0, 33))


def check_vllm(facts: Facts) -> Iterator[Finding]:
    """Is vLLM told of kvist, and of nothing that kvist does not serve?"""
    vllm = facts.vllm
    if vllm is None:
        return
    troubles = [*_check_version(vllm), *_check_flags(vllm)]
    if isinstance(vllm.transfer, NotKnown):
        troubles.append(kinds.VLLM_JSON.found(vllm.transfer.because, flag=FLAG))
    elif vllm.transfer is None:
        troubles.append(kinds.VLLM_NO_CONNECTOR.found("no --kv-transfer-config", flag=FLAG))
    elif vllm.transfer.kv_connector != CONNECTOR:
        troubles.append(kinds.VLLM_CONNECTOR.found(f"kv_connector is {vllm.transfer.kv_connector!r}"))
    else:
        troubles += [*_check_transfer(vllm.transfer), *_check_options(vllm, facts.socket.path)]
    yield from troubles or [fine("vllm", "vLLM is told of kvist, and of nothing that is not served")]


def _check_version(vllm: Vllm) -> Iterator[Finding]:
    found = re.match(r"(\d+)\.(\d+)", vllm.version) if isinstance(vllm.version, str) else None
    if found and not _VERSIONS[0] <= (int(found[1]), int(found[2])) <= _VERSIONS[1]:
        yield kinds.VLLM_VERSION.found(f"vLLM {vllm.version}")


def _check_flags(vllm: Vllm) -> Iterator[Finding]:
    if vllm.config_file:
        yield kinds.VLLM_CONFIG_FILE.found(f"--config {vllm.config_file}")
    if vllm.is_prefix_caching_off:
        yield kinds.VLLM_PREFIX_CACHING.found("--no-enable-prefix-caching")
    if vllm.is_hybrid_off:
        yield kinds.VLLM_HYBRID.found("--disable-hybrid-kv-cache-manager")
    if vllm.has_sleep_mode:
        yield kinds.VLLM_SLEEP_MODE.found("--enable-sleep-mode")
    if vllm.has_computed_scales:
        yield kinds.VLLM_KV_SCALES.found("--calculate-kv-scales")
    if vllm.num_prefill_ranks > 1:
        yield kinds.VLLM_PREFILL_RANKS.found(f"--prefill-context-parallel-size {vllm.num_prefill_ranks}")


def _check_transfer(transfer: Transfer) -> Iterator[Finding]:
    # Without a path vLLM finds the connector by its name, through our entry point.
    if transfer.kv_connector_module_path not in (None, *MODULE_PATHS):
        yield kinds.VLLM_MODULE_PATH.found(f"kv_connector_module_path is {transfer.kv_connector_module_path!r}")
    if transfer.kv_role != "kv_both":
        yield kinds.VLLM_ROLE.found(f"kv_role is {transfer.kv_role!r}")
    if transfer.kv_load_failure_policy != "recompute":
        yield kinds.VLLM_FAILURE_POLICY.found(f"kv_load_failure_policy is {transfer.kv_load_failure_policy!r}")


def _check_options(vllm: Vllm, path: str) -> Iterator[Finding]:
    options = vllm.options
    if not isinstance(options, Options):
        yield kinds.VLLM_OPTIONS.found(options.because)
        return
    if vllm.block_tokens and options.chunk_tokens % vllm.block_tokens:
        yield kinds.VLLM_CHUNK_TOKENS.found(
            f"chunk_tokens is {options.chunk_tokens}, --block-size is {vllm.block_tokens}",
            tokens=align_up(options.chunk_tokens, vllm.block_tokens),
        )
    if os.path.normpath(options.socket_path) != os.path.normpath(path):
        yield kinds.VLLM_SOCKET.found(f"{options.socket_path} there, {path} here", path=path)
