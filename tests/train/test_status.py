"""How a run is can be told from the files in its folder, whatever has become of its ranks."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

from megagrid.checkpoint.files import FileRecord
from megagrid.checkpoint.manifest import FILE_NAME, Manifest
from megagrid.cli import main
from megagrid.config.dump import dump
from megagrid.errors import DataError
from megagrid.grid.bootstrap import Job
from megagrid.grid.placement import Placement
from megagrid.health.beat import (
    CRASH,
    DONE,
    INTERRUPT,
    LEFT_ALONE,
    LOADING,
    MISTAKEN,
    SAVING,
    STOPPED_AND_SAVED,
    TRAINING,
    Beat,
    End,
    beat_file,
    write_beat,
    write_whole,
)
from megagrid.health.presence import Presence, present_launcher
from megagrid.health.verdict import verdict_file
from megagrid.train import status as status_module
from megagrid.train.metrics import last_records, read_records
from megagrid.train.status import Status, look_at, status_of
from tests.end_to_end.t0 import t0
from tests.health.beats import NOW, beat
from tests.train.test_metrics import record

DP2 = Placement(dp=2)


class MadeUp:
    """A run's folder: 100 steps of two ranks."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        (folder / "ranks").mkdir(parents=True)
        config = t0(folder, DP2, {"train": {"steps": 100}})
        (folder / "config.toml").write_text(dump(config), encoding="utf-8")

    def steps(self, count: int, ago: float = 0.0) -> None:
        lines = [record(step, step_time_s=2.0, tokens_per_s=128.0) for step in range(1, count + 1)]
        path = self.folder / "metrics.jsonl"
        path.write_text("".join(one.to_json() + "\n" for one in lines), encoding="utf-8")
        os.utime(path, (NOW - ago, NOW - ago))

    def ranks(self, *beats: Beat) -> None:
        for one in beats:
            write_whole(beat_file(self.folder, one.rank), one.to_json())

    def checkpoint(self, step: int, *, is_sound: bool = True) -> None:
        path = self.folder / "checkpoints" / f"step-{step:08}"
        path.mkdir(parents=True)
        (path / "model").write_bytes(b"1234" if is_sound else b"12")
        manifest = Manifest(step, {"model": FileRecord(4, "0")}, {})
        (path / FILE_NAME).write_bytes(manifest.to_bytes())
        os.utime(path, (NOW - 60, NOW - 60))

    def status(self) -> Status:
        return status_of(self.folder, NOW)


@pytest.fixture
def made(tmp_path) -> MadeUp:
    return MadeUp(tmp_path / "run")


@pytest.fixture
def _now(monkeypatch):
    monkeypatch.setattr("megagrid.train.status_command.time.time", lambda: NOW)


def ranks(**keys) -> list[Beat]:
    """Both, alike."""
    return [beat(rank, DP2, **keys) for rank in range(2)]


def ended(how: str, code: int, line: str = "", ago: float = 5.0) -> End:
    return End(how, code, NOW - ago, line)


def test_a_run_that_goes_on_tells_how_far_and_how_fast(made):
    made.steps(40, ago=1.0)
    made.ranks(*ranks(job=Job("17", 2)))
    made.checkpoint(30)
    made.checkpoint(40, is_sound=False)
    found = made.status()
    assert (found.health, found.reason, found.code) == ("running", "", 10)
    assert (found.step, found.total_steps, found.seconds_left) == (40, 100, 120.0)
    assert (found.loss, found.tokens_per_s, found.since_step_s) == (record(40).loss, 128.0, 1.0)
    assert (found.checkpoint.step, found.checkpoint.age_s) == (30, 60.0)
    assert found.checkpoint.passed_over[0].startswith("step-00000040: model has 2 bytes")
    assert (found.ranks, found.ranks_here, found.hosts) == (2, 2, ("node0",))
    assert (found.job, found.restarts) == ("17", 2)


