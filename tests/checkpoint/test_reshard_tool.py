"""`megagrid ckpt reshard` writes, byte by byte, what a run on the other grid would have written."""

from __future__ import annotations

import fcntl
import os
import resource
import shutil
from pathlib import Path

import pytest
import torch

from megagrid.checkpoint import Entry, entries, load_trainer_state, save
from megagrid.checkpoint.command import verify_checkpoint
from megagrid.checkpoint.manifest import Manifest, read_manifest
from megagrid.checkpoint.reader import TensorReader
from megagrid.checkpoint.reshard import reshard
from megagrid.cli import main
from megagrid.config.dump import dump
from megagrid.errors import CheckpointError
from megagrid.grid.placement import Placement
from megagrid.nn.layout import Box
from megagrid.train.run import Run
from tests.checkpoint.cuts import GridShape, rank_states
from tests.checkpoint.test_torn import killed_at
from tests.end_to_end.t0 import (
    ALL_AXES,
    ALONE,
    BF16,
    DP2,
    GPT,
    INTERLEAVED,
    PP2,
    SP,
    TIED,
    TP2DP2,
    TP2PP2,
    TP4,
    ZBV,
    Sections,
    Trainer,
    layers_per_stage,
    merged,
    strategy,
)
from tests.ranks import Ranks

# ------------------------------------------------------------------------------------------------
# Beside real runs

WIDE = {"train": {"precision": "fp64"}}
THREE = {"train": {"global_batch_size": 6}}
ONE_STEP = {"train": {"steps": 1}}

CASES: dict[str, tuple[Placement, Sections]] = {
    "alone": (ALONE, {}),
    "more ranks than kv heads": (TP4, {}),
    "uneven shards": (Placement(dp=3), THREE),
    "replicas": (TP2DP2, strategy("NO_SHARD")),
    "repeated shards": (
        Placement(dp=4),
        {"parallel": {"sharding_strategy": "HYBRID_SHARD", "shard_size": 2}},
    ),
    "states alone split": (Placement(dp=3), merged(THREE, strategy("ZERO1"))),
    "some modules whole": (TP2DP2, {"parallel": {"unsharded_modules": ["*norm", "layers.1"]}}),
    "every axis": (ALL_AXES, SP),
    "chunks": (PP2, INTERLEAVED),
    "uneven stages": (PP2, layers_per_stage(1, 3)),
    "mixed precision": (DP2, BF16),
    "wider": (ALONE, WIDE),
}

TIED_CASES: dict[str, tuple[Placement, Sections]] = {
    "tied over stages": (TP2PP2, {}),
    "both ends on a rank": (PP2, ZBV),
    "tied in a stage": (DP2, {}),
}


@pytest.fixture(scope="module")
def trainer(ranks: Ranks, tmp_path_factory: pytest.TempPathFactory) -> Trainer:
    return Trainer(ranks, tmp_path_factory.mktemp("runs"))


@pytest.fixture(scope="module")
def source(trainer: Trainer) -> Path:
    return trainer.train(TP2PP2, ONE_STEP).checkpoint(1)


@pytest.fixture(scope="module")
def tied_gpt(trainer: Trainer) -> Path:
    return trainer.train(TP4, GPT, TIED, ONE_STEP).checkpoint(1)


def save_at_once(run: Run) -> None:
    """What a rank does that has just resumed: save, without a step."""
    former = Path(run.config.checkpoint.resume)
    save(
        run.checkpoints,
        entries(run.engine.shards, run.engine.optimizer),
        load_trainer_state(former),
        world=run.grid.world,
        config=dump(run.config),
    )


def assert_same_files(a: Path, b: Path) -> None:
    assert names_in(a) == names_in(b)
    for name in names_in(a):
        assert (a / name).read_bytes() == (b / name).read_bytes(), name


