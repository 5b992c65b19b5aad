"""What two checkpoints differ in, whatever grids have cut them.

Tensors are compared by name in global coordinates, bit by bit: the same NaN is equal to itself, and
0 isn't -0. Both are read a slab of some MiB at a time, so a difference of models that no machine
holds fits into any.

With a tolerance T, values count as equal that are at most T times the largest magnitude of their
tensor apart. That is the size of what rounding does to a sum of the tensor's values; measured
against each value itself, those near zero would always differ.
"""

from __future__ import annotations

import json
import math
import tomllib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

import numpy as np

from megagrid.checkpoint.manifest import (
    CONFIG,
    OPTIMIZER_PREFIX,
    TRAINER_STATE,
    find_damage,
    weight_of,
)
from megagrid.checkpoint.reader import NUMBERS, TensorReader, to_float64
from megagrid.errors import CheckpointError

SLAB = 1 << 19
"""Values of a tensor that are compared at once, unless a row has more."""

MODEL_ORDER = (
    *("embedding", "position_embedding", "layers"),
    *("attention_norm", "attention", "wq", "wk", "wv", "q_norm", "k_norm", "wo"),
    *("mlp_norm", "mlp", "gate", "up", "down"),
    *("norm", "head", "weight", "bias"),
)
"""The parts of weights' names, as data flows; others come last."""

_PLACE_OF = MappingProxyType({part: place for place, part in enumerate(MODEL_ORDER)})


@dataclass(frozen=True)
class ValueDifference:
    """How the values of two tensors of one shape differ.

    Attributes:
        count: values that aren't equal, `of` how many.
        index: of the first of them in the global tensor; `values` there, in A and in B.
        largest: |a - b| at its largest; inf where one is no number and the other is.
        relative: |a - b| / max(|a|, |b|) at its largest.
    """

    count: int
    of: int
    index: tuple[int, ...]
    values: tuple[float, float]
    largest: float
    relative: float


@dataclass(frozen=True)
class TensorDifference:
    """A tensor that isn't the same in A and B.

    Attributes:
        facts: what is known without reading it: it is missing, or its shape or dtype differs.
        values: None if they are equal, or can't be compared.
    """

    name: str
    facts: tuple[str, ...]
    values: ValueDifference | None


@dataclass(frozen=True)
class KeyDifference:
    """A key of JSON or TOML with its value in A and in B, as text; "" where it isn't stated."""

    key: str
    a: str
    b: str


@dataclass
class Comparison:
    """All that differs.

    Attributes:
        tolerance, weights_only: how it was looked for, see `compare`.
        weights, states: of the model and of its optimizer, in the model's order.
        num_weights, num_states: how many were compared.
        trainer: keys of the trainer's state.
        config: keys of the recipe. It says how a model was trained, and on which grid, so it
            doesn't make a checkpoint another one.
    """

    tolerance: float = 0.0
    weights_only: bool = False
    num_weights: int = 0
    num_states: int = 0
    weights: list[TensorDifference] = field(default_factory=list)
    states: list[TensorDifference] = field(default_factory=list)
    trainer: list[KeyDifference] = field(default_factory=list)
    config: list[KeyDifference] = field(default_factory=list)

    @property
    def is_equal(self) -> bool:
        return not (self.weights or self.states or self.trainer)


def compare(
    a: TensorReader,
    b: TensorReader,
    *,
    tolerance: float = 0.0,
    weights_only: bool = False,
    progress: Callable[[str, int], None] = lambda what, done: None,
) -> Comparison:
    """Compare two checkpoints.

    Args:
        tolerance: see above; 0: bit by bit.
        weights_only: leave out the optimizer's states, the trainer's and the recipe.
        progress: told of the bytes of A's and B's tensors as they are read.

    Raises:
        CheckpointError: one of them is damaged.
    """
    found = Comparison(tolerance, weights_only)
    names = a.manifest.tensors.keys() | b.manifest.tensors.keys()
    for name in sorted(names, key=model_order):
        is_state = name.startswith(OPTIMIZER_PREFIX)
        if is_state and weights_only:
            continue
        found.num_states += is_state
        found.num_weights += not is_state
        difference = _compare_tensor(name, a, b, tolerance, progress)
        if difference is not None:
            (found.states if is_state else found.weights).append(difference)
    if not weights_only:
        found.trainer = _compare_keys(*(_read_keys(c, TRAINER_STATE, json.loads) for c in (a, b)))
        found.config = _compare_keys(*(_read_keys(c, CONFIG, tomllib.loads) for c in (a, b)))
    return found


