"""From a checkpoint to a folder that transformers loads, tensor by tensor, on one process: no more
than one tensor of theirs is held, and one of ours."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import torch
from torch import Tensor

from megagrid.checkpoint.files import read_record, write_file
from megagrid.checkpoint.find import find_checkpoint
from megagrid.checkpoint.manifest import CONFIG, OPTIMIZER_PREFIX, read_manifest
from megagrid.checkpoint.reader import TensorReader
from megagrid.checkpoint.storage import DTYPE_NAMES, DTYPES
from megagrid.config.load import load as load_recipe
from megagrid.config.schema import ModelConfig
from megagrid.data.tokenizer import load_tokenizer
from megagrid.errors import CheckpointError
from megagrid.hf import carried
from megagrid.hf.config import FILE_NAME, config_of, read_raw
from megagrid.hf.files import MAX_SHARD_BYTES, Converted, Planned, new_folder, split, write
from megagrid.hf.tensors import EMBEDDING, fused, global_shapes, rows_of, their_tensors
from megagrid.hf.tokenizers import tokenizer_files, write_files
from megagrid.hf.weights import INDEX, SINGLE

EXPORT_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def to_hf(
    checkpoint: str | Path,
    folder: Path,
    *,
    dtype: torch.dtype | None = None,
    max_shard_bytes: int = MAX_SHARD_BYTES,
    key: str = "CHECKPOINT",
) -> Converted:
    """Make the new folder `folder` in Hugging Face's layout of the weights in a checkpoint.

    Args:
        checkpoint: the folder of a checkpoint, or of a run: its newest sound one.
        dtype: of the tensors; None: as they are stored.
        max_shard_bytes: most that a file holds, unless it is one larger tensor.
        key: what errors call `checkpoint`.

    Raises:
        CheckpointError: the checkpoint isn't sound, no model of transformers computes what it does,
            or `folder` can't be made.
    """
    source = find_checkpoint(str(checkpoint), Path(checkpoint), key=key)
    path = source.path
    stored = _Stored(path)
    model = load_recipe(path / CONFIG).model
    shapes = _matching_shapes(model, stored)
    texts = _Texts(path)
    family, config = config_of(
        model, DTYPE_NAMES[dtype or stored.dtype(EMBEDDING)], texts.former_config, texts.tokens
    )
    theirs = {tensor.name: tensor for tensor in their_tensors(rows_of(family, shapes), shapes)}
    planned = [
        Planned(name, tensor.shape, dtype or stored.dtype(tensor.rows[0].ours))
        for name, tensor in theirs.items()
    ]
    shards = split(planned, max_shard_bytes)
    with new_folder(folder) as partial:
        names = _shard_names(len(shards))
        for name, shard in zip(names, shards, strict=True):
            write(partial / name, shard, lambda t: fused(theirs[t.name], stored.read, t.dtype), {})
        if len(shards) > 1:
            _write_json(partial / INDEX, _index(names, shards))
        _write_json(partial / FILE_NAME, config)
        texts.write(partial)
    return Converted(
        what=family.architecture,
        tensors=len(planned),
        files=len(shards),
        nbytes=sum(tensor.nbytes for tensor in planned),
        tokenizer=texts.has_tokenizer,
        passed_over=source.skipped,
    )


class _Stored:
    """The weights of a checkpoint, each put together from the boxes that ranks wrote."""

    def __init__(self, checkpoint: Path) -> None:
        self.checkpoint = checkpoint
        manifest = read_manifest(checkpoint)
        names = (name for name in manifest.tensors if not name.startswith(OPTIMIZER_PREFIX))
        self.tensors = {name: manifest.tensors[name] for name in names}
        self._reader = TensorReader(checkpoint, manifest)

    def dtype(self, name: str) -> torch.dtype:
        return DTYPES[self.tensors[name].dtype]

    def read(self, name: str) -> Tensor:
        shape = self.tensors[name].shape
        bits = self._reader.read(name, (0,) * len(shape), shape)
        return torch.from_numpy(bits).view(self.dtype(name))


class _Texts:
    """Tokenizer and settings that go with the weights of a checkpoint.

    The tokenizer of the data they were trained on comes first; if that is the one they came with,
    its files are taken as they were.

    Attributes:
        former_config: the config.json that the weights came with, if they came with one.
        tokens: ids for config.json, by key, where they aren't those of the former one.
    """

    def __init__(self, checkpoint: Path) -> None:
        own, theirs = carried.own_tokenizer(checkpoint), carried.their_tokenizer(checkpoint)
        self._checkpoint = checkpoint
        self._carried = carried.of_checkpoint(checkpoint)
        same = own and theirs and read_record(own) == read_record(theirs)
        self._own = load_tokenizer(own) if own is not None and not same else None
        former = self._carried.get(f"{carried.PREFIX}{FILE_NAME}")
        self.former_config = read_raw(former) if former is not None else None
        self.tokens: dict[str, int | None] = {}
        if self._own is not None or self.former_config is None:
            eod = self._own.eod_id if self._own else None
            self.tokens = {"bos_token_id": None, "eos_token_id": eod, "pad_token_id": None}

    @property
    def has_tokenizer(self) -> bool:
        return self._own is not None or bool(carried.tokenizer_names(self._checkpoint))

    def write(self, folder: Path) -> None:
        if self._own is not None:
            write_files(folder, tokenizer_files(self._own))
        for name, path in self._carried.items():
            plain = name.removeprefix(carried.PREFIX)
            if plain != FILE_NAME and self._own is None:
                shutil.copyfile(path, folder / plain)
        if not (folder / carried.GENERATION).exists():
            stated = {key: value for key, value in self.tokens.items() if value is not None}
            _write_json(folder / carried.GENERATION, stated)


def _matching_shapes(model: ModelConfig, stored: _Stored) -> dict[str, tuple[int, ...]]:
    """The shapes of `model`, if they are those of the checkpoint."""
    shapes = global_shapes(model)
    saved = {name: tensor.shape for name, tensor in stored.tensors.items()}
    if shapes != saved:
        names = [n for n in {**shapes, **saved} if shapes.get(n) != saved.get(n)]
        raise CheckpointError(
            f"{stored.checkpoint}: its {CONFIG} is of another model than its tensors: "
            f"{names[0]} is {saved.get(names[0])} instead of {shapes.get(names[0])}"
        )
    return shapes


def _shard_names(count: int) -> list[str]:
    if count == 1:
        return [SINGLE]
    return [f"model-{number:05d}-of-{count:05d}.safetensors" for number in range(1, count + 1)]


def _index(names: list[str], shards: list[list[Planned]]) -> dict[str, object]:
    files = list(zip(names, shards, strict=True))
    return {
        "metadata": {"total_size": sum(t.nbytes for _, shard in files for t in shard)},
        "weight_map": {tensor.name: name for name, shard in files for tensor in shard},
    }


def _write_json(path: Path, content: object) -> None:
    write_file(path, (json.dumps(content, indent=2, ensure_ascii=False) + "\n").encode())
