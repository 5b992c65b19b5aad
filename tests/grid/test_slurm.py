"""Who a process is under SLURM, of the environments that it sets."""

from __future__ import annotations

import pytest

from megagrid.errors import GridError
from megagrid.grid import bootstrap

BATCH = {
    "SLURM_CLUSTER_NAME": "mini",
    "SLURM_JOB_ID": "8",
    "SLURM_JOB_NODELIST": "node[01-02]",
    "SLURM_NNODES": "2",
    "SLURM_NODEID": "0",
    "SLURM_NTASKS": "3",
    "SLURM_LOCALID": "0",
    "SLURM_PROCID": "0",
    "SLURM_TASKS_PER_NODE": "2,1",
    "SLURM_TASK_PID": "31529",
    "SLURMD_NODENAME": "node01",
    "SLURM_TOPOLOGY_ADDR": "spine.leaf1.node01",
    "SLURM_TOPOLOGY_ADDR_PATTERN": "switch.switch.node",
}
"""Of a batch script, shortened."""

STEP = {
    "SLURM_STEP_ID": "1",
    "SLURM_STEP_NODELIST": "node[01-02]",
    "SLURM_STEP_NUM_NODES": "2",
    "SLURM_STEP_NUM_TASKS": "3",
    "SLURM_STEP_TASKS_PER_NODE": "2,1",
}

TASK = {
    **BATCH,
    **STEP,
    "SLURM_PROCID": "2",
    "SLURM_NODEID": "1",
    "SLURMD_NODENAME": "node02",
    "SLURM_TOPOLOGY_ADDR": "spine.leaf2.node02",
}

SHELL = {"SLURM_JOB_ID": "3", "SLURM_NTASKS": "4", "SLURM_NNODES": "2"}
"""Of salloc."""

TORCHRUN = {
    "RANK": "3",
    "WORLD_SIZE": "4",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "2",
    "GROUP_RANK": "1",
    "MASTER_ADDR": "node01",
    "MASTER_PORT": "2955",
    "TORCHELASTIC_USE_AGENT_STORE": "True",
}


def test_a_task_of_a_step_is_a_rank():
    assert bootstrap.is_rank(TASK)
    known = bootstrap.read(TASK)
    assert (known.rank, known.world_size, known.local_rank, known.node) == (2, 3, 0, 1)
    assert (known.host, known.switches) == ("node02", ("spine", "leaf2"))
    assert (known.step, known.master_address, known.master_port) == ("mini-8.1-0", None, None)


@pytest.mark.parametrize("environ", [BATCH, SHELL, {}], ids=["batch script", "salloc", "none"])
def test_a_batch_script_and_a_shell_are_no_ranks(environ):
    assert not bootstrap.is_rank(environ)
    known = bootstrap.read(environ)
    assert (known.rank, known.world_size, known.step) == (0, 1, None)


