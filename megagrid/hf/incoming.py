"""From a Hugging Face folder to a checkpoint to train from, tensor by tensor, on one process."""

from __future__ import annotations

import json
from collections.abc import Collection
from pathlib import Path

from megagrid.checkpoint.files import FileRecord, copy_file, write_file
from megagrid.checkpoint.manifest import CONFIG, Manifest, SavedBox, SavedTensor
from megagrid.checkpoint.manifest import FILE_NAME as MANIFEST
from megagrid.checkpoint.storage import DTYPE_NAMES
from megagrid.config.dump import dump
from megagrid.config.load import load as load_recipe
from megagrid.config.rules import check
from megagrid.hf import carried
from megagrid.hf.config import described
from megagrid.hf.files import MAX_SHARD_BYTES, Converted, Planned, new_folder, split, write
from megagrid.hf.recipe import recipe_text
from megagrid.hf.tensors import Source
from megagrid.hf.weights import Weights

RECIPE = "recipe.toml"


def from_hf(
    folder: Path,
    checkpoint: Path,
    *,
    ignored: Collection[str] = (),
    max_shard_bytes: int = MAX_SHARD_BYTES,
) -> Converted:
    """Make the new folder `checkpoint`: the weights of `folder` in their dtype, and a recipe.

    Args:
        ignored: unknown keys of config.json that the user says don't matter.

    Raises:
        CheckpointError: `folder` holds no model that megagrid computes, or is damaged; `checkpoint`
            can't be made.
    """
    found = described(folder, ignored)
    source = Source(Weights(folder), found.family, found.model)
    planned = [Planned(name, shape, source.dtype(name)) for name, shape in source.shapes.items()]
    shards = split(planned, max_shard_bytes)
    files: dict[str, FileRecord] = {}
    tensors: dict[str, SavedTensor] = {}
    with new_folder(checkpoint) as partial:
        text = recipe_text(found.model, checkpoint, checkpoint.absolute().name)
        (partial / RECIPE).write_text(text, encoding="utf-8")
        config = load_recipe(partial / RECIPE)
        check(config)
        files[CONFIG] = write_file(partial / CONFIG, dump(config).encode())
        for number, shard in enumerate(shards):
            name = f"model-shard-{number:05d}.safetensors"
            files[name] = _write_shard(partial / name, shard, source)
            tensors |= {tensor.name: _as_one_box(tensor, name) for tensor in shard}
        for name, path in carried.of_folder(folder).items():
            files[name] = copy_file(path, partial / name)
        write_file(partial / MANIFEST, Manifest(0, files, tensors).to_bytes())
    return Converted(
        what=found.family.architecture,
        tensors=len(tensors),
        files=len(shards),
        nbytes=sum(tensor.nbytes for tensor in planned),
        tokenizer=any((folder / name).is_file() for name in carried.TOKENIZER_FILES),
    )


def _write_shard(path: Path, shard: list[Planned], source: Source) -> FileRecord:
    """A file of whole tensors, as `megagrid.checkpoint.storage` has them."""
    places = {tensor.name: {"saved_offsets": [0] * len(tensor.shape)} for tensor in shard}
    metadata = {"DCP_SHARDING_INFO": json.dumps(places)}
    return write(path, shard, lambda tensor: source.read(tensor.name), metadata)


def _as_one_box(tensor: Planned, file: str) -> SavedTensor:
    box = SavedBox(file, (0,) * len(tensor.shape), tensor.shape)
    return SavedTensor(tensor.shape, DTYPE_NAMES[tensor.dtype], (box,))
