"""Boxes in safetensors files: the storage half of torch.distributed.checkpoint.

Each rank writes one file of weights and one of optimizer states, tensor after tensor, so that no
more than one tensor is ever copied. Its layout (https://huggingface.co/docs/safetensors, "Format"):

    8 bytes        length of the header, little-endian
    header         JSON: name -> dtype, shape, data_offsets; padded with spaces to 8 bytes
    data           the tensors, wide dtypes first, so that each is aligned

The header's metadata says where in its global tensor each box lies, in the words of torch's own
HuggingFaceStorageReader, which can thus read a checkpoint without megagrid.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    LoadPlan,
    LoadPlanner,
    ReadItem,
    SavePlan,
    SavePlanner,
    WriteItem,
)
from torch.distributed.checkpoint.storage import StorageReader, StorageWriter, WriteResult
from torch.futures import Future

from megagrid.checkpoint.files import ChecksummedFile, FileRecord
from megagrid.checkpoint.manifest import OPTIMIZER_PREFIX, Manifest, SavedBox, SavedTensor
from megagrid.errors import CheckpointError

DTYPE_CODES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.uint8: "U8",
}
DTYPES = {str(dtype).removeprefix("torch."): dtype for dtype in DTYPE_CODES}
DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}

Commit = Callable[[Mapping[str, FileRecord], Mapping[str, SavedTensor]], None]


class SafetensorsWriter(StorageWriter):
    """Writes this rank's boxes into `folder`; the coordinator calls `prepare` and `commit`.

    Args:
        prepare: makes the folder, before any rank writes.
        commit: ends the save, given what all ranks wrote, once all have.
    """

    def __init__(self, folder: Path, prepare: Callable[[], None], commit: Commit) -> None:
        self.folder = folder
        self.prepare = prepare
        self.commit = commit

    def reset(self, checkpoint_id: Any = None) -> None:
        """A writer is of one save."""

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        self.rank = kwargs.get("rank", 0)

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Number the ranks' files, and make the folder before a rank gets its plan."""
        self.prepare()
        return [dataclasses.replace(plan, storage_data=i) for i, plan in enumerate(plans)]

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        if plan.items and not self.folder.is_dir():
            raise CheckpointError(
                f"{self.folder} isn't visible to rank {self.rank}: the run folder must lie on a "
                "file system that all ranks share"
            )
        results: list[WriteResult] = []
        for name, items in _by_file(plan).items():
            record = _write_safetensors(self.folder / name, items, planner)
            results += [WriteResult(item.index, _nbytes(item), (name, record)) for item in items]
        return _done(results)

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        files: dict[str, FileRecord] = {}
        boxes: dict[str, list[SavedBox]] = defaultdict(list)
        chunks = {
            (name, chunk.offsets): chunk.sizes
            for name, tensor in metadata.state_dict_metadata.items()
            for chunk in tensor.chunks
        }
        for result in (result for results_of_rank in results for result in results_of_rank):
            file, files[file] = result.storage_data
            name, offsets = result.index.fqn, result.index.offset
            boxes[name].append(SavedBox(file, tuple(offsets), tuple(chunks[name, offsets])))
        tensors = {
            name: SavedTensor(
                tuple(tensor.size), DTYPE_NAMES[tensor.properties.dtype], tuple(boxes[name])
            )
            for name, tensor in metadata.state_dict_metadata.items()
        }
        self.commit(files, tensors)

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: Any) -> bool:
        return False


