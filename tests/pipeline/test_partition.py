"""Layers to stages: complete, in order, with the least dearest rank, and in the memory allowed."""

from __future__ import annotations

from itertools import combinations
from math import prod

import pytest
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st

from megagrid.cli import main
from megagrid.config.schema import Config, ModelConfig
from megagrid.errors import ConfigError
from megagrid.grid.grid import build_grid
from megagrid.grid.placement import Placement
from megagrid.pipeline.partition import (
    GB,
    StateBytes,
    balanced,
    head_cost,
    layer_cost,
    stage_layers,
)
from megagrid.pipeline.program import training_program
from megagrid.pipeline.schedules import loop_placement, v_placement
from megagrid.plan.parameters import MASTER_BYTES
from megagrid.train.build import build_engine
from tests.config import recipe


def config_of(num_layers: int = 5, vocab_size: int = 61, **keys) -> Config:
    """A run; `keys` are `section__key=value`."""
    sections = {
        "model": {
            "num_layers": num_layers,
            "hidden_size": 32,
            "ffn_hidden_size": 64,
            "num_heads": 8,
            "num_kv_heads": 2,
            "head_dim": 4,
            "vocab_size": vocab_size,
            "max_seq_length": 32,
            "make_vocab_size_divisible_by": 8,
        },
        "parallel": {},
        "train": {"seq_length": 32, "global_batch_size": 4, "steps": 1, "device": "cpu"},
        "data": {"paths": ["synthetic"]},
        "logging": {"run_dir": "unused"},
    }
    for key, value in keys.items():
        section, _, name = key.partition("__")
        sections.setdefault(section, {})[name] = value
    return Config(**sections)


def model(num_layers: int = 5, vocab_size: int = 61, **keys) -> ModelConfig:
    keys = {f"model__{key}": value for key, value in keys.items()}
    return config_of(num_layers, vocab_size, **keys).model


def splits(num_layers: int, num_stages: int) -> list[list[int]]:
    """Every way to cut the layers into stages of one or more."""
    return [
        [b - a for a, b in zip((0, *cuts), (*cuts, num_layers), strict=True)]
        for cuts in combinations(range(1, num_layers), num_stages - 1)
    ]


def dearest(config: ModelConfig, ranks, counts: list[int]) -> tuple[int, int]:
    """Cost of the dearest rank, and of the dearest stage."""
    costs = [count * layer_cost(config) for count in counts]
    costs[-1] += head_cost(config)
    by_rank = [0] * (max(ranks) + 1)
    for rank, cost in zip(ranks, costs, strict=True):
        by_rank[rank] += cost
    return max(by_rank), max(costs)


PLACEMENTS = [
    *(loop_placement(ranks) for ranks in (1, 2, 3, 4, 5, 8)),
    *(loop_placement(ranks, chunks) for ranks, chunks in ((2, 2), (2, 3), (3, 2), (1, 3))),
    *(v_placement(ranks) for ranks in (1, 2, 3, 4)),
    (0, 0, 1, 0),  # as a schedule from a file may have it
    (2, 0, 1),
]

placements = st.sampled_from(PLACEMENTS)
layers = st.integers(1, 11)
vocabularies = st.sampled_from([1, 61, 300, 304, 608, 1000, 5000, 20_000])  # 304: just one layer


@settings(deadline=None, max_examples=200)
@given(ranks=placements, num_layers=layers, vocab_size=vocabularies)
def test_balanced_split_is_the_best_of_all(ranks, num_layers, vocab_size):
    config = model(num_layers, vocab_size)
    if len(ranks) > num_layers:
        with pytest.raises(ConfigError, match=f"model.num_layers={num_layers}"):
            balanced(config, ranks)
        return
    found = balanced(config, ranks)
    assert len(found) == len(ranks) and sum(found) == num_layers and min(found) >= 1
    every = splits(num_layers, len(ranks))
    assert dearest(config, ranks, found) == min(dearest(config, ranks, split) for split in every)


@settings(deadline=None, max_examples=200)
@given(ranks=placements, num_layers=layers, vocab_size=vocabularies, data=st.data())
def test_balanced_split_is_the_best_of_those_with_room(ranks, num_layers, vocab_size, data):
    if len(ranks) > num_layers:
        return
    room = data.draw(
        st.lists(st.integers(0, num_layers), min_size=max(ranks) + 1, max_size=max(ranks) + 1)
    )
    config = model(num_layers, vocab_size)

    def has_room(counts):
        return all(
            sum(count for rank, count in zip(ranks, counts, strict=True) if rank == mine) <= most
            for mine, most in enumerate(room)
        )

    able = [split for split in splits(num_layers, len(ranks)) if has_room(split)]
    found = balanced(config, ranks, room)
    if not able:
        assert found is None
        return
    assert found in able
    assert dearest(config, ranks, found) == min(dearest(config, ranks, split) for split in able)


