"""The global norm counts every element once; clipping scales to it."""

from __future__ import annotations

from math import sqrt

import pytest
import torch
from torch import nn

from megagrid.grid.grid import Axis
from megagrid.nn.init import ZEROS
from megagrid.nn.layout import Box, Layout, ParameterShard, Piece
from megagrid.optim.clip import clip_gradients, local_squared_norm

CPU = torch.device("cpu")


def shard(
    gradient: torch.Tensor | None, *, replicas: tuple[Axis, ...] = (), padding: int = 0
) -> ParameterShard:
    rows, columns = gradient.shape if gradient is not None else (2, 3)
    real = (rows - padding, columns)
    piece = Piece("w", real, Box((0, 0), real), rows, ZEROS, replicas=replicas)
    parameter = nn.Parameter(torch.zeros(rows, columns))
    parameter.grad = gradient
    layout = Layout((piece,), decay=True)
    boxes = tuple(layout.rows(0, rows))
    return ParameterShard("w", parameter, parameter.detach(), boxes, layout)


def tp(rank: int) -> Axis:
    return Axis("tp", (0, 1), rank)


def test_squared_norm_is_the_sum_over_all_shards():
    gradients = [torch.randn(4, 3), torch.randn(2, 5)]
    norm = local_squared_norm([shard(g) for g in gradients], CPU)
    assert norm.dtype == torch.float64
    assert norm.item() == pytest.approx(sum(g.double().square().sum().item() for g in gradients))


def test_replicas_count_on_their_first_rank_alone():
    ones = torch.ones(2, 3)
    assert local_squared_norm([shard(ones, replicas=(tp(0),))], CPU).item() == pytest.approx(6.0)
    assert local_squared_norm([shard(ones, replicas=(tp(1),))], CPU).item() == 0.0
    both = (tp(0), Axis("dp", (0, 2), 1))
    assert local_squared_norm([shard(ones, replicas=both)], CPU).item() == 0.0


def test_padding_counts_nowhere():
    gradient = torch.ones(4, 3)
    assert local_squared_norm([shard(gradient, padding=1)], CPU).item() == pytest.approx(9.0)


def test_a_parameter_without_gradient_counts_nothing():
    assert local_squared_norm([shard(None), shard(torch.ones(2, 3))], CPU).item() == pytest.approx(
        6.0
    )
    assert local_squared_norm([shard(None)], CPU).item() == 0.0


def test_the_sum_over_tensors_has_more_digits_than_float32():
    """A tensor's own norm is float32's; 10^4 small tensors beside a large one aren't lost."""
    shards = [shard(torch.full((1, 1), 1e4)), *(shard(torch.ones(1, 1)) for _ in range(10_000))]
    assert local_squared_norm(shards, CPU).item() == pytest.approx(1e8 + 1e4, rel=1e-9)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_what_isnt_finite_stays_visible(value):
    gradient = torch.ones(2, 3)
    gradient[1, 1] = value
    assert not torch.isfinite(local_squared_norm([shard(gradient)], CPU))


def test_gradients_are_scaled_to_the_largest_norm():
    shards = [shard(torch.full((2, 2), 3.0)), shard(torch.full((1, 4), 4.0))]
    norm = sqrt(4 * 9 + 4 * 16)
    clip_gradients(shards, norm, 1.0)
    assert local_squared_norm(shards, CPU).item() == pytest.approx(1.0, rel=1e-5)
    assert shards[0].grad[0, 0].item() == pytest.approx(0.3, rel=1e-5)


@pytest.mark.parametrize(("norm", "largest"), [(2.0, 2.0), (2.0, 3.0), (100.0, 0.0)])
def test_small_norms_and_switched_off_clipping_leave_gradients_alone(norm, largest):
    gradient = torch.full((2, 2), 1.0)
    clip_gradients([shard(gradient), shard(None)], norm, largest)
    assert (gradient == 1.0).all()


@pytest.mark.parametrize(
    ("largest", "expected"), [(0.0, 2.0), (100.0, 2.0), (1.0, 0.5)], ids=["off", "below", "above"]
)
def test_the_loss_scale_is_divided_out_whether_or_not_something_is_clipped(largest, expected):
    """Four times 2: a norm of 4, computed with a loss scale of 8."""
    gradient = torch.full((2, 2), 16.0)
    clip_gradients([shard(gradient)], 4.0, largest, loss_scale=8.0)
    assert gradient[0, 0].item() == pytest.approx(expected, rel=1e-5)


def test_a_rank_without_gradients_clips_along():
    clip_gradients([shard(None)], 10.0, 1.0)
    clip_gradients([], 10.0, 1.0)


def test_all_that_a_rank_holds_is_clipped_counted_or_not():
    copy = shard(torch.full((2, 2), 1.0), replicas=(tp(1),))
    clip_gradients([copy], 10.0, 1.0)
    assert copy.grad[0, 0].item() == pytest.approx(0.1, rel=1e-5)
