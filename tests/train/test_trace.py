"""Traces: one per step and rank, whatever stopped and resumed the run; damage is told in a line."""

from __future__ import annotations

import json

import pytest

from megagrid.errors import DataError, MegagridError
from megagrid.grid.placement import Placement
from megagrid.pipeline.schedules import Costs, Span, generate, lower, simulate
from megagrid.train.run import Run
from megagrid.train.trace import PipelineTrace, RankTrace, TraceLog, read_trace
from tests.end_to_end.t0 import t0, work_on_rank

PROGRAM = lower(generate("ZB1P", 2, 3))
GRID = Placement(pp=2)
EPOCH = 1_764_500_000.0


def timeline(program=PROGRAM, seconds: float = 0.25):
    return simulate(program, Costs.of(program.num_stages, seconds, seconds, seconds)).timeline


def trace(run, steps, *, placement=GRID, program=PROGRAM, interval=1, resume_step=0, seconds=0.25):
    """Write what every rank of the grid would."""
    for rank in range(placement.world_size):
        log = TraceLog(
            run,
            interval=interval,
            placement=placement,
            rank=rank,
            program=program,
            resume_step=resume_step,
        )
        row = timeline(program, seconds)[placement.coordinate(rank).pp]
        for step in steps:
            if log.is_due(step):
                start = EPOCH + 100 * step
                log.write(step, [Span(s.action, start + s.start, start + s.end) for s in row])
        log.close()


def read(run, step=None, dp=0, tp=0) -> PipelineTrace:
    return read_trace(run, step=step, dp=dp, tp=tp)


def test_a_step_is_read_back_as_it_ran(tmp_path):
    trace(tmp_path, [1, 2])
    found = read(tmp_path, step=1)
    assert (found.step, found.placement, found.program) == (1, GRID, PROGRAM)
    for row, expected in zip(found.timeline, timeline(), strict=True):
        assert [span.action for span in row] == [span.action for span in expected]
        assert [(s.start, s.end) for s in row] == [
            pytest.approx((s.start, s.end), abs=2e-6) for s in expected
        ]


def test_steps_are_traced_at_the_interval_and_the_last_is_read(tmp_path):
    trace(tmp_path, range(1, 12), interval=5)
    assert read(tmp_path).step == 10
    with pytest.raises(DataError, match=r"trace has no step 7; it has 5, 10"):
        read(tmp_path, step=7)


def test_without_an_interval_nothing_is_written(tmp_path):
    trace(tmp_path, [1, 2], interval=0)
    assert not list(tmp_path.iterdir())
    with pytest.raises(DataError, match=r"no traces; train with logging\.trace_interval=N"):
        read(tmp_path)


def test_resume_leaves_one_trace_per_step(tmp_path):
    trace(tmp_path, range(1, 8), seconds=1.0)
    trace(tmp_path, range(6, 10), seconds=2.0, resume_step=5)
    for rank in range(2):
        lines = (tmp_path / f"trace/rank-{rank:05d}.jsonl").read_text().splitlines()
        traces = [RankTrace.from_json(line) for line in lines]
        assert [t.step for t in traces] == list(range(1, 10))
        lengths = [round(t.spans[0].end - t.spans[0].start, 3) for t in traces]
        assert lengths == [1.0] * 5 + [2.0] * 4


def test_resume_on_another_grid_keeps_what_the_first_one_did(tmp_path):
    wide, narrow = Placement(pp=2, dp=2), Placement()
    alone = lower(generate("1F1B", 1, 6))
    trace(tmp_path, range(1, 8), placement=wide)
    trace(tmp_path, range(6, 8), placement=narrow, program=alone, resume_step=5)
    assert read(tmp_path, step=5, dp=1).program == PROGRAM
    assert read(tmp_path).program == alone
    for rank in (1, 2, 3):  # they are no more, and nor are their steps 6 and 7
        lines = (tmp_path / f"trace/rank-{rank:05d}.jsonl").read_text().splitlines()
        assert [RankTrace.from_json(line).step for line in lines] == [1, 2, 3, 4, 5]
    with pytest.raises(DataError, match=r"pipeline 1,0 isn't in a grid of dp 1 and tp 1"):
        read(tmp_path, step=7, dp=1)


