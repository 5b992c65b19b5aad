"""When a run is saved, and which of its checkpoints may go."""

from __future__ import annotations

from pathlib import Path

from megagrid.checkpoint.folders import newest_first, remove
from megagrid.checkpoint.manifest import find_damage, read_manifest
from megagrid.errors import CheckpointError


def should_save(step: int, last_step: int, interval: int, at_end: bool) -> bool:
    """Whether to save after `step` of 1..`last_step`.

    Args:
        interval: steps between saves; 0: none but the last.
        at_end: save after the last step, whatever the interval.
    """
    return (interval > 0 and step % interval == 0) or (at_end and step == last_step)


def keep_newest(checkpoints: Path, count: int, every: int = 0) -> None:
    """Remove what is older than the `count` newest sound checkpoints; 0 keeps all.

    A damaged one isn't counted, so the only sound one is never removed. Soundness means here that
    every file is there with its size: reading them all after each save would cost as much as it.

    Args:
        every: multiples of so many steps stay, however old; 0: none does for its number.
    """
    if count == 0:
        return
    kept = 0
    for folder in newest_first(checkpoints):
        if kept < count:
            kept += _looks_sound(folder.path)
        elif not (every and folder.step % every == 0):
            remove(folder.path)


def _looks_sound(checkpoint: Path) -> bool:
    try:
        manifest = read_manifest(checkpoint)
    except CheckpointError:
        return False
    return not find_damage(checkpoint, manifest.files.items(), deep=False)
