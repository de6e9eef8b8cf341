"""A key says everything that decides what bytes mean, once, in the same way everywhere."""

import hashlib
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvist.errors import KeyInvalid
from kvist.model.keys import (
    FIELD_NBYTES_MAX,
    Digest,
    MediaItem,
    Namespace,
    as_tokens,
    chain_digests,
    chunk_keys,
    root_digest,
    split_digests,
    tail_digests,
)

LLAMA = Namespace(
    model="meta-llama/Llama-3.1-8B",
    revision="d04e592bb4f6aa9cfee91e2e20afa771667e1d4b",
    dtype="bfloat16",
    layout="0123456789abcdef",
    shards="tp2.pp1",
    chunk_tokens=4,
    weights="awq",
)
IMAGE = MediaItem("sha256:cafe", start=2, num_tokens=3)

ROOT = "f80eae38b839383bd33a0281d3f6291a"
ROOT_ADAPTER = "d8528cde8ee599f76053eda6a74d1428"
ROOT_SALT = "a84585d7a154714bfbc8d087224e31fa"
ROOT_ADAPTER_SALT = "1215e0db4a551aa3d2a96b7925714bb6"
ROOT_TENANT = "ec1229c69c66db229a24067ea8fdaacf"
ROOT_TENANT_SALT = "f3b833041b59f71bd3f3c378824c8481"
CHAIN = "bc084243abbad4596e8de2b216d8b677cf116cc5caa5c86cedc9a2a6ca75e50a"
CHAIN_MEDIA = "e03c8b124ea7a04183aa3de3d51cc436028183d7cb4d959d3a346bc49552b49e"
TAILS = "4b2e422d909e3857f2e9b319f7db957668b5e5f2ae95c71198ada88b92333393"
TAILS_MEDIA = "e5973af5b03bd44f337ae50dcee15144db6ef6f06a0988be6da753fe08156826"


def reference_text(value: str) -> bytes:
    raw = value.encode()
    return bytes([len(raw) >> 24, len(raw) >> 16 & 255, len(raw) >> 8 & 255, len(raw) & 255]) + raw


def reference_root(namespace: Namespace, adapter: str = "", salt: str = "", tenant: str = "") -> bytes:
    written = reference_text("kvist key 1")
    for name in ("model", "revision", "dtype", "layout", "shards", "chunk_tokens", "weights"):
        written += reference_text(name) + reference_text(str(getattr(namespace, name)))
    written += reference_text(adapter) + reference_text(salt) + (reference_text(tenant) if tenant else b"")
    return hashlib.sha256(written).digest()[:16]


