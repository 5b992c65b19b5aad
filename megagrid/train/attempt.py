"""One step of a run: its gradients, what the guard says of them, and the update or none."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from megagrid.config.schema import Config, GuardConfig
from megagrid.data import Batch
from megagrid.optim.lr_schedule import learning_rate
from megagrid.pipeline.schedules import Span
from megagrid.train.build import Engine
from megagrid.train.digest import DigestLog
from megagrid.train.find_nan import find_nan
from megagrid.train.guards import Action, Verdict
from megagrid.train.metrics import Stopwatch
from megagrid.train.state import RunState
from megagrid.train.step import (
    News,
    StepResult,
    apply_gradients,
    compute_gradients,
    drop_gradients,
)


@dataclass(frozen=True)
class Attempt:
    """What came of a step.

    Attributes:
        number: of the step.
        sample_ids: positions of its first and last sample in the order of samples.
        verdict: whether it was made; if not, neither weights nor moments have moved.
        lr: that it was made with, or would have been.
        loss_scale: the same.
        found: where its first NaN or Inf comes from, if that was looked for.
        spans: when each of this rank's actions ran, if the step is traced.
    """

    number: int
    sample_ids: tuple[int, int]
    result: StepResult
    verdict: Verdict
    lr: float
    loss_scale: float
    found: str | None = None
    spans: list[Span] | None = None

    @property
    def is_made(self) -> bool:
        return self.verdict.action is Action.MAKE

    @property
    def reason(self) -> str:
        """Why it wasn't made, in a line."""
        return f"step {self.number}: {self.verdict.reason}{f'; {self.found}' if self.found else ''}"


def remedies(attempt: Attempt, config: Config) -> str:
    """What to run again with, after a step that has ended the run."""
    optimizer, guard, verdict = config.optimizer, config.guard, attempt.verdict
    found = (
        f"a lower optimizer.lr={optimizer.lr} or a smaller optimizer.clip_grad="
        f"{optimizer.clip_grad}"
    )
    is_scaled = config.train.precision == "fp16" and math.isfinite(attempt.result.loss)
    if is_scaled and not verdict.is_finite and config.loss_scale.min > 1:
        found = f"a lower loss_scale.min={config.loss_scale.min:g}"
    if not verdict.is_finite and guard.on_nan == "end":
        found += '; guard.on_nan="skip" or "rollback" goes on without such steps'
    return found + find_nan_hint(attempt, guard)


def find_nan_hint(attempt: Attempt, guard: GuardConfig) -> str:
    """How to learn more of a NaN or Inf, if that hasn't been asked for."""
    if attempt.verdict.is_finite or guard.find_nan:
        return ""
    return "; --find-nan says where the NaN or Inf comes from"


class StepMaker:
    """Makes steps, one after the other, and counts them in the run's progress.

    Args:
        total_steps: of the run.
        news: see `compute_gradients`.
        digests: of the steps that are due.
    """

    def __init__(
        self,
        engine: Engine,
        state: RunState,
        total_steps: int,
        news: Callable[[], News],
        digests: DigestLog,
    ) -> None:
        self._engine = engine
        self._state = state
        self._total_steps = total_steps
        self._news = news
        self._digests = digests

    def make(
        self, batches: Sequence[Batch], watch: Stopwatch, *, is_traced: bool = False
    ) -> Attempt:
        """Try the next step: make it, or leave weights and moments as they are.

        Its data is used up either way, unless the run is to end. A step that the run is to be
        rolled back for isn't counted as one.
        """
        engine, state, progress = self._engine, self._state, self._state.progress
        train = engine.config.train
        number, first_sample = progress.step + 1, progress.consumed_samples
        scale, lr = state.loss_scale.value, self._learning_rate()
        spans: list[Span] | None = [] if is_traced else None
        with self._digests.of_step(number, batches, scale) as around:
            result = compute_gradients(
                engine, batches, number, watch, spans, self._news, loss_scale=scale, around=around
            )
        self._digests.gradients(result)
        verdict, found = state.guard.judge(result.loss, result.grad_norm), None
        if verdict.action is Action.MAKE:
            with watch.part("optimizer"):
                apply_gradients(engine, result.grad_norm, lr, loss_scale=scale)
            self._digests.update(result, lr)
            progress.updates += 1
        else:
            drop_gradients(engine)
            if engine.config.guard.find_nan and not (verdict.is_finite or verdict.is_overflow):
                found = find_nan(engine, batches, number, scale)
        self._digests.write(number)
        if verdict.action is not Action.END:
            progress.consumed_samples += train.global_batch_size
            progress.consumed_tokens += train.tokens_per_step
        if verdict.action in (Action.MAKE, Action.SKIP):
            progress.step = number
        sample_ids = first_sample, first_sample + train.global_batch_size - 1
        return Attempt(number, sample_ids, result, verdict, lr, scale, found, spans)

    def _learning_rate(self) -> float:
        """Of the next update: skipped steps don't move it."""
        config = self._engine.config
        return learning_rate(
            self._state.progress.updates + 1,
            config=config.lr_schedule,
            peak=config.optimizer.lr,
            total_steps=self._total_steps,
        )
