"""What a rank keeps from step to step, in closed form: its weights and AdamW's moments. Pure.

Of a parameter of R rows of w elements, as its tp rank has it, rank i of the d that split it holds

    rows(d, i) = min((i + 1) c, R) - min(i c, R),   c = ceil(R / d)

and keeps, e bytes an element (4; 8 in fp64, see `megagrid.plan.parameters`):

    kind          bytes
    weights       e c w            fully_shard stores c rows on every rank, so that all gather alike
    exp_avg       e rows(d, i) w
    exp_avg_sq    e rows(d, i) w

d is as `megagrid.config.sharding` has it: all ranks with the same parameters, those of a node
(HYBRID_SHARD), or 1 (NO_SHARD, and modules kept out of sharding). ZERO1 has d = 1 for weights and
all ranks for the moments. If d divides R, that is 3 e R w / d. Gradients and gathered parameters
come and go within a step. With `memory.cpu_offload` all of it is the host's memory. Saving behind
the training keeps copies of what the rank writes, at most as much again, in host memory: on a CPU
beside the originals.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from megagrid.config.schema import Config
from megagrid.config.sharding import Sharding
from megagrid.grid.placement import Coordinate, Placement
from megagrid.pipeline.partition import stage_layers
from megagrid.pipeline.program import training_schedule
from megagrid.plan.parameters import MASTER_BYTES, ModelShare
from megagrid.plan.units import PlannedUnit, stage_units


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
    sharding = Sharding.of(config, placement)
    index = sharding.index(placement, coordinate)
    stored = held = 0
    for unit in local_units(config, placement, coordinate):
        splits = (unit.split, sharding.split, sharding.states_split), (unit.whole, 1, 1)
        for parameters, split, states in splits:
            stored += sum(parameter.gathered(split) // split for parameter in parameters)
            held += sum(parameter.held(states, index % states) for parameter in parameters)
    element = MASTER_BYTES[config.train.precision]
    return PersistentBytes(stored * element, held * element, held * element)


def local_units(
    config: Config, placement: Placement, coordinate: Coordinate
) -> Iterator[PlannedUnit]:
    """The units of the rank's stages, before fully_shard cuts them."""
    share = ModelShare(config.model, placement.tp, coordinate.tp, config.parallel.sequence_parallel)
    schedule = training_schedule(config, placement)
    layers = stage_layers(config, placement, schedule.placement)
    last = len(layers) - 1
    for stage in schedule.stages_of_rank(coordinate.pp):
        yield from stage_units(
            config, share, layers[stage], is_first=stage == 0, is_last=stage == last
        )
