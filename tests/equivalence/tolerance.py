"""How far two right computations of one step may be apart, and the check that they are no farther.

**Losses and norms.** |Δloss| <= 1e-5 at each of 8 steps, gradient norms within 1e-4 of each other;
in fp64 1e-10 both.

**Gradients.** A grid evaluates the sums of one process in another order. Worst-case bounds
(Higham 2002, section 4.2: a sum of n terms errs by up to n u times the sum of their magnitudes),
compounded through five layers, would let real faults through. Roundings behave like independent
numbers of mean zero, though (Higham & Mary 2019, "A new approach to probabilistic rounding error
analysis", SIAM J. Sci. Comput. 41), so the error of an element is close to normal, and its standard
deviation sigma can be measured for this very model and data: the difference of one process's
gradient and the same in float64, whose own error is 2^-29 of it. One such difference is one draw,
all of whose elements share the roundings of the activations; more come from weights that are a
little off the initial ones, the same for both precisions. Rows (token ids, say) and columns have
errors of different size, and an element that is many times larger than those around it is rounded
as coarsely, hence

    e_d = g32(w_d) - g64(w_d),    sigma^2 = the largest of the means of e^2 over all draws and
                                            (the element | its row | its column | its tensor)

A grid rounds partial sums where one process has one sum: over tp, dp and microbatches, at most
doubling the roundings of a sum, so the variance of the difference is below (1 + 2) sigma^2. The
whole matrix compares some 10^7 elements; a normal number exceeds 6.5 standard deviations once in
10^10. Hence, elementwise,

    |Δg| <= DEVIATIONS sigma,   DEVIATIONS = 6.5 sqrt(3) = 11.3

In fp64 sigma is sqrt(2) 2^-29 of fp32's: a roundoff is 2^-29 as large, and a vector register holds
half as many partial sums, each of twice as many terms, whose error grows with their square root.
The bound is moreover 1e-10. That the deviations of a grid shrink with the arithmetic is the
strongest sign that nothing else is in them. A separate test holds sigma itself against what
roundings can explain.

**Weights.** AdamW's first step moves a weight by lr f(c g), where f(x) = x / (|x| + eps) and c is
the clipping factor: a jump of 2 lr around g = 0, where the sign of a gradient may be rounding. No
single tolerance fits that. But f grows everywhere, so a gradient within [g - d, g + d] gives an
update within [f(c (g - d)), f(c (g + d))]: the farther end of that interval from f(c g), times lr,
is the bound of the element: below a thousandth of the step for all but a few. d is |Δg|'s bound; c
itself differs by no more than the norms do, |d| / |g| of the whole model. Added are the roundings
of the update, a dozen, relative to |w| and to lr.

Muon's first step moves a hidden matrix by lr scale O(g), whatever the clipping factor. O amplifies
weak directions of g by up to 3.4445^5 = 485 at once, and mixes all elements of a matrix; but to
first order its error is linear in that of g, hence as normal, and measured in the same draws:

    e_d = O32(g32(w_d)) - O64(g64(w_d)),    |ΔO| <= DEVIATIONS sigma

The rest is AdamW's. SGD's first step moves a weight by lr k c g, with k = 1 + momentum under
Nesterov and else 1: linear in g, so the bound is lr k d, and the roundings are relative to |w| and
to the step itself.

**bf16, fp16.** The same, with the differences of such compute from float64. Losses and norms have
a sigma of their own, over draws and steps. That tp ranks round their summands before they are added
is what (1 + 2) allows for.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import sqrt

import numpy as np
import torch

from megagrid.config.schema import OptimizerConfig
from megagrid.optim.muon import SCALES, orthogonal
from tests.equivalence.trainer import Model, Run

UNIT_ROUNDOFF = {"fp32": 2.0**-24, "fp64": 2.0**-53}
DEVIATIONS = 6.5 * sqrt(3.0)
FP64_NOISE = sqrt(2.0) * UNIT_ROUNDOFF["fp64"] / UNIT_ROUNDOFF["fp32"]
"""sigma in fp64, as a share of fp32's."""

FP32_LOSS = 1e-5
FP32_GRAD_NORM = 1e-4
"""Relative."""
FP64 = 1e-10
"""Loss, relative norm and gradient."""


@dataclass(frozen=True)
class Reference:
    """One process's run, and how far from it a correct run may be.

    Attributes:
        loss, grad_norm: for every step; that of the norm is relative.
        gradients, updated: of each element.
    """

    run: Run
    loss: float
    grad_norm: float
    gradients: Model
    updated: Model


def noise(computed: Sequence[Model], exact: Sequence[Model]) -> Model:
    """sigma of every element.

    Args:
        computed: the gradient at each draw's weights, in the precision that sigma is of.
        exact: the same in float64.
    """
    return {
        name: np.sqrt(
            _local_mean(
                np.mean(
                    [np.square(c[name] - e[name]) for c, e in zip(computed, exact, strict=True)],
                    axis=0,
                )
            )
        )
        for name in exact[0]
    }


def _local_mean(squares: np.ndarray) -> np.ndarray:
    """The largest of an element and the means over the tensor, the element's row and its column."""
    largest = np.maximum(squares, squares.mean())
    if squares.ndim == 2:
        for axis in (0, 1):
            np.maximum(largest, squares.mean(axis=axis, keepdims=True), out=largest)
    return largest


