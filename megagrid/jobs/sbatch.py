"""Calls of SLURM's sbatch, and what it would refuse only later."""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

from megagrid.errors import GridError

_TIME = re.compile(
    r"(?:(?P<days>\d+)-(?P<hours>\d+)(?::(?P<minutes>\d+)(?::(?P<seconds>\d+))?)?"
    r"|(?P<h>\d+):(?P<m>\d+):(?P<s>\d+)|(?P<min>\d+)(?::(?P<sec>\d+))?)"
)


def check_is_here() -> None:
    """
    Raises:
        GridError: there is no sbatch on this machine.
    """
    if shutil.which("sbatch") is None:
        raise GridError(
            "sbatch isn't on PATH; submit on a machine of the cluster's, or look at the script "
            "with --dry-run"
        )


def submit(script: Path, options: Sequence[str] = ()) -> str:
    """Submit a script; the job's number.

    Raises:
        GridError: sbatch refuses it.
    """
    command = ["sbatch", "--parsable", *options, str(script)]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        said = " ".join(done.stderr.split())
        raise GridError(f"sbatch refuses {script}: {said.removeprefix('sbatch: error: ')}")
    return done.stdout.strip().partition(";")[0]


def seconds(time: str) -> float:
    """A time limit as SLURM takes it: M, M:S, H:M:S, D-H, D-H:M, D-H:M:S, or UNLIMITED, which 0 is
    too.

    Raises:
        GridError: it is none of these.
    """
    if time.upper() in ("UNLIMITED", "INFINITE"):
        return float("inf")
    match = _TIME.fullmatch(time)
    if match is None:
        raise GridError(f"--time {time} is no time; write minutes, H:M:S or D-H:M:S")
    parts = {name: int(text or 0) for name, text in match.groupdict().items()}
    hours = 24 * parts["days"] + parts["hours"] + parts["h"]
    minutes = parts["minutes"] + parts["m"] + parts["min"]
    found = 3600 * hours + 60 * minutes + parts["seconds"] + parts["s"] + parts["sec"]
    return found or float("inf")
