"""The floor for any cache: a vLLM connector that copies blocks inside the worker's own process, and checks nothing.

It keeps one copy of each whole block under vLLM's own block hash, loads asynchronously as kvist does, and has neither a
daemon nor eviction nor a failure path. For ``benchmarks/ttft.py`` alone.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
    SupportsHMA,
)


@dataclass
class CopyMetadata(KVConnectorMetadata):
    """(request, hashes, blocks) of the loads, (hashes, blocks) of the stores."""

    loads: list[tuple[str, list[bytes], list[int]]] = field(default_factory=list)
    stores: list[tuple[list[bytes], list[int]]] = field(default_factory=list)


class InProcessCopyConnector(KVConnectorBase_V1, SupportsHMA):
    """Scheduler's side: which hashes are kept. Worker's side: their bytes."""

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any = None) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self._block_tokens = kv_cache_config.kv_cache_groups[0].kv_cache_spec.block_size
        self._known: set[bytes] = set()
        self._requests: dict[str, Any] = {}
        self._loads: list[tuple[str, list[bytes], list[int]]] = []
        self._layers: list[torch.Tensor] = []
        self._blocks: dict[bytes, list[torch.Tensor]] = {}
        self._loaded: set[str] = set()

    @property
    def requires_kv_delivery(self) -> bool:
        return False

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int, bool]:
        self._requests[request.request_id] = request
        num_blocks = 0
        for block_hash in request.block_hashes:
            if bytes(block_hash) not in self._known:
                break
            num_blocks += 1
        num_tokens = max(0, num_blocks * self._block_tokens - num_computed_tokens)
        return num_tokens, num_tokens > 0

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        if num_external_tokens:
            block_ids = blocks.get_block_ids()[0]
            hashes = [bytes(block_hash) for block_hash in request.block_hashes[: len(block_ids)]]
            self._loads.append((request.request_id, hashes, list(block_ids[: len(hashes)])))

    def build_connector_meta(self, scheduler_output: Any) -> CopyMetadata:
        metadata = CopyMetadata(self._loads)
        self._loads = []
        for new in scheduler_output.scheduled_new_reqs:
            request = self._requests[new.req_id]
            done = new.num_computed_tokens + scheduler_output.num_scheduled_tokens[new.req_id]
            hashes = [bytes(block_hash) for block_hash in request.block_hashes[: done // self._block_tokens]]
            pairs = [(h, b) for h, b in zip(hashes, new.block_ids[0], strict=False) if h not in self._known]
            if pairs:
                metadata.stores.append(([h for h, _ in pairs], [b for _, b in pairs]))
                self._known.update(h for h, _ in pairs)
        return metadata

    def request_finished_all_groups(self, request: Any, block_ids: Any) -> tuple[bool, None]:
        self._requests.pop(request.request_id, None)
        return False, None

    def request_finished(self, request: Any, block_ids: Any) -> tuple[bool, None]:
        return self.request_finished_all_groups(request, block_ids)

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        self._layers = list(kv_caches.values())

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        metadata = self._get_connector_metadata()
        assert isinstance(metadata, CopyMetadata)
        for request_id, hashes, block_ids in metadata.loads:
            for block_hash, block_id in zip(hashes, block_ids, strict=True):
                for layer, block in zip(self._layers, self._blocks[block_hash], strict=True):
                    layer[block_id].copy_(block)
            self._loaded.add(request_id)

    def wait_for_layer_load(self, layer_name: str) -> None:
        pass

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any) -> None:
        pass

    def wait_for_save(self) -> None:
        metadata = self._get_connector_metadata()
        assert isinstance(metadata, CopyMetadata)
        for hashes, block_ids in metadata.stores:
            for block_hash, block_id in zip(hashes, block_ids, strict=True):
                self._blocks[block_hash] = [layer[block_id].clone() for layer in self._layers]

    def get_finished(self, finished_req_ids: set[str]) -> tuple[None, set[str] | None]:
        loaded, self._loaded = self._loaded, set()
        return None, loaded or None
