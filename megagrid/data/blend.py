"""Several datasets mixed in stated proportions, sample by sample.

Which dataset sample i comes from, and how many of its samples came before, is arithmetic on i
alone. The weights form a Huffman tree, and at each inner node the first i samples are split by
rounding:

                 i = 1000                         left  = ⌊ i · W_left / (W_left + W_right) + ½ ⌋
        0.5    /          \\   0.5                 right = i − left
         A: 500            500
                     0.3  /   \\  0.2
                    B: 300     C: 200

A count is off by at most ½ a level, and the error is passed down only in proportion to the child's
share, which a Huffman tree keeps small: two datasets stay within ½ of their exact share, any number
of them within 2, after any number of samples. Nothing is stored and nothing is sequential, where
the usual largest-error loop must run from the first sample to find the millionth.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction

import numpy as np

from megagrid.data.dataset import DocumentDataset
from megagrid.errors import DataError


@dataclass(frozen=True)
class _Leaf:
    weight: int
    dataset: int


@dataclass(frozen=True)
class _Node:
    weight: int
    left: _Leaf | _Node
    right: _Leaf | _Node

    def left_of(self, samples: int) -> int:
        """How many of the first ``samples`` go left; grows by 0 or 1 with each sample."""
        return (2 * samples * self.left.weight + self.weight) // (2 * self.weight)


class Blend:
    """Which dataset each sample is drawn from."""

    def __init__(self, weights: Sequence[float]):
        """``weights``: all positive; only their ratios matter, and they are kept exactly."""
        fractions = [Fraction(weight) for weight in weights]
        scale = math.lcm(*(fraction.denominator for fraction in fractions))
        self._tree = _huffman([int(fraction * scale) for fraction in fractions])

    def locate(self, sample: int) -> tuple[int, int]:
        """(dataset, sample of that dataset) for sample ``sample`` of the blend."""
        node = self._tree
        while isinstance(node, _Node):
            before = node.left_of(sample)
            if node.left_of(sample + 1) > before:
                node, sample = node.left, before
            else:
                node, sample = node.right, sample - before
        return node.dataset, sample

    def counts(self, samples: int) -> dict[int, int]:
        """How many of the first ``samples`` each dataset gives."""
        counts = {}
        open_nodes = [(self._tree, samples)]
        while open_nodes:
            node, samples = open_nodes.pop()
            if isinstance(node, _Leaf):
                counts[node.dataset] = samples
            else:
                left = node.left_of(samples)
                open_nodes += [(node.left, left), (node.right, samples - left)]
        return counts

    def longest(self, lengths: Sequence[int]) -> int:
        """The most samples that draw no dataset beyond its length."""

        def fits(samples: int) -> bool:
            return all(count <= lengths[i] for i, count in self.counts(samples).items())

        low, high = 0, sum(lengths)
        while low < high:
            middle = (low + high + 1) // 2
            low, high = (middle, high) if fits(middle) else (low, middle - 1)
        return low


def _huffman(weights: Sequence[int]) -> _Leaf | _Node:
    # The counter decides between equal weights, so that the tree is the same everywhere.
    heap = [(weight, i, _Leaf(weight, i)) for i, weight in enumerate(weights)]
    heapq.heapify(heap)
    counter = len(heap)
    while len(heap) > 1:
        _, _, small = heapq.heappop(heap)
        _, _, large = heapq.heappop(heap)
        weight = small.weight + large.weight
        heapq.heappush(heap, (weight, counter, _Node(weight, large, small)))
        counter += 1
    return heap[0][2]


class BlendedDataset:
    """Samples of several datasets in proportion to their weights.

    ``weights`` None: by their number of samples, so that an epoch draws every sample once.
    Without repetition the blend ends before the first dataset would have to be read again.
    """

    def __init__(self, datasets: Sequence[DocumentDataset], weights: Sequence[float] | None):
        self.datasets = datasets
        self.seq_length = datasets[0].seq_length
        sizes = [dataset.samples_per_epoch for dataset in datasets]
        self._weights = sizes if weights is None else weights
        self._blend = Blend(self._weights)
        self.samples_per_epoch = self._blend.longest(sizes)
        ends = any(dataset.len_or_none is not None for dataset in datasets)
        self.len_or_none = self.samples_per_epoch if ends else None

    def __getitem__(self, sample: int) -> np.ndarray:
        dataset, sample = self._locate(sample)
        return dataset[sample]

    def documents(self, sample: int) -> np.ndarray:
        dataset, sample = self._locate(sample)
        return dataset.documents(sample)

    def token_counts(self, vocab_size: int) -> np.ndarray:
        total = np.zeros(vocab_size)
        for dataset, weight in zip(self.datasets, self._weights, strict=True):
            counts = dataset.token_counts(vocab_size)
            total += counts * (weight / counts.sum())
        return total / sum(self._weights)

    def _locate(self, sample: int) -> tuple[DocumentDataset, int]:
        if sample < 0 or (self.len_or_none is not None and sample >= self.len_or_none):
            raise IndexError(f"sample {sample} of {self.len_or_none}")
        dataset, sample = self._blend.locate(sample)
        return self.datasets[dataset], sample


def check_weights(weights: Sequence[float] | None, paths: Sequence[str]) -> None:
    """Errors: DataError unless there is one weight a path, none negative, one positive."""
    if weights is None:
        return
    if len(weights) != len(paths):
        raise DataError(
            f"data.weights has {len(weights)} numbers for {len(paths)} data.paths; "
            "give one a path, or none"
        )
    if not all(math.isfinite(weight) and weight >= 0 for weight in weights) or not any(weights):
        raise DataError(
            f"data.weights={list(weights)} must be finite and not negative, and one above 0"
        )
