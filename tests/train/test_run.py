"""A run on one process: what it writes, says and starts from."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from megagrid.config.load import load
from megagrid.config.schema import Config
from megagrid.errors import CheckpointError, MegagridError
from megagrid.grid.grid import build_grid
from megagrid.grid.placement import Placement
from megagrid.health.heart import Pulse
from megagrid.plan.hardware import find_device
from megagrid.train import attempt as attempt_module
from megagrid.train.metrics import read_records
from megagrid.train.recording import peak_flops
from megagrid.train.run import Progress, Run
from tests.end_to_end.t0 import Sections, t0

SMALL = {"model": {"num_layers": 1}, "train": {"steps": 3, "global_batch_size": 4}}
EVERY_STEP = {"checkpoint": {"save_interval": 1}}
LATEST = {"checkpoint": {"resume": "latest"}}
MORE_STEPS = {"train": {"steps": 5}}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "run"


def config_of(folder: Path, *parts: Sections) -> Config:
    return t0(folder, Placement(), SMALL, *parts)


def make(config: Config, pulse: Pulse | None = None) -> Run:
    grid = build_grid(Placement(), 0, "cpu", config.model.num_kv_heads)
    return Run(config, grid, pulse=pulse)


def train(folder: Path, *parts: Sections) -> Run:
    run = make(config_of(folder, *parts))
    run.run()
    return run


def steps_of(folder: Path) -> list[int]:
    return [record.step for record in read_records(folder / "metrics.jsonl")]


def test_a_run_leaves_its_config_its_records_and_its_last_checkpoint(folder):
    run = train(folder)
    found = {path.name for path in folder.iterdir() if not path.name.startswith(".")}
    assert found == {"config.toml", "metrics.jsonl", "saves.jsonl", "checkpoints"}
    assert load(folder / "config.toml") == run.config
    assert load(folder / "checkpoints/step-00000003/config.toml") == run.config
    assert steps_of(folder) == [1, 2, 3]
    assert run.progress == Progress(step=3, consumed_samples=12, consumed_tokens=384, updates=3)


def test_the_config_in_the_folder_trains_the_same_run_again(folder, tmp_path):
    train(folder)
    again = load(folder / "config.toml", [f"logging.run_dir={tmp_path / 'again'}"])
    make(again).run()
    losses = [
        [record.loss for record in read_records(path / "metrics.jsonl")]
        for path in (folder, tmp_path / "again")
    ]
    assert losses[0] == losses[1]


def test_latest_without_a_checkpoint_is_a_fresh_start_that_says_so(folder, capsys):
    train(folder, LATEST)
    assert capsys.readouterr().out.splitlines()[0] == "no checkpoint yet: a fresh start"
    assert steps_of(folder) == [1, 2, 3]


def test_a_damaged_newest_checkpoint_is_passed_over_aloud(folder, capsys):
    train(folder, EVERY_STEP)
    damaged = folder / "checkpoints/step-00000003"
    next(damaged.glob("model-*")).write_bytes(b"")
    capsys.readouterr()
    train(folder, LATEST, MORE_STEPS)
    passed, resumed, *_ = capsys.readouterr().out.splitlines()
    assert passed.startswith(f"passed over: {damaged} is damaged: model-")
    assert resumed == f"resumed from {folder}/checkpoints/step-00000002 at step 2"
    assert steps_of(folder) == [1, 2, 3, 4, 5]


@pytest.mark.parametrize(
    ("keys", "warning"),
    [
        ({}, None),
        ({"train": {"seed": 7}}, "warning: train.seed is 7, the checkpoint was trained with 1234"),
        ({"data": {"paths": ["synthetic:50"]}}, "warning: the data's fingerprint is "),
        (
            {"data": {"valid_fraction": 0.25}},
            "warning: data.valid_fraction is 0.25, the checkpoint",
        ),
        ({"model": {"rope_theta": 500.0}}, "warning: model.rope_theta is 500.0, the checkpoint"),
    ],
    ids=["same", "seed", "data", "split", "model"],
)
def test_a_resume_warns_of_what_makes_it_another_run(folder, capsys, keys, warning):
    train(folder)
    capsys.readouterr()
    train(folder, LATEST, MORE_STEPS, keys)
    lines = capsys.readouterr().out.splitlines()
    warnings = [line for line in lines if line.startswith("warning")]
    assert [line[: len(warning or "")] for line in warnings] == ([warning] if warning else [])


def test_a_fresh_start_in_the_folder_of_a_saved_run_is_refused(folder):
    train(folder)
    with pytest.raises(CheckpointError, match=r"has a run at step 3; .*checkpoint.resume=latest"):
        make(config_of(folder), pulse := Pulse())
    assert not pulse.owns_folder
    assert steps_of(folder) == [1, 2, 3]


def test_two_runs_never_write_to_one_folder(folder):
    first = make(config_of(folder))
    with pytest.raises(MegagridError, match="belongs to a run that is still going on"):
        make(config_of(folder, LATEST))
    first.run()
    make(config_of(folder, LATEST))


def test_a_run_without_validation_samples_has_no_validation_loss(folder):
    train(folder)
    assert [record.valid_loss for record in read_records(folder / "metrics.jsonl")] == [None] * 3


@pytest.mark.parametrize("prefetch", [0, 2])
def test_a_step_that_fails_closes_what_the_run_has_opened(folder, monkeypatch, prefetch):
    """The records up to it are on disk, and no thread goes on reading."""

    def fail(engine, batches, step, *rest, **more):
        if step == 3:
            raise ZeroDivisionError
        return compute_gradients(engine, batches, step, *rest, **more)

    compute_gradients = attempt_module.compute_gradients
    monkeypatch.setattr(attempt_module, "compute_gradients", fail)
    with pytest.raises(ZeroDivisionError):
        train(folder, {"data": {"prefetch": prefetch}})
    assert steps_of(folder) == [1, 2]
    assert "batches" not in {thread.name for thread in threading.enumerate()}
    assert not (folder / "checkpoints").exists()


def test_a_diverged_step_is_not_made(folder):
    """The message tells the step, and no record, update or checkpoint has it."""
    run = make(config_of(folder, EVERY_STEP))
    run.engine.shards[0].tensor.fill_(float("inf"))
    before = run.engine.shards[-1].tensor.clone()
    with pytest.raises(MegagridError, match="step 1: loss nan"):
        run.run()
    assert (run.progress.step, run.progress.consumed_samples) == (0, 0)
    assert (run.engine.shards[-1].tensor == before).all()
    assert steps_of(folder) == []


def test_the_peak_is_the_one_stated_or_else_the_devices(folder, monkeypatch):
    import torch

    cpu, gpu = torch.device("cpu"), torch.device("cuda", 0)
    config = config_of(folder)
    stated = config_of(folder, {"logging": {"peak_tflops": 1.5}})
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA H200")
    assert peak_flops(stated, cpu) == peak_flops(stated, gpu) == 1.5e12
    assert peak_flops(config, cpu) is None
    assert peak_flops(config, gpu) == find_device("NVIDIA H200").peak_flops
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "an unknown one")
    assert peak_flops(config, gpu) is None
