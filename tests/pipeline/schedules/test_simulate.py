"""The published bubbles, exactly, and small pipelines worked out by hand."""

from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megagrid.pipeline.schedules import (
    Costs,
    ScheduleError,
    Step,
    forward_only,
    generate,
    lower,
    simulate,
)
from megagrid.pipeline.schedules.schedule import Program
from megagrid.pipeline.schedules.timing import ideal_timeline
from tests.pipeline.schedules.random_schedules import schedules


def simulated(name, ranks, microbatches, chunks=1, **costs):
    program = lower(generate(name, ranks, microbatches, chunks))
    return simulate(program, Costs.of(program.num_stages, **costs))


def idle(simulation):
    """Of one rank, on average."""
    return simulation.makespan - Fraction(sum(simulation.busy), len(simulation.busy))


@pytest.mark.parametrize("name", ["GPipe", "1F1B"])
@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("microbatches", [1, 2, 5, 8, 16])
def test_uniform_bubble_is_p_minus_1_over_m_plus_p_minus_1(name, ranks, microbatches):
    simulation = simulated(name, ranks, microbatches, forward=3, input_grad=4, weight_grad=2)
    assert simulation.bubble_rate == Fraction(ranks - 1, microbatches + ranks - 1)
    assert set(simulation.bubble_rates) == {simulation.bubble_rate}


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("chunks", [2, 3, 4])
@pytest.mark.parametrize("groups", [1, 2, 3])
def test_interleaving_divides_the_bubble_by_the_stages_a_rank(ranks, chunks, groups):
    microbatches = groups * ranks
    whole = simulated(
        "1F1B", ranks, microbatches, forward=chunks, input_grad=chunks, weight_grad=chunks
    )
    interleaved = simulated("Interleaved1F1B", ranks, microbatches, chunks)
    assert idle(interleaved) == idle(whole) / chunks
    assert interleaved.bubble_rate == Fraction(ranks - 1, chunks * microbatches + ranks - 1)


@pytest.mark.parametrize("ranks", [2, 3, 4, 6])
def test_zb1p_leaves_a_third_of_the_bubble_of_1f1b(ranks):
    for microbatches in (ranks, 2 * ranks, 2 * ranks + 3):
        assert 3 * idle(simulated("ZB1P", ranks, microbatches)) == idle(
            simulated("1F1B", ranks, microbatches)
        )


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 6])
def test_zbv_leaves_no_bubble_between_a_rank_s_first_and_last_action(ranks):
    for microbatches in (2 * ranks - 1, 2 * ranks, 2 * ranks + 1, 4 * ranks):
        simulation = simulated("ZBV", ranks, microbatches)
        assert simulation.step_bubble_rate == 0
        assert simulation.step_time == 6 * microbatches
        assert simulation.makespan == 6 * microbatches + ranks - 1  # ranks start one by one


def test_a_message_s_time_is_added_where_nothing_hides_it():
    simulation = simulated("1F1B", 2, 1, p2p=Fraction(1, 2))
    # F 1, message ½, F 1, B 2, message ½, B 2
    assert simulation.makespan == 7
    assert [span.start for span in simulation.timeline[1]] == [Fraction(3, 2), Fraction(5, 2)]


def test_messages_hide_behind_compute_where_several_microbatches_are_under_way():
    costs = {"forward": 10, "input_grad": 10, "weight_grad": 10}
    free, dear = (simulated("GPipe", 2, 6, p2p=p2p, **costs).makespan for p2p in (0, 5))
    assert dear - free == 2 * 5  # the first activation and the last gradient


def test_each_boundary_has_its_own_message_time():
    simulation = simulated("GPipe", 3, 1, p2p=(2, 5))
    assert simulation.makespan == 3 * (1 + 2) + 2 * (2 + 5)


def test_an_uneven_stage_sets_the_pace():
    simulation = simulated("1F1B", 2, 4, forward=(1, 3), input_grad=(1, 3), weight_grad=(1, 3))
    # rank 1 starts after F0 of rank 0 and is never idle; rank 0's last B follows its last.
    assert simulation.makespan == 1 + 4 * 9 + 2
    assert simulation.busy == (12, 36)
    assert simulation.bubble_rates == (1 - Fraction(12, 39), 1 - Fraction(36, 39))


def test_memory_is_held_from_forward_to_backward_weighted_by_stage():
    simulation = simulated("1F1B", 3, 6, activation=(5, 2, 7))
    assert simulation.peak_memory == (3 * 5, 2 * 2, 1 * 7)


def test_what_the_weight_gradient_needs_is_held_longer():
    # rank 1 of 2 has F0 I0 F1 I1 W0 …: at F1 it holds what W0 needs, and a whole activation.
    assert simulated("ZB1P", 2, 4, activation=10, weight_activation=3).peak_memory == (20, 13)


def test_an_evaluation_holds_one_microbatch():
    assert simulate(lower(forward_only(3, 5))).peak_memory == (1, 1, 1)


@settings(deadline=None, max_examples=50)
@given(schedules(), st.data())
def test_no_program_is_faster_than_its_compute_alone(schedule, data):
    costs = Costs.of(
        schedule.num_stages,
        *(
            data.draw(
                st.lists(
                    st.integers(1, 5), min_size=schedule.num_stages, max_size=schedule.num_stages
                )
            )
            for _ in range(3)
        ),
        p2p=data.draw(st.integers(0, 3)),
    )
    ideal = ideal_timeline(schedule, schedule.orders, costs)
    simulation = simulate(lower(schedule), costs)
    assert simulation.makespan >= max(row[-1].end for row in ideal)
    for spans, order in zip(simulation.timeline, schedule.orders, strict=True):
        assert tuple(span.action for span in spans) == order


def test_floats_are_costs_too():
    simulation = simulated("1F1B", 2, 2, forward=0.5, input_grad=0.25, weight_grad=0.25, p2p=0.1)
    assert 0 < simulation.bubble_rate < 1


@pytest.mark.parametrize(
    ("costs", "message"),
    [
        ({"forward": 0}, "forward=0 must be above 0"),
        ({"p2p": -1}, "p2p=-1 must be 0 or more"),
        ({"weight_grad": (1, 1)}, "weight_grad has 2 costs for 3 stages"),
        ({"forward": float("nan")}, "forward=nan must be above 0"),
    ],
)
def test_impossible_costs_are_refused(costs, message):
    with pytest.raises(ScheduleError, match=message):
        Costs.of(3, **costs)


def test_a_deadlock_is_reported_not_timed():
    steps = (
        tuple(map(Step.parse, ("0RECV_B0", "0F0", "0SEND_F0", "0B0"))),
        tuple(map(Step.parse, ("1RECV_F0", "1F0", "1B0", "1SEND_B0"))),
    )
    with pytest.raises(ScheduleError, match="rank 0 waits for ever in 0RECV_B0"):
        simulate(Program("mine", 2, 1, (0, 1), (1, 1), steps))
