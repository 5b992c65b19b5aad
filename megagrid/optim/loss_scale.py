"""The dynamic loss scale of fp16 (Micikevicius et al. 2018, arXiv 1710.03740, section 3.2).

fp16 has no numbers below 6e-8, and gradients do. So the gradient that backward begins with is
multiplied by the scale, and all gradients with it; the factor that clips them divides it out again.
The scale is as large as goes without overflow, which only trying tells:

    gradients overflow              the step is skipped, the scale multiplied by backoff_factor
    growth_interval good steps      it is multiplied by growth_factor

    scale  2^17             ____x           x: overflow, a step that isn't made
           2^16  ____x     |    |____
           2^15      |_____|

With a hysteresis of n, the first n - 1 overflows since the scale last grew skip their steps but
leave it as it is: a single bad batch doesn't cost digits for the steps after it.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from megagrid.config.schema import LossScaleConfig

LARGEST = 2.0**100
"""Where growth ends: a model without gradients would let it grow beyond what fp32 can hold."""


@dataclass
class LossScale:
    """The scale, and what decides when it moves.

    Attributes:
        config: None for a precision that needs none: the scale is 1 and stays so.
        value: what the loss is multiplied by.
        good_steps: in a row, since it last moved.
        patience: overflows from now on that lower it, the last of them included.
    """

    config: LossScaleConfig | None
    value: float = 1.0
    good_steps: int = 0
    patience: int = 1

    def __post_init__(self) -> None:
        if self.config is not None:
            self.value, self.patience = self.config.initial, self.config.hysteresis

    @property
    def can_fall(self) -> bool:
        """Whether an overflow may be the scale's doing, so that a lower one cures it."""
        return self.config is not None and self.value > self.config.min

    def after_overflow(self) -> None:
        """Take note of a step whose gradients overflowed."""
        self.good_steps = 0
        self.patience = max(0, self.patience - 1)
        if self.patience == 0:
            self.value = max(self.value * self.config.backoff_factor, self.config.min)

    def after_step(self) -> None:
        """Take note of a step that was made."""
        if self.config is None:
            return
        self.good_steps += 1
        if self.good_steps == self.config.growth_interval:
            self.value = min(self.value * self.config.growth_factor, LARGEST)
            self.good_steps, self.patience = 0, self.config.hysteresis

    def to_json(self) -> dict[str, Any]:
        """What a resumed run needs."""
        state = asdict(self)
        del state["config"]
        return state

    def load(self, state: dict[str, Any]) -> None:
        """Go on from what `to_json` of a run returned: not, if this one needs no scale."""
        if self.config is not None:
            self.value, self.good_steps = state["value"], state["good_steps"]
            self.patience = state["patience"]