@pytest.mark.parametrize(
    ("phase", "phase_ago", "step_ago", "health"),
    [
        (TRAINING, 3000, 29, "running"),
        (TRAINING, 3000, 31, "stalled"),
        (TRAINING, 5, 3000, "running"),  # resumed a moment ago
        (SAVING, 300, 300, "running"),
        (SAVING, 601, 601, "stalled"),
        (LOADING, 300, 9000, "running"),
    ],
)
def test_a_run_is_stalled_that_makes_no_step_for_many_times_the_usual(
    made, phase, phase_ago, step_ago, health
):
    made.steps(40, ago=step_ago)
    made.ranks(*ranks(phase=phase, phase_since=NOW - phase_ago))
    assert made.status().health == health


def test_a_run_waits_for_ranks_that_have_not_begun_or_are_of_a_former_start(made):
    loading = {"phase": LOADING, "phase_since": NOW - 7}
    made.ranks(beat(0, DP2, **loading))
    found = made.status()
    assert (found.health, found.code) == ("waiting", 11)
    assert found.reason == "loading, for 7 s; rank 1 of 2 still to come"
    made.ranks(beat(1, DP2, started=NOW - 9000, time=NOW - 8000, end=ended(CRASH, 1, ago=8000)))
    assert made.status() == found


def test_a_silent_rank_is_named_with_coordinate_and_host(made):
    made.steps(40, ago=20.0)
    made.ranks(beat(0, DP2), beat(1, DP2, time=NOW - 11, host="node7"))
    found = made.status()
    assert found.silent == ("rank 1 (pp0 dp1 cp0 tp0, node7)",)
    assert (found.health, found.ranks_here) == ("running", 1)


def test_a_rank_whose_process_is_gone_from_this_host_is_silent_at_once(made):
    made.steps(40)
    here = {"host": platform.node(), "pid": 2**22 + 1}
    made.ranks(beat(0, DP2), beat(1, DP2, **here))
    assert made.status().silent == (f"rank 1 (pp0 dp1 cp0 tp0, {here['host']})",)


AHEAD = 25.0
"""Seconds by which the clock of a machine differs from those of the ranks' hosts."""


@pytest.mark.parametrize(
    ("beats_again", "health", "silent"),
    [((0, 1), "running", 0), ((0,), "running", 1), ((), "failed", 0)],
)
def test_ranks_are_silent_that_write_nothing_while_they_are_looked_at_whatever_the_clock_says(
    made, beats_again, health, silent
):
    made.steps(40, ago=1.0)
    made.ranks(beat(0, DP2), beat(1, DP2, time=NOW - 1 if 1 in beats_again else NOW - 60))
    waited = []

    def sleep(seconds: float) -> None:
        waited.append(seconds)
        made.ranks(*(beat(rank, DP2, time=NOW + 1) for rank in beats_again))

    (found,) = look_at([made.folder], lambda: NOW + AHEAD + sum(waited), sleep)
    assert waited == [3.0]
    assert (found.health, len(found.silent)) == (health, silent)
    assert found.since_step_s < 10 or health == "failed"


@pytest.mark.parametrize(
    "keys", [{"time": NOW - 700}, {"time": NOW - 9}, {"host": platform.node(), "time": NOW - 60}]
)
def test_a_run_is_looked_at_once_where_the_clock_is_no_question(made, keys):
    made.ranks(*ranks(**keys))

    def sleep(seconds: float) -> None:
        raise AssertionError(seconds)

    assert look_at([made.folder], lambda: NOW, sleep) == [made.status()]


