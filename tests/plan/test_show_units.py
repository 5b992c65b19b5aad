"""What --show-units prints is what fully_shard is given, and what a user can read."""

from __future__ import annotations

import math
from collections import Counter

import pytest
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule

from megagrid.cli import main
from megagrid.config.schema import Config
from megagrid.data_parallel.sharding import parameter_groups
from megagrid.grid.placement import Placement
from megagrid.grid.start import grid_of
from megagrid.model.decoder import DecoderStage
from megagrid.plan.show_units import UnitRow, unit_rows
from megagrid.plan.units import REST
from megagrid.train.build import build_engine
from tests.config import recipe
from tests.equivalence.case import GPT, LLAMA, TIED, Case, Keys, schedule, strategy

HYBRID: Keys = (strategy("HYBRID_SHARD"), ("parallel.shard_size", 2))
KEEP_NORMS = ("parallel.unsharded_modules", ["norm", "layers.*_norm", "layers.1.attention"])
APART: Keys = (("parallel.wrap_embedding", True), ("parallel.wrap_head", True))
TWO_BLOCKS = ("parallel.blocks_per_unit", 2)


def units_on_rank(config: Config, placement: Placement) -> list[UnitRow]:
    """What fully_shard was given on the first rank of each pipeline rank."""
    grid = grid_of(config, placement, dist.get_rank(), "cpu")
    engine = build_engine(config, grid)
    if grid.dp.rank or grid.tp.rank:
        return []
    width = {"fp32": 4, "bf16": 2, "fp64": 8}[config.train.precision]
    return [
        UnitRow(
            grid.pp.rank,
            number,
            name_of(group.modules, stage.module),
            group.mesh_info.shard_mesh_size == 1 and config.parallel.unsharded_modules != [],
            sum(math.prod(p._orig_size) for p in group.fsdp_params),
            sum(p._sharded_param_data.untyped_storage().nbytes() for p in group.fsdp_params),
            sum(
                p._sharded_param_data.numel() * group.mesh_info.shard_mesh_size * width
                for p in group.fsdp_params
            ),
            tuple(dist.get_process_group_ranks(group.mesh_info.shard_process_group)),
            replicas_of(group.mesh_info, grid.rank),
        )
        for number, stage in engine.executor.stages.items()
        for group in parameter_groups(stage.module)
    ]


def name_of(modules: tuple[FSDPModule, ...], stage: DecoderStage) -> str:
    paths = {module: path for path, module in stage.named_modules()}
    first, last = paths[modules[0]], paths[modules[-1]]
    return REST if not first else first + (f"-{last.split('.')[1]}" if last != first else "")


def replicas_of(mesh_info, rank: int) -> tuple[int, ...]:
    group = getattr(mesh_info, "replicate_process_group", None)
    return tuple(dist.get_process_group_ranks(group)) if group else (rank,)


CASES = [
    Case(LLAMA, Placement(dp=2), 1),
    Case(GPT.having(TIED), Placement(dp=3), 1, (TWO_BLOCKS, *APART)),
    Case(LLAMA, Placement(dp=4), 1, (*HYBRID, KEEP_NORMS)),
    Case(LLAMA, Placement(tp=2, dp=2), 1, (KEEP_NORMS, TWO_BLOCKS, ("train.precision", "bf16"))),
    Case(LLAMA.having(TIED), Placement(pp=2, dp=2), 1, (*APART, strategy("ZERO1"))),
    Case(
        GPT,
        Placement(pp=2, dp=2),
        1,
        (*APART, schedule("ZBV"), ("parallel.virtual_pipeline_size", 2), KEEP_NORMS),
    ),
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_shown_units_are_those_of_the_real_modules(ranks, case):
    config, placement = case.config, case.placement
    if placement.dp == 3:
        batch = {"global_batch_size": 6}
        config = config.model_copy(update={"train": config.train.model_copy(update=batch)})
    found = ranks.run(units_on_rank, config, placement, world_size=placement.world_size)
    assert Counter(unit for units in found for unit in units) == Counter(
        unit_rows(config, placement)
    )


def test_units_are_shown_without_starting_ranks(tmp_path, capsys):
    path = recipe.write(tmp_path)
    overrides = [
        "parallel.pipeline_parallel_size=2",
        "parallel.data_parallel_size=4",
        "parallel.sharding_strategy=HYBRID_SHARD",
        "parallel.shard_size=2",
        "parallel.wrap_embedding=true",
        "parallel.layers_per_stage=[3,1]",
        "parallel.blocks_per_unit=2",
        'parallel.unsharded_modules=["norm"]',
        "model.make_vocab_size_divisible_by=1",
    ]
    assert main(["train", str(path), "--show-units", *overrides]) == 0
    shown = capsys.readouterr().out.splitlines()
    assert shown[0].startswith("HYBRID_SHARD over dp 4")
    assert [line.split()[:3] for line in shown[2:]] == [
        ["0", "0", "embedding"],
        ["0", "0", "layers.0-1"],
        ["0", "0", "layers.2"],
        ["1", "1", "layers.3"],
        ["1", "1", "rest"],
        ["1", "1", "rest,"],
    ]
    # 61 rows of 32 over two ranks are 31 each; 4 bytes a number.
    assert shown[2].split()[3:] == ["1,952", "3.875", "KiB", "7.75", "KiB", "0,1", "0,2"]
    assert shown[7].split()[3:] == ["whole", "32", "128", "B", "128", "B", "-", "4,5,6,7"]
