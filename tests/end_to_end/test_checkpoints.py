"""What a run saves and what it refuses to start from.

Rows C8, C10, C12, C13, C16, C17, A17 and H4 of the faults that other trainers have had.
"""

from __future__ import annotations

import dataclasses
import pickle
import re
from pathlib import Path
from unittest.mock import patch

import pytest
import torch

from megagrid.checkpoint import planner
from megagrid.checkpoint.files import write_file
from megagrid.checkpoint.manifest import FILE_NAME as MANIFEST
from megagrid.checkpoint.manifest import Manifest, read_manifest
from megagrid.train.run import Run
from tests.end_to_end.t0 import (
    ALONE,
    DP2,
    PP2,
    SP,
    TIED,
    TP2,
    TP2DP2,
    TP2PP2,
    Training,
    assert_parity,
    has_begun,
    merged,
    name_of,
)


def resume(former: Training, step: int = 4) -> dict[str, dict[str, str]]:
    return {"checkpoint": {"resume": str(former.checkpoint(step))}}


# ------------------------------------------------------------------------------------------------
# What is saved


@pytest.mark.parametrize("tied", [{}, TIED], ids=["untied", "tied"])
def test_every_tensor_is_saved_whatever_the_grid(trainer, tied):
    """C10: names, shapes and dtypes are those that one process saves."""

    def saved(training: Training, step: int) -> dict[str, tuple]:
        tensors = read_manifest(training.checkpoint(step)).tensors
        return {name: (tensor.shape, tensor.dtype) for name, tensor in tensors.items()}

    expected = saved(trainer.reference(tied), 8)
    layers = {int(found[1]) for name in expected if (found := re.match(r"layers\.(\d+)", name))}
    assert layers == {0, 1, 2, 3}
    assert ("head.weight" in expected) == (not tied)
    for placement, keys in ((PP2, {}), (TP2PP2, SP), (TP2DP2, {})):
        training = trainer.train(placement, keys, tied, {"train": {"steps": 1}})
        assert saved(training, 1) == expected, name_of(placement)


@pytest.mark.parametrize("tied", [{}, TIED], ids=["untied", "tied"])
@pytest.mark.parametrize("multiple", [1, 128])
def test_rows_that_pad_the_vocabulary_stay_out_of_checkpoint_and_loss(trainer, tied, multiple):
    """H4: 61 rows are saved, whether tp ranks hold 62 of them or 256."""
    padded = {"model": {"make_vocab_size_divisible_by": multiple}}
    training = trainer.train(TP2, tied, padded)
    for name in ("embedding.weight",) if tied else ("embedding.weight", "head.weight"):
        for prefix in ("", "optimizer.exp_avg.", "optimizer.exp_avg_sq."):
            assert training.tensors(8)[prefix + name].shape == (61, 32)
    assert_parity(training.records, trainer.reference(tied).records)


@pytest.mark.parametrize(
    ("settings", "steps"),
    [
        ({"save_interval": 3}, [3, 6, 7]),
        ({"save_interval": 3, "save_at_end": False}, [3, 6]),
        ({"save_interval": 3, "keep_last": 1}, [7]),
        ({"save_interval": 3, "keep_last": 2}, [6, 7]),
        ({}, [7]),
        ({"save_at_end": False}, []),
    ],
)
def test_a_run_of_seven_steps_saves(trainer, settings, steps):
    """C13: the last step is saved, whatever the interval."""
    keys = {"train": {"steps": 7}, "model": {"num_layers": 1}, "checkpoint": settings}
    assert trainer.train(ALONE, keys).saved_steps == steps


def test_the_last_checkpoint_is_kept_when_its_step_is_also_due(trainer):
    """C13: 6 steps, every third saved, one kept: step 6 is there, sound, and goes on."""
    settings = {"checkpoint": {"save_interval": 3, "keep_last": 1}}
    former = trainer.train(DP2, {"train": {"steps": 6}}, settings)
    assert former.saved_steps == [6]
    rest = trainer.resume(former, TP2, step=6)
    assert [record.step for record in rest.records] == [7, 8]


