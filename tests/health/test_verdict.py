"""Of ranks that have waited too long the beats of all say which one is to blame, and in words."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from megagrid.grid.placement import Placement
from megagrid.health.beat import MISTAKEN, Beat, End
from megagrid.health.verdict import ROWS, Verdict, judge, of_this_start
from tests.health.beats import NOW, beat, waiting

LIMIT = "train.timeout_seconds=60"

RANK0 = beat(0, doing=waiting("all_reduce", "tp", 1))
RANK2 = beat(2, doing=waiting("recv", "pp", 0))
RANK3 = beat(3, doing=waiting("recv", "pp", 1))
"""Rank 1 is missing in: 0 waits along tp, and the next stage for both."""

BEGINS = (
    "rank 0 (pp0 dp0 cp0 tp0, node0) waits in all_reduce along tp with rank 1, for 59 s, longer "
    "than train.timeout_seconds=60: "
)


def verdict(*others: Beat, moved: bool = True) -> Verdict:
    """Of rank 0, and `others`; `moved`: each has written a beat between the two readings."""
    after = {one.rank: one for one in (RANK0, *others)}
    before = {
        rank: replace(one, time=one.time - 6) if moved and one.time > NOW - 5 else one
        for rank, one in after.items()
    }
    return judge(RANK0, before, after, NOW, limit=LIMIT, patience_s=10.0)


def test_a_rank_without_a_beat_is_stopped_or_dead():
    told = verdict(RANK2, RANK3, beat(1, time=NOW - 61))
    assert told.blamed == (1,)
    assert told.line == (
        f"{BEGINS}rank 1 (pp0 dp0 cp0 tp1, node0) is stopped or dead, without a beat for 61 s; "
        "before, it is in Linear.forward (nn/linear.py:88)"
    )


def test_a_rank_that_computes_is_named_with_the_place():
    told = verdict(RANK2, RANK3, beat(1, doing=replace(beat(1).doing, since=NOW - 71)))
    assert told.blamed == (1,)
    assert told.line == (
        f"{BEGINS}rank 1 (pp0 dp0 cp0 tp1, node0) is alive but is in Linear.forward "
        "(nn/linear.py:88), for 70 s"
    )


def test_a_rank_that_has_ended_is_named_with_the_reason():
    told = verdict(RANK2, RANK3, beat(1, end=End(MISTAKEN, 2, NOW - 50, "data is gone")))
    assert told.line == (
        f"{BEGINS}rank 1 (pp0 dp0 cp0 tp1, node0) has ended: mistake, data is gone"
    )


def test_a_rank_that_never_began_is_named_though_its_host_is_unknown():
    assert verdict(RANK2, RANK3).line == (f"{BEGINS}rank 1 has written no beat: it hasn't begun")


def test_beats_of_a_former_start_are_none():
    former = beat(1, started=NOW - 9000, time=NOW - 5000)
    assert of_this_start({0: RANK0, 1: former}) == {0: RANK0}
    assert verdict(RANK2, RANK3, former).line.endswith("it hasn't begun")


def test_a_rank_that_the_run_has_left_behind_says_so_and_blames_nobodys_work():
    mine = replace(RANK0, start="a")
    others = [beat(rank, start="b") for rank in (1, 2)]
    every = {one.rank: one for one in (*others, replace(RANK3, start="a"))}
    told = judge(mine, every, every, NOW, limit=LIMIT, patience_s=10.0)
    assert told.blamed == (1, 2)
    assert told.line.startswith(
        f"{BEGINS}rank 1 (pp0 dp0 cp0 tp1, node0) beats for another start of the run, which goes "
        "on without this one; rank 2 ("
    )


def test_silence_is_worse_than_work():
    """A rank that waits outside of collectives for the one that is stopped isn't blamed."""
    told = verdict(RANK2, beat(1, time=NOW - 61), beat(3))
    assert told.blamed == (1,)


def test_an_old_beat_that_is_followed_by_another_is_a_clock_that_differs():
    told = verdict(RANK2, RANK3, beat(1, time=NOW - 61, doing=waiting("all_reduce", "tp", 0)))
    assert told.blamed == (1,)
    before = {1: beat(1, time=NOW - 67)}
    after = {one.rank: one for one in (beat(1, time=NOW - 61), RANK2, RANK3)}
    moved = judge(RANK0, before, after, NOW, limit=LIMIT, patience_s=10.0)
    assert "is alive but" in moved.line


def test_ranks_of_a_group_in_different_collectives_are_told_apart():
    told = verdict(RANK2, RANK3, beat(1, doing=waiting("reduce_scatter", "tp", 0)))
    assert told.blamed == (0, 1)
    assert told.line.endswith(
        "the ranks don't do the same: rank 0 (pp0 dp0 cp0 tp0, node0) waits in all_reduce along tp "
        "with rank 1; rank 1 (pp0 dp0 cp0 tp1, node0) waits in reduce_scatter along tp with rank 0"
    )


def test_a_peer_in_a_collective_of_other_ranks_is_named():
    told = verdict(RANK2, RANK3, beat(1, doing=waiting("send", "pp", 3)))
    assert told.blamed == (1,)
    assert told.line.endswith(
        "rank 1 (pp0 dp0 cp0 tp1, node0) waits in send along pp with rank 3, for 59 s"
    )


def test_two_ends_of_a_message_do_the_same():
    sends = beat(1, doing=waiting("send", "pp", 3))
    waits = replace(RANK0, doing=waiting("all_reduce", "world", 1, 2, 3))
    after = {one.rank: one for one in (waits, sends, RANK2, RANK3)}
    told = judge(waits, after, after, NOW, limit=LIMIT, patience_s=10.0)
    assert "don't do the same" not in told.line


def test_ranks_that_all_wait_for_each_other_point_at_the_network():
    every = [beat(r, doing=waiting("all_reduce", "world", *{0, 1, 2, 3} - {r})) for r in range(4)]
    after = {one.rank: one for one in every}
    told = judge(every[0], after, after, NOW, limit=LIMIT, patience_s=10.0)
    assert told.blamed == ()
    assert told.line.endswith(
        "all of its peers wait too; messages between node0 and node1 don't arrive"
    )


def test_the_table_has_the_guilty_first_and_equals_together():
    told = verdict(RANK2, RANK3, beat(1, time=NOW - 61))
    assert told.table() == [
        "  rank 1 (pp0 dp0 cp0 tp1, node0): is stopped or dead, without a beat for 61 s; before, "
        "it is in Linear.forward (nn/linear.py:88)",
        "  ranks 2-3 (node1): waits in recv along pp, for 59 s",
        "  rank 0 (pp0 dp0 cp0 tp0, node0): waits in all_reduce along tp, for 59 s",
    ]


def test_the_table_is_short_and_the_file_whole():
    grid = Placement(dp=64)
    every = {
        r: beat(r, grid, doing=replace(beat(r, grid).doing, what=f"f{r}")) for r in range(1, 64)
    }
    waits = beat(0, grid, doing=waiting("all_reduce", "dp", *range(1, 64)))
    told = judge(waits, every, every, NOW, limit=LIMIT, patience_s=10.0)
    assert told.table()[-1] == f"  … and {64 - ROWS} rows more"
    assert "; and 60 ranks more" in told.line
    assert [rank["rank"] for rank in json.loads(told.to_json())["ranks"]] == list(range(64))


@pytest.mark.parametrize("text", ["\n", "Traceback"])
def test_a_verdict_is_one_line(text):
    assert text not in verdict(RANK2, RANK3, beat(1, time=NOW - 61)).line
