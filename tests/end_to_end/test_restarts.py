"""Jobs that go on by themselves: restarted after a crash, on several nodes, on fewer of them.

Row E7 of the faults that other trainers have had. What the launchers decide on is tested without
ranks in `tests/launcher/test_rounds.py`. Nodes are launchers on this host.
"""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from megagrid.grid.placement import Placement
from megagrid.train.metrics import read_records
from tests.end_to_end.jobs import REPOSITORY, Job
from tests.end_to_end.t0 import ALONE, DP2, PP2, TP2, assert_parity, computed, has_begun

HOST = os.uname().nodename
LONG = {"train": {"steps": 20, "timeout_seconds": 10.0}, "checkpoint": {"save_interval": 4}}
"""Long enough for a rank to be hit before its end."""


def records_of(run: Path) -> list:
    return read_records(run / "metrics.jsonl")


def assert_equal_to_an_undisturbed_run(job: Job, trainer, placement: Placement) -> None:
    """Bit by bit, one record a step."""
    assert computed(records_of(job.run)) == computed(trainer.train(placement, LONG).records)


def end_all(nodes: Sequence[Job]) -> list:
    return [node.end() for node in nodes]


def hit(job: Job, number: signal.Signals, step: int = 5) -> None:
    """A signal to the last rank, once the run has recorded `step`."""
    job.wait_for_step(step)
    os.kill(job.ranks()[-1], number)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_ranks_go_on_from_the_newest_checkpoint_when_one_was(job, trainer, number):
    """Killed, or stopped by a signal: then the others run into the time-out."""
    restarted = job(PP2, LONG).start("--max-restarts", "2")
    hit(restarted, number)
    ended = restarted.end()
    how = {
        signal.SIGKILL: "was ended by SIGKILL",
        signal.SIGSTOP: "stood still: a signal has stopped it (SIGSTOP)",
    }
    assert ended.code == 0
    assert ended.err.splitlines()[-1] == (
        f"warning: rank 1 (pp1 dp0 cp0 tp0, {HOST}) {how[number]}; restart 1 of 2, on 2 ranks"
    )
    assert ended.out.count("resumed from") == 1
    assert_equal_to_an_undisturbed_run(restarted, trainer, PP2)


FILLS_THE_MEMORY = """
import os, pathlib, threading, time

def fill():
    path = pathlib.Path(os.environ["FILL"])
    while not path.exists():
        time.sleep(0.05)
    path.unlink()
    kept = []
    while True:
        kept.append(b"x" * 10**7)

if os.environ.get("RANK") == "1":
    threading.Thread(target=fill, daemon=True).start()
"""
"""Python runs it at its start: rank 1 is to take all memory once there is the file $FILL."""


@pytest.fixture
def control_group() -> Iterator[Path]:
    """One of the kernel's whose processes may take 3 GB together."""
    folders = {"memory/megagrid-test": "memory.limit_in_bytes", "megagrid-test": "memory.max"}
    for name, limit in folders.items():
        group = Path("/sys/fs/cgroup", name)
        try:
            group.mkdir()
            (group / limit).write_text(str(3 * 10**9))
        except OSError:  # of the other version, or not root's
            if group.exists():
                group.rmdir()
            continue
        yield group
        group.rmdir()
        return
    pytest.skip("no control group can be made here; run as root, with /sys/fs/cgroup writable")


def test_a_rank_that_the_system_has_killed_for_its_memory_is_named_so(
    control_group, job, trainer, tmp_path
):
    """The kernel's own doing, in a control group as a container or a job of SLURM's has it."""
    (tmp_path / "sitecustomize.py").write_text(FILLS_THE_MEMORY)
    full = job(PP2, LONG).start(
        "--max-restarts",
        "1",
        PYTHONPATH=f"{tmp_path}:{REPOSITORY}",
        FILL=str(tmp_path / "fill"),
    )
    full.enter(control_group)
    full.wait_for_step(5)
    (tmp_path / "fill").touch()
    ended = full.end()
    assert ended.code == 0
    assert re.fullmatch(
        re.escape(f"warning: rank 1 (pp1 dp0 cp0 tp0, {HOST}) was killed by the system, for the ")
        + r"memory was full \(SIGKILL; oom_kill of its control group went from (\d+) to (\d+)\); "
        "restart 1 of 1, on 2 ranks",
        ended.err.splitlines()[-1],
    )
    assert_equal_to_an_undisturbed_run(full, trainer, PP2)


