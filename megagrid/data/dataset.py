"""Samples of a fixed length, cut from the shuffled documents of a token file."""

from __future__ import annotations

from typing import Protocol

import numpy as np


class SampleSource(Protocol):
    """What a loader reads from: numbered samples, the same for everyone who asks."""

    seq_length: int

    @property
    def len_or_none(self) -> int | None:
        """How many samples there are; None: without end."""

    def __getitem__(self, sample: int) -> np.ndarray:
        """Tokens of one sample, int64 [seq_length + 1]; inputs are all but the last, labels all but the first."""

    def token_counts(self, vocab_size: int) -> np.ndarray:
        """How often each id comes, float64 [vocab_size]."""
