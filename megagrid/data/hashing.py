"""Random numbers that are looked up, not drawn: a shuffle is a hash of what it is for.

A generator has a state, so the order of a run would depend on how often it was called, and NumPy's
may change from version to version. A hash of (seed, purpose, index) has neither fault: any sample
of any epoch can be found at once, by any rank, after any restart.
"""

from __future__ import annotations

import hashlib
from typing import TypeVar

import numpy as np

Integers = TypeVar("Integers", int, np.ndarray)  # an int of 64 bits, or an array of uint64

_MASK64 = (1 << 64) - 1


def key64(*parts: int | str) -> int:
    """A 64-bit key of numbers and words, the same on every machine."""
    text = "\x1f".join(f"{type(part).__name__}:{part}" for part in parts)
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")


def hash64(key: int, index: Integers) -> Integers:
    """The hash of ``index`` under ``key``: an int for an int, elementwise for an array of uint64.

    SplitMix64 (Steele, Lea, Flood: Fast splittable pseudorandom number generators, OOPSLA 2014) as
    a keyed counter. The masks do for ints what uint64 arithmetic does by itself.
    """
    z = (index * 0x9E3779B97F4A7C15 + key) & _MASK64
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _MASK64
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _MASK64
    return z ^ (z >> 31)


class Permutation:
    """A keyed shuffle of 0 … size−1 that takes no memory: ``permutation(i)`` is where i goes.

    A Feistel network permutes 0 … 2^(2·half)−1, the smallest such range that holds ``size``:

        left, right = right, left XOR hash(round key, right)          × ROUNDS

    What lands outside 0 … size−1 goes through again until it lands inside, which keeps it
    one-to-one (cycle walking: Black and Rogaway, Ciphers with arbitrary finite domains, CT-RSA
    2002, section 3).
    """

    ROUNDS = 6

    def __init__(self, size: int, *key: int | str):
        self.size = size
        bits = max(size - 1, 1).bit_length()
        self._half_bits = (bits + 1) // 2
        self._round_keys = [key64("permutation", *key, n) for n in range(self.ROUNDS)]

    def __call__(self, index: int) -> int:
        """Where ``index``, in 0 … size−1, goes."""
        index = self._network(index)
        while index >= self.size:
            index = self._network(index)
        return index

    def of(self, indices: np.ndarray) -> np.ndarray:
        """Where each of ``indices`` goes; int64 [n] to int64 [n]."""
        out = self._network(indices.astype(np.uint64))
        while (outside := np.flatnonzero(out >= self.size)).size:
            out[outside] = self._network(out[outside])
        return out.astype(np.int64)

    def _network(self, index: Integers) -> Integers:
        mask = (1 << self._half_bits) - 1
        left, right = index >> self._half_bits, index & mask
        for key in self._round_keys:
            left, right = right, left ^ (hash64(key, right) & mask)
        return (left << self._half_bits) | right
