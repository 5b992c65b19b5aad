"""Which checkpoint a run resumes from: the newest sound one."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from megagrid.grid.grid import Axis


@dataclass(frozen=True)
class Found:
    """A sound checkpoint, and the newer ones that were passed over.

    Attributes:
        path: its folder.
        skipped: one line for each newer checkpoint: which, and why not.
    """

    path: Path
    skipped: tuple[str, ...] = ()


def find_checkpoint(resume: str, checkpoints: Path, world: Axis | None = None) -> Found | None:
    """The newest sound checkpoint that `resume` means; None only for "latest" without any.

    All ranks of `world` call it together: each verifies a share of the files.

    Args:
        resume: the folder of a checkpoint, the folder of a run, or "latest".
        checkpoints: where this run's checkpoints lie, for "latest".

    Raises:
        CheckpointError: `resume` is a path without a sound checkpoint, or "latest" finds some but
            none is sound.
    """
    raise NotImplementedError
