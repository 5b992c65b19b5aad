"""What a rank keeps from step to step, in closed form: its weights and AdamW's moments. Pure.

Of a parameter of R rows of w elements, as its tp rank has it, dp rank i of d holds

    rows(i) = min((i + 1) c, R) - min(i c, R),   c = ceil(R / d)          NO_SHARD: all R, c = R

and keeps, e bytes an element (4; 8 in fp64, see `megagrid.plan.parameters`):

    kind          bytes
    weights       e c w          fully_shard stores c rows on every rank, so that all gather alike
    exp_avg       e rows(i) w
    exp_avg_sq    e rows(i) w

If d divides R, that is 3 e R w / d. Gradients and gathered parameters come and go within a step.
Saving behind the training keeps copies of what the rank writes, at most as much again, in host
memory: on a CPU beside the originals.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from megagrid.config.schema import Config
from megagrid.grid.placement import Coordinate, Placement
from megagrid.pipeline.partition import stage_layers
from megagrid.pipeline.program import training_schedule
from megagrid.plan.parameters import MASTER_BYTES, LocalParameter, ModelShare


@dataclass(frozen=True)
class PersistentBytes:
    """What a rank keeps from step to step, by kind.

    Attributes:
        weights: the master weights.
        exp_avg, exp_avg_sq: AdamW's moments.
    """

    weights: int
    exp_avg: int
    exp_avg_sq: int

    @property
    def total(self) -> int:
        return self.weights + self.exp_avg + self.exp_avg_sq


def persistent_bytes(
    config: Config, placement: Placement, coordinate: Coordinate
) -> PersistentBytes:
    """Those of the rank at `coordinate`."""
    dp, dp_rank = placement.dp, coordinate.dp
    if config.parallel.sharding_strategy == "NO_SHARD":
        dp, dp_rank = 1, 0
    stored = held = 0
    for parameter in local_parameters(config, placement, coordinate):
        stored += parameter.gathered(dp) // dp
        held += parameter.held(dp, dp_rank)
    element = MASTER_BYTES[config.train.precision]
    return PersistentBytes(stored * element, held * element, held * element)


def local_parameters(
    config: Config, placement: Placement, coordinate: Coordinate
) -> Iterator[LocalParameter]:
    """The parameters of the rank's stages, before fully_shard cuts them over dp."""
    share = ModelShare(config.model, placement.tp, coordinate.tp, config.parallel.sequence_parallel)
    schedule = training_schedule(config, placement)
    layers = stage_layers(config, placement, schedule.placement)
    for stage in schedule.stages_of_rank(coordinate.pp):
        for _ in layers[stage]:
            yield from share.layer()
        yield from share.ends(is_first=stage == 0, is_last=stage == len(layers) - 1)
