"""The global gradient norm, each element of the model counted once, and clipping by it."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from megagrid.nn.layout import ParameterShard


def local_squared_norm(shards: Sequence[ParameterShard], device: torch.device) -> Tensor:
    """The sum of squares of the gradient elements that this rank speaks for, float64 scalar on
    `device`, wherever they are.

    Over all ranks these add up to the squared norm of the model's gradient: an element that several
    ranks hold (a norm's weight along tp, a tied embedding) is some one rank's.
    """
    counted = [
        shard.grad[rows]
        for shard in shards
        if shard.grad is not None
        for piece, rows in shard.boxes
        if piece.is_counted_here
    ]
    if not counted:
        return torch.zeros((), dtype=torch.float64, device=device)
    norms = [norm.to(device) for norm in torch._foreach_norm(counted)]
    return torch.stack(norms).double().square().sum()


def clip_factor(norm: float, largest: float) -> float:
    """What gradients of the global norm `norm` are multiplied by, so that it is at most `largest`
    (0: any)."""
    return 1.0 if largest == 0.0 or norm <= largest else largest / (norm + 1e-6)


def clip_gradients(
    shards: Sequence[ParameterShard], norm: float, largest: float, loss_scale: float = 1.0
) -> None:
    """Divide `loss_scale` out of all gradients, in place, and scale them so that their global norm
    is at most `largest` (0: any): by one factor, in one pass, or in none if it is 1.

    Args:
        norm: of the whole model, the same on every rank, without `loss_scale`.
    """
    factor = clip_factor(norm, largest) / loss_scale
    grads = [shard.grad for shard in shards if shard.grad is not None]
    if factor != 1.0 and grads:  # none in a stage without layers
        torch._foreach_mul_(grads, factor)
