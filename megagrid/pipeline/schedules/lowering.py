"""Communication for a schedule: sends and receives in batches, and gradient reductions.

The transport to write for is a NCCL communicator: a rank's batches run on one stream, one after the
other in the order of posting, and a batch ends when the other end of each of its messages is at the
head of its own rank's stream. Any batch that comes too early on one rank can then stop the whole
pipeline. Gloo, which only wants the messages of each pair of ranks in one order, asks for less.

Where each message goes follows from the *ideal timeline*: F, I and W take 1, B takes 2, messages
take nothing. A message's *tick* is the time at which its tensor is made there, and

1. a rank's messages of one tick are one batch, and batches are posted in the order of ticks;
2. a batch with a SEND is posted right after the action that makes its tensor;
3. a batch of RECVs alone is posted before the last action that starts before the tick. On the ideal
   timeline the peer then never waits for the rank, and the transfer overlaps that action. Earlier
   would only hold the buffer for longer, and on one stream a batch that waits for a late peer
   keeps everything behind it waiting too.

Nothing can deadlock: take the smallest tick with an unfinished message. On both of its ranks all
earlier batches are done, and the batch that holds it is posted, or will be after actions that start
before that tick, which need only messages that came before they started. (Costs are above zero.)
This holds whether or not a rank waits for each batch, and however long actions really take.

In the steady state of 1F1B the rule gives what one would write by hand: the activation to the next
rank and the gradient from it are made at the same tick, hence one batch.

    rank 1 of 4    1F3 1RECV_B1+1SEND_F3 1B1 1SEND_B1+1RECV_F4 1F4
    rank 2         2B1 2SEND_B1+2RECV_F3 2F3 2RECV_B2+2SEND_F3 2B2

Stages of one rank hand tensors over without a message (the turn of ZBV).
"""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace

from megagrid.pipeline.schedules.action import SENDS, Action, Kind, Step
from megagrid.pipeline.schedules.schedule import Program, Schedule
from megagrid.pipeline.schedules.timing import Span, Time, Timeline
from megagrid.pipeline.schedules.verify import check_orders

# What leaves a stage at the end of an action. W leaves nothing.
_OUTPUT = {Kind.F: (Kind.SEND_F, +1), Kind.B: (Kind.SEND_B, -1), Kind.I: (Kind.SEND_B, -1)}


def lower(schedule: Schedule, tied: bool = False) -> Program:
    """The program that computes `schedule`.

    `REDUCE_GRAD` follows the last B or W of its stage. `REDUCE_TIED` ends a rank's program, once
    for each rank that holds an end of the tied embedding; where both ends are on one rank there is
    one, of stage 0, and nothing to communicate. A pipeline of one stage has no second end.

    Args:
        schedule: any that is complete and whose orders don't wait for each other.
        tied: whether first and last stage share the embedding.

    Raises:
        ScheduleError: the schedule breaks a rule that no communication can mend.
    """
    timeline = check_orders(schedule)
    messages = _messages_by_tick(schedule, timeline)
    bare = Program(
        schedule.name,
        schedule.num_ranks,
        schedule.num_microbatches,
        schedule.placement,
        schedule.max_in_flight,
        tuple(tuple(map(Step.of, order)) for order in schedule.orders),
        tied=tied,
        forward_only=schedule.forward_only,
    )
    steps = [
        (*_woven(bare, rank, timeline[rank], messages[rank]), *_tied_reduction(bare, rank))
        for rank in range(schedule.num_ranks)
    ]
    return replace(bare, steps=tuple(steps))


def _messages_by_tick(schedule: Schedule, timeline: Timeline) -> list[dict[Time, list[Action]]]:
    """Per rank and tick, the messages of that tick, SENDs and RECVs in one order on both ends."""
    sends: list[tuple[Time, Action]] = []
    for row in timeline:
        for span in row:
            kind, offset = _OUTPUT.get(span.action.kind, (None, 0))
            receiver = span.action.stage + offset
            if kind is None or not 0 <= receiver < schedule.num_stages:
                continue
            if not schedule.hands_over_locally(min(span.action.stage, receiver)):
                sends.append((span.end, Action(span.action.stage, kind, span.action.microbatch)))
    sends.sort(key=lambda send: (send[0], send[1].kind, send[1].stage, send[1].microbatch))
    messages: list[dict[Time, list[Action]]] = [defaultdict(list) for _ in timeline]
    for tick, send in sends:
        for end in (send, send.other_end):
            messages[schedule.rank_of_stage(end.stage)][tick].append(end)
    return messages


def _woven(
    program: Program, rank: int, row: Sequence[Span], messages: dict[Time, list[Action]]
) -> list[Step]:
    """A rank's compute actions with its batches and gradient reductions in their places."""
    batches = defaultdict(list)  # index of an action of `row` -> batches posted before it
    ends = {span.end: index for index, span in enumerate(row)}
    starts = [span.start for span in row]
    position = 0
    for tick in sorted(messages):
        if any(message.kind in SENDS for message in messages[tick]):
            position = ends[tick] + 1
        else:
            position = max(position, bisect_left(starts, tick) - 1)
        batches[position].append(Step(tuple(messages[tick])))
    last = {program.last_gradient(stage): stage for stage in program.stages_of_rank(rank)}
    steps = [*batches[0]]
    for index, span in enumerate(row):
        steps += [Step.of(span.action), *batches[index + 1]]
        if span.action in last:  # after the batch: a peer may wait for it, nobody for this
            steps.append(Step.of(Action(last[span.action], Kind.REDUCE_GRAD)))
    return steps


def _tied_reduction(program: Program, rank: int) -> tuple[Step, ...]:
    return tuple(
        Step.of(Action(stage, Kind.REDUCE_TIED))
        for stage in program.tied_ends()
        if program.rank_of_stage(stage) == rank
    )