def test_resume_without_tracing_drops_traces_of_steps_made_anew(tmp_path):
    trace(tmp_path, range(1, 8))
    trace(tmp_path, range(6, 8), interval=0, resume_step=5)
    assert read(tmp_path).step == 5


def test_a_last_line_torn_by_a_crash_is_left_out(tmp_path):
    trace(tmp_path, [1, 2])
    path = tmp_path / "trace/rank-00001.jsonl"
    path.write_bytes(path.read_bytes()[:-20])
    assert read(tmp_path).step == 1  # the last that all ranks have
    trace(tmp_path, [2], resume_step=1)
    assert read(tmp_path).step == 2


DAMAGES = {
    "not JSON": (lambda values: "nonsense", r"rank-00001\.jsonl:1: not a step's trace"),
    "a key lost": (lambda v: v.pop("spans"), r"rank-00001\.jsonl:1: not a step's trace \('spans'"),
    "no such action": (lambda v: v["spans"][0].__setitem__(0, "0X1"), r"'0X1' is no action"),
    "ends before it starts": (lambda v: v["spans"][0].__setitem__(2, 1.0), r"1F0 from .* to 1\.0"),
    "not a number": (lambda v: v["spans"][0].__setitem__(1, None), r"not a step's trace"),
    "nothing ran": (lambda v: v.update(spans=[]), r"no spans"),
    "an action lost": (lambda v: v["spans"].pop(), r"isn't what program-\w+\.txt says it runs"),
    "another program": (lambda v: v.update(program="program-0.txt"), r"are of different runs"),
}


@pytest.mark.parametrize(("damage", "message"), DAMAGES.values(), ids=DAMAGES)
def test_a_damaged_trace_is_told_in_one_line(tmp_path, damage, message):
    trace(tmp_path, [1])
    path = tmp_path / "trace/rank-00001.jsonl"
    values = json.loads(path.read_text())
    changed = damage(values)
    path.write_text((changed if changed == "nonsense" else json.dumps(values)) + "\n")
    with pytest.raises(DataError, match=message) as caught:
        read(tmp_path)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("missing", ["rank-00000.jsonl", "rank-00001.jsonl", "program-*.txt"])
def test_a_missing_file_is_named(tmp_path, missing):
    trace(tmp_path, [1])
    (path,) = (tmp_path / "trace").glob(missing)
    path.unlink()
    with pytest.raises(MegagridError, match=path.name):
        read(tmp_path)


def test_a_program_of_other_ranks_is_refused(tmp_path):
    trace(tmp_path, [1])
    (path,) = (tmp_path / "trace").glob("program-*.txt")
    TraceLog(
        tmp_path / "other",
        interval=1,
        placement=Placement(),
        rank=0,
        program=lower(generate("1F1B", 1, 3)),
    ).close()
    (other,) = (tmp_path / "other/trace").glob("program-*.txt")
    other.replace(path)
    with pytest.raises(DataError, match=r"program-\w+\.txt: not the program of 2 ranks"):
        read(tmp_path)


# ------------------------------------------------------------------------------------------------
# A real run


def test_a_run_traces_every_rank_at_the_interval_and_goes_on_so(ranks, tmp_path):
    """Eight steps on pp 2 x dp 2, saved at 4; from there again on pp 2."""

    def keys(**checkpoint):
        return {
            "logging": {"trace_interval": 2},
            "parallel": {"pipeline_schedule": "ZB1P"},
            "checkpoint": checkpoint,
        }

    grid, after = Placement(pp=2, dp=2), Placement(pp=2)
    config = t0(tmp_path, grid, keys(save_interval=4))
    assert {r.error for r in ranks.run(work_on_rank, config, Run.run, world_size=4)} == {None}
    for dp in range(2):
        assert read(tmp_path, dp=dp).step == 8
        assert read(tmp_path, dp=dp).program == lower(generate("ZB1P", 2, 2))
    resume = str(tmp_path / "checkpoints/step-00000004")
    config = t0(tmp_path, after, keys(resume=resume), {"train": {"steps": 6}})
    assert {r.error for r in ranks.run(work_on_rank, config, Run.run, world_size=2)} == {None}
    assert read(tmp_path).step == 6
    assert read(tmp_path).placement == after
    assert read(tmp_path).program == lower(generate("ZB1P", 2, 4))
    assert read(tmp_path, step=4, dp=1).placement == grid
