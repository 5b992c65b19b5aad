"""Where two runs part: step by step, and in a step pass by pass, from the data to the new weights.

Their digests are compared place by place (`megagrid.train.digest_records`), so it doesn't matter
what grids the runs had, nor what wrote them. The first place that is farther apart than the
tolerance is where they part: what comes after it differs because of it. Imports no torch.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from megagrid.config.dump import toml_value
from megagrid.errors import DataError
from megagrid.train.digest_records import PASSES, StepDigests, Values, distance

TOLERANCES = {"fp64": 1e-11, "fp32": 1e-4, "bf16": 0.1, "fp16": 0.02}
"""By precision: what sums in another order may be apart after a few steps, hundreds of roundoffs in
fp32, whose relative size is 2^-24 = 6e-8; in bf16 (2^-9) and fp16 (2^-12) some dozens."""

PLACES_NAMED = 4
"""Of those that aren't compared, in the line that counts them."""

COMPILED = "train.compile"
"""The key that says whether layers are."""

INSIDE_LAYERS = re.compile(r"layers\.\d+\.(attention|mlp)")
"""Places that a run with compiled layers doesn't have."""


@dataclass(frozen=True)
class PassReport:
    """A pass of a step, compared.

    Attributes:
        places: that both runs have.
        largest: the largest distance, and where.
        first: the first place beyond the tolerance; None if there is none.
        before: the last place before that, which agrees.
        values: of both runs at `first`.
        left_out: parameters that weren't compared, see `_rounding_alone`.
    """

    name: str
    places: int
    largest: tuple[float, str]
    first: str | None = None
    before: str | None = None
    values: tuple[Values, Values] | None = None
    left_out: tuple[str, ...] = ()


@dataclass(frozen=True)
class Comparison:
    """What was found.

    Attributes:
        settings: keys that say what a run computes and differ, with both values.
        steps: those that were compared, each with its passes, up to the one where the runs part.
        only: places that one of the runs lacks.
        from_outside: layers of one run are compiled, and what is in them isn't compared.
    """

    settings: Mapping[str, tuple[Any, Any]]
    steps: Mapping[int, Sequence[PassReport]]
    only: Sequence[str]
    from_outside: bool = False

    @property
    def parting(self) -> tuple[int, PassReport] | None:
        """The step and pass where the runs part; None if they don't."""
        for step, passes in self.steps.items():
            for report in passes:
                if report.first is not None:
                    return step, report
        return None


def default_tolerance(a: Sequence[StepDigests], b: Sequence[StepDigests]) -> float:
    """That of the coarser of the runs' precisions."""
    names = [run[0].settings.get("train.precision", "fp32") for run in (a, b)]
    return max(TOLERANCES.get(name, TOLERANCES["fp32"]) for name in names)


def compare(a: Sequence[StepDigests], b: Sequence[StepDigests], tolerance: float) -> Comparison:
    """Compare the steps that both runs have digested, up to where they part.

    Raises:
        DataError: there is no such step.
    """
    of_a, of_b = ({record.step: record for record in run} for run in (a, b))
    common = sorted(of_a.keys() & of_b.keys())
    if not common:
        raise DataError(
            f"A has digests of steps {_listed(of_a)}, B of steps {_listed(of_b)}: there is none to "
            "compare"
        )
    first_a, first_b = of_a[common[0]], of_b[common[0]]
    settings = _settings(first_a.settings, first_b.settings)
    compiled = [bool(first.settings.get(COMPILED)) for first in (first_a, first_b)]
    from_outside = compiled[0] != compiled[1]
    steps: dict[int, list[PassReport]] = {}
    only: list[str] = []
    for step in common:
        both = of_a[step], of_b[step]
        if from_outside:
            both = map(_without_insides, both)
        reports = _compare_step(*both, tolerance, only)
        steps[step] = reports
        if any(report.first is not None for report in reports):
            break
    return Comparison(settings, steps, only, from_outside)


def _without_insides(step: StepDigests) -> StepDigests:
    passes = {
        name: {place: values[place] for place in values if not INSIDE_LAYERS.fullmatch(place)}
        for name, values in step.passes.items()
    }
    return replace(step, passes=passes)


def _compare_step(
    a: StepDigests, b: StepDigests, tolerance: float, only: list[str]
) -> list[PassReport]:
    reports = []
    noise = _rounding_alone(a, tolerance) & _rounding_alone(b, tolerance)
    for name in PASSES:
        places_a, places_b = a.passes.get(name, {}), b.passes.get(name, {})
        left_out = ()
        if name in ("gradients", "update"):
            left_out = tuple(place for place in places_a if place in noise)
            places_a, places_b = (
                {place: values for place, values in places.items() if place not in noise}
                for places in (places_a, places_b)
            )
        if not places_a or not places_b:
            continue  # weights before the step: of the first step of a process alone
        for place in [*places_a, *places_b]:
            where = f"{name}: {place}"
            if (place in places_a) != (place in places_b) and where not in only:
                only.append(where)
        compared = _compare_pass(name, places_a, places_b, tolerance)
        reports.append(replace(compared, left_out=left_out))
    return reports


