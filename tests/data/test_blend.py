import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megagrid.data.blend import Blend, BlendedDataset, check_weights
from megagrid.errors import DataError


class Numbered:
    """A dataset of ``size`` samples that say whose they are; only the last samples wrap around."""

    seq_length = 1

    def __init__(self, name: int, size: int, repeat: bool = True):
        self.name = name
        self.samples_per_epoch = size
        self.len_or_none = None if repeat else size

    def __getitem__(self, sample):
        if self.len_or_none is not None and sample >= self.len_or_none:
            raise IndexError(sample)
        return np.array([self.name, sample % self.samples_per_epoch])

    def token_counts(self, vocab_size):
        return np.eye(vocab_size)[self.name] * self.samples_per_epoch


def drawn(blend, count):
    return np.bincount([blend.locate(i)[0] for i in range(count)])


@pytest.mark.parametrize(
    ("weights", "count", "expected"),
    [
        ([0.7, 0.3], 1000, [700, 300]),
        ([7, 3], 1000, [700, 300]),
        ([0.999, 0.001], 2000, [1998, 2]),
        ([0.001, 0.999], 2000, [2, 1998]),
        ([1, 1, 1], 999, [333, 333, 333]),
        ([0.5, 0.3, 0.2], 1000, [500, 300, 200]),
    ],
)
def test_each_dataset_is_drawn_in_proportion_to_its_weight(weights, count, expected):
    assert np.abs(drawn(Blend(weights), count) - expected).max() <= 1


@given(st.lists(st.floats(0.001, 1000), min_size=1, max_size=40), st.integers(0, 10**12))
@settings(max_examples=200, deadline=None)
def test_the_counts_stay_within_two_of_the_exact_share_after_any_number(weights, samples):
    counts = Blend(weights).counts(samples)
    assert sum(counts.values()) == samples
    for dataset, weight in enumerate(weights):
        assert abs(counts[dataset] - samples * (weight / sum(weights))) < 2 + samples * 1e-14


@pytest.mark.parametrize(
    "weights", [[1, 1, 2, 3, 5, 8, 13, 21, 34, 55, 89], [0.97] + [0.01] * 3, [1e-6, 1, 1.0001]]
)
def test_the_counts_stay_within_two_for_the_hardest_trees(weights):
    counts = np.zeros(len(weights))
    shares = np.asarray(weights) / np.sum(weights)
    blend = Blend(weights)
    for i in range(5000):
        counts[blend.locate(i)[0]] += 1
        assert np.abs(counts - shares * (i + 1)).max() < 2


@given(st.lists(st.integers(1, 9), min_size=1, max_size=9), st.integers(0, 2000))
@settings(max_examples=50, deadline=None)
def test_each_dataset_gives_its_samples_in_order_and_once(weights, start):
    blend = Blend(weights)
    expected = [blend.counts(start)[i] for i in range(len(weights))]
    for sample in range(start, start + 100):
        dataset, local = blend.locate(sample)
        assert local == expected[dataset]
        expected[dataset] += 1


def test_300_tiny_datasets_are_all_drawn():
    blend = BlendedDataset([Numbered(i, 3) for i in range(300)], None)
    assert {int(blend[i][0]) for i in range(900)} == set(range(300))


def test_a_tiny_dataset_is_repeated_rather_than_overdrawn():
    blend = BlendedDataset([Numbered(0, 10_000), Numbered(1, 3)], [0.99, 0.01])
    samples = np.stack([blend[i] for i in range(2000)])
    tiny = samples[samples[:, 0] == 1, 1]
    assert abs(len(tiny) - 20) <= 1
    assert tiny[:6].tolist() == [0, 1, 2, 0, 1, 2]


def test_without_weights_an_epoch_draws_every_sample_once():
    sizes = [7, 1, 30, 12]
    blend = BlendedDataset([Numbered(i, n, repeat=False) for i, n in enumerate(sizes)], None)
    assert blend.len_or_none == 50
    samples = {tuple(blend[i].tolist()) for i in range(50)}
    assert samples == {(i, j) for i, n in enumerate(sizes) for j in range(n)}


def test_without_repetition_a_blend_ends_before_any_dataset_is_overdrawn():
    blend = BlendedDataset([Numbered(0, 1000, False), Numbered(1, 3, False)], [0.9, 0.1])
    end = blend.len_or_none
    assert 25 <= end <= 35
    assert len({tuple(blend[i].tolist()) for i in range(end)}) == end
    with pytest.raises(IndexError):
        blend[end]


def test_counts_are_mixed_like_samples():
    blend = BlendedDataset([Numbered(0, 1000), Numbered(1, 10)], [0.25, 0.75])
    assert blend.token_counts(3).tolist() == [0.25, 0.75, 0]


@pytest.mark.parametrize(
    ("weights", "message"),
    [
        ([1.0], "has 1 numbers for 2 data.paths"),
        ([1.0, -1.0], "must be finite and not negative"),
        ([0.0, 0.0], "one above 0"),
        ([float("nan"), 1.0], "must be finite"),
        ([float("inf"), 1.0], "must be finite"),
    ],
)
def test_weights_that_mean_nothing_are_refused(weights, message):
    with pytest.raises(DataError, match=f"data.weights.*{message}"):
        check_weights(weights, ["a", "b"])
