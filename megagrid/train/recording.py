"""From what a step was to the record of it."""

from __future__ import annotations

import torch

from megagrid.config.schema import Config
from megagrid.plan import flops, hardware
from megagrid.train.attempt import Attempt
from megagrid.train.metrics import GuardRecord, StepRecord
from megagrid.train.state import RunState


class Recorder:
    """Writes down what the run's steps were.

    Args:
        num_ranks: of the run.
        device: that each of them computes on one of.
    """

    def __init__(self, config: Config, num_ranks: int, device: torch.device) -> None:
        self._config = config
        self._num_ranks = num_ranks
        self._peak_flops = peak_flops(config, device)

    def step(
        self,
        attempt: Attempt,
        state: RunState,
        seconds: float,
        parts: dict[str, float],
        valid_loss: float | None,
    ) -> StepRecord:
        """The record of the step that `state` is at the end of.

        Args:
            seconds, parts: that it took, see `StepRecord`.
        """
        result, progress = attempt.result, state.progress
        tokens_per_s = result.valid_tokens / seconds
        return StepRecord(
            step=attempt.number,
            loss=result.loss,
            z_loss=result.z_loss if self._config.train.z_loss else None,
            grad_norm=result.grad_norm,
            lr=attempt.lr,
            valid_tokens=result.valid_tokens,
            consumed_tokens=progress.consumed_tokens,
            consumed_samples=progress.consumed_samples,
            sample_ids=attempt.sample_ids,
            step_time_s=seconds,
            tokens_per_s=tokens_per_s,
            tokens_per_s_per_rank=tokens_per_s / self._num_ranks,
            parts_s=parts,
            peak_memory_bytes=result.peak_memory_bytes,
            **self._utilisation(seconds),
            valid_loss=valid_loss,
            skipped=not attempt.is_made,
            skipped_steps=state.guard.skipped,
            rollbacks=state.guard.rollbacks,
            loss_scale=attempt.loss_scale,
        )

    def _utilisation(self, seconds: float) -> dict[str, float]:
        """MFU and HFU of a step, if the peak of the device is stated or known.

        Every position counts, trained on or not: the device computes them all.
        """
        if self._peak_flops is None:
            return {}
        train, memory = self._config.train, self._config.memory
        cost = flops.token_flops(
            self._config.model,
            train.seq_length,
            recompute=memory.recompute,
            recompute_interval=memory.recompute_interval,
        )
        tokens_per_s = train.tokens_per_step / seconds
        ranks = {"num_ranks": self._num_ranks, "peak_flops": self._peak_flops}
        return {
            "mfu": flops.utilisation(cost.model, tokens_per_s, **ranks),
            "hfu": flops.utilisation(cost.hardware, tokens_per_s, **ranks),
        }


def guard_record(attempt: Attempt, step: int) -> GuardRecord:
    """The record of a step that wasn't made.

    Args:
        step: that the run is at now.
    """
    return GuardRecord(
        step=step,
        at_step=attempt.number,
        action=attempt.verdict.action.value,
        reason=attempt.reason,
        loss=attempt.result.loss,
        grad_norm=attempt.result.grad_norm,
        sample_ids=attempt.sample_ids,
    )


def peak_flops(config: Config, device: torch.device) -> float | None:
    """FLOP/s that one device can do at best: as stated, else as known by its name."""
    if config.logging.peak_tflops is not None:
        return config.logging.peak_tflops * 1e12
    if device.type != "cuda":
        return None
    known = hardware.find_device(torch.cuda.get_device_name(device))
    return known.peak_flops if known else None