@pytest.mark.parametrize(
    ("num_layers", "ranks", "vocab_size", "counts"),
    [
        (5, [0], 61, [5]),
        (4, [0, 1], 61, [2, 2]),
        (5, [0, 1], 61, [3, 2]),
        (5, [0, 1, 2, 3], 61, [2, 1, 1, 1]),
        (8, [0, 1, 2, 3], 61, [2, 2, 2, 2]),
        # A head as dear as 2.6 layers: its stage has fewer, the others share the rest evenly.
        (8, [0, 1, 2, 3], 800, [3, 2, 2, 1]),
        # A head of two layers, as the module draws it.
        (5, [0, 1], 608, [4, 1]),
        (5, [0, 1, 0, 1], 608, [2, 1, 1, 1]),
        # The V: both ends on rank 0, which then has fewer layers.
        (8, [0, 1, 1, 0], 608, [2, 3, 2, 1]),
    ],
)
def test_known_splits(num_layers, ranks, vocab_size, counts):
    assert balanced(model(num_layers, vocab_size), ranks) == counts


@settings(deadline=None)
@given(ranks=placements, num_layers=layers, vocab_size=vocabularies)
def test_stages_have_every_layer_once_in_order(ranks, num_layers, vocab_size):
    if len(ranks) <= num_layers:
        ranges = stage_layers(
            config_of(num_layers, vocab_size), Placement(pp=max(ranks) + 1), ranks
        )
        assert [layer for layers in ranges for layer in layers] == list(range(num_layers))


@pytest.mark.parametrize("stated", [[5, 0], [0, 5], [1, 4], [2, 3]])
def test_stated_layers_are_taken_as_they_are(stated):
    config = config_of(parallel__layers_per_stage=stated)
    ranges = stage_layers(config, Placement(pp=2), (0, 1))
    assert [len(layers) for layers in ranges] == stated


@pytest.mark.parametrize("stated", [[5], [2, 2], [3, 3], [2, 2, 1]])
def test_stated_layers_that_dont_fit_are_refused(stated):
    config = config_of(parallel__layers_per_stage=stated)
    with pytest.raises(ConfigError, match=r"parallel\.layers_per_stage=.*model\.num_layers=5"):
        stage_layers(config, Placement(pp=2), (0, 1))


def test_costs_are_the_multiply_adds_of_the_matrices():
    """hidden 32, ffn 64, q 32, k and v 8 each: 32 (32 + 16 + 32) + 3 * 32 * 64, and scores and
    values over half of 32 positions on average, 2 * 16 * 32."""
    config = model()
    assert layer_cost(config) == 32 * 80 + 3 * 32 * 64 + 2 * 16 * 32
    assert layer_cost(model(family="gpt", num_kv_heads=8)) == 4 * 32 * 32 + 2 * 32 * 64 + 1024
    assert head_cost(config) == 32 * 61


# ------------------------------------------------------------------------------------------------
# Memory


def states_on_rank(config: Config, grid: Placement) -> tuple[int, list[int]]:
    """Bytes of what this rank keeps from step to step, and what is said of all pipeline ranks."""
    engine = build_engine(config, build_grid(grid, dist.get_rank(), "cpu", 2))
    tensors = [shard.tensor for shard in engine.shards]
    tensors += [*tensors, *engine.optimizer.states("exp_avg")]
    tensors += engine.optimizer.states("exp_avg_sq")
    ranks = engine.training.placement
    layers = stage_layers(config, grid, ranks)
    states = StateBytes.of(config, grid, len(ranks))
    kept = sum(prod(tensor.shape) * tensor.element_size() for tensor in tensors)
    return kept, states.by_rank(ranks, [len(numbers) for numbers in layers])


CHUNKS = {"parallel__pipeline_schedule": "ZBV", "parallel__virtual_pipeline_size": 2}


@pytest.mark.parametrize(
    ("grid", "keys"),
    [
        (Placement(), {}),
        (Placement(pp=2), {"model__tied_embeddings": True}),
        (Placement(pp=2), CHUNKS | {"model__tied_embeddings": True}),
        (Placement(pp=2, tp=2), {"train__precision": "fp64"}),
        (Placement(tp=4), {"model__num_kv_heads": 2}),
        (Placement(dp=3), {}),
        (Placement(pp=2, dp=2), {"train__precision": "bf16"}),
        (Placement(dp=2), {"parallel__sharding_strategy": "NO_SHARD"}),
        (Placement(dp=2), {"model__family": "gpt", "model__num_kv_heads": 8}),
    ],
    ids=str,
)
def test_bytes_of_states_are_those_of_the_fullest_rank(ranks, grid, keys):
    sizes = {
        "parallel__tensor_parallel_size": grid.tp,
        "parallel__pipeline_parallel_size": grid.pp,
        "parallel__data_parallel_size": grid.dp,
        "train__global_batch_size": 4 * grid.dp,
    }
    found = ranks.run(states_on_rank, config_of(**sizes, **keys), grid, world_size=grid.world_size)
    for pp_rank, said in enumerate(found[0][1]):
        of_rank = [
            kept for rank, (kept, _) in enumerate(found) if grid.coordinate(rank).pp == pp_rank
        ]
        assert said == max(of_rank)


