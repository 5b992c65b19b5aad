"""The most memory that a rank's tensors take at once within a step, in closed form. Pure.

A rank goes through its actions, one after the other, and through the layers of each. At any moment
it holds

    weights, optimizer states   always; `megagrid.plan.memory`
    gathered parameters         in the compute dtype: what the stage has outside its layers, and the
                                unit at work; all units of its stages where they are held
    gradients                   in the master dtype: whole ones from a stage's first backward to its
                                last, then this rank's shards; of the unit at work in the compute
                                dtype
    activations                 of each microbatch in flight, what its stage keeps
                                (`megagrid.plan.stage_bytes`); of the one at work, what its layers
                                have kept so far, or haven't let go of yet
    communication               messages between stages under way; what is gathered, and prefetched,
                                into; what the unit before was reduced from
    temporary                   what comes and goes (`megagrid.plan.moments`)

In flight are as many microbatches as the schedule has at that action, so the peak is the largest
sum over the actions and their moments. It is an estimate: kernels' workspaces and an allocator's
fragments come on top, and what is small beside these (masks, sums over a token, RoPE's angles) is
left out.
"""

from __future__ import annotations

from collections.abc import Iterator

from megagrid.config.schema import Config
from megagrid.grid.placement import Coordinate, Placement
from megagrid.pipeline.partition import stage_layers
from megagrid.pipeline.program import training_program
from megagrid.pipeline.schedules import Kind, Program
from megagrid.plan.memory import persistent_bytes
from megagrid.plan.moments import MOMENTS, Moment, kept
from megagrid.plan.stage_bytes import StageBytes

MESSAGES_UNDER_WAY = 2
"""Sends that a rank has posted and not seen arrive, times the ranks of the pipeline, on gloo."""


def peak_bytes(
    config: Config, placement: Placement, coordinate: Coordinate, *, fused_norms: bool = False
) -> Moment:
    """Of the rank at `coordinate`.

    Args:
        fused_norms: an RMSNorm is one kernel, as on CUDA.
    """
    rank = _Rank(config, placement, coordinate, fused_norms)
    return max(rank.moments(), key=lambda moment: moment.total)


class _Rank:
    """The walk of one rank through its actions."""

    def __init__(
        self, config: Config, placement: Placement, coordinate: Coordinate, fused_norms: bool
    ) -> None:
        self.config = config
        self.placement = placement
        self.coordinate = coordinate
        self.program: Program = training_program(config, placement)
        layers = stage_layers(config, placement, self.program.placement)
        self.stages = {
            number: StageBytes(
                config,
                placement,
                coordinate,
                layers[number],
                is_first=number == 0,
                is_last=number == len(layers) - 1,
                fused_norms=fused_norms,
            )
            for number in self.program.stages_of_rank(coordinate.pp)
        }

    def moments(self) -> Iterator[Moment]:
        """What the rank holds, layer by layer of each action."""
        states = persistent_bytes(self.config, self.placement, self.coordinate)
        in_flight = dict.fromkeys(self.stages, 0)
        late = dict.fromkeys(self.stages, 0)
        gradients = dict.fromkeys(self.stages, 0)
        for action in self.program.compute_order(self.coordinate.pp):
            number, stage = action.stage, self.stages[action.stage]
            is_last = action == self.program.last_gradient(number)
            had = gradients.pop(number) > 0
            in_flight[number] -= action.kind in (Kind.B, Kind.I)
            always = {
                "weights": states.weights,
                "optimizer_states": states.total - states.weights,
                "gradients": sum(gradients.values()),
                "activations": sum(in_flight[n] * kept(s) for n, s in self.stages.items())
                + sum(late[n] * s.late for n, s in self.stages.items()),
                "gathered_parameters": self.held(),
                "communication": self.messages(stage),
            }
            for moment in MOMENTS[action.kind](stage, had, is_last):
                yield moment.beside(action, **always)
            in_flight[number] += action.kind is Kind.F
            late[number] += (action.kind is Kind.I) - (action.kind is Kind.W)
            if action.kind in (Kind.B, Kind.W):
                had = True
            units = (*stage.chain, stage.rest)
            gradients[number] = stage.gradients(*units, are_shards=is_last) if had else 0

    def held(self) -> int:
        """What is gathered throughout: everything, or what of it lies split between passes."""
        after = next(iter(self.stages.values())).sharding.after_forward
        if after is True:
            return 0
        everything = sum(s.gathered(*s.chain, s.rest) for s in self.stages.values())
        return everything // after if after else everything

    def messages(self, stage: StageBytes) -> int:
        """Between stages, under way: one that is received, and those that are sent."""
        pp, most = self.placement.pp, self.program.num_microbatches
        return stage.hidden * (min(MESSAGES_UNDER_WAY * pp, most) + 1) if pp > 1 else 0
