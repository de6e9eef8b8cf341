"""What vLLM can choose as the layout of its KV memory is described rightly, or refused by name."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.engines.conftest import PYTHON, ROOT

VERSIONS = (
    "0.22 FLASH_ATTN", "0.22 FLASH_ATTN HND", "0.22 beside states", "0.22 kernel blocks", "0.22 FLASHINFER",
    "0.24 FLASH_ATTN", "0.24 FLASH_ATTN HND", "0.24 TRITON_ATTN", "0.26 NHD", "0.26 HND", "0.26 kernel blocks",
    "LBNHC", "LBHNC", "LHBNC", "BLNHC", "BLHNC", "BHLNC",
)  # fmt: skip
REFUSALS = {
    "cross attention": "CrossAttentionSpec",
    "no states": "--mamba-cache-mode align",
    "prefills in turns": "start without --prefill-context-parallel-size",
    "windows in turns": "KV cache group 0 of kind 'window' deals its tokens out to 2 ranks",
    "turns": "take 3 tokens at their turn (cp_kv_cache_interleave_size) into blocks of 16",
    "host memory": "host memory",
    "role": "hisparse_indexer",
    "nothing left": "none of 1 KV cache groups",
    "sleep mode": "--enable-sleep-mode",
    "own scales": "--calculate-kv-scales",
    "device": "'tpu'",
    "shape": "[9, 4, 16, 16] (NB NH BS 2HS)",
    "type": "torch.float16",
    "back end": "FLEX_ATTENTION",
    "kernel blocks": "--block-size 16",
    "missing layer": "layer.0 of KV cache group 0",
    "empty stage": "no layers on this pipeline stage (rank 1)",
    "state": "62 bytes",
    "pages in pieces": "layer.0: a page's content has gaps",
    "other pieces": "layer.0: a page's content has gaps",
    "unequal layers": "the same on [1, 2] tensor-parallel ranks",
    "head_shards": "head_shards 3 is no multiple of the 2",
    "head_shards of pages": "set it to 1",
    "head_shards of latent KV": "no heads that can be told apart",
    "unequal parts": "the 4 KV heads of KV cache group 0",
    "too many parts": "more than the 4 KV heads of any group",
}


@pytest.fixture(scope="module")
def cases() -> dict[str, Any]:
    script = Path(__file__).with_name("describe.py")
    command = ["env", f"PYTHONPATH={ROOT / 'src'}:{ROOT}", str(PYTHON), str(script)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


@pytest.mark.parametrize("case", VERSIONS)
def test_rows_of_every_version(cases: dict[str, Any], case: str) -> None:
    """Whatever version, back end, block and order in memory, a GPU's chunk has the same bytes, whole or by heads."""
    found = cases["rows"][case]
    assert found["is_right"]
    assert found["halves_are_right"] == [True, True]


def test_rows_have_one_name(cases: dict[str, Any]) -> None:
    """Chunks of equal bytes have equal names: neither blocks nor their order in memory enter."""
    assert set(cases["rows"]) == set(VERSIONS)
    assert len({found["layout"] for found in cases["rows"].values()}) == 1


def test_latent_rows(cases: dict[str, Any]) -> None:
    """Latent states with and without an axis of heads are the same chunk of one row that all ranks hold."""
    old, new = cases["latent"].values()
    assert old["is_right"]
    assert new["is_right"]
    assert old["layout"] == new["layout"]
    assert old["row"] == new["row"] == [0, 0]


@pytest.mark.parametrize("order", ["LBNHC", "LBHNC"])
def test_a_page_a_layer(cases: dict[str, Any], order: str) -> None:
    """On a CPU, where a block of one layer is one stretch of memory, each layer is a plane of pages."""
    assert cases["pages"][order] == {"planes": 3, "is_right": True}


@pytest.mark.parametrize("order", ["BLNHC", "BLHNC"])
def test_a_block_in_one_piece(cases: dict[str, Any], order: str) -> None:
    """Where the layers of an opaque block follow each other, they are one plane with one page a block."""
    assert cases["pages"][order] == {"planes": 1, "is_right": True}
    assert cases["pages of a GPU"] == {"planes": 1, "is_right": True}


@pytest.mark.parametrize("case", ["overlay", "overlay of lists"])
def test_groups_overlay_each_other(cases: dict[str, Any], case: str) -> None:
    """Groups over the same bytes are rows of their own; of a padded state only the payload is kept."""
    found = cases[case]
    assert found["storages"] == 1
    assert found["kinds"] == ["full", "window", "recurrent"]
    assert found["stored"] == [4, 2, 1]
    assert found["window"] == 32
    assert found["rows_of_group"] == {"0": [0], "1": [1], "2": [2]}
    assert found["is_right"] == [True, True, True]
    assert "62 B a chunk" in found["texts"][2]


