from __future__ import annotations

import pytest

from megagrid.config.load import load
from megagrid.config.rules import check, placement
from megagrid.errors import GridError
from tests.config import recipe

LEGAL = {
    "one rank": ([], 1),
    "tp equals kv heads": (["parallel.tensor_parallel_size=2"], 2),
    "tp beyond kv heads": (["parallel.tensor_parallel_size=4"], 4),
    "tp equals heads": (["parallel.tensor_parallel_size=8"], 8),
    "mqa under tp": (["parallel.tensor_parallel_size=8", "model.num_kv_heads=1"], 8),
    "vocabulary not divisible by tp": (
        ["parallel.tensor_parallel_size=2", "model.vocab_size=61"],
        2,
    ),
    "sequence parallel on one rank": (["parallel.sequence_parallel=true"], 1),
    "a stage per layer": (["parallel.pipeline_parallel_size=4"], 4),
    "an empty stage, stated": (
        ["parallel.pipeline_parallel_size=2", "parallel.layers_per_stage=[4,0]"],
        2,
    ),
    "more stages than layers, stated": (
        ["parallel.pipeline_parallel_size=8", "parallel.layers_per_stage=[1,1,1,1,0,0,0,0]"],
        8,
    ),
    "fewer microbatches than stages": (
        ["parallel.pipeline_parallel_size=4", "train.global_batch_size=1"],
        4,
    ),
    "dp takes every sample": (["parallel.data_parallel_size=8"], 8),
    "dp takes what is left": (["parallel.tensor_parallel_size=2"], 8),
    "no warmup": (["lr_schedule.warmup_steps=0"], 1),
    "warmup longer than the run": (["lr_schedule.warmup_steps=100"], 1),
    "decay over nothing": (["lr_schedule.decay_steps=0"], 1),
    "decay longer than the run": (["lr_schedule.decay_steps=100"], 1),
    "wsd that only decays": (["lr_schedule.kind=wsd", "lr_schedule.decay_steps=8"], 1),
    "dropout in a gpt": (["model.family=gpt", "model.dropout=0.1"], 1),
    "all of the llama family's keys": (
        [
            "model.qkv_bias=true",
            "model.qk_norm=true",
            "model.rope_scaling=linear",
            "model.rope_scaling_factor=2",
        ],
        1,
    ),
    "one path drawn from, one not": (['data.paths=["a","b"]', "data.weights=[1,0]"], 1),
    "fp64 on the cpu": (["train.precision=fp64", "train.device=cpu"], 1),
    "multiples kept beside the newest": (
        ["checkpoint.keep_every=8", "checkpoint.keep_last=1", "checkpoint.save_interval=4"],
        1,
    ),
    "multiples kept of what signals save": (
        ["checkpoint.keep_every=8", "checkpoint.keep_last=1"],
        1,
    ),
    "window of all steps but the last": (["guard.on_spike=skip", "guard.window=7"], 1),
    "the ends of a tied model apart, in two stages": (
        [
            "model.tied_embeddings=true",
            "parallel.pipeline_parallel_size=2",
            "parallel.wrap_embedding=true",
            "parallel.wrap_head=true",
        ],
        2,
    ),
    "no clipping": (["optimizer.clip_grad=0"], 1),
    "shards in nodes that are found later": (["parallel.sharding_strategy=HYBRID_SHARD"], 8),
    "a step's weights held, stated in full": (
        ["parallel.reshard_after_forward=false", "parallel.hold_for_step=true"],
        2,
    ),
    "weights split over half of the ranks": (["parallel.reshard_after_forward=2"], 4),
    "one layer kept whole": (["parallel.unsharded_modules=['layers.3']"], 2),
}


@pytest.mark.parametrize(("overrides", "world_size"), LEGAL.values(), ids=LEGAL)
def test_what_is_legal_is_let_through(tmp_path, overrides, world_size):
    check(load(recipe.write(tmp_path), overrides), world_size)


@pytest.mark.parametrize("world_size", [1, 2, 4, 8])
def test_dp_is_what_the_other_axes_leave(tmp_path, world_size):
    config = load(recipe.write(tmp_path), ["parallel.pipeline_parallel_size=1"])
    assert placement(config, world_size).dp == world_size


def test_without_a_world_the_grid_is_as_small_as_the_recipe_allows(tmp_path):
    config = load(
        recipe.write(tmp_path),
        ["parallel.tensor_parallel_size=2", "parallel.pipeline_parallel_size=2"],
    )
    assert placement(config).world_size == 4


def test_ranks_that_the_grid_cannot_use_are_refused(tmp_path):
    config = load(recipe.write(tmp_path), ["parallel.tensor_parallel_size=4"])
    with pytest.raises(GridError, match="6 ranks can't be divided by tensor_parallel_size=4"):
        check(config, 6)
