"""A checkpoint of any grid loads on any other, bit by bit, and each rank reads only its boxes."""

from __future__ import annotations

import random
from itertools import product
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader

from megagrid.checkpoint import Entry, load, save
from megagrid.checkpoint.manifest import read_manifest
from megagrid.errors import CheckpointError
from megagrid.grid.grid import Axis
from megagrid.nn.layout import Box
from tests.checkpoint.cuts import (
    HIDDEN,
    WORDS,
    GridShape,
    RankState,
    global_tensor,
    random_cut,
    rank_states,
    slices_of,
)

GRIDS = (
    GridShape(),
    GridShape(tp=2, dp=2),
    GridShape(tp=4, pp=2),
    GridShape(pp=2, dp=3),
    GridShape(tp=2, pp=2, dp=2, shards=False),
    GridShape(dp=16),  # more ranks than rows of a norm: empty shards
)


def all_entries(states: list[RankState]) -> list[Entry]:
    return [entry for state in states for entry in state.entries]


@pytest.mark.parametrize(("saved", "loaded"), list(product(GRIDS, GRIDS)), ids=str)
def test_any_grid_loads_on_any_other(saved: GridShape, loaded: GridShape, tmp_path: Path) -> None:
    """One process stands for all ranks of a grid: it holds the boxes of all of them."""
    states = rank_states(saved)
    for state in states:
        state.fill()
    checkpoint = save(tmp_path, all_entries(states), {"step": 1})
    states = rank_states(loaded)
    load(checkpoint, all_entries(states))
    assert all(state.is_right() for state in states)


def my_state(grid: GridShape) -> tuple[RankState, Axis]:
    rank, size = dist.get_rank(), dist.get_world_size()
    world = Axis("world", tuple(range(size)), rank, dist.group.WORLD)
    return rank_states(grid)[rank], world


def save_as_a_rank(folder: Path, grid: GridShape) -> Path:
    state, world = my_state(grid)
    state.fill()
    return save(folder, state.entries, {"step": 1}, world=world)


def load_as_a_rank(checkpoint: Path, grid: GridShape) -> bool:
    state, world = my_state(grid)
    load(checkpoint, state.entries, world=world)
    return state.is_right()


@pytest.mark.parametrize(
    ("saved", "loaded"),
    [
        (GridShape(tp=2, dp=2), GridShape(pp=2)),
        (GridShape(pp=2), GridShape(tp=4)),
        (GridShape(dp=2, pp=2, shards=False), GridShape(dp=3)),
    ],
    ids=str,
)
def test_ranks_save_and_load_together(
    saved: GridShape, loaded: GridShape, tmp_path: Path, ranks
) -> None:
    checkpoints = set(ranks.run(save_as_a_rank, tmp_path, saved, world_size=saved.size))
    assert checkpoints == {tmp_path / "step-00000001"}
    right = ranks.run(load_as_a_rank, checkpoints.pop(), loaded, world_size=loaded.size)
    assert right == [True] * loaded.size


@pytest.mark.parametrize("shape", [(), (1,), (7,), (5, 9), (3, 1, 6), (2, 3, 4, 5)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
def test_any_rectangles_are_filled_from_any_others(
    shape: tuple[int, ...], dtype: torch.dtype, tmp_path: Path
) -> None:
    rng = random.Random(str(shape))
    whole = torch.randn(shape, dtype=dtype)

    def cut(values: torch.Tensor) -> list[Entry]:
        boxes = random_cut(rng, Box((0,) * len(shape), shape), 4)
        return [Entry("w", shape, box, values[slices_of(box)], True) for box in boxes]

    checkpoint = save(tmp_path, cut(whole), {"step": 1})
    read = torch.zeros_like(whole)
    load(checkpoint, cut(read))
    assert torch.equal(read, whole)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_torch_reads_a_checkpoint_without_megagrid(tmp_path: Path) -> None:
    states = rank_states(GridShape(tp=2, dp=2))
    for state in states:
        state.fill()
    checkpoint = save(tmp_path, all_entries(states), {"step": 1})
    shapes = {name: tensor.shape for name, tensor in read_manifest(checkpoint).tensors.items()}
    read = {name: torch.zeros(shape) for name, shape in shapes.items()}
    dcp.load(read, storage_reader=HuggingFaceStorageReader(checkpoint), no_dist=True)
    assert all(torch.equal(read[name], global_tensor(name, shapes[name])) for name in shapes)


def test_padding_of_the_vocabulary_is_not_saved(tmp_path: Path) -> None:
    states = rank_states(GridShape(tp=4))
    checkpoint = save(tmp_path, all_entries(states), {"step": 1})
    saved = read_manifest(checkpoint).tensors["embedding.weight"]
    assert saved.shape == (WORDS, HIDDEN)
    assert sum(box.sizes[0] for box in saved.boxes) == WORDS


def test_replicas_are_written_once(tmp_path: Path) -> None:
    grid = GridShape(tp=4, pp=2, dp=2, shards=False)
    checkpoint = save(tmp_path, all_entries(rank_states(grid)), {"step": 1})
    tensors = read_manifest(checkpoint).tensors
    for name, boxes in (("layers.0.norm.weight", 1), ("layers.0.wk.weight", 2)):
        assert len(tensors[name].boxes) == boxes
    assert len(tensors["embedding.weight"].boxes) == 4


def test_a_box_that_no_rank_writes_fails_the_save(tmp_path: Path) -> None:
    values = torch.ones(4)
    half = Entry("w", (4,), Box((0,), (2,)), values[:2], True)
    other = Entry("w", (4,), Box((2,), (2,)), values[2:], False)
    with pytest.raises(RuntimeError, match="2 of the 4 values of w"):
        save(tmp_path, [half, other], {"step": 1})
    with pytest.raises(RuntimeError, match="no rank writes x"):
        save(tmp_path, [Entry("x", (4,), Box((0,), (4,)), values, False)], {"step": 1})
    assert list(tmp_path.iterdir()) == []


def test_boxes_that_overlap_fail_the_save(tmp_path: Path) -> None:
    values = torch.ones(4)
    boxes = [
        Entry("w", (4,), Box((0,), (3,)), values[:3], True),
        Entry("w", (4,), Box((2,), (1,)), values[2:3], True),
    ]
    with pytest.raises(RuntimeError, match="overlap"):
        save(tmp_path, boxes, {"step": 1})


def test_widening_is_exact_and_narrowing_is_refused(tmp_path: Path) -> None:
    def whole(values: torch.Tensor) -> list[Entry]:
        return [Entry("w", (8,), Box((0,), (8,)), values, True)]

    narrow = torch.randn(8).bfloat16()
    checkpoint = save(tmp_path, whole(narrow), {"step": 1})
    wide = torch.zeros(8)
    load(checkpoint, whole(wide))
    assert torch.equal(wide, narrow.float())
    checkpoint = save(tmp_path, whole(wide), {"step": 2})
    with pytest.raises(CheckpointError, match=r"wider dtypes w torch.float32 instead of torch.bf"):
        load(checkpoint, whole(narrow))
