"""Ranks of this machine, started through torchrun's agent.

    megagrid train RECIPE      this process checks the recipe, imports no torch, and becomes …
      launcher                 … `python -m megagrid.launcher.agent`: starts ranks, waits, reports
        rank 0, 1, …           `python -m megagrid train RECIPE` with RANK set

On several machines the same is started on each, with a --node-rank of its own.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import NamedTuple, NoReturn, Self

from megagrid.errors import GridError, MegagridError
from megagrid.grid import bootstrap

RANKS_PER_CORE = 16
"""More would only fill the memory: such a grid is meant for a cluster."""

SECONDS_BETWEEN_LOOKS = 1.0
"""At the launcher, by its ranks."""

BEGUN = "begun"
"""File beside a rank's error file: it has made a step."""

_PR_SET_PDEATHSIG = 1


class Rendezvous(NamedTuple):
    """Where the launcher of the first node listens for the others."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"{self.host}:{self.port}"


THIS_MACHINE = Rendezvous("127.0.0.1", 0)
"""For a job of one node; the system chooses the port, so that two jobs never collide."""


@dataclass(frozen=True)
class Launch:
    """What a launcher is told.

    Attributes:
        recipe, overrides: of the run.
        ranks: to start on this node.
        fewest, most: nodes of the job.
        node: the number of this one.
        max_restarts: of all ranks, after crashes.
        mistake: what ends this node before it has ranks, to be told to the others.
    """

    recipe: str
    overrides: Sequence[str] = ()
    ranks: int = 1
    fewest: int = 1
    most: int = 1
    node: int = 0
    rendezvous: Rendezvous = THIS_MACHINE
    max_restarts: int = 0
    mistake: str | None = None

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Self:
        values = json.loads(text)
        return cls(**values | {"rendezvous": Rendezvous(*values["rendezvous"])})


def check_cores(ranks: int) -> None:
    """
    Raises:
        GridError: this machine is far too small for so many.
    """
    if ranks > RANKS_PER_CORE * bootstrap.cores():
        raise GridError(
            f"{ranks} ranks are too many for the {bootstrap.cores()} cores of this machine; make "
            "the parallel.* sizes smaller, or spread them over several machines with --nnodes"
        )


def start_ranks(launch: Launch) -> NoReturn:
    """Become the launcher of a node's ranks.

    The process is replaced, so that its exit code and the signals sent to it are the launcher's.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    command = [sys.executable, "-m", "megagrid.launcher.agent", launch.to_json()]
    environment = bootstrap.environment_for_ranks(launch.ranks)
    os.execve(sys.executable, command, bootstrap.environment_for_launcher(environment))


def end_with_launcher(launcher: int, seconds_to_stop: int) -> None:
    """See to it that this rank ends if the process that started it, `launcher`, is gone.

    Ranks have sessions of their own, so a launcher that was killed (out of memory, a time limit)
    would leave them training on, where nobody looks for them. They are asked to stop as the
    launcher would have asked them, and killed if they can't. One that a signal has stopped couldn't
    even be asked: the system lets it go on when its launcher ends.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGCONT)

    def watch() -> None:
        while os.getppid() == launcher:
            time.sleep(SECONDS_BETWEEN_LOOKS)
        told = "warning: the launcher of this node's ranks is gone, so the run is asked to stop"
        print(told, file=sys.stderr, flush=True)
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(seconds_to_stop)
        os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=watch, name="launcher", daemon=True).start()


def record_mistake(error: MegagridError, path: str) -> None:
    """Leave a rank's mistake at `path`, where the agent that started it looks for one.

    torchrun has a function for that, but it comes with torch, whose import takes seconds in which
    the ranks that were faster are gone and the agent ends this one.
    """
    _record(path, error.exit_code, f"{type(error).__name__}: {error}", f"error: {error}")


def record_stop(code: int, path: str) -> None:
    """The same for the exit code of a rank that was asked to stop."""
    text = "a signal asked the run to stop; it is saved"
    _record(path, code, f"Stopped: {text}", text)


class FirstStep:
    """Where a rank's records go for its launcher to learn that it has made a step: a run that has
    never made one isn't started again.

    Args:
        error_file: of the rank.
    """

    def __init__(self, error_file: str) -> None:
        self._path = Path(error_file).with_name(BEGUN)

    def write(self, record: object) -> None:
        self._path.touch()

    def rewind(self, step: int) -> None:
        """It has made one nevertheless."""

    def close(self) -> None:
        """Nothing is open."""


def _record(path: str, code: int, message: str, shown: str) -> None:
    """In the form that torchrun reads; `shown` is what it shows of it."""
    extra = {"py_callstack": shown, "timestamp": str(int(time.time())), "exit_code": code}
    content = {"message": {"message": message, "extraInfo": extra}}
    Path(path).write_text(json.dumps(content), encoding="utf-8")