def names_in(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def assert_resharded_as_by_ranks(
    trainer: Trainer, source: Path, placement: Placement, keys: Sections, folder: Path
) -> None:
    resume = {"checkpoint": {"resume": str(source)}}
    training = trainer.train(placement, keys, resume, work=save_at_once)
    recipe = folder / "recipe.toml"
    recipe.write_text(dump(training.config))
    out = folder / "out"
    assert main(["ckpt", "reshard", str(source), str(out), "--recipe", str(recipe)]) == 0
    assert_same_files(out, training.checkpoint(1))


@pytest.mark.parametrize("case", CASES)
def test_files_are_those_of_ranks_that_load_and_save(
    case: str, source: Path, trainer: Trainer, tmp_path: Path
) -> None:
    assert_resharded_as_by_ranks(trainer, source, *CASES[case], tmp_path)


@pytest.mark.parametrize("case", TIED_CASES)
def test_a_tied_gpts_files_too(case: str, tied_gpt: Path, trainer: Trainer, tmp_path: Path) -> None:
    placement, keys = TIED_CASES[case]
    keys = merged(GPT, TIED, keys)
    assert_resharded_as_by_ranks(trainer, tied_gpt, placement, keys, tmp_path)


def test_overrides_make_the_grid_of_the_checkpoints_own_recipe(
    source: Path, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    out, back = tmp_path / "a" / "out", tmp_path / "back"
    grid = ["parallel.tensor_parallel_size=4", "parallel.pipeline_parallel_size=1"]
    assert main(["ckpt", "reshard", str(source), str(out), *grid]) == 0
    assert capsys.readouterr().out.endswith("for tp 4 x cp 1 x dp 1 x pp 1\n")
    assert len([name for name in names_in(out) if name.startswith("model-shard")]) == 4
    assert main(["ckpt", "diff", str(source), str(out)]) == 0
    grid = ["parallel.tensor_parallel_size=2", "parallel.pipeline_parallel_size=2"]
    assert main(["ckpt", "reshard", str(out), str(back), *grid]) == 0
    assert_same_files(back, source)


# ------------------------------------------------------------------------------------------------
# What is refused


def told(capsys: pytest.CaptureFixture, *arguments: str) -> str:
    """The line that a mistake is told in."""
    capsys.readouterr()
    assert main(arguments) == 2
    (line,) = capsys.readouterr().err.splitlines()
    return line


@pytest.mark.parametrize(
    "override",
    [
        "parallel.tensor_parallel_size=3",
        "parallel.pipeline_parallel_size=5",
        "parallel.data_parallel_size=3",
        "parallel.context_parallel_size=3",
        "parallel.tensor_paralel_size=4",
        "model.num_layers=0",
    ],
)
def test_a_grid_that_the_model_doesnt_allow_is_told_as_by_train(
    override: str, source: Path, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    line = told(capsys, "ckpt", "reshard", str(source), str(tmp_path / "out"), override)
    assert line == told(capsys, "train", str(source / "config.toml"), override, "--show-config")
    assert not list(tmp_path.iterdir())


def test_another_model_is_told_as_by_a_resume(
    source: Path, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    recipe = tmp_path / "recipe.toml"
    text = (source / "config.toml").read_text()
    recipe.write_text(text.replace("ffn_hidden_size = 64", "ffn_hidden_size = 32"))
    out = str(tmp_path / "out")
    line = told(capsys, "ckpt", "reshard", str(source), out, "--recipe", str(recipe))
    assert "is of another model" in line and "layers.3.mlp.up.weight (64, 32) instead of" in line
    assert list(tmp_path.iterdir()) == [recipe]


@pytest.mark.parametrize(
    "override", ["optimizer.lr=1e-4", "model.ffn_hidden_size=32", "train.seed=2", "train.steps=9"]
)
def test_what_is_no_matter_of_the_grid_is_refused(
    override: str, source: Path, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    """It would be in the new checkpoint's recipe, where nothing shows that it was never trained."""
    grid = "parallel.tensor_parallel_size=4"
    line = told(capsys, "ckpt", "reshard", str(source), str(tmp_path / "out"), grid, override)
    assert f"command line: {override} is no matter of the grid" in line
    assert not list(tmp_path.iterdir())


def test_batches_that_the_grid_divides_may_be_stated(source: Path, tmp_path: Path) -> None:
    grid = ["parallel.data_parallel_size=4", "parallel.tensor_parallel_size=1"]
    batches = ["train.micro_batch_size=1", "train.global_batch_size=4"]
    out = tmp_path / "out"
    assert main(["ckpt", "reshard", str(source), str(out), *grid, *batches]) == 0
    assert main(["ckpt", "diff", str(source), str(out)]) == 0


@pytest.mark.parametrize("kind", ["folder", "file", "dangling link"])
def test_nothing_that_exists_is_overwritten(
    kind: str, source: Path, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    out = tmp_path / "out"
    make = {"folder": out.mkdir, "file": out.touch, "dangling link": lambda: out.symlink_to("no")}
    make[kind]()
    assert f"{out} exists" in told(capsys, "ckpt", "reshard", str(source), str(out))
    assert list(tmp_path.iterdir()) == [out]


def test_a_damaged_checkpoint_is_named_before_anything_is_written(
    source: Path, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    copy = shutil.copytree(source, tmp_path / "copy")
    shard = copy / "optimizer-shard-00003.safetensors"
    data = bytearray(shard.read_bytes())
    data[-1] ^= 1
    shard.write_bytes(data)
    line = told(capsys, "ckpt", "reshard", str(copy), str(tmp_path / "out"))
    assert f"{copy} is damaged: {shard.name} has checksum" in line
    assert list(tmp_path.iterdir()) == [copy]


def test_a_folder_that_cant_be_made_is_one_line(
    source: Path, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    (tmp_path / "file").touch()
    out = tmp_path / "file" / "out"
    line = told(capsys, "ckpt", "reshard", str(source), str(out))
    assert line.startswith(f"error: writing {out} failed: ")


# ------------------------------------------------------------------------------------------------
# By itself

ONE, TWO = GridShape(tp=2, dp=2), GridShape(pp=2)


def saved(folder: Path, *, with_optimizer: bool = True) -> TensorReader:
    states = rank_states(ONE)
    for state in states:
        state.fill()
    boxes = [
        entry
        for state in states
        for entry in entries(state.shards, state.optimizer if with_optimizer else None)
    ]
    checkpoint = save(folder, boxes, {"step": 1})
    return TensorReader(checkpoint, read_manifest(checkpoint))


def times(folder: Path) -> dict[str, int]:
    """When each file was last written to."""
    return {path.name: path.stat().st_mtime_ns for path in folder.iterdir()}


def ranks_of(grid: GridShape) -> list[list[Entry]]:
    return [state.entries for state in rank_states(grid)]


def test_what_else_lies_in_a_checkpoint_goes_along(tmp_path: Path) -> None:
    (tmp_path / "words.tokenizer.model").write_bytes(b"words")
    weight = torch.arange(4.0)
    whole = Entry("w", (4,), Box((0,), (4,)), weight, True)
    checkpoint = save(
        tmp_path / "a", [whole], {"step": 7}, extra_files=[tmp_path / "words.tokenizer.model"]
    )
    source = TensorReader(checkpoint, read_manifest(checkpoint))
    written = reshard(source, tmp_path / "out", [[whole]], config="a = 1\n")
    assert written == read_manifest(tmp_path / "out") and written.step == 7
    assert (tmp_path / "out" / "words.tokenizer.model").read_bytes() == b"words"
    assert (tmp_path / "out" / "config.toml").read_text() == "a = 1\n"
    assert load_trainer_state(tmp_path / "out") == {"step": 7}


def test_weights_alone_stay_weights_alone(tmp_path: Path) -> None:
    source = saved(tmp_path, with_optimizer=False)
    ranks = [entries(state.shards) for state in rank_states(TWO)]
    written = reshard(source, tmp_path / "out", ranks, config="")
    assert written.tensors.keys() == source.manifest.tensors.keys()
    with pytest.raises(CheckpointError, match="it lacks optimizer"):
        reshard(source, tmp_path / "more", ranks_of(TWO), config="")


def test_the_command_reshards_weights_alone(
    source: Path, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    copy = shutil.copytree(source, tmp_path / "copy")
    manifest = read_manifest(copy)
    files, tensors = (
        {name: value for name, value in whole.items() if not name.startswith("optimizer")}
        for whole in (manifest.files, manifest.tensors)
    )
    (copy / "manifest.json").write_bytes(Manifest(manifest.step, files, tensors).to_bytes())
    out = tmp_path / "out"
    assert main(["ckpt", "reshard", str(copy), str(out), "parallel.tensor_parallel_size=4"]) == 0
    assert not [name for name in names_in(out) if name.startswith("optimizer")]
    assert main(["ckpt", "diff", str(copy), str(out)]) == 0


def test_a_full_disk_is_one_line_and_leaves_nothing(tmp_path: Path) -> None:
    source, out = saved(tmp_path), tmp_path / "out"
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1024, limits[1]))
    try:
        with pytest.raises(CheckpointError, match=r"writing .*out failed: .*: File too large"):
            reshard(source, out, ranks_of(TWO), config="")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert not list(tmp_path.glob("out*"))


# torch's thread pool doesn't survive a fork; nothing here starts a thread.
@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_killed_at_any_act_it_leaves_nothing_or_all(tmp_path: Path) -> None:
    rows, columns = (
        [[Entry("w", (4, 4), Box(at, size), torch.ones(size), True)] for at in places]
        for size, places in (((2, 4), ((0, 0), (2, 0))), ((4, 2), ((0, 0), (0, 2))))
    )
    checkpoint = save(tmp_path, [entry for rank in rows for entry in rank], {"step": 1})
    source, ranks = TensorReader(checkpoint, read_manifest(checkpoint)), columns
    before = times(source.folder)
    out, partial = tmp_path / "out", tmp_path / "out.partial"
    expected = reshard(source, tmp_path / "expected", ranks, config="")
    act, left_whole = 1, 0
    while killed_at(act, lambda: reshard(source, out, ranks, config="")):
        if out.exists():
            left_whole += 1
        else:
            reshard(source, out, ranks, config="")
        assert not partial.exists()
        verify_checkpoint(out)
        assert read_manifest(out) == expected
        shutil.rmtree(out)
        act += 1
    assert act > 10 and left_whole
    assert times(source.folder) == before


def test_two_at_once_dont_write_into_each_others_folder(tmp_path: Path) -> None:
    source, out = saved(tmp_path), tmp_path / "out"
    partial = tmp_path / "out.partial"
    partial.mkdir()
    (partial / "model-shard-00000.safetensors").touch()
    handle = os.open(partial, os.O_RDONLY)
    fcntl.flock(handle, fcntl.LOCK_EX)
    with pytest.raises(CheckpointError, match=r"out\.partial is being written by another process"):
        reshard(source, out, ranks_of(TWO), config="")
    assert names_in(partial) == ["model-shard-00000.safetensors"]
    os.close(handle)
    reshard(source, out, ranks_of(TWO), config="")
    assert not partial.exists()


def test_a_box_that_no_rank_holds_is_a_fault_and_leaves_nothing(tmp_path: Path) -> None:
    source = saved(tmp_path)
    with pytest.raises(ValueError, match="invalid fill"):
        reshard(source, tmp_path / "out", ranks_of(ONE)[:3], config="")
    assert not (tmp_path / "out.partial").exists()
