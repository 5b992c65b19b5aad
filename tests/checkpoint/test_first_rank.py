"""Who reads a checkpoint: every rank its slices and no more, or the first rank alone."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

from megagrid.checkpoint import Entry, find_checkpoint, load, save
from megagrid.checkpoint import first_rank as first_rank_module
from megagrid.checkpoint import storage as storage_module
from megagrid.checkpoint.manifest import OPTIMIZER_PREFIX, read_manifest
from megagrid.errors import CheckpointError
from megagrid.grid.grid import Axis
from megagrid.nn.layout import Box
from tests.checkpoint.cuts import GridShape, rank_states

TP2DP2, PP2 = GridShape(tp=2, dp=2), GridShape(pp=2)


def save_all(folder: Path, grid: GridShape) -> Path:
    """A checkpoint of `grid`, by one process that stands for all of its ranks."""
    states = rank_states(grid)
    for state in states:
        state.fill()
    return save(folder, [entry for state in states for entry in state.entries], {"step": 1})


def world() -> Axis:
    rank, size = dist.get_rank(), dist.get_world_size()
    return Axis("world", tuple(range(size)), rank, dist.group.WORLD)


# ------------------------------------------------------------------------------------------------
# By the first rank


def resume_by_first_rank(checkpoint: Path, grid: GridShape) -> bool:
    """All that a run does to resume. The other ranks can't: their path leads nowhere."""
    path = checkpoint if dist.get_rank() == 0 else Path("/nowhere")
    state = rank_states(grid)[dist.get_rank()]
    found = find_checkpoint(str(path), path, world(), by_first_rank=True)
    assert found.path == checkpoint
    load(path, state.entries, world=world(), is_verified=True, by_first_rank=True)
    return state.is_right()


@pytest.mark.parametrize("loaded", [PP2, GridShape(tp=4), GridShape(dp=3)], ids=str)
def test_no_other_rank_opens_a_file_and_all_have_the_same_bits(ranks, tmp_path, loaded):
    checkpoint = save_all(tmp_path, TP2DP2)
    right = ranks.run(resume_by_first_rank, checkpoint, loaded, world_size=loaded.size)
    assert right == [True] * loaded.size


def load_weights_and_note_reads(checkpoint: Path) -> list[tuple[str, int]]:
    """What this rank reads of the files, as (name, number of values) in order."""
    state = rank_states(PP2)[dist.get_rank()]
    weights = [e for e in state.entries if not e.name.startswith(OPTIMIZER_PREFIX)]
    with noted_reads() as reads:
        load(checkpoint, weights, world=world(), weights_only=True, by_first_rank=True)
    return reads


def test_the_first_rank_reads_box_by_box_and_only_what_is_wanted(ranks, tmp_path):
    """So it never holds more than a box of the checkpoint beside its own."""
    checkpoint = save_all(tmp_path, TP2DP2)
    first, second = ranks.run(load_weights_and_note_reads, checkpoint, world_size=2)
    assert second == []
    expected = [
        (name, math.prod(box.sizes))
        for name, tensor in read_manifest(checkpoint).tensors.items()
        if not name.startswith(OPTIMIZER_PREFIX)
        for box in tensor.boxes
    ]
    assert sorted(first) == sorted(expected)


def any_dtype(shape: tuple[int, ...], dtype: torch.dtype) -> list[Entry]:
    values = torch.arange(math.prod(shape)).reshape(shape).to(dtype)
    return [Entry("w", shape, Box((0,) * len(shape), shape), values, True)]


def load_each_dtype(folder: Path) -> bool:
    same = []
    for number, (shape, dtype) in enumerate(DTYPES, start=1):
        expected = any_dtype(shape, dtype)
        if dist.get_rank() == 0:
            save(folder, expected, {"step": number})
        dist.barrier()
        read = any_dtype(shape, dtype)
        read[0].tensor.zero_()
        load(folder / f"step-{number:08}", read, world=world(), by_first_rank=True)
        same.append(torch.equal(read[0].tensor, expected[0].tensor))
    return all(same)


