"""`megagrid bench step`: what it runs, in which order, and what it makes of the records."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import pytest

from megagrid.cli import main
from megagrid.config.load import load
from megagrid.train import bench_command
from megagrid.train.bench_command import Measurement
from megagrid.train.metrics import StepRecord
from tests.config import recipe


def record(tokens_per_s: float, peak_memory_bytes: tuple[int, ...] = (1,)) -> StepRecord:
    return StepRecord(
        step=1,
        loss=1.0,
        grad_norm=1.0,
        lr=1.0,
        valid_tokens=100,
        consumed_tokens=100,
        consumed_samples=1,
        sample_ids=(0, 0),
        step_time_s=100 / tokens_per_s,
        tokens_per_s=tokens_per_s,
        tokens_per_s_per_rank=tokens_per_s,
        peak_memory_bytes=peak_memory_bytes,
    )


def records(*rates: float) -> list[StepRecord]:
    return [record(rate) for rate in rates]


@pytest.fixture
def path(tmp_path: Path) -> str:
    return str(recipe.write(tmp_path))


@pytest.fixture
def runs(monkeypatch) -> list[list[str]]:
    """Collects the overrides of each run; the nth run makes n x 100 tokens/s, its warm-up 1."""
    started: list[list[str]] = []

    def run(command, **options):
        overrides = [argument for argument in command[5:]]
        started.append(overrides)
        keys = dict(override.split("=", 1) for override in overrides)
        folder = Path(json.loads(keys["logging.run_dir"]))
        rates = [1.0] * 2 + [100.0 * len(started)] * (int(keys["train.steps"]) - 2)
        text = "".join(one.to_json() + "\n" for one in records(*rates))
        (folder / "metrics.jsonl").write_text(text)
        return SimpleNamespace(returncode=0, stderr="")

    monkeypatch.setattr(bench_command.subprocess, "run", run)
    return started


def grid_of(overrides: list[str]) -> str:
    keys = dict(override.split("=", 1) for override in overrides)
    sizes = ("tensor", "pipeline", "data")
    return "x".join(keys[f"parallel.{size}_parallel_size"] for size in sizes)


def bench(path: str, *arguments: str) -> int:
    """Of 4 steps, 2 of them warm-up unless `arguments` say otherwise."""
    warmup = [] if "--warmup" in arguments else ["--warmup", "2"]
    return main(["bench", "step", path, *arguments, "--steps", "4", *warmup])


def test_grids_take_turns(path, runs):
    """A B A B: a machine that slows down slows all of them."""
    assert bench(path, "--grids", "tp1", "tp2pp2", "dp2", "--rounds", "2") == 0
    assert list(map(grid_of, runs)) == ["1x1x1", "2x2x1", "1x1x2"] * 2


def test_variants_of_a_recipe_take_turns_and_keep_their_keys(path, runs, capsys):
    strategies = "parallel.sharding_strategy=ZERO1", "parallel.sharding_strategy=NO_SHARD"
    two = f"{strategies[1]} train.micro_batch_size=2"
    variants = ("--with", strategies[0], "--with", two)
    assert bench(path, "--grids", "dp2", *variants, "--rounds", "2") == 0
    assert [run[0] for run in runs] == [*strategies, *strategies]
    assert ["train.micro_batch_size=2" in run for run in runs] == [False, True] * 2
    title, *rows = capsys.readouterr().out.splitlines()
    assert title.split()[:4] == ["grid", "ranks", "tokens/s", "x"]
    names = "dp2 sharding_strategy=ZERO1", "dp2 sharding_strategy=NO_SHARD micro_batch_size=2"
    assert [row.partition("  ")[0] for row in rows] == list(names)


def test_without_grids_the_recipes_is_measured(path, runs, capsys):
    assert bench(path, "parallel.tensor_parallel_size=2", "--rounds", "1") == 0
    assert list(map(grid_of, runs)) == ["2x1x1"]
    assert "tp2" in capsys.readouterr().out


def test_overrides_may_stand_anywhere_after_the_recipe(path, runs):
    early, late = "train.seed=1", "train.seq_length=16"
    assert bench(path, early, "--rounds", "1", "--grids", "tp2", late) == 0
    (overrides,) = runs
    assert grid_of(overrides) == "2x1x1"
    assert overrides[:2] == [early, late]


def test_a_run_makes_steps_and_nothing_else(path, runs):
    """No evaluation, no checkpoint, no wandb; and the recipe takes what is asked of it."""
    assert bench(path, "train.seq_length=16", "--rounds", "1") == 0
    config = load(path, runs[0])
    assert (config.train.steps, config.train.seq_length) == (4, 16)
    assert (config.evaluation.interval, config.data.valid_fraction) == (0, 0.0)
    assert (config.checkpoint.save_interval, config.checkpoint.save_at_end) == (0, False)
    assert (config.checkpoint.resume, config.logging.wandb) == (None, "off")
    assert not Path(config.logging.run_dir).exists()


def test_the_warm_up_does_not_count_and_the_ratio_is_of_the_same_round(path, runs, tmp_path):
    out = tmp_path / "deeper" / "bench.json"
    assert bench(path, "--grids", "tp1", "tp2", "--rounds", "2", "--json", str(out)) == 0
    one, two = json.loads(out.read_text())
    assert (one["grid"], one["world_size"], two["grid"], two["world_size"]) == ("tp1", 1, "tp2", 2)
    assert one["tokens_per_s_by_round"] == [100.0, 300.0]
    assert two["tokens_per_s_by_round"] == [200.0, 400.0]
    assert (one["tokens_per_s"], two["tokens_per_s"]) == (200.0, 300.0)


def test_figures_are_medians_over_the_steps_of_all_rounds():
    base = Measurement("tp1", 1, [records(100, 200, 300), records(10, 20, 30)])
    grid = Measurement("tp2", 2, [records(150, 300, 900), records(30, 40, 50)])
    assert base.tokens_per_s == 65
    assert base.step_time_s == pytest.approx((100 / 300, (100 / 30 + 1) / 2, 10))
    assert base.ratio(base) == 1
    assert grid.ratio(base) == pytest.approx((1.5 + 2) / 2)


def test_memory_is_of_the_fullest_rank():
    grid = Measurement("dp2", 2, [[record(1, (5, 7)), record(1, (6, 9))], [record(1, (8, 2))]])
    assert grid.peak_memory_bytes == 9


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["--warmup", "4"], "--warmup 4 must be below --steps 4"),
        (["--warmup", "-1"], "--warmup -1 must be below --steps 4, and not negative"),
        (["--rounds", "0"], "--rounds 0 measures nothing"),
        (["--grids", "tp"], '--grids "tp" must name sizes of tp, pp, dp and cp'),
        (["--grids", "tp2x2"], '--grids "tp2x2" must name sizes'),
        (["--grids", "tp0"], '--grids "tp0" must name sizes'),
        (["--grids", "ep2"], '--grids "ep2" must name sizes'),
        (["--grids", "tp2tp4"], '--grids "tp2tp4" names tp twice'),
        (["--grids", "tp1", "tp3"], "parallel.tensor_parallel_size=3 must divide"),
        (["train.steps=9"], "command line: train.steps is given twice, as 9 and 4"),
        (["parallel.data_parallel_size=2", "--grids", "tp1"], "command line: parallel.data_paral"),
        (["--with", "train.lr=1"], "command line: unknown key train.lr"),
        (["--grids", "dp3"], "train.global_batch_size=8 must be a multiple of"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_a_mistake_is_told_before_anything_is_measured(path, runs, capsys, arguments, told):
    assert bench(path, *arguments) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"error: {told}")
    assert runs == []


def test_a_run_that_fails_ends_the_bench_with_its_last_word(path, monkeypatch, capsys):
    failed = SimpleNamespace(returncode=1, stderr="noise\nerror: rank 1 was ended by SIGKILL\n")
    monkeypatch.setattr(bench_command.subprocess, "run", lambda *args, **options: failed)
    assert bench(path, "--grids", "tp2", "--rounds", "1") == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line == "error: tp2: rank 1 was ended by SIGKILL"


def test_a_real_run_is_measured(path, tmp_path, capsys):
    out = tmp_path / "bench.json"
    arguments = ("--grids", "tp1", "--rounds", "1", "--json", str(out))
    assert bench(path, "train.device=cpu", *arguments) == 0
    (figures,) = json.loads(out.read_text())
    fastest, median, slowest = figures["step_time_s"]
    assert 0 < fastest <= median <= slowest
    assert figures["tokens_per_s"] > 0
    assert figures["peak_memory_bytes"] > 2**24
    title, row = capsys.readouterr().out.splitlines()
    assert title.split()[:3] == ["grid", "ranks", "tokens/s"]
    assert row.split()[:2] == ["tp1", "1"]
    assert not (tmp_path / "runs").exists()
