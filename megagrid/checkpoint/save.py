"""Writing a checkpoint that exists whole or not at all.

    every rank                       the first rank
    ----------                       --------------
    what it will write        ->     does it fill the model? make step-00000100.partial
    its boxes, synced         ->     trainer.json, config.toml, extra files
                                     manifest.json, with the checksums of all of these
                                     sync the folder, rename it to step-00000100
                                     remove what keep_last and keep_every let go

Until the rename the former checkpoints are untouched, after it the new one is whole. A rank that
fails, as on a full disk, fails the save on every rank, and the partial folder is removed.
"""

from __future__ import annotations

import json
import shutil
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch.distributed.checkpoint as dcp

from megagrid.checkpoint import manifest
from megagrid.checkpoint.files import FileRecord, copy_file, sync_folder, write_file
from megagrid.checkpoint.folders import PARTIAL, clean, publish, step_name
from megagrid.checkpoint.layout import Entry
from megagrid.checkpoint.manifest import CONFIG, TRAINER_STATE, Manifest, SavedTensor
from megagrid.checkpoint.planner import BoxSavePlanner
from megagrid.checkpoint.retention import keep_newest
from megagrid.checkpoint.storage import SafetensorsWriter
from megagrid.checkpoint.together import ALONE, one_error
from megagrid.errors import CheckpointError
from megagrid.grid.grid import Axis


def save(
    checkpoints: Path,
    entries: Sequence[Entry],
    trainer_state: Mapping[str, Any],
    *,
    world: Axis = ALONE,
    config: str = "",
    extra_files: Sequence[Path] = (),
    keep_last: int = 0,
    keep_every: int = 0,
    is_finite: bool = False,
) -> Path:
    """Save `checkpoints`/step-00000100. All ranks of `world` call it together.

    It may run in a thread of its own, behind others, if nothing else uses the group of `world`
    meanwhile, and the entries' values don't change.

    Args:
        entries: what this rank holds.
        trainer_state: JSON; `trainer_state["step"]` names the checkpoint. The first rank's is kept.
        config: the resolved recipe (TOML), kept beside the tensors.
        extra_files: carried along, as a tokenizer's model.
        keep_last: newest checkpoints that stay; 0: all.
        keep_every: multiples of so many steps stay as well, however old.
        is_finite: a NaN or Inf fails the save: nobody could train on from it.

    Returns:
        the checkpoint's folder.

    Raises:
        CheckpointError: on every rank, if any rank could not write, or has what it mustn't. What
            was saved before stays.
    """
    step = trainer_state["step"]
    final = checkpoints / step_name(step)
    partial = final.with_name(final.name + PARTIAL)
    texts = {
        TRAINER_STATE: json.dumps(trainer_state, indent=1, allow_nan=False).encode(),
        CONFIG: config.encode(),
    }

    def prepare() -> None:
        checkpoints.mkdir(parents=True, exist_ok=True)
        clean(checkpoints)
        partial.mkdir()

    def commit(shards: Mapping[str, FileRecord], tensors: Mapping[str, SavedTensor]) -> None:
        files = dict(shards)
        _check_visible(partial, shards)
        for name, text in texts.items():
            files[name] = write_file(partial / name, text)
        for path in extra_files:
            files[path.name] = copy_file(path, partial / path.name)
        write_file(partial / manifest.FILE_NAME, Manifest(step, files, tensors).to_bytes())
        sync_folder(partial)
        publish(partial, final)

    try:
        with one_error(f"saving {final}"):
            dcp.save(
                {},
                storage_writer=SafetensorsWriter(partial, prepare, commit),
                planner=BoxSavePlanner(entries, finite_at=step if is_finite else None),
                process_group=world.group,
                no_dist=world.size == 1,
            )
    except Exception:
        if world.rank == 0:
            shutil.rmtree(partial, ignore_errors=True)
        raise
    if world.rank == 0:
        _let_go(checkpoints, keep_last, keep_every)
    return final


def _check_visible(folder: Path, shards: Mapping[str, FileRecord]) -> None:
    """Whether the first rank sees what the others wrote, as it must on a shared file system."""
    if problems := manifest.find_damage(folder, shards.items(), deep=False):
        raise CheckpointError(
            f"{folder}: {problems[0]}, as the first rank sees it; the run folder must lie on a "
            "file system that all ranks share"
        )


def _let_go(checkpoints: Path, keep_last: int, keep_every: int) -> None:
    """Remove old checkpoints. The save has succeeded, so a failure to is only worth a warning."""
    try:
        keep_newest(checkpoints, keep_last, keep_every)
    except OSError as error:
        warnings.warn(f"an old checkpoint stays: {error}", stacklevel=2)
