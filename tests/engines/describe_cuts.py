"""Describes how KV is cut over ranks, and whether each rank's part is right: cases for ``describe.py``."""

from __future__ import annotations

from itertools import product
from typing import Any

import torch

from kvist.adapters.vllm.namespace import describe_namespace
from tests.engines.fake_workers import (
    BF16,
    BLOCK_IDS,
    BLOCKS,
    CHUNK,
    KV,
    LAYERS,
    NAMES,
    SIZE,
    caches_config,
    context,
    cut,
    describe,
    engine,
    full,
    latent,
    lay_out,
    mamba,
    memory_of,
    read,
    version,
    window,
)
from tests.support.layouts import chunk_places


def find_shards() -> dict[str, Any]:
    """Return each group's numbers of shards and readers, and the shards of each rank."""
    caches = caches_config(full(heads=1))
    states = caches_config(full(heads=1), mamba(), names=[["layer.0"], ["state.0"]])
    mixed = caches_config(full(heads=8), window(64, heads=2), names=[["layer.0"], ["window.0"]])
    draft_of_all = full(heads=1)
    object.__setattr__(draft_of_all, "dcp_sharded", False)
    drafted = caches_config(latent(), draft_of_all, names=[["layer.0"], ["draft.0"]])
    cases = {
        "tp2": (engine(tp=2, heads=4), caches_config(full(heads=2)), 0),
        "tp2 in 4 parts": (engine(tp=2, heads=4), caches_config(full(heads=2)), 4),
        "tp1 in 2 parts": (engine(heads=4), caches_config(full()), 2),
        "tp2 pp2": (engine(tp=2, pp=2, heads=4), caches_config(full(heads=2)), 0),
        "replicated heads": (engine(tp=4, heads=2), caches, 0),
        "replicated heads of a draft": (engine(tp=4, heads=2, speculative=object()), caches, 0),
        "latent": (engine(tp=4), caches_config(latent()), 0),
        "latent and states": (engine(tp=2), caches_config(latent(), mamba(), names=[["layer.0"], ["state.0"]]), 0),
        "replicated heads and states": (engine(tp=4, heads=2), states, 0),
        "8 heads and 2 in 4 parts": (engine(heads=8), mixed, 4),
        "turns": (context(4, tp=4), caches_config(latent()), 0),
        "turns of half": (context(2, tp=4), caches_config(latent()), 0),
        "turns pp2": (context(2, tp=2, pp=2), caches_config(latent()), 0),
        "turns with heads": (context(2, tp=8, heads=2), caches, 0),
        "turns across heads": (context(2, tp=6, heads=2), caches, 0),
        "turns and a draft": (context(2, tp=2), drafted, 0),
    }
    found = {}
    for name, (config, one, head_shards) in cases.items():
        shardings = cut(config, one, head_shards=head_shards).shardings
        ranks = range(shardings[0].num_ranks * shardings[0].num_stages)
        found[name] = [
            [sharding.num_shards, sharding.num_readers, [sharding.shards_of(rank) for rank in ranks]]
            for sharding in shardings
        ]
    return found


def find_turns() -> dict[str, Any]:
    """Return whether each rank's rows are the tokens that it holds, in chunks that do not depend on its blocks."""
    found: dict[str, Any] = {}
    for count, turn, block in ((2, 1, 16), (2, 16, 16), (2, 16, 32), (4, 1, 16), (4, 4, 16), (4, 16, 16)):
        is_right, names = [], set()
        for rank in range(count):
            config = context(count, turn, tp=count, rank=rank, heads=1)
            caches = caches_config(full(block, heads=1))
            tensors = deal_out(rank, count, turn, block)
            with version("0.32.0"):
                memory = describe(config, tensors, caches)
                names.add(str(describe_namespace(config, caches, cut(config, caches), version="")))
            tokens = [token for token in range(CHUNK) if token // turn % count == rank]
            num_blocks = CHUNK // (block * count)
            (held,) = memory.rows
            is_right.append(
                (held.row.shard, held.blocks_per_chunk, held.group.block_tokens) == (rank, num_blocks, block * count)
                and read(memory, 0, BLOCK_IDS[16][:num_blocks]) == KV[:, :, tokens, :1].tobytes()
            )
        (space,) = names
        found[f"{count} ranks, {turn} at a time, blocks of {block}"] = [is_right, space]
    return found


def deal_out(rank: int, count: int, turn: int, block: int) -> dict[str, Any]:
    """Return the tensors of a rank of one head, with each token where vLLM's slot mapping has it."""
    tensors = {name: torch.zeros((BLOCKS, 1, block, 2 * SIZE), dtype=BF16) for name in NAMES}
    for layer, token in product(range(LAYERS), range(CHUNK)):
        number, place = divmod(token, block * count)
        if place // turn % count == rank:
            slot = place // (count * turn) * turn + place % turn
            array = tensors[NAMES[layer]].view(torch.int16).numpy()
            array[BLOCK_IDS[16][number], 0, slot] = KV[layer, :, token, 0].ravel()
    return tensors


def find_round_trip() -> dict[str, Any]:
    """Return whether chunks of 2 ranks are those of 1 rank with ``head_shards`` 2, and whether they can be put back."""
    with version("0.24.0"):
        alone = describe(engine(), lay_out("NB 2 BS NH HS", 32), caches_config(full(32)), head_shards=2)
        empty = {name: torch.zeros_like(tensor) for name, tensor in lay_out("NB 2 BS NH HS", 32).items()}
        target = describe(engine(), empty, caches_config(full(32)), head_shards=2)
        pair = [
            describe(
                engine(tp=2, rank=rank),
                lay_out("NB 2 BS NH HS", 16, heads=range(2 * rank, 2 * rank + 2)),
                caches_config(full(heads=2)),
            )
            for rank in range(2)
        ]
    chunks = [read(pair[rank], 0, BLOCK_IDS[16]) for rank in range(2)]
    memory = memory_of(target)
    for row, chunk in enumerate(chunks):
        places = chunk_places(target.rows[row].group, BLOCK_IDS[32])
        for byte, (number, offset, _) in zip(chunk, places, strict=True):
            memory[number][offset] = byte
    expected = lay_out("NB 2 BS NH HS", 32)
    bits = torch.int16
    return {
        "rows": [[tuple(held.row) for held in found.rows] for found in (alone, *pair)],
        "is_equal": [read(alone, rank, BLOCK_IDS[32]) == chunks[rank] for rank in range(2)],
        "is_put_back": all(torch.equal(empty[name].view(bits), expected[name].view(bits)) for name in NAMES),
    }
