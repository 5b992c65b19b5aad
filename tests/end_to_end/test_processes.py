"""Runs as the processes that users start: two at once, killed, interrupted, wrong from the start.

Rows E2, E3, E4, E7 of the faults that other trainers have had. Each run here costs seconds, so what
can be seen on the pool of ranks is tested there.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import time
from collections.abc import Iterator

import pytest

from megagrid.checkpoint import find_checkpoint, newest_first
from megagrid.errors import CheckpointError
from megagrid.grid.placement import Placement
from megagrid.train.command import interrupts_win
from megagrid.train.metrics import read_records
from tests.end_to_end.jobs import Job
from tests.end_to_end.t0 import (
    ALONE,
    DP2,
    PP2,
    TP2,
    assert_parity,
    computed,
    has_begun,
)

CONSTANT = {"lr_schedule": {"kind": "constant"}}
ENDLESS = {"train": {"steps": 10**6}, "checkpoint": {"save_interval": 1, "keep_last": 2}}


# ------------------------------------------------------------------------------------------------
# Ends


def test_a_rank_that_is_killed_ends_the_job_and_the_run_goes_on_from_there(job, trainer):
    """On another grid, from the last checkpoint, with one record a step."""
    killed = job(PP2, CONSTANT, ENDLESS).start()
    killed.wait_for_step(3)
    os.kill(killed.ranks()[-1], signal.SIGKILL)
    ended = killed.end()
    assert ended.code == 1
    *alone, last = ended.err.splitlines()
    assert last == f"error: rank 1 (pp1 dp0 cp0 tp0, {os.uname().nodename}) was ended by SIGKILL"
    for line in alone:  # none if the launcher ends rank 0 before it has noticed
        assert line.startswith("rank 0 (pp0 dp0 cp0 tp0) lost a peer")
    assert "left\n" in ended.out

    folder = {"logging": {"run_dir": str(killed.folder / "run")}}
    before = read_records(killed.folder / "run" / "metrics.jsonl")
    rest = trainer.train(
        TP2,
        CONSTANT,
        folder,
        {"train": {"steps": len(before) + 2}, "checkpoint": {"resume": "latest"}},
    )
    records = rest.records
    assert [record.step for record in records] == list(range(1, len(before) + 3))
    again = [
        record.step
        for record in records
        if record.step_time_s not in {old.step_time_s for old in before}
    ]
    assert len(again) <= 4, "at most the step whose save was cut off is made again"
    longer = {"train": {"steps": len(records)}}
    assert_parity(records, trainer.train(ALONE, CONSTANT, longer).records)


def test_an_interrupt_ends_every_rank_with_130(job):
    interrupted = job(DP2, ENDLESS).start()
    interrupted.wait_for_step(2)
    interrupted.signal(signal.SIGINT)
    ended = interrupted.end()
    assert ended.code == 130
    assert "KeyboardInterrupt" not in ended.err
    assert "error: " not in ended.err


@pytest.fixture
def interruptible() -> Iterator[None]:
    """As a process in the foreground is; what a shell runs behind ignores interrupts."""
    former = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, former)


@pytest.mark.parametrize("fault", [RuntimeError("connection reset"), CheckpointError("not saved")])
def test_what_an_interrupt_makes_fail_is_not_told(interruptible, fault):
    """In a collective, peers that ended first; in a save, an interrupt taken for a failure."""
    with pytest.raises(KeyboardInterrupt), interrupts_win():
        with contextlib.suppress(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
        raise fault
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_a_fault_without_an_interrupt_stays_what_it_is(interruptible):
    with pytest.raises(RuntimeError, match="connection reset"), interrupts_win():
        raise RuntimeError("connection reset")
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


UNSAVED = {"train": {"steps": 10**6}, "checkpoint": {"save_at_end": False}}
"""Without end and, unless a signal asks for it, without a checkpoint."""


def saved_steps(stopped: Job) -> list[int]:
    """Steps of the sound checkpoints of a run, newest first."""
    checkpoints = stopped.folder / "run" / "checkpoints"
    found = newest_first(checkpoints)
    assert find_checkpoint("latest", checkpoints).skipped == ()
    return [folder.step for folder in found]


@pytest.mark.parametrize("hit", ["the launcher, twice", "the last rank"])
def test_a_signal_to_any_process_saves_the_last_step_and_exits_75(job, hit):
    """C18."""
    stopped = job(DP2, UNSAVED).start()
    stopped.wait_for_step(2)
    if hit == "the last rank":
        os.kill(stopped.ranks()[-1], signal.SIGUSR1)
    else:
        stopped.signal(signal.SIGTERM)
        time.sleep(0.1)
        stopped.signal(signal.SIGTERM)
    ended = stopped.end()
    assert (ended.code, ended.err) == (75, "")
    (step,) = saved_steps(stopped)
    assert [r.step for r in read_records(stopped.folder / "run" / "metrics.jsonl")][-1] == step
    assert ended.out.splitlines()[-1] == (
        f"a signal has asked the run to stop: it is saved after step {step} of 1000000; go on "
        "with checkpoint.resume=latest"
    )


def test_a_run_under_nohup_survives_its_terminal(job):
    kept = job(DP2, UNSAVED)
    former = signal.signal(signal.SIGHUP, signal.SIG_IGN)  # which what is started inherits
    try:
        kept.start()
    finally:
        signal.signal(signal.SIGHUP, former)
    kept.wait_for_step(2)
    kept.signal(signal.SIGHUP)
    step = len(read_records(kept.folder / "run" / "metrics.jsonl"))
    kept.wait_for_step(step + 3)
    kept.signal(signal.SIGTERM)
    assert kept.end().code == 75


@pytest.mark.parametrize(
    "starter", ["megagrid", "torch.distributed.run --standalone --nproc-per-node 2 -m megagrid"]
)
def test_ranks_save_and_end_when_their_launcher_is_killed(job, starter):
    orphaned = job(TP2, UNSAVED, starter=starter).start()
    orphaned.wait_for_step(2)
    assert len(orphaned.ranks()) == 2
    orphaned.signal(signal.SIGKILL)
    assert orphaned.end().code == -signal.SIGKILL
    assert len(saved_steps(orphaned)) == 1


@pytest.mark.slow
def test_ranks_end_when_their_launcher_is_killed_before_they_can_ask_for_it(job):
    orphaned = job(TP2, ENDLESS).start()
    orphaned.wait_until(lambda: len(orphaned.ranks()) == 2)
    orphaned.signal(signal.SIGKILL)
    assert orphaned.end().code == -signal.SIGKILL
    assert not has_begun(orphaned.folder / "run")


@pytest.mark.slow
def test_a_rank_that_cannot_end_its_step_is_killed_after_the_time_it_has_for_that(job):
    """Its peer stands still, so that no step of it will end."""
    stuck = job(TP2, UNSAVED).start("checkpoint.seconds_to_stop=2")
    stuck.wait_for_step(2)
    os.kill(stuck.ranks()[-1], signal.SIGSTOP)
    stuck.signal(signal.SIGTERM)
    ended = stuck.end()
    assert (ended.code, ended.err) == (143, "")


def test_an_interrupt_waits_for_the_save_behind_the_training(job):
    """A checkpoint that is begun becomes whole, without a word."""
    interrupted = job(DP2, ENDLESS).start("checkpoint.async_save=true")
    interrupted.wait_for_step(3)
    interrupted.signal(signal.SIGINT)
    ended = interrupted.end()
    assert (ended.code, ended.err) == (130, "")
    folders = (interrupted.folder / "run" / "checkpoints").iterdir()
    assert not [path for path in folders if path.suffix]
    assert saved_steps(interrupted)


# ------------------------------------------------------------------------------------------------
# Beginnings


@pytest.mark.slow
def test_two_runs_at_once_on_one_host_both_equal_one_process(job, trainer):
    """E2: job ids that are the same modulo 1000. E3: a count of tasks that isn't the step's."""
    jobs = [
        job(placement, name=str(number)).start(SLURM_JOB_ID=str(number), SLURM_NTASKS="8")
        for placement, number in ((PP2, 1500), (TP2, 2500))
    ]
    reference = trainer.reference().records
    for one in jobs:
        ended = one.end()
        assert (ended.code, ended.err) == (0, "")
        assert_parity(read_records(one.folder / "run" / "metrics.jsonl"), reference)
        rows = [line for line in ended.out.splitlines()[1:] if not line.startswith("saved")]
        losses = [line.split()[2] for line in rows]
        assert losses == [f"{record.loss:.4f}" for record in reference]


def test_a_mistake_under_torchrun_is_one_failure_and_the_last_thing_told(job):
    """E7: no rank starts again, and torchrun's report ends with the mistake, without a traceback
    of megagrid's."""
    torchrun = "torch.distributed.run --standalone --nproc-per-node 2 -m megagrid"
    wrong = job(ALONE, starter=torchrun).start(
        "parallel.tensor_parallel_size=3", "parallel.data_parallel_size=none"
    )
    ended = wrong.end()
    mistake = "2 ranks can't be divided by tensor_parallel_size=3"
    assert ended.code != 0
    *_, last = (line for line in ended.err.splitlines() if line.strip("=- "))
    assert last.strip().startswith(f"traceback : error: {mistake}")
    told = [line for line in ended.err.splitlines() if line.startswith(f"error: {mistake}")]
    assert len(told) <= 1  # none if torchrun ends rank 0 before it has spoken
    assert "megagrid/train/command.py" not in ended.err
    assert not has_begun(wrong.folder / "run")


@pytest.mark.parametrize(
    ("nodes", "gpus", "tp", "groups"),
    [(2, 4, 4, ["0-3"] * 4 + ["4-7"] * 4), (2, 3, 2, None)],
    ids=["2x4-tp4", "2x3-tp2"],
)
def test_a_tp_group_lies_in_one_node(cli, nodes, gpus, tp, groups):
    """E4: tp is innermost; where that isn't enough, the grid is refused with one that fits."""
    placement = Placement(tp=tp, dp=nodes * gpus // tp)
    recipe = cli.recipe(placement, {"train": {"global_batch_size": 24}})
    arguments = ("grid", recipe, "--nodes", str(nodes), "--gpus-per-node", str(gpus))
    if groups is None:
        line = cli.mistake(*arguments)
        assert "puts tp group {2,3} on nodes 0 and 1" in line
        assert "use parallel.tensor_parallel_size=1" in line
    else:
        assert re.findall(r" tp\d +(\S+)", cli(*arguments).out) == groups


def test_a_run_of_one_process_needs_no_launcher(cli, trainer):
    assert cli.train().code == 0
    records = read_records(cli.run_folder / "metrics.jsonl")
    assert computed(records) == computed(trainer.reference().records)
