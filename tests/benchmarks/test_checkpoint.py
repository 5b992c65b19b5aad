"""The measurement of checkpoints: its ratios are right, and everything runs."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.checkpoint import pause
from benchmarks.checkpoint.__main__ import parse, runs_of, settings_of
from benchmarks.checkpoint.throughput import ACTS, WAYS, Measurement, markdown

ROOT = Path(__file__).parents[2]

FOUND = Measurement(
    ranks=2,
    bytes={"megagrid": 2_000_000, "torch.save": 2_000_000, "dd": 1_000_000},
    seconds={
        "megagrid": {act: [1.0, 2.0] for act in ACTS},
        "torch.save": {act: [0.5, 4.0] for act in ACTS},
        "dd": {act: [1.0, 1.0] for act in ACTS},
    },
    load_before=0.0,
)


def test_ratios_are_of_speeds_within_a_round():
    assert FOUND.speeds("megagrid", "save") == [2.0, 1.0]
    assert FOUND.ratios("torch.save", "save") == [0.5, 2.0]
    assert FOUND.ratios("dd", "save") == [2.0, 1.0]


def test_the_table_has_a_row_for_each_act():
    rows = markdown([FOUND]).splitlines()[2:]
    assert [row.split(" | ")[2] for row in rows] == list(ACTS)
    assert all("1.25: 0.50 2.00" in row for row in rows)


def test_what_is_saved_has_some_hundred_megabytes():
    for setting in settings_of(parse([])):
        model = setting.config.model
        assert setting.config.parallel.data_parallel_size == setting.ranks
        assert 12 * 2 * model.vocab_size * model.hidden_size > 100e6  # embedding and head alone


TURNS = [
    pause.Turn(mode, number, 10**6, [seconds] * 3, [1.0] * 3, [1.0] * 4, load_before=0.0)
    for number in (0, 1)
    for mode, seconds in (("at once", 1.0), ("behind", 0.25 + number))
]


def test_pauses_are_put_in_relation_within_a_round():
    assert pause.ratios(TURNS, "pause") == [0.25, 1.25]
    assert pause.ratios(TURNS, "training") == [4.75 / 7, 7.75 / 7]
    text = pause.markdown(TURNS)
    assert "| behind | 1 | 0.750 (0.250–1.250) | 1.00 | 1.000 | 4.8 7.8 |" in text
    assert "pause, behind / at once, by round: 0.250 1.250" in text


def test_runs_that_save_differ_in_nothing_but_the_mode(tmp_path):
    setting = runs_of(parse([]))
    assert setting.model.ranks == 2
    at_once, behind = (setting.recipe(tmp_path, mode) for mode in pause.MODES)
    assert (at_once.checkpoint.async_save, behind.checkpoint.async_save) == (False, True)
    assert at_once == behind.model_copy(update={"checkpoint": at_once.checkpoint})


@pytest.mark.slow
def test_smoke_run_measures_every_way(tmp_path):
    command = [sys.executable, "-m", "benchmarks.checkpoint", "--smoke", "--ranks", "1", "2"]
    ran = subprocess.run(
        [*command, "--out", str(tmp_path), "--disk", str(tmp_path)],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=250,
    )
    assert ran.returncode == 0, ran.stderr
    content = json.loads((tmp_path / "checkpoint.json").read_text())
    assert [one["ranks"] for one in content["throughput"]] == [1, 2]
    for one in content["throughput"]:
        assert one["seconds"].keys() == WAYS.keys()
        assert one["bytes"]["dd"] == pytest.approx(one["bytes"]["megagrid"], rel=0.1)
        assert one["bytes"]["dd"] == pytest.approx(one["bytes"]["torch.save"], rel=0.1)
    assert [turn["mode"] for turn in content["pauses"]] == list(pause.MODES)
    assert all(len(turn["pause_s"]) == 1 for turn in content["pauses"])
    assert (tmp_path / "checkpoint.md").exists()
    assert not list(tmp_path.glob("checkpoint-*"))
