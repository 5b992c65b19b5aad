import math

import numpy as np
import pytest

from megagrid.data.entropy import entropy
from megagrid.data.synthetic import CONDITIONAL_ENTROPY, FOLLOW, SyntheticDataset


def test_samples_depend_on_seed_split_and_id_alone():
    def sample(seed=1, split="train", i=5):
        return SyntheticDataset(61, 32, seed, split)[i].tolist()

    assert sample() == sample()
    assert len({tuple(s) for s in (sample(), sample(2), sample(1, "valid"), sample(i=6))}) == 4
    assert len(sample()) == 33
    assert 0 <= min(sample()) <= max(sample()) < 61


def test_a_model_that_learns_the_chain_can_reach_the_conditional_entropy():
    """A table of what followed what in training predicts held-out walks that well."""
    train, valid = (SyntheticDataset(61, 256, 3, split) for split in ("train", "valid"))
    counts = np.full((61, 61), 1e-3)
    for i in range(200):
        np.add.at(counts, (train[i][:-1], train[i][1:]), 1)
    table = counts / counts.sum(axis=1, keepdims=True)
    held_out = np.concatenate([table[valid[i][:-1], valid[i][1:]] for i in range(50)])
    # Two of four followers may be the same id, which makes the chain a little easier.
    assert CONDITIONAL_ENTROPY - 0.15 < -np.log(held_out).mean() < CONDITIONAL_ENTROPY + 0.05
    assert sum(FOLLOW) == 256


def test_frequencies_alone_are_a_poor_guess():
    counts = SyntheticDataset(61, 256, 3).token_counts(61)
    assert CONDITIONAL_ENTROPY + 1.5 < entropy(counts) <= math.log(61)


def test_a_counted_dataset_ends_or_repeats():
    ends = SyntheticDataset(61, 8, 1, samples=13, repeat=False)
    assert ends.len_or_none == 13
    with pytest.raises(IndexError):
        ends[13]
    repeats = SyntheticDataset(61, 8, 1, samples=13)
    assert repeats.len_or_none is None
    assert repeats[13].tolist() == repeats[0].tolist() == ends[0].tolist()