def test_a_step_of_one_task_is_a_process_like_any():
    alone = {**TASK, "SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "1", "SLURM_STEP_NUM_NODES": "1"}
    assert not bootstrap.is_rank(alone)
    assert bootstrap.read(alone).world_size == 1


@pytest.mark.parametrize("job", ["8", "1"])
def test_the_steps_tasks_are_counted_not_the_jobs(job):
    part = {**TASK, "SLURM_NTASKS": job, "SLURM_NPROCS": job, "SLURM_PROCID": "1"}
    assert bootstrap.read({**part, "SLURM_STEP_NUM_TASKS": "2"}).world_size == 2


def test_a_batch_script_sent_from_within_a_step_is_no_task_of_that_step(tmp_path):
    """It inherits the step's variables."""
    environ = {**TASK, "SLURM_PROCID": "0", "SLURM_TASK_PID": "77"}
    process = tmp_path / "proc/77"
    process.mkdir(parents=True)
    (process / "cmdline").write_bytes(b"/bin/bash\0/var/spool/slurmd/job00011/slurm_script\0")
    assert not bootstrap.is_rank(environ, tmp_path)
    assert bootstrap.read(environ, tmp_path).world_size == 1
    (process / "cmdline").write_bytes(b"python\0-m\0megagrid\0")
    assert bootstrap.is_rank(environ, tmp_path)


def test_torchrun_wins_inside_a_step_and_the_node_is_still_slurms():
    known = bootstrap.read({**TASK, **TORCHRUN})
    assert (known.rank, known.world_size, known.local_rank, known.node) == (3, 4, 1, 1)
    assert (known.host, known.switches, known.step) == ("node02", ("spine", "leaf2"), None)
    assert known.has_agent_store


def test_a_stated_address_wins():
    known = bootstrap.read({**TASK, "MASTER_ADDR": "node01", "MASTER_PORT": "2955"})
    assert (known.master_address, known.master_port) == ("node01", 2955)
    with pytest.raises(GridError, match="both of MASTER_ADDR and MASTER_PORT"):
        bootstrap.read({**TASK, "MASTER_PORT": "2955"})


@pytest.mark.parametrize(
    ("changed", "name"),
    [
        ({"SLURM_STEP_ID": "2"}, "mini-8.2-0"),
        ({"SLURM_JOB_ID": "1500"}, "mini-1500.1-0"),
        ({"SLURM_RESTART_COUNT": "1"}, "mini-8.1-1"),
        ({"SLURM_CLUSTER_NAME": "maxi"}, "maxi-8.1-0"),
    ],
)
def test_steps_jobs_requeues_and_clusters_have_names_of_their_own(changed, name):
    assert bootstrap.read({**TASK, **changed}).step == name


def test_a_step_over_both_groups_of_a_heterogeneous_job_counts_through():
    """srun --het-group=0,1, of 2 tasks and 1."""
    het = {"SLURM_HET_SIZE": "2", "SLURM_JOB_ID_HET_GROUP_1": "9", "SLURM_NTASKS_HET_GROUP_1": "1"}
    known = bootstrap.read({**TASK, **het})
    assert (known.rank, known.world_size, known.node, known.step) == (2, 3, 1, "mini-8.1-0")


def test_tasks_that_are_alone_on_their_nodes_are_told_apart():
    assert bootstrap.is_one_per_node({**TASK, "SLURM_STEP_NUM_TASKS": "2", "SLURM_PROCID": "1"})
    assert not bootstrap.is_one_per_node(TASK)
    assert not bootstrap.is_one_per_node({**TASK, **TORCHRUN, "SLURM_STEP_NUM_TASKS": "2"})
    assert not bootstrap.is_one_per_node({})


@pytest.mark.parametrize(
    ("changed", "told"),
    [
        ({"SLURM_PROCID": "3"}, "SLURM_PROCID=3 must be below the step's 3 tasks"),
        ({"SLURM_PROCID": "x"}, "SLURM_PROCID='x' must be a whole number"),
        ({"SLURM_STEP_NUM_TASKS": "2(x2)"}, "SLURM_STEP_NUM_TASKS='2\\(x2\\)' must be a whole"),
    ],
)
def test_a_contradiction_is_named(changed, told):
    with pytest.raises(GridError, match=told):
        bootstrap.read({**TASK, **changed})


@pytest.mark.parametrize(
    ("address", "pattern", "switches"),
    [
        ("spine.leaf1.node01", "switch.switch.node", ("spine", "leaf1")),
        ("block3.node01", "block.node", ("block3",)),
        ("node01", "node", ()),
        ("node01.example.org", "node", ()),
    ],
)
def test_switches_are_those_of_the_topology(address, pattern, switches):
    told = {"SLURM_TOPOLOGY_ADDR": address, "SLURM_TOPOLOGY_ADDR_PATTERN": pattern}
    assert bootstrap.read({**TASK, **told}).switches == switches
