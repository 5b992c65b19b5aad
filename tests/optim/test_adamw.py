"""AdamW on shards: the published update, decay where it belongs, states that can be loaded."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import pytest
import torch
from torch import Tensor, nn

from megagrid.config.rules.precision import LARGEST_ROUNDED_BETA
from megagrid.config.schema import OptimizerConfig
from megagrid.nn.init import ZEROS
from megagrid.nn.layout import Box, Layout, ParameterShard, Piece
from megagrid.optim.adamw import AdamW

CONFIG = OptimizerConfig(lr=1e-2, beta1=0.8, beta2=0.9, eps=1e-6, weight_decay=0.5)


def shard(seed: int, *shape: int, decay: bool = True) -> ParameterShard:
    values = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
    parameter = nn.Parameter(values)
    piece = Piece(f"w{seed}", shape, Box((0,) * len(shape), shape), shape[0], ZEROS)
    layout = Layout((piece,), decay)
    boxes = tuple(layout.rows(0, shape[0]))
    return ParameterShard(f"w{seed}", parameter, parameter.detach(), boxes, layout)


def give_gradients(shards: list[ParameterShard], step: int) -> None:
    for index, one in enumerate(shards):
        generator = torch.Generator().manual_seed(100 * step + index)
        one.parameter.grad = torch.randn(one.tensor.shape, generator=generator)


def updated(w: Tensor, gradients: list[Tensor], lrs: list[float], decay: float) -> Tensor:
    """Loshchilov & Hutter 2019, algorithm 2, in float64."""
    w, m, v = w.double(), torch.zeros_like(w).double(), torch.zeros_like(w).double()
    for step, (g, lr) in enumerate(zip(gradients, lrs, strict=True), start=1):
        m = CONFIG.beta1 * m + (1 - CONFIG.beta1) * g.double()
        v = CONFIG.beta2 * v + (1 - CONFIG.beta2) * g.double() ** 2
        m_hat, v_hat = m / (1 - CONFIG.beta1**step), v / (1 - CONFIG.beta2**step)
        w = w - lr * (m_hat / (v_hat.sqrt() + CONFIG.eps) + decay * w)
    return w


def test_update_is_the_published_one_at_every_learning_rate():
    shards = [shard(1, 4, 3), shard(2, 5, decay=False)]
    before = [one.tensor.clone() for one in shards]
    optimizer = AdamW(shards, CONFIG)
    gradients: list[list[Tensor]] = [[], []]
    lrs = [1e-2, 5e-3, 2e-2]
    for step, lr in enumerate(lrs):
        give_gradients(shards, step)
        for kept, one in zip(gradients, shards, strict=True):
            kept.append(one.grad.clone())
        optimizer.step(lr)
    for one, w, kept in zip(shards, before, gradients, strict=True):
        expected = updated(w, kept, lrs, CONFIG.weight_decay if one.decay else 0.0)
        # A few roundings of float32 a step.
        assert (one.tensor - expected).abs().max() < 1e-6
        assert torch.equal(one.parameter.detach(), one.tensor)


def test_decay_moves_decayed_weights_by_lr_times_decay_times_weight():
    """And leaves the others: epfLLM/Megatron-LLM #33 decayed norms and biases too."""
    results = []
    for weight_decay in (0.0, 0.5):
        shards = [shard(1, 4, 3), shard(2, 5, decay=False)]
        before = shards[0].tensor.clone()
        give_gradients(shards, 1)
        config = CONFIG.model_copy(update={"weight_decay": weight_decay})
        AdamW(shards, config).step(1e-2)
        results.append([one.tensor for one in shards])
    (matrix, norm), (decayed, undecayed) = results
    assert torch.equal(norm, undecayed)
    torch.testing.assert_close(matrix - decayed, 1e-2 * 0.5 * before, rtol=0, atol=1e-7)


def test_hidden_matrices_have_a_rate_of_their_own_and_no_decay_of_their_own():
    results = []
    for is_hidden, hidden_lr, decay in product((False, True), (1.0, 0.25), (0.0, 0.5)):
        one = shard(1, 4, 3)
        one = replace(one, layout=replace(one.layout, hidden=is_hidden))
        before = one.tensor.clone()
        give_gradients([one], 1)
        config = CONFIG.model_copy(update={"weight_decay": decay})
        AdamW([one], config, hidden_lr).step(1e-2)
        results.append(before - one.tensor)
    plain, decayed, *others = results
    hidden, hidden_decayed = others[-2:]
    assert torch.equal(others[0], plain) and torch.equal(others[2], plain)
    torch.testing.assert_close(hidden, 0.25 * plain, rtol=1e-4, atol=1e-7)
    torch.testing.assert_close(hidden_decayed - hidden, decayed - plain, rtol=1e-4, atol=1e-7)


