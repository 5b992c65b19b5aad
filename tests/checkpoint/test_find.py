"""Resuming takes the newest sound checkpoint, says what it passed over, and trusts no file."""

from __future__ import annotations

import pickle
import re
import shutil
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from megagrid.checkpoint import (
    Entry,
    find_checkpoint,
    load,
    load_trainer_state,
    save,
)
from megagrid.checkpoint.command import verify_checkpoint
from megagrid.checkpoint.manifest import Manifest, read_manifest
from megagrid.errors import CheckpointError
from megagrid.grid.grid import Axis
from megagrid.nn.layout import Box


def tensors(*names: str, width: int = 8) -> list[Entry]:
    return [Entry(n, (width,), Box((0,), (width,)), torch.ones(width), True) for n in names]


@pytest.fixture
def run_folder(tmp_path: Path) -> Path:
    """A run with checkpoints of steps 1, 2 and 3."""
    for step in (1, 2, 3):
        save(tmp_path / "checkpoints", tensors("w", "v"), {"step": step, "samples": 8 * step})
    return tmp_path


def step_of(run_folder: Path, step: int) -> Path:
    return run_folder / "checkpoints" / f"step-{step:08d}"


SHARD = "model-shard-00000.safetensors"


def flip_a_bit(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


def cut_short(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-2])


DAMAGE = {
    "bit flipped": (SHARD, flip_a_bit, f"{SHARD} has checksum"),
    "cut short": (SHARD, cut_short, f"{SHARD} has .* bytes instead of"),
    "shard missing": (SHARD, Path.unlink, f"{SHARD} is missing"),
    "trainer state": ("trainer.json", flip_a_bit, "trainer.json has checksum"),
    "manifest missing": ("manifest.json", Path.unlink, "no manifest.json: its save never ended"),
    "manifest cut short": ("manifest.json", cut_short, "manifest.json is damaged"),
    "manifest nested": (
        "manifest.json",
        lambda path: path.write_text("[" * 100_000),
        "manifest.json is damaged",
    ),
    "manifest flipped": (
        "manifest.json",
        lambda path: path.write_text(path.read_text().replace('"step": 3', '"step": 4')),
        "manifest.json is damaged: it doesn't match its own checksum",
    ),
}


@pytest.mark.parametrize("case", DAMAGE)
def test_a_damaged_checkpoint_is_passed_over_by_name(case: str, run_folder: Path) -> None:
    name, damage, reason = DAMAGE[case]
    damage(step_of(run_folder, 3) / name)
    for resume in ("latest", str(run_folder), str(run_folder / "checkpoints")):
        found = find_checkpoint(resume, run_folder / "checkpoints")
        assert found.path == step_of(run_folder, 2)
        assert len(found.skipped) == 1 and "step-00000003" in found.skipped[0]
        assert re.search(reason, found.skipped[0])
    with pytest.raises(CheckpointError, match=reason):
        find_checkpoint(str(step_of(run_folder, 3)), run_folder / "checkpoints")
    with pytest.raises(CheckpointError, match=reason):
        verify_checkpoint(step_of(run_folder, 3))


@pytest.mark.parametrize("case", ["bit flipped", "cut short", "shard missing"])
def test_loading_a_damaged_checkpoint_names_the_file(case: str, run_folder: Path) -> None:
    name, damage, reason = DAMAGE[case]
    damage(step_of(run_folder, 3) / name)
    with pytest.raises(CheckpointError, match=reason):
        load(step_of(run_folder, 3), tensors("w", "v"))


def test_trainer_state_is_what_was_saved(run_folder: Path) -> None:
    assert load_trainer_state(step_of(run_folder, 2)) == {"step": 2, "samples": 16}
    flip_a_bit(step_of(run_folder, 2) / "trainer.json")
    with pytest.raises(CheckpointError, match=r"trainer.json has checksum"):
        load_trainer_state(step_of(run_folder, 2))


def test_latest_of_a_run_without_checkpoints_is_a_fresh_start(tmp_path: Path) -> None:
    assert find_checkpoint("latest", tmp_path / "checkpoints") is None
    (tmp_path / "checkpoints" / "step-00000001.partial").mkdir(parents=True)
    assert find_checkpoint("latest", tmp_path / "checkpoints") is None


def test_latest_with_none_sound_is_no_fresh_start(run_folder: Path) -> None:
    for step in (1, 2, 3):
        (step_of(run_folder, step) / SHARD).unlink()
    with pytest.raises(CheckpointError, match=r"-00000003 .*-00000002 .*-00000001 "):
        find_checkpoint("latest", run_folder / "checkpoints")


@pytest.mark.parametrize("resume", ["nowhere", "checkpoints/step-00000009", "empty", "lastest"])
def test_an_explicit_path_without_a_checkpoint_is_an_error(resume: str, run_folder: Path) -> None:
    (run_folder / "empty").mkdir()
    with pytest.raises(CheckpointError, match=resume):
        find_checkpoint(str(run_folder / resume), run_folder / "checkpoints")


def test_an_older_checkpoint_can_be_named(run_folder: Path) -> None:
    found = find_checkpoint(str(step_of(run_folder, 1)), run_folder / "checkpoints")
    assert found.path == step_of(run_folder, 1)


