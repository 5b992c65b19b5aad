"""What becomes of a job when its ranks have ended: launch/slurm.sbatch beside a SLURM that isn't
there. With a real one in tests/slurm."""

from __future__ import annotations

import re
import socket
import sys
from pathlib import Path

import pytest

from megagrid.errors import MegagridError
from megagrid.jobs.script import Job, Member, script
from megagrid.launcher.launch import Rendezvous
from megagrid.launcher.link import Link, first_word
from megagrid.launcher.rounds import Council, Terms
from tests.jobs.job import EXITED, SAVE, FakeJob


@pytest.fixture
def job(tmp_path) -> FakeJob:
    return FakeJob(tmp_path)


MISTAKEN, STOPPED, MISSED = EXITED.format(2), EXITED.format(75), EXITED.format(69)


@pytest.mark.parametrize(
    ("ranks", "code", "requeued", "says"),
    [
        ("exit 0", 0, [], "job 7 is done"),
        ("exit 2", 2, [], "job 7 failed: a mistake, told above"),
        (f"{SAVE} exit 2", 2, [], "job 7 failed: a mistake, told above"),
        ("exit 130", 130, [], "job 7 failed: it was interrupted"),
        (f"{SAVE} exit 75", 75, ["7"], "job 7 was stopped by a signal, and is saved"),
        (f"{SAVE} {STOPPED} exit 143", 75, ["7"], "job 7 was stopped by a signal, and is saved"),
        (f"{MISTAKEN} {STOPPED} exit 143", 2, [], "job 7 failed: a mistake, told above"),
        ("exit 69", 69, ["7"], "job 7 missed something that may be there later"),
        (f"{MISSED} exit 143", 69, ["7"], "job 7 missed something that may be there later"),
        (f"{STOPPED} {MISSED} exit 143", 75, ["7"], "job 7 was stopped by a signal before it"),
        (f"{MISTAKEN} {MISSED} exit 143", 2, [], "job 7 failed: a mistake, told above"),
        (f"{SAVE} exit 137", 137, ["7"], "job 7 ended with 137, and goes on from its last"),
        ("exit 137", 137, [], "job 7 failed: it ended before it had saved"),
        ("exit 1", 1, [], "job 7 failed: it ended before it had saved"),
    ],
    ids=[
        "done",
        "mistake",
        "mistake after a save",
        "interrupt",
        "stopped",
        "stopped, the others killed",
        "mistake, the others killed",
        "missed",
        "missed, the others killed",
        "missed and stopped",
        "missed and mistake",
        "crash after a save",
        "crash at the start",
        "failure at the start",
    ],
)
def test_how_the_ranks_end_says_what_becomes_of_the_job(job, ranks, code, requeued, says):
    ended = job.start(ranks)
    assert (ended.code, ended.requeued, ended.err) == (code, requeued, "")
    assert says in ended.out


@pytest.mark.parametrize("ranks", [f"{SAVE} exit 75", f"{SAVE} exit 137"])
@pytest.mark.parametrize("how", ["cancelled", "--no-requeue"])
def test_a_job_that_is_cancelled_or_not_to_be_requeued_just_ends(job, ranks, how):
    """SLURM would revive it."""
    if how == "cancelled":
        ended = job.start(ranks, state="COMPLETING")
    else:
        ended = job.start(ranks, MEGAGRID_REQUEUE="no")
    assert (ended.code, ended.requeued) == (int(ranks.split()[-1]), [])


def test_a_task_of_an_array_is_requeued_by_its_number_in_it(job):
    """The number of the array's last task is that of the whole array."""
    array = {"SLURM_ARRAY_JOB_ID": "7", "SLURM_ARRAY_TASK_ID": "2"}
    assert job.start(f"{SAVE} exit 75", **array).requeued == ["7_2"]


def test_a_run_that_has_saved_is_resumed_from_there_wherever_it_began(job):
    stated = "checkpoint.resume=elsewhere"
    first = job.start("exit 75", stated)
    assert first.ranks.endswith(f"train recipe.toml {stated}\n")
    second = job.start(f"{SAVE} exit 75", stated)
    assert second.ranks.endswith(f"train recipe.toml {stated}\n")
    third = job.start("exit 0", stated, "train.steps=9")
    assert third.ranks.endswith("train recipe.toml train.steps=9 checkpoint.resume=latest\n")
    assert third.code == 0


