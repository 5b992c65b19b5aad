"""Runs under a real SLURM, several nodes of which are on this machine, are the runs that they are
without it; whatever becomes of their jobs.

Rows E2 and E3 of the faults that other trainers have had.
"""

from __future__ import annotations

import os
import re
import signal
import time
from pathlib import Path

import pytest

from megagrid.health.beat import read_beats
from megagrid.train.metrics import read_records
from tests.end_to_end.t0 import DP2, PP2, PP2DP2, TP2, TP2DP2, computed, differing, read_tensors
from tests.slurm.cluster import REPOSITORY

pytestmark = pytest.mark.slow

TWO_NODES = ("--nodes", "2", "--ranks-per-node", "2")
LONG = {"train": {"steps": 20}, "lr_schedule": {"kind": "constant"}}
UNSAVED = {"checkpoint": {"save_at_end": False}}
ENDLESS = {"train": {"steps": 10**6}, "lr_schedule": {"kind": "constant"}}


def records(job, run="run"):
    return computed(read_records(job.folder / run / "metrics.jsonl"))


def checkpoint(job, step):
    return read_tensors(job.folder / f"run/checkpoints/step-{step:08}")


def send(processes, number):
    for process in processes:
        os.kill(process, number)


def is_pending(process, number):
    """Whether a process that stands still has such a signal before it."""
    status = Path(f"/proc/{process}/status").read_text()
    return int(re.search(r"^ShdPnd:\t(\w+)$", status, re.MULTILINE)[1], 16) >> (number - 1) & 1


def test_both_styles_train_as_the_same_grid_does_without_slurm(cluster, recipe, trainer):
    """At once, on the same two nodes (E2). By hand, agents are started by a job that has been asked
    for a task a rank."""
    jobs = [
        cluster.submit(recipe(TP2DP2, name=style), *TWO_NODES, "--style", style)
        for style in ("ranks", "nodes")
    ]
    script = REPOSITORY / "launch/slurm.sbatch"
    asked = ("--nodes=2", "--ntasks-per-node=2", "--cpus-per-task=2")
    styled = "--export=ALL,MEGAGRID_STYLE=nodes"
    jobs.append(
        cluster.sbatch(recipe(TP2DP2, name="by_hand"), *asked, styled, script, "recipe.toml")
    )
    expected = trainer.train(TP2DP2)
    for job in jobs:
        facts = job.end()
        assert (facts["JobState"], facts["Restarts"]) == ("COMPLETED", "0"), job.out()
        assert records(job) == computed(expected.records)
        assert differing(checkpoint(job, 8), expected.tensors(8)) == []
        assert job.out().splitlines()[-1] == f"job {job.number} is done"
    logs = sorted(path.name for path in (jobs[0].folder / "run/jobs/001").glob("*/rank-*.log"))
    assert logs == [f"rank-{rank}.log" for rank in range(4)]


def test_a_topology_file_orders_ranks_otherwise_than_slurm_has_numbered_them(
    cluster, recipe, trainer
):
    path = recipe(PP2DP2, {"parallel": {"topology_file": "switches.conf"}})
    (path.parent / "switches.conf").write_text(
        "SwitchName=one Nodes=mgtest[01,03]\nSwitchName=other Nodes=mgtest[02,04]\n"
        "SwitchName=top Switches=one,other\n"
    )
    job = cluster.submit(path, "--nodes", "4", "--ranks-per-node", "1")
    assert job.end()["JobState"] == "COMPLETED", job.out()
    assert "0 to 3 are the launcher's 0 2 1 3\n" in job.out()
    beats = read_beats(job.folder / "run")
    assert [beats[rank].host for rank in range(4)] == [f"mgtest0{node}" for node in (1, 3, 2, 4)]
    assert records(job) == computed(trainer.train(PP2DP2).records)


def test_a_step_of_two_in_a_job_of_eight_has_two_ranks(cluster, recipe, trainer):
    """E3; and beside it a second job on the same node (E2)."""
    jobs = [
        cluster.sbatch(
            path := recipe(placement, name=f"job{index}"),
            *("--nodes=1", "--ntasks=4", "--nodelist=mgtest01"),
            f"--wrap=srun --ntasks=2 env SLURM_NTASKS=8 {cluster.python} -m megagrid train {path}",
        )
        for index, placement in enumerate((DP2, PP2))
    ]
    for job, placement in zip(jobs, (DP2, PP2), strict=True):
        expected = trainer.train(placement)
        assert job.end()["JobState"] == "COMPLETED", job.out()
        assert records(job) == computed(expected.records)


@pytest.mark.parametrize("style", ["ranks", "nodes"])
def test_a_preempted_job_saves_is_requeued_and_ends_as_if_it_had_not_been(
    cluster, recipe, trainer, style
):
    path = recipe(TP2DP2, LONG)
    job = cluster.submit(path, *TWO_NODES, "--style", style)
    job.wait_for_step(2)
    urgent = cluster.sbatch(path, "--partition=high", "--nodes=4", "--exclusive", "--wrap=true")
    assert urgent.end()["JobState"] == "COMPLETED"
    expected = trainer.train(TP2DP2, LONG)
    facts = job.end()
    assert (facts["JobState"], facts["Restarts"]) == ("COMPLETED", "1"), job.out()
    assert "was stopped by a signal, and is saved" in job.out()
    assert records(job) == computed(expected.records)
    assert differing(checkpoint(job, 20), expected.tensors(20)) == []


