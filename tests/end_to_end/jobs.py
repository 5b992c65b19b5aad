"""Commands as processes, with launchers and ranks of their own."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from copy import copy
from dataclasses import dataclass
from pathlib import Path

from megagrid.config.dump import dump
from megagrid.grid.placement import Placement
from megagrid.train.metrics import read_records
from tests.end_to_end.t0 import Sections, t0

REPOSITORY = Path(__file__).parents[2]
PATIENCE_SECONDS = 240.0
"""Bound of every wait, for a machine that is busy with other things."""


@dataclass(frozen=True)
class Ended:
    """How a command ended."""

    code: int
    out: str
    err: str


def parent(pid: int) -> int | None:
    """The process that started `pid`; None once it is gone."""
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    except OSError:
        return None


class Job:
    """A command of Python's, with its recipe and its run in `folder`."""

    def __init__(
        self, folder: Path, placement: Placement, *parts: Sections, starter: str = "megagrid"
    ) -> None:
        self.folder = folder
        self.recipe = folder / "recipe.toml"
        self.recipe.write_text(dump(t0(folder / "run", placement, *parts)), encoding="utf-8")
        self._command = [sys.executable, "-m", *starter.split(), "train", str(self.recipe)]
        self._process: subprocess.Popen | None = None
        self._outputs = (folder / "out", folder / "err")

    @property
    def run(self) -> Path:
        return self.folder / "run"

    def nodes(self, nodes: str) -> list[Job]:
        """The same command on so many nodes of this host; `nodes` as --nnodes has it."""
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            where = f"127.0.0.1:{free.getsockname()[1]}"
        shared = ["--nnodes", nodes, "--rendezvous", where]
        made = []
        for number in range(int(nodes.rpartition(":")[2])):
            node = copy(self)
            node._command = [*self._command, *shared, "--node-rank", str(number)]
            node._outputs = tuple(self.folder / f"{name}{number}" for name in ("out", "err"))
            made.append(node)
        return made

    def start(self, *overrides: str, **environment: str) -> Job:
        out_path, err_path = self._outputs
        with out_path.open("w") as out, err_path.open("w") as err:
            self._process = subprocess.Popen(
                [*self._command, *overrides],
                env=os.environ | {"PYTHONPATH": str(REPOSITORY)} | environment,
                stdout=out,
                stderr=err,
                start_new_session=True,
            )
        return self

    def enter(self, group: Path) -> None:
        """Have the launcher, and the ranks that it will start, in a control group."""
        (group / "cgroup.procs").write_text(str(self._process.pid))

    def pids(self) -> dict[int, bytes]:
        """Processes that have the recipe among their arguments, with those."""
        found = {}
        for path in Path("/proc").glob("[0-9]*/cmdline"):
            try:
                arguments = path.read_bytes()
            except OSError:  # it has ended meanwhile
                continue
            if str(self.recipe).encode() in arguments:
                found[int(path.parent.name)] = arguments
        return found

    def ranks(self) -> list[int]:
        """The processes that train, in the order of their start."""
        return sorted(pid for pid in self.pids() if parent(pid) == self._process.pid)

    def wait_for_step(self, step: int) -> None:
        """Until the run has recorded `step`."""
        metrics = self.run / "metrics.jsonl"
        self.wait_until(lambda: metrics.exists() and len(read_records(metrics)) >= step)

    def wait_until(self, event: Callable[[], bool]) -> None:
        """Until `event` is so, while the command runs."""
        deadline = time.monotonic() + PATIENCE_SECONDS
        while not event():
            assert self._process.poll() is None, self._outputs[1].read_text()
            assert time.monotonic() < deadline
            time.sleep(0.05)

    def end(self) -> Ended:
        """Wait for the command, and for every process it has started."""
        code = self._process.wait(PATIENCE_SECONDS)
        deadline = time.monotonic() + PATIENCE_SECONDS
        while self.pids():
            assert time.monotonic() < deadline, f"left behind: {self.pids()}"
            time.sleep(0.05)
        return Ended(code, *(path.read_text() for path in self._outputs))

    def kill(self) -> None:
        """End whatever is left of it."""
        if self._process is not None:
            for pid in self.pids():
                os.kill(pid, signal.SIGKILL)
            self._process.wait()

    def signal(self, number: signal.Signals) -> None:
        """To the process that the user has started."""
        os.kill(self._process.pid, number)
