"""What the machine says of itself."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from megagrid.grid import bootstrap

GIB = 2**30

GROUPS = {
    "no control groups": ({}, None),
    "none set": ({"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/memory.max": "max\n"}, None),
    "a container": ({"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/memory.max": f"{GIB}\n"}, GIB),
    "a job around a step": (
        {
            "proc/self/cgroup": "0::/slurm/job_7/step_0\n",
            "sys/fs/cgroup/slurm/job_7/memory.max": f"{GIB}\n",
            "sys/fs/cgroup/slurm/job_7/step_0/memory.max": "max\n",
        },
        GIB,
    ),
    "version 1": (
        {
            "proc/self/cgroup": "9:cpu,cpuacct:/a\n5:memory:/a\n",
            "sys/fs/cgroup/memory/a/memory.limit_in_bytes": f"{GIB}\n",
            "sys/fs/cgroup/memory/memory.limit_in_bytes": f"{2**63 - 4096}\n",
        },
        GIB,
    ),
    "a container that is shown the host's path": (
        {
            "proc/self/cgroup": "5:memory:/docker/1f2e\n",
            "sys/fs/cgroup/memory/memory.limit_in_bytes": f"{GIB}\n",
        },
        GIB,
    ),
    "more than there is": (
        {"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/memory.max": f"{2**60}\n"},
        None,
    ),
}


@pytest.mark.parametrize(("files", "limit"), GROUPS.values(), ids=GROUPS)
def test_memory_is_the_machines_or_what_a_control_group_leaves(tmp_path, files, limit):
    machine = bootstrap.memory_bytes(tmp_path / "nowhere")
    assert machine > GIB
    for name, text in files.items():
        path = Path(tmp_path, name)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    assert bootstrap.memory_bytes(tmp_path) == (machine if limit is None else limit)


def test_memory_of_this_machine_is_known():
    assert 0 < bootstrap.memory_bytes() <= bootstrap.memory_bytes(Path("/nowhere"))


def test_what_an_agent_does_has_a_name_that_no_other_agent_gives(tmp_path):
    """In containers run ids, names and process ids are often the same."""
    environ = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "a", "MASTER_PORT": "1"}
    assert bootstrap.read(environ).launch is None
    environ["TORCHELASTIC_RUN_ID"] = "none"
    names = set()
    for began, boot in (("7", "one"), ("8", "one"), ("7", "other")):
        stat = tmp_path / f"proc/{os.getppid()}/stat"
        system = tmp_path / "proc/sys/kernel/random/boot_id"
        for path in (stat, system):
            path.parent.mkdir(parents=True, exist_ok=True)
        stat.write_text(f"1 (a) b) S {'0 ' * 18}{began} 0")
        system.write_text(f"{boot}\n")
        names.add(bootstrap.read(environ, tmp_path).launch)
    assert len(names) == 3
    here = bootstrap.read(environ)
    assert (here.launch, here.agent) == (bootstrap.read(environ).launch, os.getppid())


@pytest.mark.parametrize(
    ("environ", "job"),
    [
        ({}, (None, 0)),
        ({"SLURM_JOB_ID": "17", "SLURM_RESTART_COUNT": "2"}, ("17", 2)),
        (
            {"SLURM_JOB_ID": "19", "SLURM_ARRAY_JOB_ID": "17", "SLURM_ARRAY_TASK_ID": "1"},
            ("17_1", 0),
        ),
        ({"SLURM_RESTART_COUNT": "1", "TORCHELASTIC_RESTART_COUNT": "1"}, (None, 2)),
    ],
)
def test_a_job_and_its_restarts_are_the_schedulers_and_the_launchers(environ, job):
    found = bootstrap.read_job(environ)
    assert (found.id, found.restarts) == job


KILLS = {
    "version 1": (
        {
            "proc/self/cgroup": "5:memory:/a\n",
            "sys/fs/cgroup/memory/a/memory.oom_control": "oom_kill_disable 0\noom_kill 3\n",
        },
        3,
    ),
    "version 2": (
        {
            "proc/self/cgroup": "0::/job\n",
            "sys/fs/cgroup/job/memory.events": "oom 2\noom_kill 1\n",
            "proc/vmstat": "oom_kill 7\n",
        },
        1,
    ),
    "of the machine": ({"proc/vmstat": "pgfault 5\noom_kill 7\n"}, 7),
    "not told": ({}, None),
}


@pytest.mark.parametrize(("files", "kills"), KILLS.values(), ids=KILLS)
def test_the_system_counts_what_it_kills_for_memory(tmp_path, files, kills):
    for name, text in files.items():
        path = Path(tmp_path, name)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    assert bootstrap.out_of_memory_kills(tmp_path) == kills