def test_gradients_are_dropped_after_a_step():
    shards = [shard(1, 4, 3), shard(2, 5, decay=False)]
    give_gradients(shards, 1)
    AdamW(shards, CONFIG).step(1e-2)
    assert [one.grad for one in shards] == [None, None]


def test_states_exist_before_the_first_step():
    """So that memory is known from the start, and a checkpoint has something to load into."""
    shards = [shard(1, 4, 3), shard(2, 5, decay=False)]
    optimizer = AdamW(shards, CONFIG)
    for name in AdamW.state_names:
        assert [m.shape for m in optimizer.states(name)] == [(4, 3), (5,)]
        assert not any(m.any() for m in optimizer.states(name))


def test_loaded_states_continue_as_if_uninterrupted():
    """Moments and the step count, which the bias correction depends on."""
    shards, resumed = ([shard(1, 4, 3), shard(2, 5, decay=False)] for _ in range(2))
    optimizer = AdamW(shards, CONFIG)
    for step in (1, 2, 3):
        if step == 3:
            other = AdamW(resumed, CONFIG)
            other.set_step(2)
            for name in AdamW.state_names:
                for to, of in zip(other.states(name), optimizer.states(name), strict=True):
                    to.copy_(of)
            for to, of in zip(resumed, shards, strict=True):
                to.tensor.copy_(of.tensor)
            give_gradients(resumed, step)
            other.step(1e-2)
        give_gradients(shards, step)
        optimizer.step(1e-2)
    for one, two in zip(shards, resumed, strict=True):
        assert torch.equal(one.tensor, two.tensor)


@pytest.mark.parametrize("decay", [True, False])
def test_a_rank_may_own_parameters_of_one_kind_only(decay):
    shards = [shard(1, 4, 3, decay=decay)]
    give_gradients(shards, 1)
    before = shards[0].tensor.clone()
    AdamW(shards, CONFIG).step(1e-2)
    assert not torch.equal(shards[0].tensor, before)


def test_a_shard_without_rows_is_no_obstacle():
    """With more dp ranks than rows some own nothing of a parameter."""
    shards = [shard(1, 0, 3), shard(2, 5)]
    give_gradients(shards, 1)
    AdamW(shards, CONFIG).step(1e-2)


def test_a_rank_may_own_nothing():
    """A stage between the ends of the pipeline may have no layer."""
    optimizer = AdamW([], CONFIG)
    optimizer.set_step(3)
    optimizer.step(1e-2)
    assert [optimizer.states(name) for name in AdamW.state_names] == [[], []]


def test_rounded_moments_are_those_of_the_published_update_rounded_after_each():
    """What a step makes of them isn't rounded before the weights have had it."""
    shards = [shard(1, 4, 3), shard(2, 5, decay=False)]
    optimizer = AdamW(shards, CONFIG.model_copy(update={"state_dtype": "bf16"}))
    expected = [one.tensor.double() for one in shards]
    moments = [(torch.zeros_like(w), torch.zeros_like(w)) for w in expected]
    for step in range(1, 6):
        give_gradients(shards, step)
        for index, one in enumerate(shards):
            g, (m, v) = one.grad.double(), moments[index]
            m = CONFIG.beta1 * m + (1 - CONFIG.beta1) * g
            v = CONFIG.beta2 * v + (1 - CONFIG.beta2) * g**2
            m_hat, v_hat = m / (1 - CONFIG.beta1**step), v / (1 - CONFIG.beta2**step)
            decay = CONFIG.weight_decay if one.decay else 0.0
            w = expected[index]
            expected[index] = w - 1e-2 * (m_hat / (v_hat.sqrt() + CONFIG.eps) + decay * w)
            moments[index] = tuple(x.float().bfloat16().double() for x in (m, v))
        optimizer.step(1e-2)
        for name, place in (("exp_avg", 0), ("exp_avg_sq", 1)):
            for state, of_shard in zip(optimizer.states(name), moments, strict=True):
                assert state.dtype == torch.bfloat16
                assert torch.equal(state.double(), of_shard[place])
    for one, w in zip(shards, expected, strict=True):
        assert (one.tensor - w).abs().max() < 1e-6


def test_a_rounded_moment_moves_with_every_beta_that_is_allowed_and_with_no_larger_one():
    """Gradients of 0 from some step on: the moment shrinks by 1 - beta of itself, or never."""
    for beta, moves in ((LARGEST_ROUNDED_BETA, True), (0.999, False)):
        shards = [shard(1, 64, 16)]
        optimizer = AdamW(shards, CONFIG.model_copy(update={"state_dtype": "bf16", "beta2": beta}))
        (squares,) = optimizer.states("exp_avg_sq")
        squares.copy_(torch.rand(64, 16) + 0.5)
        before = squares.clone()
        shards[0].parameter.grad = torch.zeros(64, 16)
        optimizer.step(0.0)
        assert (squares < before).all() if moves else torch.equal(squares, before)