ENDS = {
    "done": ([ended(DONE, 0)] * 2, "done", ""),
    "stopped": ([ended(STOPPED_AND_SAVED, 75)] * 2, "stopped", "by a signal, and saved"),
    "a mistake": (
        [ended(LEFT_ALONE, 3, "rank 0 lost a peer"), ended(MISTAKEN, 2, "data.paths is wrong")],
        "failed",
        "rank 1 (pp0 dp1 cp0 tp0, node0): data.paths is wrong",
    ),
    "a crash": (
        [ended(CRASH, 1, "RuntimeError: x", 4.0), ended(CRASH, 1, "ZeroDivisionError: y", 5.0)],
        "failed",
        "rank 1 (pp0 dp1 cp0 tp0, node0): ZeroDivisionError: y",
    ),
    "a killed rank": (
        [ended(LEFT_ALONE, 3, "rank 0 lost a peer"), None],
        "failed",
        "without a word since 20 s ago: rank 1 (pp0 dp1 cp0 tp0, node0); killed, or the host",
    ),
    "all killed": ([None, None], "failed", "without a word since 20 s ago: rank 0 ("),
    "a lost peer": ([ended(LEFT_ALONE, 3, "rank 0 lost")] * 2, "failed", "rank 0 lost"),
    "an interrupt": ([ended(INTERRUPT, 130)] * 2, "failed", "interrupted"),
}


@pytest.mark.parametrize(("ends", "health", "reason"), ENDS.values(), ids=ENDS)
def test_how_a_run_has_ended_is_told_from_what_its_ranks_left(made, ends, health, reason):
    made.steps(40, ago=20.0)
    made.ranks(*(beat(rank, DP2, end=end, time=NOW - 20) for rank, end in enumerate(ends)))
    found = made.status()
    assert found.health == health
    assert found.reason.startswith(reason)
    assert found.ranks_here == 0
    assert found.seconds_left is None


def test_a_verdict_is_the_reason_of_a_run_that_gave_up_waiting(made):
    made.ranks(*ranks(end=ended(LEFT_ALONE, 3, "another rank gave up"), start="b"))
    for start, line in (("a", "rank 0 hangs"), ("b", "rank 1 is stopped")):
        verdict_file(made.folder, start).write_text(json.dumps({"line": line}))
    assert (made.status().health, made.status().reason) == ("failed", "rank 1 is stopped")


def test_a_verdict_on_another_start_is_no_reason(made):
    made.ranks(*ranks(end=ended(LEFT_ALONE, 3, "rank 0 lost a peer"), start="b"))
    verdict_file(made.folder, "a").write_text(json.dumps({"line": "rank 0 hangs"}))
    assert made.status().reason == "rank 0 lost a peer"


@pytest.mark.parametrize(
    ("line", "reason"),
    [("foo", ""), ([1], ""), (None, ""), ({"line": [1]}, ""), ({"line": "it hangs"}, "it hangs")],
)
def test_a_verdict_that_is_none_hides_no_more_than_itself(made, line, reason):
    made.ranks(*ranks(end=ended(LEFT_ALONE, 3, "rank 0 lost a peer"), start="a"))
    verdict_file(made.folder, "a").write_text(json.dumps(line))
    assert made.status().reason == (reason or "rank 0 lost a peer")


NO_WORD = ["", "foo", "null", "[1]", "{}", '{"step": null}', "[" * 99_999, "\0\udcff", "1" * 9_999]


@pytest.mark.parametrize("text", NO_WORD, ids=range(len(NO_WORD)))
def test_nothing_that_may_lie_in_the_folder_is_too_much(made, text):
    made.steps(40)
    made.ranks(*ranks(end=ended(LEFT_ALONE, 3), start="a"))
    made.checkpoint(30)
    (made.folder / "ranks" / "starting").mkdir()
    for name in (
        "config.toml",
        "metrics.jsonl",
        "ranks/rank-00001.json",
        "ranks/rank-00007.json",
        "ranks/starting/rank-00000.json",
        "ranks/launcher-00000.json",
        "ranks/verdict-a.json",
        "checkpoints/step-00000030/manifest.json",
    ):
        (made.folder / name).write_bytes(text.encode(errors="surrogateescape"))
        assert made.status().code == 1


