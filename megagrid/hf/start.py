"""A run's first weights: from a Hugging Face folder, each rank reading the slices that it holds, or
from any checkpoint. Step 0, fresh optimizer."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch

from megagrid import checkpoint
from megagrid.checkpoint.layout import Entry
from megagrid.checkpoint.manifest import CONFIG
from megagrid.checkpoint.together import ALONE, gather
from megagrid.config.dump import toml_value
from megagrid.config.load import load as load_recipe
from megagrid.config.schema import ModelConfig
from megagrid.errors import CheckpointError, MegagridError
from megagrid.grid.grid import Axis
from megagrid.hf import carried
from megagrid.hf.checks import KEY, is_theirs
from megagrid.hf.config import described, differences
from megagrid.hf.tensors import Source
from megagrid.hf.weights import Weights


def start_from(
    path: Path,
    model: ModelConfig,
    entries: Sequence[Entry],
    run_folder: Path,
    world: Axis = ALONE,
    *,
    by_first_rank: bool = False,
) -> list[str]:
    """Fill every entry's tensor, weights alone, in place. All ranks of `world` call it together.

    Args:
        path: a Hugging Face folder, or the folder of a checkpoint or of a run.
        run_folder: keeps the files that go with the weights.
        by_first_rank: no other rank reads a checkpoint.

    Returns:
        a line for each newer checkpoint that was passed over, and for each key in which `model`
        computes something else than the weights' own.

    Raises:
        CheckpointError: on every rank: it isn't such a folder, or is of another model.
    """
    if checkpoint.on_first_rank(lambda: is_theirs(path), world):
        if by_first_rank:
            raise CheckpointError(
                f'{KEY}="{path}" is read by every rank; set checkpoint.read_by="every_rank", or '
                "make a checkpoint of it with `megagrid convert from-hf`"
            )
        found = checkpoint.on_first_rank(lambda: _checked(path, model), world)
        _read_slices(path, model, entries, world)
        source, skipped = path, ()
    else:
        how = {"by_first_rank": by_first_rank}
        sound = checkpoint.find_checkpoint(str(path), path, world, key=KEY, **how)
        source, skipped = sound.path, sound.skipped
        checkpoint.load(source, entries, world=world, is_verified=True, weights_only=True, **how)
        found = checkpoint.on_first_rank(lambda: load_recipe(source / CONFIG).model, world)
    checkpoint.on_first_rank(lambda: carried.take(source, run_folder), world)
    # Rotations go on beyond the longest input that was trained; learned positions are a shape.
    changed = [d for d in differences(model, found) if not d.startswith("model.max_seq_length=")]
    return [
        *(f"passed over: {line}" for line in skipped),
        *(f"{line}, which {path} was trained with" for line in changed),
    ]


def _checked(path: Path, model: ModelConfig) -> ModelConfig:
    """The model that the folder is of, once its tensors are known to be those of `model`."""
    found = described(path)
    wrong = [
        f"model.{key}={toml_value(value)}"
        for key, value in found.family.model.items()
        if getattr(model, key) != value
    ]
    remedy = f"take [model] from `megagrid convert recipe {path}`"
    if wrong:
        raise CheckpointError(
            f'{KEY}="{path}" is a {found.family.model_type}, which needs {", ".join(wrong)}; '
            f"{remedy}"
        )
    try:
        Source(Weights(path), found.family, model, described_by="[model]")
    except CheckpointError as error:
        raise CheckpointError(f"{error}; {remedy}") from None
    return found.model


def _read_slices(path: Path, model: ModelConfig, entries: Sequence[Entry], world: Axis) -> None:
    """This rank's boxes, and no more, from the files; a failure of one rank is everyone's."""
    problem: str | None = None
    try:
        source = Source(Weights(path), described(path).family, model)
        for entry in entries:
            dtype = source.dtype(entry.name)
            if torch.promote_types(dtype, entry.tensor.dtype) != entry.tensor.dtype:
                raise CheckpointError(
                    f"{path}: {entry.name} is {dtype}, wider than the run's {entry.tensor.dtype}; "
                    'set train.precision="fp64"'
                )
            entry.tensor.copy_(source.read(entry.name, entry.box))
    except (MegagridError, OSError) as error:
        problem = f"rank {world.rank}: {error}"
    if problems := [told for told in gather(problem, world) if told is not None]:
        raise CheckpointError(problems[0])
