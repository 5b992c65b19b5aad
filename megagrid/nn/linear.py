"""Linear layers split over an axis, and the layouts of all that lie in slices of rows or columns.

    y = W x,  W (out, in)      column-parallel: rows of W        row-parallel: columns of W

                               +-------+ rank 0                  +---+---+
                               |       |                         |   |   |
                               +-------+ rank 1                  | 0 | 1 |
                               |       |                         |   |   |
                               +-------+                         +---+---+
                               y is split, x is whole            x is split, y is a sum

(Shoeybi et al. 2019, section 3; named for the layout of the transposed weight.)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from megagrid.comm import regions
from megagrid.grid.grid import Axis
from megagrid.nn.float8 import Multiply
from megagrid.nn.init import ZEROS, Init
from megagrid.nn.layout import Box, Layout, Piece
from megagrid.nn.split_backward import LateWeightGradients, Slot, linear


@dataclass(frozen=True)
class Part:
    """One of the matrices that a fused column-parallel layer stacks.

    Attributes:
        name: of the matrix in the model, a sibling of the layer.
        rows: output features over all ranks.
        copies: the axis along which neighbours hold the same rows; None if each has its own.
    """

    name: str
    rows: int
    copies: Axis | None = None


def row_piece(part: Part, suffix: str, axis: Axis, init: Init, *columns: int) -> Piece:
    """This rank's share of rows of `part`: its weight (rows, *columns) or bias (rows,)."""
    copies = part.copies.size if part.copies else 1
    rows = part.rows * copies // axis.size
    first = axis.rank // copies * rows
    same = (part.copies,) if part.copies and copies > 1 else ()
    return Piece(
        name=f"{part.name}.{suffix}",
        shape=(part.rows, *columns),
        box=Box((first, *(0 for _ in columns)), (rows, *columns)),
        local_rows=rows,
        init=init,
        replicas=same,
        partial=same,
    )


def replicated_piece(
    name: str, shape: tuple[int, ...], axis: Axis, init: Init, *, partial: bool
) -> Piece:
    """A whole tensor on every rank of `axis`; `partial` if each sees only some of the tokens."""
    axes = (axis,) if axis.size > 1 else ()
    return Piece(
        name=name,
        shape=shape,
        box=Box((0,) * len(shape), shape),
        local_rows=shape[0],
        init=init,
        replicas=axes,
        partial=axes if partial else (),
    )


def empty_parameter(layout: Layout) -> nn.Parameter:
    """An unfilled local parameter of the layout's shape, on the device of the context."""
    return nn.Parameter(torch.empty(layout.local_shape))


class SplitBackward(nn.Module):
    """A layer with a weight whose gradient may be put off.

    Attributes:
        late: where to; None: backward computes it at once.
        multiply: what makes products, see `linear`.
        slot: what it is put off by, of the forward that is being compiled.
    """

    late: LateWeightGradients | None = None
    multiply: Multiply | None = None
    slot: Slot | None = None


class ColumnParallelLinear(SplitBackward):
    """y = x W^T + b with the rows of W, and of y, split over `axis`; several matrices at once.

    Shape: (s, b, in), or (s / axis.size, b, in) with `sequence_parallel`
        -> (s, b, sum of the parts' local rows).
    """

    def __init__(
        self,
        in_features: int,
        parts: Sequence[Part],
        axis: Axis,
        *,
        bias: bool,
        init: Init,
        sequence_parallel: bool,
    ) -> None:
        super().__init__()
        self.axis = axis
        self.sequence_parallel = sequence_parallel
        weights = tuple(row_piece(part, "weight", axis, init, in_features) for part in parts)
        self.layouts = {"weight": Layout(weights, decay=True, hidden=True)}
        if bias:
            biases = tuple(row_piece(part, "bias", axis, ZEROS) for part in parts)
            self.layouts["bias"] = Layout(biases, decay=False)
        self.weight = empty_parameter(self.layouts["weight"])
        self.bias = empty_parameter(self.layouts["bias"]) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        x = regions.enter(x, self.axis, sequence_parallel=self.sequence_parallel)
        return linear(x, self.weight, self.bias, self.late, self.multiply, self.slot)


class RowParallelLinear(SplitBackward):
    """y = x W^T + b with the columns of W, and of x, split over `axis`; y is the sum over ranks.

    The bias is whole on every rank and added once, after the sum.

    Shape: (s, b, in / axis.size) -> (s, b, out), or (s / axis.size, b, out) with
        `sequence_parallel`.
    """

    def __init__(
        self,
        name: str,
        in_features: int,
        out_features: int,
        axis: Axis,
        *,
        bias: bool,
        init: Init,
        sequence_parallel: bool,
    ) -> None:
        super().__init__()
        self.axis = axis
        self.sequence_parallel = sequence_parallel
        columns = in_features // axis.size
        weight = Piece(
            name=f"{name}.weight",
            shape=(out_features, in_features),
            box=Box((0, axis.rank * columns), (out_features, columns)),
            local_rows=out_features,
            init=init,
        )
        self.layouts = {"weight": Layout((weight,), decay=True, hidden=True)}
        if bias:
            piece = replicated_piece(
                f"{name}.bias", (out_features,), axis, ZEROS, partial=sequence_parallel
            )
            self.layouts["bias"] = Layout((piece,), decay=False)
        self.weight = empty_parameter(self.layouts["weight"])
        self.bias = empty_parameter(self.layouts["bias"]) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        if self.axis.size == 1:
            return linear(x, self.weight, self.bias, self.late, self.multiply, self.slot)
        y = linear(x, self.weight, None, self.late, self.multiply, self.slot)
        y = regions.leave(y, self.axis, sequence_parallel=self.sequence_parallel)
        return y if self.bias is None else y + self.bias
