"""Reading a checkpoint of any grid into this one."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from megagrid.checkpoint.layout import Entry
from megagrid.grid.grid import Axis


def load(
    checkpoint: Path,
    entries: Sequence[Entry],
    *,
    world: Axis | None = None,
    is_verified: bool = False,
    weights_only: bool = False,
) -> None:
    """Fill every entry's tensor in place. All ranks of `world` call it together.

    Args:
        is_verified: the checksums were just verified, as `find_checkpoint` does.
        weights_only: leave the optimizer's states of the checkpoint unread.

    Raises:
        CheckpointError: on every rank: names or shapes differ from the checkpoint's (all listed), a
            file is missing or damaged (named).
    """
    raise NotImplementedError


def load_trainer_state(checkpoint: Path) -> dict[str, Any]:
    """What the trainer gave `save` as its state."""
    raise NotImplementedError
