"""The one-process runs that grids are held against, each computed once; and what deviated most."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest

from tests.equivalence.case import Case, Variant
from tests.equivalence.tolerance import (
    DEVIATIONS,
    FP32_GRAD_NORM,
    FP32_LOSS,
    FP64,
    UNIT_ROUNDOFF,
    Deviation,
    Reference,
    deviations,
    noise,
    step_deviations,
    update_bounds,
)
from tests.equivalence.trainer import Model, Run, Surroundings, train, train_draws
from tests.ranks import Ranks

DRAWS = 8
"""Of the rounding error."""

LARGEST = pytest.StashKey[dict[str, tuple[Deviation, Case]]]()


class Equivalence:
    """Runs cases, and holds them against the same variant on one process."""

    def __init__(self, ranks: Ranks, largest: dict[str, tuple[Deviation, Case]]) -> None:
        self.ranks = ranks
        self._largest = largest
        self._runs: dict[Variant, Run] = {}
        self._references: dict[Variant, Reference] = {}

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

    def reference(self, variant: Variant) -> Reference:
        """The variant on one process, and its tolerances."""
        if variant not in self._references:
            self._references[variant] = self._measure(variant)
        return self._references[variant]

    def one_process(self, variant: Variant) -> Run:
        """The variant on one process, each step in one microbatch."""
        if variant not in self._runs:
            (self._runs[variant],) = train(self.ranks, [whole_batch(variant)])
        return self._runs[variant]

    def _measure(self, variant: Variant) -> Reference:
        loss, grad_norm, gradients = self._tolerances(variant)
        run = self.one_process(variant)
        u = UNIT_ROUNDOFF["fp64" if variant.precision == "fp64" else "fp32"]
        updated = update_bounds(run, gradients, whole_batch(variant).config.optimizer, u)
        return Reference(run, loss, grad_norm, gradients, updated)

    def _tolerances(self, variant: Variant) -> tuple[float, float, Model]:
        """Of losses, of relative norms and of gradients."""
        if variant.precision == "fp64":
            shrink = UNIT_ROUNDOFF["fp64"] / UNIT_ROUNDOFF["fp32"]
            single = self.reference(replace(variant, precision="fp32")).gradients
            gradients = {n: np.minimum(shrink * bound, FP64) for n, bound in single.items()}
            return FP64, FP64, gradients
        steps = variant.steps if variant.precision == "bf16" else 1
        computed, exact = (
            train_draws(self.ranks, whole_batch(replace(variant, precision=p, steps=steps)), DRAWS)
            for p in (variant.precision, "fp64")
        )
        sigma = noise([run.gradients for run in computed], [run.gradients for run in exact])
        gradients = {name: DEVIATIONS * s for name, s in sigma.items()}
        if variant.precision == "fp32":
            return FP32_LOSS, FP32_GRAD_NORM, gradients
        losses = [np.subtract(c.losses, e.losses) for c, e in zip(computed, exact, strict=True)]
        norms = [
            np.divide(c.grad_norms, e.grad_norms) - 1 for c, e in zip(computed, exact, strict=True)
        ]
        loss, grad_norm = (
            DEVIATIONS * float(np.sqrt(np.square(errors).mean())) for errors in (losses, norms)
        )
        return loss, grad_norm, gradients


def whole_batch(variant: Variant) -> Case:
    """The variant on one process, the global batch in one microbatch."""
    case = Case(variant)
    return replace(case, micro_batch=case.config.train.global_batch_size)


@pytest.fixture(scope="session")
def equivalence(ranks: Ranks, pytestconfig: pytest.Config) -> Equivalence:
    return Equivalence(ranks, pytestconfig.stash.setdefault(LARGEST, {}))


def pytest_terminal_summary(
    terminalreporter: pytest.TerminalReporter, config: pytest.Config
) -> None:
    """Print the largest deviation of each kind."""
    largest = config.stash.get(LARGEST, {})
    if largest:
        terminalreporter.section("largest deviations from one process")
        for deviation, case in largest.values():
            terminalreporter.write_line(
                f"{deviation.share:6.1%} of what is allowed: {deviation}, in {case}"
            )