class SafetensorsReader(StorageReader):
    """Reads slices of the boxes that `manifest` lists from the files in `folder`."""

    def __init__(self, folder: Path, manifest: Manifest) -> None:
        self.folder = folder
        self.manifest = manifest
        self._files = {
            (name, box.offsets): box.file
            for name, tensor in manifest.tensors.items()
            for box in tensor.boxes
        }

    def reset(self, checkpoint_id: Any = None) -> None:
        """A reader is of one checkpoint."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        return Metadata(
            {
                name: TensorStorageMetadata(
                    TensorProperties(DTYPES[tensor.dtype]),
                    torch.Size(tensor.shape),
                    [
                        ChunkStorageMetadata(torch.Size(box.offsets), torch.Size(box.sizes))
                        for box in tensor.boxes
                    ],
                )
                for name, tensor in self.manifest.tensors.items()
            }
        )

    def set_up_storage_reader(
        self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any
    ) -> None:
        """Files are opened when they are read."""

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        by_file: dict[str, list[ReadItem]] = defaultdict(list)
        for item in plan.items:
            index = item.storage_index
            by_file[self._files[index.fqn, tuple(index.offset)]].append(item)
        for name, items in by_file.items():
            with open_tensors(self.folder / name) as file:
                for item in items:
                    values = file.get_slice(item.storage_index.fqn)
                    fill(planner, item, values)
        return _done(None)

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: Any) -> bool:
        return False


def _by_file(plan: SavePlan) -> dict[str, list[WriteItem]]:
    """The file of each item: by kind, since weights alone are often wanted, and by rank.

    A file holds one box of a name; a rank with several boxes of one tensor writes more files.
    """
    files: dict[str, list[WriteItem]] = defaultdict(list)
    boxes_so_far: Counter[str] = Counter()
    for item in plan.items:
        name = item.index.fqn
        kind = "optimizer" if name.startswith(OPTIMIZER_PREFIX) else "model"
        part = f"-{boxes_so_far[name]}" if boxes_so_far[name] else ""
        boxes_so_far[name] += 1
        files[f"{kind}-shard-{plan.storage_data:05d}{part}.safetensors"].append(item)
    return files


def _write_safetensors(path: Path, items: list[WriteItem], planner: SavePlanner) -> FileRecord:
    items = sorted(items, key=lambda item: -_dtype(item).itemsize)
    with ChecksummedFile(path) as file:
        file.write(_header(items))
        for item in items:
            values = planner.resolve_data(item).detach().to("cpu").contiguous()
            if values.numel():
                file.write(memoryview(values.reshape(-1).view(torch.uint8).numpy()))
    return file.record


def _header(items: list[WriteItem]) -> bytes:
    places = {item.index.fqn: {"saved_offsets": list(_chunk(item).offsets)} for item in items}
    header: dict[str, Any] = {
        "__metadata__": {"format": "pt", "DCP_SHARDING_INFO": json.dumps(places)}
    }
    end = 0
    for item in items:
        begin, end = end, end + _nbytes(item)
        header[item.index.fqn] = {
            "dtype": DTYPE_CODES[_dtype(item)],
            "shape": list(_chunk(item).sizes),
            "data_offsets": [begin, end],
        }
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


@contextmanager
def open_tensors(path: Path) -> Iterator[Any]:
    """A safetensors file, of which only what is asked for is read.

    Raises:
        CheckpointError: it is missing or damaged.
    """
    try:
        with safe_open(path, framework="pt") as file:
            yield file
    except FileNotFoundError:
        raise CheckpointError(f"{path} is missing") from None
    except SafetensorError as error:
        raise CheckpointError(f"{path} is damaged: {error}") from None


def fill(planner: LoadPlanner, item: ReadItem, box: Any) -> None:
    """Copy the rectangle of `box` that `item` asks for to its place.

    Args:
        box: a tensor, or one of a file, of which the rest then stays unread.
    """
    rectangle = tuple(
        slice(offset, offset + length)
        for offset, length in zip(item.storage_offsets, item.lengths, strict=True)
    )
    target = planner.resolve_tensor(item)
    target.copy_(box[rectangle])
    planner.commit_tensor(item, target)


def _chunk(item: WriteItem) -> ChunkStorageMetadata:
    return item.tensor_data.chunk


def _dtype(item: WriteItem) -> torch.dtype:
    return item.tensor_data.properties.dtype


def _nbytes(item: WriteItem) -> int:
    return math.prod(_chunk(item).sizes) * _dtype(item).itemsize


def _done(value: Any) -> Future[Any]:
    future: Future[Any] = Future()
    future.set_result(value)
    return future
