"""Reading a checkpoint of any grid into this one: each rank reads the slices that it holds."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch.distributed.checkpoint as dcp

from megagrid.checkpoint.find import verify
from megagrid.checkpoint.layout import Entry
from megagrid.checkpoint.manifest import read_manifest, read_trainer_state
from megagrid.checkpoint.planner import BoxLoadPlanner
from megagrid.checkpoint.storage import SafetensorsReader
from megagrid.checkpoint.together import ALONE, on_first_rank, one_error
from megagrid.errors import CheckpointError
from megagrid.grid.grid import Axis


def load(
    checkpoint: Path,
    entries: Sequence[Entry],
    *,
    world: Axis = ALONE,
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
    manifest = on_first_rank(lambda: read_manifest(checkpoint), world)
    if problems := verify(checkpoint, manifest, world, deep=not is_verified):
        raise CheckpointError(f"{checkpoint} is damaged: {'; '.join(problems)}")
    with one_error(f"loading {checkpoint}"):
        dcp.load(
            {},
            storage_reader=SafetensorsReader(checkpoint, manifest),
            planner=BoxLoadPlanner(entries, str(checkpoint), weights_only),
            process_group=world.group,
            no_dist=world.size == 1,
        )


def load_trainer_state(checkpoint: Path, world: Axis = ALONE) -> dict[str, Any]:
    """What the trainer gave `save` as its state, read by the first rank for all of `world`.

    Raises:
        CheckpointError: it is missing or isn't what the manifest says.
    """
    return on_first_rank(lambda: read_trainer_state(checkpoint), world)
