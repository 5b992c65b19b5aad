"""`megagrid ckpt`: what it prints, without ranks."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from megagrid.checkpoint import Entry, save
from megagrid.checkpoint.manifest import Manifest, read_manifest
from megagrid.cli import main
from megagrid.nn.layout import Box

SHARD = "model-shard-00000.safetensors"


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


def checkpoint_of(run_folder: Path, step: int) -> Path:
    return run_folder / "checkpoints" / f"step-{step:08}"


def damage(checkpoint: Path) -> None:
    shard = checkpoint / SHARD
    shard.write_bytes(shard.read_bytes()[:-1] + b"x")


def told(capsys: pytest.CaptureFixture, *arguments: object) -> str:
    """The line that a mistake is told in."""
    assert main(list(map(str, arguments))) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ") and error.count("\n") == 1
    return error


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
    checkpoint = checkpoint_of(run_folder, 1)
    assert main(["ckpt", "verify", str(checkpoint)]) == 0
    assert "is sound: 5 files" in capsys.readouterr().out
    damage(checkpoint)
    assert f"{SHARD} has checksum" in told(capsys, "ckpt", "verify", checkpoint)


def test_verify_of_a_run_verifies_each_checkpoint(
    run_folder: Path, capsys: pytest.CaptureFixture
) -> None:
    first, second = (checkpoint_of(run_folder, step) for step in (1, 2))
    for path in (run_folder, run_folder / "checkpoints"):
        assert main(["ckpt", "verify", str(path)]) == 0
        sound = [line.partition(" is sound")[0] for line in capsys.readouterr().out.splitlines()]
        assert sound == [str(second), str(first)]
    damage(second)
    assert main(["ckpt", "verify", str(run_folder)]) == 2
    printed = capsys.readouterr()
    assert printed.out.startswith(f"{first} is sound") and f"{second} is damaged" in printed.err


def test_inspect_shows_state_and_tensors(run_folder: Path, capsys: pytest.CaptureFixture) -> None:
    for path in (checkpoint_of(run_folder, 2), run_folder):
        assert main(["ckpt", "inspect", str(path)]) == 0
        out = capsys.readouterr().out
        assert "1 weights of 8 parameters, 1 optimizer states" in out
        assert "consumed_samples        16" in out
        assert "w  float32   4 x 2               2 boxes" in out


DIFFERENT = """\
A  {a}
B  {b}
recipe: 1 key differs, which doesn't count
  optimizer.lr  0.1  0.2
trainer's state: 1 key differs
  consumed_samples  8  -
weights: 2 of 3 differ
  layers.2.wq.weight
    1 of 6 values differ, by up to 0.5 (relative: 0.333); the first at [1, 0]: 1 and 1.5
  layers.10.wq.weight
    2 x 3 in A, 3 x 2 in B
