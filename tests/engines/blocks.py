"""An engine process that shows its KV: runs in vLLM's own environment, beside ``tools/vllm/engine.py``.

It knows nothing of kvist. After each step of the engine it reads the blocks that vLLM's own tables give to the request,
group by group, so that what was loaded can be held against what was computed, however it came there.
"""

from __future__ import annotations

import hashlib
import re
from typing import Any

import torch
from vllm import SamplingParams

from engine import Engine, main

NULL_BLOCK = 0


class BlocksEngine(Engine):
    """Commands for tests. The engine's scheduler and worker must be in this process."""

    def do_groups(self) -> dict[str, Any]:
        """Describe the engine's groups of layers: their kind, tokens per block, and each layer's tensor."""
        return {
            "num_blocks": self._config.num_blocks,
            "groups": [
                {
                    "kind": type(group.kv_cache_spec).__name__,
                    "block_tokens": group.kv_cache_spec.block_size,
                    "page_nbytes": group.kv_cache_spec.page_size_bytes,
                    "window": getattr(group.kv_cache_spec, "sliding_window", None),
                    "layers": {name: str((tuple(t.shape), t.stride(), t.dtype)) for name, t in layers},
                }
                for group, layers in zip(self._config.kv_cache_groups, self._layers(), strict=True)
            ],
        }

    def do_answer(self, prompt: list[int], num_tokens: int, wiped_group: int | None = None) -> dict[str, Any]:
        """Answer one prompt; tell its tokens, how many came from a cache, and a digest of each of its whole blocks.

        With ``wiped_group``, zeros take the place of that group's KV as soon as the first token is known.
        """
        engine = self.llm.llm_engine
        sampling = SamplingParams(temperature=0, max_tokens=num_tokens, ignore_eos=True)
        engine.add_request("answer", {"prompt_token_ids": prompt}, sampling)
        digests: dict[str, str] = {}
        is_wiped = wiped_group is None
        finished: Any = None
        while finished is None:
            finished = next((output for output in engine.step() if output.finished), None)
            for request in self._scheduler.requests.values():
                tables = self._scheduler.kv_cache_manager.get_block_ids(request.request_id)
                digests.update(self._digests(tables, request.num_computed_tokens))
                if not is_wiped and request.num_output_tokens:
                    self._wipe(wiped_group, tables[wiped_group])
                    is_wiped = True
        self.settle()
        return {
            "tokens": list(finished.outputs[0].token_ids),
            "cached": finished.num_cached_tokens,
            "digests": digests,
        }

    def _digests(self, tables: tuple[list[int], ...], num_computed_tokens: int) -> dict[str, str]:
        """Return a digest of each block whose tokens are all computed and which vLLM still keeps, by group:index."""
        found = {}
        for number, (group, block_ids) in enumerate(zip(self._config.kv_cache_groups, tables, strict=True)):
            num_whole = num_computed_tokens // group.kv_cache_spec.block_size
            for index, block_id in enumerate(block_ids[:num_whole]):
                if block_id != NULL_BLOCK:
                    found[f"{number}:{index}"] = self._digest(number, block_id)
        return found

    def _digest(self, group: int, block_id: int) -> str:
        hasher = hashlib.sha256()
        for _, tensor in self._layers()[group]:
            hasher.update(tensor[block_id].contiguous().view(torch.uint8).numpy().tobytes())
        return hasher.hexdigest()[:16]

    def _wipe(self, group: int, block_ids: list[int]) -> None:
        for _, tensor in self._layers()[group]:
            for block_id in block_ids:
                if block_id != NULL_BLOCK:
                    tensor[block_id].zero_()

    def _layers(self) -> list[list[tuple[str, torch.Tensor]]]:
        """Return each group's layers and their KV, which the model runner keeps in the order of the layers' numbers."""
        names = [name for group in self._config.kv_cache_groups for name in group.layer_names]
        names.sort(key=lambda name: int(re.findall(r"\d+", name)[0]))
        caches = dict(zip(names, self._runner.kv_caches, strict=True))
        return [[(name, caches[name]) for name in group.layer_names] for group in self._config.kv_cache_groups]

    @property
    def _scheduler(self) -> Any:
        return self.llm.llm_engine.engine_core.engine_core.scheduler

    @property
    def _config(self) -> Any:
        return self._scheduler.kv_cache_config

    @property
    def _runner(self) -> Any:
        return self.llm.llm_engine.engine_core.engine_core.model_executor.driver_worker.worker.model_runner


if __name__ == "__main__":
    main(BlocksEngine)
