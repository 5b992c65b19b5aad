"""What FSDP leaves on a rank is saved as the boxes that it is, uneven and empty shards too."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

from megagrid.checkpoint import entries, load, save
from megagrid.config.schema import OptimizerConfig
from megagrid.config.sharding import STRATEGIES
from megagrid.data_parallel.sharding import dp_mesh
from megagrid.grid.grid import Axis
from megagrid.nn.layout import Box, Layout, Piece, Sharing, parameter_shards
from megagrid.optim.adamw import AdamW
from tests.checkpoint.cuts import global_tensor, right_values

WIDTH = 3


class Fused(nn.Module):
    """Two global tensors of 4 and 3 rows in one parameter, and one of two values."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(7, WIDTH))
        self.bias = nn.Parameter(torch.zeros(2))
        self.layouts = {
            "weight": Layout((whole("gate", 4, WIDTH), whole("up", 3, WIDTH)), decay=True),
            "bias": Layout((whole("bias", 2),), decay=False),
        }


def whole(name: str, *shape: int) -> Piece:
    return Piece(name, shape, Box((0,) * len(shape), shape), shape[0], "zeros")


class Stage(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.mlp = Fused()


def save_shards(folder: Path, strategy: str) -> dict[str, tuple[int, ...]]:
    """Save and load again what fully_shard makes of a stage; returns the boxes written here."""
    rank, size = dist.get_rank(), dist.get_world_size()
    world = Axis("world", tuple(range(size)), rank, dist.group.WORLD)
    stage = Stage()
    alone = Axis.single("dp_shard", rank)
    weights = Sharing(world, alone) if STRATEGIES[strategy].shards else Sharing(alone, world)
    mesh = dp_mesh(world, weights.replicas, weights.split, torch.device("cpu"))
    fully_shard(stage, mesh=mesh)
    shards = updated = parameter_shards(stage, lambda module: weights)
    if strategy == "ZERO1":
        updated = parameter_shards(stage, lambda module: Sharing(world, alone), cut=True)
    boxes = entries(shards, AdamW(updated, OptimizerConfig()))
    for entry in boxes:
        entry.tensor.copy_(right_values(entry))
    checkpoint = save(folder, boxes, {"step": 1}, world=world)
    for entry in boxes:
        entry.tensor.zero_()
    load(checkpoint, boxes, world=world)
    assert all(torch.equal(entry.tensor, right_values(entry)) for entry in boxes)
    return {entry.name: entry.box.sizes for entry in boxes if entry.is_written_here}


# 7 rows over 3 ranks: 3, 3, 1; the two values of the bias: 1, 1, none.
SPLIT = [
    {"gate": (3, 3), "bias": (1,)},
    {"gate": (1, 3), "up": (2, 3), "bias": (1,)},
    {"up": (1, 3)},
]
WHOLE = [{"gate": (4, 3), "up": (3, 3), "bias": (2,)}, {}, {}]


@pytest.mark.parametrize(
    ("strategy", "weights", "states"),
    [("FULL_SHARD", SPLIT, SPLIT), ("ZERO1", WHOLE, SPLIT), ("NO_SHARD", WHOLE, WHOLE)],
)
def test_each_rank_writes_what_fully_shard_left_it(
    strategy: str, weights: list[dict], states: list[dict], tmp_path: Path, ranks
) -> None:
    results = ranks.run(save_shards, tmp_path, strategy, world_size=3)
    for result, of_weights, of_states in zip(results, weights, states, strict=True):
        moments = ("optimizer.exp_avg.", "optimizer.exp_avg_sq.")
        expected = {prefix + name: n for prefix in moments for name, n in of_states.items()}
        assert result == of_weights | expected


def test_a_checkpoint_of_shards_is_the_whole_model(tmp_path: Path, ranks) -> None:
    ranks.run(save_shards, tmp_path, "FULL_SHARD", world_size=3)
    stage = Stage()
    boxes = entries(parameter_shards(stage))
    load(tmp_path / "step-00000001", boxes, weights_only=True)
    assert all(torch.equal(entry.tensor, right_values(entry)) for entry in boxes)
    assert torch.equal(stage.mlp.weight[:4], global_tensor("gate", (4, WIDTH)))
