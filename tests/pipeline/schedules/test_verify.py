"""What runs is accepted, and what doesn't is refused by the name of the rule that it breaks."""

from dataclasses import replace

import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from megagrid.pipeline.schedules import (
    Action,
    Kind,
    Program,
    ScheduleError,
    Step,
    forward_only,
    generate,
    lower,
    verify,
)
from tests.pipeline.schedules.random_schedules import schedules

any_machine = settings(deadline=None, max_examples=25, suppress_health_check=[HealthCheck.too_slow])


def with_row(program, rank, steps):
    rows = list(program.steps)
    rows[rank] = tuple(steps)
    return replace(program, steps=tuple(rows))


def positions(program, wanted):
    """(rank, index) of the steps whose first action is as wanted."""
    return [
        (rank, index)
        for rank, steps in enumerate(program.steps)
        for index, step in enumerate(steps)
        if wanted(step)
    ]


def broken_rule(program):
    with pytest.raises(ScheduleError) as caught:
        verify(program)
    assert "▶" in caught.value.drawing
    assert caught.value.rule in str(caught.value)
    return caught.value.rule


# -- accepted --------------------------------------------------------------------------------------


@any_machine
@given(schedules(), st.booleans())
def test_any_order_that_can_run_is_lowered_and_accepted(schedule, tied):
    verify(lower(schedule, tied))


def test_in_flight_counts_from_a_forward_to_the_end_of_its_weight_gradient():
    report = verify(lower(generate("ZB1P", 3, 4)))
    #  rank 2: F0 I0 F1 I1 F2 I2 W0 F3 I3 W1 W2 W3
    assert report.in_flight == (3, 3, 3)
    assert report.in_flight_until_input_grad == (3, 2, 1)


# -- refused ---------------------------------------------------------------------------------------


@any_machine
@given(schedules(), st.data())
def test_a_missing_compute_action_breaks_completeness(schedule, data):
    program = lower(schedule)
    rank, index = data.draw(st.sampled_from(positions(program, lambda step: step.is_compute)))
    steps = list(program.steps[rank])
    del steps[index]
    assert broken_rule(with_row(program, rank, steps)) == "completeness"


@any_machine
@given(schedules(), st.data())
def test_a_repeated_compute_action_breaks_completeness(schedule, data):
    program = lower(schedule)
    rank, index = data.draw(st.sampled_from(positions(program, lambda step: step.is_compute)))
    steps = list(program.steps[rank])
    steps.insert(data.draw(st.integers(0, len(steps))), steps[index])
    assert broken_rule(with_row(program, rank, steps)) == "completeness"


@any_machine
@given(schedules(), st.data())
def test_a_backward_before_its_forward_breaks_data_dependencies(schedule, data):
    program = lower(schedule)
    backwards = positions(program, lambda step: step.actions[0].kind in (Kind.B, Kind.I))
    rank, index = data.draw(st.sampled_from(backwards))
    steps = list(program.steps[rank])
    backward = steps[index].action
    forward = steps.index(Step.of(backward._replace(kind=Kind.F)))
    steps.insert(forward, steps.pop(index))
    assert broken_rule(with_row(program, rank, steps)) == "data dependencies"


@any_machine
@given(schedules(), st.data())
def test_a_weight_gradient_before_its_input_gradient_breaks_data_dependencies(schedule, data):
    program = lower(schedule)
    weights = positions(program, lambda step: step.actions[0].kind is Kind.W)
    assume(weights)
    rank, index = data.draw(st.sampled_from(weights))
    steps = list(program.steps[rank])
    weight = steps[index].action
    steps.insert(steps.index(Step.of(weight._replace(kind=Kind.I))), steps.pop(index))
    assert broken_rule(with_row(program, rank, steps)) == "data dependencies"


@any_machine
@given(schedules(min_ranks=2), st.data())
def test_a_receive_posted_after_its_consumer_breaks_data_dependencies(schedule, data):
    program = lower(schedule)
    received = [
        (rank, index, message)
        for rank, index in positions(program, lambda step: step.is_batch)
        for message in program.steps[rank][index].batch
        if message.kind in (Kind.RECV_F, Kind.RECV_B)
    ]
    rank, index, message = data.draw(st.sampled_from(received))
    steps = list(program.steps[rank])
    rest = tuple(other for other in steps[index].batch if other != message)
    steps[index : index + 1] = [Step(rest)] if rest else []
    assert broken_rule(with_row(program, rank, [*steps, Step.of(message)])) == "data dependencies"


