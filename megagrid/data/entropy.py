"""The loss of a model that knows nothing but frequencies: a trained one must get below it."""

from __future__ import annotations

import numpy as np


def entropy(counts: np.ndarray) -> float:
    """Of the distribution that ``counts`` [vocab] show, in nats a token."""
    shares = counts[counts > 0] / counts.sum()
    return float(-(shares * np.log(shares)).sum())


def cross_entropy(counts: np.ndarray, guessed: np.ndarray) -> float:
    """Of tokens counted in ``counts`` [vocab] under the frequencies of ``guessed`` [vocab], nats.

    Every id counts as seen once more than it was, or an unseen one would cost infinitely much
    (Laplace's rule of succession).
    """
    shares = (guessed + 1) / (guessed + 1).sum()
    return float(-(counts * np.log(shares)).sum() / counts.sum())
