"""The console that everything is printed through."""

from __future__ import annotations

import sys
from typing import Self

import rich.console


class Console(rich.console.Console):
    """rich's console, which leaves it to the command line what a closed pipe means."""

    def on_broken_pipe(self) -> None:
        """Pass on the BrokenPipeError that is being handled; rich would end the process itself."""
        error = sys.exc_info()[1]
        raise error if isinstance(error, BrokenPipeError) else BrokenPipeError()


def warn_on_stderr(message: str) -> None:
    """Say `message` where it can't be mistaken for a row of the table."""
    print(f"warning: {message}", file=sys.stderr, flush=True)


def size_text(size: float, *, is_binary: bool = False) -> str:
    """A number of bytes for people: "1.23 GB", in powers of ten as disks are sold and rates are
    stated; or "1.234 GiB", in powers of two as memory is."""
    step, digits, units = 1000, 3, ("B", "kB", "MB", "GB", "TB")
    if is_binary:
        step, digits, units = 1024, 4, ("B", "KiB", "MiB", "GiB", "TiB")
    for unit in units[:-1]:
        if float(f"{size:.{digits}g}") < step:
            return f"{size:.{digits}g} {unit}"
        size /= step
    return f"{size:.{digits}g} {units[-1]}"


class ProgressBar:
    """A bar for each thing that is done to some bytes; on stderr, so that stdout holds the result,
    and only where that is a terminal.

    Args:
        total_bytes: of the input, which each thing is done to.
        vanishes: leave nothing on the screen at the end.
    """

    def __init__(self, total_bytes: int, *, vanishes: bool = False) -> None:
        # Imported when needed: what draws no bar shouldn't wait for it.
        from rich.progress import (
            BarColumn,
            DownloadColumn,
            Progress,
            TextColumn,
            TimeRemainingColumn,
            TransferSpeedColumn,
        )

        self._total = total_bytes
        self._tasks: dict[str, int] = {}
        console = Console(stderr=True)
        self._bars = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            DownloadColumn(),
            TransferSpeedColumn(),
            TimeRemainingColumn(),
            console=console,
            transient=vanishes,
            disable=not console.is_terminal,
        )

    def __enter__(self) -> Self:
        self._bars.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bars.stop()

    def __call__(self, what: str, done_bytes: int) -> None:
        """Add `done_bytes` to the bar of `what`."""
        if what not in self._tasks:
            self._tasks[what] = self._bars.add_task(what, total=self._total)
        self._bars.advance(self._tasks[what], done_bytes)
