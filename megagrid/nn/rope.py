"""Rotary position embedding (Su et al. 2021), in the layout that Llama checkpoints use.

A head of width d is rotated in the planes (i, i + d/2) by the angle position * theta^(-2i/d).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def rotation(positions: Tensor, head_dim: int, theta: float, dtype: torch.dtype) -> Tensor:
    """cos and sin of every position's angles.

    Args:
        positions: (s,) int64.

    Returns:
        (2, s, 1, 1, head_dim / 2) in `dtype`, to broadcast against (s, b, heads, head_dim / 2).
    """
    planes = torch.arange(0, head_dim, 2, dtype=torch.float64, device=positions.device)
    angles = positions.double().unsqueeze(1) * theta ** (-planes / head_dim)
    return torch.stack([angles.cos(), angles.sin()]).to(dtype).unsqueeze(2).unsqueeze(2)


class _Rotate(torch.autograd.Function):
    """A rotation's gradient is the rotation back: nothing but the angles is kept for it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, cos_sin: Tensor) -> Tensor:
        ctx.save_for_backward(cos_sin)
        return _rotated(x, cos_sin[0], cos_sin[1])

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        (cos_sin,) = ctx.saved_tensors
        return _rotated(grad, cos_sin[0], -cos_sin[1]), None


def _rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.chunk(2, dim=-1)
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    out_first, out_second = out.chunk(2, dim=-1)
    torch.mul(first, cos, out=out_first).addcmul_(second, sin, value=-1)
    torch.mul(second, cos, out=out_second).addcmul_(first, sin)
    return out


def rotate(x: Tensor, cos_sin: Tensor) -> Tensor:
    """Rotate each head of `x` (s, b, heads, head_dim) by its position's angles."""
    return _Rotate.apply(x, cos_sin)
