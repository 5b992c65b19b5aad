"""The rules that `verify` holds a program to, as a table.

A rule yields the places where it is broken, first things first. It may take the rules above it in
the table to hold: that no deadlock happens is asked of messages which all have their other end.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from megagrid.pipeline.schedules.action import (
    COMPUTE,
    GRADIENTS,
    RECEIVES,
    REDUCTIONS,
    SENDS,
    Action,
    Kind,
)
from megagrid.pipeline.schedules.rendezvous import Rendezvous, needed_message
from megagrid.pipeline.schedules.schedule import Program
from megagrid.pipeline.schedules.timing import Costs, Timeline, inputs_of, missing_input


@dataclass(frozen=True)
class Violation:
    """Where a rule is broken: a rank's step (None: something is missing there), and how."""

    rank: int
    step: int | None
    finding: str


@dataclass(frozen=True)
class Rule:
    """A row of the table: what the rule is called, and what yields the places that break it."""

    name: str
    check: Callable[[Program], Iterator[Violation]]


Posted = tuple[int, Action]  # a message and the index of its step


def actions_of(program: Program) -> Iterator[tuple[int, int, Action]]:
    """(rank, index of the step, action) of everything in a program."""
    for rank, steps in enumerate(program.steps):
        for index, step in enumerate(steps):
            for action in step.actions:
                yield rank, index, action


def _placement(program: Program) -> Iterator[Violation]:
    """Every action names a stage of its own rank and a microbatch of the step."""
    for rank, index, action in actions_of(program):
        if not 0 <= action.stage < program.num_stages:
            finding = f"{action}: stages are 0 … {program.num_stages - 1}"
        elif program.rank_of_stage(action.stage) != rank:
            owner = program.rank_of_stage(action.stage)
            finding = f"{action} is on rank {rank}, its stage on rank {owner}"
        elif action.microbatch is not None and action.microbatch >= program.num_microbatches:
            finding = f"{action}: microbatches are 0 … {program.num_microbatches - 1}"
        else:
            continue
        yield Violation(rank, index, finding)


# A whole backward and its two halves are never both there.
_EXCLUDES = {Kind.B: (Kind.I, Kind.W), Kind.I: (Kind.B,), Kind.W: (Kind.B,)}


def _completeness(program: Program) -> Iterator[Violation]:
    """Each stage has F once, and B once or I and W once, for each microbatch."""
    seen: Counter[Action] = Counter()
    for rank, index, action in actions_of(program):
        if action.kind not in COMPUTE:
            continue
        seen[action] += 1
        if seen[action] > 1:
            yield Violation(rank, index, f"{action} comes twice")
        if program.forward_only and action.kind is not Kind.F:
            yield Violation(rank, index, f"{action} in a schedule of forwards only")
        for kind in _EXCLUDES.get(action.kind, ()):
            other = action._replace(kind=kind)
            if other in seen:
                yield Violation(rank, index, f"{action} after {other}: B is I and W in one")
    for stage in range(program.num_stages):
        for microbatch in range(program.num_microbatches):
            for kind in _missing(program, seen, stage, microbatch):
                action = Action(stage, kind, microbatch)
                yield Violation(program.rank_of_stage(stage), None, f"{action} is missing")


def _missing(
    program: Program, seen: Counter[Action], stage: int, microbatch: int
) -> Iterator[Kind]:
    def has(kind: Kind) -> bool:
        return Action(stage, kind, microbatch) in seen

    if not has(Kind.F):
        yield Kind.F
    if program.forward_only or has(Kind.B):
        return
    if not has(Kind.I) and not has(Kind.W):
        yield Kind.B
    elif not has(Kind.I):
        yield Kind.I
    elif not has(Kind.W):
        yield Kind.W


