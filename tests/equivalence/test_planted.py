"""The comparison sees what it is there for: faults, planted one at a time, are found."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from unittest.mock import PropertyMock, patch

import pytest
import torch
from torch.distributed.fsdp import FSDPModule

from megagrid.data_parallel.sharding import GradientSync
from megagrid.grid.placement import Placement
from megagrid.nn.init import initialise
from megagrid.nn.layout import Piece
from megagrid.pipeline.stage import Stage
from megagrid.train.build import Engine
from tests.equivalence.case import GPT, LLAMA, SP, TIED, Case, strategy

# Each plants a fault on a rank, and takes it out again: ranks live on.


def _without_sums_over(name: str) -> Callable:
    original = Stage.summands

    def summands(stage: Stage, axis) -> list:
        return [] if axis.name == name else original(stage, axis)

    return patch.object(Stage, "summands", summands)


@contextmanager
def norms_not_summed(engine: Engine) -> Iterator[None]:
    with _without_sums_over("tp"):
        yield


@contextmanager
def shared_heads_not_summed(engine: Engine) -> Iterator[None]:
    with _without_sums_over("kv"):
        yield


@contextmanager
def tied_ends_not_summed(engine: Engine) -> Iterator[None]:
    with _without_sums_over("embedding"):
        yield


@contextmanager
def tied_ends_summed_twice(engine: Engine) -> Iterator[None]:
    original = engine.executor._reduce_tied

    def twice(step, action) -> None:
        original(step, action)
        original(step, action)

    actions = engine.executor._run_action
    (kind,) = (kind for kind, run in actions.items() if run == original)
    actions[kind] = twice
    yield


@contextmanager
def copies_counted(engine: Engine) -> Iterator[None]:
    with patch.object(Piece, "is_counted_here", PropertyMock(return_value=True)):
        yield


@contextmanager
def new_weights_not_gathered(engine: Engine) -> Iterator[None]:
    with patch.object(GradientSync, "after_update", lambda sync: None):
        yield


@contextmanager
def gradients_averaged(engine: Engine) -> Iterator[None]:
    for stage in engine.executor.stages.values():
        for unit in stage.module.modules():
            if isinstance(unit, FSDPModule):
                unit.set_gradient_divide_factor(float(engine.grid.dp.size))
    yield


@contextmanager
def last_microbatch_alone(engine: Engine) -> Iterator[None]:
    original = Stage.backward

    def backward(stage: Stage, number: int, grad, *, is_last: bool):
        if is_last:
            stage.module.zero_grad()
        return original(stage, number, grad, is_last=is_last)

    with patch.object(Stage, "backward", backward):
        yield


@contextmanager
def mean_of_the_microbatches_means(engine: Engine) -> Iterator[None]:
    original = engine.executor.run

    def run(program, microbatches, loss_scale, *more):
        valid = iter([int((m.labels >= 0).sum()) for m in microbatches])
        count = len(microbatches) * engine.grid.dp.size

        def scale() -> torch.Tensor:
            return torch.tensor(1.0 / (max(1, next(valid)) * count))

        return original(program, microbatches, scale, *more)

    with patch.object(engine.executor, "run", run):
        yield


@contextmanager
def seed_of_its_own(engine: Engine) -> Iterator[None]:
    initialise(engine.shards, engine.config.train.seed + engine.grid.rank)
    yield


@contextmanager
def gradients_a_thousandth_off(engine: Engine) -> Iterator[None]:
    """In one matrix: nothing that a loss or a norm would show."""
    original = Stage.backward

    def backward(stage: Stage, number: int, grad, *, is_last: bool):
        input_grad = original(stage, number, grad, is_last=is_last)
        if is_last and stage.is_first:
            (shard,) = (s for s in stage.shards if s.name == "layers.0.attention.qkv.weight")
            shard.grad[0] *= 1.001
        return input_grad

    with patch.object(Stage, "backward", backward):
        yield


@dataclass(frozen=True)
class Plant:
    """A fault, where it shows, and the words in which it must be told.

    Attributes:
        told: as a regular expression.
    """

    fault: Callable
    case: Case
    told: str


HYBRID = (strategy("HYBRID_SHARD"), ("parallel.shard_size", 2))
MQA = LLAMA.having(("model.num_kv_heads", 1))
HEAD_NORMS = LLAMA.having(("model.qk_norm", True), ("model.head_dim", 8))

PLANTS = [
    Plant(norms_not_summed, Case(LLAMA, Placement(tp=2), 4, (SP,)), "norm.weight.* differ between"),
    # Norms of heads are summed without sequence parallelism too.
    Plant(
        norms_not_summed, Case(HEAD_NORMS, Placement(tp=2), 4), "[qk]_norm.weight.* differ between"
    ),
    Plant(shared_heads_not_summed, Case(MQA, Placement(tp=2), 4), "w[kv].weight.* differ between"),
    Plant(
        tied_ends_not_summed,
        Case(GPT.having(TIED), Placement(pp=2), 4),
        "embedding.weight.* differ between",
    ),
    Plant(
        tied_ends_summed_twice,
        Case(GPT.having(TIED), Placement(pp=2), 4),
        "gradient off by .* embedding.weight",
    ),
    Plant(copies_counted, Case(LLAMA, Placement(tp=2), 4), "norm.weight is not counted just once"),
    Plant(gradients_averaged, Case(LLAMA, Placement(dp=2), 4), "grad norm off by 0.[57]"),
    Plant(
        gradients_averaged,
        Case(LLAMA, Placement(dp=2), 4, (strategy("NO_SHARD"),)),
        "grad norm off by 0.[57]",
    ),
    Plant(gradients_averaged, Case(LLAMA, Placement(dp=4), 2, HYBRID), "grad norm off by 0.[78]"),
    Plant(copies_counted, Case(LLAMA, Placement(dp=4), 2, HYBRID), "not counted just once"),
    Plant(
        new_weights_not_gathered,
        Case(LLAMA, Placement(dp=2), 4, (strategy("ZERO1"),)),
        "updated: .* differ between",
    ),
    Plant(last_microbatch_alone, Case(LLAMA, micro_batch=2), "gradient off by"),
    Plant(last_microbatch_alone, Case(LLAMA, Placement(pp=2), 2), "gradient off by"),
    Plant(mean_of_the_microbatches_means, Case(LLAMA, micro_batch=2), "gradient off by"),
    Plant(mean_of_the_microbatches_means, Case(LLAMA, Placement(dp=2), 2), "gradient off by"),
    Plant(seed_of_its_own, Case(LLAMA, Placement(tp=2), 4), "initial .* differs"),
    Plant(
        seed_of_its_own,
        Case(LLAMA, Placement(dp=2), 4, (strategy("NO_SHARD"),)),
        "initial: .* differ between",
    ),
    Plant(
        gradients_a_thousandth_off,
        Case(LLAMA, Placement(pp=2), 4),
        r"gradient off by .* layers\.0\.attention\.wq\.weight\[0,",
    ),
]


@pytest.mark.parametrize("plant", PLANTS, ids=lambda p: f"{p.fault.__name__}-{p.case}")
def test_planted_fault_is_found(equivalence, plant):
    case = replace(plant.case, variant=replace(plant.case.variant, steps=1))
    equivalence.check([case])
    with pytest.raises(AssertionError, match=plant.told):
        equivalence.check([case], plant.fault)
