"""One rank of a run whose messages are counted: `python -m benchmarks.placement.rank FOLDER FIRST
LAST train RECIPE …`.

It is `megagrid train`, but that before the step FIRST and after LAST it waits until whoever watches
the wire has looked at it, and that a ledger counts what the rank issues in FIRST. The words go by
files, so that they aren't on the wire themselves:

    FOLDER/FIRST.rank-0 …     the ranks are there         FOLDER/FIRST.go     the watcher has looked
    FOLDER/ledger-0.json …    what was counted
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from megagrid.cli import main
from megagrid.comm.ledger import Ledger
from megagrid.train import run
from megagrid.train.attempt import Attempt, StepMaker

SECONDS_BETWEEN_LOOKS = 0.01


def counting(folder: Path, first: int, last: int) -> type[StepMaker]:
    """A maker of steps that waits before `first` and after `last`, and counts in `first`."""

    class Counting(StepMaker):
        def __init__(self, engine, state, *rest) -> None:
            super().__init__(engine, state, *rest)
            self._grid = engine.grid
            self._progress = state.progress

        def make(self, *arguments, **options) -> Attempt:
            number = self._progress.step + 1
            if number in (first, last + 1):
                _wait(folder, number, self._grid.rank)
            if number != first:
                return super().make(*arguments, **options)
            axes = self._grid.axes
            with Ledger(axes.values()) as ledger:
                attempt = super().make(*arguments, **options)
            content = {
                "calls": [[*call, times] for call, times in ledger.calls.items()],
                "ranks": {name: axis.ranks for name, axis in axes.items()},
            }
            (folder / f"ledger-{self._grid.rank}.json").write_text(json.dumps(content))
            return attempt

    return Counting


def _wait(folder: Path, number: int, rank: int) -> None:
    (folder / f"{number}.rank-{rank}").touch()
    while not (folder / f"{number}.go").exists():
        time.sleep(SECONDS_BETWEEN_LOOKS)


def _main(arguments: Sequence[str]) -> int:
    folder, first, last, *command = arguments
    run.StepMaker = counting(Path(folder), int(first), int(last))
    return main(command)


if __name__ == "__main__":
    sys.exit(_main(sys.argv[1:]))
