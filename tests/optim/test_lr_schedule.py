"""The rate starts above zero, reaches its peak exactly, and depends on nothing but the step."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megagrid.config.schema import LRScheduleConfig as Schedule
from megagrid.optim.lr_schedule import DECAYS, learning_rate

PEAK = 3e-4


def rates(total_steps: int, config: Schedule, peak: float = PEAK) -> list[float]:
    return [
        learning_rate(step, config=config, peak=peak, total_steps=total_steps)
        for step in range(1, total_steps + 1)
    ]


@pytest.mark.parametrize("kind", DECAYS)
@pytest.mark.parametrize("decay_steps", [None, 0, 3, 50])
@pytest.mark.parametrize("warmup_steps", [0, 1, 2, 9, 10, 11, 1000])
@pytest.mark.parametrize("total_steps", [1, 2, 10])
def test_first_rate_is_positive_and_the_peak_is_reached_exactly(
    kind, decay_steps, warmup_steps, total_steps
):
    config = Schedule(kind=kind, decay_steps=decay_steps, warmup_steps=warmup_steps)
    run = rates(total_steps, config)
    assert run[0] > 0
    assert max(run) == PEAK


@given(
    kind=st.sampled_from(sorted(DECAYS)),
    total_steps=st.integers(1, 60),
    warmup_steps=st.integers(0, 80),
    decay_steps=st.none() | st.integers(0, 80),
    min_lr_ratio=st.floats(0, 1),
    peak=st.floats(1e-12, 10),
)
def test_rates_rise_to_the_peak_then_fall_and_stay_above_the_minimum(total_steps, peak, **config):
    run = rates(total_steps, Schedule(**config), peak)
    top = run.index(peak)
    assert run[: top + 1] == sorted(run[: top + 1])
    assert run[top:] == sorted(run[top:], reverse=True)
    assert min(run[top:]) >= peak * config["min_lr_ratio"]


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        # Warmup and cosine: halfway down at the middle of the decay, at the minimum at the end.
        (
            Schedule(kind="cosine", warmup_steps=2, min_lr_ratio=0.0),
            [0.5, 1.0, 0.853553, 0.5, 0.146447, 0.0],
        ),
        (Schedule(kind="linear", warmup_steps=2, min_lr_ratio=0.2), [0.5, 1.0, 0.8, 0.6, 0.4, 0.2]),
        (Schedule(kind="linear", decay_steps=2, min_lr_ratio=0.5), [1.0, 0.75, 0.5, 0.5, 0.5, 0.5]),
        (Schedule(kind="linear", decay_steps=0, min_lr_ratio=0.5), [1.0, 0.5, 0.5, 0.5, 0.5, 0.5]),
        (Schedule(kind="wsd", warmup_steps=2, decay_steps=2), [0.5, 1.0, 1.0, 1.0, 0.55, 0.1]),
        (Schedule(kind="wsd"), [1.0, 1.0, 1.0, 1.0, 1.0, 0.1]),
        (Schedule(kind="wsd", decay_steps=0), [1.0] * 6),
        (Schedule(kind="wsd", warmup_steps=4, decay_steps=9), [0.25, 0.5, 0.75, 1.0, 0.55, 0.1]),
        (Schedule(kind="constant", warmup_steps=3), [1 / 3, 2 / 3, 1.0, 1.0, 1.0, 1.0]),
        (Schedule(kind="cosine", warmup_steps=12), [1 / 6, 2 / 6, 3 / 6, 4 / 6, 5 / 6, 1.0]),
    ],
)
def test_rates_of_six_steps_are_those_drawn(config, expected):
    assert rates(6, config, peak=1.0) == pytest.approx(expected, abs=1e-6)


def test_rates_after_a_resume_equal_the_uninterrupted_run():
    schedule = Schedule(kind="cosine", warmup_steps=5)
    resumed = [
        learning_rate(step, config=schedule, peak=PEAK, total_steps=20) for step in range(8, 21)
    ]
    assert resumed == rates(20, schedule)[7:]


def test_rate_past_the_last_step_is_that_of_the_last_step():
    schedule = Schedule()
    last, past = (
        learning_rate(step, config=schedule, peak=PEAK, total_steps=10) for step in (10, 11)
    )
    assert past == last


def test_step_zero_is_refused():
    with pytest.raises(ValueError, match="count from 1"):
        learning_rate(0, config=Schedule(), peak=PEAK, total_steps=10)
