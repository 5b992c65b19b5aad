"""Ranks of one machine, started through torchrun's agent.

    megagrid train RECIPE      this process checks the recipe, imports no torch, and becomes …
      agent                    … `python -m megagrid.train.launch`: starts ranks, waits, reports
        rank 0, 1, …           `python -m megagrid train RECIPE` with RANK set

On several machines torchrun is started by hand, or by a scheduler, with `-m megagrid train RECIPE`.
"""

from __future__ import annotations

import json
import logging
import os
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from megagrid.errors import GridError, MegagridError
from megagrid.grid import bootstrap

if TYPE_CHECKING:
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

RANKS_PER_CORE = 16
"""More would only fill the memory: such a grid is meant for a cluster."""

SECONDS_BETWEEN_LOOKS = 1.0
"""At the launcher, by its ranks."""

USER_MISTAKE = 2
CRASHED = 1


def start_ranks(count: int, arguments: Sequence[str]) -> NoReturn:
    """Become the agent of `count` ranks on this machine, each `megagrid *arguments`.

    The process is replaced, so that its exit code and the signals sent to it are the agent's.

    Raises:
        GridError: this machine is far too small for so many.
    """
    if count > RANKS_PER_CORE * bootstrap.cores():
        raise GridError(
            f"the grid has {count} ranks, too many for the {bootstrap.cores()} cores of this "
            "machine; make the parallel.* sizes smaller, or start torchrun on several machines"
        )
    sys.stdout.flush()
    sys.stderr.flush()
    command = [sys.executable, "-m", "megagrid.train.launch", str(count), *arguments]
    os.execve(sys.executable, command, bootstrap.environment_for_ranks(count))


def end_with_launcher() -> None:
    """See to it that this rank ends if the process that started it is gone.

    Ranks have sessions of their own, so a launcher that was killed (out of memory, a time limit)
    would leave them training on, where nobody looks for them.
    """
    launcher = os.getppid()

    def watch() -> None:
        while os.getppid() == launcher:
            time.sleep(SECONDS_BETWEEN_LOOKS)
        os.kill(os.getpid(), signal.SIGTERM)  # as the launcher would have done

    threading.Thread(target=watch, name="launcher", daemon=True).start()


def record_mistake(error: MegagridError, path: str) -> None:
    """Leave a rank's mistake at `path`, where the agent that started it looks for one.

    torchrun has a function for that, but it comes with torch, whose import takes seconds in which
    the ranks that were faster are gone and the agent ends this one.
    """
    extra = {"py_callstack": f"error: {error}", "timestamp": str(int(time.time()))}
    message = {"message": f"{type(error).__name__}: {error}", "extraInfo": extra}
    Path(path).write_text(json.dumps({"message": message}), encoding="utf-8")


def main(argv: Sequence[str]) -> int:
    """The agent: run the ranks to their end and return one exit code for all of them."""
    from torch.distributed import run
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    count, *arguments = argv
    # Failures are reported below, once and in a line; torchrun's own report is a page.
    logging.disable(logging.ERROR)
    # torchrun leaves its folder for what ranks record behind, wherever it is, so it gets a
    # passing one. --standalone lets the system choose the port: two runs on a host never collide.
    with tempfile.TemporaryDirectory(prefix="megagrid-") as folder:
        options = ["--standalone", "--nproc-per-node", count, "--log-dir", folder]
        try:
            run.run(run.parse_args([*options, "-m", "megagrid", *arguments]))
        except ChildFailedError as error:
            return _report(error)
        except SignalException as error:
            return 128 + error.sigval
    return 0


def _report(error: ChildFailedError) -> int:
    """Tell the user why the ranks ended, in one line; the exit code to leave with.

    A mistake of the user comes first: a rank that waited for the one that met it fails as well.
    """
    failures = error.failures
    mistaken = [rank for rank, failure in failures.items() if failure.exitcode == USER_MISTAKE]
    if mistaken:
        message = failures[min(mistaken)].message
        text = message["message"].partition(": ")[2] if isinstance(message, dict) else message
        print("error:", " ".join(text.splitlines()), file=sys.stderr)
        return USER_MISTAKE
    rank, first = error.get_first_failure()
    if first.exitcode < 0:
        ended = f"was ended by {signal.Signals(-first.exitcode).name}"
    else:
        ended = f"ended with exit code {first.exitcode}; its traceback is above"
    print(f"error: rank {rank} {ended}", file=sys.stderr)
    return CRASHED


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
