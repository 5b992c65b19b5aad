"""Digests are the same whatever grid computes a step, and show where a fault lies."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.utils import counters

from megagrid.grid.placement import Placement
from megagrid.train.build import Engine
from megagrid.train.compare import compare
from megagrid.train.digest import StepDigest, _sums
from megagrid.train.digest_records import StepDigests, distance
from megagrid.train.metrics import Stopwatch
from megagrid.train.step import apply_gradients, compute_gradients, drop_gradients
from tests.equivalence.case import GPT, LLAMA, SP, TIED, Case, schedule, strategy
from tests.equivalence.test_planted import (
    gradients_a_thousandth_off,
    gradients_averaged,
    norms_not_summed,
    seed_of_its_own,
    tied_ends_summed_twice,
)
from tests.equivalence.trainer import batches_of, engine_of, rank_grid

TOLERANCE = 1e-4


def digest_on_rank(case: Case, fault: Callable | None = None, steps: int = 1) -> list[StepDigests]:
    """Digest the case's first steps."""
    grid = rank_grid(case.placement, case.config.model.num_kv_heads)
    engine = engine_of(case, grid)
    found = []
    with fault(engine) if fault else nullcontext():
        for step in range(1, steps + 1):
            digest = StepDigest(engine, batches_of(engine, step))
            if step == 1:
                digest.weights("weights")
            with digest.hooks():
                result = compute_gradients(
                    engine, batches_of(engine, step), step, Stopwatch(), around=digest.around
                )
            digest.gradients(result)
            apply_gradients(engine, result.grad_norm, engine.config.optimizer.lr)
            digest.update(engine.config.optimizer.lr, 1.0)
            found.append(StepDigests(step=step, passes=digest.gather()))
    return found


def digests(ranks, case: Case, fault: Callable | None = None, steps: int = 1) -> list[StepDigests]:
    size = case.placement.world_size
    first, *others = ranks.run(digest_on_rank, case, fault, steps, world_size=size)
    assert all(other == first for other in others)
    return first


DROPOUT = GPT.having(TIED, ("model.dropout", 0.3), ("model.attention_dropout", 0.2))
FULL = ("memory.recompute", "full")

CASES = [
    Case(LLAMA, micro_batch=2),
    Case(LLAMA, Placement(tp=2), 4),
    Case(LLAMA, Placement(tp=2), 4, (SP, FULL)),
    Case(LLAMA, Placement(dp=2), 2),
    Case(LLAMA, Placement(dp=2), 2, (strategy("ZERO1"),)),
    Case(LLAMA, Placement(dp=2), 4, (strategy("NO_SHARD"),)),
    Case(DROPOUT, Placement(pp=2), 2, (FULL,)),
    Case(GPT.having(TIED), Placement(pp=2), 4, (schedule("ZB1P"),)),
    Case(LLAMA, Placement(tp=4), 8, (SP,)),
    Case(DROPOUT, Placement(tp=2, pp=2), 2, (SP,)),
    Case(LLAMA, Placement(pp=2, dp=2), 2),
    Case(LLAMA, Placement(cp=2), 4),
    Case(LLAMA, Placement(cp=2, tp=2), 4, (SP,)),
]


@pytest.mark.parametrize("precision", ["fp32", "fp64"])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_digests_are_those_of_one_process(ranks, case, precision):
    case = replace(case, variant=replace(case.variant, precision=precision))
    alone = digests(ranks, Case(case.variant, micro_batch=8), steps=2)
    tolerance = {"fp32": TOLERANCE, "fp64": 1e-11}[precision]
    found = compare(digests(ranks, case, steps=2), alone, tolerance)
    assert found.parting is None and not found.only
    passes = found.steps[1]
    assert [one.name for one in passes] == list(alone[0].passes)
    layers = case.config.model.num_layers
    assert passes[2].places == 3 * layers + 3  # embedding, norm and loss
    assert passes[3].places == 3 * layers + 2


@contextmanager
def as_one_graph(engine: Engine) -> Iterator[None]:
    torch._dynamo.reset()
    counters.clear()
    yield
    assert counters["stats"]["unique_graphs"] == 1
    assert not counters["graph_break"]


@contextmanager
def in_the_midst_of_a_run(engine: Engine) -> Iterator[None]:
    with as_one_graph(engine):
        compute_gradients(engine, batches_of(engine, 9), 9, Stopwatch())
        drop_gradients(engine)
        yield


@pytest.mark.parametrize("since", [as_one_graph, in_the_midst_of_a_run])
def test_compiled_layers_are_digested_from_outside(ranks, since):
    """Whether they are compiled while they are watched, or before: what watches isn't."""
    alone = digests(ranks, Case(LLAMA, micro_batch=8))
    compiled = (("train.compile", True), ("train.compile_backend", "aot_eager"))
    placements = [Placement(), Placement(tp=2), Placement(dp=2), Placement(pp=2)]
    for placement in placements[:: 1 if since is as_one_graph else 2]:
        case = Case(LLAMA, placement, 2, (*compiled, *((SP,) if placement.tp > 1 else ())))
        found = compare(digests(ranks, case, since), alone, TOLERANCE)
        assert found.parting is None
        layers = range(case.config.model.num_layers)
        inside = [f"layers.{n}.{place}" for n in layers for place in ("attention", "mlp")]
        assert sorted(found.only) == sorted(
            f"{name}: {place}" for name in ("forward", "backward") for place in inside
        )


