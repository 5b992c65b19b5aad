"""Reading a checkpoint of any grid into this one.

Each rank reads the slices that it holds. Where a disk is shared by many ranks and slow, the first
can read instead, box by box, and send what it reads to all.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch.distributed.checkpoint as dcp

from megagrid.checkpoint.find import verify
from megagrid.checkpoint.first_rank import FirstRankReader
from megagrid.checkpoint.layout import Entry
from megagrid.checkpoint.manifest import OPTIMIZER_PREFIX, read_manifest, read_trainer_state
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
    by_first_rank: bool = False,
) -> None:
    """Fill every entry's tensor in place. All ranks of `world` call it together.

    Args:
        is_verified: the checksums were just verified, as `find_checkpoint` does.
        weights_only: leave the optimizer's states of the checkpoint unread.
        by_first_rank: no other rank opens any of the files. The group of `world` must be one for
            tensors of the host.

    Raises:
        CheckpointError: on every rank: names or shapes differ from the checkpoint's (all listed), a
            file is missing or damaged (named).
    """
    manifest = on_first_rank(lambda: read_manifest(checkpoint), world)
    if problems := verify(
        checkpoint, manifest, world, deep=not is_verified, by_first_rank=by_first_rank
    ):
        raise CheckpointError(f"{checkpoint} is damaged: {'; '.join(problems)}")
    by_first_rank = by_first_rank and world.size > 1
    reader = (FirstRankReader if by_first_rank else SafetensorsReader)(checkpoint, manifest)
    with one_error(f"loading {checkpoint}"):
        dcp.load(
            {},
            storage_reader=reader,
            planner=BoxLoadPlanner(entries, str(checkpoint), weights_only),
            process_group=world.group,
            no_dist=world.size == 1,
        )
    if by_first_rank:
        states = (name for name in manifest.tensors if name.startswith(OPTIMIZER_PREFIX))
        reader.share(world, manifest.tensors.keys() - (states if weights_only else ()))


def load_trainer_state(checkpoint: Path, world: Axis = ALONE) -> dict[str, Any]:
    """What the trainer gave `save` as its state, read by the first rank for all of `world`.

    Raises:
        CheckpointError: it is missing or isn't what the manifest says.
    """
    return on_first_rank(lambda: read_trainer_state(checkpoint), world)
