"""Bytes that mean something else have another content; those that mean the same have one, and people can read it."""

import pytest

from kvist.errors import LayoutError
from kvist.model.content import DTYPES, Description, content, describe
from kvist.model.layout import GroupKind, LayerGroup
from kvist.model.tensors import Layer, TensorView, planes
from tests.support.views import lay

SIZES = {"NB": 10, "BS": 16, "NH": 8, "HS": 64, "2HS": 128, "C": 128, "PAGE": 16384, "PBS": 160, "NHHS": 512, "NL": 4}


def one(axes: str, order: str = "", **more) -> TensorView:
    return lay(axes, SIZES | more.pop("sizes", {}), order=order, **more)


STORED = one("2 NB BS NH HS")
MEANS = content(STORED, "bfloat16")


def fingerprint(layer: Layer, text: str) -> str:
    found = planes(layer)
    block_tokens = 16 if found[0].num_tokens == 1 else found[0].num_tokens
    return LayerGroup(GroupKind.FULL, block_tokens, found).fingerprint(text)


@pytest.mark.parametrize(
    "reader",
    [
        one("2 NB NH BS HS"),
        one("NB 2 BS NH HS"),
        one("2 NB BS NH HS", "2 NB NH BS HS"),
        one("NB BS NH 2HS"),
        one("NB NH BS 2HS", gaps={"NB": 512}),
        one("NB BS NH 2HS", sizes={"NB": 5, "BS": 32}),
    ],
    ids=["HND", "block first", "HND memory as NHD", "fused NHD", "fused HND, padded", "other blocks"],
)
def test_engines_that_differ_in_strides_share(reader: TensorView):
    """HND, NHD, block-first, fused and padded caches, and blocks of any size, have one fingerprint."""
    assert content(reader, "bfloat16") == MEANS
    assert fingerprint(reader, content(reader, "bfloat16")) == fingerprint(STORED, MEANS)


def test_k_and_v_lists_and_plain_caches_mean_the_same():
    """K and V in lists, and a plain cache whose heads are merged, hold what a fused tensor holds."""
    pair = (one("NB BS NH HS"), one("NB BS NH HS", memory=1))
    assert content(pair, "bfloat16") == MEANS == "bfloat16 k,v 8x64"
    assert content(one("2 NL PBS NHHS", block_tokens=16, num_heads=8), "bfloat16") == MEANS


@pytest.mark.parametrize(
    ("reader", "text"),
    [
        (STORED, content(STORED, "float16")),
        (one("NB BS NH C"), content(one("NB BS NH C"), "bfloat16", holds="interleaved")),
        (one("2 NB BS NH HS", sizes={"NH": 4}), content(one("2 NB BS NH HS", sizes={"NH": 4}), "bfloat16")),
        (one("2 NB BS NH HS", sizes={"NH": 4, "HS": 128}), "bfloat16 k,v 4x128"),
        (one("NB PAGE"), content(one("NB PAGE"), "bfloat16", holds="cpu")),
        (one("NB BS NH HS"), content(one("NB BS NH HS"), "bfloat16", holds="k")),
    ],
    ids=["float16", "K and V alternating", "half the heads", "wider heads", "opaque page", "K alone"],
)
def test_engines_whose_bytes_mean_something_else_do_not_share(reader: TensorView, text: str):
    """Another type, packing, number or size of heads is another content and another fingerprint, whatever the sizes."""
    assert text != MEANS
    assert fingerprint(reader, text) != fingerprint(STORED, MEANS)


def test_what_axes_do_not_say_is_part_of_the_content():
    """Packing, scales and type each make a content of their own."""
    small = one("2 NB BS NH HS", itemsize=1)
    row = one("NB BS C", itemsize=1, sizes={"C": 656})
    texts = [content(small, dtype, scales="checkpoint") for dtype, nbytes in DTYPES.items() if nbytes == 1]
    texts += [content(small, "float8_e4m3fn", scales="none")]
    texts += [content(row, "uint8", holds=holds) for holds in ("fp8_ds_mla", "nvfp4_ds_mla")]
    texts += [content(one("NB BS NH C", itemsize=1), "uint8", holds="int8-inline-scales")]
    texts += [content(one("NB BS NH C", itemsize=1), "uint8", holds="int8", scales="checkpoint")]
    assert len(set(texts)) == len(texts) == 9
    assert texts[5] == "uint8 fp8_ds_mla 1x656"
    assert texts[0] == "float8_e4m3fn k,v 8x64 scales=checkpoint"
    unequal = (one("NB BS NH HS"), one("NB BS NH HS", memory=1, sizes={"HS": 32}))
    assert content(unequal, "bfloat16") == "bfloat16 k,v 8x64,8x32"


