"""The tolerances are what their derivation says: as wide as roundings, no wider."""

from __future__ import annotations

from dataclasses import replace
from math import sqrt

import numpy as np
import pytest

from megagrid.config.schema import OptimizerConfig
from tests.equivalence.case import GPT, LLAMA, TIED
from tests.equivalence.tolerance import DEVIATIONS, UNIT_ROUNDOFF, noise, update_bounds
from tests.equivalence.trainer import Held, Run, assemble


def summands_on_the_longest_path(hidden: int, ffn: int, layers: int, vocabulary: int) -> int:
    """Numbers that are added up from a weight's gradient back to the tokens: in each layer the
    products with qkv, scores, values, wo, up and down, forward and backward, and the head's."""
    head_dim, positions = 4, 32
    layer = hidden + head_dim + positions + hidden + hidden + ffn
    return 2 * layers * layer + hidden + vocabulary


@pytest.mark.parametrize("variant", [LLAMA, LLAMA.having(TIED), GPT, GPT.having(TIED)], ids=str)
def test_measured_noise_is_what_roundings_explain(equivalence, variant):
    """sigma of each tensor is at most u sqrt(n) of its gradients, n the sums on the longest path,
    and a good part of u: a fault in fp32 that fp64 hasn't would be above, a dead gradient below."""
    reference = equivalence.reference(variant)
    n = summands_on_the_longest_path(32, 64, layers=5, vocabulary=61)
    u = UNIT_ROUNDOFF["fp32"]
    for name, bound in reference.gradients.items():
        sigma = np.sqrt(np.square(bound / DEVIATIONS).mean())
        size = np.sqrt(np.square(reference.run.gradients[name].astype(np.float64)).mean())
        if name.endswith("wk.bias"):
            # A constant added to all of a head's keys changes no softmax: the gradient is zero, and
            # what is computed is rounding alone.
            assert size < 2 * sigma
        else:
            assert u < sigma / size < u * sqrt(n), name


@pytest.mark.parametrize("variant", [LLAMA, GPT.having(TIED)], ids=str)
def test_nearly_all_weights_are_bound_to_a_thousandth_of_their_step(equivalence, variant):
    """Only where a gradient's sign may be rounding is the bound as wide as the step."""
    reference = equivalence.reference(variant)
    bounds = np.concatenate([b.ravel() for b in reference.updated.values()])
    assert np.mean(bounds < 1e-3 * 1e-3) > 0.98
    assert bounds.max() <= 2.01e-3


def run_of(gradient: float, weight: float, norm: float = 1.0) -> Run:
    arrays = {"w": np.array([gradient])}
    weights = {"w": np.array([weight])}
    return Run((1.0,), (norm,), weights, arrays, weights, weights)


@pytest.mark.parametrize("gradient", [0.0, 1e-12, -1e-9, 1e-8, 3e-6, -0.5])
@pytest.mark.parametrize("bound", [0.0, 1e-12, 1e-9, 1e-6])
@pytest.mark.parametrize("clip", [0.0, 0.25])
def test_update_bound_contains_the_update_of_every_gradient_within_its_bound(gradient, bound, clip):
    config = OptimizerConfig(lr=1e-3, clip_grad=clip)
    scale = clip if clip else 1.0

    def update(g: np.ndarray) -> np.ndarray:
        return config.lr * scale * g / (np.abs(scale * g) + config.eps)

    run = run_of(gradient, weight=0.0)
    (found,) = update_bounds(run, {"w": np.array([bound])}, {}, config, u=0.0)["w"]
    others = gradient + bound * np.linspace(-1, 1, 1001)
    farthest = np.abs(update(others) - update(np.array(gradient))).max()
    assert farthest * (1 - 1e-5) <= found + 1e-18  # float64's own rounding of the two updates
    # And is no wider than the clipping factor's own uncertainty makes it.
    slack = np.abs(update(others * (1 + 3 * bound)) - update(np.array(gradient))).max()
    assert found <= 1.1 * slack + 1e-12


def test_noise_is_the_largest_local_root_mean_square():
    exact = [{"w": np.zeros((2, 3))}]
    computed = [{"w": np.array([[3.0, 0.0, 0.0], [0.0, 0.0, 0.0]])}]
    row, column, tensor = sqrt(9 / 3), sqrt(9 / 2), sqrt(9 / 6)
    np.testing.assert_allclose(
        noise(computed, exact)["w"], [[3.0, row, row], [column, tensor, tensor]]
    )


def held(values: list[float], first: int, *, is_counted: bool = True) -> Held:
    return Held("w", (4,), (first,), np.array(values), is_counted)


def test_boxes_make_the_whole_tensor():
    whole = assemble(
        [held([1.0, 2.0], 0), held([3.0, 4.0], 2), held([2.0], 1, is_counted=False)], "weights"
    )
    assert whole["w"].tolist() == [1.0, 2.0, 3.0, 4.0]


@pytest.mark.parametrize(
    ("boxes", "told"),
    [
        ([held([1.0, 2.0, 3.0], 0)], "no rank holds 1 of w"),
        (
            [held([1.0, 2.0, 3.0, 4.0], 0), held([2.5], 1, is_counted=False)],
            "1 of 1 elements of w .* differ between ranks, by up to 0.5",
        ),
        ([held([1.0] * 4, 0), held([1.0], 3)], "w is not counted just once"),
        ([held([1.0] * 4, 0, is_counted=False)], "w is not counted just once"),
    ],
)
def test_boxes_that_dont_make_a_whole_are_refused(boxes, told):
    with pytest.raises(AssertionError, match=told):
        assemble(boxes, "weights")


def test_fp64_is_bound_by_its_own_roundings(equivalence):
    single = equivalence.reference(LLAMA).gradients
    double = equivalence.reference(replace(LLAMA, precision="fp64")).gradients
    for name, bound in double.items():
        np.testing.assert_allclose(bound, single[name] * sqrt(2.0) * 2.0**-29)
        assert bound.max() <= 1e-10