def model_order(name: str) -> tuple:
    """A key that sorts weights as data flows through them, layers by number, then their states."""
    is_state = name.startswith(OPTIMIZER_PREFIX)
    parts = (weight_of(name) if is_state else name).split(".")
    places = [
        (int(part) if part.isdecimal() else _PLACE_OF.get(part, len(MODEL_ORDER)), part)
        for part in parts
    ]
    return is_state, places, name


# --- Tensors -------------------------------------------------------------------------------------


def _compare_tensor(
    name: str,
    a: TensorReader,
    b: TensorReader,
    tolerance: float,
    progress: Callable[[str, int], None],
) -> TensorDifference | None:
    tensors = [checkpoint.manifest.tensors.get(name) for checkpoint in (a, b)]
    if None in tensors:
        return TensorDifference(name, (f"only in {'B' if tensors[0] is None else 'A'}",), None)
    one, other = tensors
    facts = []
    if one.dtype != other.dtype:
        facts.append(f"{one.dtype} in A, {other.dtype} in B")
    values = None
    if one.shape != other.shape:
        facts.append(f"{shape_text(one.shape)} in A, {shape_text(other.shape)} in B")
    else:
        values = _compare_values(name, a, b, tolerance)
    for tensor in tensors:
        progress("comparing", math.prod(tensor.shape) * NUMBERS[tensor.dtype].bits.itemsize)
    return TensorDifference(name, tuple(facts), values) if facts or values else None


def _compare_values(
    name: str, a: TensorReader, b: TensorReader, tolerance: float
) -> ValueDifference | None:
    """None if they are equal. Another look is taken only at what isn't the same bit by bit."""
    exact = _difference(name, a, b, None)
    if exact is None or tolerance == 0:
        return exact
    allowed = tolerance * _largest_magnitude(name, a, b)
    return None if exact.largest <= allowed else _difference(name, a, b, allowed)


def _difference(
    name: str, a: TensorReader, b: TensorReader, allowed: float | None
) -> ValueDifference | None:
    """What differs by more than `allowed`; None: by a bit."""
    shape = a.manifest.tensors[name].shape
    count, first, largest, relative = 0, None, 0.0, 0.0
    for row, one, other in _slabs(name, a, b):
        where = _unequal(one, other)
        if not where.any():
            continue
        values = [bits.of(where) for bits in (one, other)]
        gaps, relative_gaps = _gaps(*values)
        if allowed is not None:
            counts = gaps > allowed
            where[where] = counts
            values, gaps = [v[counts] for v in values], gaps[counts]
            relative_gaps = relative_gaps[counts]
            if not gaps.size:
                continue
        if first is None:
            index = np.unravel_index(where.argmax(), where.shape)
            at = (int(index[0]) + row, *map(int, index[1:]))
            first = (at if shape else ()), (float(values[0][0]), float(values[1][0]))
        count += gaps.size
        largest, relative = max(largest, gaps.max()), max(relative, relative_gaps.max())
    if first is None:
        return None
    return ValueDifference(count, math.prod(shape), *first, float(largest), float(relative))


@dataclass(frozen=True)
class _Slab:
    """Some rows of a tensor as bits, and what they mean."""

    bits: np.ndarray
    dtype: str

    def of(self, where: np.ndarray) -> np.ndarray:
        """The numbers where `where` is true, in a row."""
        return to_float64(self.bits[where], self.dtype)

    @property
    def numbers(self) -> np.ndarray:
        return to_float64(self.bits, self.dtype)


