"""fully_shard over dp: who keeps what, when it is gathered, and that nothing goes stale."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from math import ceil

import pytest
import torch
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from megagrid.config.presets import parameter_count
from megagrid.config.sharding import STRATEGIES
from megagrid.grid.placement import Placement
from megagrid.train.build import Engine
from megagrid.train.metrics import Stopwatch
from megagrid.train.step import apply_gradients, compute_gradients, evaluate
from tests.equivalence.case import GPT, LLAMA, SP, TIED, Case, Variant, strategy
from tests.equivalence.trainer import batches_of, engine_of, rank_grid

BF16 = replace(LLAMA, precision="bf16")


def engine_for(case: Case) -> Engine:
    return engine_of(case, rank_grid(case.placement, case.config.model.num_kv_heads))


# ------------------------------------------------------------------------------------------------
# What is kept


def rows_on_rank(case: Case) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Of each parameter: its shape over dp, and of what this rank keeps."""
    engine = engine_for(case)
    return [(tuple(s.parameter.shape), tuple(s.tensor.shape)) for s in engine.shards]


@pytest.mark.parametrize("dp", [2, 3, 4])
@pytest.mark.parametrize("name", STRATEGIES)
def test_ranks_keep_their_rows_of_each_parameter(ranks, name, dp):
    """FSDP cuts dim 0 into chunks of ceil(n / dp) rows; unevenly, where dp doesn't divide it."""
    case = Case(GPT.having(("train.global_batch_size", 12)), Placement(dp=dp), 1, (strategy(name),))
    results = ranks.run(rows_on_rank, case, world_size=dp)
    for rank, shapes in enumerate(results):
        for whole, kept in shapes:
            chunk = ceil(whole[0] / dp)
            rows = min(whole[0], (rank + 1) * chunk) - min(whole[0], rank * chunk)
            expected = (rows, *whole[1:]) if STRATEGIES[name].shards else whole
            assert kept == expected


def bytes_on_rank(case: Case) -> tuple[int, int]:
    """What this rank keeps of the parameters between steps: numbers, and bytes of storage."""
    engine = engine_for(case)
    run_step(engine, 1)
    tensors = {s.tensor.untyped_storage().data_ptr(): s.tensor for s in engine.shards}
    stored = sum(tensor.untyped_storage().nbytes() for tensor in tensors.values())
    return sum(tensor.numel() for tensor in tensors.values()), stored


@pytest.mark.parametrize(
    "placement", [Placement(dp=2), Placement(dp=4), Placement(tp=2, dp=2), Placement(pp=2, dp=2)]
)
def test_full_shard_keeps_an_exact_share_between_steps(ranks, placement):
    """Where every row count divides: the model over pp and dp; over tp all but the norms, which
    each tp rank has whole. 4 bytes a number, and nothing stays gathered."""
    variant = LLAMA.having(("model.vocab_size", 64), ("model.num_layers", 4))
    case = Case(variant, placement, 1, (strategy("FULL_SHARD"),))
    results = ranks.run(bytes_on_rank, case, world_size=placement.world_size)
    model = case.config.model
    norms = (2 * model.num_layers + 1) * model.hidden_size
    total = parameter_count(model) + (placement.tp - 1) * norms
    assert sum(numbers for numbers, _ in results) == total
    if placement.pp == 1:
        assert {numbers for numbers, _ in results} == {total // placement.world_size}
    for numbers, stored in results:
        assert stored == 4 * numbers


def untouched_on_rank(case: Case) -> tuple[bool, set[torch.dtype]]:
    engine = engine_for(case)
    (stage,) = engine.executor.stages.values()
    is_wrapped = isinstance(stage.module, FSDPModule)
    is_wrapped |= any(isinstance(p, DTensor) for p in stage.module.parameters())
    return is_wrapped, {s.tensor.dtype for s in engine.shards}


@pytest.mark.parametrize(
    ("variant", "wrapped"),
    [(LLAMA, False), (replace(LLAMA, precision="fp64"), False), (BF16, True)],
)
def test_one_rank_is_wrapped_only_to_cast(ranks, variant, wrapped):
    ((is_wrapped, dtypes),) = ranks.run(untouched_on_rank, Case(variant), world_size=1)
    assert is_wrapped is wrapped
    assert dtypes == {torch.float64 if variant.precision == "fp64" else torch.float32}


# ------------------------------------------------------------------------------------------------
# What is gathered, and when


def run_step(engine: Engine, step: int) -> None:
    result = compute_gradients(engine, batches_of(engine, step), step, Stopwatch())
    apply_gradients(engine, result.grad_norm, engine.config.optimizer.lr)


def gathered(engine: Engine) -> int:
    """Parameters of which this rank holds more than its own rows."""
    stages = engine.executor.stages.values()
    return sum(not isinstance(p, DTensor) for stage in stages for p in stage.module.parameters())


def gathered_on_rank(case: Case) -> list[int]:
    """Gathered parameters: at first, after an evaluation, after gradients, after an update."""
    engine = engine_for(case)
    found = [gathered(engine)]
    evaluate(engine, [batches_of(engine, 1)])
    found.append(gathered(engine))
    result = compute_gradients(engine, batches_of(engine, 1), 1, Stopwatch())
    found.append(gathered(engine))
    apply_gradients(engine, result.grad_norm, 1e-3)
    return [*found, gathered(engine)]


@pytest.mark.parametrize("name", ["FULL_SHARD", "SHARD_GRAD_OP"])
def test_nothing_stays_gathered_between_passes(ranks, name):
    case = Case(LLAMA, Placement(pp=2, dp=2), 1, (strategy(name),))
    assert ranks.run(gathered_on_rank, case, world_size=4) == [[0, 0, 0, 0]] * 4


def losses_on_rank(case: Case) -> list[float]:
    """Evaluations before, between and after two updates."""
    engine = engine_for(case)
    losses = []
    for step in (1, 2, 3):
        losses.append(evaluate(engine, [batches_of(engine, 9)]))
        run_step(engine, step)
    return losses


STALE: list[tuple[Variant, Placement, tuple]] = [
    (LLAMA, Placement(dp=2), ()),
    (GPT.having(TIED), Placement(tp=2, dp=2), (SP,)),
]


@pytest.mark.parametrize("name", STRATEGIES)
@pytest.mark.parametrize(("variant", "placement", "keys"), STALE)
def test_evaluations_see_each_update_at_once(ranks, variant, placement, keys, name):
    """Parameters left gathered by an evaluation or a step would be those before the update."""
    (expected,) = ranks.run(losses_on_rank, Case(variant), world_size=1)
    assert min(abs(a - b) for a, b in pairwise(expected)) > 1e-3
    case = Case(variant, placement, 2, (*keys, strategy(name)))
    for losses in ranks.run(losses_on_rank, case, world_size=placement.world_size):
        assert losses == pytest.approx(expected, abs=1e-5)
