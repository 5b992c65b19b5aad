"""From a config and a grid to everything that a step needs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch

from megagrid.checkpoint.layout import Entry, entries
from megagrid.config.schema import Config, ModelConfig
from megagrid.data_parallel.sharding import (
    COMPUTE_DTYPES,
    MASTER_DTYPES,
    GradientSync,
    Spread,
    by_unit,
    shard_stage,
)
from megagrid.grid.grid import Axis, Grid
from megagrid.grid.placement import Placement
from megagrid.grid.start import grid_of
from megagrid.model.compiled import compile_blocks, put_off_by_slots
from megagrid.model.decoder import DecoderStage, ModelAxes, StageShare
from megagrid.model.width import width_scaling
from megagrid.model.zoo import build_stage
from megagrid.nn.float8 import float8_multiply
from megagrid.nn.init import initialise
from megagrid.nn.layout import ParameterShard, parameter_shards
from megagrid.nn.offload import Lane
from megagrid.optim.optimizer import Optimizer, Peers, make_optimizer
from megagrid.pipeline.executor import Executor
from megagrid.pipeline.partition import stage_layers
from megagrid.pipeline.program import evaluation_program, training_program
from megagrid.pipeline.schedules import Program
from megagrid.pipeline.stage import Stage
from megagrid.plan.matrices import Holders


@dataclass(frozen=True)
class Engine:
    """One rank's part of a run: the model, its optimizer and the programs that drive it.

    Attributes:
        shards: what this rank holds of the parameters, over all its stages. What it updates of them
            is the optimizer's: less, where only its states are split.
        training, evaluation: what this rank runs in a step, and to evaluate a global batch.
    """

    config: Config
    grid: Grid
    shards: list[ParameterShard]
    optimizer: Optimizer
    executor: Executor
    training: Program
    evaluation: Program


def build_engine(config: Config, grid: Grid, fakes: AbstractContextManager | None = None) -> Engine:
    """Build this rank's stages with their initial weights, and verify the programs they will run.

    Collective over all ranks.

    Args:
        fakes: a mode in which new tensors have no memory; weights are left unfilled then.
    """
    training = training_program(config, grid.placement)
    is_split = training.splits_backward(grid.pp.rank)
    modules = _modules(config, grid, training)
    stages = {
        number: _build(config, grid, module, fakes, is_split=is_split)
        for number, module in modules.items()
    }
    with fakes or nullcontext():
        optimizer = make_optimizer(
            [shard for stage in stages.values() for shard in stage.updated],
            config.optimizer,
            _peers(grid),
            width_scaling(config.model).hidden_lr,
        )
    return Engine(
        config=config,
        grid=grid,
        shards=[shard for stage in stages.values() for shard in stage.shards],
        optimizer=optimizer,
        executor=Executor(stages, grid, COMPUTE_DTYPES[config.train.precision]),
        training=training,
        evaluation=evaluation_program(training),
    )


def outline(config: Config, placement: Placement, *, with_optimizer: bool) -> Iterator[list[Entry]]:
    """What each rank of a run would save, in rank order, told by one process that is none of them.

    Tensors have shapes and places, and no memory: they are on the meta device.
    """
    training = training_program(config, placement)
    for rank in range(placement.world_size):
        grid = grid_of(config, placement, rank, "meta", has_groups=False)
        spread = Spread.of(config, grid)
        shards, updated = (
            [
                shard
                for module in _modules(config, grid, training).values()
                for shard in parameter_shards(module, sharing, cut=True)
            ]
            for sharing in (spread.of_weights, spread.of_states)
        )
        optimizer = make_optimizer(updated, config.optimizer, _peers(grid))
        yield entries(shards, optimizer if with_optimizer else None)


def _modules(config: Config, grid: Grid, training: Program) -> dict[int, DecoderStage]:
    """This rank's stages by their numbers, whole over dp, their parameters on no device."""
    layers = stage_layers(config, grid.placement, training.placement)
    modules = {}
    for number in training.stages_of_rank(grid.pp.rank):
        axes = ModelAxes(
            tp=grid.tp,
            kv=grid.kv,
            embedding=_embedding_axis(grid, training.placement, number),
            cp=grid.cp,
            sequence_parallel=config.parallel.sequence_parallel and grid.tp.size > 1,
            context_parallel=config.parallel.context_parallel,
        )
        with torch.device("meta"):
            module = build_stage(config.model, _share(layers, number), axes)
        modules[number] = module.to(MASTER_DTYPES[config.train.precision])
    return modules


