"""Muon on one rank: what the iteration does, what it is applied to, and how it is scaled."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from megagrid.config.schema import OptimizerConfig
from megagrid.nn.layout import ParameterShard
from megagrid.optim.muon import COEFFICIENTS, orthogonal
from megagrid.optim.optimizer import make_optimizer
from tests.optim.test_adamw import give_gradients, shard

CONFIG = OptimizerConfig(name="muon", lr=1e-2, momentum=0.8, weight_decay=0.0)


def hidden(seed: int, *shape: int) -> ParameterShard:
    one = shard(seed, *shape)
    return replace(one, layout=replace(one.layout, hidden=True))


def matrix(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


@pytest.mark.parametrize("shape", [(8, 8), (4, 12), (12, 4), (1, 7)])
def test_iteration_keeps_singular_vectors_and_applies_the_quintic_to_singular_values(shape):
    x = matrix(*shape)
    u, s, vt = torch.linalg.svd(x, full_matrices=False)
    a, b, c = COEFFICIENTS
    s = s / s.norm()
    for _ in range(5):
        s = a * s + b * s**3 + c * s**5
    assert ((s > 0.3) & (s < 1.3)).all()
    torch.testing.assert_close(orthogonal(x, 5), u @ s.diag() @ vt, rtol=0, atol=1e-9)


def test_a_factor_changes_nothing_and_zero_stays_zero():
    x = matrix(6, 9).float()
    torch.testing.assert_close(orthogonal(1e-12 * x, 5), orthogonal(x, 5), rtol=0, atol=1e-5)
    assert not orthogonal(torch.zeros(3, 4), 5).any()


def test_updates_are_about_those_of_torch_which_iterates_in_bfloat16():
    ours, theirs = ([hidden(1, 24, 8), hidden(2, 6, 6)] for _ in range(2))
    config = CONFIG.model_copy(update={"weight_decay": 0.1, "muon_scale": "match_rms_adamw"})
    optimizer = make_optimizer(ours, config)
    reference = torch.optim.Muon(
        [one.parameter for one in theirs],
        lr=1e-2,
        momentum=0.8,
        weight_decay=0.1,
        adjust_lr_fn="match_rms_adamw",
    )
    for step in range(3):
        for shards in (ours, theirs):
            give_gradients(shards, step)
        optimizer.step(1e-2)
        reference.step()
    for one, other in zip(ours, theirs, strict=True):
        moved = (other.tensor - shard(int(other.name[1:]), *other.tensor.shape).tensor).norm()
        assert (one.tensor - other.tensor).norm() < 0.02 * moved


@pytest.mark.parametrize(("scale", "factor"), [("original", 2.0), ("match_rms_adamw", 0.8)])
def test_updates_are_scaled_as_stated(scale, factor):
    """sqrt(16 / 4), and 0.2 sqrt(16)."""
    one = hidden(1, 16, 4)
    before = one.tensor.clone()
    give_gradients([one], 1)
    expected = before - 1e-2 * factor * orthogonal(one.grad, 5)
    make_optimizer([one], CONFIG.model_copy(update={"muon_scale": scale})).step(1e-2)
    torch.testing.assert_close(one.tensor, expected, rtol=0, atol=1e-6)


def test_what_is_no_hidden_matrix_is_updated_by_adamw_at_its_own_rate():
    ours, theirs = ([shard(1, 4, 3), shard(2, 5, decay=False)] for _ in range(2))
    config = CONFIG.model_copy(update={"adamw_lr": 5e-3})
    for shards, name, lr in ((ours, "muon", 1e-2), (theirs, "adamw", 5e-3)):
        give_gradients(shards, 1)
        make_optimizer(shards, config.model_copy(update={"name": name})).step(lr)
    for one, other in zip(ours, theirs, strict=True):
        assert torch.equal(one.tensor, other.tensor)


def test_each_parameter_has_the_states_of_what_updates_it():
    shards = [shard(1, 4, 3), hidden(2, 6, 5), shard(3, 5)]
    optimizer = make_optimizer(shards, CONFIG)
    shapes = {
        name: [None if state is None else tuple(state.shape) for state in optimizer.states(name)]
        for name in optimizer.state_names
    }
    moments = [(4, 3), None, (5,)]
    assert shapes == {"momentum": [None, (6, 5), None], "exp_avg": moments, "exp_avg_sq": moments}
