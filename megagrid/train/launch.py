"""Ranks of one machine, started through torchrun's agent.

    megagrid train RECIPE      this process checks the recipe, imports no torch, and becomes …
      agent                    … `python -m megagrid.train.launch`: starts ranks, waits, reports
        rank 0, 1, …           `python -m megagrid train RECIPE` with RANK set

On several machines torchrun is started by hand, or by a scheduler, with `-m megagrid train RECIPE`.
"""

from __future__ import annotations

import contextlib
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
from typing import TYPE_CHECKING, Any, NoReturn

from megagrid.errors import GridError, MegagridError
from megagrid.exit_codes import CRASHED, PEER_LOST, STOPPED, USER_MISTAKE
from megagrid.grid import bootstrap

if TYPE_CHECKING:
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

RANKS_PER_CORE = 16
"""More would only fill the memory: such a grid is meant for a cluster."""

SECONDS_BETWEEN_LOOKS = 1.0
"""At the launcher, by its ranks."""

PASSED_ON = "SIGTERM,SIGUSR1,SIGINT,SIGHUP,SIGQUIT"
"""Signals to the agent that it sends on to the ranks, after which it waits for their end."""


def start_ranks(
    count: int, arguments: Sequence[str], seconds_to_stop: int, device: str
) -> NoReturn:
    """Become the agent of `count` ranks on this machine, each `megagrid *arguments`.

    The process is replaced, so that its exit code and the signals sent to it are the agent's.

    Args:
        seconds_to_stop: from a signal on, until ranks that are still there are killed.
        device: see `TrainConfig.device`.

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
    program = [sys.executable, "-m", "megagrid.train.launch"]
    command = [*program, str(count), str(seconds_to_stop), device, *arguments]
    os.execve(sys.executable, command, bootstrap.environment_for_ranks(count))


def end_with_launcher(launcher: int, seconds_to_stop: int) -> None:
    """See to it that this rank ends if the process that started it, `launcher`, is gone.

    Ranks have sessions of their own, so a launcher that was killed (out of memory, a time limit)
    would leave them training on, where nobody looks for them. They are asked to stop as the
    launcher would have asked them, and killed if they can't.
    """

    def watch() -> None:
        while os.getppid() == launcher:
            time.sleep(SECONDS_BETWEEN_LOOKS)
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(seconds_to_stop)
        os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=watch, name="launcher", daemon=True).start()


def record_mistake(error: MegagridError, path: str) -> None:
    """Leave a rank's mistake at `path`, where the agent that started it looks for one.

    torchrun has a function for that, but it comes with torch, whose import takes seconds in which
    the ranks that were faster are gone and the agent ends this one.
    """
    _record(path, USER_MISTAKE, f"{type(error).__name__}: {error}", f"error: {error}")


def record_stop(code: int, path: str) -> None:
    """The same for the exit code of a rank that was asked to stop."""
    text = "a signal asked the run to stop; it is saved"
    _record(path, code, f"Stopped: {text}", text)


def _record(path: str, code: int, message: str, shown: str) -> None:
    """In the form that torchrun reads; `shown` is what it shows of it."""
    extra = {"py_callstack": shown, "timestamp": str(int(time.time())), "exit_code": code}
    content = {"message": {"message": message, "extraInfo": extra}}
    Path(path).write_text(json.dumps(content), encoding="utf-8")


def main(argv: Sequence[str]) -> int:
    """The agent: run the ranks to their end and return one exit code for all of them."""
    from torch.distributed import run
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    from megagrid.grid.start import check_devices

    count, seconds_to_stop, device, *arguments = argv
    try:
        check_devices(device, int(count))
    except GridError as error:
        print(f"error: {error}", file=sys.stderr)
        return USER_MISTAKE
    bootstrap.become_launcher()
    # Failures are reported below, once and in a line; torchrun's own report is a page.
    logging.disable(logging.ERROR)
    # torchrun leaves its folder for what ranks record behind, wherever it is, so it gets a
    # passing one. --standalone lets the system choose the port: two runs on a host never collide.
    with tempfile.TemporaryDirectory(prefix="megagrid-") as folder:
        options = ["--standalone", "--nproc-per-node", count, "--log-dir", folder]
        # torchrun's own half minute may be too short for a step and its save.
        options += ["--signals-to-handle", PASSED_ON, "--shutdown-timeout", seconds_to_stop]
        try:
            run.run(run.parse_args([*options, "-m", "megagrid", *arguments]))
        except ChildFailedError as error:
            return _report(error)
        except SignalException as error:
            return _report_signal(Path(folder), error.sigval)
        finally:
            for name in PASSED_ON.split(","):  # there is nobody left to pass them on to
                signal.signal(signal.Signals[name], signal.SIG_IGN)
    return 0


def _report(error: ChildFailedError) -> int:
    """Tell the user why the ranks ended, in one line; the exit code to leave with.

    A mistake of the user comes first: a rank that waited for the one that met it fails as well.
    """
    failures = error.failures
    mistaken = [rank for rank, failure in failures.items() if failure.exitcode == USER_MISTAKE]
    if mistaken:
        _tell(failures[min(mistaken)].message)
        return USER_MISTAKE
    if any(failure.exitcode == STOPPED for failure in failures.values()):
        return STOPPED  # as rank 0 has said; the save is everyone's, whatever they met after it
    # A rank that was left alone isn't the reason, unless there is no other.
    rank, first = min(
        failures.items(), key=lambda item: (item[1].exitcode == PEER_LOST, item[1].timestamp)
    )
    if first.exitcode < 0:
        ended = f"was ended by {signal.Signals(-first.exitcode).name}"
    elif first.exitcode == PEER_LOST:
        ended = "was left alone, as it says above"
    else:
        ended = f"ended with exit code {first.exitcode}; its traceback is above"
    print(f"error: rank {rank} {ended}", file=sys.stderr)
    return CRASHED


def _report_signal(folder: Path, number: int) -> int:
    """The same after a signal to the agent, which knows no more of its ranks than what they have
    left in `folder`: with nothing there, the signal ended them."""
    messages: dict[int, dict[str, Any]] = {}
    for path in sorted(folder.rglob("error.json")):
        with contextlib.suppress(ValueError):  # of a rank that was killed as it wrote
            message = json.loads(path.read_text(encoding="utf-8"))["message"]
            messages.setdefault(message["extraInfo"]["exit_code"], message)
    if USER_MISTAKE in messages:
        _tell(messages[USER_MISTAKE])
    return next((code for code in (USER_MISTAKE, STOPPED, 0) if code in messages), 128 + number)


def _tell(message: dict[str, Any] | str) -> None:
    """The mistake that a rank has recorded, or what torchrun says where it has recorded none."""
    text = message["message"].partition(": ")[2] if isinstance(message, dict) else message
    print("error:", " ".join(text.splitlines()), file=sys.stderr)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
