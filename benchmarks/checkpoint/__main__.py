"""`python -m benchmarks.checkpoint`: throughput of saves and loads, and what saves cost a run."""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from benchmarks import reporting
from benchmarks.checkpoint import pause, throughput

RANKS = (1, 2, 4)


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser("python -m benchmarks.checkpoint", description=__doc__)
    add = parser.add_argument
    add("--ranks", type=int, nargs="+", default=list(RANKS))
    add("--layers", type=int, default=throughput.Setting.layers)
    add("--hidden", type=int, default=throughput.Setting.hidden, help="a multiple of 32")
    add("--rounds", type=int, default=throughput.Setting.rounds, help="turns of each way")
    add("--steps", type=int, default=pause.Setting.steps, help="of a run that saves")
    add("--interval", type=int, default=pause.Setting.interval, help="steps between its saves")
    add("--disk", type=Path, metavar="DIR", help="where to write: the disk that is measured")
    add("--time-limit", type=float, default=1800.0, metavar="S", help="of each process group")
    reporting.add_arguments(parser)
    add("--smoke", action="store_true", help="a tiny model, to see that everything runs")
    return parser.parse_args(arguments)


def settings_of(options: argparse.Namespace) -> list[throughput.Setting]:
    """What the command line asks for, for each number of ranks."""
    if options.smoke:
        sizes = {"layers": 2, "hidden": 64, "vocabulary": 256, "rounds": 2}
    else:
        sizes = {name: getattr(options, name) for name in ("layers", "hidden", "rounds")}
    return [throughput.Setting(ranks=ranks, **sizes) for ranks in options.ranks]


def runs_of(options: argparse.Namespace) -> pause.Setting:
    """The runs that save: on two ranks, if there are two."""
    model = min(settings_of(options), key=lambda setting: abs(setting.ranks - 2))
    if options.smoke:
        return pause.Setting(model, steps=4, interval=2, rounds=1)
    return pause.Setting(model, options.steps, options.interval)


def main() -> int:
    """Measure, print, write."""
    options = parse()
    found = []
    with tempfile.TemporaryDirectory(prefix="checkpoint-", dir=options.disk) as disk:
        try:
            for setting in settings_of(options):
                print(f"{setting.ranks} ranks, load average {os.getloadavg()[0]:.1f}", flush=True)
                found.append(throughput.start(setting, Path(disk), options.time_limit))
            print(f"runs that save, load average {os.getloadavg()[0]:.1f}", flush=True)
            turns = pause.take_turns(runs_of(options), Path(disk), options.time_limit)
        except subprocess.SubprocessError as problem:
            print(f"error: {problem}", file=sys.stderr)
            return 1
    text = f"{throughput.markdown(found)}\n{pause.markdown(turns)}"
    print(f"\n{text}", end="")
    content = {
        "settings": [asdict(setting) for setting in settings_of(options)],
        "throughput": [asdict(one) for one in found],
        "runs": asdict(runs_of(options)),
        "pauses": [asdict(turn) for turn in turns],
    }
    reporting.write(options.out, "checkpoint", text, content)
    return 0


if __name__ == "__main__":
    sys.exit(main())
