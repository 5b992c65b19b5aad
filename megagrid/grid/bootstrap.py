"""Who this process is: the only module that reads the environment. Pure, no torch.

A rank is told by its launcher. torchrun sets RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE,
GROUP_RANK, MASTER_ADDR and MASTER_PORT. SLURM's srun sets variables of its own for each task of a
step of several, see `megagrid.grid.slurm`; inside a step torchrun's win, for there a task is the
agent of its node. Any other process is a run of one.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

from megagrid.errors import GridError
from megagrid.grid.slurm import Task, is_batch_script, switches_of, task_of

LAUNCHER = "MEGAGRID_LAUNCHER"
QUIET = "MEGAGRID_QUIET_LAUNCHER"

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

VISIBLE_DEVICES = (
    "CUDA_VISIBLE_DEVICES",
    "HIP_VISIBLE_DEVICES",
    "ROCR_VISIBLE_DEVICES",
    "ZE_AFFINITY_MASK",
    "ASCEND_RT_VISIBLE_DEVICES",
    "SLURM_STEP_GPUS",
)
"""What tells a process which devices of its node it may use, of several makers."""

GLOO_INTERFACE, NCCL_INTERFACE = "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"

ROOT = Path("/")


@dataclass(frozen=True)
class RankEnvironment:
    """What the launcher says of a rank.

    Attributes:
        rank: number among all ranks, `world_size` of them.
        local_rank: number among the ranks of its node.
        node: number of its node, where the launcher numbers nodes. Two agents of torchrun on one
            host are two nodes: so a cluster can be tried out on one machine.
        host: name of its node, as SLURM knows it, or else as the system does.
        switches: between its node and others, outermost first; none where SLURM tells none.
        visible_devices: what `VISIBLE_DEVICES` say.
        master_address, master_port: where the ranks meet, if that is stated.
        has_agent_store: torchrun's agent listens there, not rank 0.
        step: name of SLURM's step that the rank is a task of; see `megagrid.grid.slurm.Task`.
        launcher: process id of the `megagrid train` that started the rank and tells the user of
            its mistakes. None under any other launcher, where rank 0 tells them.
        agent: process id of the one that started the rank and looks after it, `launcher` or
            torchrun's own agent; None where nobody does.
        error_file: where torchrun's agent looks for the reason why the rank ended.
        launch: stands for the launcher's work from its start to its end, however often it starts
            its ranks; None where it starts them once.
    """

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    node: int = 0
    host: str = "localhost"
    switches: tuple[str, ...] = ()
    visible_devices: tuple[str, ...] = ()
    master_address: str | None = None
    master_port: int | None = None
    has_agent_store: bool = False
    step: str | None = None
    launcher: int | None = None
    agent: int | None = None
    error_file: str | None = None
    launch: str | None = None


@dataclass(frozen=True)
class Job:
    """What scheduler and launcher call this start of a run.

    Attributes:
        id: of the job, an array's with the task's number; None without a scheduler.
        restarts: how often either has started it again.
    """

    id: str | None = None
    restarts: int = 0


def is_rank(environ: Mapping[str, str] = os.environ, root: Path = ROOT) -> bool:
    """Whether a launcher started this process as a rank of a run."""
    return "RANK" in environ or _task(environ, root) is not None


def is_one_per_node(environ: Mapping[str, str] = os.environ, root: Path = ROOT) -> bool:
    """Whether this is the only task of its step on its node, of several nodes: a rank of a run that
    has one on each, or else what is to start the ranks of its node."""
    task = None if "RANK" in environ else _task(environ, root)
    return task is not None and task.tasks == task.nodes


def host_name(environ: Mapping[str, str] = os.environ) -> str:
    """This machine, as SLURM calls it, or else as it calls itself."""
    return environ.get("SLURMD_NODENAME") or socket.gethostname()


def read(environ: Mapping[str, str] = os.environ, root: Path = ROOT) -> RankEnvironment:
    """This process's place in the run.

    Raises:
        GridError: naming the variable that is missing, no number or out of range.
    """
    where = dict(
        host=host_name(environ),
        switches=switches_of(environ),
        visible_devices=tuple(environ.get(name, "") for name in VISIBLE_DEVICES),
    )
    if "RANK" in environ:
        return RankEnvironment(**_of_torchrun(environ, root), **where)
    task = _task(environ, root)
    if task is None:
        return RankEnvironment(**where)
    if ("MASTER_ADDR" in environ) != ("MASTER_PORT" in environ):
        raise GridError("state both of MASTER_ADDR and MASTER_PORT, or neither")
    return RankEnvironment(
        rank=task.number,
        world_size=task.tasks,
        local_rank=task.local,
        node=task.node,
        master_address=environ.get("MASTER_ADDR"),
        master_port=_number(environ, "MASTER_PORT") if "MASTER_PORT" in environ else None,
        step=task.name,
        **where,
    )


def _of_torchrun(environ: Mapping[str, str], root: Path) -> dict[str, Any]:
    """What RANK and the variables that go with it say."""
    launcher = _number(environ, LAUNCHER) if LAUNCHER in environ else None
    is_of_agent = "TORCHELASTIC_RUN_ID" in environ
    world_size = _number(environ, "WORLD_SIZE")
    local_world_size = _number(environ, "LOCAL_WORLD_SIZE", default=world_size)
    rank = _number(environ, "RANK")
    if not 0 <= rank < world_size:
        raise GridError(f"RANK={rank} must be below WORLD_SIZE={world_size}; start with torchrun")
    if "MASTER_ADDR" not in environ:
        raise GridError("RANK is set but MASTER_ADDR is not; start ranks with torchrun")
    return dict(
        rank=rank,
        world_size=world_size,
        local_rank=_number(environ, "LOCAL_RANK", default=rank % local_world_size),
        node=_number(environ, "GROUP_RANK", default=rank // local_world_size),
        master_address=environ["MASTER_ADDR"],
        master_port=_number(environ, "MASTER_PORT"),
        has_agent_store=environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True",
        launcher=launcher,
        agent=os.getppid() if is_of_agent and launcher is None else launcher,
        error_file=environ.get("TORCHELASTIC_ERROR_FILE"),
        launch=_launch(environ, root) if is_of_agent else None,
    )


def read_job(environ: Mapping[str, str] = os.environ) -> Job:
    """The job that this process is of."""
    job, task = environ.get("SLURM_ARRAY_JOB_ID"), environ.get("SLURM_ARRAY_TASK_ID")
    counts = (environ.get(name, "") for name in RESTARTS)
    return Job(
        id=f"{job}_{task}" if job and task else environ.get("SLURM_JOB_ID"),
        restarts=sum(int(count) for count in counts if count.isdigit()),
    )


def _task(environ: Mapping[str, str], root: Path) -> Task | None:
    """The task of SLURM's that this process is, as a rank of several.

    A step of one task is a process like any: an interactive shell, or what starts the ranks of a
    node.
    """
    task = task_of(environ)
    if task is None or task.tasks == 1 or is_batch_script(environ, root):
        return None
    return task


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

    A rank can't find out by itself: its parent may have been killed before it could ask. And no
    signal is left to torchrun's agent, which would end by it while the ranks still save.
    """
    os.environ[LAUNCHER] = str(os.getpid())
    os.environ["TORCHELASTIC_SIGNALS_TO_HANDLE"] = ""
    if os.environ.pop(QUIET, None):
        os.environ.pop("TORCH_CPP_LOG_LEVEL")