def test_a_mistake_is_made_once_however_often_it_could_be(job):
    """E7, on one node and on two: seen by the launcher, and by the ranks alone."""
    wrong = job(TP2, LONG).start("--max-restarts", "3", "train.global_batch_size=3")
    ended = wrong.end()
    assert (ended.code, ended.out) == (2, "")
    assert len(ended.err.splitlines()) == 1

    nodes = [node.start("--max-restarts", "3") for node in job(TP2, LONG, name="two").nodes("2")]
    first, second = end_all(nodes)
    assert (first.code, second.code) == (2, 2)
    (line,) = first.err.splitlines()
    assert line.startswith("error: parallel.tensor_parallel_size=2 puts tp group {0,1} on nodes")
    assert second.err == f"error: node 0 has ended the job: {line.removeprefix('error: ')}\n"
    assert (first.out, second.out) == ("", "")
    assert not has_begun(nodes[0].run)


def test_a_mistake_on_one_node_ends_the_others(job):
    one, other = job(DP2, LONG).nodes("2")
    one.start()
    other.start("train.device=cuda")
    ended = end_all([one, other])
    assert [node.code for node in ended] == [2, 2]
    for node in ended:
        assert node.err == 'error: train.device="cuda" isn\'t here; this machine has "cpu"\n'


def test_two_nodes_go_on_together_when_a_rank_of_one_is_killed(job, trainer):
    nodes = [node.start("--max-restarts", "1") for node in job(DP2, LONG).nodes("2")]
    nodes[0].wait_for_step(5)
    os.kill(nodes[1].ranks()[-1], signal.SIGKILL)
    first, second = end_all(nodes)
    assert (first.code, second.code) == (0, 0)
    assert first.err.splitlines()[-1].startswith(
        f"warning: rank 1 (pp0 dp1 cp0 tp0, {HOST}) was ended by SIGKILL; restart 1 of 1"
    )
    assert_equal_to_an_undisturbed_run(nodes[0], trainer, DP2)


@pytest.mark.slow
def test_a_run_that_has_lost_a_node_goes_on_with_a_smaller_dp(job, trainer):
    """Its launcher is killed: nothing of it is left, and the losses stay those of one process."""
    elastic = {"parallel": {"data_parallel_size": 2, "min_data_parallel_size": 1}}
    nodes = [node.start("--max-restarts", "1") for node in job(DP2, LONG, elastic).nodes("1:2")]
    nodes[0].wait_for_step(5)
    nodes[1].signal(signal.SIGKILL)
    first, second = end_all(nodes)
    assert (first.code, second.code) == (0, -signal.SIGKILL)
    assert first.err.splitlines()[-1] == (
        f"warning: node 1 ({HOST}) is gone: nothing comes from its launcher; restart 1 of 1, on "
        "1 ranks"
    )
    records = records_of(nodes[0].run)
    assert [record.step for record in records] == list(range(1, 21))
    assert_parity(records, trainer.train(ALONE, LONG).records)


@pytest.mark.slow
def test_a_signal_to_one_launcher_of_two_saves_the_run_and_nothing_starts_again(job):
    nodes = [node.start("--max-restarts", "3") for node in job(DP2, LONG).nodes("2")]
    nodes[0].wait_for_step(3)
    nodes[1].signal(signal.SIGTERM)
    first, second = end_all(nodes)
    assert (first.code, second.code) == (75, 75)
    assert (first.err, second.err) == ("", "")
    assert len(records_of(nodes[0].run)) < 20


@pytest.mark.slow
def test_ranks_that_torchrun_starts_again_go_on_by_themselves(job, trainer):
    """From their own checkpoint, not from the one that the command has named."""
    torchrun = "torch.distributed.run --standalone --max-restarts 1 --nproc-per-node 2 -m megagrid"
    first = trainer.train(PP2, LONG, {"train": {"steps": 2}})
    restarted = job(PP2, LONG, starter=torchrun).start(
        f"checkpoint.resume={first.folder}", TORCH_DISABLE_SHARE_RDZV_TCP_STORE="1"
    )
    hit(restarted, signal.SIGKILL)
    ended = restarted.end()
    assert ended.code == 0
    assert ended.out.count("resumed from") == 2
    assert f"resumed from {restarted.run}" in ended.out
    assert [record.step for record in records_of(restarted.run)] == list(range(3, 21))
