"""A real SLURM on this machine, for the tests: tools/slurm_cluster.sh, and its commands."""

from __future__ import annotations

import os
import re
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from megagrid.train.metrics import read_records

REPOSITORY = Path(__file__).parents[2]
TOOL = REPOSITORY / "tools/slurm_cluster.sh"

NODES, CPUS_PER_NODE = 4, 8

PATIENCE_SECONDS = 240.0
"""Bound of every wait, for a machine that is busy with other things."""

ENDED = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "OUT_OF_MEMORY", "PREEMPTED")


def why_no_cluster() -> str | None:
    """Why this machine can't have one, and what to do about it; None if it can."""
    if os.geteuid() != 0:
        return "starting SLURM takes root: sudo ./tests/run.sh tests/slurm"
    if shutil.which("slurmctld") or shutil.which("apt-get"):
        return None
    return "SLURM isn't installed, and there is no apt-get: install slurmctld, slurmd and munge"


class Cluster:
    """SLURM's daemons, and jobs on them; ended by `stop`."""

    def __init__(self, folder: Path, prefix: str = "mgtest", gpus: int = 0) -> None:
        self.folder = folder
        self.environment = os.environ | {
            "CLUSTER_DIR": str(folder),
            "CLUSTER_NODES": str(NODES),
            "CLUSTER_CPUS": str(CPUS_PER_NODE),
            "CLUSTER_PORT": str(_free_ports(101 + NODES)),
            "CLUSTER_PREFIX": prefix,
            "CLUSTER_GPUS": str(gpus),
            "SLURM_CONF": str(folder / "slurm.conf"),
            "PYTHONPATH": str(REPOSITORY),
        }

    @property
    def python(self) -> str:
        """That runs megagrid, in jobs too."""
        return sys.executable

    def tool(self, verb: str, timeout: float = 600) -> subprocess.CompletedProcess[str]:
        """`tools/slurm_cluster.sh VERB`."""
        return subprocess.run(
            [str(TOOL), verb], env=self.environment, capture_output=True, text=True, timeout=timeout
        )

    def run(self, *command: str | Path, cwd: Path | None = None) -> str:
        """What a command that must work prints."""
        done = subprocess.run(
            list(map(str, command)), cwd=cwd, env=self.environment, capture_output=True, text=True
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    def submit(self, recipe: Path, *arguments: str) -> Job:
        """`megagrid submit`, in the recipe's folder."""
        command = (sys.executable, "-m", "megagrid", "submit", str(recipe), *arguments)
        return Job(self, self._number(self.run(*command, cwd=recipe.parent)), recipe)

    def sbatch(self, recipe: Path, *arguments: str | Path) -> Job:
        """`sbatch`, in the recipe's folder."""
        said = self.run("sbatch", "--output=%j.out", *arguments, cwd=recipe.parent)
        return Job(self, self._number(said), recipe)

    @staticmethod
    def _number(said: str) -> str:
        return re.search(r"[Ss]ubmitted (?:batch )?jobs? (\d+)", said)[1]


class Job:
    """A job, and the processes that have its recipe among their arguments."""

    def __init__(self, cluster: Cluster, number: str, recipe: Path) -> None:
        self.number = number
        self.folder = recipe.parent
        self._cluster = cluster
        self._recipe = recipe

    def facts(self, number: str | None = None) -> dict[str, str]:
        """What SLURM says of it: JobState, Restarts, ExitCode, …"""
        shown = self._cluster.run("scontrol", "show", "job", "--oneliner", number or self.number)
        return dict(re.findall(r"(\w+)=(\S*)", shown.splitlines()[0]))

    def end(self, number: str | None = None) -> dict[str, str]:
        """Wait for it; its facts then."""
        deadline = time.monotonic() + PATIENCE_SECONDS
        while (facts := self.facts(number))["JobState"] not in ENDED:
            assert time.monotonic() < deadline, (facts, self.out())
            time.sleep(0.1)
        return facts

    def out(self) -> str:
        """What it has said, on all of its starts."""
        found = [*self.folder.glob(f"**/{self.number}.out")]
        return found[0].read_text() if found else ""

    def wait_for_step(self, step: int, run: str = "run") -> None:
        """Until the run in that folder beside the recipe has recorded `step`."""
        metrics = self.folder / run / "metrics.jsonl"
        self.wait_until(lambda: metrics.exists() and len(read_records(metrics)) >= step)

    def wait_until(self, event: Callable[[], bool]) -> None:
        """Until `event` is so."""
        deadline = time.monotonic() + PATIENCE_SECONDS
        while not event():
            assert time.monotonic() < deadline, self.out()
            time.sleep(0.05)

    def processes(self) -> dict[int, list[bytes]]:
        """Those that are there, with their arguments."""
        found = {}
        for path in Path("/proc").glob("[0-9]*/cmdline"):
            try:
                arguments = path.read_bytes().split(b"\0")
            except OSError:  # it has ended meanwhile
                continue
            if any(self._is_recipe(argument, path.parent) for argument in arguments):
                found[int(path.parent.name)] = arguments
        return found

    def _is_recipe(self, argument: bytes, process: Path) -> bool:
        """Whether it is the recipe, or the copy that the submission has made of it."""
        if not argument.endswith(b".toml"):
            return False
        try:
            path = (process / "cwd").readlink() / argument.decode()
        except OSError:
            return False
        return path.is_relative_to(self.folder)

    def ranks(self) -> list[int]:
        """The processes that train, in the order of their start."""
        return sorted(pid for pid, words in self.processes().items() if words[0] != b"srun")


def _free_ports(count: int) -> int:
    """The first of `count` ports in a row that nobody listens at, below those that the system gives
    to whoever asks for any."""
    for first in range(17000, 30000, 500):
        sockets = []
        try:
            for port in range(first, first + count):
                sockets.append(socket.create_server(("127.0.0.1", port)))
            return first
        except OSError:
            continue
        finally:
            for one in sockets:
                one.close()
    raise RuntimeError("no free ports")
