"""Rotations: the angles of the paper, hand-written backward, and what makes them relative."""

from __future__ import annotations

import math

import pytest
import torch

from megagrid.nn.rope import rotate, rotation
from tests.nn import dense

S, B, HEADS, D = 6, 2, 3, 8


def test_planes_are_rotated_by_position_times_frequency():
    """x_i and x_(i + d/2) are a plane, turned by position * theta^(-2 i / d)."""
    x = dense.random(1, S, B, HEADS, D)
    y = rotate(x, rotation(torch.arange(S), D, 500.0, torch.float64))
    for position in range(S):
        for plane in range(D // 2):
            angle = position * 500.0 ** (-2 * plane / D)
            a, b = x[position, ..., plane], x[position, ..., plane + D // 2]
            turned = (
                a * math.cos(angle) - b * math.sin(angle),
                a * math.sin(angle) + b * math.cos(angle),
            )
            dense.assert_equal(y[position, ..., plane], turned[0])
            dense.assert_equal(y[position, ..., plane + D // 2], turned[1])


def test_backward_is_the_derivative():
    cos_sin = rotation(torch.arange(S), D, 100.0, torch.float64)
    x = dense.random(1, S, B, HEADS, D).requires_grad_()
    assert torch.autograd.gradcheck(lambda x: rotate(x, cos_sin), (x,))


def test_strided_heads_are_rotated_too():
    """As attention hands them over: a view of a wider tensor."""
    cos_sin = rotation(torch.arange(S), D, 100.0, torch.float64)
    wide = dense.random(1, S, B, HEADS + 2, D).requires_grad_()
    y = rotate(wide[:, :, 1:-1], cos_sin)
    dense.assert_equal(y, rotate(wide.detach()[:, :, 1:-1].contiguous(), cos_sin))
    y.sum().backward()
    assert not wide.grad[:, :, [0, -1]].any()


@pytest.mark.parametrize("shift", [1, 7])
def test_scores_depend_on_distance_alone(shift):
    q, k = dense.random(1, S, B, HEADS, D), dense.random(2, S, B, HEADS, D)

    def scores(positions: torch.Tensor) -> torch.Tensor:
        cos_sin = rotation(positions, D, 100.0, torch.float64)
        return torch.einsum("qbhd,kbhd->bhqk", rotate(q, cos_sin), rotate(k, cos_sin))

    dense.assert_equal(scores(torch.arange(S)), scores(torch.arange(S) + shift))


def test_far_positions_keep_their_angle_in_float32():
    """Angles are computed in float64: position * frequency has no 24 bits to spare."""
    position = 131_071
    cos_sin = rotation(torch.tensor([position]), 128, 500_000.0, torch.float32)
    angle = position * 500_000.0 ** (-2 / 128)
    assert cos_sin[0, 0, 0, 0, 1].item() == pytest.approx(math.cos(angle), abs=1e-7)