def _order_on_rank(program: Program) -> Iterator[Violation]:
    """What an action reads is made earlier, where one rank makes both."""
    done: set[Action] = set()
    for rank, index, action in actions_of(program):
        if action.kind in COMPUTE:
            for makers in inputs_of(program, action):
                if program.rank_of_stage(makers[0].stage) != rank:
                    continue
                if done.isdisjoint(makers):
                    maker = _present(program, makers)
                    yield Violation(rank, index, f"{action} comes before {maker}")
            done.add(action)


def _present(program: Program, makers: Sequence[Action]) -> Action:
    """Which of the possible makers of a tensor a program has; the first, where it has none."""
    return next((action for *_, action in actions_of(program) if action in makers), makers[0])


_SENT_AFTER = {Kind.SEND_F: (Kind.F,), Kind.SEND_B: (Kind.I, Kind.B)}


def _messages_on_rank(program: Program) -> Iterator[Violation]:
    """A RECV is posted before its tensor is consumed, a SEND after its tensor is made."""
    done: set[Action] = set()
    for rank, index, action in actions_of(program):
        needed = needed_message(program, action) if action.kind in COMPUTE else None
        if needed is not None and needed not in done:
            yield Violation(rank, index, f"{action} comes before {needed}")
        makers = [action._replace(kind=kind) for kind in _SENT_AFTER.get(action.kind, ())]
        if makers and done.isdisjoint(makers):
            yield Violation(rank, index, f"{action} comes before {_present(program, makers)}")
        done.add(action)


def _matching(program: Program) -> Iterator[Violation]:
    """Each SEND meets exactly one RECV, in one order between any two ranks."""
    wires: dict[tuple[int, int], tuple[list[Posted], list[Posted]]]
    wires = defaultdict(lambda: ([], []))  # (sender, receiver) -> its SENDs, the other's RECVs
    seen: set[Action] = set()
    for rank, index, action in actions_of(program):
        if action.kind not in SENDS and action.kind not in RECEIVES:
            continue
        if action in seen:
            yield Violation(rank, index, f"{action} comes twice")
        seen.add(action)
        if not 0 <= action.other_end.stage < program.num_stages:
            yield Violation(rank, index, f"{action} has no stage at its other end")
        elif program.peer(action) == rank:
            yield Violation(rank, index, f"{action} would be a message of rank {rank} to itself")
        elif action.kind in SENDS:
            wires[rank, program.peer(action)][0].append((index, action))
        else:
            wires[program.peer(action), rank][1].append((index, action))
    for (sender, receiver), (sends, recvs) in wires.items():
        yield from _mismatches(sender, receiver, sends, recvs)


def _mismatches(
    sender: int, receiver: int, sends: list[Posted], recvs: list[Posted]
) -> Iterator[Violation]:
    expected = {send.other_end for _, send in sends}
    posted = {recv for _, recv in recvs}
    for index, send in sends:
        if send.other_end not in posted:
            yield Violation(sender, index, f"{send} meets no {send.other_end} on rank {receiver}")
    for index, recv in recvs:
        if recv not in expected:
            yield Violation(receiver, index, f"{recv} meets no {recv.other_end} on rank {sender}")
    for (_, send), (index, recv) in zip(sends, recvs, strict=True):
        if send.other_end != recv:
            finding = f"rank {sender} sends {send} where rank {receiver} expects {recv}"
            yield Violation(receiver, index, finding)


