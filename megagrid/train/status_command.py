"""How a run is, from its folder alone: step, pace, checkpoint, ranks, health.

    megagrid status runs/first
    megagrid status 'runs/sweep-*' --json

Exit codes: 0 done, 10 running, 11 waiting for ranks, 12 stalled, 75 stopped and saved, to be
resumed, 1 failed; of several runs the worst: failed, stalled, stopped, waiting, running, done.
"""

from __future__ import annotations

import argparse
import glob
import json
import time
from collections.abc import Sequence
from pathlib import Path

from megagrid.config.arguments import path_argument
from megagrid.errors import DataError
from megagrid.train.console import format_duration
from megagrid.train.status import WORST_FIRST, Status, is_run, look_at


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """What `megagrid status` takes."""
    parser.add_argument(
        "runs",
        type=path_argument,
        nargs="+",
        metavar="RUN",
        help="a run's folder, a pattern such as 'runs/sweep-*', or a folder of runs",
    )
    parser.add_argument("--json", action="store_true", help="all of it, for programs")


def run(arguments: argparse.Namespace) -> int:
    """Print how the runs are; the exit code says it too."""
    paths = [path for name in arguments.runs for path in _runs(name)]
    found = look_at(paths, time.time, time.sleep)
    if arguments.json:
        told = [status.to_json() for status in found]
        print(json.dumps(told[0] if len(told) == 1 else told, indent=1))
    else:
        print("\n".join(_lines(found[0]) if len(found) == 1 else _table(found)))
    return min(found, key=lambda status: WORST_FIRST.index(status.health)).code


def _runs(name: Path) -> list[Path]:
    """The folders that an argument means.

    Raises:
        DataError: none.
    """
    matches = [name] if name.exists() else [Path(text) for text in sorted(glob.glob(str(name)))]
    if len(matches) > 1:
        matches = [path for path in matches if is_run(path)]
    elif matches and not is_run(matches[0]) and matches[0].is_dir():
        inside = [path for path in sorted(matches[0].iterdir()) if is_run(path)]
        matches = inside or matches
    if not matches:
        raise DataError(f"{name}: no such folder; name a run's, its logging.run_dir")
    return matches


def _lines(status: Status) -> list[str]:
    reason = f": {status.reason}" if status.reason else ""
    rows = {
        "step": _progress(status),
        "loss": None if status.loss is None else f"{status.loss:.4f}",
        "pace": _pace(status),
        "left": None if status.seconds_left is None else format_duration(status.seconds_left),
        "checkpoint": _checkpoint(status),
        "ranks": _ranks(status),
        "job": _job(status),
    }
    lines = [f"{status.run}: {status.health}{reason}"]
    lines += [f"  {name:<12}{text}" for name, text in rows.items() if text]
    lines += [f"  {'silent':<12}{who}" for who in status.silent]
    return lines + [f"  {'slow':<12}{text}" for text in status.slow]


def _progress(status: Status) -> str:
    if not status.total_steps:
        return f"{status.step}"
    return f"{status.step} of {status.total_steps}, {status.step / status.total_steps:.0%}"


def _pace(status: Status) -> str | None:
    if status.tokens_per_s is None:
        return None
    ago = f"; the last {format_duration(status.since_step_s)} ago"
    return f"{status.tokens_per_s:,.0f} tokens/s, {status.step_s:.3g} s a step{ago}"


def _checkpoint(status: Status) -> str:
    saved = status.checkpoint
    if saved is None:
        return "none that is sound"
    over = "".join(f"; passed over: {text}" for text in saved.passed_over)
    return f"step {saved.step}, {format_duration(saved.age_s)} ago, sizes are right{over}"


def _ranks(status: Status) -> str | None:
    if not status.ranks:
        return None
    hosts = ", ".join(status.hosts[:4]) + (", …" if len(status.hosts) > 4 else "")
    return f"{status.ranks_here} of {status.ranks} beat; {hosts}"


def _job(status: Status) -> str | None:
    restarts = f"{status.restarts} restart{'s' * (status.restarts != 1)}" * bool(status.restarts)
    return ", ".join(filter(None, (status.job, restarts))) or None


TITLES = ("run", "health", "step", "done", "loss", "tokens/s", "left", "saved", "ranks", "why")
TEXTS = ("run", "health", "why")
"""Columns that begin at the left."""


def _table(found: Sequence[Status]) -> list[str]:
    rows = [TITLES, *map(_row, found)]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(map(_cell, TITLES, row, widths)).rstrip() for row in rows]


def _cell(title: str, text: str, width: int) -> str:
    return f"{text:<{width}}" if title in TEXTS else f"{text:>{width}}"


def _row(one: Status) -> tuple[str, ...]:
    return (
        one.run,
        one.health,
        str(one.step),
        f"{one.step / one.total_steps:.0%}" if one.total_steps else "",
        "" if one.loss is None else f"{one.loss:.4f}",
        "" if one.tokens_per_s is None else f"{one.tokens_per_s:,.0f}",
        "" if one.seconds_left is None else format_duration(one.seconds_left),
        "" if one.checkpoint is None else str(one.checkpoint.step),
        f"{one.ranks_here}/{one.ranks}" if one.ranks else "",
        one.reason,
    )
