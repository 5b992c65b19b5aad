"""What SLURM says of a process. Pure, no torch: it is given the environment.

    sbatch job.sh     the batch script        SLURM_JOB_ID, SLURM_PROCID=0, no step
      srun …          a step: tasks 0, 1, …   SLURM_STEP_* too, and SLURM_PROCID of the task
    salloc            a shell                 SLURM_JOB_ID alone

Variables of the step come before those of the job, which may be of more tasks: a step can be of a
part of its job, and what a job states for all of its steps is inherited by each.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from megagrid.errors import GridError


@dataclass(frozen=True)
class Task:
    """One of the tasks that `srun` has started.

    Attributes:
        name: of the step, and of the attempt that it is where its job was requeued: no two steps
            that are there at once have the same, on however many clusters.
        number: of the task, of `tasks` in the step.
        local: number among the tasks of its node.
        node: number of its node in the step, of `nodes`.
    """

    name: str
    number: int
    tasks: int
    local: int
    node: int
    nodes: int


def task_of(environ: Mapping[str, str]) -> Task | None:
    """The task that a process with this environment belongs to; None if it belongs to no step.

    Raises:
        GridError: naming a variable that is missing, no number or contradicts another.
    """
    if "SLURM_PROCID" not in environ or not (
        "SLURM_STEP_ID" in environ or "SLURM_STEP_NUM_TASKS" in environ
    ):
        return None
    tasks = _number(environ, "SLURM_STEP_NUM_TASKS", "SLURM_NTASKS", "SLURM_NPROCS")
    number = _number(environ, "SLURM_PROCID")
    if number >= tasks:
        raise GridError(f"SLURM_PROCID={number} must be below the step's {tasks} tasks")
    return Task(
        name=_name(environ),
        number=number,
        tasks=tasks,
        local=_number(environ, "SLURM_LOCALID", default=number),
        node=_number(environ, "SLURM_NODEID", default=0),
        nodes=_number(environ, "SLURM_STEP_NUM_NODES", "SLURM_NNODES", default=1),
    )


def is_batch_script(environ: Mapping[str, str], root: Path) -> bool:
    """Whether this process belongs to a batch script. One that was submitted from within a step has
    inherited that step's variables, and isn't told from a task by its own."""
    process = root / "proc" / environ.get("SLURM_TASK_PID", "none") / "cmdline"
    try:
        return b"/slurm_script\0" in process.read_bytes() + b"\0"
    except OSError:
        return False


def switches_of(environ: Mapping[str, str]) -> tuple[str, ...]:
    """The switches between this node and the others, outermost first, as topology/tree and
    topology/block tell them."""
    address = environ.get("SLURM_TOPOLOGY_ADDR", "").split(".")
    pattern = environ.get("SLURM_TOPOLOGY_ADDR_PATTERN", "").split(".")
    if len(address) != len(pattern):  # a name with a dot in it: nothing can be told apart
        return ()
    kinds = zip(pattern, address, strict=True)
    return tuple(name for kind, name in kinds if kind in ("switch", "block"))


def _name(environ: Mapping[str, str]) -> str:
    """`Task.name`. SLURM counts jobs, and steps in a job, from 0 on each cluster."""
    cluster = environ.get("SLURM_CLUSTER_NAME", "cluster")
    job = environ.get("SLURM_JOB_ID") or environ.get("SLURM_JOBID", "0")
    step = environ.get("SLURM_STEP_ID") or environ.get("SLURM_STEPID", "0")
    return f"{cluster}-{job}.{step}-{environ.get('SLURM_RESTART_COUNT', '0')}"


def _number(environ: Mapping[str, str], *names: str, default: int | None = None) -> int:
    """The first of these variables that is set."""
    name = next((name for name in names if name in environ), None)
    if name is None:
        if default is not None:
            return default
        raise GridError(f"{names[0]} isn't set; start ranks by srun, one task each")
    if not environ[name].isdigit():
        raise GridError(f"{name}={environ[name]!r} must be a whole number; start ranks by srun")
    return int(environ[name])
