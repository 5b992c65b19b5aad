"""The loss scale falls where gradients overflow, grows where they don't, and can be saved."""

from __future__ import annotations

import json

import pytest

from megagrid.config.schema import LossScaleConfig
from megagrid.optim.loss_scale import LARGEST, LossScale


def scale(**keys) -> LossScale:
    values = {"initial": 1024.0, "growth_interval": 3, "hysteresis": 1} | keys
    return LossScale(LossScaleConfig(**values))


def values_after(one: LossScale, steps: str) -> list[float]:
    """The scale after each step: "x" overflows, "." is made."""
    found = []
    for step in steps:
        one.after_overflow() if step == "x" else one.after_step()
        found.append(one.value)
    return found


def test_it_falls_at_each_overflow_and_grows_after_so_many_good_steps():
    assert values_after(scale(), "x..x...") == [512, 512, 512, 256, 256, 256, 512]
    factors = {"growth_factor": 4.0, "backoff_factor": 0.25, "growth_interval": 1}
    assert values_after(scale(**factors), "x..x") == [256, 1024, 4096, 1024]


def test_with_hysteresis_the_first_overflows_since_it_grew_leave_it():
    """Those after them lower it at once, whatever lies in between."""
    assert values_after(scale(hysteresis=2), "x.x.x") == [1024, 1024, 512, 512, 256]
    assert values_after(scale(hysteresis=2), "xx...xx") == [1024, 512, 512, 512, 1024, 1024, 512]


def test_it_stays_within_its_bounds():
    low = scale(min=300.0)
    assert low.can_fall
    assert values_after(low, "xxx") == [512, 300, 300]
    assert not low.can_fall
    assert values_after(scale(initial=LARGEST, growth_interval=1), ".") == [LARGEST]


def test_other_precisions_have_a_scale_of_one_that_nothing_moves():
    one = LossScale(None)
    assert not one.can_fall
    assert values_after(one, "." * 5) == [1.0] * 5
    one.load(scale().to_json())
    assert one.value == 1.0


@pytest.mark.parametrize("cut", range(9))
def test_a_saved_scale_goes_on_as_the_uninterrupted_one(cut):
    steps = "x..x.xx..."
    whole, first, rest = scale(hysteresis=2), scale(hysteresis=2), scale(hysteresis=2)
    values_after(first, steps[:cut])
    rest.load(json.loads(json.dumps(first.to_json())))
    assert values_after(rest, steps[cut:]) == values_after(whole, steps)[cut:]
