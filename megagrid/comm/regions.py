"""Every differentiable collective of the model. All tensors are sequence-first: (s, b, h).

A region's backward is the conjugate of its forward, so that a layer which is split over ranks has
the gradient of the layer that isn't:

    name             | forward             | backward            | used by
    -----------------|---------------------|---------------------|----------------------------------
    enter            | identity            | all-reduce          | column-parallel input
    leave            | all-reduce          | identity            | row-parallel output, embedding
    enter_sequence   | all-gather on s     | reduce-scatter on s | column-parallel input under SP
    leave_sequence   | reduce-scatter on s | all-gather on s     | the same two under SP
    gather_sample    | all-gather on s     | reduce-scatter on s | keys and values under CP
    to_heads         | all-to-all          | all-to-all          | queries, keys, values under CP
    to_tokens        | all-to-all          | all-to-all          | attention's output under CP

With sequence parallelism (Korthikanti et al. 2022, section 4.2.2) what lies between a `leave` and
the next `enter`, norms, dropout and residuals, is sharded along the sequence:

            (s/t, b, h)         (s, b, h)         (s, b, ffn/t)        (s/t, b, h)
    norm ----------> enter_sequence ----> column ----------> row -> leave_sequence ----> residual

Under context parallelism ranks have the chunks of a sample that `megagrid.grid.zigzag` gives them;
what these regions put together is in the order of the sample:

    to_heads    (s/c, b, heads, d) -> (s, b, heads/c, d): all tokens of some heads; to_tokens: back

Ring attention, whose messages go along with its arithmetic, is in `megagrid.nn.ring`.

`enter` and `leave` reduce in place: `enter` the gradient that a matrix product has just made,
`leave` the product itself. Nothing else may hold those tensors.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from megagrid.comm.collectives import all_gather, all_reduce, all_to_all, reduce_scatter
from megagrid.grid import zigzag
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


class _GatherSample(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: Axis) -> Tensor:
        ctx.axis = axis
        return _in_order(all_gather(x, axis), axis)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return reduce_scatter(_by_rank(grad, ctx.axis), ctx.axis), None


class _ToHeads(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: Axis) -> Tensor:
        ctx.axis = axis
        return _to_heads(x, axis)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return _to_tokens(grad, ctx.axis), None


class _ToTokens(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: Axis) -> Tensor:
        ctx.axis = axis
        return _to_tokens(x, axis)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return _to_heads(grad, ctx.axis), None


def _in_order(x: Tensor, axis: Axis) -> Tensor:
    """Chunks of dim 0 as the ranks have them, one rank after the other -> as in the sample."""
    chunks = x.chunk(2 * axis.size)
    return torch.cat([chunks[place] for place in zigzag.places(axis.size)])


def _by_rank(x: Tensor, axis: Axis) -> Tensor:
    """The way back of `_in_order`."""
    chunks = x.chunk(2 * axis.size)
    places = zigzag.places(axis.size)
    return torch.cat([chunks[places.index(place)] for place in range(2 * axis.size)])


def _to_heads(x: Tensor, axis: Axis) -> Tensor:
    parts = x.unflatten(2, (axis.size, -1)).movedim(2, 0)
    return _in_order(all_to_all(parts, axis).flatten(0, 1), axis)


def _to_tokens(x: Tensor, axis: Axis) -> Tensor:
    parts = _by_rank(x, axis).unflatten(0, (axis.size, -1))
    return all_to_all(parts, axis).movedim(0, 2).flatten(2, 3)


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
    if sequence_parallel:
        return _LeaveSequence.apply(x, axis)
    # torch.compile takes a function that changes its input only where it has a backward.
    return _Leave.apply(x, axis) if torch.is_grad_enabled() else all_reduce(x, axis)


def gather_sample(x: Tensor, axis: Axis) -> Tensor:
    """All tokens of a sample: (s / size, …), the rank's chunks -> (s, …), in order."""
    return x if axis.size == 1 else _GatherSample.apply(x, axis)


def to_heads(x: Tensor, axis: Axis) -> Tensor:
    """Some tokens of all heads for all tokens of some: (s / size, b, heads, d), the rank's chunks
    -> (s, b, heads / size, d), in order; rank i gets the i-th part of the heads."""
    return x if axis.size == 1 else _ToHeads.apply(x, axis)


def to_tokens(x: Tensor, axis: Axis) -> Tensor:
    """And back: (s, b, heads / size, d) -> (s / size, b, heads, d)."""
    return x if axis.size == 1 else _ToTokens.apply(x, axis)