DTYPES = [
    ((), torch.float32),
    ((5,), torch.bfloat16),
    ((2, 3), torch.float64),
    ((4, 1, 2), torch.int64),
    ((3,), torch.float16),
    ((7,), torch.uint8),
]


def test_every_dtype_and_shape_is_sent(ranks, tmp_path):
    assert ranks.run(load_each_dtype, tmp_path, world_size=2) == [True, True]


def what_is_told(checkpoint: Path) -> str:
    state = rank_states(PP2)[dist.get_rank()]
    with pytest.raises(CheckpointError) as refused:
        load(checkpoint, state.entries, world=world(), is_verified=True, by_first_rank=True)
    return str(refused.value)


def spoil(path: Path) -> None:
    """Damage the header, which sizes and thus a verified checkpoint's check don't show."""
    content = bytearray(path.read_bytes())
    content[8] = 0
    path.write_bytes(content)


def test_a_file_that_is_damaged_meanwhile_is_named_on_every_rank(ranks, tmp_path):
    """Amid the reading: the ranks have taken boxes of other files before."""
    checkpoint = save_all(tmp_path, TP2DP2)
    damaged = sorted(checkpoint.glob("*.safetensors"))[-1]
    spoil(damaged)
    told = ranks.run(what_is_told, checkpoint, world_size=2)
    assert len(set(told)) == 1
    assert told[0].startswith(f"{damaged} is damaged: ")


# ------------------------------------------------------------------------------------------------
# By every rank


@contextmanager
def noted_reads() -> Iterator[list[tuple[str, int]]]:
    """Name and number of values of each read of a tensor's file in the block."""
    reads: list[tuple[str, int]] = []
    open_tensors = storage_module.open_tensors

    @contextmanager
    def noting(path: Path) -> Iterator[Any]:
        with open_tensors(path) as file:
            yield NotingFile(file, lambda name, values: reads.append((name, values.numel())))

    with (
        patch.object(storage_module, "open_tensors", noting),
        patch.object(first_rank_module, "open_tensors", noting),
    ):
        yield reads


class NotingFile:
    """A file of tensors that tells what is read of it."""

    def __init__(self, file: Any, note: Callable[[str, torch.Tensor], None]) -> None:
        self._file = file
        self._note = note

    def get_tensor(self, name: str) -> torch.Tensor:
        values = self._file.get_tensor(name)
        self._note(name, values)
        return values

    def get_slice(self, name: str) -> NotingSlice:
        return NotingSlice(self._file.get_slice(name), lambda values: self._note(name, values))


class NotingSlice:
    def __init__(self, part: Any, note: Callable[[torch.Tensor], None]) -> None:
        self._part = part
        self._note = note

    def __getitem__(self, rectangle: tuple[slice, ...]) -> torch.Tensor:
        values = self._part[rectangle]
        self._note(values)
        return values


def load_and_compare_reads(checkpoint: Path, grid: GridShape) -> tuple[bool, int, int]:
    """Whether the rank has its values, the values that it holds, and those that it has read."""
    state = rank_states(grid)[dist.get_rank()]
    with noted_reads() as reads:
        load(checkpoint, state.entries, world=world(), is_verified=True)
    held = sum(entry.box.numel for entry in state.entries)
    return state.is_right(), held, sum(size for _, size in reads)


@pytest.mark.parametrize("loaded", [PP2, GridShape(tp=4), GridShape(dp=4)], ids=str)
def test_by_default_each_rank_reads_its_slices_and_no_more(ranks, tmp_path, loaded):
    checkpoint = save_all(tmp_path, TP2DP2)
    ends = ranks.run(load_and_compare_reads, checkpoint, loaded, world_size=loaded.size)
    for is_right, held, read in ends:
        assert is_right
        assert read == held
