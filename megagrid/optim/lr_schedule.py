"""The learning rate of a step. Pure arithmetic, no torch.

The rate is a function of the step's number alone: there is no scheduler object, hence nothing to
save, and a resumed run has the rates of the uninterrupted one. Steps count from 1; the peak is
reached exactly, at the last step of the warmup (at step 1 without one).

    peak |        ____                 cosine, linear: decay right after the warmup
         |      /      \\               wsd: stay at the peak, decay over the last steps
         |    /          \\             constant: stay at the peak
     min |  /              \\____
         +--1-----top----------total--> step
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from megagrid.config.schema import LRScheduleConfig


@dataclass(frozen=True)
class Decay:
    """The way down from the peak.

    Attributes:
        start: last step at the peak.
        length: steps from there to the minimum; 0: the next step is at the minimum.
        curve: from the fraction of `length` gone to what is left of peak - min, both 1 to 0.
    """

    start: int
    length: int
    curve: Callable[[float], float]

    def remaining(self, step: int) -> float:
        """What is left of peak - min at `step`, which is after `start`."""
        gone = step - self.start
        return self.curve(gone / self.length) if gone < self.length else 0.0


def _half_cosine(gone: float) -> float:
    return 0.5 * (1.0 + math.cos(math.pi * gone))


def _straight_line(gone: float) -> float:
    return 1.0 - gone


def _after_warmup(curve: Callable[[float], float]) -> Callable[[int | None, int, int], Decay]:
    def decay(decay_steps: int | None, top: int, total_steps: int) -> Decay:
        return Decay(top, total_steps - top if decay_steps is None else decay_steps, curve)

    return decay


def _at_the_end(decay_steps: int | None, top: int, total_steps: int) -> Decay:
    """Warmup-stable-decay with a linear decay (Hu et al. 2024, arXiv 2404.06395, section 4)."""
    length = math.ceil(total_steps / 10) if decay_steps is None else decay_steps
    start = max(top, total_steps - length)
    return Decay(start, total_steps - start, _straight_line)


def _never(decay_steps: int | None, top: int, total_steps: int) -> Decay:
    return Decay(max(top, total_steps), 0, _straight_line)


DECAYS: dict[str, Callable[[int | None, int, int], Decay]] = {
    "cosine": _after_warmup(_half_cosine),
    "linear": _after_warmup(_straight_line),
    "wsd": _at_the_end,
    "constant": _never,
}
"""How each kind comes down, from (decay_steps, step of the peak, steps of the run)."""


def learning_rate(step: int, *, config: LRScheduleConfig, peak: float, total_steps: int) -> float:
    """The rate that optimizer step `step` is made with.

    Args:
        step: counted from 1. Beyond `total_steps` the rate of the last step holds.
        peak: largest rate of the run.
        total_steps: steps of the run. A longer warmup is shortened to it, so that every run
            reaches its peak.
    """
    if step < 1:
        raise ValueError(f"steps count from 1, got {step}")
    step = min(step, total_steps)
    warmup = min(config.warmup_steps, total_steps)
    if step <= warmup:
        return peak * (step / warmup)
    decay = DECAYS[config.kind](config.decay_steps, max(warmup, 1), total_steps)
    if step <= decay.start:
        return peak
    # Scaling peak by a factor that rounding can't lift above 1 keeps the peak the exact maximum;
    # min + (peak - min) * remaining could exceed it by a rounding.
    floor = config.min_lr_ratio
    return peak * (floor + (1.0 - floor) * decay.remaining(step))