def test_estimated_distance_is_about_that_of_the_tensors():
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(64, 64, generator=generator)
    index = torch.arange(x.numel()).view_as(x)
    for size in (1e-6, 1e-3, 1.0):
        y = x + size * torch.randn(64, 64, generator=generator)
        estimate = distance(_sums(x, index).tolist(), _sums(y, index).tolist())
        true = (x.double() - y).norm() / max(x.norm(), y.norm())
        assert 0.5 < estimate / true < 2


def test_one_element_that_is_off_is_seen():
    x = torch.ones(1000, 1000)
    index = torch.arange(x.numel()).view_as(x)
    y = x.clone()
    y[3, 5] += 1.0
    assert distance(_sums(x, index).tolist(), _sums(y, index).tolist()) == pytest.approx(
        1e-3, rel=1e-5
    )


# ------------------------------------------------------------------------------------------------
# Faults


@contextmanager
def mlp_a_thousandth_off(engine: Engine) -> Iterator[None]:
    """On one rank, if it has the layer."""
    handles = [
        stage.module.layers["3"].mlp.register_forward_hook(lambda m, x, y: y * 1.001)
        for stage in engine.executor.stages.values()
        if "3" in stage.module.layers and engine.grid.rank == engine.grid.world.size - 1
    ]
    # Ahead of the digest's, whose hooks come later.
    yield
    for handle in handles:
        handle.remove()


def _scale_gradient(module: nn.Module, inputs: tuple, output: Tensor) -> None:
    output.register_hook(lambda gradient: gradient * 1.001)


@contextmanager
def attentions_input_gradient_off(engine: Engine) -> Iterator[None]:
    handles = [
        stage.module.layers["2"].attention.qkv.register_forward_hook(_scale_gradient)
        for stage in engine.executor.stages.values()
        if "2" in stage.module.layers
    ]
    yield
    for handle in handles:
        handle.remove()


@contextmanager
def other_decay(engine: Engine) -> Iterator[None]:
    for group in engine.optimizer._adamw.param_groups:
        group["weight_decay"] *= 3
    yield


@dataclass(frozen=True)
class Plant:
    """A fault, and where the digests of a run with it must part from those of one without.

    Attributes:
        place: pass and place; several, where any of them is right.
    """

    fault: Callable
    case: Case
    name: str
    places: Sequence[str]


PLANTS = [
    Plant(mlp_a_thousandth_off, Case(LLAMA, Placement(dp=2), 4), "forward", ["layers.3.mlp"]),
    Plant(mlp_a_thousandth_off, Case(LLAMA, Placement(pp=2), 4), "forward", ["layers.3.mlp"]),
    Plant(
        mlp_a_thousandth_off, Case(LLAMA, Placement(tp=2), 4, (SP,)), "forward", ["layers.3.mlp"]
    ),
    # The gradient of what attention read: the next that is digested is of the layer before.
    Plant(
        attentions_input_gradient_off,
        Case(LLAMA, Placement(tp=2), 4),
        "backward",
        ["layers.1.output"],
    ),
    Plant(
        norms_not_summed,
        Case(LLAMA, Placement(tp=2), 4, (SP,)),
        "gradients",
        ["norm.weight"],
    ),
    Plant(gradients_averaged, Case(LLAMA, Placement(dp=2), 4), "gradients", ["head.weight"]),
    Plant(
        tied_ends_summed_twice,
        Case(GPT.having(TIED), Placement(pp=2), 4),
        "gradients",
        ["embedding.weight"],
    ),
    Plant(
        gradients_a_thousandth_off,
        Case(LLAMA, Placement(pp=2), 4),
        "gradients",
        ["layers.0.attention.wq.weight"],
    ),
    Plant(seed_of_its_own, Case(LLAMA, Placement(tp=2), 4), "weights", ["embedding.weight"]),
    Plant(other_decay, Case(LLAMA, Placement(dp=2), 4), "update", ["embedding.weight"]),
]


@pytest.mark.parametrize("plant", PLANTS, ids=lambda p: f"{p.fault.__name__}-{p.case}")
def test_a_planted_fault_is_found_where_it_is(ranks, plant):
    alone = digests(ranks, Case(plant.case.variant, micro_batch=8))
    assert compare(digests(ranks, plant.case), alone, TOLERANCE).parting is None
    step, found = compare(digests(ranks, plant.case, plant.fault), alone, TOLERANCE).parting
    assert (step, found.name) == (1, plant.name)
    assert found.first in plant.places


def test_another_seed_parts_at_the_weights_and_other_data_at_the_data(ranks):
    alone = digests(ranks, Case(LLAMA, micro_batch=8))
    seed = digests(ranks, Case(LLAMA.having(("train.seed", 7)), Placement(dp=2), 4))
    assert compare(alone, seed, TOLERANCE).parting[1].name == "weights"
    longer = digests(ranks, Case(LLAMA.having(("train.seq_length", 16)), micro_batch=8))
    _, found = compare(alone, longer, TOLERANCE).parting
    assert (found.name, found.first) == ("data", "labels")
