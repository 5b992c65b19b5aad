"""Collectives along an axis: rank order, in place where promised, nothing at size 1."""

from __future__ import annotations

import torch
import torch.distributed as dist

from megagrid.comm.collectives import (
    all_gather,
    all_reduce,
    all_reduce_coalesced,
    reduce_scatter,
)
from megagrid.grid.grid import Axis


def axis_of(ranks: tuple[int, ...]) -> Axis:
    """An axis in that order of ranks. Collective."""
    group = dist.new_group(list(ranks))
    return Axis("tp", ranks, ranks.index(dist.get_rank()), group)


def gather_and_scatter() -> tuple[list[float], list[float]]:
    axis = axis_of((0, 1, 2))
    gathered = all_gather(torch.tensor([axis.rank, axis.rank + 0.5]), axis)
    whole = torch.arange(6.0) * (axis.rank + 1)
    return gathered.tolist(), reduce_scatter(whole, axis).tolist()


def test_shares_are_in_rank_order(ranks):
    for rank, (gathered, share) in enumerate(ranks.run(gather_and_scatter, world_size=3)):
        assert gathered == [0.0, 0.5, 1.0, 1.5, 2.0, 2.5]
        assert share == [6.0 * (2 * rank), 6.0 * (2 * rank + 1)]


def reduced_in_place() -> tuple[bool, float, float]:
    axis = axis_of((0, 1))
    x, largest = torch.tensor(axis.rank + 1.0), torch.tensor(axis.rank + 1.0)
    is_same = all_reduce(x, axis) is x
    all_reduce(largest, axis, dist.ReduceOp.MAX)
    return is_same, x.item(), largest.item()


def test_all_reduce_is_in_place(ranks):
    assert ranks.run(reduced_in_place, world_size=2) == [(True, 3.0, 2.0)] * 2


def coalesced() -> tuple[list, list, list, list]:
    """Tensors of two dtypes, one of them a slice of a larger one."""
    axis = axis_of((0, 1))
    scale = axis.rank + 1.0
    matrix = torch.ones(3, 4) * scale
    vector = torch.arange(3.0) * scale
    wide = torch.ones(2, dtype=torch.float64) * scale
    all_reduce_coalesced([matrix[:, 1:3], wide, vector], axis)
    all_reduce_coalesced([], axis)
    return matrix.tolist(), vector.tolist(), wide.tolist(), [scale]


def test_coalesced_sums_reach_each_tensor_and_nothing_else(ranks):
    for matrix, vector, wide, (scale,) in ranks.run(coalesced, world_size=2):
        assert matrix == [[scale, 3.0, 3.0, scale]] * 3
        assert vector == [0.0, 3.0, 6.0]
        assert wide == [3.0, 3.0]


def test_size_1_needs_no_group_and_does_nothing():
    axis = Axis.single("tp")
    x = torch.arange(4.0)
    for result in (all_reduce(x, axis), all_gather(x, axis), reduce_scatter(x, axis)):
        assert result is x
    all_reduce_coalesced([x], axis)
    assert x.tolist() == [0.0, 1.0, 2.0, 3.0]