def capped(gigabytes: float | None, ranks, grid: Placement | None = None, **keys) -> list[int]:
    config = config_of(12, 300, parallel__stage_memory_gb=gigabytes, **keys)
    grid = grid or Placement(pp=max(ranks) + 1)
    return [len(numbers) for numbers in stage_layers(config, grid, ranks)]


def heaviest(ranks, counts: list[int]) -> int:
    """Bytes of the rank with most."""
    config = config_of(12, 300)
    states = StateBytes.of(config, Placement(pp=max(ranks) + 1), len(ranks))
    return max(states.by_rank(ranks, counts))


@pytest.mark.parametrize("ranks", [p for p in PLACEMENTS if len(p) <= 6], ids=str)
def test_the_smallest_cap_that_works_is_the_one_that_is_named(ranks):
    """It is the heaviest rank's bytes in the best of all splits, rounded up."""
    least = min(heaviest(ranks, counts) for counts in splits(12, len(ranks)))
    with pytest.raises(ConfigError, match=r"stage_memory_gb=1e-06 can't hold") as refused:
        capped(1e-6, ranks)
    named = float(str(refused.value).partition("set it to ")[2].partition(",")[0])
    assert 0 <= named * GB - least <= 1000
    assert heaviest(ranks, capped(named, ranks)) <= named * GB
    with pytest.raises(ConfigError, match=f"set it to {named}"):
        capped(least / GB - 1e-9, ranks)


def test_a_cap_moves_layers_off_the_rank_with_the_embedding():
    """The states of 300 x 32 are those of a layer and a bit; an embedding costs no time, a head
    that of almost a layer."""
    grid, ranks = Placement(pp=3), (0, 1, 2)
    free = config_of(11, 300)
    states = StateBytes.of(free, grid, 3)
    assert states.ends[0] > states.layer
    assert balanced(free.model, ranks) == [4, 4, 3]
    config = config_of(11, 300, parallel__stage_memory_gb=(5 * states.layer + 1) / GB)
    assert [len(numbers) for numbers in stage_layers(config, grid, ranks)] == [3, 5, 3]


def test_a_large_cap_changes_nothing():
    for ranks in PLACEMENTS:
        if len(ranks) <= 12:
            assert capped(1.0, ranks) == capped(None, ranks)


def test_more_ranks_along_tp_and_dp_make_room():
    ranks, needed = (0, 1), heaviest((0, 1), [6, 6]) / GB
    for grid in (Placement(pp=2, tp=2), Placement(pp=2, dp=2)):
        capped(0.55 * needed, ranks, grid)
    with pytest.raises(ConfigError, match="can't hold"):
        capped(
            0.55 * needed,
            ranks,
            Placement(pp=2, dp=2),
            parallel__sharding_strategy="NO_SHARD",
        )


def test_stated_layers_above_the_cap_are_refused_with_the_rank_and_what_would_do():
    ranks, counts = (0, 1, 1, 0), [1, 2, 3, 6]
    stated = {"parallel__layers_per_stage": counts}
    needed = heaviest(ranks, counts)
    with pytest.raises(ConfigError, match=r"layers_per_stage=\[1, 2, 3, 6\] makes pipeline rank 0"):
        capped(0.9 * needed / GB, ranks, **stated)
    assert capped(needed / GB + 1e-9, ranks, **stated) == counts


def test_states_are_four_numbers_a_parameter():
    config = config_of()
    states = StateBytes.of(config, Placement(), 1)
    q, k = 32, 8
    matrices = 32 * (q + 2 * k) + 32 * q + 3 * 32 * 64 + 2 * 32
    assert states.layer == 4 * MASTER_BYTES["fp32"] * matrices
    assert states.ends == (16 * (2 * 64 * 32 + 32),)  # 61 rows padded to 64, and a norm


def test_rounded_moments_take_half():
    exact, rounded = (
        StateBytes.of(config_of(optimizer__state_dtype=dtype), Placement(), 1)
        for dtype in ("fp32", "bf16")
    )
    assert rounded.layer * 16 == exact.layer * 12


def test_a_rank_s_stages_are_capped_together():
    """Interleaved1F1B has the layers of both its stages on a rank."""
    config = config_of(
        8,
        parallel__pipeline_parallel_size=2,
        parallel__pipeline_schedule="Interleaved1F1B",
        parallel__virtual_pipeline_size=2,
        parallel__stage_memory_gb=1e-6,
    )
    grid = Placement(pp=2)
    with pytest.raises(ConfigError, match="pipeline_parallel_size=2: however"):
        stage_layers(config, grid, training_program(config, grid).placement)


def test_a_cap_that_is_too_small_is_refused_before_ranks_start(tmp_path, capsys):
    keys = ["parallel.pipeline_parallel_size=2", "parallel.stage_memory_gb=1e-6"]
    assert main(["train", str(recipe.write(tmp_path)), *keys]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: parallel.stage_memory_gb=1e-06 can't hold model.num_layers=4")