def reference_chain(root: bytes, tokens: list[int], width: int, media: tuple[MediaItem, ...] = ()) -> bytes:
    chain, link = b"", root
    for first in range(0, len(tokens) // width * width, width):
        written = link + b"".join(token.to_bytes(4, "little") for token in tokens[first : first + width])
        link = hashlib.sha256(written + reference_media(first, width, media)).digest()[:16]
        chain += link
    return chain


def reference_tails(
    parent: bytes, tokens: list[int], width: int, first: int = 0, media: tuple[MediaItem, ...] = ()
) -> bytes:
    tails = b""
    for length in range(width, len(tokens) + 1, width):
        written = parent + b"\xff\xff\xff\xff" + length.to_bytes(8, "big")
        written += b"".join(token.to_bytes(4, "little") for token in tokens[:length])
        tails += hashlib.sha256(written + reference_media(first, length, media)).digest()[:16]
    return tails


def reference_media(first: int, length: int, media: tuple[MediaItem, ...]) -> bytes:
    written = b""
    for item in media:
        if set(range(item.start, item.start + item.num_tokens)) & set(range(first, first + length)):
            written += reference_text(item.identifier)
            written += (item.start - first).to_bytes(8, "big", signed=True)
            written += item.num_tokens.to_bytes(8, "big")
    return written


def test_roots_are_the_golden_ones():
    """The root of a namespace is these bytes, in every version, and so it is by the format as it is written down."""
    for golden, place in {
        ROOT: {},
        ROOT_ADAPTER: {"adapter": "lora:7"},
        ROOT_SALT: {"salt": "tenant"},
        ROOT_ADAPTER_SALT: {"adapter": "lora:7", "salt": "tenant"},
        ROOT_TENANT: {"tenant": "team"},
        ROOT_TENANT_SALT: {"salt": "tenant", "tenant": "team"},
    }.items():
        assert root_digest(LLAMA, **place).hex() == golden
        assert reference_root(LLAMA, **place).hex() == golden


def test_chains_are_the_golden_ones():
    """The digests of a prompt are these bytes, with and without media; the partial last chunk has none."""
    tokens = list(range(100, 110))
    root = root_digest(LLAMA)
    for golden, media in ((CHAIN, ()), (CHAIN_MEDIA, (IMAGE,))):
        assert len(bytes.fromhex(golden)) == 2 * 16
        assert chain_digests(root, as_tokens(tokens), 4, media=media).hex() == golden
        assert reference_chain(root, tokens, 4, media).hex() == golden


def test_tails_are_the_golden_ones():
    """The tails behind a prompt's chunks are these bytes, with and without media; a partial last block has none."""
    tokens = list(range(108, 113))
    parent = Digest(bytes.fromhex(CHAIN)[16:])
    for golden, media in ((TAILS, ()), (TAILS_MEDIA, (MediaItem("sha256:cafe", start=7, num_tokens=2),))):
        assert len(bytes.fromhex(golden)) == 2 * 16
        assert tail_digests(parent, as_tokens(tokens), 2, start=8, media=media).hex() == golden
        assert reference_tails(parent, tokens, 2, 8, media).hex() == golden


@pytest.mark.parametrize("seed", ["0", "1", "random"])
def test_keys_do_not_depend_on_the_process(seed: str):
    """Another process, whatever its hash seed, comes to the same digests."""
    program = (
        "from kvist.model.keys import *\n"
        f"root = root_digest({LLAMA!r})\n"
        f"print(root.hex(), chain_digests(root, as_tokens(range(100, 110)), 4, media=({IMAGE!r},)).hex())"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], env={"PYTHONHASHSEED": seed}, capture_output=True, text=True, check=True
    )
    assert done.stdout.split() == [ROOT, CHAIN_MEDIA]


@pytest.mark.parametrize(
    "change",
    [
        {"model": "meta-llama/Llama-3.1-8B-Instruct"},
        {"revision": ""},
        {"dtype": "float8_e4m3fn"},
        {"layout": "0123456789abcdee"},
        {"shards": "tp1.pp2"},
        {"chunk_tokens": 8},
        {"weights": ""},
    ],
    ids=lambda change: next(iter(change)),
)
def test_every_field_of_a_namespace_counts(change: dict[str, str | int]):
    """A namespace that differs in one field shares no root; the same one, made again, does."""
    fields = {name: getattr(LLAMA, name) for name in Namespace.__slots__}
    assert root_digest(Namespace(**fields)) == root_digest(LLAMA)
    assert root_digest(Namespace(**{**fields, **change})) != root_digest(LLAMA)


def test_every_field_of_a_namespace_is_tried_above():
    """The list of changes is complete, so that a new field cannot be left out of the key."""
    marks = test_every_field_of_a_namespace_counts.pytestmark
    changed = {name for mark in marks for change in mark.args[1] for name in change}
    assert changed == set(Namespace.__slots__)


def test_adapters_and_tenants_are_apart():
    """Adapters, salts and tenants are spaces of their own; the same text is another thing in each of the three.

    No salt can be written so that it stands for another's salt and tenant.
    """
    places = [{}, {"adapter": "x"}, {"adapter": "y"}, {"salt": "x"}, {"salt": "y"}, {"adapter": "x", "salt": "y"}]
    places += [{"tenant": "x"}, {"tenant": "y"}, {"salt": "x", "tenant": "y"}, {"salt": "\0\0\0\1x", "tenant": "y"}]
    places += [{"salt": "x\0\0\0\1y"}, {"salt": "\0\0\0\1xy"}]
    assert len({root_digest(LLAMA, **place) for place in places}) == len(places)
    assert [root_digest(LLAMA, **place) for place in places] == [root_digest(LLAMA, **place) for place in places]


