"""Feed-forward layers: column-parallel up, row-parallel down, so that they cost one `enter` and one
`leave` however wide they are."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from megagrid.grid.grid import Axis
from megagrid.nn.init import Init
from megagrid.nn.linear import ColumnParallelLinear, Part, RowParallelLinear
from megagrid.nn.norm import no_norm
from megagrid.nn.recompute import Recomputing


class _SwiGLU(torch.autograd.Function):
    """silu(gate) * up of the two halves of the last dim; keeps its input alone for backward.

    Composed of torch's own operators it would keep gate, up and silu(gate).
    """

    @staticmethod
    def forward(ctx: Any, gate_up: Tensor) -> Tensor:
        ctx.save_for_backward(gate_up)
        gate, up = gate_up.chunk(2, dim=-1)
        return F.silu(gate).mul_(up)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (gate_up,) = ctx.saved_tensors
        gate, up = gate_up.chunk(2, dim=-1)
        grad_gate_up = torch.empty_like(gate_up)
        grad_gate, grad_up = grad_gate_up.chunk(2, dim=-1)
        torch.mul(grad, F.silu(gate), out=grad_up)
        torch.ops.aten.silu_backward.grad_input(grad * up, gate, grad_input=grad_gate)
        return grad_gate_up


def _swiglu(gate_up: Tensor) -> Tensor:
    if torch.compiler.is_compiling():  # fuses it, and chooses what to keep, by itself
        gate, up = gate_up.chunk(2, dim=-1)
        return F.silu(gate) * up
    return _SwiGLU.apply(gate_up)


class SwiGLU(Recomputing):
    """down(silu(gate(x)) * up(x)) (Shazeer 2020), gate and up as one product.

    Shape: (s, b, h) -> same; (s / axis.size, b, h) -> same with `sequence_parallel`.
    """

    def __init__(
        self,
        hidden_size: int,
        ffn_size: int,
        axis: Axis,
        *,
        bias: bool,
        init: Init,
        out_init: Init,
        sequence_parallel: bool,
    ) -> None:
        super().__init__()
        self.gate_up = ColumnParallelLinear(
            hidden_size,
            [Part("gate", ffn_size), Part("up", ffn_size)],
            axis,
            bias=bias,
            init=init,
            sequence_parallel=sequence_parallel,
        )
        self.down = RowParallelLinear(
            "down",
            ffn_size,
            hidden_size,
            axis,
            bias=bias,
            init=out_init,
            sequence_parallel=sequence_parallel,
        )

    def forward(self, x: Tensor, norm: Callable[[Tensor], Tensor] = no_norm) -> Tensor:
        """`norm`: what `x` goes through first; of one region with the layer that takes it."""
        gate_up = self.region(lambda x: self.gate_up(norm(x)), x)
        return self.region(lambda gate_up: self.down(_swiglu(gate_up)), gate_up)


class GeluMLP(Recomputing):
    """down(gelu(up(x))), with GPT-2's tanh form of gelu.

    Shape: (s, b, h) -> same; (s / axis.size, b, h) -> same with `sequence_parallel`.
    """

    def __init__(
        self,
        hidden_size: int,
        ffn_size: int,
        axis: Axis,
        *,
        bias: bool,
        init: Init,
        out_init: Init,
        sequence_parallel: bool,
    ) -> None:
        super().__init__()
        self.up = ColumnParallelLinear(
            hidden_size,
            [Part("up", ffn_size)],
            axis,
            bias=bias,
            init=init,
            sequence_parallel=sequence_parallel,
        )
        self.down = RowParallelLinear(
            "down",
            ffn_size,
            hidden_size,
            axis,
            bias=bias,
            init=out_init,
            sequence_parallel=sequence_parallel,
        )

    def forward(self, x: Tensor, norm: Callable[[Tensor], Tensor] = no_norm) -> Tensor:
        """`norm`: what `x` goes through first; of one region with the layer that takes it."""
        up = self.region(lambda x: self.up(norm(x)), x)
        return self.region(lambda up: self.down(F.gelu(up, approximate="tanh")), up)
