"""Endless seeded tokens that a model can learn: for tests and benchmarks, no files needed.

Each token has `BRANCHES` possible followers, chosen with the probabilities of `FOLLOW`: a Markov
chain whose loss starts near ln(vocabulary) and can fall to `CONDITIONAL_ENTROPY`, about 1.2 nats a
token.
"""

from __future__ import annotations

import math

import numpy as np

from megagrid.data.hashing import hash64, key64

BRANCHES = 4
# Out of 256, so that a byte of a hash chooses.
FOLLOW = (128, 64, 40, 24)
CONDITIONAL_ENTROPY = -sum(n / 256 * math.log(n / 256) for n in FOLLOW)
_BRANCH_OF_BYTE = np.repeat(np.arange(BRANCHES), FOLLOW)


class SyntheticDataset:
    """Sample i is a walk through the chain, a function of (seed, split, i); int64 [seq_length + 1].

    ``samples``: how many there are, None for without end. ``repeat`` starts over after the last.
    """

    def __init__(
        self,
        vocab_size: int,
        seq_length: int,
        seed: int,
        split: str = "train",
        samples: int | None = None,
        repeat: bool = True,
    ):
        self.seq_length = seq_length
        self.vocab_size = vocab_size
        self._samples = samples
        self._repeat = repeat
        self._key = key64("synthetic walk", seed, split)
        # Of the seed alone: training and validation walk through one chain.
        links = hash64(
            key64("synthetic chain", seed), np.arange(vocab_size * BRANCHES, dtype=np.uint64)
        )
        self._followers = (links % np.uint64(vocab_size)).astype(np.int64).tolist()

    @property
    def len_or_none(self) -> int | None:
        return None if self._repeat else self._samples

    def __getitem__(self, sample: int) -> np.ndarray:
        if self.len_or_none is not None and not 0 <= sample < self.len_or_none:
            raise IndexError(f"sample {sample} of {self.len_or_none}")
        if self._samples is not None:
            sample %= self._samples
        length = self.seq_length + 1
        noise = hash64(self._key, np.arange(length, dtype=np.uint64) + sample * length)
        branches = _BRANCH_OF_BYTE[(noise >> np.uint64(56)).astype(np.int64)].tolist()
        token = int(noise[0] % np.uint64(self.vocab_size))
        walk = [token]
        for branch in branches[1:]:
            token = self._followers[token * BRANCHES + branch]
            walk.append(token)
        return np.asarray(walk, dtype=np.int64)

    def documents(self, sample: int) -> np.ndarray:
        """A walk is one document."""
        return np.zeros(self.seq_length + 1, dtype=np.int64)

    def token_counts(self, vocab_size: int) -> np.ndarray:
        """How often each id comes in the first samples; float64 [vocab_size]."""
        samples = [self[i] for i in range(min(64, self._samples or 64))]
        return np.bincount(np.concatenate(samples), minlength=vocab_size).astype(np.float64)
