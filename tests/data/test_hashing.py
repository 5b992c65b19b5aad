import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megagrid.data.hashing import Permutation, hash64, key64


@given(st.integers(1, 3000), st.integers(0, 2**63))
@settings(max_examples=60, deadline=None)
def test_permutation_sends_every_index_to_another_place(size, seed):
    shuffled = Permutation(size, seed).of(np.arange(size))
    assert sorted(shuffled.tolist()) == list(range(size))


@given(st.integers(1, 1 << 45), st.integers(0, 1 << 62), st.integers(0, 99))
@settings(max_examples=60, deadline=None)
def test_permutation_of_an_int_equals_that_of_an_array(size, index, seed):
    permutation = Permutation(size, "x", seed)
    index %= size
    assert permutation(index) == permutation.of(np.asarray([index]))[0]
    assert 0 <= permutation(index) < size


def test_permutations_of_two_keys_have_next_to_nothing_in_common():
    same = Permutation(10_000, 1).of(np.arange(10_000)) == Permutation(10_000, 2).of(
        np.arange(10_000)
    )
    assert same.sum() < 10  # 1 expected


def test_each_place_of_a_small_permutation_is_equally_likely():
    counts = np.zeros((5, 5))
    for seed in range(600):
        permutation = Permutation(5, seed)
        for index in range(5):
            counts[index, permutation(index)] += 1
    # Each is binomial(600, 1/5): a mean of 120 and a standard deviation of 9.8.
    assert np.abs(counts - 120).max() < 4 * 9.8


def test_hashes_are_the_same_for_ever():
    assert key64("split", 7) == 0xA9C6A4AF56EB353A
    assert [Permutation(10, "split", 7)(i) for i in range(10)] == [5, 9, 8, 0, 6, 4, 2, 3, 1, 7]
    assert hash64(0, 1) == 0xE220A8397B1DCDAF  # SplitMix64's first output from seed 0
    assert hash64(5, np.asarray([3, 4], np.uint64)).tolist() == [hash64(5, 3), hash64(5, 4)]


@pytest.mark.parametrize("parts", [(1, 23), (12, 3), ("1", 23), ("12", "3"), (1, 2, 3)])
def test_keys_of_different_parts_differ(parts):
    others = {(1, 23), (12, 3), ("1", 23), ("12", "3"), (1, 2, 3)} - {parts}
    assert key64(*parts) not in {key64(*other) for other in others}