def _rounding_alone(step: StepDigests, tolerance: float) -> set[str]:
    """Parameters whose gradients are, element by element, less than a tolerance of the model's.
    That of a key's bias, say, is 0 but for roundings, as softmax doesn't see it; AdamW makes whole
    steps of them, and they part though the runs don't."""
    tensors = {
        place: (float(values[0]), float(values[2]))
        for place, values in step.passes.get("gradients", {}).items()
        if len(values) > 1 and values[0]
    }
    counts, squares = (
        (sum(part) for part in zip(*tensors.values(), strict=True)) if tensors else (1, 0)
    )
    return {
        place
        for place, (count, square) in tensors.items()
        if square / count <= tolerance**2 * squares / counts
    }


def _compare_pass(
    name: str, a: Mapping[str, Values], b: Mapping[str, Values], tolerance: float
) -> PassReport:
    both = [place for place in a if place in b]
    distances = [distance(a[place], b[place]) for place in both]
    largest = max(zip(distances, both, strict=True), default=(0.0, ""))
    for number, (off, place) in enumerate(zip(distances, both, strict=True)):
        if not off <= tolerance:
            before = both[number - 1] if number else None
            values = a[place], b[place]
            return PassReport(name, len(both), largest, place, before, values)
    return PassReport(name, len(both), largest)


def _settings(a: Mapping[str, Any], b: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    """Grids and versions are told apart from these, and may differ."""
    keys = dict.fromkeys([*a, *b])
    return {
        key: (a.get(key), b.get(key)) for key in keys if "." in key and a.get(key) != b.get(key)
    }


# --- In words ------------------------------------------------------------------------------------


def report(found: Comparison, tolerance: float) -> Iterator[str]:
    """The comparison, line by line: what was set, what agreed, and where the runs part."""
    if found.settings:
        number = len(found.settings)
        yield f"settings: {number} key{'s differ' if number > 1 else ' differs'}"
        width = max(map(len, found.settings))
        for key, values in found.settings.items():
            yield f"  {key:<{width}}  {'  '.join(toml_value(value) for value in values)}"
    if found.from_outside:
        yield "layers are compared by what goes in and out: those of one run are compiled"
    for where in found.only:
        yield f"only one of them has {where}"
    for step, passes in found.steps.items():
        yield f"step {step}"
        for one in passes:
            yield f"  {one.name:<10} {_pass_text(one)}"
            if one.left_out:
                yield f"  {'':<10} {_left_out_text(one.left_out)}"
            if one.first is not None:
                break
    parting = found.parting
    if parting is None:
        steps = len(found.steps)
        yield f"A and B are equal in {steps} step{'s' * (steps != 1)}, within {tolerance:g}"
        return
    step, one = parting
    yield (
        f"A and B part in step {step} in the pass {one.name} ({PASSES[one.name]}), at {one.first}"
        + (f", after {one.before}, which agrees" if one.before is not None else "")
    )


def _pass_text(one: PassReport) -> str:
    off, where = one.largest
    if one.first is None:
        places = f"{one.places} place{'s' * (one.places != 1)} agree{'s' * (one.places == 1)}"
        return (
            f"{places}, the largest distance {off:.1e} at {where}" if off else f"{places} exactly"
        )
    a, b = one.values
    off = f"{distance(a, b):.1e}"
    if len(a) == len(b) == 1:
        return f"{one.first}: {_number(a[0])} and {_number(b[0])}"
    count = f"{_number(a[0])} and {_number(b[0])} values, " if a[0] != b[0] else ""
    norms = " and ".join(f"{float(values[2]) ** 0.5:.6g}" for values in (a, b))
    return f"{one.first}: {count}relative distance {off}, norms {norms}"


def _left_out_text(places: Sequence[str]) -> str:
    named = ", ".join(places[:PLACES_NAMED]) + (", …" if len(places) > PLACES_NAMED else "")
    return f"{len(places)} left out, whose gradients are too small to tell from rounding: {named}"


def _number(value: float | str) -> str:
    return f"{float(value):.9g}"


def _listed(steps: Mapping[int, Any]) -> str:
    shown = [str(step) for step in sorted(steps)]
    return ", ".join(shown if len(shown) <= 8 else [*shown[:3], "…", *shown[-3:]])
