"""A vLLM engine on a GPU, for ``vllm_gpu.py``: Llama-3-8B's dimensions, random weights large enough for KV to matter.

usage: gpu_engine.py '{...options of vllm.LLM...}'

Commands beside those of ``tools/vllm/engine.py``: ``first`` (time to the first token of one prompt), ``beside``
(decode steps while prompts come back). ``forget`` works a little first, since blocks are given back in steps only.
"""

from __future__ import annotations

import random
import time
from typing import Any

from vllm import SamplingParams
from vllm.model_executor.model_loader import dummy_loader
from vllm.model_executor.model_loader.weight_utils import initialize_dummy_weights

from engine import Engine, main

BOUND = 0.02 * 3**0.5
"""Uniform weights up to here have a standard deviation of 0.02; with vLLM's own 0.001 no KV would matter."""
FORGET_TRIES = 200
_TICK = list(range(10, 42))


def draw_weights(module: Any, model_config: Any) -> None:
    """Fill a module, and all in it, with random weights; norms neither shrink nor grow."""
    initialize_dummy_weights(module, model_config, low=-BOUND, high=BOUND)
    for inner in module.modules():
        if "Norm" in type(inner).__name__:
            inner.weight.data.fill_(1.0)


class GpuEngine(Engine):
    """Everything in one process, stepped by hand."""

    def __init__(self, options: dict[str, Any]) -> None:
        dummy_loader.initialize_dummy_weights = draw_weights
        super().__init__(options)
        self._number = 0

    def do_first(self, prompt: list[int], num_tokens: int = 8) -> dict[str, Any]:
        """Answer one prompt alone."""
        request = self._add(prompt, num_tokens)
        begin, first_s, answer = time.perf_counter(), None, None
        while answer is None:
            for output in self.llm.llm_engine.step():
                if output.request_id.startswith(request):
                    if first_s is None and output.outputs[0].token_ids:
                        first_s = time.perf_counter() - begin
                    answer = output if output.finished else None
        return {"s": first_s, "tokens": list(answer.outputs[0].token_ids), "cached": answer.num_cached_tokens}

    def do_forget(self) -> dict[str, Any]:
        """Empty the engine's own prefix cache, as soon as its connector has given every block back."""
        for _ in range(FORGET_TRIES):
            self.do_first(_TICK, 2)
            if self.llm.reset_prefix_cache():
                return {"ok": True}
        return {"ok": False}

    def do_beside(self, prompts: list[list[int]], num_decoding: int, num_alone: int) -> dict[str, Any]:
        """Decode a batch, alone and then while prompts come back one after another; tell every step's milliseconds."""
        rng = random.Random(3)
        batch = [self._add([rng.randrange(10, 120_000) for _ in range(64)], 2000) for _ in range(num_decoding)]
        for _ in range(40):
            self._step()
        alone = [self._step()[0] for _ in range(num_alone)]
        steps, hits = [], []
        for prompt in prompts:
            request, begin, finished = self._add(prompt, 1), time.perf_counter(), None
            while finished is None:
                step_ms, outputs = self._step()
                steps.append(step_ms)
                finished = next((one for one in outputs if one.request_id.startswith(request) and one.finished), None)
            hits.append({"ms": (time.perf_counter() - begin) * 1e3, "cached": finished.num_cached_tokens})
            for _ in range(10):
                self._step()
        self.llm.llm_engine.abort_request(batch)
        return {"alone_ms": alone, "loading_ms": steps, "hits": hits}

    def _add(self, prompt: list[int], num_tokens: int) -> str:
        self._number += 1
        name = f"request-{self._number}-"
        sampling = SamplingParams(temperature=0, max_tokens=num_tokens, ignore_eos=True, detokenize=False)
        self.llm.llm_engine.add_request(name, {"prompt_token_ids": prompt}, sampling)
        return name

    def _step(self) -> tuple[float, list[Any]]:
        begin = time.perf_counter()
        outputs = self.llm.llm_engine.step()
        return (time.perf_counter() - begin) * 1e3, outputs


if __name__ == "__main__":
    main(GpuEngine)