def test_no_salt_is_the_empty_salt():
    """An absent salt, adapter or tenant is the empty one."""
    assert root_digest(LLAMA) == root_digest(LLAMA, adapter="", salt="", tenant="")


texts = st.text(alphabet="as\0lt", max_size=3) | st.sampled_from(["adapter", "salt", "weights", "dtype", "\ud800"])
identities = st.tuples(texts, texts, texts, texts, texts, st.integers(1, 3), texts, texts, texts, texts)


@given(st.lists(identities, min_size=2, max_size=20))
def test_no_text_can_be_moved_from_field_to_field(found: list[tuple]):
    """Two identities have one root only if they are equal in every field."""
    roots = {}
    for identity in found:
        *fields, adapter, salt, tenant = identity
        root = root_digest(Namespace(*fields), adapter=adapter, salt=salt, tenant=tenant)
        roots.setdefault(root, set()).add(identity)
    assert len(roots) == len(set(found))


tokens_and_width = st.tuples(st.lists(st.integers(0, 2**31 - 1), max_size=24), st.integers(1, 5))
media_items = st.lists(
    st.builds(MediaItem, st.text("ab", min_size=1, max_size=2), st.integers(0, 24), st.integers(1, 24)), max_size=3
)


@given(tokens_and_width, media_items)
def test_a_chain_is_what_the_format_says(prompt: tuple[list[int], int], media: list[MediaItem]):
    """Any prompt's digests are those of the plain re-implementation."""
    tokens, width = prompt
    expected = reference_chain(b"r" * 16, tokens, width, tuple(media))
    assert chain_digests(Digest(b"r" * 16), as_tokens(tokens), width, media=media) == expected


