"""Initial weights: every element a function of (seed, global name, global index).

Each rank fills just the rows that it owns, after sharding; whatever the grid, the model is the
same, bit for bit, and no rank ever holds the whole of it.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from megagrid.nn import hashing

if TYPE_CHECKING:
    from megagrid.nn.layout import Box, ParameterShard

_ELEMENTS_AT_ONCE = {"cpu": 1 << 15}
"""Of a fill, by device: the temporary int64 tensors stay in a core's cache."""

_ELEMENTS_AT_ONCE_ELSEWHERE = 1 << 22
"""Enough to fill an accelerator; its temporary tensors take some 100 MB."""


@dataclass(frozen=True)
class Init:
    """A constant, or a normal distribution around 0.

    Attributes:
        std: standard deviation of the normal; None for the constant.
        value: the constant.
    """

    std: float | None = None
    value: float = 0.0


ZEROS = Init(value=0.0)
ONES = Init(value=1.0)


def initialise(shards: Iterable[ParameterShard], seed: int) -> None:
    """Fill all boxes of `shards` with their initial values, and padding with zeros."""
    for shard in shards:
        shard.tensor.zero_()
        for piece, rows in shard.boxes:
            local = shard.tensor[rows]
            if piece.init.std is None:
                local.fill_(piece.init.value)
            else:
                stream = hashing.key(seed, "weights", piece.name)
                _fill_normal(local, stream, piece.shape, piece.box, piece.init.std)


def _fill_normal(out: Tensor, stream: int, shape: tuple[int, ...], box: Box, std: float) -> None:
    """Fill `out` (box.sizes) with the elements of `box` of the global tensor of `shape`."""
    at_once = _ELEMENTS_AT_ONCE.get(out.device.type, _ELEMENTS_AT_ONCE_ELSEWHERE)
    rows_at_once = max(1, at_once * box.sizes[0] // max(1, box.numel))
    for first in range(0, box.sizes[0], rows_at_once):
        chunk = out[first : first + rows_at_once]
        offsets = (box.offsets[0] + first, *box.offsets[1:])
        index = torch.zeros((), dtype=torch.int64, device=out.device)
        for offset, size, extent in zip(offsets, chunk.shape, shape, strict=True):
            along = torch.arange(offset, offset + size, device=out.device)
            index = index.unsqueeze(-1) * extent + along
        chunk.copy_(hashing.normal(stream, index) * std)