def _share(layers: list[range], stage: int) -> StageShare:
    return StageShare(layers[stage], is_first=stage == 0, is_last=stage == len(layers) - 1)


def _peers(grid: Grid) -> Peers:
    """The ranks with boxes of this rank's parameters."""
    return Peers(grid.stage, Holders(dp=grid.dp_cp.size, tp=grid.tp.size), grid.device)


def _embedding_axis(grid: Grid, placement: Sequence[int], stage: int) -> Axis:
    """The two holders of a tied embedding, as `stage` sees them.

    Where both ends of the pipeline are stages of one rank, the two are that rank twice: nothing is
    sent, but each copy still has a number, and the first one speaks for both.
    """
    if placement[0] != placement[-1]:
        holders = grid.pp.ranks[placement[0]], grid.pp.ranks[placement[-1]]
        is_end = stage in (0, len(placement) - 1)
        assert not is_end or grid.embedding.ranks == holders, "the grid is of another schedule"
        return grid.embedding
    return Axis("embedding", (grid.rank, grid.rank), rank=0 if stage == 0 else 1)


def _build(
    config: Config,
    grid: Grid,
    module: DecoderStage,
    fakes: AbstractContextManager | None,
    *,
    is_split: bool,
) -> Stage:
    """A stage of `module`, whose parameters are on no device: they are sharded, and only then given
    memory. No rank ever holds more of them than its own.

    Args:
        is_split: the schedule has backwards whose weight gradients come later.
    """
    spread = Spread.of(config, grid)
    module.z_loss, module.loss_chunk = config.train.z_loss, config.train.loss_chunk_tokens
    module.lane = Lane(grid.device) if config.memory.activation_offload else None
    module.recompute(config.memory.recompute, config.memory.recompute_interval)
    if config.train.compile:
        compile_blocks(module, config.train.compile_backend)
    shard_stage(module, config, spread, grid.device)
    with fakes or nullcontext():
        module.to_empty(device="cpu" if config.memory.cpu_offload else grid.device)
    shards = updated = parameter_shards(module, spread.of_weights)
    if fakes is None:
        initialise(shards, config.train.seed)
    if config.train.float8 != "off":
        module.multiply_by(float8_multiply(config.train.float8, grid.device))
    late = module.put_off_weight_gradients() if is_split else None
    if late is not None and config.train.compile:
        put_off_by_slots(module.layers.values(), late)
    gathered: list[list[ParameterShard]] = []
    if spread.splits_states_alone:
        updated = parameter_shards(module, spread.of_states, cut=True)
        gathered = by_unit(module, config, updated)
    sync = GradientSync(
        module,
        hold=spread.sharding.hold,
        updated=gathered,
        axis=spread.states,
        device=grid.device,
    )
    return Stage(module, shards, updated, sync, late)


def build_whole_model(model: ModelConfig, dtype: torch.dtype, device: torch.device) -> DecoderStage:
    """The model on one device, outside any grid, its parameters unfilled."""
    axes = ModelAxes(*(Axis.single(name) for name in ("tp", "kv", "embedding", "cp")))
    share = StageShare(range(model.num_layers), is_first=True, is_last=True)
    with torch.device("meta"):
        module = build_stage(model, share, axes)
    return module.to(dtype).to_empty(device=device)
