"""Each schedule as it is drawn where it is made, and its promises."""

import inspect
import random
import textwrap

import pytest

from megagrid.pipeline.schedules import (
    GENERATORS,
    ScheduleError,
    forward_only,
    generate,
    lower,
    render_text,
    simulate,
    stages_per_rank,
    v_placement,
    verify,
)

DRAWINGS = {
    # name: ranks, microbatches, stages a rank, drawing
    "GPipe": (
        3,
        3,
        1,
        """
        rank 0  F0 F1 F2 .  .  .  .  .  .  B0--- B1--- B2---
        rank 1  .  F0 F1 F2 .  .  .  B0--- B1--- B2--- .  .
        rank 2  .  .  F0 F1 F2 B0--- B1--- B2--- .  .  .  .
        """,
    ),
    "1F1B": (
        3,
        4,
        1,
        """
        rank 0  F0 F1 F2 .  .  .  .  B0--- F3 B1--- .  B2--- .  B3---
        rank 1  .  F0 F1 .  .  B0--- F2 B1--- F3 B2--- .  B3--- .  .
        rank 2  .  .  F0 B0--- F1 B1--- F2 B2--- F3 B3--- .  .  .  .
        """,
    ),
    "Interleaved1F1B": (
        2,
        2,
        2,
        """
        rank 0  0F0 0F1 2F0 2F1 .   .   2B0---- .   2B1---- 0B0---- 0B1----
        rank 1  .   1F0 1F1 3F0 3B0---- 3F1 3B1---- 1B0---- 1B1---- .   .
        """,
    ),
    "ZB1P": (
        3,
        4,
        1,
        """
        rank 0  F0 F1 F2 .  .  I0 W0 F3 I1 W1 I2 W2 I3 W3
        rank 1  .  F0 F1 .  I0 F2 I1 W0 F3 I2 W1 I3 W2 W3
        rank 2  .  .  F0 I0 F1 I1 F2 I2 W0 F3 I3 W1 W2 W3
        """,
    ),
    "ZBV": (
        2,
        3,
        2,
        """
        rank 0  0F0 0F1 0F2 3F0 3I0 3W0 3F1 3I1 3W1 0I0 0W0 3F2 3I2 3W2 0I1 0W1 0I2 0W2 .
        rank 1  .   1F0 2F0 1F1 2F1 2I0 2W0 1F2 1I0 1W0 2F2 2I1 2W1 1I1 2I2 1I2 1W1 2W2 1W2
        """,
    ),
}

FORWARD_ONLY = """
        rank 0  0F0 0F1 0F2 3F0 .   3F1 .   3F2
        rank 1  .   1F0 2F0 1F1 2F1 1F2 2F2 .
        """

SHORT_GROUP = """
        rank 0  0F0 0F1 2F0 2F1 0F2 .   2B0---- .   2B1---- 2F2 0B0---- 0B1---- .   2B2---- .   .
        rank 1  .   1F0 1F1 3F0 3B0---- 3F1 3B1---- 1F2 1B0---- 1B1---- 3F2 3B2---- .   .   1B2----
        """


def drawn(schedule):
    return render_text(simulate(lower(schedule)).timeline)


def test_every_schedule_of_the_table_is_drawn():
    assert set(DRAWINGS) == set(GENERATORS)


@pytest.mark.parametrize("name", DRAWINGS)
def test_schedule_is_the_one_drawn_in_its_docstring(name):
    ranks, microbatches, chunks, drawing = DRAWINGS[name]
    expected = textwrap.dedent(drawing).strip()
    assert drawn(generate(name, ranks, microbatches, chunks)) == expected
    assert expected in inspect.getdoc(GENERATORS[name].build).replace("    rank", "rank")


def test_evaluation_is_the_one_drawn_in_its_docstring():
    expected = textwrap.dedent(FORWARD_ONLY).strip()
    assert drawn(forward_only(4, 3, (0, 1, 1, 0))) == expected
    assert expected in inspect.getdoc(forward_only).replace("    rank", "rank")


