"""What `digests.jsonl` says of a step: of each tensor that is worth comparing a few sums, which are
the same whatever grid computed it. Imports no torch.

    {"step": 1, "settings": {"megagrid": "0.1.0", "grid": "tp 2 x cp 1 x dp 1 x pp 1", …},
     "passes": {"weights":   {"embedding.weight": [1952, 2.17, 43.9, -3.1, …], …},
                "data":      {"tokens": […], "labels": […], "valid tokens": [253]},
                "forward":   {"embedding": […], "layers.0.attention": […], …, "loss": [4.12]},
                "backward":  {"norm": […], "layers.4.output": […], …, "embedding": […]},
                "gradients": {"norm.weight": […], …, "norm": [1.19]},
                "update":    {"learning rate": [0.001], "clipping": [0.84], …}}}

in the order in which a step has them. A single number is as it is. Of a tensor x of n elements
there are n, sum x, sum x^2 and `PROJECTIONS` sums of +-x, whose signs are hashes of the element's
index in the global tensor: of hidden states, (sample, position, channel). All add up over the parts
of x that ranks hold.

**The distance of two tensors that are nowhere together.** With random signs s, independent of each
other, the expectation of (sum s x - sum s y)^2 is sum (x - y)^2. So the root of the mean of these
squares over the projections is an estimate of |x - y|, within a factor of 2 in 99 of 100 cases; and
it is 0 only where x and y are equal, or agree in all of their projections to the last bit.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

from megagrid.train.metrics import Record

FILE_NAME = "digests.jsonl"
PROJECTIONS = 8
NUMBERS = 3 + PROJECTIONS
"""Of a tensor's digest."""

PASSES = {
    "weights": "the weights before the step",
    "data": "what the step reads",
    "forward": "outputs of modules",
    "backward": "gradients of these outputs",
    "gradients": "gradients of parameters",
    "update": "the optimizer's step, and the weights after it",
}
"""In the order of a step. Weights before a step are those after the one before it, so they are
recorded of the first step that a process digests alone."""

Values = Sequence[float]
"""A tensor's digest, or one number."""


@dataclass(frozen=True, kw_only=True)
class StepDigests(Record):
    """The digests of one step.

    Attributes:
        settings: of the run: its grid, its version, and the keys that say what it computes.
        passes: by pass and place.
    """

    of: ClassVar[str] = "step's digest"
    step: int
    settings: dict[str, Any] = field(default_factory=dict)
    passes: dict[str, dict[str, Values]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not isinstance(self.step, int) or not all(
            isinstance(part, dict) for part in (self.settings, self.passes, *self.passes.values())
        ):
            raise ValueError("step, settings and passes are a number and tables")
        for places in self.passes.values():
            for values in places.values():
                if len(values) not in (1, NUMBERS) or not all(map(_is_number, values)):
                    raise ValueError(f"a digest has {NUMBERS} numbers, or one")


def distance(a: Values, b: Values) -> float:
    """How far two values are apart, relative to the larger; of tensors estimated. Infinite where
    one is no number, or their numbers of elements differ."""
    if list(a) == list(b):  # the same word for no number among them
        return 0.0
    a, b = [float(value) for value in a], [float(value) for value in b]
    if len(a) != len(b):
        return math.inf
    if len(a) == 1:
        off, size = abs(a[0] - b[0]), max(abs(a[0]), abs(b[0]))
    elif a[0] != b[0]:
        return math.inf
    else:
        squares = [(x - y) ** 2 for x, y in zip(a[3:], b[3:], strict=True)]
        off, size = math.sqrt(sum(squares) / PROJECTIONS), math.sqrt(max(a[2], b[2]))
    if not math.isfinite(off) or not math.isfinite(size):
        return math.inf
    return off / size if size else 0.0


def _is_number(value: object) -> bool:
    """JSON's, or the word that stands for one that JSON doesn't have."""
    return isinstance(value, int | float) or value in ("NaN", "Infinity", "-Infinity")