@pytest.mark.parametrize("keys", [{"time": None}, {"world_size": 10**12}, {"started": "x"}])
def test_what_looks_like_a_beat_and_is_none_counts_for_nothing(made, keys):
    values = json.loads(beat(0, DP2).to_json()) | keys
    beat_file(made.folder, 0).write_text(json.dumps(values))
    assert made.status().ranks == 0


def test_times_are_never_below_zero(made, capsys, _now):
    made.steps(40, ago=-5.0)
    made.ranks(*ranks(phase=LOADING, phase_since=NOW + 5))
    made.checkpoint(30)
    os.utime(made.folder / "checkpoints" / "step-00000030", (NOW + 5, NOW + 5))
    main(["status", str(made.folder)])
    assert "-" not in capsys.readouterr().out.replace(str(made.folder), "").replace("0-1", "")


# ------------------------------------------------------------------------------------------------
# Ranks that can't speak, and starts that aren't the run


def test_ranks_that_make_steps_but_cannot_write_beats_are_no_failure(made):
    made.steps(40, ago=3.0)
    made.ranks(*ranks(time=NOW - 60))
    assert made.status().health == "running"
    assert "ranks can't write to" in made.status().reason
    made.steps(40, ago=30.0)
    assert made.status().health == "failed"


def test_a_job_that_stands_still_with_its_launcher_is_stalled_not_dead(made):
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        now = time.time()
        times = {"started": now, "time": now, "host": platform.node(), "pid": process.pid}
        made.ranks(*ranks(**times))
        assert status_of(made.folder, now + 60).health == "stalled"
        made.ranks(*ranks(**times | {"started": now - 9000}))  # the number was another's then
        assert status_of(made.folder, now + 60).health == "failed"
        process.stdin.close()


def test_a_start_that_was_refused_the_folder_changes_nothing_of_the_run_in_there(made):
    made.steps(100)
    made.ranks(*ranks(end=ended(DONE, 0)))
    refused = ended(MISTAKEN, 2, "the folder has a run at step 100")
    for one in ranks(end=refused):
        write_beat(made.folder, replace(one, has_folder=False))
    assert made.status().health == "done"


def test_a_start_that_failed_before_there_was_a_run_says_why(made):
    write_beat(made.folder, beat(0, DP2, has_folder=False, end=ended(MISTAKEN, 2, "no such data")))
    assert (made.status().health, made.status().reason[-12:]) == ("failed", "no such data")


def test_ranks_that_start_again_are_waited_for(made):
    made.steps(40)
    made.ranks(*ranks(end=ended(CRASH, 1, "x")))
    starting = beat(0, DP2, has_folder=False, phase=LOADING, phase_since=NOW - 7)
    write_beat(made.folder, starting)
    assert (made.status().health, made.status().code) == ("waiting", 11)


@pytest.mark.parametrize(
    ("how", "ago", "health"),
    [
        (CRASH, 1, "waiting"),
        (LEFT_ALONE, 1, "waiting"),
        (STOPPED_AND_SAVED, 1, "waiting"),
        (DONE, 1, "done"),
        (CRASH, 30, "failed"),
    ],
)
def test_a_run_has_not_failed_as_long_as_a_launcher_may_start_it_again(made, how, ago, health):
    made.steps(40)
    made.ranks(*ranks(end=ended(how, 1, "rank 1 was ended by SIGKILL")))
    word = {"host": "node0", "pid": 7, "time": NOW - ago}
    (made.folder / "ranks" / "launcher-00000.json").write_text(json.dumps(word))
    assert made.status().health == health
    assert how != CRASH or "rank 1 was ended by SIGKILL" in made.status().reason


def test_a_launcher_is_there_from_its_first_word_to_its_last(made):
    presence = Presence(made.folder, 1)
    presence.show()
    assert present_launcher(made.folder, time.time()).pid == os.getpid()
    presence.withdraw()
    assert present_launcher(made.folder, time.time()) is None
    Presence(made.folder / "other", 0).show()
    assert not (made.folder / "other").exists()


