"""Times a program: makespan, bubbles, memory. Exact where the costs are integers or Fractions."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from megagrid.pipeline.schedules.action import Action, Kind, ScheduleError
from megagrid.pipeline.schedules.rendezvous import Rendezvous
from megagrid.pipeline.schedules.schedule import Program
from megagrid.pipeline.schedules.timing import Costs, Time, Timeline, ratio


@dataclass(frozen=True)
class Occupancy:
    """When each compute action ran, simulated or measured, and how busy that kept the ranks.

    Times are in whichever unit the timeline has.

    Attributes:
        timeline: per rank, its compute actions in order; none is without.
    """

    timeline: Timeline

    @cached_property
    def makespan(self) -> Time:
        """From the first action's start to the last one's end, on any rank."""
        return max(row[-1].end for row in self.timeline) - min(
            row[0].start for row in self.timeline
        )

    @cached_property
    def busy(self) -> tuple[Time, ...]:
        """Per rank, time spent on compute actions."""
        return tuple(sum(span.end - span.start for span in row) for row in self.timeline)

    @property
    def bubble_rates(self) -> tuple[Time, ...]:
        """Per rank, the part of the makespan in which it is idle."""
        return tuple(1 - ratio(busy, self.makespan) for busy in self.busy)

    @property
    def bubble_rate(self) -> Time:
        """The idle part of all ranks' time: (p-1)/(m+p-1) for uniform 1F1B."""
        return 1 - ratio(sum(self.busy), len(self.busy) * self.makespan)

    @property
    def step_time(self) -> Time:
        """The longest that any rank takes from its first action's start to its last one's end.

        Ranks start one after another. Where they also end so, and the optimizer step needs no
        meeting of all, steps follow each other at this distance: the "cost" of arXiv 2401.10241.
        """
        return max(row[-1].end - row[0].start for row in self.timeline)

    @property
    def step_bubble_rate(self) -> Time:
        """The bubble rate of arXiv 2401.10241: (step_time - busy) / step_time of the busiest."""
        return 1 - ratio(max(self.busy), self.step_time)


@dataclass(frozen=True)
class Simulation(Occupancy):
    """What a step costs. Times are in the unit of the costs that were simulated.

    Attributes:
        peak_memory: per rank, the most activation memory held at any time.
    """

    peak_memory: tuple[Time, ...]


def simulate(program: Program, costs: Costs | None = None) -> Simulation:
    """Times a program whose ranks' batches meet as NCCL's do (see `rendezvous`).

    Args:
        program: lowered, and best verified.
        costs: per stage; None for 1 each of F, I, W and free messages.

    Raises:
        ScheduleError: the program deadlocks; `verify` draws where.
    """
    costs = costs or Costs.of(program.num_stages)
    outcome = Rendezvous(program, costs).outcome()
    if outcome.stuck:
        rank, step = min(outcome.stuck.items())
        raise ScheduleError(
            f"{program.name}: rank {rank} waits for ever in {program.steps[rank][step]}; verify it",
            rule="no deadlock",
        )
    return Simulation(
        timeline=outcome.timeline,
        peak_memory=tuple(
            _peak_memory(program.compute_order(rank), costs, program.forward_only)
            for rank in range(program.num_ranks)
        ),
    )


def _peak_memory(order: tuple[Action, ...], costs: Costs, forward_only: bool) -> Time:
    """The most that one rank holds; memory is taken when an F starts, and freed at an end."""
    held = peak = 0
    for action in order:
        activation = costs.activation[action.stage]
        kept_for_weight = costs.weight_activation[action.stage]
        if action.kind is Kind.F:
            held += activation
            peak = max(peak, held)
            held -= activation if forward_only else 0
        elif action.kind is Kind.B:
            held -= activation
        elif action.kind is Kind.I:
            held -= activation - kept_for_weight
        else:
            held -= kept_for_weight
    return peak