@any_machine
@given(schedules(min_ranks=2), st.data())
def test_a_missing_send_breaks_matching_messages(schedule, data):
    program = lower(schedule)
    sends = positions(
        program,
        lambda step: step.is_batch and any("SEND" in message.kind for message in step.batch),
    )
    rank, index = data.draw(st.sampled_from(sends))
    steps = list(program.steps[rank])
    rest = tuple(message for message in steps[index].batch if "SEND" not in message.kind)
    steps[index : index + 1] = [Step(rest)] if rest else []
    assert broken_rule(with_row(program, rank, steps)) == "matching messages"


@any_machine
@given(schedules(), st.data())
def test_a_missing_repeated_or_early_reduction_breaks_reductions(schedule, data):
    program = lower(schedule)
    reductions = positions(program, lambda step: not step.is_compute and not step.is_batch)
    rank, index = data.draw(st.sampled_from(reductions))
    steps = list(program.steps[rank])
    reduction = steps.pop(index)
    how = data.draw(st.sampled_from(["missing", "repeated", "early"]))
    if how == "repeated":
        steps += [reduction, reduction]
    elif how == "early":
        last = Step.of(program.last_gradient(reduction.action.stage))
        steps.insert(data.draw(st.integers(0, steps.index(last))), reduction)
    assert broken_rule(with_row(program, rank, steps)) == "reductions"


@any_machine
@given(schedules(), st.data())
def test_a_bound_below_the_peak_is_broken(schedule, data):
    program = lower(schedule)
    peaks = verify(program).in_flight
    rank = data.draw(st.integers(0, program.num_ranks - 1))
    verify(replace(program, max_in_flight=peaks))
    lower_by_one = tuple(peak - (other == rank) for other, peak in enumerate(peaks))
    assert broken_rule(replace(program, max_in_flight=lower_by_one)) == "in-flight bound"


def program_of(*rows, ranks=None, tied=False):
    """A program of two stages on two ranks, or as placed."""
    placement = ranks or (0, 1)
    num_ranks = len(rows)
    steps = tuple(tuple(Step.parse(word) for word in row.split()) for row in rows)
    return Program("mine", num_ranks, 2, placement, (9,) * num_ranks, steps, tied=tied)


def test_a_deadlock_is_drawn_with_the_ranks_that_wait_for_each_other():
    program = program_of(
        # rank 0 sends its second activation before it takes the first gradient; rank 1 won't
        # take that activation before it has sent the gradient.
        "0F0 0SEND_F0 0F1 0SEND_F1 0RECV_B0 0B0 0RECV_B1 0B1 0REDUCE_GRAD",
        "1RECV_F0 1F0 1B0 1SEND_B0 1RECV_F1 1F1 1B1 1SEND_B1 1REDUCE_GRAD",
    )
    with pytest.raises(ScheduleError) as caught:
        verify(program)
    assert str(caught.value) == (
        "mine breaks the rule of no deadlock: rank 0 in 0SEND_F1 waits for rank 1,"
        " rank 1 in 1SEND_B0 waits for rank 0"
    )
    first, second = caught.value.drawing.splitlines()
    assert first.startswith("  rank 0: 0F0       0SEND_F0  0F1  ▶0SEND_F1◀  0RECV_B0  0B0")
    assert second.startswith("  rank 1: 1RECV_F0  1F0       1B0  1SEND_B0    1RECV_F1  1F1")


def test_one_batch_of_both_directions_resolves_that_deadlock():
    verify(
        program_of(
            "0F0 0SEND_F0 0F1 0SEND_F1+0RECV_B0 0B0 0RECV_B1 0B1 0REDUCE_GRAD",
            "1RECV_F0 1F0 1B0 1SEND_B0+1RECV_F1 1F1 1B1 1SEND_B1 1REDUCE_GRAD",
        )
    )


