"""`megagrid sample`: text from a checkpoint of a model that has learnt one sentence by heart."""

from __future__ import annotations

import contextlib
import io
from pathlib import Path

import pytest

from megagrid.cli import main
from megagrid.config.dump import dump
from megagrid.grid.placement import Placement
from tests.end_to_end.t0 import t0

SENTENCE = "the same run on every grid. "
BYTES = 257
"""Ids of the tokenizer of bytes, the end of a document among them."""


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run of 60 steps, prepared and trained by the commands."""
    folder = tmp_path_factory.mktemp("sample")
    (folder / "corpus.txt").write_text(SENTENCE * 400)
    corpus = str(folder / "corpus")
    prepared = ["--input", f"{corpus}.txt", "--output", corpus, "--tokenizer", "bytes"]
    config = t0(
        folder / "run",
        Placement(),
        {"model": {"vocab_size": BYTES}, "train": {"steps": 60}, "optimizer": {"lr": 1e-2}},
        {"data": {"paths": [corpus]}, "checkpoint": {"save_interval": 30}},
    )
    (folder / "recipe.toml").write_text(dump(config))
    with contextlib.redirect_stdout(io.StringIO()):
        assert main(["data", "prepare", *prepared, "--workers", "1"]) == 0
        assert main(["train", str(folder / "recipe.toml")]) == 0
    return folder / "run"


def sample(capsys: pytest.CaptureFixture, *arguments: str | Path) -> str:
    capsys.readouterr()
    assert main(["sample", *map(str, arguments)]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    return out


def test_the_likeliest_text_is_what_was_learnt(run, capsys):
    """The positions of the text go past the longest input, too."""
    prompt = (SENTENCE * 2)[5:41]
    text = sample(
        capsys, run, "--prompt", prompt, "--tokens", "40", "--temperature", "0", "--seed", "5"
    )
    assert text == (SENTENCE * 4)[5:81] + "\n"


def test_the_same_seed_writes_the_same_text_and_another_one_another(run, capsys):
    texts = [sample(capsys, run, "--temperature", "3", "--seed", seed) for seed in "112"]
    assert texts[0] == texts[1] != texts[2]


def test_one_candidate_is_the_likeliest(run, capsys):
    rest = ("--prompt", "the same", "--tokens", "10")
    assert sample(capsys, run, *rest, "--top-k", "1", "--temperature", "9") == sample(
        capsys, run, *rest, "--temperature", "0"
    )


def test_a_run_stands_for_its_newest_checkpoint(run, capsys):
    rest = ("--prompt", "the ", "--temperature", "2", "--tokens", "30")
    newest = sample(capsys, run / "checkpoints/step-00000060", *rest)
    assert sample(capsys, run, *rest) == newest
    assert sample(capsys, run / "checkpoints/step-00000030", *rest) != newest


def test_a_checkpoint_of_any_grid_writes_the_same(run, tmp_path, capsys, ranks):
    """Saved anew by two ranks that share each matrix: the text is the same."""
    again = tmp_path / "again"
    ranks.run(save_on_two_ranks, run, again, world_size=2)
    rest = ("--prompt", "the ", "--temperature", "2")
    assert sample(capsys, again, *rest) == sample(capsys, run, *rest)


def save_on_two_ranks(run: Path, again: Path) -> None:
    """Go on from the last step of `run` at TP2, which leaves nothing to do but to save."""
    import torch.distributed as dist

    from megagrid.config.load import load
    from megagrid.grid.grid import build_grid
    from megagrid.train.run import Run

    keys = {
        "parallel.tensor_parallel_size": 2,
        "checkpoint.resume": run,
        "logging.run_dir": again,
    }
    config = load(run / "config.toml", [f"{key}={value}" for key, value in keys.items()])
    resumed = Run(config, build_grid(Placement(tp=2), dist.get_rank(), "cpu", 2))
    resumed.save()


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["--tokens", "0"], "--tokens 0 writes nothing; choose at least 1"),
        (["--tokens", "many"], "argument --tokens: invalid int value: 'many'"),
        (["--temperature", "-1"], "--temperature -1.0 must be 0 or more"),
        (["--temperature", "nan"], "--temperature nan must be 0 or more"),
        (["--temperature", "inf"], "--temperature inf must be 0 or more"),
        (["--top-k", "0"], "--top-k 0 leaves nothing to draw; choose at least 1"),
        (["--seed", "-1"], "--seed -1 must be 0 or more"),
        (["--seed", "99999999999999999999"], "--seed 99999999999999999999"),
        (["--sed", "1"], "unrecognized arguments: --sed 1"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_a_bad_argument_is_one_line_and_exit_2(run, capsys, arguments, told):
    assert_mistake(capsys, [str(run), *arguments], told)


def assert_mistake(capsys: pytest.CaptureFixture, arguments: list[str], told: str) -> None:
    capsys.readouterr()
    assert main(["sample", *arguments]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    (line,) = err.splitlines()
    assert line.startswith(f"error: {told}")


def test_a_path_without_a_checkpoint_is_refused(tmp_path, capsys):
    missing = tmp_path / "missing"
    assert_mistake(capsys, [str(missing)], f"{missing} isn't a folder")
    missing.mkdir()
    assert_mistake(capsys, [str(missing)], f'CHECKPOINT="{missing}" holds no checkpoint; name')


def test_a_model_of_synthetic_tokens_has_no_text(tmp_path, capsys):
    config = t0(tmp_path, Placement(), {"train": {"steps": 1}, "model": {"num_layers": 1}})
    (tmp_path / "recipe.toml").write_text(dump(config))
    assert main(["train", str(tmp_path / "recipe.toml")]) == 0
    checkpoint = tmp_path / "checkpoints/step-00000001"
    assert_mistake(capsys, [str(tmp_path)], f"{checkpoint} has no tokenizer")
