"""Where a local parameter lies in the model. One fact with four readers: initialisation, the
gradient norm, the optimizer's groups and the checkpoint.

A layer's local tensor is a stack, along dim 0, of *pieces*; each piece is a rectangular box of one
global tensor. A fused QKV projection under tensor parallelism, for example, is three of them:

    local  (q + 2 kv, h)        global tensors
    +-----------+
    |  wq rows  |   <---   box of layers.3.attention.wq.weight   (heads * head_dim, h)
    +-----------+
    |  wk rows  |   <---   box of layers.3.attention.wk.weight   (kv_heads * head_dim, h)
    +-----------+
    |  wv rows  |   <---   box of layers.3.attention.wv.weight   (kv_heads * head_dim, h)
    +-----------+

FSDP then cuts the local tensor along dim 0 over the dp axis; `Layout.rows` says which boxes such a
cut holds. Global names and shapes know nothing of the grid, so neither does a checkpoint.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import torch
from torch import nn

from megagrid.grid.grid import Axis


@dataclass(frozen=True)
class Box:
    """A rectangle of a global tensor: `offsets` (where it begins) and `sizes`, one per dim."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]

    @property
    def numel(self) -> int:
        return math.prod(self.sizes)


@dataclass(frozen=True)
class Piece:
    """A part of a local parameter: `box` of the global tensor `name` of shape `shape`.

    Attributes:
        name: global name relative to the module that owns it until `named_layouts` prefixes it.
        shape: shape of the global tensor, without padding.
        box: the part that lies here.
        local_rows: rows along dim 0 of the local parameter that the box fills; more than
            `box.sizes[0]` where the vocabulary is padded: the rest is zero, trained by nobody and
            never saved.
        init: how its values begin, see `megagrid.nn.init`.
        replicas: the axes along which other ranks hold this same box. It is counted, and written,
            once: by the rank of index 0 along all of them.
        partial: the axes of `replicas` along which each rank's gradient is only a summand.
    """

    name: str
    shape: tuple[int, ...]
    box: Box
    local_rows: int
    init: str
    replicas: tuple[Axis, ...] = ()
    partial: tuple[Axis, ...] = ()

    @property
    def is_counted_here(self) -> bool:
        """Whether this rank is the one that speaks for the box."""
        return all(axis.rank == 0 for axis in self.replicas)


@dataclass(frozen=True)
class Layout:
    """A local parameter as a stack of pieces along dim 0.

    Attributes:
        decay: whether weight decay applies to it.
    """

    pieces: tuple[Piece, ...]
    decay: bool

    def rows(self, start: int, stop: int) -> Iterator[tuple[Piece, slice]]:
        """What the rows [start, stop) of the local parameter hold.

        Yields:
            each piece cut down to those rows, and where they lie, counted from `start`. Rows of
            padding are left out, a piece of which nothing is left too.
        """
        top = 0
        for piece in self.pieces:
            first = max(start, top)
            last = min(stop, top + piece.box.sizes[0])
            if first < last:
                offsets = (piece.box.offsets[0] + first - top, *piece.box.offsets[1:])
                sizes = (last - first, *piece.box.sizes[1:])
                yield replace(piece, box=Box(offsets, sizes), local_rows=last - first), slice(
                    first - start, last - start
                )
            top += piece.local_rows


def named_layouts(model: nn.Module) -> dict[str, Layout]:
    """Layouts of all parameters of `model`, keyed by their name in it, pieces by global names.

    A module states `layouts: dict[parameter name, Layout]` and is found by it, before and after
    fully_shard. A tied parameter appears once, where it is first met.
    """
    ...
