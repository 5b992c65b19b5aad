"""Runs a program in thought, on ranks whose batches of messages meet as NCCL's do.

A rank works off its steps in order. A batch is posted to the rank's stream and the rank goes on; a
compute action waits for the batches that hold its inputs. The stream runs one batch at a time, in
the order of posting: each message passes once both its ends are at the head of their streams, and
the batch ends with its last message. `REDUCE_TIED` is a meeting of its two ranks; `REDUCE_GRAD` is
with data-parallel peers, which run the same program, and is free here.

Two readers: `simulate` takes the times, `verify` whether everything ended. For the latter it makes
no difference that ranks don't wait for a batch after posting it: the next batch can't start before
it has ended anyway.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from megagrid.pipeline.schedules.action import Action, Kind
from megagrid.pipeline.schedules.schedule import Program
from megagrid.pipeline.schedules.timing import Costs, Span, Time, Timeline


@dataclass
class _Rank:
    """Where one rank stands.

    Attributes:
        row: the compute actions that have run.
        clock: when the last step ended.
        step: index of the step that is next.
        stream: batches posted and not yet ended: index of the step, time of posting.
        stream_free: when the last batch that has ended did so.
    """

    row: list[Span] = field(default_factory=list)
    clock: Time = 0
    step: int = 0
    stream: deque[tuple[int, Time]] = field(default_factory=deque)
    stream_free: Time = 0


@dataclass(frozen=True)
class Outcome:
    """What became of a program.

    Attributes:
        timeline: the compute actions that ran.
        stuck: rank -> index of the step at which it waits for ever; empty if all is well.
        ends: when each rank had run its last step.
    """

    timeline: Timeline
    stuck: dict[int, int]
    ends: tuple[Time, ...]


class Rendezvous:
    """One run of a program; `outcome` is all there is to ask for."""

    def __init__(self, program: Program, costs: Costs) -> None:
        self._program = program
        self._costs = costs
        self._ranks = [_Rank() for _ in program.steps]
        self._arrived: dict[Action, Time] = {}  # messages and REDUCE_TIED at the head, since when
        self._received: dict[Action, Time] = {}  # RECVs whose batch has ended, and when
        self._awake = deque(range(program.num_ranks))

    def outcome(self) -> Outcome:
        """Runs until nothing moves."""
        while self._awake:
            rank = self._awake.popleft()
            self._run_stream(rank)
            self._run_steps(rank)
        stuck = {}
        for rank, (state, steps) in enumerate(zip(self._ranks, self._program.steps, strict=True)):
            if state.stream:
                stuck[rank] = state.stream[0][0]
            elif state.step < len(steps):
                stuck[rank] = state.step
        return Outcome(
            timeline=tuple(tuple(state.row) for state in self._ranks),
            stuck=stuck,
            ends=tuple(state.clock for state in self._ranks),
        )

    def _run_stream(self, rank: int) -> None:
        """Ends a rank's batches, up to one that must wait for a peer."""
        state = self._ranks[rank]
        while state.stream:
            index, posted = state.stream[0]
            batch = self._program.steps[rank][index].actions
            head_since = max(posted, state.stream_free)
            passed = [self._meet(message, message.other_end, head_since) for message in batch]
            if None in passed:
                return
            state.stream.popleft()
            state.stream_free = max(
                at + self._costs.message(message) for at, message in zip(passed, batch, strict=True)
            )
            self._received.update(dict.fromkeys(batch, state.stream_free))

    def _meet(self, end: Action, other: Action, since: Time) -> Time | None:
        """When both ends are there; None as long as the other isn't. Wakes the other's rank."""
        if end not in self._arrived:
            self._arrived[end] = since
            self._awake.append(self._program.rank_of_stage(other.stage))
        if other not in self._arrived:
            return None
        return max(self._arrived[end], self._arrived[other])

    def _run_steps(self, rank: int) -> None:
        """Runs a rank's steps, up to one that must wait for a batch or a peer."""
        state, steps = self._ranks[rank], self._program.steps[rank]
        while state.step < len(steps):
            step = steps[state.step]
            if step.is_batch:
                state.stream.append((state.step, state.clock))
                if len(state.stream) == 1:
                    self._run_stream(rank)
            elif not self._run(rank, step.action):
                return
            state.step += 1

    def _run(self, rank: int, action: Action) -> bool:
        """Runs a compute action or a reduction; False if it must wait."""
        state = self._ranks[rank]
        if action.kind is Kind.REDUCE_GRAD:
            return True
        if action.kind is Kind.REDUCE_TIED:
            met = self._meet(action, self._program.other_end(action), state.clock)
            state.clock = state.clock if met is None else met
            return met is not None
        start = state.clock
        message = needed_message(self._program, action)
        if message is not None:
            if message not in self._received:
                return False
            start = max(start, self._received[message])
        state.clock = start + self._costs.time(action)
        state.row.append(Span(action, start, state.clock))
        return True


def needed_message(program: Program, action: Action) -> Action | None:
    """The RECV that a compute action consumes; None where its input is made on its own rank."""
    stage, microbatch = action.stage, action.microbatch
    if action.kind is Kind.F:
        local = stage == 0 or program.hands_over_locally(stage - 1)
        return None if local else Action(stage, Kind.RECV_F, microbatch)
    if action.kind is Kind.W:
        return None
    local = stage == program.num_stages - 1 or program.hands_over_locally(stage)
    return None if local else Action(stage, Kind.RECV_B, microbatch)
