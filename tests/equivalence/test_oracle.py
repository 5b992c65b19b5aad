"""A whole step of the trainer against transformers and plain autograd: the mean over the step's
valid tokens, its gradient and its norm."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from megagrid.grid.placement import Placement
from tests.equivalence.case import GPT, LLAMA, TIED, Case
from tests.equivalence.trainer import batches_of, engine_of, rank_grid, train
from tests.model.oracle import loss_of, oracle

GRADIENT = {"llama": 2e-5, "gpt": 1e-10}
"""Relative to a tensor's largest: transformers computes rotary angles in float32."""


def first_batch_on_rank(case: Case):
    engine = engine_of(case, rank_grid(case.placement, case.config.model.num_kv_heads))
    (batch,) = batches_of(engine, 1)
    return batch


@pytest.mark.parametrize("placement", [Placement(), Placement(tp=2, pp=2)], ids=["one", "grid"])
@pytest.mark.parametrize("variant", [LLAMA, GPT, GPT.having(TIED)], ids=str)
def test_step_has_the_mean_loss_its_gradient_and_norm(ranks, variant, placement):
    variant = replace(variant, precision="fp64", steps=1)
    (run,) = train(ranks, [Case(variant, placement, 2)])
    (batch,) = ranks.run(first_batch_on_rank, Case(variant, micro_batch=8), world_size=1)
    model = Case(variant).config.model
    other = oracle(model, _tensors(run.initial))
    _, total = loss_of(other, torch.from_numpy(batch.tokens), torch.from_numpy(batch.labels))
    count = batch.valid_tokens
    assert count & (count - 1), "one over a power of two is exact in any precision"
    loss = total / count
    loss.backward()
    tolerance = GRADIENT[variant.family]
    assert run.losses[0] == pytest.approx(loss.item(), rel=tolerance)
    ours = dict(oracle(model, _tensors(run.gradients)).named_parameters())
    squares = 0.0
    for key, parameter in other.named_parameters():
        difference = (ours[key] - parameter.grad).abs().max()
        assert difference <= tolerance * parameter.grad.abs().max() + 1e-12, key
        squares += parameter.grad.square().sum().item()
    assert run.grad_norms[0] == pytest.approx(squares**0.5, rel=tolerance)


def _tensors(arrays) -> dict[str, torch.Tensor]:
    return {name: torch.from_numpy(values) for name, values in arrays.items()}