# ------------------------------------------------------------------------------------------------
# What is refused


@pytest.mark.parametrize("placement", [TP2, PP2], ids=name_of)
@pytest.mark.parametrize(
    ("layers", "phrase", "named"),
    [(2, "it has besides", {"2", "3"}), (6, "it lacks", {"4", "5"})],
)
def test_a_checkpoint_of_another_depth_is_refused_on_every_rank(
    trainer, placement, layers, phrase, named
):
    """C8: the tensors that are missing or left over are listed, and nothing is trained."""
    former = trainer.reference()
    refused = trainer.attempt(placement, {"model": {"num_layers": layers}}, resume(former))
    (error,) = refused.errors
    assert error.startswith("CheckpointError: ")
    assert phrase in error
    assert set(re.findall(r"layers\.(\d+)\.attention\.wq\.weight", error)) == named
    assert not refused.has_begun


def test_a_checkpoint_of_another_width_is_refused_with_exit_2(trainer, cli):
    """C8."""
    keys = merged({"model": {"ffn_hidden_size": 32}}, resume(trainer.reference()))
    line = cli.mistake("train", cli.recipe(ALONE, keys))
    assert "layers.0.mlp.up.weight (64, 32) instead of (32, 32)" in line


def test_a_file_that_a_rank_has_written_and_that_is_gone_is_named(trainer, cli):
    """C17: by every rank of another grid, and by the command line."""
    former = trainer.train(TP2DP2, {"train": {"steps": 1}})
    files = sorted(former.checkpoint(1).glob("*.safetensors"))
    assert len(files) == 2 * TP2DP2.world_size
    for path in files:
        hidden = path.rename(path.with_suffix(".hidden"))
        missing = f"{former.checkpoint(1)} is damaged: {path.name} is missing"
        assert missing in cli.mistake("train", cli.recipe(ALONE, resume(former, 1)))
        assert missing in cli.mistake("ckpt", "verify", str(former.checkpoint(1)))
        (error,) = trainer.attempt(PP2, resume(former, 1)).errors
        assert error.startswith("CheckpointError: ") and missing in error
        hidden.rename(path)
    assert not has_begun(cli.run_folder)


@pytest.mark.parametrize("kind", ["nothing", "a file", "an empty folder"])
def test_a_path_without_a_checkpoint_never_trains_from_scratch(trainer, cli, tmp_path, kind):
    """C12: by the command before ranks start, and by ranks that are started otherwise."""
    path = tmp_path / "step-00000004"
    if kind == "a file":
        path.write_text("")
    elif kind == "an empty folder":
        path.mkdir()
    keys = {"checkpoint": {"resume": str(path)}}
    assert str(path) in cli.mistake("train", cli.recipe(ALONE, keys))
    refused = trainer.attempt(TP2, keys)
    (error,) = refused.errors
    assert error.startswith("CheckpointError: ")
    assert str(path) in error
    assert not refused.has_begun
    assert not has_begun(cli.run_folder)


def test_a_run_is_not_started_over_in_its_own_folder(trainer, cli):
    former = trainer.reference()
    kept = (former.folder / "metrics.jsonl").read_bytes()
    folder = {"logging": {"run_dir": str(former.folder)}}
    assert "checkpoint.resume=latest" in cli.mistake("train", cli.recipe(ALONE, folder))
    assert trainer.attempt(TP2, folder).errors != {None}
    assert (former.folder / "metrics.jsonl").read_bytes() == kept


# ------------------------------------------------------------------------------------------------
# What a checkpoint can do to whoever loads it


class Payload:
    """Makes a file when it is unpickled."""

    def __init__(self, canary: Path) -> None:
        self.canary = canary

    def __reduce__(self):
        return Path.touch, (self.canary,)


