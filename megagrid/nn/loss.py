"""Cross-entropy over a vocabulary that is split over ranks; the logits are never gathered.

A loss is two numbers, summed over tokens, whose sum is what is trained on: the cross-entropy, and
the z-loss, a coefficient times log²Z, Z being the token's sum of exponentials. It keeps logits from
drifting off (Chowdhery et al. 2022, arXiv 2204.02311, section 5).

    token_losses      logits (n, V / t) -> losses
    chunked_losses    hidden (n, h) -> losses, of some tokens at a time: their logits are made, and
                      the gradients of these, of the hidden states and of the weight, and let go of
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional as F

from megagrid.comm.collectives import all_reduce
from megagrid.grid.grid import Axis

IGNORE = -100
"""The label of a token that isn't trained on."""

LOSSES = 2
"""Cross-entropy and z-loss."""


class _VocabParallelCrossEntropy(torch.autograd.Function):
    """Sums over tokens of log Z - z_label, where Z = sum_v exp z_v, and of log²Z.

    Shifted by the row's maximum over all ranks, a token needs three numbers from the others: that
    maximum, sum_v exp(z_v - max), and z_label - max, which just one rank has. So two all-reduces
    of n and 2n numbers stand for the n V logits.

    The logits' memory is used throughout: for the exponentials, then the probabilities p, which
    backward turns into the gradient in place, p - one-hot for the first loss and 2 log(Z) p for the
    coefficient of the second.
    """

    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, labels: Tensor, vocab_size: int, axis: Axis, z_loss: float
    ) -> Tensor:
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
        log_z = highest + total.log()
        ctx.save_for_backward(logits, column, mine, valid, log_z)
        ctx.z_loss = z_loss
        losses = torch.stack([total.log() - target, z_loss * log_z.square()])
        return losses.masked_fill(~valid, 0.0).sum(dim=1)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None, None]:
        probabilities, column, mine, valid, log_z = ctx.saved_tensors
        of_entropy, of_z = grad.unbind()
        probabilities.mul_((valid * (of_entropy + 2.0 * ctx.z_loss * of_z * log_z)).unsqueeze(1))
        probabilities.scatter_add_(1, column.unsqueeze(1), -(mine * of_entropy).unsqueeze(1))
        return probabilities, None, None, None, None


def vocab_parallel_cross_entropy(
    logits: Tensor, labels: Tensor, vocab_size: int, axis: Axis, z_loss: float = 0.0
) -> Tensor:
    """(2,), in the logits' dtype: cross-entropy and z-loss, each summed over the tokens whose label
    isn't -100.

    Args:
        logits: (n, padded vocabulary / axis.size), this rank's columns; consumed, float32 or wider.
        labels: (n,), int64, whole vocabulary's ids.
        vocab_size: columns at or beyond it, counted over all ranks, are padding.
        z_loss: the coefficient.
    """
    return _VocabParallelCrossEntropy.apply(logits, labels, vocab_size, axis, z_loss)


def token_losses(
    logits: Tensor, labels: Tensor, vocab_size: int, axis: Axis, z_loss: float
) -> Tensor:
    """`vocab_parallel_cross_entropy` of logits (n, …) in the dtype of compute."""
    # In float32 at least: the sum of 100,000 exponentials has no business in bfloat16.
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    return vocab_parallel_cross_entropy(logits, labels, vocab_size, axis, z_loss)


class _ChunkedLosses(torch.autograd.Function):
    """Losses chunk by chunk, and with them the gradients of their sum: backward scales those.

    The weight's is summed up in float32 or wider and rounded once.
    """

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, labels: Tensor, chunk: int, losses_of: LossesOf
    ) -> Tensor:
        wide = torch.promote_types(weight.dtype, torch.float32)
        grad_hidden = torch.empty_like(hidden)
        grad_weight = torch.zeros_like(weight, dtype=wide)
        total = torch.zeros(LOSSES, dtype=wide, device=hidden.device)
        for x, grad_x, of_chunk in zip(
            hidden.split(chunk), grad_hidden.split(chunk), labels.split(chunk), strict=True
        ):
            with torch.enable_grad():
                logits = F.linear(x, weight.detach()).requires_grad_()
                losses = losses_of(logits, of_chunk)
            (grad,) = torch.autograd.grad(losses, logits, torch.ones_like(losses))
            del logits
            torch.mm(grad, weight, out=grad_x)
            if grad.dtype == wide:
                grad_weight.addmm_(grad.t(), x)
            else:
                grad_weight += grad.t() @ x
            del grad  # before the next chunk's logits are made
            total += losses.detach()
        ctx.save_for_backward(grad_hidden, grad_weight)
        ctx.dtype = weight.dtype
        return total

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None, None, None]:
        grad_hidden, grad_weight = ctx.saved_tensors
        scale = grad[0]  # of both: what is trained on is their sum
        return grad_hidden.mul_(scale), grad_weight.mul_(scale).to(ctx.dtype), None, None, None


LossesOf = Callable[[Tensor, Tensor], Tensor]
"""From logits and labels of some tokens to their losses."""


def chunked_losses(
    hidden: Tensor, weight: Tensor, labels: Tensor, chunk: int, losses_of: LossesOf
) -> Tensor:
    """(2,): the losses of hidden W^T, of which never more than a chunk exists.

    The gradients are made along with them: of the hidden states, and of the weight in float32, they
    are what is kept for backward, whose two gradients of the losses must be the same.

    Args:
        hidden: (n, h).
        weight: (padded vocabulary / ranks, h).
        labels: (n,).
        chunk: tokens of a chunk, all but the last one's.
    """
    if torch.is_grad_enabled():
        return _ChunkedLosses.apply(hidden, weight, labels, chunk, losses_of)
    parts = zip(hidden.split(chunk), labels.split(chunk), strict=True)
    return sum(losses_of(F.linear(x, weight), some) for x, some in parts)