@pytest.mark.parametrize(
    ("layer", "dtype", "names", "message"),
    [
        (STORED, "float64", {}, "KV of type 'float64' is not served; served are"),
        (STORED, "float32", {}, "float32 has 4 bytes, and elements of .* have 2"),
        (one("NB BS C"), "bfloat16", {}, "axes 'NB BS C' do not say what a row holds; name it"),
        (one("NB PAGE"), "bfloat16", {}, "axes 'NB PAGE' do not say what a row holds"),
        (one("NB BS NH HS"), "bfloat16", {}, "axes 'NB BS NH HS' do not say what a row holds"),
        (STORED, "bfloat16", {"holds": "kv"}, "say that rows hold K and V; holds 'kv' is superfluous"),
        (one("NB BS C"), "bfloat16", {"holds": "a|b"}, "holds 'a|b' must be made of letters"),
        (STORED, "bfloat16", {"scales": "a b"}, "scales 'a b' must be made of letters"),
        (one("2 NB BS NH HS", itemsize=1), "int8", {}, "of type int8 mean nothing without their scales"),
        ((STORED, STORED), "bfloat16", {}, "K and V of one layer are tensors of their own"),
    ],
)
def test_what_is_not_named_is_refused(layer: Layer, dtype: str, names: dict[str, str], message: str):
    """A type that is not served, and a meaning that nobody named, are refused in a sentence."""
    with pytest.raises(LayoutError, match=message):
        content(layer, dtype, **names)


def shaped(axes: str, shape: tuple[int, ...], itemsize: int = 2, memory: int = 0, block_stride: int = 0) -> TensorView:
    strides = [itemsize]
    for size in reversed(shape[1:]):
        strides.insert(0, strides[0] * size)
    return TensorView(memory, 0, shape, (block_stride or strides[0], *strides[1:]), itemsize, axes)


def layers(num: int, axes: str, shape: tuple[int, ...], itemsize: int = 2, block_stride: int = 0) -> list[Layer]:
    return [shaped(axes, shape, itemsize, memory, block_stride) for memory in range(num)]


TIMES = "\N{MULTIPLICATION SIGN}"


def test_alike_tensors_are_described_once():
    """Layers of one shape are one line each, symbols and sizes; layers that share KV count once."""
    found = layers(32, "2 NB BS NH HS", (2, 2048, 16, 8, 128))
    assert describe([*found, found[3]], block_tokens=16, blocks_per_chunk=16) == Description(
        symbolic=(f"32 {TIMES} [2, NB, BS, NH, HS]",),
        concrete=(f"32 {TIMES} [2, 2048, 16, 8, 128]",),
        token_nbytes=32 * 4096,
        block_nbytes=32 * 65536,
        chunk_nbytes=32 * 1048576,
    )
    mixed = layers(3, "NB BS NH 2HS", (10, 16, 8, 128))
    mixed[1] = shaped("NB BS NH 2HS", (10, 16, 4, 128), memory=1)
    text = describe(mixed, block_tokens=16, blocks_per_chunk=16)
    assert text.concrete == (f"2 {TIMES} [10, 16, 8, 128]", f"1 {TIMES} [10, 16, 4, 128]")
    assert text.symbolic == (f"2 {TIMES} [NB, BS, NH, 2HS]", f"1 {TIMES} [NB, BS, NH, 2HS]")
    pairs = [(one("NB BS NH HS", memory=2 * layer), one("NB BS NH HS", memory=2 * layer + 1)) for layer in range(3)]
    text = describe(pairs, block_tokens=16, blocks_per_chunk=16)
    assert (*text.symbolic, *text.concrete) == (f"3 {TIMES} K, V [NB, BS, NH, HS]", f"3 {TIMES} K, V [10, 16, 8, 64]")
    unequal = (one("NB BS NH HS"), one("NB BS NH HS", memory=1, sizes={"HS": 32}))
    assert describe([unequal], block_tokens=16, blocks_per_chunk=1).concrete == (
        f"1 {TIMES} K [10, 16, 8, 64], V [10, 16, 8, 32]",
    )


