"""What a rank keeps from step to step, in closed form: weights and optimizer states. Pure.

Of a parameter of R rows of w elements, as its tp rank has it, rank i of the d that split it holds

    rows(d, i) = min((i + 1) c, R) - min(i c, R),   c = ceil(R / d)

and keeps, e bytes an element (4; 8 in fp64, see `megagrid.plan.parameters`), of a state s (2 if
`optimizer.state_dtype` is bf16, else e):

    kind          bytes
    weights       e c w            fully_shard stores c rows on every rank, so that all gather alike
    a state       s rows(d, i) w   of those that the optimizer keeps of the parameter

d is as `megagrid.config.sharding` has it: all ranks with the same parameters, those of a node
(HYBRID_SHARD), or 1 (NO_SHARD, and modules kept out of sharding). ZERO1 has d = 1 for weights and
all ranks for the states. If d divides R, that is (e + 2 s) R w / d with AdamW's two moments.
Gradients and gathered parameters come and go within a step, and so do the moments of one shard at a
time in e bytes, where s is less. With `memory.cpu_offload` all of it is the host's
memory. Saving behind the training keeps copies of what the rank writes, at most as much again, in
host memory: on a CPU beside the originals.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

from megagrid.config.schema import Config
from megagrid.config.sharding import Sharding
from megagrid.grid.placement import Coordinate, Placement
from megagrid.pipeline.partition import stage_layers
from megagrid.pipeline.program import training_schedule
from megagrid.plan.parameters import MASTER_BYTES, ModelShare, state_bytes
from megagrid.plan.units import PlannedUnit, stage_units


@dataclass(frozen=True)
class PersistentBytes:
    """What a rank keeps from step to step, by kind.

    Attributes:
        weights: the master weights.
        states: the optimizer's, by name and in the order of names.
    """

    weights: int
    states: tuple[tuple[str, int], ...]

    @property
    def total(self) -> int:
        return self.weights + sum(size for _, size in self.states)


def persistent_bytes(
    config: Config, placement: Placement, coordinate: Coordinate
) -> PersistentBytes:
    """Those of the rank at `coordinate`."""
    sharding = Sharding.of(config, placement)
    index = sharding.index(placement, coordinate)
    element, of_state = MASTER_BYTES[config.train.precision], state_bytes(config)
    stored = 0
    kept: Counter[str] = Counter()
    for unit in local_units(config, placement, coordinate):
        splits = (unit.split, sharding.split, sharding.states_split), (unit.whole, 1, 1)
        for parameters, split, states_split in splits:
            for parameter in parameters:
                stored += element * (parameter.gathered(split) // split)
                for state in parameter.states(config.optimizer.name):
                    kept[state] += of_state * parameter.held(states_split, index % states_split)
    return PersistentBytes(stored, tuple(sorted(kept.items())))


def gradient_bytes(config: Config, placement: Placement, coordinate: Coordinate) -> int:
    """What the gradients of the rank at `coordinate` take at the end of a step's backwards."""
    sharding = Sharding.of(config, placement)
    index = sharding.index(placement, coordinate) % sharding.split
    elements = sum(
        sum(parameter.held(sharding.split, index) for parameter in unit.split)
        + sum(parameter.held(1, 0) for parameter in unit.whole)
        for unit in local_units(config, placement, coordinate)
    )
    return elements * MASTER_BYTES[config.train.precision]


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
