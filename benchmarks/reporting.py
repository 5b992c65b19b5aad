"""Where benchmarks run, and what they leave: NAME.json with everything, NAME.md with the table.

Imports no torch.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results"


def add_arguments(parser: argparse.ArgumentParser, *, keeps_work: bool = False) -> None:
    """Where results go, and what the benchmark runs in."""
    add = parser.add_argument
    add("--out", type=Path, default=RESULTS, help="folder of the results (benchmarks/results)")
    if keeps_work:
        add("--work", type=Path, metavar="DIR", help="an empty folder to run in, and to keep")


@contextmanager
def work_folder(wanted: Path | None, prefix: str) -> Iterator[Path]:
    """The folder that was asked for, else a passing one."""
    if wanted is not None:
        wanted.mkdir(parents=True, exist_ok=True)
        yield wanted.resolve()
        return
    with tempfile.TemporaryDirectory(prefix=f"{prefix}-") as folder:
        yield Path(folder)


def write(folder: Path, name: str, text: str, content: dict[str, Any]) -> tuple[Path, Path]:
    """Both files, the machine's facts among the content unless it has them; their paths."""
    folder.mkdir(parents=True, exist_ok=True)
    data, table = folder / f"{name}.json", folder / f"{name}.md"
    data.write_text(json.dumps({"environment": environment()} | content, indent=1) + "\n")
    table.write_text(text)
    return data, table


def environment() -> dict[str, Any]:
    """What the numbers depend on beside the code."""
    return {
        "cpu": _cpu_name(),
        "cores": len(os.sched_getaffinity(0)),
        "python": platform.python_version(),
        **{name: _version(name) for name in ("torch", "transformers", "numpy")},
        "commit": _commit(),
    }


def _cpu_name() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return platform.machine()


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _commit() -> str | None:
    """Short hash, with a + when tracked files differ from it; None outside a checkout."""
    try:
        described = subprocess.run(
            ["git", "describe", "--always", "--dirty=+", "--exclude=*"],
            cwd=Path(__file__).parent,
            capture_output=True,
            text=True,
            check=True,
        )
    except (OSError, subprocess.CalledProcessError):
        return None
    return described.stdout.strip()
