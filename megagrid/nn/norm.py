"""Normalisation over the hidden dim; whole on every rank of the tp axis."""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn import functional as F

from megagrid.grid.grid import Axis
from megagrid.nn.init import ONES, ZEROS
from megagrid.nn.layout import Layout
from megagrid.nn.linear import empty_parameter, replicated_piece


class RMSNorm(nn.Module):
    """x / sqrt(mean(x^2) + eps) * weight (Zhang & Sennrich 2019). Shape: (s, b, h) -> same.

    With `sequence_parallel` each rank sees a share of the tokens: its gradients are summands.
    """

    def __init__(
        self, name: str, size: int, axis: Axis, *, eps: float, sequence_parallel: bool
    ) -> None:
        super().__init__()
        self.eps = eps
        piece = replicated_piece(f"{name}.weight", (size,), axis, ONES, partial=sequence_parallel)
        self.layouts = {"weight": Layout((piece,), decay=False)}
        self.weight = empty_parameter(self.layouts["weight"])

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, self.weight.shape, self.weight, self.eps)


class HeadNorm(RMSNorm):
    """RMSNorm over the channels of each head, with one weight for all heads (Qwen3).

    Each rank of `axis` has other heads, or another summand of the gradient of a head that it
    shares: either way its weight's gradients are summands, with sequence parallelism or without.

    Shape: (s, b, heads, head_dim) -> same.
    """

    def __init__(self, name: str, head_dim: int, axis: Axis, *, eps: float) -> None:
        super().__init__(name, head_dim, axis, eps=eps, sequence_parallel=True)


class LayerNorm(nn.Module):
    """(x - mean) / sqrt(var + eps) * weight + bias (Ba et al. 2016). Shape: (s, b, h) -> same.

    With `sequence_parallel` each rank sees a share of the tokens: its gradients are summands.
    """

    def __init__(
        self, name: str, size: int, axis: Axis, *, eps: float, sequence_parallel: bool
    ) -> None:
        super().__init__()
        self.eps = eps
        self.layouts = {
            kind: Layout(
                (
                    replicated_piece(
                        f"{name}.{kind}", (size,), axis, init, partial=sequence_parallel
                    ),
                ),
                decay=False,
            )
            for kind, init in (("weight", ONES), ("bias", ZEROS))
        }
        self.weight = empty_parameter(self.layouts["weight"])
        self.bias = empty_parameter(self.layouts["bias"])

    def forward(self, x: Tensor) -> Tensor:
        return F.layer_norm(x, self.weight.shape, self.weight, self.bias, self.eps)


def no_norm(x: Tensor) -> Tensor:
    """`x`, where nothing is to be normalised."""
    return x
