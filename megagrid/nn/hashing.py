"""Random numbers as a function of what they are for, not of when they are drawn.

There is no generator and no state. A number depends on a key (seed, name, step, sample) and an
index, so any box of any tensor can be filled on any rank, in any order, with the same bits; there
is nothing to save in a checkpoint and nothing to restore before a recomputation. The idea is that
of counter-based generators (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011).
"""

from __future__ import annotations

import hashlib

import torch
from torch import Tensor

_GOLDEN = -7046029254386353131  # 0x9E3779B97F4A7C15 as a signed 64-bit number
_GOLDEN_INVERSE = -1018231460777725123  # modulo 2^64
_MIX_1 = -4658895280553007687  # 0xBF58476D1CE4E5B9
_MIX_2 = -7723592293110705685  # 0x94D049BB133111EB
_LANES = 0x0000FFFF0000FFFF
"""Two of a word's four 16-bit numbers, each with room to add up others."""


def key(*parts: int | str) -> int:
    """A signed 64-bit key of `parts`, the same on every machine."""
    digest = hashlib.blake2b("\0".join(map(str, parts)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little", signed=True)


def mix(x: Tensor) -> Tensor:
    """splitmix64's output function (Steele, Lea, Flood 2014), elementwise on int64, in place."""
    x ^= _shift_right(x, 30)
    x *= _MIX_1
    x ^= _shift_right(x, 27)
    x *= _MIX_2
    x ^= _shift_right(x, 31)
    return x


def bits(stream: int | Tensor, index: Tensor) -> Tensor:
    """64 random bits for each element of `index` (int64), of the stream(s) given by key(s)."""
    return mix(index * _GOLDEN + stream)


def normal(stream: int, index: Tensor) -> Tensor:
    """A standard normal number for each element of `index`, as float64.

    The sum of twelve 16-bit uniforms, less six: exact in integers, therefore bit-equal on every
    device and for every shape, which log and cos aren't. Variance 1, tails end at 6.
    """
    counter = index * _GOLDEN
    lanes = torch.zeros_like(index)
    for draw in range(3):
        word = mix(counter + key(stream, draw))
        lanes += word & _LANES
        lanes += word.bitwise_right_shift_(16).bitwise_and_(_LANES)
    total = (lanes & 0xFFFFFFFF) + (lanes >> 32)
    # Twelve uniforms on {0 … 65535}: mean 12 * 65535 / 2, each of variance (65536^2 - 1) / 12.
    return (total.double() - 6 * 65535) / 65536


def keep(stream: Tensor, index: Tensor, probability: float) -> Tensor:
    """A boolean mask, true with `probability`, for streams (keys) broadcast against `index`."""
    threshold = round(probability * 2**31)
    # The same as bits(stream, index), but the key goes in first: a compiler takes what is computed
    # from an arange alone for an index into memory, and an index for a number that never overflows.
    word = mix((index + stream * _GOLDEN_INVERSE) * _GOLDEN)
    return _shift_right(word, 33) < threshold


def _shift_right(x: Tensor, count: int) -> Tensor:
    """Logical shift: torch's >> on int64 copies the sign into the bits that it frees."""
    if count == 0:
        return x
    return (x >> count).bitwise_and_((1 << (64 - count)) - 1)
