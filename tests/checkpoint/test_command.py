"""`megagrid ckpt`: what it prints, without ranks."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from megagrid.checkpoint import Entry, save
from megagrid.cli import main
from megagrid.nn.layout import Box


@pytest.fixture
def run_folder(tmp_path: Path) -> Path:
    weights = torch.ones(4, 2)
    boxes = [
        Entry("w", (4, 2), Box((row, 0), (2, 2)), weights[row : row + 2], True) for row in (0, 2)
    ]
    boxes.append(Entry("optimizer.exp_avg.w", (4, 2), Box((0, 0), (4, 2)), weights, True))
    for step in (1, 2):
        save(tmp_path / "checkpoints", boxes, {"step": step, "consumed_samples": 8 * step})
    return tmp_path


def test_list_says_what_each_folder_is(run_folder: Path, capsys: pytest.CaptureFixture) -> None:
    checkpoints = run_folder / "checkpoints"
    (checkpoints / "step-00000003.partial").mkdir()
    (checkpoints / "step-00000002" / "trainer.json").unlink()
    assert main(["ckpt", "list", str(run_folder)]) == 0
    partial, damaged, sound = capsys.readouterr().out.splitlines()
    assert partial.startswith("step-00000003.partial") and "didn't end" in partial
    assert damaged.startswith("step-00000002 ") and "trainer.json is missing" in damaged
    assert sound.startswith("step-00000001 ") and sound.endswith("sizes are right")


def test_verify_tells_sound_from_damaged(run_folder: Path, capsys: pytest.CaptureFixture) -> None:
    checkpoint = run_folder / "checkpoints" / "step-00000001"
    assert main(["ckpt", "verify", str(checkpoint)]) == 0
    assert "is sound: 5 files" in capsys.readouterr().out
    shard = checkpoint / "model-shard-00000.safetensors"
    shard.write_bytes(shard.read_bytes()[:-1] + b"x")
    assert main(["ckpt", "verify", str(checkpoint)]) == 2
    assert f"{shard.name} has checksum" in capsys.readouterr().err


def test_inspect_shows_state_and_tensors(run_folder: Path, capsys: pytest.CaptureFixture) -> None:
    assert main(["ckpt", "inspect", str(run_folder / "checkpoints" / "step-00000002")]) == 0
    out = capsys.readouterr().out
    assert "1 weights of 8 parameters, 1 optimizer states" in out
    assert "consumed_samples        16" in out
    assert "w  float32   4 x 2               2 boxes" in out


@pytest.mark.parametrize("verb", ["list", "verify", "inspect"])
def test_a_missing_path_is_one_line(
    verb: str, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    assert main(["ckpt", verb, str(tmp_path / "nowhere")]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ") and "nowhere" in error and error.count("\n") == 1
