"""Writing a checkpoint that exists whole or not at all."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from megagrid.checkpoint.layout import Entry
from megagrid.grid.grid import Axis


def save(
    checkpoints: Path,
    entries: Sequence[Entry],
    trainer_state: Mapping[str, Any],
    *,
    world: Axis | None = None,
    config: str = "",
    extra_files: Sequence[Path] = (),
    keep_last: int = 0,
) -> Path:
    """Save `checkpoints`/step-00000100. All ranks of `world` call it together.

    Args:
        entries: what this rank holds.
        trainer_state: JSON; `trainer_state["step"]` names the checkpoint. Rank 0's is written.
        config: the resolved recipe (TOML), kept beside the tensors.
        extra_files: carried along, as a tokenizer's model.
        keep_last: newest checkpoints that stay; 0: all.

    Returns:
        the checkpoint's folder.

    Raises:
        CheckpointError: on every rank, if any rank could not write. What was saved before stays.
    """
    raise NotImplementedError
