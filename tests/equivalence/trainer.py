"""Trains a case on the ranks of the pool, and puts what they hold together to a whole model."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from megagrid.config.schema import DataConfig
from megagrid.config.sharding import Sharding
from megagrid.data import IGNORE, Batch, Loader, Sampler, SyntheticDataset
from megagrid.data.batches import positions_in
from megagrid.grid.grid import Axis, Grid, build_grid
from megagrid.grid.placement import Placement
from megagrid.grid.start import grid_of
from megagrid.nn.layout import ParameterShard
from megagrid.pipeline.program import training_schedule
from megagrid.train.build import Engine, build_engine
from megagrid.train.metrics import Stopwatch
from megagrid.train.step import apply_gradients, compute_gradients
from tests.equivalence.case import Case
from tests.ranks import Ranks

Model = dict[str, np.ndarray]
"""Whole tensors by their global name."""


Surroundings = Callable[[Engine], AbstractContextManager]
"""What is entered around a training on each rank; a function at the top of a module."""


@dataclass(frozen=True)
class Run:
    """What a case computed, the same whichever grid it ran on.

    Attributes:
        losses, grad_norms: of each step.
        initial: weights before the first step.
        gradients: of the first step, before clipping.
        updated: weights after it.
        final: weights after the last.
    """

    losses: tuple[float, ...]
    grad_norms: tuple[float, ...]
    initial: Model
    gradients: Model
    updated: Model
    final: Model


def train(ranks: Ranks, cases: Sequence[Case], under: Surroundings | None = None) -> list[Run]:
    """Train each of `cases`, which fill the same number of ranks.

    Args:
        under: entered around each training on each rank; tests plant faults with it.
    """
    (world_size,) = {case.placement.world_size for case in cases}
    of_ranks = ranks.run(_train_on_rank, cases, under, world_size=world_size)
    return [_whole(parts) for parts in zip(*of_ranks, strict=True)]


def train_draws(ranks: Ranks, cases: Sequence[Case], draws: int) -> list[list[Run]]:
    """Train each of two cases on one process `draws` times, from weights a little off the initial
    ones: for both cases the same, so that two precisions can be told apart by nothing else."""
    of_cases = ranks.run(_train_draws, cases, draws, world_size=len(cases))
    return [[_whole([part]) for part in parts] for parts in of_cases]


# ------------------------------------------------------------------------------------------------
# On the ranks


@dataclass(frozen=True)
class Held:
    """A box of a global tensor, as one rank holds it.

    Attributes:
        is_counted: whether this rank says that it speaks for the box.
    """

    name: str
    shape: tuple[int, ...]
    offsets: tuple[int, ...]
    values: np.ndarray
    is_counted: bool


@dataclass(frozen=True)
class RankRun:
    """A rank's part of a `Run`."""

    losses: list[float]
    grad_norms: list[float]
    initial: list[Held]
    gradients: list[Held]
    updated: list[Held]
    final: list[Held]


def _train_on_rank(cases: Sequence[Case], under: Surroundings | None) -> list[RankRun]:
    grids: dict[Hashable, Grid] = {}
    runs = []
    for case in cases:
        stages = training_schedule(case.config, case.placement).placement
        sharding = Sharding.of(case.config, case.placement)
        key = (case.placement, case.config.model.num_kv_heads, stages[0], stages[-1])
        key += (sharding.split, sharding.after_forward)
        if key not in grids:
            grids[key] = grid_of(case.config, case.placement, dist.get_rank(), "cpu")
        engine = engine_of(case, grids[key])
        with under(engine) if under else nullcontext():
            runs.append(_train_engine(engine, case.variant.ignored))
    return runs


def _train_draws(cases: Sequence[Case], draws: int) -> list[RankRun]:
    """Each rank has a case, and is a grid of its own."""
    case = cases[dist.get_rank()]
    grid = rank_grid(case.placement, case.config.model.num_kv_heads)
    grid = replace(grid, rank=0, world=Axis.single("world"))
    runs = []
    for draw in range(draws):
        engine = engine_of(case, grid)
        generator = torch.Generator().manual_seed(draw)
        for shard in engine.shards:
            off = 2.0**-10 * torch.rand(shard.tensor.shape, generator=generator)
            shard.tensor.copy_((shard.tensor * (1.0 + off)).float())
        runs.append(_train_engine(engine, case.variant.ignored))
    return runs


def rank_grid(placement: Placement, num_kv_heads: int, ends: tuple[int, int] = (0, -1)) -> Grid:
    """The grid of the pool's ranks. Collective."""
    return build_grid(placement, dist.get_rank(), "cpu", num_kv_heads, ends)


def engine_of(case: Case, grid: Grid) -> Engine:
    """The case with its initial weights on this rank. Collective.

    Those are float32 numbers in fp64 runs too, so that the two differ by the rounding of the
    arithmetic alone.
    """
    engine = build_engine(case.config, grid)
    for shard in engine.shards:
        shard.tensor.copy_(shard.tensor.float())
    return engine