def test_checkpoints_of_an_earlier_job_are_not_this_ones(job):
    job.start(f"{SAVE} exit 0")
    later = job.start("exit 75", "checkpoint.resume=latest", SLURM_JOB_ID="8")
    assert "before it had saved" in later.out
    again = job.start("exit 1", "checkpoint.resume=run/checkpoints/step-00000002", SLURM_JOB_ID="8")
    assert again.ranks.endswith("checkpoint.resume=run/checkpoints/step-00000002\n")
    assert (again.code, again.requeued) == (1, [])


def test_a_job_that_is_stopped_before_it_saves_fails_the_third_time(job):
    """Its time limit may be shorter than its start."""
    assert [job.start("exit 75").requeued for _ in range(2)] == [["7"]] * 2
    assert job.start(f"{SAVE} exit 75").requeued == ["7"]
    assert [job.start("exit 75").requeued for _ in range(2)] == [["7"]] * 2
    last = job.start("exit 75")
    assert (last.code, last.requeued) == (75, [])
    assert "stopped three times in a row before it had saved; give it more time" in last.out


def test_a_run_that_crashes_and_goes_on_does_so_three_times(job):
    crash = f"{SAVE} exit 134"
    assert [job.start(crash).requeued for _ in range(3)] == [["7"]] * 3
    last = job.start(crash)
    assert (last.code, last.requeued) == (134, [])
    assert "job 7 failed: it has ended so four times" in last.out


def test_what_is_missing_is_waited_for_by_three_more_starts_or_as_many_after_each_save(job):
    assert [job.start("exit 69").requeued for _ in range(3)] == [["7"]] * 3
    assert job.start(f"{SAVE} exit 69").requeued == ["7"]
    assert [job.start("exit 69").requeued for _ in range(3)] == [["7"]] * 3
    last = job.start("exit 69")
    assert (last.code, last.requeued) == (69, [])
    assert "job 7 failed: what it needs was missing four times in a row" in last.out


def refused_port() -> str:
    """What the agent of node 0 says where another program has its port."""
    with socket.create_server(("", 0)) as other:
        where = Rendezvous("10.0.0.1", other.getsockname()[1])
        with pytest.raises(MegagridError) as refused:
            Link(0, where, first_word(1, "run"), Council(Terms(fewest=2, most=2)))
    return str(refused.value)


AGENT_LOSES_PORT = """\
[[ ! -e lost ]] || {{ cat lost; exit 0; }}
echo "error: {refused}" | tee lost
exit {code}
"""


@pytest.mark.parametrize("code", [2, 69])
def test_agents_whose_port_another_program_has_taken_get_another_one(job, code):
    ranks = AGENT_LOSES_PORT.format(refused=refused_port(), code=code)
    ended = job.start(ranks, MEGAGRID_STYLE="nodes")
    assert (ended.code, ended.out.splitlines()[-1]) == (0, "job 7 is done")
    first, second = re.findall(r"--rendezvous 10\.0\.0\.1:(\d+)", ended.ranks)
    assert first != second


def test_agents_that_get_no_port_end_their_job_and_a_mistake_isnt_repeated(job):
    never = job.start(f'echo "error: {refused_port()}"; exit 69', MEGAGRID_STYLE="nodes")
    assert (never.ranks.count("--rendezvous"), never.code, never.requeued) == (5, 69, ["7"])
    ranks = AGENT_LOSES_PORT.format(refused=refused_port(), code=69)
    mistaken = job.start(ranks.replace("cat lost; exit 0", "exit 2"), MEGAGRID_STYLE="nodes")
    assert (mistaken.ranks.count("--rendezvous"), mistaken.code, mistaken.requeued) == (2, 2, [])


@pytest.mark.parametrize(
    ("end", "code", "says"),
    [
        ("exit 0", 0, "nothing to do: job 8 is done"),
        ("exit 2", 1, "nothing to do: job 8 failed: a mistake, told above"),
    ],
)
def test_a_chain_ends_with_the_job_that_is_done_or_would_only_fail_again(
    job, tmp_path, end, code, says
):
    chained = tmp_path / "job.sbatch"
    member = Member(("recipe.toml",), Path("run"))
    one = Job("recipe.toml", (), "ranks", 2, 3, False, "001", sys.executable, (member,))
    chained.write_text(script(one))
    missed = job.start("exit 69", script=chained, SLURM_JOB_ID="6")
    assert (missed.code, missed.requeued) == (69, [])
    first = job.start(f"{SAVE} exit 75", script=chained)
    assert (first.code, first.requeued) == (75, [])
    second = job.start(end, script=chained, SLURM_JOB_ID="8")
    assert second.ranks.endswith("train recipe.toml checkpoint.resume=latest\n")
    third = job.start("exit 0", script=chained, SLURM_JOB_ID="9")
    assert (third.code, third.ranks) == (code, "")
    assert third.out.startswith(says)


