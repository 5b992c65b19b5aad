"""A rank that computes for far longer than its equals is named, once, and no other."""

from __future__ import annotations

from pathlib import Path

import pytest

from megagrid.grid.placement import Placement
from megagrid.health.beat import DONE, Beat, End, beat_file, write_whole
from megagrid.health.stragglers import IN_A_ROW, Lookout, find_stragglers
from tests.health.beats import NOW, beat

DP4 = Placement(dp=4)


def computing(grid: Placement, *seconds: float | None, step_s: float = 1.0) -> list[Beat]:
    """A rank for each of `seconds` that it computes in a step."""
    return [
        beat(rank, grid, compute_s=one, step_s=step_s, step=10) for rank, one in enumerate(seconds)
    ]


@pytest.mark.parametrize(
    ("grid", "seconds", "slow"),
    [
        (DP4, (0.5, 0.5, 0.9, 0.5), [2]),
        (DP4, (0.5, 0.6, 0.7, 0.5), []),
        (DP4, (0.5, 0.9, 0.9, 0.5), [1, 2]),
        (DP4, (0.1, 0.4, 0.1, 0.1), []),  # nobody waits for it: it waits too, for half of the step
        (DP4, (None, 0.9, 0.5, 0.5), [1]),
        (Placement(dp=2), (0.9, 0.4), [0]),
        (Placement(dp=2), (0.9, 0.0), [0]),  # that was never seen at work
        (Placement(pp=2, dp=2), (0.9, 0.9, 0.5, 0.5), []),  # a stage that has more to do
        (Placement(pp=2, dp=2), (0.9, 0.5, 0.5, 0.5), [0]),
        (Placement(pp=4), (0.4, 0.5, 0.5, 0.95), [3]),
    ],
)
def test_slow_is_what_takes_longer_than_the_median_of_its_stage(grid, seconds, slow):
    found = find_stragglers(computing(grid, *seconds), 1.5)
    assert [one.beat.rank for one in found] == slow


def test_a_rank_that_has_ended_is_not_slow():
    one, *rest = computing(DP4, 0.9, 0.4, 0.4, 0.4)
    ended = [beat(0, DP4, compute_s=0.9, step_s=1.0, end=End(DONE, 0, NOW)), *rest]
    assert find_stragglers([one, *rest], 1.5)
    assert find_stragglers(ended, 1.5) == []


class Watched:
    """A lookout over a run of four ranks."""

    def __init__(self, run: Path) -> None:
        self.said: list[str] = []
        self._run = run
        self._lookout = Lookout(run, 1.5, self.said.append)
        (run / "ranks").mkdir()

    def see(self, step: int, *seconds: float) -> None:
        beats = [
            beat(b.rank, DP4, step=step, compute_s=b.compute_s, step_s=1.0)
            for b in computing(DP4, *seconds)
        ]
        for one in beats:
            write_whole(beat_file(self._run, one.rank), one.to_json())
        self._lookout.look(beats[0])


def test_a_slow_rank_is_named_once_after_some_steps(tmp_path):
    watched = Watched(tmp_path)
    for step in range(1, IN_A_ROW):
        watched.see(step, 0.4, 0.9, 0.4, 0.4)
        watched.see(step, 0.4, 0.9, 0.4, 0.4)  # no step since
    assert watched.said == []
    for step in range(IN_A_ROW, 9):
        watched.see(step, 0.4, 0.9, 0.4, 0.4)
    assert watched.said == [
        "slow: rank 1 (pp0 dp1 cp0 tp0, node0) computes for 0.9 s of each step, 2.2 times the "
        "0.4 s of its equals"
    ]


def test_a_rank_that_is_slow_now_and_then_is_not_named(tmp_path):
    watched = Watched(tmp_path)
    for step in range(1, 20):
        watched.see(step, 0.4, 0.4 if step % IN_A_ROW == 0 else 0.9, 0.4, 0.4)
    assert watched.said == []
