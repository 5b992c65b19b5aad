"""Cross-entropy over a vocabulary that is split over ranks; the logits are never gathered."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megagrid.comm.collectives import all_reduce
from megagrid.grid.grid import Axis

IGNORE = -100
"""The label of a token that isn't trained on."""


class _VocabParallelCrossEntropy(torch.autograd.Function):
    """Sum over tokens of log(sum_v exp z_v) - z_label.

    Shifted by the row's maximum over all ranks, a token needs three numbers from the others: that
    maximum, sum_v exp(z_v - max), and z_label - max, which just one rank has. So two all-reduces
    of n and 2n numbers stand for the n V logits.

    The logits' memory is used throughout: for the exponentials, then the probabilities, which
    backward turns into the gradient (softmax - one-hot) in place.
    """

    @staticmethod
    def forward(ctx: Any, logits: Tensor, labels: Tensor, vocab_size: int, axis: Axis) -> Tensor:
        n, columns = logits.shape
        first = axis.rank * columns
        here = max(0, min(columns, vocab_size - first))
        logits[:, here:] = float("-inf")
        highest = logits.amax(dim=1) if here else logits.new_full((n,), float("-inf"))
        all_reduce(highest, axis, dist.ReduceOp.MAX)
        logits.sub_(highest.unsqueeze(1))

        valid = labels != IGNORE
        column = labels - first
        mine = valid & (column >= 0) & (column < here)
        column = column.masked_fill(~mine, 0)
        target = logits.gather(1, column.unsqueeze(1)).squeeze(1).masked_fill(~mine, 0.0)
        torch.exp(logits, out=logits)
        sums = torch.stack([logits.sum(dim=1), target])
        all_reduce(sums, axis)
        total, target = sums.unbind()
        logits.div_(total.unsqueeze(1))
        ctx.save_for_backward(logits, column, mine, valid)
        return (total.log() - target).masked_fill(~valid, 0.0).sum()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        probabilities, column, mine, valid = ctx.saved_tensors
        probabilities.scatter_add_(
            1, column.unsqueeze(1), -mine.to(probabilities.dtype).unsqueeze(1)
        )
        return probabilities.mul_((grad * valid).unsqueeze(1)), None, None, None


def vocab_parallel_cross_entropy(
    logits: Tensor, labels: Tensor, vocab_size: int, axis: Axis
) -> Tensor:
    """Cross-entropy summed over the tokens whose label isn't -100, a scalar in the logits' dtype.

    Args:
        logits: (n, padded vocabulary / axis.size), this rank's columns; consumed, float32 or wider.
        labels: (n,), int64, whole vocabulary's ids.
        vocab_size: columns at or beyond it, counted over all ranks, are padding.
    """
    return _VocabParallelCrossEntropy.apply(logits, labels, vocab_size, axis)
