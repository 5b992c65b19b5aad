"""Proves that a program computes a training step, ends, and holds no more than it promised."""

from __future__ import annotations

from collections.abc import Set
from dataclasses import dataclass
from typing import NoReturn

from megagrid.pipeline.schedules.action import GRADIENTS, SENDS, Action, Kind, ScheduleError
from megagrid.pipeline.schedules.render import render_steps
from megagrid.pipeline.schedules.rules import (
    COMPUTE_RULES,
    RULES,
    Rule,
    Violation,
    actions_of,
    circle_of_orders,
)
from megagrid.pipeline.schedules.schedule import Pipeline, Program, Schedule, compute_steps
from megagrid.pipeline.schedules.timing import Costs, Timeline, ideal_timeline


@dataclass(frozen=True)
class VerifyReport:
    """What is known of a program that broke no rule.

    An activation is that of one stage for one microbatch, whatever the stage's size.

    Attributes:
        in_flight: per rank, the most activations held at once, each from the start of its F to
            the end of its B or W.
        in_flight_until_input_grad: the same up to the end of B or I, when a split backward is done
            with all but what the weight gradient needs.
        messages: SENDs of a step, over all ranks.
        batches: batches of messages that a rank posts in a step, per rank.
    """

    in_flight: tuple[int, ...]
    in_flight_until_input_grad: tuple[int, ...]
    messages: int
    batches: tuple[int, ...]


def verify(program: Program) -> VerifyReport:
    """Checks every rule.

    Raises:
        ScheduleError: names the first broken rule, where and how; its `drawing` shows the place.
    """
    _check(program, RULES)
    orders = [program.compute_order(rank) for rank in range(program.num_ranks)]
    return VerifyReport(
        in_flight=tuple(_peak(order, GRADIENTS, program) for order in orders),
        in_flight_until_input_grad=tuple(
            _peak(order, {Kind.B, Kind.I}, program) for order in orders
        ),
        messages=sum(action.kind in SENDS for *_, action in actions_of(program)),
        batches=tuple(sum(step.is_batch for step in steps) for steps in program.steps),
    )


def check_orders(schedule: Schedule) -> Timeline:
    """Checks what can be said of a schedule before it has communication.

    Returns:
        When its actions run if messages take no time, F, I and W take 1, and B takes 2.

    Raises:
        ScheduleError: as `verify`.
    """
    steps = tuple(compute_steps(order) for order in schedule.orders)
    shared = {key: value for key, value in vars(schedule).items() if key != "orders"}
    program = Program(**shared, steps=steps)
    _check(program, COMPUTE_RULES)
    timeline = ideal_timeline(program, schedule.orders, Costs.of(program.num_stages))
    circle = circle_of_orders(program, timeline)
    if circle is not None:
        _refuse(program, "no deadlock", circle)
    return timeline


def _check(program: Program, rules: tuple[Rule, ...]) -> None:
    for rule in rules:
        violation = next(rule.check(program), None)
        if violation is not None:
            _refuse(program, rule.name, violation)


def _refuse(program: Program, rule: str, violation: Violation) -> NoReturn:
    raise ScheduleError(
        f"{program.name} breaks the rule of {rule}: {violation.finding}",
        rule=rule,
        drawing=render_steps(program.steps, violation.rank, violation.step),
    )


def _peak(order: tuple[Action, ...], freed_by: Set[Kind], pipeline: Pipeline) -> int:
    held = peak = 0
    for action in order:
        held += action.kind is Kind.F
        peak = max(peak, held)
        held -= action.kind in freed_by or (pipeline.forward_only and action.kind is Kind.F)
    return peak
