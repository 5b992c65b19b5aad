"""Every differentiable collective of the model. All tensors are sequence-first: (s, b, h).

A region's backward is the conjugate of its forward, so that a layer which is split over ranks has
the gradient of the layer that isn't:

    name             | forward             | backward            | used by
    -----------------|---------------------|---------------------|----------------------------------
    enter            | identity            | all-reduce          | column-parallel input
    leave            | all-reduce          | identity            | row-parallel output, embedding
    enter_sequence   | all-gather on s     | reduce-scatter on s | column-parallel input under SP
    leave_sequence   | reduce-scatter on s | all-gather on s     | the same two under SP

With sequence parallelism (Korthikanti et al. 2022, section 4.2.2) what lies between a `leave` and
the next `enter`, norms, dropout and residuals, is sharded along the sequence:

            (s/t, b, h)         (s, b, h)         (s, b, ffn/t)        (s/t, b, h)
    norm ----------> enter_sequence ----> column ----------> row -> leave_sequence ----> residual

`enter` and `leave` reduce in place: `enter` the gradient that a matrix product has just made,
`leave` the product itself. Nothing else may hold those tensors.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from megagrid.comm.collectives import all_gather, all_reduce, reduce_scatter
from megagrid.grid.grid import Axis


class _Enter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: Axis) -> Tensor:
        ctx.axis = axis
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return all_reduce(grad.contiguous(), ctx.axis), None


class _Leave(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: Axis) -> Tensor:
        ctx.mark_dirty(x)
        return all_reduce(x, axis)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None


class _EnterSequence(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: Axis) -> Tensor:
        ctx.axis = axis
        return all_gather(x, axis)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return reduce_scatter(grad, ctx.axis), None


class _LeaveSequence(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: Axis) -> Tensor:
        ctx.axis = axis
        return reduce_scatter(x, axis)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return all_gather(grad, ctx.axis), None


def enter(x: Tensor, axis: Axis, *, sequence_parallel: bool = False) -> Tensor:
    """Begin work that is split over `axis`.

    Args:
        x: (s, b, h), the same on every rank; (s / size, b, h) with `sequence_parallel`.

    Returns:
        (s, b, h), the same on every rank.
    """
    if axis.size == 1:
        return x
    return (_EnterSequence if sequence_parallel else _Enter).apply(x, axis)


def leave(x: Tensor, axis: Axis, *, sequence_parallel: bool = False) -> Tensor:
    """End work that is split over `axis`: sum the ranks' parts.

    Args:
        x: (s, b, h), this rank's summand.

    Returns:
        (s, b, h), the same on every rank; (s / size, b, h) with `sequence_parallel`.
    """
    if axis.size == 1:
        return x
    return (_LeaveSequence if sequence_parallel else _Leave).apply(x, axis)
