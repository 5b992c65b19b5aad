from __future__ import annotations

import logging
import os
import signal
import sys
from collections.abc import Iterator

import pytest
import torch
from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

from megagrid.cli import main
from megagrid.errors import GridError, PeerError
from megagrid.grid import bootstrap
from megagrid.launcher import agent
from megagrid.launcher.launch import Launch, check_cores
from megagrid.train import command
from tests.config import recipe

TP2 = "parallel.tensor_parallel_size=2"


@pytest.fixture(autouse=True)
def signals() -> Iterator[None]:
    """A launcher leaves them ignored, for its process ends with it."""
    former = {number: signal.getsignal(number) for number in agent.PASSED_ON}
    yield
    for number, handler in former.items():
        signal.signal(number, handler)


@pytest.fixture
def launched(monkeypatch) -> list[Launch]:
    """Collects what would have been started."""
    calls: list[Launch] = []
    monkeypatch.setattr(command, "start_ranks", calls.append)
    monkeypatch.setattr(command, "_train", lambda config, stop, environment: 0)
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
    assert launched == [Launch(path, overrides, count)]


def test_a_grid_of_one_rank_is_trained_where_it_is(tmp_path, launched):
    assert main(["train", str(recipe.write(tmp_path))]) == 0
    assert launched == []


def test_a_grid_of_one_rank_has_a_launcher_if_it_is_to_be_started_again(tmp_path, launched):
    path = str(recipe.write(tmp_path))
    assert main(["train", path, "--max-restarts", "2"]) == 0
    assert launched == [Launch(path, [], max_restarts=2)]


TWO_NODES = ("--nnodes", "2", "--node-rank", "1", "--rendezvous", "127.0.0.1:2950")


def test_each_node_starts_its_share_of_the_grid(tmp_path, launched):
    path = str(recipe.write(tmp_path))
    assert main(["train", path, TP2, "parallel.data_parallel_size=2", *TWO_NODES]) == 0
    (launch,) = launched
    assert (launch.ranks, launch.fewest, launch.most, launch.node) == (2, 2, 2, 1)
    assert launch.rendezvous == ("127.0.0.1", 2950)
    assert Launch.from_json(launch.to_json()) == launch


@pytest.mark.parametrize(
    ("where", "node", "is_warned"),
    [("127.0.0.1:2950", "0", False), ("localhost:2950", "0", False), ("192.0.2.1:2950", "0", True),
     ("192.0.2.1:2950", "1", False)],
)  # fmt: skip
def test_node_0_is_warned_of_a_rendezvous_that_is_not_there(
    tmp_path, launched, capsys, where, node, is_warned
):
    """Not refused: a container's address may be passed on to it."""
    nodes = ["--nnodes", "2", "--node-rank", node, "--rendezvous", where]
    assert main(["train", str(recipe.write(tmp_path)), TP2, "--nproc", "2", *nodes]) == 0
    assert (f"warning: --rendezvous {where}: " in capsys.readouterr().err) == is_warned
    assert len(launched) == 1


@pytest.mark.parametrize("alone", [TWO_NODES[2:4], TWO_NODES[4:]])
def test_a_node_of_a_job_of_unknown_size_does_not_begin_the_run_by_itself(
    tmp_path, launched, capsys, alone
):
    assert main(["train", str(recipe.write(tmp_path)), TP2, *alone]) == 2
    assert f"{' '.join(alone)} is of a job of several nodes" in capsys.readouterr().err
    assert launched == []
    assert main(["train", str(recipe.write(tmp_path)), TP2, "--nnodes", "1", *alone]) == 0
    assert len(launched) == 1


def test_a_node_tells_the_others_of_its_mistake(tmp_path, launched):
    arguments = [str(recipe.write(tmp_path)), 'data.paths=["nowhere"]', "--nproc", "1", *TWO_NODES]
    assert main(["train", *arguments]) == 2
    (launch,) = launched
    assert "megagrid data prepare" in launch.mistake


@pytest.mark.parametrize(
    ("overrides", "told"),
    [
        (["parallel.data_parallel_size=4"], "data_parallel_size=4 is stated"),
        (["parallel.pipeline_parallel_size=4", "model.num_layers=4"], "2 ranks can't be divided"),
        (["train.global_batch_size=4", "parallel.data_parallel_size=4",
          "parallel.min_data_parallel_size=4"], "2 ranks leave 2 for the dp axis"),
    ],
    ids=["stated", "pp", "dp"],
)  # fmt: skip
def test_a_job_that_may_lose_nodes_needs_a_grid_that_may_shrink(
    tmp_path, launched, capsys, overrides, told
):
    nodes = ["--nnodes", "1:2", *TWO_NODES[2:], "--nproc", "2"]
    assert main(["train", str(recipe.write(tmp_path)), *overrides, *nodes]) == 2
    assert "--nnodes 1:2" in capsys.readouterr().err
    assert told in launched[0].mistake


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
    def fail(config, stop, environment):
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
    with pytest.raises(GridError, match="256 ranks are too many for the 2 cores"):
        check_cores(256)


def test_a_device_that_is_not_here_is_refused_before_ranks_start(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: None)
    monkeypatch.setattr(bootstrap, "become_launcher", lambda: None)
    path = str(recipe.write(tmp_path))
    try:
        assert agent.main([Launch(path, ["train.device=cuda"], 2).to_json()]) == 2
    finally:
        logging.disable(logging.NOTSET)
    (line,) = capsys.readouterr().err.splitlines()
    assert line == 'error: train.device="cuda" isn\'t here; this machine has "cpu"'


def test_a_rank_that_was_asked_to_stop_leaves_word_for_its_launcher(tmp_path, monkeypatch):
    def work(config, stop, environment):
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
