"""The checksum is what the kernels' text says, adds up from pieces in any order, and shows what it promises to show."""

from itertools import pairwise

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from kvist.device.checksum import MULTIPLIERS, vector_checksum, weight
from kvist.units import KIB
from tests.support.memory import stamp
from tests.support.tiles import MASK, SOURCE_MULTIPLIERS, SOURCE_WEIGHTS, access_checksum, slow_weight

pieces = st.binary(max_size=200)
vectors = st.binary(min_size=1, max_size=200)
offsets = st.integers(0, 2**40).map(lambda index: 16 * index)


def slow_checksum(data: bytes, offset: int = 0) -> int:
    """Return the sum over whole vectors, in plain integers."""
    padded = data + bytes(-len(data) % 16)
    starts = range(0, len(padded), 16)
    return sum(access_checksum(padded[start : start + 16], offset + start) for start in starts) & MASK


def word_factors(num_vectors: int) -> np.ndarray:
    """Return what a chunk's first 32-bit words are multiplied by, shape ``[4 * num_vectors]``."""
    return (weight(np.arange(num_vectors, dtype=np.uint64))[:, None] * MULTIPLIERS).ravel()


def test_constants_are_those_of_the_kernels():
    """Multipliers, and the two constants of a weight, are the ones in the kernels' text, and all are odd."""
    assert MULTIPLIERS.tolist() == SOURCE_MULTIPLIERS
    assert [SOURCE_MULTIPLIERS[0], SOURCE_MULTIPLIERS[3]] == SOURCE_WEIGHTS
    assert all(constant % 2 for constant in SOURCE_MULTIPLIERS)
    assert len(set(SOURCE_MULTIPLIERS)) == 4


@given(pieces, offsets)
def test_it_is_the_sum_that_the_kernels_form(data: bytes, offset: int):
    """In numpy it is what plain integers give, for any bytes at any vector of a chunk, whatever holds the bytes."""
    expected = slow_checksum(data, offset)
    assert vector_checksum(data, offset=offset) == expected
    assert vector_checksum(memoryview(data), offset=offset) == expected
    assert vector_checksum(np.frombuffer(data, dtype=np.uint8), offset=offset) == expected


def test_known_sums():
    """Sums that must never change, because they are kept with chunks."""
    assert vector_checksum(b"") == 0
    assert vector_checksum(bytes(100)) == 0
    assert vector_checksum(b"\x01") == SOURCE_MULTIPLIERS[0] * slow_weight(0) & MASK
    assert vector_checksum(bytes(range(256))) == 0xC6C08AA3A71F4BE0


@given(pieces, st.lists(st.integers(0, 12), max_size=4), offsets, st.randoms(use_true_random=False))
def test_pieces_add_up(data: bytes, cuts: list[int], offset: int, random):
    """Cut at whole vectors, the pieces' sums add up to the whole's, in any order."""
    places = [0, *(min(16 * cut, len(data)) for cut in sorted(cuts)), len(data)]
    found = [vector_checksum(data[start:end], offset=offset + -(-start // 16) * 16) for start, end in pairwise(places)]
    random.shuffle(found)
    assert sum(found) & MASK == vector_checksum(data, offset=offset)


@given(pieces, st.integers(0, 40))
def test_a_part_of_a_vector_is_padded_with_zeros(data: bytes, num_zeros: int):
    """Zeros behind the last byte change nothing."""
    assert vector_checksum(data + bytes(num_zeros)) == vector_checksum(data)


@given(vectors, offsets, st.data())
def test_a_changed_byte_shows(data: bytes, offset: int, draw: st.DataObject):
    """Whichever byte changes to whatever value, the sum is another."""
    place = draw.draw(st.integers(0, len(data) - 1))
    changed = bytearray(data)
    changed[place] ^= draw.draw(st.integers(1, 255))
    assert vector_checksum(bytes(changed), offset=offset) != vector_checksum(data, offset=offset)


@given(st.binary(min_size=4, max_size=200), offsets, st.data())
def test_a_changed_word_shows(data: bytes, offset: int, draw: st.DataObject):
    """Whichever bytes of one 32-bit word change, the sum is another."""
    place = 4 * draw.draw(st.integers(0, len(data) // 4 - 1))
    word = draw.draw(st.binary(min_size=4, max_size=4))
    changed = data[:place] + word + data[place + 4 :]
    is_same = vector_checksum(changed, offset=offset) == vector_checksum(data, offset=offset)
    assert is_same == (changed == data)


@given(st.lists(st.integers(0, 2**32 - 1), min_size=2, max_size=64), st.data())
def test_swapped_words_show(words: list[int], data: st.DataObject):
    """Exchanged 32-bit words change the sum unless they are equal."""
    first, second = data.draw(st.tuples(*[st.integers(0, len(words) - 1)] * 2))
    swapped = np.array(words, dtype="<u4")
    before = vector_checksum(swapped.tobytes())
    swapped[[first, second]] = swapped[[second, first]]
    assert (vector_checksum(swapped.tobytes()) == before) == (words[first] == words[second])


def test_swapped_vectors_show():
    """In a chunk of 1 MiB, no two vectors have the same weight, so that each knows its place."""
    weights = weight(np.arange(64 * KIB, dtype=np.uint64))
    assert len(np.unique(weights)) == len(weights)


def test_two_flipped_top_bits_show():
    """In a piece of 64 KiB, any two words may change in their top bit, and any two be exchanged: the sum is another.

    A top bit counts as 2**31 times its word's factor, so of two factors the last 33 bits, with either sign, must
    differ. Words that are exchanged count as their difference times that of their factors.
    """
    low = word_factors(4 * KIB) & np.uint64(2**33 - 1)
    unsigned = np.minimum(low, np.uint64(2**33) - low)
    assert len(np.unique(unsigned)) == len(unsigned) == 16 * KIB
    data = bytearray(stamp(b"top", 256))
    before = vector_checksum(bytes(data))
    for first in range(3, 256, 4):
        for second in range(first + 4, 256, 4):
            data[first] ^= 0x80
            data[second] ^= 0x80
            assert vector_checksum(bytes(data)) != before
            data[first] ^= 0x80
            data[second] ^= 0x80


@given(st.integers(0, 2**60))
def test_weights_are_odd(index: int):
    """A weight is odd and as the kernels have it, near the start of a chunk and far from it."""
    found = weight(np.array([index], dtype=np.uint64)).tolist()
    assert found == [slow_weight(index)]
    assert found[0] % 2 == 1


def test_weights_of_a_chunk_are_odd():
    """Every one of the first million is."""
    indices = np.arange(2**20, dtype=np.uint64)
    assert np.all(weight(indices) & np.uint64(1))
    assert indices.tolist() == list(range(2**20))
