"""fully_shard over dp: who keeps what, when it is gathered, and that nothing goes stale."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from math import ceil

import pytest
import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from megagrid.config.presets import parameter_count
from megagrid.config.sharding import STRATEGIES
from megagrid.data_parallel.sharding import parameter_groups
from megagrid.grid.bootstrap import RankEnvironment
from megagrid.grid.placement import Placement
from megagrid.grid.start import grid_of, meeting, running_grid
from megagrid.plan.parameters import ModelShare
from megagrid.train.build import Engine, build_engine
from megagrid.train.metrics import Stopwatch
from megagrid.train.step import apply_gradients, compute_gradients, evaluate
from tests.equivalence.case import GPT, LLAMA, SP, TIED, Case, Variant, strategy
from tests.equivalence.trainer import batches_of, engine_of

BF16 = replace(LLAMA, precision="bf16")


def engine_for(case: Case) -> Engine:
    return engine_of(case, grid_of(case.config, case.placement, dist.get_rank(), "cpu"))


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


KEPT = ("parallel.reshard_after_forward", False)
OVER_TWO = ("parallel.reshard_after_forward", 2)
APART = (("parallel.wrap_embedding", True), ("parallel.wrap_head", True))


@pytest.mark.parametrize(
    ("placement", "keys"),
    [
        (Placement(pp=2, dp=2), (strategy("FULL_SHARD"),)),
        (Placement(pp=2, dp=2), (strategy("SHARD_GRAD_OP"),)),
        (Placement(pp=2, dp=2), (KEPT, *APART)),
        (Placement(dp=4), (OVER_TWO, *APART)),
        (Placement(dp=4), (strategy("HYBRID_SHARD"), ("parallel.shard_size", 2))),
    ],
)
def test_nothing_stays_gathered_between_passes(ranks, placement, keys):
    case = Case(LLAMA, placement, 1, keys)
    assert ranks.run(gathered_on_rank, case, world_size=4) == [[0, 0, 0, 0]] * 4


def most_gathered_on_rank(case: Case) -> int:
    """Most units that are gathered at once, in a step's forwards and backwards."""
    engine = engine_for(case)
    (stage,) = engine.executor.stages.values()
    groups = list(parameter_groups(stage.module))
    most = 0

    def look(*_: object) -> None:
        nonlocal most
        pending = sum(g.is_unsharded or g._all_gather_result is not None for g in groups)
        most = max(most, pending)

    for block in stage.module.layers.values():
        block.attention.register_forward_hook(look)
        block.attention.register_full_backward_hook(look)
    run_step(engine, 1)
    return most


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        # The rest of the stage, the unit that computes, and those that are prefetched.
        ((("parallel.forward_prefetch", 0), ("parallel.backward_prefetch", 0)), 2),
        ((("parallel.forward_prefetch", 1), ("parallel.backward_prefetch", 0)), 3),
        ((("parallel.forward_prefetch", 0), ("parallel.backward_prefetch", 2)), 4),
        ((("parallel.forward_prefetch", 3), ("parallel.backward_prefetch", 1)), 5),
        ((KEPT,), 6),
    ],
)
def test_prefetch_gathers_so_many_units_ahead_and_no_more(ranks, keys, expected):
    case = Case(LLAMA, Placement(dp=2), 4, keys)
    assert ranks.run(most_gathered_on_rank, case, world_size=2) == [expected] * 2


def between_passes_on_rank(case: Case) -> set[int]:
    """Storage, in bytes, of all that each layer's parameters are between its two passes."""
    engine = engine_for(case)
    (stage,) = engine.executor.stages.values()
    found = set()

    def look(*_: object) -> None:
        for block in list(stage.module.layers.values())[:-1]:
            kept = (p.to_local() if isinstance(p, DTensor) else p for p in block.parameters())
            found.add(sum(p.untyped_storage().nbytes() for p in kept))

    stage.module.norm.register_forward_hook(look)
    run_step(engine, 1)
    return found


@pytest.mark.parametrize(("after_forward", "share"), [(True, 4), (2, 2), (False, 1)])
def test_a_layer_between_its_passes_is_split_as_the_recipe_says(ranks, after_forward, share):
    variant = LLAMA.having(("model.num_layers", 2))
    keys = (("parallel.reshard_after_forward", after_forward),)
    case = Case(variant, Placement(dp=4), 2, (*keys, ("parallel.forward_prefetch", 0)))
    layer = sum(p.gathered(4) for p in ModelShare(case.config.model, 1, 0, False).layer())
    assert ranks.run(between_passes_on_rank, case, world_size=4) == [{4 * layer // share}] * 4


@pytest.mark.gpu
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_an_accelerators_states_lie_in_pinned_host_memory_and_train_the_same(precision):
    """One rank of it, in a process of its own group."""
    device = torch.accelerator.current_accelerator()
    losses = []
    for offloads in (False, True):
        variant = replace(LLAMA, precision=precision).having(("train.device", device.type))
        case = Case(variant, Placement(), 8, (("memory.cpu_offload", offloads),))
        with (
            meeting(case.config, RankEnvironment()) as met,
            running_grid(case.config, met) as grid,
        ):
            engine = build_engine(case.config, grid)
            found = []
            for step in (1, 2, 3):
                result = compute_gradients(engine, batches_of(engine, step), step, Stopwatch())
                if offloads:
                    assert all(s.tensor.is_pinned() for s in engine.shards)
                    assert {s.grad.device.type for s in engine.shards} == {"cpu"}
                    assert {m.device.type for m in engine.optimizer.moments("exp_avg")} == {"cpu"}
                found.append((result.loss, result.grad_norm))
                apply_gradients(engine, result.grad_norm, 1e-3)
            losses.append(found)
    assert losses[1] == [pytest.approx(step, rel=1e-5) for step in losses[0]]


def test_weights_split_between_passes_are_those_of_the_last_update(ranks):
    """Left so by an evaluation, they would be those before it."""
    (expected,) = ranks.run(losses_on_rank, Case(LLAMA), world_size=1)
    case = Case(LLAMA, Placement(dp=4), 1, (OVER_TWO,))
    for losses in ranks.run(losses_on_rank, case, world_size=4):
        assert losses == pytest.approx(expected, abs=1e-5)


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


@pytest.mark.parametrize(
    "way", [*((strategy(name),) for name in STRATEGIES), (KEPT,)], ids=lambda way: str(way[0][1])
)
@pytest.mark.parametrize(("variant", "placement", "keys"), STALE)
def test_evaluations_see_each_update_at_once(ranks, variant, placement, keys, way):
    """Parameters left gathered by an evaluation or a step would be those before the update."""
    (expected,) = ranks.run(losses_on_rank, Case(variant), world_size=1)
    assert min(abs(a - b) for a, b in pairwise(expected)) > 1e-3
    case = Case(variant, placement, 2, (*keys, *way))
    for losses in ranks.run(losses_on_rank, case, world_size=placement.world_size):
        assert losses == pytest.approx(expected, abs=1e-5)
