from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure

from megagrid.cli import main
from megagrid.errors import GridError
from megagrid.grid import bootstrap
from megagrid.train import command, launch
from tests.config import recipe

REPOSITORY = Path(__file__).parents[2]
TP2 = "parallel.tensor_parallel_size=2"


def start(*command: str, folder: Path, **environment: str) -> subprocess.Popen:
    return subprocess.Popen(
        [sys.executable, "-m", *command],
        cwd=folder,
        env=os.environ | {"PYTHONPATH": str(REPOSITORY), "TMPDIR": str(folder)} | environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def failure(folder: Path, rank: int, exitcode: int, message: str | None = None) -> ProcessFailure:
    """What torchrun's agent knows of a rank; `message` is what the rank recorded."""
    path = folder / f"{rank}.json"
    if message is not None:
        extra = {"py_callstack": "", "timestamp": "1"}
        path.write_text(json.dumps({"message": {"message": message, "extraInfo": extra}}))
    return ProcessFailure(local_rank=rank, pid=rank + 1, exitcode=exitcode, error_file=str(path))


@pytest.fixture
def launched(monkeypatch) -> list[tuple[int, list[str]]]:
    """Collects what would have been started."""
    calls: list[tuple[int, list[str]]] = []

    def record(count: int, arguments: list[str]) -> None:
        calls.append((count, arguments))

    monkeypatch.setattr(command, "start_ranks", record)
    monkeypatch.setattr(command, "_train", lambda config: 0)
    return calls


@pytest.mark.parametrize(
    ("arguments", "count"),
    [
        ([TP2], 2),
        ([TP2, "parallel.data_parallel_size=2"], 4),
        ([TP2, "--nproc", "8"], 8),
        (["--nproc", "2", TP2], 2),
    ],
)
def test_a_grid_of_several_ranks_is_started_with_the_same_recipe(
    tmp_path, launched, arguments, count
):
    path = str(recipe.write(tmp_path))
    assert main(["train", path, *arguments]) == 0
    overrides = [argument for argument in arguments if "=" in argument]
    assert launched == [(count, ["train", path, *overrides])]


def test_a_grid_of_one_rank_is_trained_where_it_is(tmp_path, launched):
    assert main(["train", str(recipe.write(tmp_path))]) == 0
    assert launched == []


def test_a_rank_starts_no_ranks(tmp_path, launched, monkeypatch):
    values = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": "1"}
    for name, value in values.items():
        monkeypatch.setenv(name, value)
    assert main(["train", str(recipe.write(tmp_path)), TP2]) == 0
    assert launched == []


@pytest.mark.parametrize(
    ("rank", "launcher_reports", "tells"),
    [(0, False, True), (1, False, False), (0, True, False), (1, True, False)],
)
def test_a_mistake_of_all_ranks_is_told_once(
    tmp_path, capsys, monkeypatch, rank, launcher_reports, tells
):
    environment = bootstrap.RankEnvironment(rank, 3, launcher_reports=launcher_reports)
    monkeypatch.setattr(bootstrap, "is_rank", lambda: True)
    monkeypatch.setattr(bootstrap, "read", lambda: environment)
    assert main(["train", str(recipe.write(tmp_path)), TP2]) == 2
    assert ("3 ranks can't be divided" in capsys.readouterr().err) == tells


def test_ranks_inherit_the_environment_and_share_the_cores(monkeypatch):
    monkeypatch.setattr(bootstrap, "cores", lambda: 16)
    assert bootstrap.environment_for_ranks(4, {"A": "b"})["OMP_NUM_THREADS"] == "4"
    assert bootstrap.environment_for_ranks(64, {"A": "b"})["OMP_NUM_THREADS"] == "1"
    stated = bootstrap.environment_for_ranks(4, {"OMP_NUM_THREADS": "3", "A": "b"})
    assert (stated["OMP_NUM_THREADS"], stated["A"]) == ("3", "b")


def test_more_ranks_than_the_machine_bears_are_refused(monkeypatch):
    monkeypatch.setattr(bootstrap, "cores", lambda: 2)
    with pytest.raises(GridError, match="256 ranks, too many for the 2 cores"):
        launch.start_ranks(256, ["train", "recipe.toml"])


@pytest.mark.parametrize(
    ("exitcodes", "told", "code"),
    [
        ({0: 2, 1: 2}, "error: mistake of 0", 2),
        ({1: 2}, "error: mistake of 1", 2),
        ({0: 1, 3: 2}, "error: mistake of 3", 2),
        ({1: 1}, "error: rank 1 ended with exit code 1; its traceback is above", 1),
        ({2: -9}, "error: rank 2 was ended by SIGKILL", 1),
    ],
    ids=["all", "another rank", "a rank and its peer", "a crash", "a signal"],
)
def test_the_reason_why_ranks_ended_is_one_line(tmp_path, capsys, exitcodes, told, code):
    failures = {
        rank: failure(tmp_path, rank, exitcode, f"Error: mistake of {rank}" if exitcode > 1 else "")
        for rank, exitcode in exitcodes.items()
    }
    assert launch._report(ChildFailedError("megagrid", failures)) == code
    assert capsys.readouterr().err == f"{told}\n"


@pytest.mark.slow
def test_a_mistake_that_only_ranks_can_see_is_one_line_and_exit_2(tmp_path):
    recipe.write(tmp_path)
    agent = start(
        "megagrid.train.launch", "2", "train", "recipe.toml", "parallel.pipeline_parallel_size=4",
        folder=tmp_path, MEGAGRID_LAUNCHER="1",
    )  # fmt: skip
    out, err = agent.communicate(timeout=240)
    assert agent.returncode == 2
    assert out == ""
    (line,) = err.splitlines()
    assert line.startswith("error: 2 ranks can't be divided by")
    assert [path.name for path in tmp_path.iterdir()] == ["recipe.toml"]


@pytest.mark.slow
def test_two_runs_started_at_once_on_one_host_both_finish(tmp_path):
    recipe.write(tmp_path)
    runs = [
        start(
            "megagrid", "train", "recipe.toml", TP2, "train.device=cpu", "train.steps=1",
            "checkpoint.save_at_end=false", f"logging.run_dir={name}", folder=tmp_path,
        )
        for name in ("first", "second")
    ]  # fmt: skip
    ends = [run.communicate(timeout=240) for run in runs]
    assert [run.returncode for run in runs] == [0, 0], ends
    for name in ("first", "second"):
        assert len((tmp_path / name / "metrics.jsonl").read_text().splitlines()) == 1
