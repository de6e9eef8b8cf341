"""An engine process that shows its KV: runs in vLLM's own environment, beside ``tools/vllm/engine.py``.

It knows nothing of kvist. After each step of the engine it reads the blocks that vLLM's own tables give to the request,
group by group and worker by worker, so that what was loaded can be held against what was computed, however it came
there.
"""

from __future__ import annotations

import hashlib
from typing import Any

import torch
from vllm import SamplingParams

from engine import Engine, main

NULL_BLOCK = 0


def layers_of(worker: Any, group: int) -> dict[str, list[torch.Tensor]]:
    """Return the tensors of each of a worker's layers of a group: several stages have different ones."""
    runner = worker.model_runner
    layers = runner.compilation_config.static_forward_context
    kept = {name: layers[name].kv_cache for name in runner.kv_cache_config.kv_cache_groups[group].layer_names}
    return {name: list(kv) if isinstance(kv, list | tuple) else [kv] for name, kv in kept.items()}


def digests_of(worker: Any, wanted: list[tuple[int, int]]) -> list[str]:
    """Return a digest of each (group, block) of a worker."""
    found = []
    for group, block_id in wanted:
        hasher = hashlib.sha256()
        for tensors in layers_of(worker, group).values():
            for tensor in tensors:
                hasher.update(tensor[block_id].contiguous().view(torch.uint8).numpy().tobytes())
        found.append(hasher.hexdigest()[:16])
    return found


def wipe(worker: Any, group: int, block_ids: list[int]) -> None:
    """Fill blocks of a group with zeros."""
    for tensors in layers_of(worker, group).values():
        for tensor in tensors:
            for block_id in block_ids:
                if block_id != NULL_BLOCK:
                    tensor[block_id].zero_()


def describe(worker: Any, group: int) -> dict[str, str]:
    """Describe the tensors of a worker's layers."""
    return {
        name: ", ".join(str((tuple(tensor.shape), tensor.stride(), tensor.dtype)) for tensor in tensors)
        for name, tensors in layers_of(worker, group).items()
    }


class BlocksEngine(Engine):
    """Commands for tests. The engine's scheduler must be in this process; its workers may have others."""

    def do_groups(self) -> dict[str, Any]:
        """Describe the engine's groups of layers: their kind, tokens per block, and each layer's tensors by worker."""
        return {
            "num_blocks": self._config.num_blocks,
            "groups": [
                {
                    "kind": type(group.kv_cache_spec).__name__,
                    "block_tokens": group.kv_cache_spec.block_size,
                    "page_nbytes": group.kv_cache_spec.page_size_bytes,
                    "window": getattr(group.kv_cache_spec, "sliding_window", None),
                    "layers": self.llm.collective_rpc(describe, args=(number,)),
                }
                for number, group in enumerate(self._config.kv_cache_groups)
            ],
        }

    def do_answer(self, prompt: list[int], num_tokens: int, wiped_group: int | None = None) -> dict[str, Any]:
        """Answer one prompt; tell its tokens, steps and drafts, what was cached, and a digest of each whole block.

        With ``wiped_group``, zeros take the place of that group's KV as soon as the first token is known.
        """
        engine = self.llm.llm_engine
        sampling = SamplingParams(temperature=0, max_tokens=num_tokens, ignore_eos=True)
        engine.add_request("answer", {"prompt_token_ids": prompt}, sampling)
        digests: dict[str, str] = {}
        is_wiped = wiped_group is None
        num_steps = num_drafted = 0
        finished: Any = None
        while finished is None:
            finished = next((output for output in engine.step() if output.finished), None)
            num_steps += 1
            for request in self._scheduler.requests.values():
                tables = self._scheduler.kv_cache_manager.get_block_ids(request.request_id)
                digests.update(self._digests(tables, request.num_computed_tokens))
                num_drafted += len(request.spec_token_ids)
                if not is_wiped and request.num_output_tokens:
                    self.llm.collective_rpc(wipe, args=(wiped_group, tables[wiped_group]))
                    is_wiped = True
        self.settle()
        return {
            "tokens": list(finished.outputs[0].token_ids),
            "cached": finished.num_cached_tokens,
            "digests": digests,
            "steps": num_steps,
            "drafted": num_drafted,
        }

    def _digests(self, tables: tuple[list[int], ...], num_computed_tokens: int) -> dict[str, str]:
        """Return a digest of each block whose tokens are all computed and which vLLM still keeps, by group:index."""
        places, wanted = [], []
        for number, (group, block_ids) in enumerate(zip(self._config.kv_cache_groups, tables, strict=True)):
            num_whole = num_computed_tokens // group.kv_cache_spec.block_size
            for index, block_id in enumerate(block_ids[:num_whole]):
                if block_id != NULL_BLOCK:
                    places.append(f"{number}:{index}")
                    wanted.append((number, block_id))
        of_workers = self.llm.collective_rpc(digests_of, args=(wanted,)) if wanted else []
        return dict(zip(places, map(" ".join, zip(*of_workers, strict=True)), strict=True))

    @property
    def _scheduler(self) -> Any:
        return self.llm.llm_engine.engine_core.engine_core.scheduler

    @property
    def _config(self) -> Any:
        return self._scheduler.kv_cache_config


if __name__ == "__main__":
    main(BlocksEngine)