def environment_for_launcher(environ: Mapping[str, str]) -> dict[str, str]:
    """What the launcher starts with: it tells of a lost node in a line, and torch's pages of it are
    left out. They aren't for ranks: see `become_launcher`."""
    if "TORCH_CPP_LOG_LEVEL" in environ:
        return dict(environ)
    return {**environ, "TORCH_CPP_LOG_LEVEL": "FATAL", QUIET: "1"}


def stated_interfaces(
    *, talks_nccl: bool, environ: Mapping[str, str] = os.environ
) -> dict[str, str]:
    """The variables that name an interface to whichever library opens connections here."""
    names = (GLOO_INTERFACE, *([NCCL_INTERFACE] if talks_nccl else []))
    return {name: environ[name] for name in names if environ.get(name)}


def use_interface(name: str | None) -> None:
    """Leave word for gloo, which reads it with every process group that it makes."""
    if name is not None:
        os.environ[GLOO_INTERFACE] = name


def make_deterministic() -> None:
    """Leave word for this process's libraries, before they are loaded; what is stated wins."""
    for name, value in DETERMINISTIC.items():
        os.environ.setdefault(name, value)


def cores() -> int:
    """CPU cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def memory_bytes(root: Path = ROOT) -> int:
    """Memory that the processes here may use together: the machine's, or the share of it that a
    container or a job has."""
    machine = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return min([machine, *_control_group_limits(root)])


def out_of_memory_kills(root: Path = ROOT) -> int | None:
    """How often the system has killed a process of this one's control group, or of the machine
    where groups aren't counted, because memory was full; None if it doesn't say."""
    texts = (_read(folder / files["kills"]) for folder, files in _control_groups(root))
    for text in (*texts, _read(root / "proc/vmstat")):
        counts = dict(line.split(maxsplit=1) for line in text.splitlines())
        if "oom_kill" in counts:
            return int(counts["oom_kill"])
    return None


def _control_group_limits(root: Path) -> Iterator[int]:
    for folder, files in _control_groups(root):
        if (text := _read(folder / files["limit"]).strip()).isdigit():  # "max": none
            yield int(text)


_CONTROL_GROUPS = MappingProxyType(
    {
        1: {
            "base": "sys/fs/cgroup/memory",
            "limit": "memory.limit_in_bytes",
            "kills": "memory.oom_control",
        },
        2: {"base": "sys/fs/cgroup", "limit": "memory.max", "kills": "memory.events"},
    }
)
"""Version -> where its folders lie, and names of files in them."""


def _control_groups(root: Path) -> Iterator[tuple[Path, dict[str, str]]]:
    """Folders, and names of files, of this process's control group and of those around it, of
    either version."""
    for line in _read(root / "proc/self/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers and "memory" not in controllers.split(","):
            continue
        files = _CONTROL_GROUPS[1 if controllers else 2]
        # In a container the path may be that of the host. Then the group is what lies at the base.
        group = root / files["base"] / path.strip("/")
        yield from ((folder, files) for folder in (group, *group.parents))


def _launch(environ: Mapping[str, str], root: Path) -> str:
    """A name for what torchrun's agent does from its start to its end. The run id alone is often
    chosen by hand, and the same for all jobs, as the process id may be in a container; and what the
    ranks are told of the number of their starts isn't the same on all nodes."""
    agent = os.getppid()
    # Since the system's start, in ticks; see proc_pid_stat(5).
    began = _read(root / f"proc/{agent}/stat").rpartition(")")[2].split()[19:20]
    system = _read(root / "proc/sys/kernel/random/boot_id").split()
    run = environ["TORCHELASTIC_RUN_ID"]
    return " ".join([run, os.uname().nodename, str(agent), *began, *system])


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
