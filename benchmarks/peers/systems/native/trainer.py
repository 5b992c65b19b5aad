"""One rank of the torch-native system: mesh, stage, schedule, clipping, optimizer."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.parallel import loss_parallel

from benchmarks.peers.spec import Job, Layout
from benchmarks.peers.systems.native.model import LlamaStage
from benchmarks.peers.systems.native.parallel import (
    apply_fsdp,
    apply_tensor_parallel,
    load_weights,
    sync_gradients,
)
from benchmarks.peers.systems.optimizer import adamw

LossFunction = Callable[[Tensor, Tensor], Tensor]
Runner = Callable[[Tensor, Tensor], Tensor]
"""Forward and backward of this rank's samples: inputs and labels [b, s] -> loss on the last stage,
0 on the others."""


def accumulate(stage: LlamaStage, loss_fn: LossFunction, micro_batch_size: int) -> Runner:
    """Microbatch after microbatch on one stage; gradients are reduced on the last backward."""

    def run(inputs: Tensor, labels: Tensor) -> Tensor:
        total = torch.zeros(())
        parts = list(
            zip(inputs.split(micro_batch_size), labels.split(micro_batch_size), strict=True)
        )
        for index, (x, y) in enumerate(parts):
            sync_gradients(stage, last=index == len(parts) - 1)
            loss = loss_fn(stage(x), y)
            loss.backward()
            total += loss.detach()
        return total

    return run


def pipeline(
    stage: LlamaStage, loss_fn: LossFunction, micro_batches: int, mesh: DeviceMesh
) -> Runner:
    """torch's 1F1B over the axis `mesh`."""
    index, stages = mesh.get_local_rank(), mesh.size()
    piece = PipelineStage(stage, index, stages, torch.device("cpu"), group=mesh.get_group())
    # The loss is already divided by the tokens of the global batch.
    schedule = Schedule1F1B(piece, micro_batches, loss_fn=loss_fn, scale_grads=False)

    def run(inputs: Tensor, labels: Tensor) -> Tensor:
        losses: list[Tensor] = []
        target = labels if index == stages - 1 else None
        # Kept outputs would be the logits of every microbatch.
        schedule.step(
            *([inputs] if index == 0 else []), target=target, losses=losses, return_outputs=False
        )
        return torch.stack([loss.detach() for loss in losses]).sum() if losses else torch.zeros(())

    return run


def square_sum(parameters: list[torch.nn.Parameter], world: Layout) -> Tensor:
    """This rank's share of the squared gradient norm: the shares of all ranks add up to it.

    A gradient that n ranks hold alike counts 1/n on each of them.
    """
    total = torch.zeros((), dtype=torch.float64)
    by_copies: dict[int, list[Tensor]] = {}
    for parameter in parameters:
        gradient = parameter.grad
        if isinstance(gradient, DTensor):
            mesh = gradient.device_mesh
            copies = 1
            for size, placement in zip(mesh.shape, gradient.placements, strict=True):
                copies *= size if isinstance(placement, Replicate) else 1
            # A mesh without the tp axis holds what is equal on every tp rank.
            if "tp" not in (mesh.mesh_dim_names or ()):
                copies *= world.tp
            gradient = gradient.to_local()
        else:
            copies = world.tp
        by_copies.setdefault(copies, []).append(gradient)
    for copies, gradients in by_copies.items():
        total += torch.stack(torch._foreach_norm(gradients)).double().square().sum() / copies
    return total


class NativeTrainer:
    """See `worker.Trainer`."""

    def __init__(self, job: Job, stage: LlamaStage, run: Runner, mesh: DeviceMesh | None) -> None:
        self.recipe, self.layout = job.recipe, job.layout
        self.run = run
        self.data_rank = 0 if mesh is None else mesh["dp"].get_local_rank()
        self.parameters = list(stage.parameters())
        self.optimizer = adamw(self.parameters, job.recipe)

    def step(self, tokens: Tensor) -> tuple[float, float]:
        """One update; see `worker.Trainer.step`."""
        mine = tokens.chunk(self.layout.dp)[self.data_rank]
        with loss_parallel() if self.layout.tp > 1 else contextlib.nullcontext():
            loss = self.run(mine[:, :-1], mine[:, 1:])
        # One reduction over the grid for both. tp ranks hold the same loss, dp ranks each a mean.
        loss = loss.double() / (self.layout.tp * self.layout.dp)
        totals = torch.stack((loss, square_sum(self.parameters, self.layout)))
        if self.layout.world_size > 1:
            dist.all_reduce(totals)
        norm = totals[1].sqrt().item()
        if norm > self.recipe.clip_grad:
            scale = self.recipe.clip_grad / (norm + 1e-6)
            torch._foreach_mul_([local(p.grad) for p in self.parameters], scale)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return totals[0].item(), norm


def local(gradient: Tensor | None) -> Tensor:
    """This rank's part, sharing memory."""
    return gradient.to_local() if isinstance(gradient, DTensor) else gradient


def build(job: Job) -> NativeTrainer:
    """Built without memory, made parallel, filled, sharded: no rank ever holds the whole model."""
    layout, recipe = job.layout, job.recipe
    mesh = None
    if layout.world_size > 1:
        shape = (layout.pp, layout.dp, layout.tp)
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=("pp", "dp", "tp"))
    index = 0 if mesh is None else mesh["pp"].get_local_rank()
    with torch.device("meta"):
        stage = LlamaStage(job.shape, recipe.seq_length, index, layout.pp)
    if layout.tp > 1:
        apply_tensor_parallel(stage, mesh["tp"], recipe.sequence_parallel)
    load_weights(stage, Path(job.checkpoint))
    if layout.dp > 1:
        apply_fsdp(stage, mesh["dp"], recipe.sharding == "FULL_SHARD" and layout.pp == 1)

    # fully_shard averages over dp, so a rank divides by the tokens of its own samples.
    tokens = recipe.tokens_per_step // layout.dp

    def loss_fn(logits: Tensor, labels: Tensor) -> Tensor:
        loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum") / tokens
        return loss.full_tensor() if isinstance(loss, DTensor) else loss

    if layout.pp > 1:
        run = pipeline(stage, loss_fn, job.micro_batches, mesh["pp"])
    else:
        run = accumulate(stage, loss_fn, recipe.micro_batch_size)
    return NativeTrainer(job, stage, run, mesh)
