"""The closed form of what ranks keep; against real ranks in tests/end_to_end/test_memory.py."""

from __future__ import annotations

import pytest

from megagrid.config.presets import PRESETS, parameter_count
from megagrid.config.schema import Config, ModelConfig
from megagrid.grid.placement import Placement
from megagrid.plan.memory import PersistentBytes, persistent_bytes


def of_preset(name: str, placement: Placement, sharding: str = "FULL_SHARD") -> Config:
    """A llama of the zoo, its vocabulary unpadded so that the published counts hold."""
    shape = dict(PRESETS[name])
    shape["head_dim"] = shape["hidden_size"] // shape["num_heads"]
    return Config(
        model=ModelConfig(**shape, make_vocab_size_divisible_by=1),
        parallel={
            "tensor_parallel_size": placement.tp,
            "pipeline_parallel_size": placement.pp,
            "data_parallel_size": placement.dp,
            "sharding_strategy": sharding,
        },
        train={"seq_length": 2048, "global_batch_size": placement.dp * placement.pp, "steps": 1},
        data={"paths": ["synthetic"]},
        logging={"run_dir": "unused"},
    )


def by_rank(placement: Placement, config: Config) -> list[PersistentBytes]:
    return [
        persistent_bytes(config, placement, placement.coordinate(rank))
        for rank in range(placement.world_size)
    ]


@pytest.mark.parametrize("name", ["llama2-7b", "llama3-8b"])
@pytest.mark.parametrize(
    "placement",
    [Placement(), Placement(dp=8), Placement(pp=4), Placement(pp=2, dp=16)],
    ids=str,
)
def test_all_ranks_together_keep_the_model_once(name, placement):
    """12 bytes a parameter, in shares of the ranks: nothing is kept twice over dp and pp."""
    config = of_preset(name, placement)
    kept = by_rank(placement, config)
    assert sum(rank.total for rank in kept) == 12 * parameter_count(config.model)
    for stage in placement.groups("dp"):
        assert len({kept[rank] for rank in stage}) == 1


@pytest.mark.parametrize("tp", [1, 2, 8])
def test_tp_ranks_share_matrices_and_repeat_norms(tp):
    placement = Placement(tp=tp, dp=4)
    config = of_preset("llama3-8b", placement)
    model = config.model
    norms = (2 * model.num_layers + 1) * model.hidden_size
    matrices = parameter_count(model) - norms
    for rank in by_rank(placement, config):
        assert rank.total == 12 * (matrices // tp + norms) // 4


def test_no_shard_keeps_everything_on_every_rank():
    placement = Placement(dp=8)
    (kept,) = set(by_rank(placement, of_preset("llama3-8b", placement, "NO_SHARD")))
    size = 4 * 8_030_261_248
    assert kept == PersistentBytes(size, (("exp_avg", size), ("exp_avg_sq", size)))