def test_a_run_without_beats_is_told_by_its_records(made):
    assert made.status().health == "waiting"
    made.steps(100)
    assert made.status().health == "done"


def test_slow_ranks_are_named(made):
    made.steps(40)
    slow, usual = (beat(r, DP2, step_s=1.0, compute_s=c) for r, c in ((0, 0.9), (1, 0.3)))
    made.ranks(slow, usual)
    assert made.status().slow[0].startswith("rank 0 (pp0 dp0 cp0 tp0, node0) computes for 0.9 s")


def test_what_is_no_run_is_a_mistake(tmp_path, capsys):
    with pytest.raises(DataError, match="no run in here"):
        status_of(tmp_path, NOW)
    assert main(["status", str(tmp_path / "nowhere-*")]) == 2
    assert capsys.readouterr().err.startswith(f"error: {tmp_path}/nowhere-*: no such folder")


def test_a_file_that_is_cut_or_damaged_hides_no_more_than_itself(made):
    made.steps(40)
    path = made.folder / "metrics.jsonl"
    path.write_bytes(path.read_bytes()[:-9])
    made.ranks(*ranks())
    assert made.status().step == 39
    (made.folder / "config.toml").write_text("[from.another.version]\n")
    assert made.status().total_steps is None


def test_the_last_records_are_those_of_the_whole_file(made, monkeypatch):
    monkeypatch.setattr("megagrid.train.metrics._TAIL_BYTES", 100)
    made.steps(40)
    path = made.folder / "metrics.jsonl"
    for count in (1, 7, 40, 99):
        assert last_records(path, count) == read_records(path)[-count:]


# ------------------------------------------------------------------------------------------------
# The command


def test_a_status_is_a_page_for_people(made, capsys, _now):
    made.steps(40, ago=1.0)
    made.ranks(*ranks(job=Job("17", 1)))
    made.checkpoint(30)
    assert main(["status", str(made.folder)]) == 10
    assert capsys.readouterr().out.splitlines() == [
        f"{made.folder}: running",
        "  step        40 of 100, 40%",
        f"  loss        {record(40).loss:.4f}",
        "  pace        128 tokens/s, 2 s a step; the last 0:01 ago",
        "  left        2:00",
        "  checkpoint  step 30, 1:00 ago, sizes are right",
        "  ranks       2 of 2 beat; node0",
        "  job         17, 1 restart",
    ]


def test_a_status_is_json_for_programs(made, capsys, _now):
    made.steps(40)
    made.ranks(*ranks())
    assert main(["status", str(made.folder), "--json"]) == 10
    found = json.loads(capsys.readouterr().out)
    assert found["health"] == "running"
    assert found == json.loads(json.dumps(made.status().to_json()))


def test_several_runs_are_a_table_and_the_worst_of_them_is_the_exit_code(tmp_path, capsys, _now):
    for name, end in (("a", DONE), ("b", STOPPED_AND_SAVED), ("c", DONE)):
        run = MadeUp(tmp_path / "runs" / name)
        run.steps(100)
        run.ranks(*ranks(end=ended(end, 0)))
    for arguments in ([str(tmp_path / "runs")], [str(tmp_path / "runs" / "*")]):
        assert main(["status", *arguments]) == 75
        title, *rows = capsys.readouterr().out.splitlines()
        assert title.split()[:3] == ["run", "health", "step"]
        assert [row.split()[1:4] for row in rows] == [
            ["done", "100", "100%"],
            ["stopped", "100", "100%"],
            ["done", "100", "100%"],
        ]


def test_every_health_has_an_exit_code_and_a_place_among_the_worse(made):
    assert set(status_module.CODES) == set(status_module.WORST_FIRST)
    assert len(set(status_module.CODES.values())) == len(status_module.CODES)
    made.ranks(*ranks())
    assert replace(made.status(), health="failed").code == 1