def test_groups_of_several_blocks(cases: dict[str, Any]) -> None:
    """A group says what it needs and keeps of a chunk, with vLLM's number; what vLLM rebuilds is left out."""
    assert cases["groups"]["groups"] == [
        ["full", 0, 32, None, 2, 2, False, None],
        ["window", 2, 16, 48, 4, 3, True, 1],
        ["recurrent", 3, 64, None, 1, 1, False, None],
        ["chunked", 4, 16, 128, 4, 4, False, 2],
    ]


def test_chunks_of_whole_blocks(cases: dict[str, Any]) -> None:
    """A chunk is a multiple of all groups' blocks; what is none is refused with the next that is."""
    assert cases["groups"]["chunk_tokens"] == [256, 256, 128, 192, 256]
    assert cases["groups"]["chosen"] == 192
    assert "blocks of 16 and 32 tokens; set it to 96" in cases["groups"]["refused"]


def test_layers_of_several_sizes(cases: dict[str, Any]) -> None:
    """Layers of one group may differ in heads; a layer that shares another's memory is not kept twice."""
    assert cases["uniform"]["heads"] == [2, 4]
    assert "= 1 \N{MULTIPLICATION SIGN} [9, 2, 16, 16], 1 " in cases["uniform"]["text"]


def test_shards(cases: dict[str, Any]) -> None:
    """Ranks that surely hold the same share a shard; others have their own; stages do not mix, and groups differ."""
    own = [4, 1, [[0], [1], [2], [3]]]
    pairs = [2, 2, [[0], [0], [1], [1]]]
    assert cases["shards"] == {
        "tp2": [[2, 1, [[0], [1]]]],
        "tp2 in 4 parts": [[4, 1, [[0, 1], [2, 3]]]],
        "tp1 in 2 parts": [[2, 1, [[0, 1]]]],
        "tp2 pp2": [own],
        "replicated heads": [pairs],
        "replicated heads of a draft": [own],
        "latent": [[1, 4, [[0], [0], [0], [0]]]],
        "latent and states": [[1, 2, [[0], [0]]], [2, 1, [[0], [1]]]],
        "replicated heads and states": [pairs, own],
        "8 heads and 2 in 4 parts": [[4, 1, [[0, 1, 2, 3]]], [2, 1, [[0, 1]]]],
        "turns": [own],
        "turns of half": [[2, 2, [[0], [1], [0], [1]]]],
        "turns pp2": [own],
        "turns with heads": [[4, 2, [[0], [1], [0], [1], [2], [3], [2], [3]]]],
        "turns across heads": [[6, 1, [[0], [1], [2], [3], [4], [5]]]],
        "turns and a draft": [[2, 1, [[0], [1]]], [2, 1, [[0], [1]]]],
    }


def test_ranks_that_take_turns(cases: dict[str, Any]) -> None:
    """A chunk of a rank of context parallelism is its own tokens in order, under a name that tells how they take turns.

    Neither the name nor the bytes depend on the size of the blocks.
    """
    found = cases["turns"]
    assert all(all(is_right) for is_right, _ in found.values())
    names = {case: name for case, (_, name) in found.items()}
    assert names.pop("2 ranks, 16 at a time, blocks of 32") == names["2 ranks, 16 at a time, blocks of 16"]
    assert len(set(names.values())) == len(names) == 5


def test_chunks_of_two_ranks_and_of_one(cases: dict[str, Any]) -> None:
    """One rank with two parts of heads has two ranks' chunks, byte for byte, and they land where its heads are."""
    found = cases["round trip"]
    assert found["rows"] == [[[0, 0], [0, 1]], [[0, 0]], [[0, 1]]]
    assert found["is_equal"] == [True, True]
    assert found["is_put_back"]


def test_namespaces(cases: dict[str, Any]) -> None:
    """Engines share a name exactly if they can go on from each other's chunks."""
    names = cases["namespaces"]
    assert names.pop("block 32 HND") == names["block 16"]
    assert names.pop("two ranks") == names["two parts of one rank"]
    assert len(set(names.values())) == len(names)


@pytest.mark.parametrize("case", REFUSALS)
def test_refusals(cases: dict[str, Any], case: str) -> None:
    """What cannot be described with certainty is refused in a sentence that names it."""
    assert set(cases["refusals"]) == set(REFUSALS)
    assert REFUSALS[case] in cases["refusals"][case]
