"""One optimizer step, and one evaluation, of the whole grid."""

from __future__ import annotations

import resource
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import astuple, dataclass

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from megagrid.comm.collectives import all_reduce
from megagrid.data import Batch
from megagrid.grid import zigzag
from megagrid.grid.grid import Axis
from megagrid.nn.dropout import DropoutStreams
from megagrid.optim.clip import clip_gradients, local_squared_norm
from megagrid.pipeline.schedules import Action, Span
from megagrid.pipeline.stage import Microbatch
from megagrid.train.build import Engine
from megagrid.train.metrics import Stopwatch


@dataclass(frozen=True)
class News:
    """What a rank may have to tell the others with its numbers of a step; in the step's result,
    whether any rank had.

    Attributes:
        stop: a signal asks the run to stop.
        save_failed: the save behind the training has failed.
    """

    stop: bool = False
    save_failed: bool = False


@dataclass(frozen=True)
class StepResult:
    """What a step was, over the whole grid.

    Attributes:
        loss: mean over valid tokens, nats: the cross-entropy.
        z_loss: the same of what `train.z_loss` adds to it.
        grad_norm: of the whole model, before clipping and without the loss scale.
        valid_tokens: labels that counted.
        peak_memory_bytes: of each rank.
        news: of any rank.
    """

    loss: float
    z_loss: float
    grad_norm: float
    valid_tokens: int
    peak_memory_bytes: tuple[int, ...]
    news: News = News()


def compute_gradients(
    engine: Engine,
    batches: Sequence[Batch],
    step: int,
    watch: Stopwatch,
    spans: list[Span] | None = None,
    news: Callable[[], News] = News,
    *,
    loss_scale: float = 1.0,
    around: Callable[[Action], AbstractContextManager[None]] | None = None,
) -> StepResult:
    """Run the step's forwards and backwards: every gradient of the mean loss, times `loss_scale`,
    is then in place.

    Args:
        batches: this dp rank's microbatches, of whole samples.
        step: number of the step, from 1.
        spans: gets when each of this rank's actions ran, see `Executor.run`.
        news: asked for what this rank has to tell, as late in the step as can be.
        around: see `Executor.run`.
    """
    grid = engine.grid
    with watch.part("data"):
        batches = _tokens_of_rank(batches, grid.cp)
        microbatches = _to_device(batches, engine, step, training=True)
        tokens = _TokenCount(batches, grid.dp_cp, grid.device)
    with watch.part("forward-backward"):
        losses = engine.executor.run(
            engine.training, microbatches, lambda: tokens.scale(loss_scale), spans, around
        )
    with watch.part("norm"):
        # One message for all that the ranks must know of each other at the end of a step.
        totals = torch.zeros(5 + grid.world.size, dtype=torch.float64, device=grid.device)
        totals[0] = local_squared_norm(engine.optimizer.shards, grid.device)
        if grid.tp.rank == 0:
            totals[1:3] = losses
        totals[3:5] = torch.tensor(astuple(news()))
        totals[5 + grid.rank] = peak_memory_bytes(grid.device)
        squared_norm, loss, z_loss, *told = all_reduce(totals, grid.world).tolist()
        stop, save_failed, *peaks = told
    valid_tokens = tokens.total()
    return StepResult(
        loss=loss / max(1, valid_tokens),
        z_loss=z_loss / max(1, valid_tokens),
        grad_norm=squared_norm**0.5 / loss_scale,
        valid_tokens=valid_tokens,
        peak_memory_bytes=tuple(int(peak) for peak in peaks),
        news=News(stop > 0, save_failed > 0),
    )


def apply_gradients(
    engine: Engine, grad_norm: float, lr: float, *, loss_scale: float = 1.0
) -> None:
    """Clip by the global norm, update the weights and drop the gradients.

    Args:
        grad_norm: without the loss scale, which is divided out of the gradients here.
    """
    largest = engine.config.optimizer.clip_grad
    clip_gradients(engine.optimizer.shards, grad_norm, largest, loss_scale)
    engine.optimizer.step(lr)
    for stage in engine.executor.stages.values():
        stage.sync.after_update()


def drop_gradients(engine: Engine) -> None:
    """Let go of a step's gradients: it isn't made."""
    for shard in engine.shards:
        shard.parameter.grad = None


def evaluate(engine: Engine, steps: Sequence[Sequence[Batch]]) -> float | None:
    """Mean cross-entropy over the valid tokens of `steps` (global batches), without dropout.

    None if they have no valid token. Collective over all ranks.
    """
    grid = engine.grid
    totals = torch.zeros(2, dtype=torch.float64, device=grid.device)
    speaks = grid.tp.rank == 0 and grid.pp.rank == grid.pp.size - 1
    for batches in steps:
        batches = _tokens_of_rank(batches, grid.cp)
        microbatches = _to_device(batches, engine, step=0, training=False)
        losses = engine.executor.run(engine.evaluation, microbatches)
        if grid.tp.rank == 0:
            totals[0] += losses[0]
        if speaks:
            totals[1] += sum(batch.valid_tokens for batch in batches)
    for stage in engine.executor.stages.values():
        stage.sync.after_evaluation()
    loss, tokens = all_reduce(totals, grid.world).tolist()
    return loss / tokens if tokens else None


class _TokenCount:
    """The step's valid tokens over the ranks that share them out, counted while the first forward
    already runs."""

    def __init__(self, batches: Sequence[Batch], axis: Axis, device: torch.device) -> None:
        count = sum(batch.valid_tokens for batch in batches)
        self._count = torch.tensor(count, dtype=torch.int64, device=device)
        self._work = None
        self.axis = axis
        if axis.size > 1:
            self._work = dist.all_reduce(self._count, group=axis.group, async_op=True)

    def total(self) -> int:
        if self._work is not None:
            self._work.wait()
            self._work = None
        return int(self._count)

    def scale(self, factor: float) -> Tensor:
        """`factor` over the count: the gradient of `factor` times the step's loss by the summed
        loss."""
        # float64, which autograd rounds to the loss's dtype, be it as wide.
        scale = factor / max(1, self.total())
        return torch.tensor(scale, dtype=torch.float64, device=self._count.device)


def _tokens_of_rank(batches: Sequence[Batch], cp: Axis) -> list[Batch]:
    """What `cp`'s rank has of the samples."""
    if cp.size == 1:
        return list(batches)
    runs = zigzag.spans(batches[0].tokens.shape[1], cp.size, cp.rank)
    places = np.concatenate([np.arange(run.start, run.stop) for run in runs])
    return [batch.at(places) for batch in batches]


def _to_device(
    batches: Sequence[Batch], engine: Engine, step: int, *, training: bool
) -> list[Microbatch]:
    model, train = engine.config.model, engine.config.train
    drops = training and (model.dropout or model.attention_dropout)

    def place(array: np.ndarray | None) -> Tensor | None:
        return None if array is None else torch.tensor(array, device=engine.grid.device)

    return [
        Microbatch(
            tokens=place(batch.tokens),
            labels=place(batch.labels),
            streams=DropoutStreams(train.seed, step, place(batch.sample_ids)) if drops else None,
            positions=place(batch.positions),
            documents=place(batch.documents),
        )
        for batch in batches
    ]


def peak_memory_bytes(device: torch.device) -> int:
    """Most that this rank has held so far: of the device's memory, or of the process on a CPU."""
    if device.type == "cpu":
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return torch.accelerator.max_memory_allocated(device)
