"""One validation loss, whatever the grid and the microbatches, and whatever the samples fill."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import pytest
import torch

from megagrid.data import Batch, Loader, Sampler, SyntheticDataset
from megagrid.grid.placement import Placement
from megagrid.train.build import Engine
from megagrid.train.metrics import Stopwatch
from megagrid.train.step import apply_gradients, compute_gradients, evaluate
from tests.equivalence.case import GPT, LLAMA, SP, TIED, Case, Variant, schedule, strategy
from tests.equivalence.trainer import batches_of, engine_of, rank_grid


def evaluate_on_rank(case: Case, counts: Sequence[int]) -> list[float]:
    """Evaluate so many validation samples, for each of `counts`; make a step; evaluate again."""
    engine = engine_of(case, rank_grid(case.placement, case.config.model.num_kv_heads))
    losses = [evaluate(engine, batches) for batches in map(partial(padded, engine), counts)]
    result = compute_gradients(engine, batches_of(engine, 1), 1, Stopwatch())
    apply_gradients(engine, result.grad_norm, engine.config.optimizer.lr)
    return losses + [evaluate(engine, batches) for batches in map(partial(padded, engine), counts)]


def padded(engine: Engine, samples: int) -> list[list[Batch]]:
    """All validation samples, `samples` of them, as the training loop reads them."""
    train, grid = engine.config.train, engine.grid
    data = SyntheticDataset(
        engine.config.model.vocab_size, train.seq_length, 1, "valid", samples, repeat=False
    )
    sampler = Sampler(train.global_batch_size, train.micro_batch_size, grid.dp.size)
    batches = list(Loader(data, sampler, grid.dp.rank, pad=True).steps())
    assert len(batches) == -(-samples // train.global_batch_size)
    return batches


DROPOUT = GPT.having(TIED, ("model.dropout", 0.5), ("model.attention_dropout", 0.5))

CASES = [
    Case(LLAMA, micro_batch=2),
    Case(LLAMA, micro_batch=1),
    Case(LLAMA, Placement(pp=2), 2),
    Case(LLAMA, Placement(pp=2), 8),
    Case(LLAMA, Placement(pp=2), 2, (schedule("GPipe"),)),
    Case(LLAMA, Placement(tp=2), 4, (SP,)),
    Case(LLAMA, Placement(dp=2), 1),
    Case(LLAMA, Placement(dp=2), 2, (strategy("SHARD_GRAD_OP"),)),
    Case(LLAMA, Placement(pp=2, dp=2), 1, (strategy("SHARD_GRAD_OP"),)),
    Case(LLAMA, Placement(pp=2, dp=2), 4),
    Case(LLAMA, Placement(cp=2), 4),
    Case(DROPOUT, Placement(tp=2), 2, (SP,)),
    Case(DROPOUT, Placement(pp=2, dp=2), 2),
]


COUNTS = (16, 11, 3)
"""Samples that fill two batches, that don't, and that don't fill one."""


@pytest.mark.parametrize("case", CASES, ids=str)
def test_validation_loss_is_that_of_one_process(ranks, case):
    """torchtitan #1758: it was divided by the accumulation steps. Megatron-Bridge #6025, torchtitan
    #4301: a split smaller than a batch hung or failed."""
    alone = Case(case.variant, micro_batch=8)
    (expected,) = ranks.run(evaluate_on_rank, alone, COUNTS, world_size=1)
    for found in ranks.run(evaluate_on_rank, case, COUNTS, world_size=case.placement.world_size):
        assert found == pytest.approx(expected, abs=1e-5)


def test_validation_loss_is_the_mean_over_tokens_of_all_batches(ranks):
    """Eleven samples as one batch of eleven, or as eight and a padded three."""
    one_batch = LLAMA.having(("train.global_batch_size", 11))
    ((whole, _),) = ranks.run(evaluate_on_rank, Case(one_batch, micro_batch=11), [11], world_size=1)
    ((cut, _),) = ranks.run(evaluate_on_rank, Case(LLAMA, micro_batch=8), [11], world_size=1)
    assert cut == pytest.approx(whole, abs=1e-5)


def no_tokens_on_rank(case: Case) -> float | None:
    engine = engine_of(case, rank_grid(case.placement, case.config.model.num_kv_heads))
    everything = range(8)
    return evaluate(engine, [batches_of(engine, 1, ignored=everything)])


@pytest.mark.parametrize("placement", [Placement(), Placement(pp=2, dp=2)], ids=["one", "grid"])
def test_no_valid_token_is_no_loss(ranks, placement):
    case = Case(LLAMA, placement, 2)
    found = ranks.run(no_tokens_on_rank, case, world_size=placement.world_size)
    assert found == [None] * placement.world_size


def dropout_on_rank(variant: Variant) -> tuple[float, float]:
    case = Case(variant, micro_batch=8)
    engine = engine_of(case, rank_grid(case.placement, 8))
    first = evaluate(engine, [batches_of(engine, 1)])
    torch.manual_seed(1)
    return first, evaluate(engine, [batches_of(engine, 1)])


def test_evaluation_drops_nothing(ranks):
    """The loss of a model with dropout is that of the same model without."""
    ((first, again),) = ranks.run(dropout_on_rank, DROPOUT, world_size=1)
    ((without, _),) = ranks.run(dropout_on_rank, GPT.having(TIED), world_size=1)
    assert first == again == without
