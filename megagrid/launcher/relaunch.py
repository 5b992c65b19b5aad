"""What a launch has left in its run's folder, for ranks that it starts again after a crash."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path

from megagrid.checkpoint.folders import newest_first

FILE_NAME = ".launch.json"


def has_saved(launch: str | None, checkpoints: Path) -> bool:
    """Whether `launch` has saved its run since the first start of its ranks.

    At that start it takes note of the checkpoints that are there, which aren't its own: it may have
    been told to go on from an earlier one, or from another run, or with nothing.

    Args:
        launch: what starts the ranks, see `RankEnvironment`; None if it does so once.
        checkpoints: the folder of the run's.
    """
    if launch is None:
        return False
    there = {
        folder.path.name: folder.path.stat().st_mtime_ns for folder in newest_first(checkpoints)
    }
    note = checkpoints.parent / FILE_NAME
    with contextlib.suppress(OSError, ValueError):
        found = json.loads(note.read_text(encoding="utf-8"))
        if found["launch"] == launch:
            return bool(there.items() - found["checkpoints"].items())
    note.write_text(json.dumps({"launch": launch, "checkpoints": there}), encoding="utf-8")
    return False
