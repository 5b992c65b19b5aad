"""Making a folder of safetensors files, tensor by tensor: no more than one is ever held.

The format of a file is drawn in `megagrid.checkpoint.storage`. The folder appears under its name
only once it is whole: until then it has `.partial` behind it.
"""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from megagrid.checkpoint.files import ChecksummedFile, FileRecord, rename, sync_folder
from megagrid.checkpoint.folders import PARTIAL
from megagrid.checkpoint.storage import DTYPE_CODES
from megagrid.errors import CheckpointError

MAX_SHARD_BYTES = 5 * 10**9


@dataclass(frozen=True)
class Converted:
    """What a conversion has made.

    Attributes:
        what: it is, by transformers' name.
        tensors, files, nbytes: how many there are, and the size of all weights.
        tokenizer: whether one went along.
        passed_over: a line for each newer checkpoint of the run that isn't sound.
    """

    what: str
    tensors: int
    files: int
    nbytes: int
    tokenizer: bool
    passed_over: tuple[str, ...] = ()


@dataclass(frozen=True)
class Planned:
    """A tensor that is to be written."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


def split(tensors: Sequence[Planned], max_bytes: int) -> list[list[Planned]]:
    """Tensors to files, in order: a file has one tensor, or as many as fit."""
    files: list[list[Planned]] = [[]]
    for tensor in tensors:
        size = sum(other.nbytes for other in files[-1])
        if files[-1] and size + tensor.nbytes > max_bytes:
            files.append([])
        files[-1].append(tensor)
    return files


def write(
    path: Path,
    tensors: Sequence[Planned],
    read: Callable[[Planned], Tensor],
    metadata: Mapping[str, str],
) -> FileRecord:
    """The new file `path` of `tensors`, on the disk when this returns.

    Args:
        read: gives a tensor's values.
        metadata: of the header, beside the format.
    """
    # Wide dtypes first, so that each is aligned.
    tensors = sorted(tensors, key=lambda tensor: -tensor.dtype.itemsize)
    with ChecksummedFile(path) as file:
        file.write(_header(tensors, metadata))
        for tensor in tensors:
            values = read(tensor).to(tensor.dtype).contiguous()
            if values.numel():
                file.write(memoryview(values.reshape(-1).view(torch.uint8).numpy()))
    return file.record


def _header(tensors: Sequence[Planned], metadata: Mapping[str, str]) -> bytes:
    header: dict[str, object] = {"__metadata__": {"format": "pt", **metadata}}
    end = 0
    for tensor in tensors:
        begin, end = end, end + tensor.nbytes
        header[tensor.name] = {
            "dtype": DTYPE_CODES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [begin, end],
        }
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


@contextmanager
def new_folder(folder: Path) -> Iterator[Path]:
    """A folder to fill, which becomes `folder` if the block succeeds and is removed if it fails.

    Raises:
        CheckpointError: `folder` is there already and isn't empty, or the disk fails.
    """
    named = folder.absolute()  # "." has no name
    partial = named.with_name(named.name + PARTIAL)
    try:
        if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
            raise CheckpointError(f"{folder} is there already; name a new folder, or remove it")
        if partial.exists():
            shutil.rmtree(partial)
        partial.mkdir(parents=True)
        try:
            yield partial
            sync_folder(partial)
            if folder.exists():
                folder.rmdir()
            rename(partial, named)
        except BaseException:
            shutil.rmtree(partial, ignore_errors=True)
            raise
    except OSError as error:
        where = f"{error.filename}: " if error.filename else ""
        raise CheckpointError(f"writing {folder} failed: {where}{error.strerror}") from None
