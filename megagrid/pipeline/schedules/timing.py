"""What actions cost, when they run, and when they would run if communication were free."""

from __future__ import annotations

from collections import deque
from collections.abc import Container, Sequence
from dataclasses import dataclass
from fractions import Fraction

from megagrid.pipeline.schedules.action import Action, Kind, ScheduleError
from megagrid.pipeline.schedules.schedule import Pipeline

Time = int | Fraction | float
PerStage = Time | Sequence[Time]


@dataclass(frozen=True)
class Costs:
    """What the actions of each stage take, in any one unit of time.

    Integers and Fractions are kept exact all the way to the bubble rate.

    Attributes:
        forward, input_grad, weight_grad: of F, I and W, per stage; B takes I's plus W's.
        p2p: of a message between stage s and s+1, either way; one less than there are stages.
        activation: memory held by a stage for a microbatch, from F to the end of B or I.
        weight_activation: what of it is still held from the end of I to the end of W.
    """

    forward: tuple[Time, ...]
    input_grad: tuple[Time, ...]
    weight_grad: tuple[Time, ...]
    p2p: tuple[Time, ...]
    activation: tuple[Time, ...]
    weight_activation: tuple[Time, ...]

    @classmethod
    def of(
        cls,
        num_stages: int,
        forward: PerStage = 1,
        input_grad: PerStage = 1,
        weight_grad: PerStage = 1,
        p2p: PerStage = 0,
        activation: PerStage = 1,
        weight_activation: PerStage | None = None,
    ) -> Costs:
        """Costs of a pipeline; a single number stands for every stage.

        `weight_activation` None keeps all of `activation` until W.

        Raises:
            ScheduleError: a sequence of the wrong length, or a cost that is negative or no time.
        """
        if weight_activation is None:
            weight_activation = activation
        return cls(
            forward=_per_stage("forward", forward, num_stages, positive=True),
            input_grad=_per_stage("input_grad", input_grad, num_stages, positive=True),
            weight_grad=_per_stage("weight_grad", weight_grad, num_stages, positive=True),
            p2p=_per_stage("p2p", p2p, num_stages - 1),
            activation=_per_stage("activation", activation, num_stages),
            weight_activation=_per_stage("weight_activation", weight_activation, num_stages),
        )

    def time(self, action: Action) -> Time:
        """How long a compute action takes."""
        stage = action.stage
        match action.kind:
            case Kind.F:
                return self.forward[stage]
            case Kind.I:
                return self.input_grad[stage]
            case Kind.W:
                return self.weight_grad[stage]
            case Kind.B:
                return self.input_grad[stage] + self.weight_grad[stage]
        raise ValueError(f"{action} is no compute action")

    def message(self, action: Action) -> Time:
        """How long a SEND and its RECV take, once both ends are there."""
        towards_next = action.kind in (Kind.SEND_F, Kind.RECV_B)
        return self.p2p[action.stage if towards_next else action.stage - 1]


def ratio(part: Time, whole: Time) -> Fraction | float:
    """part / whole, exact if both are."""
    if isinstance(part, int | Fraction) and isinstance(whole, int | Fraction):
        return Fraction(part) / Fraction(whole)
    return part / whole


def _per_stage(key: str, cost: PerStage, length: int, positive: bool = False) -> tuple[Time, ...]:
    costs = tuple(cost) if isinstance(cost, Sequence) else (cost,) * length
    if len(costs) != length:
        raise ScheduleError(f"{key} has {len(costs)} costs for {length} stages or boundaries")
    for cost in costs:
        if not (cost > 0 or (cost == 0 and not positive)):
            raise ScheduleError(f"{key}={cost} must be {'above 0' if positive else '0 or more'}")
    return costs


@dataclass(frozen=True, slots=True)
class Span:
    """A compute action and when it ran."""

    action: Action
    start: Time
    end: Time


# Per rank, its compute actions in order. Simulated or measured: the renderer draws either.
Timeline = tuple[tuple[Span, ...], ...]


def inputs_of(pipeline: Pipeline, action: Action) -> tuple[tuple[Action, ...], ...]:
    """What a compute action reads: for each input, the actions of which any one makes it.

    A stage's backward takes the next stage's gradient whether that was a B or an I.
    """
    stage, kind, microbatch = action.stage, action.kind, action.microbatch
    own_forward = (Action(stage, Kind.F, microbatch),)
    if kind is Kind.F:
        return ((Action(stage - 1, Kind.F, microbatch),),) if stage else ()
    if kind is Kind.W:
        return ((Action(stage, Kind.I, microbatch),),)
    if stage == pipeline.num_stages - 1:
        return (own_forward,)
    gradient = tuple(Action(stage + 1, kind, microbatch) for kind in (Kind.I, Kind.B))
    return (own_forward, gradient)


def missing_input(
    pipeline: Pipeline, action: Action, made: Container[Action]
) -> tuple[Action, ...]:
    """The makers of the first input of an action that isn't there yet; () if all are."""
    for makers in inputs_of(pipeline, action):
        if not any(maker in made for maker in makers):
            return makers
    return ()


def ideal_timeline(
    pipeline: Pipeline, orders: Sequence[Sequence[Action]], costs: Costs
) -> Timeline:
    """When each action runs if messages take no time and no rank waits for anything else.

    Args:
        pipeline: where the stages are.
        orders: per rank, its compute actions.
        costs: of the actions.

    Returns:
        A row for each order, shorter than it where the orders wait for each other for ever.
    """
    ends: dict[Action, Time] = {}
    rows: list[list[Span]] = [[] for _ in orders]
    sleepers: dict[Action, list[int]] = {}  # ranks to wake once an action has run
    awake = deque(range(len(orders)))
    while awake:
        rank = awake.popleft()
        order, row = orders[rank], rows[rank]
        while len(row) < len(order):
            action = order[len(row)]
            missing = missing_input(pipeline, action, ends)
            if missing:
                for maker in missing:
                    sleepers.setdefault(maker, []).append(rank)
                break
            inputs = (ends.get(m, 0) for makers in inputs_of(pipeline, action) for m in makers)
            start = max(row[-1].end if row else 0, *inputs, 0)
            ends[action] = start + costs.time(action)
            row.append(Span(action, start, ends[action]))
            awake.extend(sleepers.pop(action, ()))
    return tuple(tuple(row) for row in rows)
