"""A linear layer's backward in two halves: the input's gradient now, the weight's later.

    y = x W^T          I:  dx = dy W        the stage before waits for it
                       W:  dW = dy^T x      nobody waits: it fills the pipeline's bubbles

(Qi et al. 2023, arXiv 2401.10241, section 2.) Between the two only x and dy are kept; everything
else of the layer's block is freed by I. Norms, biases and embeddings get their gradients in I: they
cost little.

What a compiler makes of a block has one backward, which puts nothing anywhere; but it returns
gradients of the block's inputs. So the block is given two more for each product, its `Slot`, whose
values it never reads, and whose gradients are x and dy.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from megagrid.nn.float8 import Multiply

Slot = tuple[Tensor, Tensor]
"""Shaped as a product's x and y."""


@dataclass(frozen=True)
class _Late:
    """A product that is still to be made: weight.grad += grad^T x."""

    weight: Tensor
    x: Tensor
    grad: Tensor


class LateWeightGradients:
    """The weight gradients that a stage's backwards have put off, in the order of its layers."""

    def __init__(self) -> None:
        self._late: list[_Late] = []

    def put(self, weight: Tensor, x: Tensor, grad: Tensor) -> None:
        """Put off the gradient of `weight` (out, in), from `x` (…, in) and `grad` (…, out)."""
        self._late.append(_Late(weight, x.flatten(0, -2), grad.flatten(0, -2)))

    def take(self) -> LateWeightGradients:
        """What has been put off since the last call."""
        taken = LateWeightGradients()
        taken._late, self._late = self._late, []
        return taken

    def kept(self) -> Iterator[Tensor]:
        """What the gradients will be made from."""
        for late in self._late:
            yield from (late.x, late.grad)

    def slots(self, weights: Sequence[Tensor], tokens: tuple[int, ...]) -> list[Slot]:
        """For products of tensors (*tokens, in) with `weights`, whose gradients are put off to here
        once backward has found those of the slots."""
        anchor = weights[0].new_zeros(()).requires_grad_()
        shapes = [(*tokens, extent) for weight in weights for extent in weight.shape[::-1]]
        slots = _Slots.apply(anchor, shapes, self, weights)
        return list(zip(slots[::2], slots[1::2], strict=True))

    @torch.no_grad()
    def compute(self) -> None:
        """Add what was put off to the weights' gradients, and let go of it layer by layer."""
        while self._late:
            late = self._late.pop(0)
            if late.weight.grad is None:
                late.weight.grad = late.grad.t() @ late.x
            else:
                late.weight.grad.addmm_(late.grad.t(), late.x)


class _Slots(torch.autograd.Function):
    """Tensors without memory of their own, of which nothing but the gradients matters."""

    @staticmethod
    def forward(
        ctx: Any,
        anchor: Tensor,
        shapes: Sequence[tuple[int, ...]],
        late: LateWeightGradients,
        weights: Sequence[Tensor],
    ) -> tuple[Tensor, ...]:
        ctx.late, ctx.weights = late, weights
        return tuple(anchor.detach().expand(shape) for shape in shapes)

    @staticmethod
    def backward(ctx: Any, *found: Tensor) -> tuple[None, ...]:
        for weight, x, grad in zip(ctx.weights, found[::2], found[1::2], strict=True):
            ctx.late.put(weight, x, grad)
        return None, None, None, None


class _PutOff(torch.autograd.Function):
    """A product whose backward hands over to a slot what the weight's gradient is made from."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, of_x: Tensor, of_y: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return F.linear(x, weight)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, Tensor, Tensor]:
        x, weight = ctx.saved_tensors
        return grad @ weight, None, x, grad


class _Keep(torch.autograd.Function):
    """A product's input on its way in; backward finds the output's gradient in the `product`."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, product: _Product) -> Tensor:
        ctx.save_for_backward(x)
        ctx.weight, ctx.product = weight, product
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        (x,) = ctx.saved_tensors
        ctx.product.late.put(ctx.weight, x, ctx.product.grad)
        ctx.product.grad = None
        return grad, None, None


@dataclass
class _Product:
    """x W^T of one forward, the gradient of whose W is put off.

    Attributes:
        late: where to.
        grad: of the output, once backward has come so far.
    """

    late: LateWeightGradients
    grad: Tensor | None = None

    def take(self, grad: Tensor) -> None:
        self.grad = grad


def linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    late: LateWeightGradients | None,
    multiply: Multiply | None = None,
    slot: Slot | None = None,
) -> Tensor:
    """x W^T + b: (…, in) -> (…, out).

    All that backward needs is kept before the product is computed: where a forward is run again for
    that alone, it needn't be.

    Args:
        late: where the weight's gradient is put off to; None: backward computes it at once.
        multiply: what makes x W^T, and its gradients at once; None: torch.
        slot: what the weight's gradient is put off by, compiled.
    """
    if multiply is not None:
        y = multiply(x, weight)
        return y if bias is None else y + bias
    if late is None or not torch.is_grad_enabled():
        return F.linear(x, weight, bias)
    if torch.compiler.is_compiling():
        y = _PutOff.apply(x, weight.detach(), *slot)
        return y if bias is None else y + bias
    product = _Product(late)
    y = F.linear(_Keep.apply(x, weight, product), weight.detach(), bias)
    y.register_hook(product.take)
    return y
