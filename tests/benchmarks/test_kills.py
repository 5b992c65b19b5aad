"""The benchmark of kills: it kills, and it sees what is lost."""

from __future__ import annotations

import dataclasses
import shutil
from collections import Counter
from pathlib import Path

import pytest
import torch

from benchmarks.kills import (
    MOMENTS,
    VICTIMS,
    Kill,
    KillsError,
    Outcome,
    Pace,
    RunFolder,
    Setting,
    differences,
    harass,
    markdown,
)
from benchmarks.peers.spec import Layout
from megagrid.checkpoint import Entry, save
from megagrid.nn.layout import Box
from megagrid.train.metrics import MetricsLog, StepRecord


def test_strikes_are_drawn_by_the_seed_and_hit_saves_most():
    setting = Setting(kills=200)
    assert setting.strikes == Setting(kills=200).strikes != Setting(kills=200, seed=2).strikes
    counts = Counter(strike.moment for strike in setting.strikes)
    assert counts.keys() == MOMENTS.keys()
    assert counts["save"] > 100
    assert {strike.victim for strike in setting.strikes} == VICTIMS.keys()


def test_a_run_is_longer_than_its_lives():
    setting = Setting(kills=25)
    most = sum(strike.after + 1 for strike in setting.strikes)
    assert setting.steps > setting.save_interval * most
    assert setting.config.train.steps == setting.steps


def record(step: int, loss: float = 1.0) -> StepRecord:
    return StepRecord(
        step=step,
        loss=loss,
        grad_norm=1.0,
        lr=1e-3,
        valid_tokens=1,
        consumed_tokens=step,
        consumed_samples=step,
        sample_ids=(step - 1, step - 1),
        step_time_s=0.1,
        tokens_per_s=1.0,
        tokens_per_s_per_rank=1.0,
    )


@pytest.fixture
def finished(tmp_path: Path) -> RunFolder:
    """A run of three steps, each saved."""
    run = RunFolder(tmp_path / "run")
    log = MetricsLog(run.metrics)
    for step in (1, 2, 3):
        log.write(record(step))
        values = torch.full((4,), float(step))
        save(run.checkpoints, [Entry("w", (4,), Box((0,), (4,)), values, True)], {"step": step})
    log.close()
    return run


def altered(run: RunFolder) -> RunFolder:
    return RunFolder(shutil.copytree(run.path, run.path.with_name("altered")))


def test_a_run_is_like_its_copy_whatever_the_clock_says(finished):
    copy = altered(finished)
    slower = [dataclasses.replace(record(step), step_time_s=9.0) for step in (1, 2, 3)]
    copy.metrics.write_text("".join(one.to_json() + "\n" for one in slower))
    assert differences(copy, finished) == []


def test_a_loss_that_is_off_by_a_bit_is_seen(finished):
    copy = altered(finished)
    records = [record(1), record(2, loss=1.0 + 2**-52), record(3)]
    copy.metrics.write_text("".join(one.to_json() + "\n" for one in records))
    (line,) = differences(copy, finished)
    assert line.startswith("step 2: ")


def test_a_step_that_is_missing_or_made_twice_is_seen(finished):
    copy = altered(finished)
    for steps in ((1, 3), (1, 2, 2, 3)):
        copy.metrics.write_text("".join(record(step).to_json() + "\n" for step in steps))
        assert len(differences(copy, finished)) == 2


def test_a_weight_that_is_off_by_a_bit_is_seen(finished):
    copy = altered(finished)
    (shard,) = (copy.checkpoints / "step-00000003").glob("model-*")
    shard.write_bytes(shard.read_bytes()[:-1] + b"\x01")
    assert differences(copy, finished) == [f"step-00000003/{shard.name} is another file"]


def test_a_torn_checkpoint_is_no_excuse(finished):
    assert finished.sound_step() == finished.complete_step == 3
    (shard,) = (finished.checkpoints / "step-00000003").glob("model-*")
    shard.write_bytes(b"")
    with pytest.raises(KillsError, match=r"torn: .*step-00000003"):
        finished.sound_step()


def test_what_a_dead_run_leaves_is_told_from_checkpoints(finished):
    assert finished.unfinished() == set()
    partial = finished.checkpoints / "step-00000004.partial"
    partial.mkdir()
    (finished.checkpoints / "step-00000001.deleted").mkdir()
    left = finished.unfinished()
    assert {name for name, _ in left} == {"step-00000001.deleted", "step-00000004.partial"}
    assert finished.complete_step == 3
    assert finished.unfinished() == left  # nobody has touched them
    (partial / "shard").touch()
    assert {name for name, _ in finished.unfinished() - left} == {"step-00000004.partial"}


def test_the_table_has_a_row_for_each_kill():
    setting = Setting(kills=3)
    kills = [
        Kill(strike, strike.victim, True, ["step-00000004.partial"], 2, 2, lost, 0.5)
        for strike, lost in zip(setting.strikes, (0, 2, 2), strict=True)
    ]
    text = markdown(setting, Outcome({"at once": Pace(1.0, 0.1, 0.05)}, kills))
    assert "during a save: 3; left something unfinished: 3" in text
    assert "steps lost: kills: 0: 1, 2: 2" in text
    assert sum(line.startswith("| ") for line in text.splitlines()) == 1 + 3


@pytest.mark.slow
def test_a_run_that_is_killed_four_times_is_the_run_that_was_left_alone(tmp_path):
    """Saving behind its training: what a save at once leaves, killed at any of its acts, is in
    `tests/checkpoint/test_torn.py`."""
    setting = Setting(layout=Layout(dp=2), kills=4, seed=130, modes=("behind",), hidden=64)
    outcome = harass(setting, tmp_path)
    assert [kill.strike for kill in outcome.kills] == setting.strikes
    assert outcome.summary["kills"] == 4
