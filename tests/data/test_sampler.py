import pytest

from megagrid.data.sampler import Sampler
from megagrid.errors import ConfigError

GRIDS = [(micro, dp) for micro in (1, 2, 4) for dp in (1, 2, 4) if 8 % (micro * dp) == 0]


def step_ids(sampler: Sampler, consumed: int) -> list[int]:
    ranks = range(sampler.data_parallel_size)
    return [int(i) for rank in ranks for i in sampler.sample_ids(consumed, rank).ravel()]


def test_positions_go_to_microbatches_and_ranks_as_drawn():
    sampler = Sampler(global_batch_size=8, micro_batch_size=2, data_parallel_size=2)
    assert sampler.sample_ids(0, 0).tolist() == [[0, 1], [4, 5]]
    assert sampler.sample_ids(0, 1).tolist() == [[2, 3], [6, 7]]


@pytest.mark.parametrize(("micro", "dp"), GRIDS)
def test_a_step_reads_the_next_samples_each_once_on_any_grid(micro, dp):
    sampler = Sampler(8, micro, dp)
    for consumed in (0, 8, 24, 5, 10**12):
        assert sorted(step_ids(sampler, consumed)) == list(range(consumed, consumed + 8))


def test_a_changed_global_batch_continues_with_the_next_unseen_sample():
    read = step_ids(Sampler(8, 2, 2), 0) + step_ids(Sampler(8, 2, 2), 8)
    read += step_ids(Sampler(4, 1, 4), 16) + step_ids(Sampler(12, 3, 1), 20)
    assert sorted(read) == list(range(32))


def test_four_steps_of_eight_leave_the_cursor_at_sample_32():
    assert step_ids(Sampler(8, 1, 1), 4 * 8)[0] == 32


@pytest.mark.parametrize(
    ("samples", "consumed", "steps"),
    [(13, 0, 3), (13, 12, 0), (13, 5, 2), (12, 0, 3), (3, 0, 0), (13, 99, 0), (None, 7, None)],
)
def test_all_ranks_know_the_last_full_step(samples, consumed, steps):
    assert Sampler(4, 1, 2).full_steps(samples, consumed) == steps


@pytest.mark.parametrize(("batch", "micro", "dp"), [(8, 3, 1), (2, 4, 1), (6, 1, 4), (0, 1, 1)])
def test_a_global_batch_that_ranks_cannot_share_is_refused(batch, micro, dp):
    with pytest.raises(ConfigError, match=rf"global_batch_size={batch} must be a .*multiple"):
        Sampler(batch, micro, dp)