SIGNALLED = """\
trap 'got=yes' USR1
kill -{signal} $PPID
for ((i = 0; i < 100; i++)); do [[ -z ${{got:-}} ]] || break; sleep 0.05; done
echo "ranks got ${{got:-no}} signal"
{then}
"""


@pytest.mark.parametrize("signal", ["USR1", "TERM"])
def test_a_signal_to_the_job_is_one_to_srun_and_the_step_is_waited_for(job, signal):
    then = f"sleep 0.3; {SAVE} exit 75"
    ended = job.start(SIGNALLED.format(signal=signal, then=then))
    assert "ranks got yes signal" in ended.out
    assert (ended.code, ended.requeued) == (75, ["7"])


def test_ranks_that_a_signal_ends_before_they_take_signals_are_started_again(job):
    ended = job.start("kill -USR1 $PPID; sleep 20")
    assert (ended.code, ended.requeued) == (138, ["7"])
    assert "was stopped by a signal before it had saved" in ended.out


def test_a_run_that_is_done_when_it_is_asked_to_stop_is_done(job):
    ended = job.start(SIGNALLED.format(signal="USR1", then="exit 0"))
    assert (ended.code, ended.requeued) == (0, [])


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"recipe": None}, "usage: sbatch launch/slurm.sbatch RECIPE"),
        ({"MEGAGRID_STYLE": "threads"}, "style threads must be ranks or nodes"),
        ({"SLURM_HET_SIZE": "2"}, "a heterogeneous job has no one grid"),
        ({"MEGAGRID_PYTHON": "/no/python"}, "/no/python isn't on PATH"),
        ({"SLURM_JOB_NUM_NODES": "3"}, "choose 6 or 9"),
    ],
)
def test_a_mistake_is_one_line_before_any_rank_starts(job, change, says):
    ended = job.start("exit 0", **{"MEGAGRID_PYTHON": sys.executable} | change)
    assert (ended.code, ended.out, ended.ranks) == (2, "", "")
    assert re.fullmatch(r"error: .*\n", ended.err)
    assert says in ended.err


def test_a_folder_that_slurm_cannot_name_is_refused(job):
    """As TOML states it: with an escaped backslash."""
    ended = job.start("exit 0", r'logging.run_dir="a\\b"', MEGAGRID_PYTHON=sys.executable)
    assert (ended.code, ended.ranks) == (2, "")
    assert r"error: logging.run_dir=a\b has a backslash or a control character" in ended.err


AGENTS = {"MEGAGRID_STYLE": "nodes"}


@pytest.mark.parametrize(
    ("job_has", "step_has", "threads"),
    [
        ({}, "--ntasks-per-node 2 --ntasks 4 --cpus-per-task 4", "4"),
        ({"SLURM_CPUS_PER_TASK": "3"}, "--ntasks-per-node 2 --ntasks 4 --cpus-per-task 3", "3"),
        (
            AGENTS | {"MEGAGRID_RANKS_PER_NODE": "4"},
            "--ntasks-per-node 1 --ntasks 2 --cpus-per-task 8",
            "2",
        ),
        (
            AGENTS | {"SLURM_NTASKS_PER_NODE": "8", "SLURM_CPUS_PER_TASK": "4"},
            "--ntasks-per-node 1 --ntasks 2 --cpus-per-task 32",
            "4",
        ),
        (
            AGENTS
            | {"SLURM_NTASKS_PER_NODE": "1", "SLURM_CPUS_PER_TASK": "12"}
            | {"MEGAGRID_RANKS_PER_NODE": "4"},
            "--ntasks-per-node 1 --ntasks 2 --cpus-per-task 12",
            "3",
        ),
        ({"OMP_NUM_THREADS": "5"}, "--ntasks-per-node 2 --ntasks 4 --cpus-per-task 4", "5"),
        (
            {"SLURM_JOB_CPUS_PER_NODE": "1(x2)"},
            "--ntasks-per-node 2 --ntasks 4 --cpus-per-task 1",
            "1",
        ),
    ],
    ids=[
        "all of the smallest node",
        "stated",
        "agents",
        "agents of a job with a task a rank",
        "agents of a job with a task a node",
        "threads stated",
        "fewer than ranks",
    ],
)
def test_ranks_share_the_cores_of_their_node(job, job_has, step_has, threads):
    ended = job.start("echo threads $OMP_NUM_THREADS", **job_has)
    assert step_has in ended.ranks
    assert f"threads {threads}\n" in ended.out
