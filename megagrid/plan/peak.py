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

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from megagrid.config.schema import Config
from megagrid.grid.placement import Coordinate, Placement
from megagrid.pipeline.partition import stage_layers
from megagrid.pipeline.program import training_program
from megagrid.pipeline.schedules import Action, Kind, Program
from megagrid.pipeline.schedules.action import SENDS
from megagrid.plan.memory import PersistentBytes, gradient_bytes, persistent_bytes
from megagrid.plan.moments import MOMENTS, Moment
from megagrid.plan.stage_bytes import StageBytes

UPDATE = "optimizer"
"""The part of a step after its actions."""

SENDS_UNDER_WAY = 2
"""Sends that a rank has posted and not seen arrive, times the ranks of the pipeline, on gloo; as
`megagrid.pipeline.executor` has it."""


def peak_bytes(
    config: Config, placement: Placement, coordinate: Coordinate, *, fused_norms: bool = False
) -> Moment:
    """Of the rank at `coordinate`, on its device.

    Args:
        fused_norms: an RMSNorm is one kernel, as on CUDA.
    """
    rank = _Rank(config, placement, coordinate, fused_norms)
    return max(rank.moments(), key=lambda moment: moment.total)


def host_peak_bytes(
    config: Config, placement: Placement, coordinate: Coordinate, *, fused_norms: bool = False
) -> Moment:
    """The same of what `[memory]` has the host keep for it."""
    rank = _Rank(config, placement, coordinate, fused_norms)
    return max(rank.on_host(), key=lambda moment: moment.total)


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
        self.states = persistent_bytes(config, placement, coordinate)
        self._moments: dict[tuple, list[Moment]] = {}

    def moments(self) -> Iterator[Moment]:
        """What the device holds, layer by layer of each action."""
        states = self.states if not self.config.memory.cpu_offload else PersistentBytes(0, ())
        in_flight = dict.fromkeys(self.stages, 0)
        late = dict.fromkeys(self.stages, 0)
        gradients = dict.fromkeys(self.stages, 0)
        messages = _Messages(SENDS_UNDER_WAY * self.placement.pp)
        for step in self.program.steps[self.coordinate.pp]:
            messages.post(step.batch)
            if not step.is_compute:
                continue
            action = step.action
            number, stage = action.stage, self.stages[action.stage]
            messages.take(action, stage)
            is_last = action == self.program.last_gradient(number)
            had = gradients.pop(number) > 0
            in_flight[number] -= action.kind in (Kind.B, Kind.I)
            always = {
                "weights": states.weights,
                "optimizer_states": states.total - states.weights,
                "gradients": sum(gradients.values()),
                "activations": sum(in_flight[n] * s.in_flight for n, s in self.stages.items())
                + sum(late[n] * s.late for n, s in self.stages.items()),
                "gathered_parameters": self.held(),
                "communication": messages.number * stage.hidden,
            }
            for moment in self.of_action(action.kind, number, had, is_last):
                yield moment.beside(action, **always)
            messages.make(action, stage)
            in_flight[number] += action.kind is Kind.F
            late[number] += (action.kind is Kind.I) - (action.kind is Kind.W)
            if action.kind in (Kind.B, Kind.W):
                had = True
            units = (*stage.chain, stage.rest)
            gradients[number] = stage.gradients(*units, are_shards=is_last) if had else 0

    def of_action(self, *key: Any) -> list[Moment]:
        """The moments of such an action alone: those of a step are alike."""
        if key not in self._moments:
            kind, number, had, is_last = key
            self._moments[key] = list(MOMENTS[kind](self.stages[number], had, is_last))
        return self._moments[key]

    def on_host(self) -> Iterator[Moment]:
        """What the host holds: at the end of each forward, and when all gradients are there."""
        memory, always = self.config.memory, Moment()
        if memory.cpu_offload:
            states = self.states
            always = Moment(weights=states.weights, optimizer_states=states.total - states.weights)
            gradients = gradient_bytes(self.config, self.placement, self.coordinate)
            yield replace(always, action=UPDATE, gradients=gradients)
        kept = 0
        for action in self.program.compute_order(self.coordinate.pp):
            change = (action.kind is Kind.F) - (action.kind in (Kind.B, Kind.I))
            kept += change * self.stages[action.stage].all_layers * memory.activation_offload
            yield replace(always, action=str(action), activations=kept)

    def held(self) -> int:
        """What is gathered throughout: everything, or what of it lies split between passes."""
        after = next(iter(self.stages.values())).sharding.after_forward
        if after is True:
            return 0
        everything = sum(s.gathered(*s.chain, s.rest) for s in self.stages.values())
        return everything // after if after else everything


class _Messages:
    """What is on its way between a rank's stages and their neighbours: hidden states and their
    gradients, made and not sent yet, being sent, received ahead.

    Args:
        most: of those that are being sent.
    """

    def __init__(self, most: int) -> None:
        self._most, self._sent, self._waiting = most, 0, 0

    @property
    def number(self) -> int:
        return self._sent + self._waiting

    def post(self, batch: Sequence[Action]) -> None:
        """Send and receive."""
        sends = sum(action.kind in SENDS for action in batch)
        self._sent = min(self._sent + sends, self._most)
        self._waiting += len(batch) - 2 * sends

    def take(self, action: Action, stage: StageBytes) -> None:
        """What `action` computes from: the stage keeps it from now on, if it is a forward."""
        self._waiting -= action.kind is Kind.F and not stage.is_first

    def make(self, action: Action, stage: StageBytes) -> None:
        """What it has computed, in place of the gradient that it came from."""
        if action.kind is Kind.F:
            self._waiting += not stage.is_last
        if action.kind in (Kind.B, Kind.I):
            self._waiting += stage.is_last - stage.is_first
