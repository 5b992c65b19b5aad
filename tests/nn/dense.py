"""Layers that are split over ranks against the dense layer: the whole weights go in, by the boxes
that the layers state, and the whole gradients come out."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

from megagrid.grid.grid import Axis
from megagrid.nn.layout import parameter_shards

Tensors = dict[str, Tensor]


def axis_of_all(name: str = "tp") -> Axis:
    """All ranks of the call."""
    ranks = tuple(range(dist.get_world_size()))
    return Axis(name, ranks, dist.get_rank(), dist.group.WORLD if len(ranks) > 1 else None)


def neighbours(size: int) -> Axis:
    """The axis of `size` neighbouring ranks that this one is of. Collective over all ranks."""
    world, rank = dist.get_world_size(), dist.get_rank()
    mine = Axis.single("kv", rank)
    for first in range(0, world if size > 1 else 0, size):
        ranks = tuple(range(first, first + size))
        group = dist.new_group(list(ranks))
        if rank in ranks:
            mine = Axis("kv", ranks, ranks.index(rank), group)
    return mine


def grid_of_two(inner: int, outer: int) -> tuple[Axis, Axis]:
    """The tp axis of neighbours and the cp axis across them. Collective over all ranks."""
    rank, axes = dist.get_rank(), []
    groups = {
        "tp": [range(first, first + inner) for first in range(0, inner * outer, inner)],
        "cp": [range(first, inner * outer, inner) for first in range(inner)],
    }
    for name, all_ranks in groups.items():
        axes.append(Axis.single(name, rank))
        for ranks in map(tuple, all_ranks):
            group = dist.new_group(list(ranks)) if len(ranks) > 1 else None
            if rank in ranks:
                axes[-1] = Axis(name, ranks, ranks.index(rank), group)
    return axes[0], axes[1]


def random(seed: int, *shape: int) -> Tensor:
    """Standard normal float64, the same on every rank."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, dtype=torch.float64, generator=generator)


def fill(module: nn.Module, whole: Mapping[str, Tensor]) -> None:
    """Give `module` its boxes of the `whole` tensors, and NaN to padding: nothing may read it."""
    for shard in parameter_shards(module):
        shard.tensor.fill_(torch.nan)
        for piece, rows in shard.boxes:
            shard.tensor[rows] = _region(whole[piece.name], piece.box)


@dataclass(frozen=True)
class Part:
    """A rank's gradient of a box."""

    name: str
    offsets: tuple[int, ...]
    values: np.ndarray
    is_summand: bool


def gradients(module: nn.Module) -> list[Part]:
    """The rank's gradients, box by box."""
    return [
        Part(piece.name, piece.box.offsets, shard.grad[rows].numpy(), bool(piece.partial))
        for shard in parameter_shards(module)
        for piece, rows in shard.boxes
    ]


def whole_gradients(parts_by_rank: list[list[Part]], shapes: Mapping[str, Tensor]) -> Tensors:
    """The gradients that all ranks' parts make: summands added up, copies the same."""
    whole = {name: torch.zeros_like(tensor) for name, tensor in shapes.items()}
    for part in (part for parts in parts_by_rank for part in parts):
        here = tuple(
            slice(first, first + size)
            for first, size in zip(part.offsets, part.values.shape, strict=True)
        )
        values = torch.from_numpy(part.values)
        if part.is_summand:
            whole[part.name][here] += values
        else:
            known = whole[part.name][here]
            assert not known.any() or torch.equal(known, values), f"{part.name}: copies differ"
            whole[part.name][here] = values
    return whole


def _region(tensor: Tensor, box) -> Tensor:
    for dim, (offset, size) in enumerate(zip(box.offsets, box.sizes, strict=True)):
        tensor = tensor.narrow(dim, offset, size)
    return tensor


def assert_equal(found: Tensor, expected: Tensor, what: str = "") -> None:
    """Equal up to float64's rounding."""
    torch.testing.assert_close(
        found, expected, rtol=1e-12, atol=1e-12, msg=lambda m: f"{what}: {m}"
    )