def test_three_ranks_in_a_circle_are_all_named():
    program = lower(generate("Interleaved1F1B", 3, 1, 2))
    first, send, receive, *rest = program.steps[0]
    assert [str(send), str(receive)] == ["0SEND_F0", "3RECV_F0"]
    with pytest.raises(ScheduleError) as caught:
        verify(with_row(program, 0, [first, receive, send, *rest]))
    assert str(caught.value).endswith(
        "rank 0 in 3RECV_F0 waits for rank 2, rank 2 in 2RECV_F0 waits for rank 1,"
        " rank 1 in 1RECV_F0 waits for rank 0"
    )


def test_messages_of_two_ranks_in_two_orders_break_matching_messages():
    program = program_of(
        "0F0 0F1 0SEND_F0 0SEND_F1 0RECV_B0 0RECV_B1 0B0 0B1 0REDUCE_GRAD",
        "1RECV_F1 1RECV_F0 1F0 1F1 1B0 1B1 1SEND_B0 1SEND_B1 1REDUCE_GRAD",
    )
    with pytest.raises(ScheduleError, match="rank 0 sends 0SEND_F0 where rank 1 expects 1RECV_F1"):
        verify(program)


@pytest.mark.parametrize(
    ("change", "rule", "finding"),
    [
        (("0F1", "1F1"), "placement", "1F1 is on rank 0, its stage on rank 1"),
        (("0F1", "0F2"), "placement", "0F2: microbatches are 0 … 1"),
        (("0F1", "7F1"), "placement", "7F1: stages are 0 … 1"),
        (("0B1", "0B1 0W1"), "completeness", "0W1 after 0B1: B is I and W in one"),
        (("0B1", "0I1"), "completeness", "0W1 is missing"),
        (("0F1", "0F1 0RECV_F1"), "matching messages", "0RECV_F1 has no stage at its other end"),
        (("0SEND_F1", "0SEND_F1 0SEND_F1"), "matching messages", "0SEND_F1 comes twice"),
        (("0F1 0SEND_F1", "0SEND_F1 0F1"), "data dependencies", "0SEND_F1 comes before 0F1"),
        (("0REDUCE_GRAD", ""), "reductions", "0REDUCE_GRAD is missing"),
        (("0REDUCE_GRAD", "0REDUCE_GRAD 0REDUCE_TIED"), "reductions", "0REDUCE_TIED isn't due"),
    ],
)
def test_each_rule_names_what_breaks_it(change, rule, finding):
    rank_0 = "0F0 0SEND_F0 0F1 0SEND_F1 0RECV_B0 0RECV_B1 0B0 0B1 0REDUCE_GRAD"
    rank_1 = "1RECV_F0 1RECV_F1 1F0 1F1 1B0 1SEND_B0 1B1 1SEND_B1 1REDUCE_GRAD"
    verify(program_of(rank_0, rank_1))
    with pytest.raises(ScheduleError) as caught:
        verify(program_of(rank_0.replace(*change), rank_1))
    assert str(caught.value) == f"mine breaks the rule of {rule}: {finding}"


def test_a_message_between_stages_of_one_rank_is_refused():
    program = program_of(
        "0F0 0SEND_F0 1RECV_F0 1F0 1B0 0B0 0F1 1F1 1B1 0B1 1REDUCE_GRAD 0REDUCE_GRAD", ranks=(0, 0)
    )
    with pytest.raises(ScheduleError, match="0SEND_F0 would be a message of rank 0 to itself"):
        verify(program)


def test_a_tied_sum_before_its_own_reduction_is_refused():
    program = lower(generate("1F1B", 2, 2), tied=True)
    steps = [*program.steps[1][:-2], program.steps[1][-1], program.steps[1][-2]]
    with pytest.raises(ScheduleError, match="1REDUCE_TIED comes before 1REDUCE_GRAD"):
        verify(with_row(program, 1, steps))


def test_a_backward_in_an_evaluation_is_refused():
    program = lower(forward_only(2, 1))
    steps = [*program.steps[1], Step.of(Action(1, Kind.B, 0))]
    with pytest.raises(ScheduleError, match="1B0 in a schedule of forwards only"):
        verify(with_row(program, 1, steps))


def test_a_gradient_sent_in_an_evaluation_is_refused():
    program = lower(forward_only(2, 1))
    steps = [*program.steps[1], Step.of(Action(1, Kind.SEND_B, 0))]
    with pytest.raises(ScheduleError, match="1SEND_B0 comes before 1I0"):
        verify(with_row(program, 1, steps))
