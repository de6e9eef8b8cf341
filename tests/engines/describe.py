"""Describes KV memory of every layout that vLLM can choose, and says whether the description finds every byte.

Runs in vLLM's own environment; prints one JSON object: for each case, the number of planes, whether the bytes of every
block lie where the planes say, or the words of the refusal.
"""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import torch

from kvist.adapters.vllm import layout
from kvist.errors import LayoutError

LAYERS, BLOCKS, HEADS, TOKENS, CONTENT = 3, 5, 2, 4, 8
DIMENSIONS = {"L": LAYERS, "B": BLOCKS, "H": HEADS, "N": TOKENS, "C": CONTENT}


def views(order: str, padding: int = 0) -> dict[str, torch.Tensor]:
    """Return each layer's ``[B, H, N, C]`` view of one allocation whose dimensions lie in ``order``."""
    shape = [DIMENSIONS[name] for name in order]
    memory = torch.arange(2 * LAYERS * BLOCKS * HEADS * TOKENS * CONTENT, dtype=torch.int16)
    strides = dict(zip(order, torch.empty(shape).stride(), strict=True))
    if padding:
        strides["B"] += padding
        strides["L"] = BLOCKS * strides["B"]
    return {
        f"layer.{number}": memory.as_strided(
            (BLOCKS, HEADS, TOKENS, CONTENT), [strides[name] for name in "BHNC"], number * strides["L"]
        )
        for number in range(LAYERS)
    }


def separate(shape: tuple[int, ...], permutation: tuple[int, ...]) -> dict[str, torch.Tensor]:
    """Return one allocation a layer, as versions before 0.29 have it."""
    inverse = sorted(range(len(permutation)), key=permutation.__getitem__)
    physical = [shape[axis] for axis in permutation]
    return {
        f"layer.{number}": (torch.arange(torch.Size(physical).numel(), dtype=torch.int16) + number)
        .reshape(physical)
        .permute(inverse)
        for number in range(LAYERS)
    }


def config(order: str = "") -> Any:
    spec = SimpleNamespace(block_size=TOKENS)
    chosen = SimpleNamespace(name=order) if order else None
    groups = [SimpleNamespace(kv_cache_spec=spec)]
    return SimpleNamespace(num_blocks=BLOCKS, kv_cache_groups=groups, kv_cache_layout=chosen)


def examine(caches: dict[str, torch.Tensor], order: str = "") -> dict[str, Any]:
    """Describe memory, and compare the bytes of each block with those that its tensors hold."""
    try:
        group, storages = layout.describe(caches, config(order))
    except LayoutError as error:
        return {"refused": str(error)}
    memory = [torch.empty(0, dtype=torch.uint8).set_(storage) for storage in storages]
    is_right = True
    for block in range(BLOCKS):
        found = b"".join(
            memory[plane.memory][start : start + plane.row_nbytes].numpy().tobytes()
            for plane in group.planes
            for start in [plane.offset + block * plane.block_stride]
        )
        expected = [sorted(tensor[block].reshape(-1).tolist()) for tensor in caches.values()]
        values = torch.frombuffer(bytearray(found), dtype=torch.int16).tolist()
        size = len(values) // len(expected)
        is_right &= [sorted(values[at : at + size]) for at in range(0, len(values), size)] == expected
    return {"planes": len(group.planes), "is_right": is_right, "page": group.planes[0].row_nbytes}


def main() -> None:
    cases = {order: examine(views(order), order) for order in ("LBNHC", "LBHNC", "BLNHC", "BLHNC")}
    cases["LHBNC"] = examine(views("LHBNC"), "LHBNC")
    cases["BHLNC"] = examine(views("BHLNC"), "BHLNC")
    cases["padded"] = examine(views("LBNHC", padding=16), "LBNHC")
    cases["0.24 NHD"] = examine(separate((BLOCKS, 2, TOKENS, HEADS, CONTENT), (0, 1, 2, 3, 4)))
    cases["0.24 HND"] = examine(separate((BLOCKS, 2, TOKENS, HEADS, CONTENT), (0, 1, 3, 2, 4)))
    cases["0.22 K and V apart"] = examine(separate((2, BLOCKS, TOKENS, HEADS, CONTENT), (0, 1, 2, 3, 4)))
    cases["0.26 NHD"] = examine(separate((BLOCKS, HEADS, TOKENS, 2 * CONTENT), (0, 2, 1, 3)))
    cases["MLA"] = examine(separate((BLOCKS, TOKENS, 9 * CONTENT), (0, 1, 2)))
    print(json.dumps(cases))


if __name__ == "__main__":
    main()
