"""Rotary position embedding (Su et al. 2021), in the layout that Llama checkpoints use.

A head of width d is rotated in the planes (i, i + d/2) by the angle position * f_i, with the
frequencies f_i = theta^(-2i/d), or what a scaling makes of them:

    scaling   f_i becomes                                   for inputs longer than in training
    linear    f_i / factor                                  (Chen et al. 2023, arXiv 2306.15595)
    llama3    blended, by the turns that plane i makes      (Llama 3.1's released code)
              in the length it was first trained for:

              turns   0 ........ low ............ high ........
              f_i     / factor   | between the two |  as it was

    yarn      the same, but blended evenly over the planes  (Peng et al. 2023, arXiv 2309.00071)
              between the two; and what is rotated grows
              by an amplitude, scores by its square
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor


class Scaling(Protocol):
    """From frequencies to frequencies, in radians a position.

    Attributes:
        amplitude: what rotated queries and keys are multiplied by.
    """

    amplitude: float

    def __call__(self, frequencies: Tensor) -> Tensor: ...


@dataclass(frozen=True)
class LinearScaling:
    """Positions squeezed by `factor`."""

    factor: float
    amplitude: ClassVar[float] = 1.0

    def __call__(self, frequencies: Tensor) -> Tensor:
        return frequencies / self.factor


@dataclass(frozen=True)
class Llama3Scaling:
    """Slow planes squeezed by `factor`, fast ones left alone.

    Attributes:
        low, high: turns within `original_length` positions, between which the two are blended.
    """

    factor: float
    low: float
    high: float
    original_length: int
    amplitude: ClassVar[float] = 1.0

    def __call__(self, frequencies: Tensor) -> Tensor:
        turns = self.original_length * frequencies / (2 * math.pi)
        kept = ((turns - self.low) / (self.high - self.low)).clamp(0.0, 1.0)
        return torch.lerp(frequencies / self.factor, frequencies, kept)


@dataclass(frozen=True)
class YarnScaling:
    """Slow planes squeezed by `factor`, fast ones left alone (section 3.4).

    Attributes:
        low, high: turns within `original_length` positions; between the planes that make so many,
            the first rounded down and the last up, the two are blended.
        theta: of the frequencies.
        attention_factor: the amplitude; None: 0.1 ln(factor) + 1.
    """

    factor: float
    low: float
    high: float
    original_length: int
    theta: float
    attention_factor: float | None = None

    @property
    def amplitude(self) -> float:
        if self.attention_factor is not None:
            return self.attention_factor
        return 0.1 * math.log(max(self.factor, 1.0)) + 1.0

    def __call__(self, frequencies: Tensor) -> Tensor:
        planes = len(frequencies)

        def plane(turns: float) -> float:
            return planes * math.log(self.original_length / (2 * math.pi * turns), self.theta)

        first = max(math.floor(plane(self.high)), 0)
        last = min(math.ceil(plane(self.low)), 2 * planes - 1)
        numbers = torch.arange(planes, dtype=frequencies.dtype, device=frequencies.device)
        divided = ((numbers - first) / (last - first or 0.001)).clamp(0.0, 1.0)
        return torch.lerp(frequencies, frequencies / self.factor, divided)


def frequencies(
    head_dim: int, theta: float, scaling: Scaling | None = None, device: torch.device | None = None
) -> Tensor:
    """Radians a position of each plane, float64 (head_dim / 2,)."""
    planes = torch.arange(0, head_dim, 2, dtype=torch.float64, device=device)
    plain = theta ** (-planes / head_dim)
    return plain if scaling is None else scaling(plain)


def rotation(
    positions: Tensor,
    head_dim: int,
    theta: float,
    dtype: torch.dtype,
    scaling: Scaling | None = None,
) -> Tensor:
    """cos and sin of every position's angles, times the scaling's amplitude.

    Args:
        positions: (s, b) int64, or (s, 1) if all samples have the same.

    Returns:
        (2, s, b or 1, 1, head_dim / 2) in `dtype`, to broadcast against
        (s, b, heads, head_dim / 2).
    """
    of_planes = frequencies(head_dim, theta, scaling, positions.device)
    angles = positions.double().unsqueeze(-1) * of_planes
    amplitude = 1.0 if scaling is None else scaling.amplitude
    return (torch.stack([angles.cos(), angles.sin()]) * amplitude).to(dtype).unsqueeze(3)


class _Rotate(torch.autograd.Function):
    """A rotation's gradient is the rotation back, of the same amplitude: nothing but the angles is
    kept for it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, cos_sin: Tensor) -> Tensor:
        ctx.save_for_backward(cos_sin)
        return _rotated(x, cos_sin[0], cos_sin[1])

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        (cos_sin,) = ctx.saved_tensors
        return _rotated(grad, cos_sin[0], -cos_sin[1]), None


def _rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    halves = x.unflatten(-1, (2, -1))
    first, second = halves.unbind(-2)
    out = halves * cos.unsqueeze(-2)
    out_first, out_second = out.unbind(-2)
    out_first.addcmul_(second, sin, value=-1)
    out_second.addcmul_(first, sin)
    return out.flatten(-2)


def rotate(x: Tensor, cos_sin: Tensor) -> Tensor:
    """Rotate each head of `x` (s, b, heads, head_dim) by its position's angles."""
    return _Rotate.apply(x, cos_sin)