def test_interleaved_last_group_is_short_where_ranks_do_not_divide_microbatches():
    drawing = drawn(generate("Interleaved1F1B", 2, 3, 2)).splitlines()
    expected = textwrap.dedent(SHORT_GROUP).strip().splitlines()
    assert [line[: len(row)] for line, row in zip(drawing, expected, strict=True)] == expected


def test_500_random_schedules_are_lowered_and_verified():
    rng = random.Random(0)
    for _ in range(500):
        name = rng.choice(list(GENERATORS))
        chunks = rng.randint(2, 4) if name == "Interleaved1F1B" else 1
        schedule = generate(name, rng.randint(1, 6), rng.randint(1, 14), chunks)
        verify(lower(schedule, tied=rng.random() < 0.5))


@pytest.mark.parametrize("name", GENERATORS)
@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("microbatches", range(1, 10))
def test_schedule_verifies_for_any_number_of_microbatches(name, ranks, microbatches):
    schedule = generate(name, ranks, microbatches, 2 if name == "Interleaved1F1B" else 1)
    verify(lower(schedule))


@pytest.mark.parametrize("ranks", [1, 2, 3, 5])
def test_declared_bounds_are_reached_and_zero_bubble_ones_are_1f1b_s_memory(ranks):
    microbatches = 3 * ranks
    peak = {
        name: verify(lower(generate(name, ranks, microbatches, chunks))).in_flight
        for name, chunks in [
            ("GPipe", 1),
            ("1F1B", 1),
            ("Interleaved1F1B", 3),
            ("ZB1P", 1),
            ("ZBV", 2),
        ]
    }
    assert peak["GPipe"] == (microbatches,) * ranks
    assert peak["1F1B"] == tuple(ranks - rank for rank in range(ranks))
    assert peak["Interleaved1F1B"] == tuple(
        2 * (ranks - rank - 1) + 2 * ranks + 1 for rank in range(ranks)
    )
    assert peak["ZB1P"] == (ranks,) * ranks
    # ZBV's stages are half as large.
    assert max(peak["ZBV"]) == 2 * max(peak["1F1B"])


def test_zero_bubble_on_one_rank_holds_one_microbatch():
    assert verify(lower(generate("ZB1P", 1, 9))).in_flight == (1,)


@pytest.mark.parametrize("placement", [None, (0, 1, 0, 1), v_placement(2), (0, 0, 1, 1), (0,) * 4])
@pytest.mark.parametrize("microbatches", [1, 2, 7])
def test_evaluation_runs_on_any_placement_and_holds_nothing(placement, microbatches):
    report = verify(lower(forward_only(4, microbatches, placement)))
    assert set(report.in_flight) == {1}


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda: generate("DualPipe", 2, 2),
            "no schedule is called 'DualPipe'; choose GPipe, 1F1B",
        ),
        (lambda: generate("1F1B", 2, 0), "2 ranks with 0 microbatches: both must be 1 or more"),
        (lambda: generate("1F1B", 2, 2, 2), r"takes 1 as stages a rank, not 2; .* Interleaved1F1B"),
        (lambda: generate("Interleaved1F1B", 2, 2), "takes 2 or more as stages a rank, not 1"),
        (lambda: generate("ZBV", 2, 2, 3), "takes 2 as stages a rank, not 3"),
        (lambda: forward_only(3, 2, (0, 1)), "a rank for each of 3 stages"),
        (lambda: forward_only(2, 2, (0, 2)), "must name each of the 3 ranks 0 … 2"),
    ],
)
def test_impossible_sizes_are_refused_by_name(call, message):
    with pytest.raises(ScheduleError, match=message):
        call()


def test_a_fixed_number_of_stages_a_rank_is_taken_by_default():
    assert stages_per_rank("ZBV") == 2
    assert generate("ZBV", 3, 1) == generate("ZBV", 3, 1, 2)