GEMMA = [*layers(2, "2 NB BS NH HS", (2, 10, 16, 8, 64))]
NUMBERS = {
    "4 layers": (layers(4, "2 NB BS NH HS", (2, 10, 16, 8, 64)), 16, 16, 8192, 2097152),
    "heads 8, 4, 8": (
        [shaped("2 NB BS NH HS", (2, 10, 16, heads, 64), 2, memory) for memory, heads in enumerate((8, 4, 8))],
        16, 16, 5120, 1310720,
    ),
    "Gemma-like, full": (GEMMA, 16, 16, 4096, 1048576),
    "Gemma-like, window": (layers(2, "2 NB BS NH HS", (2, 10, 32, 4, 64)), 32, 8, 2048, 524288),
    "Gemma-like, window of 128": (layers(2, "2 NB BS NH HS", (2, 10, 32, 4, 64)), 32, 4, 2048, 262144),
    "compressed MLA": (layers(1, "NB BS C", (10, 64, 576)), 256, 1, 288, 73728),
    "indexer": (layers(1, "NB PAGE PAGE", (10, 64, 132), 1, 20000), 256, 1, 33, 8448),
    "tail of 2 states": (layers(1, "NB BS C", (10, 2, 576)), 256, 1, 9, 2304),
    "compressed MLA, indexer, tail": (
        [shaped("NB BS C", (10, 64, 576)), shaped("NB PAGE PAGE", (10, 64, 132), 1, 1, 20000),
         shaped("NB BS C", (10, 2, 576), 2, 2)],
        256, 1, 330, 84480,
    ),
    "K list and V list, 3 layers": (
        [(shaped("NB BS NH HS", (10, 16, 8, 64), 2, 2 * n), shaped("NB BS NH HS", (10, 16, 8, 64), 2, 2 * n + 1))
         for n in range(3)],
        16, 16, 6144, 2 * 3 * 256 * 512 * 2,
    ),
    "Llama-3.1-8B": (layers(32, "NB NH BS 2HS", (10, 8, 16, 256)), 16, 1, 131072, 2 << 20),
    "Llama-3.3-70B TP8": (layers(80, "NB NH BS 2HS", (10, 1, 16, 256)), 16, 1, 40960, 640 << 10),
    "Qwen3-32B TP2 fp8": (layers(64, "NB NH BS 2HS", (10, 4, 16, 256), 1), 16, 1, 65536, 1 << 20),
    "DeepSeek-V3": (layers(61, "NB BS C", (10, 64, 576)), 64, 1, 70272, 61 * 72 << 10),
    "DeepSeek-V3 fp8_ds_mla": (layers(61, "NB BS C", (10, 64, 656), 1), 64, 1, 40016, 61 * 41 << 10),
    "Mamba state": (layers(1, "NB PAGE PAGE PAGE", (1024, 1, 1, 18688), 1, 65536), 128, 1, 146, 18688),
}  # fmt: skip


@pytest.mark.parametrize("name", NUMBERS)
def test_bytes_of_known_models(name: str):
    """Bytes of a token and of a chunk are those of the worked examples; padding is not counted."""
    group, block_tokens, blocks_per_chunk, token_nbytes, chunk_nbytes = NUMBERS[name]
    found = describe(group, block_tokens=block_tokens, blocks_per_chunk=blocks_per_chunk)
    assert (found.token_nbytes, found.chunk_nbytes) == (token_nbytes, chunk_nbytes)


def test_a_fused_view_of_a_block_outermost_pool_has_the_pools_stride():
    """One of four layers of a block-outermost pool: 8 heads, K and V of 64 elements, 65,536 from block to block."""
    pool = lay("NL NB NH BS 2HS", SIZES, order="NB NL NH BS 2HS", offset=0)
    plane = planes(pool)[1]
    assert (plane.num_kv, plane.num_heads, plane.row_nbytes, plane.block_stride) == (2, 8, 128, 65536 * 2)
    assert planes(shaped("NB NH BS 2HS", (10, 8, 16, 128), block_stride=65536 * 2)) == planes(pool)[:1]


def test_counts_that_are_none_are_refused():
    """A group has layers, its blocks have tokens, its chunks have blocks."""
    for group, block_tokens, blocks_per_chunk in [([], 16, 1), (GEMMA, 0, 1), (GEMMA, 16, 0)]:
        with pytest.raises(LayoutError, match=f"{len(group)} layers, {block_tokens} tokens .* and {blocks_per_chunk}"):
            describe(group, block_tokens=block_tokens, blocks_per_chunk=blocks_per_chunk)
