"""Which parameters are gathered together, from which ranks, and what they take: a table. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from megagrid.config.schema import Config
from megagrid.config.sharding import Sharding
from megagrid.grid.placement import Coordinate, Placement
from megagrid.pipeline.partition import stage_layers
from megagrid.pipeline.program import training_schedule
from megagrid.plan.comm import COMPUTE_BYTES
from megagrid.plan.parameters import MASTER_BYTES, ModelShare
from megagrid.plan.units import stage_units
from megagrid.terminal import size_text

NUMBERS = (0, 1, 3, 4, 5)
"""Columns that are aligned at the right."""


@dataclass(frozen=True)
class UnitRow:
    """A unit, or what of its modules is kept out of sharding.

    Attributes:
        pp_rank, stage: where it is.
        name: see `PlannedUnit`.
        is_whole: it is kept out.
        parameters: of the tp rank, padding of the vocabulary included.
        stored: bytes of a rank's share, in the dtype of the optimizer.
        gathered: bytes while it computes, in the dtype of the computation.
        split: the first ranks that split it.
        replicas: the ranks that hold what the first one holds.
    """

    pp_rank: int
    stage: int
    name: str
    is_whole: bool
    parameters: int
    stored: int
    gathered: int
    split: tuple[int, ...]
    replicas: tuple[int, ...]


def unit_rows(config: Config, placement: Placement) -> Iterator[UnitRow]:
    """All units as the first rank of each pipeline rank has them."""
    schedule = training_schedule(config, placement)
    layers = stage_layers(config, placement, schedule.placement)
    share = ModelShare(config.model, placement.tp, 0, config.parallel.sequence_parallel)
    sharding, precision = Sharding.of(config, placement), config.train.precision
    groups = placement.groups("dp", "cp")
    for pp_rank in range(placement.pp):
        first = placement.rank(Coordinate(pp_rank, 0, 0, 0))
        (everyone,) = (group for group in groups if first in group)
        for stage in schedule.stages_of_rank(pp_rank):
            is_last = stage == len(layers) - 1
            for unit in stage_units(
                config, share, layers[stage], is_first=stage == 0, is_last=is_last
            ):
                for parameters, split in ((unit.split, sharding.split), (unit.whole, 1)):
                    if not parameters:
                        continue
                    padded = sum(parameter.gathered(split) for parameter in parameters)
                    yield UnitRow(
                        pp_rank,
                        stage,
                        unit.name,
                        parameters is unit.whole,
                        sum(parameter.gathered(1) for parameter in parameters),
                        padded // split * MASTER_BYTES[precision],
                        padded * COMPUTE_BYTES[precision],
                        everyone[:split],
                        everyone[::split],
                    )


def print_units(config: Config, placement: Placement) -> None:
    """Write the units of all pipeline ranks."""
    parallel = config.parallel
    name = parallel.sharding_strategy
    print(f"{name} over dp {placement.dp} x cp {placement.cp}, of each pipeline rank's first rank")
    if name == "HYBRID_SHARD" and parallel.shard_size is None:
        print("parallel.shard_size isn't stated: as if all ranks were on one node")
    lines = [("pp", "stage", "unit", "parameters", "stored", "gathered", "split over", "same on")]
    lines += [
        (
            str(row.pp_rank),
            str(row.stage),
            f"{row.name}, whole" if row.is_whole else row.name,
            f"{row.parameters:,}",
            size_text(row.stored, is_binary=True),
            size_text(row.gathered, is_binary=True),
            _ranks(row.split),
            _ranks(row.replicas),
        )
        for row in unit_rows(config, placement)
    ]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    for line in lines:
        cells = (
            cell.rjust(width) if index in NUMBERS else cell.ljust(width)
            for index, (cell, width) in enumerate(zip(line, widths, strict=True))
        )
        print("  ".join(cells).rstrip())


def _ranks(ranks: Sequence[int]) -> str:
    """Ranks of a group, "-" for one alone."""
    if len(ranks) == 1:
        return "-"
    if len(ranks) > 4:
        return f"{ranks[0]},{ranks[1]},..,{ranks[-1]}"
    return ",".join(map(str, ranks))
