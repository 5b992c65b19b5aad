"""Who this process is: the only module that reads the environment. Pure, no torch.

A rank is told by its launcher: torchrun sets RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE,
GROUP_RANK, MASTER_ADDR and MASTER_PORT. A process without RANK is a run of one.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from megagrid.errors import GridError

LAUNCHER = "MEGAGRID_LAUNCHER"

RESTARTS = ("SLURM_RESTART_COUNT", "TORCHELASTIC_RESTART_COUNT")
"""How often SLURM has queued a job again, and torchrun started its ranks again."""

DETERMINISTIC = {
    # cuBLAS then has one workspace, of a size that doesn't depend on what else runs, and splits a
    # product alike each time. torch refuses its deterministic mode without it.
    "CUBLAS_WORKSPACE_CONFIG": ":4096:8",
    # Sums made in the switch have the order in which messages reach it; rings and trees have one.
    "NCCL_NVLS_ENABLE": "0",
}
"""What `train.deterministic` says to libraries that read the environment as they start."""


@dataclass(frozen=True)
class RankEnvironment:
    """What the launcher says of a rank.

    Attributes:
        rank: number among all ranks, `world_size` of them.
        local_rank: number among the ranks of its node, `local_world_size` of them.
        node: number of its node.
        master_address, master_port: where rank 0 listens; None for a run of one.
        launcher: process id of the `megagrid train` that started the rank and tells the user of
            its mistakes. None under any other launcher, where rank 0 tells them.
        error_file: where torchrun's agent looks for the reason why the rank ended.
    """

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    local_world_size: int = 1
    node: int = 0
    master_address: str | None = None
    master_port: int | None = None
    launcher: int | None = None
    error_file: str | None = None


@dataclass(frozen=True)
class Job:
    """What scheduler and launcher call this start of a run.

    Attributes:
        id: of the job, an array's with the task's number; None without a scheduler.
        restarts: how often either has started it again.
    """

    id: str | None = None
    restarts: int = 0


def is_rank(environ: Mapping[str, str] = os.environ) -> bool:
    """Whether a launcher started this process as a rank of a run."""
    return "RANK" in environ


def read(environ: Mapping[str, str] = os.environ) -> RankEnvironment:
    """This process's place in the run.

    Raises:
        GridError: naming the variable that is missing, no number or out of range.
    """
    if not is_rank(environ):
        return RankEnvironment()
    world_size = _number(environ, "WORLD_SIZE")
    local_world_size = _number(environ, "LOCAL_WORLD_SIZE", default=world_size)
    rank = _number(environ, "RANK")
    if not 0 <= rank < world_size:
        raise GridError(f"RANK={rank} must be below WORLD_SIZE={world_size}; start with torchrun")
    if "MASTER_ADDR" not in environ:
        raise GridError("RANK is set but MASTER_ADDR is not; start ranks with torchrun")
    return RankEnvironment(
        rank=rank,
        world_size=world_size,
        local_rank=_number(environ, "LOCAL_RANK", default=rank % local_world_size),
        local_world_size=local_world_size,
        node=_number(environ, "GROUP_RANK", default=rank // local_world_size),
        master_address=environ["MASTER_ADDR"],
        master_port=_number(environ, "MASTER_PORT"),
        launcher=_number(environ, LAUNCHER) if LAUNCHER in environ else None,
        error_file=environ.get("TORCHELASTIC_ERROR_FILE"),
    )


def read_job(environ: Mapping[str, str] = os.environ) -> Job:
    """The job that this process is of."""
    job, task = environ.get("SLURM_ARRAY_JOB_ID"), environ.get("SLURM_ARRAY_TASK_ID")
    counts = (environ.get(name, "") for name in RESTARTS)
    return Job(
        id=f"{job}_{task}" if job and task else environ.get("SLURM_JOB_ID"),
        restarts=sum(int(count) for count in counts if count.isdigit()),
    )


def environment_for_ranks(
    local_world_size: int, environ: Mapping[str, str] = os.environ
) -> dict[str, str]:
    """What ranks started by `megagrid train` inherit: its environment, and a share of the cores.

    torch would give every rank a thread per core, and ranks that wait for each other while their
    threads fight for cores are many times slower. A stated OMP_NUM_THREADS wins.
    """
    threads = max(1, cores() // local_world_size)
    return {"OMP_NUM_THREADS": str(threads), **environ}


def become_launcher() -> None:
    """Leave word in the environment, which ranks inherit, that this process is their launcher.

    A rank can't find out by itself: its parent may have been killed before it could ask.
    """
    os.environ[LAUNCHER] = str(os.getpid())


def make_deterministic() -> None:
    """Leave word for this process's libraries, before they are loaded; what is stated wins."""
    for name, value in DETERMINISTIC.items():
        os.environ.setdefault(name, value)


def cores() -> int:
    """CPU cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def memory_bytes(root: Path = Path("/")) -> int:
    """Memory that the processes here may use together: the machine's, or the share of it that a
    container or a job has."""
    machine = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return min([machine, *_control_group_limits(root)])


def _control_group_limits(root: Path) -> Iterator[int]:
    """Memory limits of this process's control group and of those around it, of either version."""
    for line in _read(root / "proc/self/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        if not controllers:
            base, limit = root / "sys/fs/cgroup", "memory.max"
        elif "memory" in controllers.split(","):
            base, limit = root / "sys/fs/cgroup/memory", "memory.limit_in_bytes"
        else:
            continue
        # In a container the path may be that of the host. Then the group is what lies at `base`.
        group = base / path.strip("/")
        for folder in (group, *group.parents):
            if (text := _read(folder / limit).strip()).isdigit():  # "max": none
                yield int(text)


def _read(path: Path) -> str:
    """Text of a file of the system's, which some systems don't have."""
    try:
        return path.read_text(encoding="utf-8")
    except OSError:
        return ""


def _number(environ: Mapping[str, str], name: str, default: int | None = None) -> int:
    text = environ.get(name)
    if text is None and default is not None:
        return default
    if text is None or not text.isdigit():
        raise GridError(f"{name}={text!r} must be a whole number; start ranks with torchrun")
    return int(text)
