"""What a node's launcher says of itself, so that ranks which have ended aren't taken for the end of
the run: as long as it is there, it may start them again.

    RUN/ranks/launcher-00001.json     of node 1; gone when the launcher ends

Imports no torch.
"""

from __future__ import annotations

import contextlib
import json
import os
import time
from dataclasses import asdict, dataclass
from pathlib import Path

from megagrid.grid import bootstrap
from megagrid.health.beat import FOLDER, is_alive, write_whole

SECONDS_BETWEEN = 1.0

SECONDS_TO_LIVE = 20.0
"""Of a word: a launcher that starts ranks on a busy host has no time for another."""


@dataclass(frozen=True)
class LauncherWord:
    """A launcher at one moment, by the clock of its host."""

    host: str
    pid: int
    time: float


class Presence:
    """Speaks for the launcher of a node.

    Args:
        run: the run's folder; nothing is made in there before its ranks have.
    """

    def __init__(self, run: Path, node: int) -> None:
        self._path = run / FOLDER / f"launcher-{node:05d}.json"
        self._said_at: float | None = None

    def show(self) -> None:
        """Say that the launcher is there, if it is time."""
        now = time.monotonic()
        if self._said_at is not None and now - self._said_at < SECONDS_BETWEEN:
            return
        self._said_at = now
        word = LauncherWord(bootstrap.host_name(), os.getpid(), time.time())
        with contextlib.suppress(OSError):
            write_whole(self._path, json.dumps(asdict(word)))

    def withdraw(self) -> None:
        """The launcher starts no ranks any more."""
        with contextlib.suppress(OSError):
            self._path.unlink(missing_ok=True)


def present_launcher(run: Path, now: float) -> LauncherWord | None:
    """A launcher that is there; None if there is none."""
    for path in sorted((run / FOLDER).glob("launcher-*.json")):
        with contextlib.suppress(OSError, ValueError, TypeError, OverflowError, RecursionError):
            word = LauncherWord(**json.loads(path.read_bytes()))
            is_here = word.host == bootstrap.host_name()
            if now - word.time < SECONDS_TO_LIVE and (not is_here or is_alive(word.pid)):
                return word
    return None