def plant(path: Path, canary: Path) -> None:
    """Replace a file of a checkpoint by a pickle, and make the manifest vouch for it."""
    path.write_bytes(pickle.dumps(Payload(canary)))
    if path.name == MANIFEST:
        return
    record = write_file(path.with_name("again"), path.read_bytes())
    path.with_name("again").unlink()
    manifest = read_manifest(path.parent)
    files = dict(manifest.files) | {path.name: record}
    (path.parent / MANIFEST).unlink()
    forged: Manifest = dataclasses.replace(manifest, files=files)
    write_file(path.parent / MANIFEST, forged.to_bytes())


def test_the_payload_works(tmp_path):
    canary = tmp_path / "CANARY"
    pickle.loads(pickle.dumps(Payload(canary)))
    assert canary.exists()


def test_no_file_of_a_checkpoint_runs_code(trainer, cli, tmp_path):
    """C16: each file in turn is a pickle that the manifest vouches for."""
    canary = tmp_path / "CANARY"
    former = trainer.train(ALONE, {"train": {"steps": 1}})
    checkpoint = former.checkpoint(1)
    recipe = cli.recipe(ALONE, resume(former, 1))
    genuine = {path.name: path.read_bytes() for path in checkpoint.iterdir()}
    assert any(name.endswith(".safetensors") for name in genuine)
    for name in genuine:
        plant(checkpoint / name, canary)
        if name != "config.toml":  # which is for people to read: a run has its own
            line = cli.mistake("train", recipe)
            assert name in line
            assert not has_begun(cli.run_folder)
        for verb in (["sample"], ["ckpt", "verify"], ["ckpt", "inspect"], ["ckpt", "list"]):
            cli(*verb, str(checkpoint))
        assert not canary.exists(), name
        for other, content in genuine.items():
            (checkpoint / other).write_bytes(content)


# ------------------------------------------------------------------------------------------------
# Weights that have no numbers


def poison_and_run(run: Run) -> None:
    """Make one weight of one rank NaN, and train."""
    if run.grid.rank == run.grid.world.size - 1:
        run.engine.shards[-1].tensor.view(-1)[0] = torch.nan
    run.run()


@pytest.mark.parametrize("placement", [ALONE, TP2, PP2, DP2, TP2PP2], ids=name_of)
def test_a_nan_in_the_weights_stops_every_rank_and_nothing_is_saved(trainer, placement):
    """A17: one rank's NaN is everyone's; the step isn't made."""
    stopped = trainer.attempt(placement, {"checkpoint": {"save_interval": 1}}, work=poison_and_run)
    (error,) = stopped.errors
    assert error.startswith("MegagridError: step 1: loss nan")
    assert stopped.saved_steps == []
    assert stopped.records == []


def save_with_a_nan(run: Run) -> None:
    """Leave a checkpoint that no run of megagrid would: its weights have a NaN."""
    run.run()
    run.engine.shards[0].tensor.view(-1)[0] = torch.nan
    with patch.object(planner, "_is_finite", return_value=True):
        run.save()


def test_a_run_from_weights_with_a_nan_exits_2_and_its_checkpoint_stays_the_latest(trainer, cli):
    """A17, by the command."""
    folder = {"logging": {"run_dir": str(cli.run_folder)}}
    trainer.train(ALONE, folder, {"train": {"steps": 2}}, work=save_with_a_nan)
    latest = {"checkpoint": {"resume": "latest", "save_interval": 1}}
    line = cli.mistake("train", cli.recipe(ALONE, latest))
    assert line.startswith("error: step 3: loss nan, gradient norm nan")
    line = cli.mistake("train", cli.recipe(ALONE, latest), "--find-nan")
    assert "find-nan: step 3, parameter embedding.weight: NaN at [0, 0], on rank 0 (" in line
    assert [path.name for path in (cli.run_folder / "checkpoints").iterdir()] == ["step-00000002"]
