"""The table of levers: all of them are recipes that run, and a tiny one shows what it should."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.memory import LEVERS, SETTINGS, SMOKE, SMOKE_LEVERS

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("setting", [*SETTINGS, *SMOKE], ids=lambda setting: setting.name)
def test_every_lever_of_a_setting_is_a_recipe_that_may_run(setting):
    for lever in setting.levers():
        setting.config(lever)


def test_every_lever_is_measured_somewhere():
    measured = {lever for setting in SETTINGS for lever in setting.levers()}
    assert measured == set(LEVERS)


@pytest.mark.slow
def test_smoke_run_finds_the_same_on_ranks_and_without_them(tmp_path):
    ran = subprocess.run(
        [sys.executable, "-m", "benchmarks.memory", "--smoke", "--out", str(tmp_path)],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert ran.returncode == 0, ran.stderr
    (setting,) = json.loads((tmp_path / "memory.json").read_text())["settings"]
    assert [row["lever"] for row in setting["rows"]] == list(SMOKE_LEVERS)
    for row in setting["rows"]:
        assert row["real"] == row["dry"] == pytest.approx(row["closed"], rel=0.1)
    assert "| recompute full |" in (tmp_path / "memory.md").read_text()