def batches_of(engine: Engine, step: int, ignored: Sequence[int] = (5,)) -> list[Batch]:
    """The rank's microbatches of a step, counted from 1.

    Each sample ignores another number of its labels, so that a mean of the means over microbatches
    or ranks is another loss than the mean over tokens.

    Args:
        ignored: samples of each eight that ignore all their labels.
    """
    train, grid = engine.config.train, engine.grid
    data = SyntheticDataset(engine.config.model.vocab_size, train.seq_length, seed=1)
    sampler = Sampler(train.global_batch_size, train.micro_batch_size, grid.dp.size)
    batches = Loader(data, sampler, grid.dp.rank).step(train.global_batch_size * (step - 1))
    for batch in batches:
        for sample, labels in zip(batch.sample_ids, batch.labels, strict=True):
            labels[: None if sample % 8 in ignored else sample * 7 % 11] = IGNORE
    return [_in_documents(batch, engine.config.data) for batch in batches]


def _in_documents(batch: Batch, data: DataConfig) -> Batch:
    """In documents of 5 and 14 tokens, begun elsewhere in each sample, if the recipe has them."""
    places = np.arange(batch.tokens.shape[1])
    begins = np.isin((places * 7 + batch.sample_ids[:, None] * 5) % 19, (0, 3))
    documents = np.cumsum(begins, axis=1)
    return replace(
        batch,
        documents=documents if data.document_mask else None,
        positions=positions_in(documents) if data.resets_positions else None,
    )


def _train_engine(engine: Engine, ignored: Sequence[int]) -> RankRun:
    losses, grad_norms = [], []
    is_scaled = engine.config.train.precision == "fp16"
    scale = engine.config.loss_scale.initial if is_scaled else 1.0
    initial = _held(engine, lambda shard: shard.tensor)
    for step in range(1, engine.config.train.steps + 1):
        batches = batches_of(engine, step, ignored)
        result = compute_gradients(engine, batches, step, Stopwatch(), loss_scale=scale)
        losses.append(result.loss)
        grad_norms.append(result.grad_norm)
        if step == 1:
            gradients = _held(engine, lambda shard: shard.grad / scale)
        lr = engine.config.optimizer.lr
        apply_gradients(engine, result.grad_norm, lr, loss_scale=scale)
        if step == 1:
            updated = _held(engine, lambda shard: shard.tensor)
    final = _held(engine, lambda shard: shard.tensor)
    return RankRun(losses, grad_norms, initial, gradients, updated, final)


def _held(engine: Engine, tensor_of: Callable[[ParameterShard], Tensor]) -> list[Held]:
    """Copies of all boxes of this rank's shards, in `tensor_of` them."""
    return [
        Held(
            piece.name,
            piece.shape,
            piece.box.offsets,
            torch.clone(tensor_of(shard)[rows]).numpy(),
            piece.is_counted_here,
        )
        for shard in engine.shards
        for piece, rows in shard.boxes
    ]


# ------------------------------------------------------------------------------------------------
# On the test's side


def _whole(parts: Sequence[RankRun]) -> Run:
    losses, grad_norms = parts[0].losses, parts[0].grad_norms
    for rank, part in enumerate(parts):
        assert part.losses == losses, f"rank {rank} reports other losses than rank 0"
        assert part.grad_norms == grad_norms, f"rank {rank} reports other norms than rank 0"
    return Run(
        tuple(losses),
        tuple(grad_norms),
        *(
            assemble([held for part in parts for held in getattr(part, name)], name)
            for name in ("initial", "gradients", "updated", "final")
        ),
    )


def assemble(boxes: Sequence[Held], what: str) -> Model:
    """The whole model that `boxes` of all ranks make.

    Raises:
        AssertionError: they leave a gap; or ranks that hold the same element differ in a bit of
            it; or not exactly one of them speaks for it.
    """
    model: Model = {}
    covered: dict[str, np.ndarray] = {}
    speakers: dict[str, np.ndarray] = {}
    for held in boxes:
        if held.name not in model:
            model[held.name] = np.zeros(held.shape, held.values.dtype)
            covered[held.name] = np.zeros(held.shape, bool)
            speakers[held.name] = np.zeros(held.shape, int)
        region = tuple(
            slice(first, first + size)
            for first, size in zip(held.offsets, held.values.shape, strict=True)
        )
        values, known = model[held.name][region], covered[held.name][region]
        differ = known & (values != held.values)
        assert not differ.any(), (
            f"{what}: {differ.sum()} of {differ.size} elements of {held.name} at {held.offsets} "
            f"differ between ranks, by up to {np.abs(values - held.values)[differ].max():.3g}"
        )
        values[...] = held.values
        known[...] = True
        speakers[held.name][region] += held.is_counted
    for name in model:
        assert covered[name].all(), f"{what}: no rank holds {(~covered[name]).sum()} of {name}"
        assert (speakers[name] == 1).all(), f"{what}: {name} is not counted just once"
    return model