def muon_updates(gradients: Model, config: OptimizerConfig) -> Model:
    """What Muon makes of the first gradients of hidden matrices, in the gradients' precision; of
    other optimizers nothing."""
    return {
        name: orthogonal(torch.from_numpy(gradient), config.muon_steps).numpy()
        for name, gradient in gradients.items()
        if config.name == "muon" and is_hidden(name, gradient)
    }


def is_hidden(name: str, values: np.ndarray) -> bool:
    """Whether it is a matrix from hidden units to hidden units."""
    return name.startswith("layers.") and values.ndim == 2


def update_bounds(
    run: Run,
    gradient_bounds: Model,
    muon_bounds: Model,
    config: OptimizerConfig,
    u: float,
    hidden_lr: float = 1.0,
) -> Model:
    """How far weights after the first step may be from the run's, elementwise.

    Args:
        muon_bounds: of `muon_updates`.
        u: unit roundoff of the weights and moments.
        hidden_lr: factor of hidden matrices' learning rate.
    """
    norm = run.grad_norms[0]
    lr = config.adamw_lr or config.lr
    off = sqrt(sum(float(np.square(bound).sum()) for bound in gradient_bounds.values()))
    clip = min(1.0, config.clip_grad / (norm + 1e-6)) if config.clip_grad else 1.0
    bounds = {}
    for name, gradient in run.gradients.items():
        clipped = clip * gradient.astype(np.float64)
        d = clip * gradient_bounds[name] + np.abs(clipped) * (off / norm + 16 * u)
        if name in muon_bounds:
            step = config.lr * SCALES[config.muon_scale](*gradient.shape)
            step = step * (muon_bounds[name] + 12 * u)
        else:
            factor = hidden_lr if is_hidden(name, gradient) else 1.0
            step = factor * lr * REACHES[config.name](clipped, d, config, u)
        bounds[name] = step + 4 * u * np.abs(run.initial[name])
    return bounds


def _adamw_reach(
    gradient: np.ndarray, d: np.ndarray, config: OptimizerConfig, u: float
) -> np.ndarray:
    """How far lr's factor in the step may be off, if the gradient is off by `d`."""

    def update(gradient: np.ndarray) -> np.ndarray:
        return gradient / (np.abs(gradient) + config.eps)

    middle = update(gradient)
    return np.maximum(update(gradient + d) - middle, middle - update(gradient - d)) + 12 * u


def _sgd_reach(
    gradient: np.ndarray, d: np.ndarray, config: OptimizerConfig, u: float
) -> np.ndarray:
    k = 1 + config.momentum if config.nesterov else 1
    return k * (d + 12 * u * np.abs(gradient))


REACHES = {"adamw": _adamw_reach, "sgd": _sgd_reach, "muon": _adamw_reach}


@dataclass(frozen=True)
class Deviation:
    """The largest of one kind, by the part of the allowed that it is.

    Attributes:
        quantity: "loss", "grad norm", "gradient" or "weight".
        where: the step, or the tensor and element.
    """

    quantity: str
    value: float
    allowed: float
    where: str

    @property
    def is_allowed(self) -> bool:
        return self.value <= self.allowed  # false for NaN

    @property
    def share(self) -> float:
        """Of the allowed deviation."""
        return self.value / self.allowed if self.allowed else float(self.value > 0)

    def __str__(self) -> str:
        return f"{self.quantity} off by {self.value:.3g}, allowed {self.allowed:.3g}, {self.where}"


def deviations(run: Run, reference: Reference) -> list[Deviation]:
    """The largest deviation of each kind of `run` from the reference."""
    expected = reference.run
    return [
        *step_deviations(run, expected, reference.loss, reference.grad_norm),
        _of_elements("gradient", run.gradients, expected.gradients, reference.gradients),
        _of_elements("weight", run.updated, expected.updated, reference.updated),
    ]


def step_deviations(run: Run, expected: Run, loss: float, grad_norm: float) -> list[Deviation]:
    """The largest deviations of losses and, relatively, of norms; allowed: `loss`, `grad_norm`."""
    losses = np.abs(np.subtract(run.losses, expected.losses))
    norms = np.abs(np.divide(run.grad_norms, expected.grad_norms) - 1)
    return [_of_steps("loss", losses, loss), _of_steps("grad norm", norms, grad_norm)]


def _of_steps(quantity: str, deviation: np.ndarray, allowed: float) -> Deviation:
    step = int(np.argmax(deviation))
    return Deviation(quantity, float(deviation[step]), allowed, f"step {step + 1}")


def _of_elements(quantity: str, found: Model, expected: Model, bounds: Model) -> Deviation:
    assert found.keys() == expected.keys(), f"other tensors: {found.keys() ^ expected.keys()}"
    worst = []
    for name, bound in bounds.items():
        difference = np.abs(found[name].astype(np.float64) - expected[name])
        # An element that may not deviate at all is as wrong as can be if it does.
        ratio = np.divide(
            difference, bound, out=np.where(difference > 0, np.inf, 0.0), where=bound > 0
        )
        place = np.unravel_index(np.argmax(ratio), ratio.shape)
        where = f"{name}[{','.join(map(str, place))}]"
        found_there = Deviation(quantity, float(difference[place]), float(bound[place]), where)
        worst.append((float(ratio[place]), found_there))
    return max(worst, key=lambda item: (np.isnan(item[0]), item[0]))[1]
