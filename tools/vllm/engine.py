"""A real vLLM engine as a child process: commands come in as lines of JSON, answers go out as lines of JSON.

usage: engine.py '{"model": FOLDER, ...options of vllm.LLM...}'

Commands: {"do": "generate", "prompts": [[token ids]...], "num_tokens": 16, "salt": null, "kvist": null},
{"do": "forget"} (empty the engine's own prefix cache), {"do": "stop"}. Every answer is one object on a line of its own
behind the mark ``@``, since vLLM prints what it likes. The caller gives ``HF_HUB_OFFLINE`` and the like.
"""

from __future__ import annotations

import functools
import json
import sys
from typing import Any

from transformers import AutoTokenizer
from vllm import LLM, SamplingParams


class Engine:
    """Answers commands with one ``LLM``."""

    def __init__(self, options: dict[str, Any]) -> None:
        self.llm = LLM(**options)
        self._model = options["model"]

    @functools.cached_property
    def _tokenizer(self) -> Any:
        return AutoTokenizer.from_pretrained(self._model)

    def handle(self, command: dict[str, Any]) -> dict[str, Any]:
        """Carry one command out."""
        return getattr(self, f"do_{command.pop('do')}")(**command)

    def do_generate(
        self, prompts: list[list[int]], num_tokens: int = 16, salt: str | None = None, kvist: Any = None
    ) -> dict[str, Any]:
        """Decode greedily; tell each prompt's tokens, how many came from a cache, and the time to the first token."""
        sampling = SamplingParams(
            temperature=0, max_tokens=num_tokens, ignore_eos=True,
            extra_args={"kv_transfer_params": {"kvist": kvist}} if kvist else None,
        )  # fmt: skip
        inputs = [{"prompt_token_ids": prompt, **({"cache_salt": salt} if salt else {})} for prompt in prompts]
        results = self.llm.generate(inputs, sampling, use_tqdm=False)
        self.settle()
        return {
            "tokens": [list(result.outputs[0].token_ids) for result in results],
            "finish": [str(result.outputs[0].finish_reason) for result in results],
            "cached": [result.num_cached_tokens for result in results],
            "ttft_s": [result.metrics.first_token_latency if result.metrics else None for result in results],
        }

    def do_forget(self) -> dict[str, Any]:
        """Empty the engine's own prefix cache, so that the next hit comes from outside."""
        return {"ok": bool(self.llm.reset_prefix_cache())}

    def do_encode(self, text: str) -> dict[str, Any]:
        """Return a text's token ids."""
        return {"tokens": self._tokenizer.encode(text, add_special_tokens=False)}

    def do_decode(self, tokens: list[int]) -> dict[str, Any]:
        """Return the text of token ids."""
        return {"text": self._tokenizer.decode(tokens)}

    def settle(self) -> None:
        """Step an idle engine in this process until nothing of its connector is pending."""
        core = getattr(self.llm.llm_engine.engine_core, "engine_core", None)
        while core is not None and core.scheduler.has_requests():
            self.llm.llm_engine.step()


def main(kind: type[Engine] = Engine) -> None:
    engine = kind(json.loads(sys.argv[1]))
    print("@" + json.dumps({"ready": True}), flush=True)
    for line in sys.stdin:
        command = json.loads(line)
        if command["do"] == "stop":
            break
        print("@" + json.dumps(engine.handle(command)), flush=True)


if __name__ == "__main__":
    main()
