"""What becomes of a step, judged by its numbers before the weights are touched.

    the step's loss and gradient norm             what becomes of it
    ------------------------------------------    -----------------------------------------------
    fp16: a finite loss, a norm that isn't,       skipped, and the loss scale falls
      and a loss scale that can fall
    one of them isn't finite                      as guard.on_nan says
    loss > mean + loss_deviations std, or         as guard.on_spike says
      norm > norm_factor median (of the window)
    anything else                                 made; its numbers enter the window

What is judged are numbers of the whole grid, which every rank has bit by bit, so every rank comes
to the same verdict without asking the others. The window lies in checkpoints: a resumed run judges
as the uninterrupted one.

A skipped step is a step of the run: it has a number, a record, and has used up its data. It isn't
an update: weights, moments, the optimizer's count of updates and the learning rate stay where they
are.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass
from enum import Enum
from statistics import fmean, median, pstdev
from typing import Any

from megagrid.config.schema import GuardConfig
from megagrid.optim.loss_scale import LossScale

LEAST_DEVIATION = 1e-3
"""Of losses, relative to their mean: where all are alike, another one isn't a spike for that."""


class Action(Enum):
    """What becomes of a step."""

    MAKE = "make"
    SKIP = "skip"
    ROLL_BACK = "rollback"
    END = "end"


@dataclass(frozen=True)
class Verdict:
    """What becomes of a step, and why.

    Attributes:
        reason: in words; "" for a step that is made.
        is_finite: whether its numbers are ones.
        is_overflow: whether it is skipped for the sake of the loss scale.
    """

    action: Action
    reason: str = ""
    is_finite: bool = True
    is_overflow: bool = False


class Guard:
    """Judges one step after the other.

    Args:
        scale: moved by the verdicts.

    Attributes:
        skipped: steps of the run that weren't made.
        rollbacks: of the run.
    """

    def __init__(self, config: GuardConfig, scale: LossScale) -> None:
        self.skipped = 0
        self.rollbacks = 0
        self._config = config
        self._scale = scale
        self._skips_in_a_row = 0
        self._losses: deque[float] = deque(maxlen=config.window)
        self._norms: deque[float] = deque(maxlen=config.window)

    def judge(self, loss: float, grad_norm: float) -> Verdict:
        """The verdict on a step, and take note of it.

        Args:
            loss, grad_norm: of the whole grid; the norm without the loss scale.
        """
        if not math.isfinite(loss + grad_norm):
            if math.isfinite(loss) and self._scale.can_fall:
                return self._overflow()
            reason = f"loss {loss}, gradient norm {grad_norm}"
            if math.isfinite(loss) and self._scale.config is not None:
                least = self._scale.config.min
                reason += f" at loss scale {self._scale.value:g}, with loss_scale.min={least:g}"
            return self._act(self._config.on_nan, reason, is_finite=False)
        if self._config.on_spike != "off" and (reason := self._spike(loss, grad_norm)):
            return self._act(self._config.on_spike, reason, is_finite=True)
        self._losses.append(loss)
        self._norms.append(grad_norm)
        self._skips_in_a_row = 0
        self._scale.after_step()
        return Verdict(Action.MAKE)

    def _overflow(self) -> Verdict:
        before = self._scale.value
        self._scale.after_overflow()
        self.skipped += 1
        reason = f"gradients overflow at loss scale {before:g}, which is {self._scale.value:g} now"
        return Verdict(Action.SKIP, reason, is_finite=False, is_overflow=True)

    def _spike(self, loss: float, grad_norm: float) -> str | None:
        """In what the step is a spike, in words."""
        if len(self._losses) < self._config.window:
            return None
        mean = fmean(self._losses)
        deviation = max(pstdev(self._losses), LEAST_DEVIATION * abs(mean))
        highest_loss = mean + self._config.loss_deviations * deviation
        highest_norm = self._config.norm_factor * median(self._norms)
        window = f"after {self._config.window} steps"
        if loss > highest_loss:
            return f"loss {loss:.6g} is above {highest_loss:.6g}, a spike {window} of {mean:.6g}"
        if grad_norm > highest_norm:
            typical = f"{median(self._norms):.6g}"
            return (
                f"gradient norm {grad_norm:.6g} is above {highest_norm:.6g}, a spike {window} of "
                f"{typical}"
            )
        return None

    def _act(self, policy: str, reason: str, *, is_finite: bool) -> Verdict:
        """What the recipe says to do, unless it has been done too often."""
        action, config = Action(policy), self._config
        if action is Action.SKIP:
            self._skips_in_a_row += 1
            if self._skips_in_a_row > config.max_skips:
                reason += f"; guard.max_skips={config.max_skips} steps in a row were skipped before"
                return Verdict(Action.END, reason, is_finite)
            self.skipped += 1
        if action is Action.ROLL_BACK:
            if self.rollbacks == config.max_rollbacks:
                reason += f"; the run was rolled back guard.max_rollbacks={self.rollbacks} times"
                return Verdict(Action.END, reason, is_finite)
            self.rollbacks += 1
        return Verdict(action, reason, is_finite)

    def to_json(self) -> dict[str, Any]:
        """What a resumed run needs."""
        return {
            "skipped": self.skipped,
            "rollbacks": self.rollbacks,
            "skips_in_a_row": self._skips_in_a_row,
            "losses": list(self._losses),
            "grad_norms": list(self._norms),
        }

    def load(self, state: dict[str, Any]) -> None:
        """Go on from what `to_json` of a run returned. Of a longer window the last steps stay."""
        self.skipped, self.rollbacks = state["skipped"], state["rollbacks"]
        self._skips_in_a_row = state["skips_in_a_row"]
        self._losses = deque(state["losses"], self._config.window)
        self._norms = deque(state["grad_norms"], self._config.window)