def _reductions(program: Program) -> Iterator[Violation]:
    """A stage's gradient is summed once, after its last B or W; a tied one also over both ends."""
    trained = () if program.forward_only else range(program.num_stages)
    wanted = {Action(stage, Kind.REDUCE_GRAD) for stage in trained}
    wanted |= {Action(stage, Kind.REDUCE_TIED) for stage in program.tied_ends()}
    remaining = Counter(
        action.stage for *_, action in actions_of(program) if action.kind in GRADIENTS
    )
    seen: set[Action] = set()
    for rank, index, action in actions_of(program):
        if action.kind in GRADIENTS:
            remaining[action.stage] -= 1
        if action.kind not in REDUCTIONS:
            continue
        if action in seen or action not in wanted:
            reason = "comes twice" if action in seen else "isn't due"
            yield Violation(rank, index, f"{action} {reason}")
        if action.kind is Kind.REDUCE_GRAD and remaining[action.stage]:
            finding = f"{action} comes before {program.last_gradient(action.stage)}"
            yield Violation(rank, index, finding)
        for stage in (0, program.num_stages - 1) if action.kind is Kind.REDUCE_TIED else ():
            first = Action(stage, Kind.REDUCE_GRAD)
            if program.rank_of_stage(stage) == rank and first not in seen:
                yield Violation(rank, index, f"{action} comes before {first}")
        seen.add(action)
    for action in sorted(wanted - seen, key=str):
        yield Violation(program.rank_of_stage(action.stage), None, f"{action} is missing")


def _deadlock(program: Program) -> Iterator[Violation]:
    """Run as `rendezvous` describes, every rank reaches its end."""
    stuck = Rendezvous(program, Costs.of(program.num_stages)).outcome().stuck
    if not stuck:
        return
    heads = {rank: program.steps[rank][index].actions for rank, index in stuck.items()}
    waits = {}
    for rank, head in heads.items():
        for action in head:
            other = program.peer(action)
            # Where the other end is at the head as well, both wait for some third message.
            if program.other_end(action) not in heads[other]:
                waits[rank] = (action, other)
    circle = _circle({rank: other for rank, (_, other) in waits.items()})
    finding = ", ".join(
        f"rank {rank} in {waits[rank][0]} waits for rank {waits[rank][1]}" for rank in circle
    )
    yield Violation(circle[0], stuck[circle[0]], finding)


def circle_of_orders(program: Program, timeline: Timeline) -> Violation | None:
    """Ranks that wait for each other even where messages take no time.

    Args:
        program: compute actions alone.
        timeline: as far as `ideal_timeline` got with them.
    """
    made = {span.action for row in timeline for span in row}
    waits = {}
    for rank, (steps, row) in enumerate(zip(program.steps, timeline, strict=True)):
        if len(row) < len(steps):
            action = steps[len(row)].action
            waits[rank] = (action, _present(program, missing_input(program, action, made)))
    if not waits:
        return None
    owner = {rank: program.rank_of_stage(maker.stage) for rank, (_, maker) in waits.items()}
    circle = _circle(owner)
    finding = ", ".join(
        f"rank {rank} in {waits[rank][0]} waits for {waits[rank][1]} of rank {owner[rank]}"
        for rank in circle
    )
    return Violation(circle[0], len(timeline[circle[0]]), finding)


def _circle(waits_for: dict[int, int]) -> list[int]:
    """Ranks of which each waits for the next, the last for the first.

    Args:
        waits_for: rank -> the rank that it waits for, which waits as well.
    """
    path = [min(waits_for)]
    while (following := waits_for[path[-1]]) not in path:
        path.append(following)
    return path[path.index(following) :]


def _in_flight_bound(program: Program) -> Iterator[Violation]:
    """No rank holds more activations than the schedule declares."""
    for rank, steps in enumerate(program.steps):
        held = 0
        for index, step in enumerate(steps):
            kind = step.actions[0].kind
            held += kind is Kind.F
            if held > program.max_in_flight[rank]:
                declared = program.max_in_flight[rank]
                finding = f"{step} makes rank {rank} hold {held} activations, {declared} declared"
                yield Violation(rank, index, finding)
            held -= kind in GRADIENTS or (program.forward_only and kind is Kind.F)


COMPUTE_RULES = (
    Rule("placement", _placement),
    Rule("completeness", _completeness),
    Rule("data dependencies", _order_on_rank),
)

RULES = (
    *COMPUTE_RULES,
    Rule("data dependencies", _messages_on_rank),
    Rule("matching messages", _matching),
    Rule("reductions", _reductions),
    Rule("no deadlock", _deadlock),
    Rule("in-flight bound", _in_flight_bound),
)
