"""The comparison of schedules: what it simulates is right, and everything runs."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.schedules import PAIRS, Measurement, Setting, parse, ratios, rendered, setting_of
from megagrid.pipeline.schedules import GENERATORS

ROOT = Path(__file__).parents[2]


def measured(setting: Setting, schedule: str) -> Measurement:
    """Actions that take what unit costs say, and steps that are their makespan."""
    simulation = setting.simulation(schedule)
    stages = setting.ranks * GENERATORS[schedule].min_chunks
    costs = {
        key: [setting.ranks / stages] * stages for key in ("forward", "input_grad", "weight_grad")
    }
    seconds = [[float(simulation.makespan)] * 3] * 2
    return Measurement(seconds, seconds, float(simulation.bubble_rate), costs)


def test_ratios_agree_where_measured_is_simulated():
    setting = Setting(ranks=2, microbatches=8)
    found = {name: measured(setting, name) for name in GENERATORS}
    for row in ratios(setting, found):
        assert row["step"] == pytest.approx([row["unit_costs"]] * 2)
        assert row["simulated"] == pytest.approx(row["unit_costs"])
    by_pair = {(row["of"], row["to"]): row["unit_costs"] for row in ratios(setting, found)}
    assert by_pair["1F1B", "GPipe"] == 1
    assert by_pair["ZB1P", "1F1B"] == 25 / 27  # p-1 in place of 3 (p-1) units of bubble
    assert "ZB1P / 1F1B" in rendered(setting, found)


@pytest.mark.parametrize("arguments", [["--layers", "6"], ["--warmup", "4"], ["--steps", "1"]])
def test_settings_that_measure_nothing_are_refused(arguments):
    with pytest.raises(SystemExit):
        parse(arguments)


def test_smoke_has_layers_for_every_schedule():
    setting = setting_of(parse(["--smoke"]))
    for name in GENERATORS:
        assert sum(setting.config(name).parallel.layers_per_stage) == setting.layers


@pytest.mark.slow
def test_smoke_run_measures_every_schedule(tmp_path):
    command = [sys.executable, "-m", "benchmarks.schedules", "--smoke", "--out", str(tmp_path)]
    ran = subprocess.run(
        command,
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert ran.returncode == 0, ran.stderr
    found = json.loads((tmp_path / "schedules.json").read_text())
    assert set(found["schedules"]) == set(GENERATORS)
    assert [(row["of"], row["to"]) for row in found["ratios"]] == list(PAIRS)
    for values in found["schedules"].values():
        assert len(values["step_s"]) == 2 and all(len(turn) == 1 for turn in values["step_s"])
        assert 0 < values["bubble"] < 1
