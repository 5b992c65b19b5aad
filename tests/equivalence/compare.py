"""Runs cases on grids, and holds each against its variant on one process."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cache

import numpy as np

from megagrid.model.width import width_scaling
from tests.equivalence.case import Case, Variant
from tests.equivalence.tolerance import (
    DEVIATIONS,
    FP32_GRAD_NORM,
    FP32_LOSS,
    FP64,
    FP64_NOISE,
    UNIT_ROUNDOFF,
    Deviation,
    Reference,
    deviations,
    muon_updates,
    noise,
    step_deviations,
    update_bounds,
)
from tests.equivalence.trainer import Model, Run, Surroundings, train, train_draws
from tests.ranks import Ranks

DRAWS = 8
"""Of the rounding error."""


class Equivalence:
    """What the tests ask for.

    Args:
        largest: gets the largest deviation of each kind, and where it was.
    """

    def __init__(self, ranks: Ranks, largest: dict[str, tuple[Deviation, Case]]) -> None:
        self.ranks = ranks
        self._largest = largest
        # Each computed once.
        self.reference = cache(self._reference)
        self.one_process = cache(self._one_process)
        self._tolerances = cache(self._measured_tolerances)

    def check(self, cases: Sequence[Case], under: Surroundings | None = None) -> list[Run]:
        """Train each of `cases` (all of one world size); all must equal one process.

        Args:
            under: see `train`.

        Returns:
            their runs, for what else is to be said of them.
        """
        references = [self.reference(case.variant) for case in cases]
        runs = train(self.ranks, cases, under)
        found = []
        for case, run, reference in zip(cases, runs, references, strict=True):
            found += [f"{case}: {line}" for line in self._compare(case, run, reference, under)]
        assert not found, "\n".join(["differs from one process:", *found])
        return runs

    def check_steps(self, cases: Sequence[Case]) -> list[Run]:
        """The same of losses and norms alone, in fp32: for many variants, quickly."""
        expected = [self.one_process(case.variant) for case in cases]
        runs = train(self.ranks, cases)
        for case, run, one in zip(cases, runs, expected, strict=True):
            for deviation in step_deviations(run, one, FP32_LOSS, FP32_GRAD_NORM):
                assert deviation.is_allowed, f"{case}: {deviation}"
        return runs

    def _compare(
        self, case: Case, run: Run, reference: Reference, under: Surroundings | None
    ) -> list[str]:
        """What is wrong, in words; keeps the largest deviations, if none was planted."""
        wrong = [
            f"initial {name} differs"
            for name, initial in reference.run.initial.items()
            if not np.array_equal(run.initial[name], initial)
        ]
        for deviation in deviations(run, reference):
            if not deviation.is_allowed:
                wrong.append(str(deviation))
            precision = case.variant.precision
            key = f"{deviation.quantity}, {precision}"
            known = self._largest.get(key)
            if under is None and (known is None or deviation.share > known[0].share):
                self._largest[key] = deviation, case
        return wrong

    def _one_process(self, variant: Variant) -> Run:
        """The variant on one process, each step in one microbatch."""
        (run,) = train(self.ranks, [whole_batch(variant)])
        return run

    def _reference(self, variant: Variant) -> Reference:
        """The variant on one process, and its tolerances."""
        # Those of fp32 are of the first step alone.
        steps = variant.steps if variant.precision in ("bf16", "fp16") else 1
        loss, grad_norm, gradients, muon = self._tolerances(replace(variant, steps=steps))
        run = self.one_process(variant)
        u = UNIT_ROUNDOFF["fp64" if variant.precision == "fp64" else "fp32"]
        config = whole_batch(variant).config
        hidden_lr = width_scaling(config.model).hidden_lr
        updated = update_bounds(run, gradients, muon, config.optimizer, u, hidden_lr)
        return Reference(run, loss, grad_norm, gradients, updated)

    def _measured_tolerances(self, variant: Variant) -> tuple[float, float, Model, Model]:
        """Of losses, of relative norms, of gradients, and of what Muon makes of them."""
        if variant.precision == "fp64":
            *_, single, muon = self._tolerances(replace(variant, precision="fp32"))
            gradients = {n: np.minimum(FP64_NOISE * bound, FP64) for n, bound in single.items()}
            return FP64, FP64, gradients, {n: FP64_NOISE * bound for n, bound in muon.items()}
        computed, exact = train_draws(
            self.ranks,
            [whole_batch(v) for v in (variant, replace(variant, precision="fp64"))],
            DRAWS,
        )
        found, right = ([run.gradients for run in runs] for runs in (computed, exact))
        gradients = _allowed(found, right)
        optimizer = whole_batch(variant).config.optimizer
        muon = _allowed(*([muon_updates(g, optimizer) for g in each] for each in (found, right)))
        if variant.precision == "fp32":
            return FP32_LOSS, FP32_GRAD_NORM, gradients, muon
        losses = [np.subtract(c.losses, e.losses) for c, e in zip(computed, exact, strict=True)]
        norms = [
            np.divide(c.grad_norms, e.grad_norms) - 1 for c, e in zip(computed, exact, strict=True)
        ]
        loss, grad_norm = (
            DEVIATIONS * float(np.sqrt(np.square(errors).mean())) for errors in (losses, norms)
        )
        return loss, grad_norm, gradients, muon


def _allowed(computed: Sequence[Model], exact: Sequence[Model]) -> Model:
    """How far each element may be off, by what it was off in draws."""
    return {name: DEVIATIONS * sigma for name, sigma in noise(computed, exact).items()}


def whole_batch(variant: Variant) -> Case:
    """The variant on one process, the global batch in one microbatch."""
    case = Case(variant)
    return replace(case, micro_batch=case.config.train.global_batch_size)