def test_going_back_leaves_the_later_ones_aside(run_folder: Path) -> None:
    """Resumed from step 1 and saved at 2: the newest is 2, not the 3 of the way not taken."""
    save(run_folder / "checkpoints", tensors("w", "v"), {"step": 2}, keep_last=1)
    assert find_checkpoint("latest", run_folder / "checkpoints").path == step_of(run_folder, 2)
    names = sorted(path.name for path in (run_folder / "checkpoints").iterdir())
    assert names == ["step-00000002", "step-00000003.abandoned"]
    aside = run_folder / "checkpoints" / "step-00000003.abandoned"
    assert find_checkpoint(str(aside), run_folder / "checkpoints").path == aside


def find_as_a_rank(folder: Path):
    rank, size = dist.get_rank(), dist.get_world_size()
    world = Axis("world", tuple(range(size)), rank, dist.group.WORLD)
    found = find_checkpoint("latest", folder, world)
    (folder / "step-00000002" / SHARD).unlink(missing_ok=True)
    with pytest.raises(CheckpointError) as error:
        load(folder / "step-00000002", tensors("w", "v"), world=world)
    return found, str(error.value), load_trainer_state(found.path, world)


def test_ranks_agree_on_what_they_find(run_folder: Path, ranks) -> None:
    flip_a_bit(step_of(run_folder, 3) / SHARD)
    flip_a_bit(step_of(run_folder, 2) / "trainer.json")
    results = ranks.run(find_as_a_rank, run_folder / "checkpoints", world_size=2)
    assert results[0] == results[1]
    found, error, state = results[0]
    assert found.path == step_of(run_folder, 1) and len(found.skipped) == 2
    assert f"{SHARD} is missing" in error
    assert state["step"] == 1


def test_every_difference_between_model_and_checkpoint_is_listed(tmp_path: Path) -> None:
    saved = tensors("a", "b", "optimizer.exp_avg.a", "optimizer.exp_avg.b")
    checkpoint = save(tmp_path, saved, {"step": 1})
    with pytest.raises(CheckpointError) as error:
        load(checkpoint, [*tensors("a", width=4), *tensors("c", "d", "optimizer.exp_avg.a")])
    assert str(error.value) == (
        f"{checkpoint} is of another model (compare [model] with its config.toml): it lacks c, d; "
        "it has besides b (and their optimizer states); it has other shapes a (8,) instead of (4,)"
    )
    load(checkpoint, tensors("a", "b"), weights_only=True)


@pytest.mark.parametrize("layers", [0, 1, 3])
def test_a_model_of_another_depth_is_refused(layers: int, tmp_path: Path) -> None:
    def model(depth: int) -> list[Entry]:
        return tensors("embedding", *(f"layers.{layer}.w" for layer in range(depth)))

    checkpoint = save(tmp_path, model(2), {"step": 1})
    with pytest.raises(CheckpointError) as error:
        load(checkpoint, model(layers))
    assert all(
        f"layers.{layer}.w" in str(error.value) for layer in range(min(2, layers), max(2, layers))
    )


class Payload:
    """Unpickled, it touches a file."""

    def __init__(self, canary: Path) -> None:
        self.canary = canary

    def __reduce__(self):
        return (Path.touch, (self.canary,))


def test_a_planted_payload_is_never_executed(run_folder: Path, tmp_path: Path) -> None:
    canary = tmp_path / "CANARY"
    payload = pickle.dumps(Payload(canary))
    pickle.loads(payload)
    assert canary.exists(), "the payload works"
    canary.unlink()
    for name in [path.name for path in step_of(run_folder, 3).iterdir()]:
        victim = tmp_path / "victim"
        shutil.copytree(step_of(run_folder, 3), victim)
        (victim / name).write_bytes(payload)
        for read in (
            lambda: find_checkpoint(str(victim), tmp_path),  # noqa: B023
            lambda: load(victim, tensors("w", "v")),  # noqa: B023
        ):
            with pytest.raises(CheckpointError, match=name):
                read()
        shutil.rmtree(victim)
    for name in (".metadata", "model.pt", "optimizer.pkl", "__0_0.distcp"):
        (step_of(run_folder, 3) / name).write_bytes(payload)
    load(step_of(run_folder, 3), tensors("w", "v"))
    assert not canary.exists()


def test_a_checkpoint_has_no_pickle(run_folder: Path) -> None:
    for path in step_of(run_folder, 3).iterdir():
        assert path.suffix in (".json", ".toml", ".safetensors")
        with pytest.raises((pickle.UnpicklingError, ValueError, EOFError, IndexError, KeyError)):
            pickle.loads(path.read_bytes())


def test_a_manifest_cannot_point_out_of_its_folder(run_folder: Path) -> None:
    manifest = read_manifest(step_of(run_folder, 3))
    files = {"../" + name: file for name, file in manifest.files.items()}
    path = step_of(run_folder, 3) / "manifest.json"
    path.write_bytes(Manifest(3, files, manifest.tensors).to_bytes())
    with pytest.raises(CheckpointError, match="isn't the name of a file"):
        read_manifest(step_of(run_folder, 3))
