"""What the guard makes of a step's numbers."""

from __future__ import annotations

import json
import math

import pytest

from megagrid.config.schema import GuardConfig, LossScaleConfig
from megagrid.optim.loss_scale import LossScale
from megagrid.train.guards import Action, Guard

NAN, INF = math.nan, math.inf


def guard(scale: LossScale | None = None, **keys) -> Guard:
    return Guard(GuardConfig(**keys), scale or LossScale(None))


def fp16(initial: float = 4.0) -> LossScale:
    return LossScale(LossScaleConfig(initial=initial, hysteresis=1))


def actions(one: Guard, *steps: tuple[float, float]) -> list[Action]:
    return [one.judge(loss, norm).action for loss, norm in steps]


def filled(**keys) -> Guard:
    """With a window of four losses of mean 2 and deviation 0.1, and norms about 1."""
    one = guard(window=4, **keys)
    calm = [(1.9, 0.9), (2.1, 1.0), (1.9, 1.0), (2.1, 1.1)]
    assert set(actions(one, *calm)) == {Action.MAKE}
    return one


@pytest.mark.parametrize("numbers", [(NAN, 1.0), (1.0, NAN), (INF, 1.0), (1.0, INF), (-INF, INF)])
@pytest.mark.parametrize("policy", ["end", "skip", "rollback"])
def test_a_number_that_is_none_is_dealt_with_as_stated(numbers, policy):
    verdict = guard(on_nan=policy).judge(*numbers)
    assert verdict.action.value == policy
    assert not verdict.is_finite
    assert f"loss {numbers[0]}, gradient norm {numbers[1]}" in verdict.reason


def test_in_fp16_a_norm_that_is_none_is_the_scales_until_that_is_at_its_least():
    scale = fp16()
    one = guard(scale)
    first, second, third = (one.judge(1.0, norm) for norm in (INF, NAN, INF))
    assert (first.action, second.action, third.action) == (Action.SKIP, Action.SKIP, Action.END)
    assert first.reason == "gradients overflow at loss scale 4, which is 2 now"
    assert third.reason == "loss 1.0, gradient norm inf at loss scale 1, with loss_scale.min=1"
    assert (first.is_overflow, third.is_overflow, scale.value, one.skipped) == (True, False, 1.0, 2)


def test_a_loss_that_is_none_is_no_overflow():
    """No scale enters it."""
    assert guard(fp16()).judge(NAN, NAN).action is Action.END


def test_overflows_do_not_count_as_skips_in_a_row():
    one = guard(fp16(2.0**40), max_skips=2)
    assert actions(one, *[(1.0, INF)] * 20) == [Action.SKIP] * 20


@pytest.mark.parametrize("policy", ["skip", "rollback"])
@pytest.mark.parametrize(
    ("numbers", "words"),
    [
        ((2.5, 1.0), "loss 2.5 is above 2.4, a spike after 4 steps of 2"),
        ((2.0, 3.1), "gradient norm 3.1 is above 3, a spike after 4 steps of 1"),
    ],
)
def test_what_is_far_above_the_window_is_a_spike(policy, numbers, words):
    verdict = filled(on_spike=policy, loss_deviations=4.0, norm_factor=3.0).judge(*numbers)
    assert (verdict.action.value, verdict.reason) == (policy, words)


@pytest.mark.parametrize("numbers", [(2.39, 2.9), (0.1, 0.0)])
def test_what_is_near_it_or_below_is_none(numbers):
    one = filled(on_spike="skip", loss_deviations=4.0, norm_factor=3.0)
    assert one.judge(*numbers).action is Action.MAKE


def test_nothing_is_a_spike_before_the_window_is_full_nor_with_the_guard_off():
    assert actions(guard(window=3, on_spike="skip"), (1, 1), (1, 1), (99, 99)) == [Action.MAKE] * 3
    assert filled(on_spike="off").judge(99.0, 99.0).action is Action.MAKE


def test_a_window_without_any_spread_leaves_room_for_roundings():
    one = guard(window=2, on_spike="skip")
    assert actions(one, (2, 1), (2, 1), (2.01, 1), (2.5, 1))[2:] == [Action.MAKE, Action.SKIP]


def test_a_skipped_step_does_not_enter_the_window():
    one = filled(on_spike="skip")
    assert actions(one, *[(50.0, 1.0)] * 3) == [Action.SKIP] * 3


def test_too_many_skips_in_a_row_end_the_run():
    bad, good = (NAN, NAN), (1.0, 1.0)
    one = guard(on_nan="skip", max_skips=2)
    assert actions(one, bad, bad, good, bad, bad) == [
        Action.SKIP,
        Action.SKIP,
        Action.MAKE,
        Action.SKIP,
        Action.SKIP,
    ]
    last = one.judge(*bad)
    assert (last.action, one.skipped) == (Action.END, 4)
    assert "guard.max_skips=2" in last.reason


def test_too_many_rollbacks_end_the_run():
    one = guard(on_nan="rollback", max_rollbacks=2)
    assert actions(one, *[(NAN, NAN)] * 3) == [Action.ROLL_BACK, Action.ROLL_BACK, Action.END]
    assert one.rollbacks == 2


@pytest.mark.parametrize("cut", range(8))
def test_a_saved_guard_goes_on_as_the_uninterrupted_one(cut):
    keys = {"window": 3, "on_spike": "skip", "on_nan": "skip", "max_skips": 2}
    steps = [(1, 1), (1.1, 1), (1, 1.1), (9, 1), (NAN, 1), (1, 1), (1, 99), (9, 9), (NAN, 9)]
    whole, first, rest = guard(**keys), guard(**keys), guard(**keys)
    expected = actions(whole, *steps)
    assert expected[3:] == [Action.SKIP, Action.SKIP, Action.MAKE, *[Action.SKIP] * 2, Action.END]
    actions(first, *steps[:cut])
    rest.load(json.loads(json.dumps(first.to_json())))
    assert actions(rest, *steps[cut:]) == expected[cut:]
    assert rest.to_json() == whole.to_json()
