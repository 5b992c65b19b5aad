"""Where communication goes, and that it costs an ideal pipeline no waiting."""

from collections import deque
from itertools import pairwise

import pytest
from hypothesis import given, settings

from megagrid.pipeline.schedules import (
    GENERATORS,
    Action,
    Costs,
    Kind,
    Schedule,
    ScheduleError,
    forward_only,
    generate,
    lower,
    lowering,
    simulate,
)
from megagrid.pipeline.schedules.action import RECEIVES
from megagrid.pipeline.schedules.timing import ideal_timeline
from tests.pipeline.schedules.random_schedules import schedules

CASES = [
    (name, ranks, microbatches, 2 if name == "Interleaved1F1B" else 1)
    for name in GENERATORS
    for ranks in (1, 2, 4)
    for microbatches in (1, 3, 8)
]


def row(program, rank):
    return " ".join(str(step) for step in program.steps[rank])


def test_steady_1f1b_sends_activation_and_receives_gradient_in_one_batch():
    program = lower(generate("1F1B", 4, 8))
    for rank in (1, 2):
        drawing = next(
            line.split(maxsplit=2)[2].removeprefix("of 4").strip()
            for line in lowering.__doc__.splitlines()
            if line.strip().startswith(f"rank {rank} ")
        )
        assert drawing in row(program, rank)


def test_two_ranks_of_1f1b_as_a_whole():
    program = lower(generate("1F1B", 2, 3), tied=True)
    assert row(program, 0) == (
        "0F0 0SEND_F0 0F1 0SEND_F1 0RECV_B0 0B0 0F2 0RECV_B1+0SEND_F2 0RECV_B2 0B1 0B2"
        " 0REDUCE_GRAD 0REDUCE_TIED"
    )
    assert row(program, 1) == (
        "1RECV_F0 1RECV_F1 1F0 1B0 1SEND_B0 1F1 1B1 1SEND_B1+1RECV_F2 1F2 1B2 1SEND_B2"
        " 1REDUCE_GRAD 1REDUCE_TIED"
    )


@pytest.mark.parametrize(("name", "ranks", "microbatches", "chunks"), CASES)
def test_on_the_ideal_timeline_communication_adds_no_waiting(name, ranks, microbatches, chunks):
    schedule = generate(name, ranks, microbatches, chunks)
    ideal = ideal_timeline(schedule, schedule.orders, Costs.of(schedule.num_stages))
    assert simulate(lower(schedule)).timeline == ideal


@pytest.mark.parametrize(("name", "ranks", "microbatches", "chunks"), CASES)
def test_ranks_that_wait_for_each_batch_at_once_reach_their_end_too(
    name, ranks, microbatches, chunks
):
    program = lower(generate(name, ranks, microbatches, chunks), tied=True)
    assert blocking_run_ends(program)


@settings(deadline=None, max_examples=50)
@given(schedules())
def test_so_do_those_of_any_schedule(schedule):
    assert blocking_run_ends(lower(schedule, tied=True))


def blocking_run_ends(program):
    """A second, simpler machine than `rendezvous`: a rank goes on when its batch has passed."""
    left = [deque(steps) for steps in program.steps]
    open_messages = [set() for _ in left]
    moved = True
    while moved:
        moved = False
        for rank, steps in enumerate(left):
            while steps and not open_messages[rank]:
                step = steps.popleft()
                moved = True
                if step.is_batch:
                    open_messages[rank] = set(step.batch)
            for message in list(open_messages[rank]):
                peer = program.peer(message)
                if message.other_end in open_messages[peer]:
                    open_messages[rank].remove(message)
                    open_messages[peer].remove(message.other_end)
                    moved = True
    return not any(left) and not any(open_messages)


@pytest.mark.parametrize(("name", "ranks", "microbatches", "chunks"), CASES)
def test_few_receives_wait_posted(name, ranks, microbatches, chunks):
    program = lower(generate(name, ranks, microbatches, chunks))
    for steps in program.steps:
        posted = set()
        for step in steps:
            posted |= {message for message in step.batch if message.kind in RECEIVES}
            if step.is_compute:
                kind = Kind.RECV_F if step.action.kind is Kind.F else Kind.RECV_B
                posted.discard(step.action._replace(kind=kind))
            assert len(posted) <= program.num_stages + 1


def test_zbv_turns_around_and_ends_without_a_message():
    program = lower(generate("ZBV", 2, 3), tied=True)
    messages = {message for steps in program.steps for step in steps for message in step.batch}
    assert {m.stage for m in messages if m.kind is Kind.SEND_F} == {0, 2}  # 1 -> 2 is the turn
    assert row(program, 0).endswith("0W2 0REDUCE_GRAD 0REDUCE_TIED")
    assert "REDUCE_TIED" not in row(program, 1)


def test_tied_gradient_is_summed_by_both_ends_after_their_own_reduction():
    program = lower(generate("1F1B", 3, 2), tied=True)
    assert row(program, 0).endswith("0REDUCE_GRAD 0REDUCE_TIED")
    assert row(program, 2).endswith("2REDUCE_GRAD 2REDUCE_TIED")
    assert "REDUCE_TIED" not in row(program, 1)
    assert program.peer(Action(0, Kind.REDUCE_TIED)) == 2
    assert program.peer(Action(2, Kind.REDUCE_TIED)) == 0


def test_a_single_stage_has_no_second_end():
    assert row(lower(generate("1F1B", 1, 2), tied=True), 0) == "0F0 0B0 0F1 0B1 0REDUCE_GRAD"


def test_evaluation_reduces_nothing():
    program = lower(forward_only(2, 2), tied=True)
    assert row(program, 1) == "1RECV_F0 1RECV_F1 1F0 1F1"


@pytest.mark.parametrize("name", GENERATORS)
def test_gradients_are_reduced_right_after_the_last_of_a_stage(name):
    program = lower(generate(name, 3, 4, 2 if name == "Interleaved1F1B" else 1))
    for steps in program.steps:
        bare = [step for step in steps if not step.is_batch]
        for before, step in pairwise(bare):
            if not step.is_compute:
                assert before.action == program.last_gradient(step.action.stage)


def test_orders_that_wait_for_each_other_are_named_before_lowering():
    orders = (
        tuple(map(Action.parse, ("0F0", "0B0", "0F1", "0B1"))),
        tuple(map(Action.parse, ("1F0", "1F1", "1B0", "1B1"))),
    )
    schedule = Schedule("mine", 2, 2, (0, 1), (2, 2), orders)
    with pytest.raises(ScheduleError) as caught:
        lower(schedule)
    assert caught.value.rule == "no deadlock"
    assert str(caught.value) == (
        "mine breaks the rule of no deadlock: rank 0 in 0B0 waits for 1B0 of rank 1,"
        " rank 1 in 1F1 waits for 0F1 of rank 0"
    )
    assert caught.value.drawing.splitlines() == [
        "  rank 0: 0F0  ▶0B0◀  0F1  0B1",
        "  rank 1: 1F0  1F1    1B0  1B1",
    ]


def test_a_schedule_with_communication_is_not_lowered_twice():
    orders = ((Action.parse("0F0"), Action.parse("0SEND_F0")), (Action.parse("1F0"),))
    with pytest.raises(ScheduleError, match="0SEND_F0 is no compute action"):
        lower(Schedule("mine", 2, 1, (0, 1), (1, 1), orders))
