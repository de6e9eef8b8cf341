"""The checksum of the copy kernels, in numpy: what it is, and the reference that the kernels are tested against.

Over a chunk's bytes, padded with zeros to whole vectors of 16; ``v`` at index ``i`` is four little-endian uint32::

    sum over i of  (v[0] * M[0] + v[1] * M[1] + v[2] * M[2] + v[3] * M[3]) * weight(i)      (mod 2**64)

The laws: it is linear in every byte, so pieces add up in any order; every multiplier and weight is odd, so a change
inside one 32-bit word always shows. Of other changes about one in 2**64 goes unseen and, where only the topmost bits of
a few words change, at worst one in 2**32. It detects corruption, not tampering. The constants are odd and well mixed:
the golden ratio, and primes of xxHash64 and SplitMix64.
"""

from __future__ import annotations

from typing import Final

import numpy as np
import numpy.typing as npt

from kvist.units import ceil_div

MULTIPLIERS: Final = np.array(
    [0x9E3779B97F4A7C15, 0xC2B2AE3D27D4EB4F, 0x165667B19E3779F9, 0xD6E8FEB86659FD93], dtype=np.uint64
)
_VECTOR_NBYTES: Final = 16


def vector_checksum(data: bytes | memoryview | npt.NDArray[np.uint8], *, offset: int = 0) -> int:
    """Return the checksum of a piece that lies ``offset`` bytes, a multiple of 16, behind its chunk's start."""
    assert offset % _VECTOR_NBYTES == 0
    found = np.frombuffer(data, dtype=np.uint8)
    vectors = np.zeros((ceil_div(len(found), _VECTOR_NBYTES), 4), dtype="<u4")
    vectors.view(np.uint8).reshape(-1)[: len(found)] = found
    with np.errstate(over="ignore"):
        dots = (vectors.astype(np.uint64) * MULTIPLIERS).sum(axis=1, dtype=np.uint64)
        weights = weight(np.arange(len(dots), dtype=np.uint64) + np.uint64(offset // _VECTOR_NBYTES))
        return int((dots * weights).sum(dtype=np.uint64))


def weight(index: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """Return the odd factor of each vector index."""
    with np.errstate(over="ignore"):
        mixed: npt.NDArray[np.uint64] = (index + np.uint64(1)) * MULTIPLIERS[0]
        mixed ^= mixed >> np.uint64(32)
        mixed *= MULTIPLIERS[3]
        mixed ^= mixed >> np.uint64(32)
        mixed |= np.uint64(1)
    return mixed