optimizer states: all 1 equal
A and B differ
"""


def test_diff_names_what_differs_in_the_models_order(
    tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    def saved(name: str, layer2: torch.Tensor, layer10: torch.Tensor, **settings) -> Path:
        state = settings.pop("state")
        tensors = {
            "layers.10.wq.weight": layer10,
            "layers.2.wq.weight": layer2,
            "embedding.weight": torch.ones(2),
            "optimizer.exp_avg.embedding.weight": torch.zeros(2),
        }
        boxes = [
            Entry(name, shape, Box((0,) * len(shape), shape), tensor, True)
            for name, tensor in tensors.items()
            for shape in [tuple(tensor.shape)]
        ]
        return save(tmp_path / name, boxes, {"step": 1, **state}, **settings)

    ones, changed = torch.ones(2, 3), torch.ones(2, 3)
    changed[1, 0] = 1.5
    recipes = ({"config": f"[optimizer]\nlr = {lr}\n"} for lr in (0.1, 0.2))
    a = saved("a", ones, ones, state={"consumed_samples": 8}, **next(recipes))
    b = saved("b", changed, torch.ones(3, 2), state={}, **next(recipes))
    runs = [str(tmp_path / "a"), str(tmp_path / "b")]
    assert main(["ckpt", "diff", *runs]) == 1
    assert capsys.readouterr().out == DIFFERENT.format(a=a, b=b)
    assert main(["ckpt", "diff", *runs, "--weights-only", "--limit", "1"]) == 1
    out = capsys.readouterr().out
    assert "and 1 more" in out and "consumed" not in out and "optimizer" not in out
    assert main(["ckpt", "diff", runs[0], str(a)]) == 0
    assert capsys.readouterr().out.endswith("A and B are equal\n")


def test_a_runs_newest_is_taken_and_what_was_passed_over_is_told(
    run_folder: Path, capsys: pytest.CaptureFixture
) -> None:
    first, second = (checkpoint_of(run_folder, step) for step in (1, 2))
    assert main(["ckpt", "diff", str(run_folder), str(first)]) == 1
    assert capsys.readouterr().out.startswith(f"A  {second}\n")
    (second / SHARD).unlink()
    assert main(["ckpt", "diff", str(run_folder), str(first)]) == 0
    printed = capsys.readouterr()
    assert printed.out.startswith(f"A  {first}\n")
    assert printed.err == f"passed over: {second} is damaged: {SHARD} is missing\n"
    assert f"{SHARD} is missing" in told(capsys, "ckpt", "diff", second, first)


def test_a_flipped_bit_is_no_difference_of_trainings(
    run_folder: Path, capsys: pytest.CaptureFixture
) -> None:
    first, second = (checkpoint_of(run_folder, step) for step in (1, 2))
    damage(second)
    assert f"{second} is damaged: {SHARD} has checksum" in told(
        capsys, "ckpt", "diff", second, first
    )
    assert main(["ckpt", "diff", str(run_folder), str(first)]) == 0
    assert f"passed over: {second} is damaged" in capsys.readouterr().err


def test_inspect_says_what_is_missing(run_folder: Path, capsys: pytest.CaptureFixture) -> None:
    checkpoint = checkpoint_of(run_folder, 2)
    (checkpoint / SHARD).unlink()
    assert main(["ckpt", "inspect", str(checkpoint)]) == 0
    assert f"not sound: {SHARD} is missing\n" in capsys.readouterr().out


def test_a_pipe_by_the_name_of_a_manifest_is_not_waited_for(
    run_folder: Path, capsys: pytest.CaptureFixture
) -> None:
    checkpoint = checkpoint_of(run_folder, 2)
    (checkpoint / "manifest.json").unlink()
    os.mkfifo(checkpoint / "manifest.json")
    assert "isn't a regular file" in told(capsys, "ckpt", "verify", checkpoint)


@pytest.mark.parametrize(
    ("text", "reason"), [("[]", "it isn't a JSON object"), ("{}", "it lacks 'format'")]
)
def test_a_manifest_of_something_else_is_told(
    text: str, reason: str, run_folder: Path, capsys: pytest.CaptureFixture
) -> None:
    checkpoint = checkpoint_of(run_folder, 2)
    (checkpoint / "manifest.json").write_text(text)
    assert f"manifest.json is damaged: {reason}" in told(capsys, "ckpt", "verify", checkpoint)


@pytest.mark.parametrize("options", [["--tolerance", "-1"], ["--tolerance", "nan"], ["--limit=-1"]])
def test_options_that_mean_nothing_are_refused(
    options: list[str], run_folder: Path, capsys: pytest.CaptureFixture
) -> None:
    error = told(capsys, "ckpt", "diff", run_folder, run_folder, *options)
    assert options[0].partition("=")[0] in error


def test_a_checkpoint_without_a_recipe_needs_one(
    run_folder: Path, capsys: pytest.CaptureFixture
) -> None:
    checkpoint = checkpoint_of(run_folder, 2)
    manifest = read_manifest(checkpoint)
    files = {name: file for name, file in manifest.files.items() if name != "config.toml"}
    without = Manifest(manifest.step, files, manifest.tensors)
    (checkpoint / "manifest.json").write_bytes(without.to_bytes())
    error = told(capsys, "ckpt", "reshard", checkpoint, run_folder / "out")
    assert f"{checkpoint} holds no config.toml; name a recipe with --recipe" in error


VERBS = {"list": 1, "verify": 1, "inspect": 1, "diff": 2, "reshard": 2}


@pytest.mark.parametrize("verb", VERBS)
def test_a_path_that_is_none_is_one_line(
    verb: str, run_folder: Path, capsys: pytest.CaptureFixture
) -> None:
    (run_folder / "r.toml").touch()
    (run_folder / "empty").mkdir()
    rest = [run_folder / "out"] * (VERBS[verb] - 1)
    for name, reason in {
        "nowhere": "doesn't exist; name the folder of a ",
        "r.toml": "is a file; name the folder of a ",
        "empty": "holds no checkpoint; name the folder of a ",
    }.items():
        assert f"{name} {reason}" in told(capsys, "ckpt", verb, run_folder / name, *rest)
    assert '"" names nothing' in told(capsys, "ckpt", verb, "", *rest)


def test_the_list_of_a_checkpoint_asks_for_a_run(
    run_folder: Path, capsys: pytest.CaptureFixture
) -> None:
    checkpoint = checkpoint_of(run_folder, 1)
    assert f"{checkpoint} is a checkpoint; name the folder of a run" in told(
        capsys, "ckpt", "list", checkpoint
    )


def test_what_the_system_refuses_is_one_line(capsys: pytest.CaptureFixture) -> None:
    assert "File name too long" in told(capsys, "ckpt", "verify", "x" * 5000)