def _slabs(name: str, a: TensorReader, b: TensorReader) -> Iterator[tuple[int, _Slab, _Slab]]:
    """The two tensors, some rows at a time, and the number of the first row."""
    tensors = [checkpoint.manifest.tensors[name] for checkpoint in (a, b)]
    rows, *row_shape = tensors[0].shape or (1,)
    step = max(1, SLAB // max(1, math.prod(row_shape)))
    for row in range(0, rows, step):
        rectangle = (row, *(0 for _ in row_shape)), (min(step, rows - row), *row_shape)
        one, other = (
            _Slab(checkpoint.read(name, *rectangle), tensor.dtype)
            for checkpoint, tensor in zip((a, b), tensors, strict=True)
        )
        yield row, one, other


def _unequal(one: _Slab, other: _Slab) -> np.ndarray:
    """Where bits differ; of two dtypes, where numbers do."""
    if one.dtype == other.dtype:
        return one.bits != other.bits
    x, y = one.numbers, other.numbers
    return (x != y) & ~(np.isnan(x) & np.isnan(y))


def _gaps(x: np.ndarray, y: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """|x - y|, and the same relative to the larger of the two; inf where just one is NaN."""
    with np.errstate(all="ignore"):
        gaps = np.abs(x - y)
        relative = gaps / np.maximum(np.abs(x), np.abs(y))
    both = np.isnan(x) & np.isnan(y)
    for values in (gaps, relative):
        values[np.isnan(values)] = np.inf
        values[both | (x == y)] = 0.0
    return gaps, relative


def _largest_magnitude(name: str, a: TensorReader, b: TensorReader) -> float:
    """Of the finite values of the two tensors."""
    largest = 0.0
    for _, *slabs in _slabs(name, a, b):
        for slab in slabs:
            magnitudes = np.abs(slab.numbers)
            largest = max(largest, magnitudes.max(initial=0.0, where=np.isfinite(magnitudes)))
    return float(largest)


# --- Trainer's state and recipe ------------------------------------------------------------------


def _read_keys(
    checkpoint: TensorReader, name: str, parse: Callable[[str], Any]
) -> Mapping[str, Any]:
    """The file `name` of a checkpoint as one level of dotted keys; empty if it has none."""
    if name not in checkpoint.manifest.files:
        return {}
    stated = [(name, checkpoint.manifest.files[name])]
    problems = find_damage(checkpoint.folder, stated, deep=True)
    try:
        if not problems:
            return dict(_flat("", parse((checkpoint.folder / name).read_text(encoding="utf-8"))))
    except (OSError, ValueError, RecursionError) as error:
        problems = [f"{name}: {error}"]
    raise CheckpointError(f"{checkpoint.folder} is damaged: {problems[0]}")


def _flat(prefix: str, value: Any) -> Iterator[tuple[str, Any]]:
    if not isinstance(value, dict):
        yield prefix, value
        return
    for key, item in value.items():
        yield from _flat(f"{prefix}.{key}" if prefix else key, item)


def _compare_keys(a: Mapping[str, Any], b: Mapping[str, Any]) -> list[KeyDifference]:
    """The keys whose values differ, in the order of A, then of B."""
    return [
        KeyDifference(key, *(json.dumps(c[key], default=str) if key in c else "" for c in (a, b)))
        for key in {**a, **b}
        if key not in a or key not in b or a[key] != b[key]
    ]


# --- In words ------------------------------------------------------------------------------------


def report(found: Comparison, limit: int) -> Iterator[str]:
    """The comparison in lines; of each kind of tensor the first `limit` that differ."""
    if not found.weights_only:
        yield from _report_keys("recipe", found.config, ", which doesn't count")
        yield from _report_keys("trainer's state", found.trainer, "")
    yield from _report_tensors("weights", found.weights, found.num_weights, limit)
    if not found.weights_only:
        yield from _report_tensors("optimizer states", found.states, found.num_states, limit)
    within = (
        f", to within {found.tolerance:g} of each tensor's largest value" if found.tolerance else ""
    )
    yield f"A and B are equal{within}" if found.is_equal else "A and B differ"


def shape_text(shape: tuple[int, ...]) -> str:
    """For example: 4 x 2."""
    return " x ".join(map(str, shape)) or "a number"


def _report_keys(kind: str, differences: list[KeyDifference], remark: str) -> Iterator[str]:
    if not differences:
        return
    number = len(differences)
    yield f"{kind}: {'1 key differs' if number == 1 else f'{number} keys differ'}{remark}"
    names = max(len(difference.key) for difference in differences)
    values = max(len(difference.a or "-") for difference in differences)
    for each in differences:
        yield f"  {each.key:<{names}}  {each.a or '-':<{values}}  {each.b or '-'}"


def _report_tensors(
    kind: str, differences: list[TensorDifference], total: int, limit: int
) -> Iterator[str]:
    number = len(differences)
    yield f"{kind}: " + (f"{number} of {total} differ" if number else f"all {total} equal")
    for difference in differences[:limit]:
        yield f"  {difference.name}"
        yield from (f"    {fact}" for fact in difference.facts)
        if difference.values is not None:
            yield f"    {_values_text(difference.values)}"
    if number > limit:
        yield f"  and {number - limit} more"


def _values_text(values: ValueDifference) -> str:
    one, other = _numbers(*values.values)
    return (
        f"{values.count:,} of {values.of:,} values differ, by up to {values.largest:.3g} "
        f"(relative: {values.relative:.3g}); the first at {list(values.index)}: {one} and {other}"
    )


def _numbers(*values: float) -> list[str]:
    """In as many digits as float32 has, or, where that doesn't tell them apart, float64."""
    short = [f"{value:.9g}" for value in values]
    return short if len(set(short)) > 1 else [f"{value:.17g}" for value in values]
