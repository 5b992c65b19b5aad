"""What a recipe may say but hardly means: told as a warning, and the run goes on.

A caution is a function that returns nothing, or a line that names the keys, their values and what
comes of them. `CAUTIONS` is the list.
"""

from __future__ import annotations

from collections.abc import Callable

from megagrid.config.schema import Config, LossScaleConfig


def cautions(config: Config) -> list[str]:
    """All that there is to say about `config`, which the rules have let through."""
    return [text for caution in CAUTIONS if (text := caution(config)) is not None]


def warmup_outlasts_the_run(config: Config) -> str | None:
    """Such a run reaches its peak rate at its last step alone."""
    warmup, last = config.lr_schedule.warmup_steps, config.train.total_steps
    if warmup <= last:
        return None
    return (
        f"lr_schedule.warmup_steps={warmup} is more than the run has, whose last step is {last}: "
        f"the warmup ends there, and no other step is made with optimizer.lr={config.optimizer.lr}"
    )


def loss_scale_is_for_fp16(config: Config) -> str | None:
    """Other precisions hold gradients as they are."""
    precision = config.train.precision
    if precision == "fp16" or config.loss_scale == LossScaleConfig():
        return None
    return f'[loss_scale] isn\'t read under train.precision="{precision}", only under "fp16"'


CAUTIONS: tuple[Callable[[Config], str | None], ...] = (
    warmup_outlasts_the_run,
    loss_scale_is_for_fp16,
)
