"""Collectives along an axis, on dim 0. Along an axis of size 1 they do nothing.

They are synchronous and, where the result has the input's shape, in place.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from megagrid.grid.grid import Axis


def all_reduce(x: Tensor, axis: Axis, op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM) -> Tensor:
    """Combine `x` of all ranks into each rank's `x`, in place; returns `x`."""
    if axis.size > 1:
        dist.all_reduce(x, op=op, group=axis.group)
    return x


def all_gather(x: Tensor, axis: Axis) -> Tensor:
    """Stack `x` of all ranks along dim 0: (n, …) -> (size * n, …)."""
    if axis.size == 1:
        return x
    gathered = x.new_empty((axis.size * x.shape[0], *x.shape[1:]))
    dist.all_gather_single(gathered, x.contiguous(), group=axis.group)
    return gathered


def reduce_scatter(x: Tensor, axis: Axis) -> Tensor:
    """Sum `x` of all ranks and keep this rank's share of dim 0: (size * n, …) -> (n, …)."""
    if axis.size == 1:
        return x
    share = x.new_empty((x.shape[0] // axis.size, *x.shape[1:]))
    dist.reduce_scatter_single(share, x.contiguous(), group=axis.group)
    return share


def all_to_all(x: Tensor, axis: Axis) -> Tensor:
    """Give rank i the i-th of `size` equal parts of dim 0, and stack what the ranks give: a
    transposition, and its own inverse."""
    if axis.size == 1:
        return x
    received = torch.empty_like(x, memory_format=torch.contiguous_format)
    dist.all_to_all_single(received, x.contiguous(), group=axis.group)
    return received


def all_reduce_coalesced(
    tensors: Sequence[Tensor], axis: Axis, device: torch.device | None = None
) -> None:
    """Sum each tensor over the axis, in place, as one message per dtype.

    Args:
        device: where the message is, if not with the tensors, which may be in the host's memory.
    """
    if axis.size == 1 or not tensors:
        return
    for dtype in sorted({tensor.dtype for tensor in tensors}, key=str):
        same = [tensor for tensor in tensors if tensor.dtype == dtype]
        message = torch.cat([tensor.reshape(-1) for tensor in same]).to(device)
        all_reduce(message, axis)
        parts = message.split([tensor.numel() for tensor in same])
        for tensor, part in zip(same, parts, strict=True):
            tensor.copy_(part.view_as(tensor))


def exchange(x: Tensor, sent: Sequence[int], received: Sequence[int], axis: Axis) -> Tensor:
    """Send each rank its part of `x` (n,), one after the other; returns what they send, likewise.

    Args:
        sent, received: elements of each part.
    """
    if axis.size == 1:
        return x
    result = x.new_empty(sum(received))
    dist.all_to_all_single(result, x, list(received), list(sent), group=axis.group)
    return result
