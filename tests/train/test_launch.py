from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure

from megagrid.cli import main
from megagrid.errors import CheckpointError, GridError, PeerError
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
def launched(monkeypatch) -> list[tuple[int, list[str], int, str]]:
    """Collects what would have been started."""
    calls: list[tuple[int, list[str], int, str]] = []

    def record(count: int, arguments: list[str], seconds_to_stop: int, device: str) -> None:
        calls.append((count, arguments, seconds_to_stop, device))

    monkeypatch.setattr(command, "start_ranks", record)
    monkeypatch.setattr(command, "_train", lambda config, stop: 0)
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
    assert launched == [(count, ["train", path, *overrides], 600, "auto")]


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
    ("rank", "launcher", "tells"),
    [(0, None, True), (1, None, False), (0, os.getppid(), False), (1, os.getppid(), False)],
)
def test_a_mistake_of_all_ranks_is_told_once(tmp_path, capsys, monkeypatch, rank, launcher, tells):
    environment = bootstrap.RankEnvironment(rank, 3, launcher=launcher)
    monkeypatch.setattr(bootstrap, "is_rank", lambda: True)
    monkeypatch.setattr(bootstrap, "read", lambda: environment)
    assert main(["train", str(recipe.write(tmp_path)), TP2]) == 2
    assert ("3 ranks can't be divided" in capsys.readouterr().err) == tells


def test_a_rank_that_is_left_alone_says_so_in_a_line(tmp_path, capsys, monkeypatch):
    def fail(config, stop):
        raise PeerError("rank 1 lost a peer")

    monkeypatch.setattr(bootstrap, "is_rank", lambda: True)
    monkeypatch.setattr(bootstrap, "read", lambda: bootstrap.RankEnvironment(1, 2))
    monkeypatch.setattr(command, "_train", fail)
    monkeypatch.setattr(os, "_exit", sys.exit)
    with pytest.raises(SystemExit, match="3"):
        main(["train", str(recipe.write(tmp_path)), TP2])
    assert capsys.readouterr().err == "rank 1 lost a peer\n"


def test_ranks_inherit_the_environment_and_share_the_cores(monkeypatch):
    monkeypatch.setattr(bootstrap, "cores", lambda: 16)
    assert bootstrap.environment_for_ranks(4, {"A": "b"})["OMP_NUM_THREADS"] == "4"
    assert bootstrap.environment_for_ranks(64, {"A": "b"})["OMP_NUM_THREADS"] == "1"
    stated = bootstrap.environment_for_ranks(4, {"OMP_NUM_THREADS": "3", "A": "b"})
    assert (stated["OMP_NUM_THREADS"], stated["A"]) == ("3", "b")


def test_more_ranks_than_the_machine_bears_are_refused(monkeypatch):
    monkeypatch.setattr(bootstrap, "cores", lambda: 2)
    with pytest.raises(GridError, match="256 ranks, too many for the 2 cores"):
        launch.start_ranks(256, ["train", "recipe.toml"], 600, "auto")


def test_a_device_that_is_not_here_is_refused_before_ranks_start(monkeypatch, capsys):
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: None)
    assert launch.main(["2", "600", "cuda", "train", "recipe.toml"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line == 'error: train.device="cuda" isn\'t here; this machine has "cpu"'


@pytest.mark.parametrize(
    ("exitcodes", "told", "code"),
    [
        ({0: 2, 1: 2}, "error: mistake of 0", 2),
        ({1: 2}, "error: mistake of 1", 2),
        ({0: 1, 3: 2}, "error: mistake of 3", 2),
        ({1: 1}, "error: rank 1 ended with exit code 1; its traceback is above", 1),
        ({2: -9}, "error: rank 2 was ended by SIGKILL", 1),
        ({0: 3, 1: -9}, "error: rank 1 was ended by SIGKILL", 1),
        ({0: 3, 1: 3}, "error: rank 0 was left alone, as it says above", 1),
        ({0: 75, 1: 75}, "", 75),
        ({0: 75, 1: -15}, "", 75),
        ({0: 75, 1: 2}, "error: mistake of 1", 2),
    ],
    ids=[
        "all",
        "another rank",
        "a rank and its peer",
        "a crash",
        "a signal",
        "a signal and its peer",
        "peers elsewhere",
        "stopped",
        "stopped, and one late",
        "not saved",
    ],
)
def test_the_reason_why_ranks_ended_is_one_line(tmp_path, capsys, exitcodes, told, code):
    failures = {
        rank: failure(tmp_path, rank, exitcode, f"Error: mistake of {rank}" if exitcode > 1 else "")
        for rank, exitcode in exitcodes.items()
    }
    assert launch._report(ChildFailedError("megagrid", failures)) == code
    assert capsys.readouterr().err == (f"{told}\n" if told else "")


@pytest.mark.parametrize(
    ("recorded", "told", "code"),
    [
        ([], "", 143),
        ([75, 75], "", 75),
        ([0, 0], "", 0),
        ([75, 2], "error: the disk is full\n", 2),
        ([None, 75], "", 75),
    ],
    ids=["nothing", "stopped", "done", "not saved", "one torn"],
)
def test_after_a_signal_the_ranks_say_how_they_ended(tmp_path, capsys, recorded, told, code):
    for rank, end in enumerate(recorded):
        path = tmp_path / "run" / "attempt_0" / str(rank) / "error.json"
        path.parent.mkdir(parents=True)
        if end is None:
            path.write_text('{"message": {"mess')
        elif end == 2:
            launch.record_mistake(CheckpointError("the disk\nis full"), str(path))
        else:
            launch.record_stop(end, str(path))
    assert launch._report_signal(tmp_path, signal.SIGTERM) == code
    assert capsys.readouterr().err == told


def test_a_rank_that_was_asked_to_stop_leaves_word_for_its_launcher(tmp_path, monkeypatch):
    def work(config, stop):
        stop.make()
        return 75

    words = str(tmp_path / "error.json")
    environment = bootstrap.RankEnvironment(1, 2, error_file=words)
    monkeypatch.setattr(bootstrap, "is_rank", lambda: True)
    monkeypatch.setattr(bootstrap, "read", lambda: environment)
    monkeypatch.setattr(command, "_train", work)
    assert main(["train", str(recipe.write(tmp_path)), TP2]) == 75
    known = ProcessFailure(local_rank=1, pid=1, exitcode=75, error_file=words)
    assert known.message["message"] == "Stopped: a signal asked the run to stop; it is saved"


@pytest.mark.slow
def test_a_mistake_that_only_ranks_can_see_is_one_line_and_exit_2(tmp_path):
    recipe.write(tmp_path)
    agent = start(
        "megagrid.train.launch", "2", "600", "cpu", "train", "recipe.toml",
        "parallel.pipeline_parallel_size=4", folder=tmp_path,
    )  # fmt: skip
    out, err = agent.communicate(timeout=240)
    assert agent.returncode == 2
    assert out == ""
    (line,) = err.splitlines()
    assert line.startswith("error: 2 ranks can't be divided by")
    assert [path.name for path in tmp_path.iterdir()] == ["recipe.toml"]
