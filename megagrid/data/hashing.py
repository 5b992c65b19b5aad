"""Random numbers that are looked up, not drawn: everything shuffled here is a hash of what it is for.

A generator has a state, so the order of a run would depend on how often it was called, and NumPy's may change
from version to version. A hash of (seed, purpose, index) has neither fault: any sample of any epoch
can be found at once, by any rank, after any restart.
"""

from __future__ import annotations

import hashlib

import numpy as np

_MASK64 = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15
_MIX1 = 0xBF58476D1CE4E5B9
_MIX2 = 0x94D049BB133111EB


def key64(*parts: int | str) -> int:
    """A 64-bit key of numbers and words, the same on every machine and for ever."""
    text = "\x1f".join(f"{type(part).__name__}:{part}" for part in parts)
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")


def hash64(key: int, index: np.ndarray) -> np.ndarray:
    """uint64 hashes of ``index`` (any integers) under ``key``; same shape.

    The finaliser of SplitMix64 (Steele, Lea and Flood, OOPSLA 2014, figure 16) on a keyed counter.
    """
    with np.errstate(over="ignore"):
        z = np.asarray(index).astype(np.uint64) * np.uint64(_GOLDEN) + np.uint64(key & _MASK64)
        z = (z ^ (z >> np.uint64(30))) * np.uint64(_MIX1)
        z = (z ^ (z >> np.uint64(27))) * np.uint64(_MIX2)
        return z ^ (z >> np.uint64(31))


class Permutation:
    """A keyed shuffle of 0 … size−1 in no memory: ``permutation(i)`` is where i goes.

    A Feistel network permutes the smallest 2^(2·half) ≥ size; what falls outside [0, size) is sent through it
    again until it falls inside ("cycle walking", Black and Rogaway, CT-RSA 2002, section 3), which keeps it a bijection.

        left, right = right, left XOR hash(round key, right)          × ROUNDS
    """

    ROUNDS = 6
    # Two bits a side would give the round functions next to nothing to mix.
    MIN_HALF_BITS = 3

    def __init__(self, size: int, *key: int | str):
        self.size = size
        bits = max(size - 1, 1).bit_length()
        self._half = max((bits + 1) // 2, self.MIN_HALF_BITS)
        self._round_keys = [key64("permutation", round_, *key) for round_ in range(self.ROUNDS)]

    def __call__(self, index: int) -> int:
        return int(self.of(np.asarray([index], dtype=np.int64))[0])

    def of(self, indices: np.ndarray) -> np.ndarray:
        """Where each of ``indices`` (int64 [n], each in [0, size)) goes; int64 [n]."""
        out = self._feistel(np.asarray(indices, dtype=np.int64).astype(np.uint64))
        while (outside := np.flatnonzero(out >= self.size)).size:
            out[outside] = self._feistel(out[outside])
        return out.astype(np.int64)

    def _feistel(self, x: np.ndarray) -> np.ndarray:
        half, mask = np.uint64(self._half), np.uint64((1 << self._half) - 1)
        left, right = x >> half, x & mask
        for key in self._round_keys:
            left, right = right, left ^ (hash64(key, right) & mask)
        return (left << half) | right