@given(tokens_and_width, media_items, st.data())
def test_a_chain_resumes(prompt: tuple[list[int], int], media: list[MediaItem], data: st.DataObject):
    """Hashing on from an earlier digest, with the new tokens alone, is the same as hashing in one go."""
    tokens, width = as_tokens(prompt[0]), prompt[1]
    root = root_digest(LLAMA)
    whole = chain_digests(root, tokens, width, media=media)
    num_known = data.draw(st.integers(0, len(tokens) // width))
    parent = Digest((root + whole)[num_known * 16 : num_known * 16 + 16])
    rest = chain_digests(parent, tokens[num_known * width :], width, start=num_known * width, media=media)
    assert whole[: num_known * 16] + rest == whole


@given(tokens_and_width, media_items, st.data())
def test_tails_are_what_the_format_says(prompt: tuple[list[int], int], media: list[MediaItem], data: st.DataObject):
    """Any prompt's tails, wherever it begins, are those of the plain re-implementation."""
    tokens, width = prompt
    start = data.draw(st.integers(0, 24))
    expected = reference_tails(b"r" * 16, tokens, width, start, tuple(media))
    assert tail_digests(Digest(b"r" * 16), as_tokens(tokens), width, start=start, media=media) == expected


# Tokens whose bytes are those of other fields: the lengths of a tail, and of texts and places.
twisted_tokens = st.lists(st.sampled_from([0, 1, 2, 3, 1 << 24, 2 << 24, 3 << 24, 2**31 - 1]), max_size=12)


@given(st.lists(st.tuples(twisted_tokens, media_items), min_size=1, max_size=8), st.integers(1, 4))
def test_a_tail_is_no_chunk_and_no_other_tail(prompts: list[tuple[list[int], list[MediaItem]]], width: int):
    """Behind one parent, two digests are equal only of the same tokens and media, as a tail or as a chunk."""
    parent, named = Digest(b"r" * 16), {}
    for tokens, media in prompts:
        for length in range(width, len(tokens) + 1, width):
            for is_tail in (False, True):
                make, part = (tail_digests if is_tail else chain_digests), as_tokens(tokens[:length])
                made = split_digests(make(parent, part, width if is_tail else length, media=media))[-1]
                inside = tuple(item for item in media if item.start < length)
                named.setdefault(made, set()).add((is_tail, tuple(tokens[:length]), inside))
    assert all(len(meanings) == 1 for meanings in named.values())


def test_media_are_not_read_as_tokens():
    """A tail with an image is not the longer tail whose last tokens are the bytes that stand for the image."""
    parent, image = Digest(b"r" * 16), MediaItem("abcd", 0, 1)
    posing = np.frombuffer(reference_media(0, 1, (image,)), dtype="<i4")
    assert len(posing) == 6
    (short,) = split_digests(tail_digests(parent, as_tokens([5]), 1, media=[image]))
    longer = split_digests(tail_digests(parent, as_tokens([5, *posing]), 1))
    assert short not in longer


@given(tokens_and_width, media_items)
def test_no_link_of_a_chain_is_a_tail(prompt: tuple[list[int], int], media: list[MediaItem]):
    """The tails behind all links of a prompt's chain, those as long as a chunk included, are none of its links."""
    tokens, width = as_tokens(prompt[0]), prompt[1]
    root = root_digest(LLAMA)
    links = [root, *split_digests(chain_digests(root, tokens, width, media=media))]
    tails = [
        tail
        for number, link in enumerate(links)
        for tail in split_digests(tail_digests(link, tokens[number * width :], 1, start=number * width, media=media))
    ]
    assert len({*links, *tails}) == len(links) + len(tails)


def test_media_inside_a_tail_matter_and_others_do_not():
    """An image changes the tails that it reaches into, and only these; where it stands inside them counts."""

    def tails(*media: MediaItem) -> list[Digest]:
        parent = root_digest(LLAMA)
        return split_digests(tail_digests(parent, as_tokens(range(6)), 2, start=8, media=media))

    assert tails() == tails(MediaItem("dog", 0, 8)) == tails(MediaItem("dog", 14, 2))
    for item, num_equal in (
        (MediaItem("dog", 13, 9), 2),
        (MediaItem("dog", 11, 1), 1),
        (MediaItem("dog", 10, 1), 1),
        (MediaItem("dog", 9, 1), 0),
        (MediaItem("dog", 0, 9), 0),
    ):
        assert [a == b for a, b in zip(tails(), tails(item), strict=True)] == [n < num_equal for n in range(3)]
    inside = [MediaItem("dog", 9, 2), MediaItem("cat", 9, 2), MediaItem("dog", 8, 3), MediaItem("dog", 9, 3)]
    assert len({tails(item)[0] for item in inside}) == len(inside)


@given(tokens_and_width, st.data())
def test_an_early_token_changes_all_that_follows(prompt: tuple[list[int], int], data: st.DataObject):
    """Digests agree up to the chunk of the first difference, and never again after it."""
    tokens, width = prompt
    if len(tokens) < width:
        return
    place = data.draw(st.integers(0, len(tokens) // width * width - 1))
    other = [*tokens]
    other[place] = (other[place] + data.draw(st.integers(1, 1000))) % 2**31
    first, second = (split_digests(chain_digests(Digest(b"r" * 16), as_tokens(t), width)) for t in (tokens, other))
    assert [a == b for a, b in zip(first, second, strict=True)] == [n < place // width for n in range(len(first))]


def test_media_isolate_from_where_they_begin():
    """Another image under the same tokens shares the text before it, and nothing from its chunk on."""

    def chain(*media: MediaItem) -> list[Digest]:
        return split_digests(chain_digests(root_digest(LLAMA), as_tokens(range(16)), 4, media=media))

    dog = chain(MediaItem("dog", 5, 6))
    assert dog == chain(MediaItem("dog", 5, 6))
    for other in (
        chain(),
        chain(MediaItem("cat", 5, 6)),
        chain(MediaItem("dog", 6, 5)),
        chain(MediaItem("dog", 5, 7)),
        chain(MediaItem("dog", 5, 6), MediaItem("dog", 7, 1)),
    ):
        assert [a == b for a, b in zip(dog, other, strict=True)] == [True, False, False, False]


def test_tokens_of_any_integral_kind_give_one_key():
    """A list, a tuple, and arrays of every width name the same tokens."""
    values = [0, 1, 151643, 2**31 - 1]
    kinds = [values, tuple(values), *(np.array(values, dtype) for dtype in ("i4", "u4", "i8", "u8", ">i4", ">i8"))]
    chains = {chain_digests(root_digest(LLAMA), as_tokens(kind), 4) for kind in kinds}
    assert len(chains) == 1
    assert len(as_tokens([])) == 0


@pytest.mark.parametrize(
    ("tokens", "named"),
    [
        ([0, -1], "-1"),
        ([2**31], "2147483648"),
        (np.array([2**31], dtype=np.uint32), "2147483648"),
        ([2**64], "object"),
        ([2**200, -1], "object"),
        ([1.0, 2.0], "float64"),
        (np.array([1.5]), "float64"),
        (["1"], "<U1"),
        ([[1, 2], [3, 4]], r"\(2, 2\)"),
    ],
    ids=str,
)
def test_what_is_no_token_is_refused(tokens: object, named: str):
    """An id that does not fit in 31 bits, or is no integer, is refused by name and never wrapped."""
    with pytest.raises(KeyInvalid, match=named):
        as_tokens(tokens)


def test_texts_that_are_too_long_are_refused():
    """A text is taken whole or not at all: the refusal names its length, in bytes."""
    longest = "é" * (FIELD_NBYTES_MAX // 2)
    assert root_digest(LLAMA, salt=longest) != root_digest(LLAMA)
    length = f"{FIELD_NBYTES_MAX + 1} bytes"
    for make in (
        lambda: root_digest(LLAMA, salt=longest + "x"),
        lambda: root_digest(LLAMA, adapter=longest + "x"),
        lambda: MediaItem(longest + "x", 0, 1),
        lambda: Namespace(longest + "x", "", "", "", "", 1),
    ):
        with pytest.raises(KeyInvalid, match=length):
            make()


@pytest.mark.parametrize("item", [("", 0, 1), ("x", -1, 1), ("x", 0, 0)], ids=str)
def test_media_without_identity_or_place_are_refused(item: tuple[str, int, int]):
    """A media item names its content and the positions that it fills."""
    with pytest.raises(KeyInvalid, match="media item"):
        MediaItem(*item)


@pytest.mark.parametrize("chunk_tokens", [0, -16])
def test_a_chunk_has_tokens(chunk_tokens: int):
    """A namespace of chunks without tokens is refused with the number."""
    with pytest.raises(KeyInvalid, match=str(chunk_tokens)):
        Namespace("m", "", "", "", "", chunk_tokens)


@given(st.lists(st.binary(min_size=16, max_size=16), max_size=5), st.integers(0, 2**16 - 1), st.integers(0, 2**16 - 1))
def test_keys_of_groups_and_shards_are_apart(digests: list[bytes], group: int, shard: int):
    """A key is its digest, group and shard, written apart; packed digests come back as they were."""
    assert split_digests(b"".join(digests)) == digests
    keys = chunk_keys([Digest(digest) for digest in digests], group=group, shard=shard)
    assert [(key[:16], key[16:18], key[18:]) for key in keys] == [
        (digest, group.to_bytes(2, "big"), shard.to_bytes(2, "big")) for digest in digests
    ]


@pytest.mark.parametrize("num", [1, 15, 17])
def test_ragged_digests_are_refused(num: int):
    """Packed digests that are no whole number of them are refused with their length."""
    with pytest.raises(KeyInvalid, match=f"{num} bytes"):
        split_digests(b"x" * num)