def test_a_job_that_meets_its_time_limit_is_requeued_and_ends_as_if_it_had_had_no_limit(
    cluster, recipe, trainer
):
    """SLURM looks at limits twice a minute: the ranks stand still until it has."""
    job = cluster.submit(recipe(TP2DP2, LONG), *TWO_NODES, "--time", "1", "--signal-seconds", "15")
    job.wait_for_step(2)
    ranks = job.ranks()
    send(ranks, signal.SIGSTOP)
    job.wait_until(lambda: all(is_pending(rank, signal.SIGUSR1) for rank in ranks))
    send(ranks, signal.SIGCONT)
    expected = trainer.train(TP2DP2, LONG)
    facts = job.end()
    assert (facts["JobState"], facts["TimeLimit"]) == ("COMPLETED", "00:01:00"), job.out()
    assert int(facts["Restarts"]) > 0
    assert "was stopped by a signal, and is saved" in job.out()
    assert records(job) == computed(expected.records)


@pytest.mark.parametrize(
    ("style", "restarts", "says"),
    [
        (
            "ranks",
            "1",
            r"srun: error: mgtest0[12]: task \d: Killed\n(?s:.*)and goes on from its last",
        ),
        ("nodes", "0", r"rank \d .*was ended by SIGKILL"),
    ],
    ids=["ranks", "nodes"],
)
def test_a_run_goes_on_from_its_checkpoint_when_a_rank_is_killed(
    cluster, recipe, trainer, style, restarts, says
):
    """In a new start of the job, or started again by the agents."""
    saved = {"checkpoint": {"save_interval": 3}}
    job = cluster.submit(recipe(TP2DP2, LONG, saved), *TWO_NODES, "--style", style)
    job.wait_for_step(4)
    os.kill(job.ranks()[-1], signal.SIGKILL)
    expected = trainer.train(TP2DP2, LONG)
    facts = job.end()
    assert (facts["JobState"], facts["Restarts"]) == ("COMPLETED", restarts), job.out()
    assert re.search(says, job.out()), job.out()
    assert records(job) == computed(expected.records)


def test_a_job_that_is_cancelled_saves_leaves_no_process_and_stays_cancelled(cluster, recipe):
    job = cluster.submit(recipe(TP2DP2, ENDLESS, UNSAVED), *TWO_NODES)
    job.wait_for_step(2)
    assert len(job.ranks()) == 4
    cluster.run("scancel", job.number)
    job.wait_until(lambda: not job.processes())
    assert job.end()["JobState"] == "CANCELLED"
    assert list((job.folder / "run/checkpoints").glob("step-*/manifest.json"))
    time.sleep(2)
    assert job.facts()["JobState"] == "CANCELLED"


def test_an_array_is_runs_in_folders_of_their_own_each_of_which_is_requeued_alone(
    cluster, recipe, trainer
):
    """The last task, whose number as a job is that of the whole array, has itself requeued."""
    rates = (1e-3, 5e-4, 2e-4)
    array = f"optimizer.lr=[{','.join(map(str, rates))}]"
    job = cluster.submit(recipe(TP2, LONG), "--nodes", "1", "--array", array)
    last = f"{job.number}_{len(rates) - 1}"
    job.wait_for_step(2, f"run/optimizer.lr={rates[-1]}")
    cluster.run("scancel", "--batch", "--signal=USR1", last)
    facts = [job.end(f"{job.number}_{index}") for index in range(len(rates))]
    assert [one["JobState"] for one in facts] == ["COMPLETED"] * len(rates)
    assert [one["Restarts"] for one in facts] == ["0", "0", "1"]
    for rate in rates:
        expected = trainer.train(TP2, LONG, {"optimizer": {"lr": rate}})
        assert records(job, f"run/optimizer.lr={rate}") == computed(expected.records)


def test_a_chain_goes_on_where_its_former_job_stopped_until_the_run_is_done(
    cluster, recipe, trainer
):
    job = cluster.submit(recipe(DP2, LONG), "--nodes", "2", "--chain", "3")
    first, second, third = (str(int(job.number) + index) for index in range(3))
    job.wait_for_step(2)
    cluster.run("scancel", "--batch", "--signal=USR1", first)
    facts = [job.end(number) for number in (first, second, third)]
    assert [one["ExitCode"] for one in facts] == ["75:0", "0:0", "0:0"], job.out()
    assert {one["Restarts"] for one in facts} == {"0"}
    assert records(job) == computed(trainer.train(DP2, LONG).records)
    last = (job.folder / f"run/jobs/001/{third}.out").read_text()
    assert last == f"nothing to do: job {second} is done\n"


def test_a_mistake_that_only_ranks_can_make_fails_the_job_once_and_in_a_line(cluster, recipe):
    """There is a run in the folder already. By the script that is submitted by hand."""
    path = recipe(DP2)
    (path.parent / "run/checkpoints/step-00000004").mkdir(parents=True)
    script = REPOSITORY / "launch/slurm.sbatch"
    job = cluster.sbatch(path, "--nodes=2", "--ntasks-per-node=1", script, "recipe.toml")
    facts = job.end()
    assert (facts["JobState"], facts["ExitCode"], facts["Restarts"]) == ("FAILED", "2:0", "0")
    (told,) = (line for line in job.out().splitlines() if line.startswith("error: "))
    assert told.startswith('error: logging.run_dir="run" has a run at step 4')
