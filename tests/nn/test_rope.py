"""Rotations: the angles of the paper, hand-written backward, and what makes them relative."""

from __future__ import annotations

import math

import pytest
import torch
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from megagrid.nn.rope import (
    LinearScaling,
    Llama3Scaling,
    YarnScaling,
    frequencies,
    rotate,
    rotation,
)
from tests.nn import dense

S, B, HEADS, D = 6, 2, 3, 8
PLACES = torch.arange(S).unsqueeze(1)


def test_planes_are_rotated_by_position_times_frequency():
    """x_i and x_(i + d/2) are a plane, turned by position * theta^(-2 i / d)."""
    x = dense.random(1, S, B, HEADS, D)
    y = rotate(x, rotation(PLACES, D, 500.0, torch.float64))
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


@pytest.mark.parametrize(
    "scaling",
    [
        None,
        LinearScaling(4.0),
        Llama3Scaling(8.0, 1.0, 4.0, 8192),
        YarnScaling(4.0, 1.0, 32.0, 32768, 500000.0),
        YarnScaling(0.5, 1.0, 4.0, 64, 500000.0),
        YarnScaling(40.0, 1e-3, 2e-3, 8192, 500000.0, attention_factor=1.5),
    ],
    ids=str,
)
def test_frequencies_equal_transformers(scaling):
    """Theirs are float32."""
    rope = {"rope_type": "default", "rope_theta": 500000.0}
    if isinstance(scaling, LinearScaling):
        rope |= {"rope_type": "linear", "factor": 4.0}
    elif isinstance(scaling, YarnScaling):
        rope |= {"rope_type": "yarn", "factor": scaling.factor, "beta_slow": scaling.low}
        rope |= {"beta_fast": scaling.high, "attention_factor": scaling.attention_factor}
        rope |= {"original_max_position_embeddings": scaling.original_length}
    elif scaling is not None:
        rope |= {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0}
        rope |= {"high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
    config = LlamaConfig(hidden_size=128, num_attention_heads=1, rope_parameters=rope)
    built = LlamaRotaryEmbedding(config)
    theirs = built.inv_freq
    assert built.attention_scaling == pytest.approx(1.0 if scaling is None else scaling.amplitude)
    torch.testing.assert_close(
        frequencies(128, 500000.0, scaling), theirs.double(), rtol=2e-6, atol=0.0
    )


def test_llama3_leaves_fast_planes_alone_and_divides_slow_ones():
    """With Llama 3.1's numbers: above 4 turns in 8192 positions, below 1, and between."""
    plain = frequencies(128, 500000.0)
    ratio = frequencies(128, 500000.0, Llama3Scaling(8.0, 1.0, 4.0, 8192)) / plain
    turns = 8192 * plain / (2 * math.pi)
    dense.assert_equal(ratio[turns > 4], torch.ones_like(ratio[turns > 4]))
    dense.assert_equal(ratio[turns < 1], torch.full_like(ratio[turns < 1], 1 / 8))
    between = ratio[(turns > 1) & (turns < 4)]
    assert len(between) > 3 and (between.diff() < 0).all()


def test_samples_may_have_positions_of_their_own():
    x, positions = dense.random(1, S, B, HEADS, D), torch.randint(0, 50, (S, B))
    y = rotate(x, rotation(positions, D, 100.0, torch.float64))
    for sample in range(B):
        of_sample = rotation(positions[:, sample, None], D, 100.0, torch.float64)
        dense.assert_equal(y[:, sample, None], rotate(x[:, sample, None], of_sample))


@pytest.mark.parametrize("scaling", [None, YarnScaling(4.0, 1.0, 32.0, 8, 100.0)], ids=str)
def test_backward_is_the_derivative(scaling):
    cos_sin = rotation(PLACES, D, 100.0, torch.float64, scaling)
    x = dense.random(1, S, B, HEADS, D).requires_grad_()
    assert torch.autograd.gradcheck(lambda x: rotate(x, cos_sin), (x,))


def test_strided_heads_are_rotated_too():
    """As attention hands them over: a view of a wider tensor."""
    cos_sin = rotation(PLACES, D, 100.0, torch.float64)
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

    dense.assert_equal(scores(PLACES), scores(PLACES + shift))


def test_far_positions_keep_their_angle_in_float32():
    """Angles are computed in float64: position * frequency has no 24 bits to spare."""
    position = 131_071
    cos_sin = rotation(torch.tensor([[position]]), 128, 500_000.0, torch.float32)
    angle = position * 500_000.0 ** (-2 / 128)
    assert cos_sin[0, 0, 0, 0, 1].item() == pytest.approx(math.cos(angle), abs=1e-7)
