"""A schedule (who computes what, in which order) and a program (the same with communication)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from megagrid.pipeline.schedules.action import COMPUTE, GRADIENTS, Action, Kind, ScheduleError, Step


def loop_placement(num_ranks: int, chunks: int = 1) -> tuple[int, ...]:
    """Stage -> rank where stages go round the ranks: 2 chunks on 3 ranks give 0 1 2 0 1 2."""
    return tuple(range(num_ranks)) * chunks


def v_placement(num_ranks: int) -> tuple[int, ...]:
    """Stage -> rank where stages go down the ranks and come back: 3 ranks give 0 1 2 2 1 0."""
    return (*range(num_ranks), *reversed(range(num_ranks)))


@dataclass(frozen=True)
class Pipeline:
    """What a schedule and its program have in common.

    Attributes:
        name: of the schedule, for people; nothing depends on it.
        num_ranks: ranks along the pipeline.
        num_microbatches: microbatches of a step.
        placement: rank of each stage.
        max_in_flight: per rank, how many activations it promises to hold at most. An activation is
            that of one stage for one microbatch, held from its F until its B or W has ended.
        forward_only: an evaluation: no gradients, nothing held.
    """

    name: str
    num_ranks: int
    num_microbatches: int
    placement: tuple[int, ...]
    max_in_flight: tuple[int, ...]
    forward_only: bool = field(default=False, kw_only=True)

    def __post_init__(self) -> None:
        if self.num_microbatches < 1:
            raise ScheduleError(f"microbatches={self.num_microbatches} must be 1 or more")
        if sorted(set(self.placement)) != list(range(self.num_ranks)):
            raise ScheduleError(
                f"placement {_row(self.placement)} must name each of the {self.num_ranks} ranks"
                f" 0 … {self.num_ranks - 1} at least once, and no other"
            )
        if len(self.max_in_flight) != self.num_ranks:
            raise ScheduleError(
                f"max_in_flight {_row(self.max_in_flight)} must state one number for each of the"
                f" {self.num_ranks} ranks"
            )

    @property
    def num_stages(self) -> int:
        return len(self.placement)

    def rank_of_stage(self, stage: int) -> int:
        return self.placement[stage]

    def stages_of_rank(self, rank: int) -> tuple[int, ...]:
        """The stages of a rank in order; a stage's index in it is its chunk."""
        return tuple(stage for stage, owner in enumerate(self.placement) if owner == rank)

    def hands_over_locally(self, stage: int) -> bool:
        """Whether `stage` and `stage` + 1 share a rank, so that no message passes between them."""
        return self.placement[stage] == self.placement[stage + 1]


@dataclass(frozen=True)
class Schedule(Pipeline):
    """Which rank computes what, in which order.

    Attributes:
        orders: per rank, its compute actions in order.
    """

    orders: tuple[tuple[Action, ...], ...]


@dataclass(frozen=True)
class Program(Pipeline):
    """What each rank does, communication included.

    Attributes:
        steps: per rank, its steps in order.
        tied: whether the embedding is shared by the first and the last stage.
    """

    steps: tuple[tuple[Step, ...], ...]
    tied: bool = field(default=False, kw_only=True)

    def other_end(self, action: Action) -> Action:
        """What a SEND, RECV or REDUCE_TIED meets; itself where both tied ends are on one rank."""
        if action.kind is not Kind.REDUCE_TIED:
            return action.other_end
        ends = self.tied_ends()
        return action._replace(stage=ends[-1] if action.stage == ends[0] else ends[0])

    def peer(self, action: Action) -> int:
        """The rank at the other end of a SEND, RECV or REDUCE_TIED."""
        return self.placement[self.other_end(action).stage]

    def tied_ends(self) -> tuple[int, ...]:
        """The stages of which a REDUCE_TIED is due: none, both ends, or the first for both.

        A pipeline of one stage has one parameter for both ends, and nothing to sum.
        """
        first, last = 0, self.num_stages - 1
        if not self.tied or self.forward_only or first == last:
            return ()
        return (first,) if self.placement[first] == self.placement[last] else (first, last)

    def compute_order(self, rank: int) -> tuple[Action, ...]:
        """The compute actions of a rank, in order."""
        return tuple(step.action for step in self.steps[rank] if step.is_compute)

    def splits_backward(self, rank: int) -> bool:
        """Whether the rank computes weight gradients apart from the inputs'."""
        return any(action.kind is Kind.W for action in self.compute_order(rank))

    def last_gradient(self, stage: int) -> Action | None:
        """The B or W after which a stage's weight gradients are complete; None in an evaluation.

        It is what an executor must know before that action: under a sharded data-parallel axis the
        gradient synchronisation is armed before the last backward, not started after it.
        """
        last = None
        for step in self.steps[self.placement[stage]]:
            action = step.actions[0]
            if action.stage == stage and action.kind in GRADIENTS:
                last = action
        return last


def _row(numbers: Sequence[int]) -> str:
    return " ".join(str(number) for number in numbers)


def compute_steps(order: Sequence[Action]) -> tuple[Step, ...]:
    """A step for each action of an order.

    Raises:
        ScheduleError: the order holds a message or a reduction, which lowering adds.
    """
    for action in order:
        if action.kind not in COMPUTE:
            raise ScheduleError(f"{action} is no compute action: lowering adds communication")
    return tuple(Step.of(action) for action in order)
