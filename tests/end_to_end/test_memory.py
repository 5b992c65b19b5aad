"""What ranks keep from step to step is their share, to the byte."""

from __future__ import annotations

import pytest

from megagrid.config.schema import Config
from megagrid.grid.placement import Placement
from megagrid.plan.memory import PersistentBytes, persistent_bytes
from megagrid.train.run import Run
from tests.end_to_end.t0 import (
    BF16,
    DP2,
    DP4,
    GPT,
    PP2,
    PP2DP2,
    SP,
    TIED,
    TP2,
    TP2DP2,
    TP2PP2,
    TP4,
    merged,
    strategy,
)

DP3 = Placement(dp=3)
STRATEGIES = ("FULL_SHARD", "SHARD_GRAD_OP", "ZERO1", "NO_SHARD")
ROUNDED = {"optimizer": {"state_dtype": "bf16"}}
HYBRID = {"parallel": {"sharding_strategy": "HYBRID_SHARD", "shard_size": 2}}
KEEP_NORMS = {"parallel": {"unsharded_modules": ["norm", "layers.*_norm", "layers.1.attention"]}}


def kept_by_engine(run: Run) -> PersistentBytes:
    """What the storages of the engine's tensors take."""
    shards, optimizer = run.engine.shards, run.engine.optimizer
    return PersistentBytes(
        sum(shard.tensor.untyped_storage().nbytes() for shard in shards),
        tuple(
            (
                name,
                sum(s.untyped_storage().nbytes() for s in optimizer.states(name) if s is not None),
            )
            for name in sorted(optimizer.state_names)
        ),
    )


def by_rank(config: Config, placement: Placement) -> list[PersistentBytes]:
    """The closed form of every rank."""
    return [
        persistent_bytes(config, placement, placement.coordinate(rank))
        for rank in range(placement.world_size)
    ]


@pytest.mark.parametrize(
    ("placement", "keys"),
    [
        *(pytest.param(DP2, strategy(name), id=f"dp2-{name}") for name in STRATEGIES),
        *(pytest.param(DP3, strategy(name), id=f"dp3-uneven-{name}") for name in STRATEGIES),
        pytest.param(TP2, TIED, id="tp2-tied"),
        pytest.param(PP2, TIED, id="pp2-tied"),
        pytest.param(PP2, {"parallel": {"layers_per_stage": [3, 1]}}, id="pp2-uneven"),
        pytest.param(TP4, {}, id="tp4-shared-kv-heads"),
        pytest.param(TP2PP2, merged(SP, GPT), id="tp2pp2-sp-gpt"),
        pytest.param(TP2DP2, {"model": {"make_vocab_size_divisible_by": 8}}, id="tp2dp2-padded"),
        pytest.param(PP2DP2, merged(BF16, GPT, TIED), id="pp2dp2-bf16-gpt-tied"),
        pytest.param(DP2, {"train": {"precision": "fp64"}}, id="dp2-fp64"),
        pytest.param(DP4, HYBRID, id="dp4-hybrid"),
        pytest.param(DP4, merged(HYBRID, KEEP_NORMS), id="dp4-hybrid-norms-whole"),
        pytest.param(TP2DP2, merged(KEEP_NORMS, SP), id="tp2dp2-norms-whole"),
        pytest.param(PP2DP2, merged(strategy("ZERO1"), BF16, TIED), id="pp2dp2-zero1-bf16"),
        pytest.param(DP3, {"memory": {"cpu_offload": True}}, id="dp3-offload"),
        pytest.param(DP3, ROUNDED, id="dp3-rounded"),
        pytest.param(TP2PP2, merged(ROUNDED, SP), id="tp2pp2-rounded"),
        pytest.param(DP2, merged(ROUNDED, strategy("ZERO1")), id="dp2-zero1-rounded"),
        pytest.param(TP2DP2, {"model": {"qkv_bias": True, "qk_norm": True}}, id="tp2dp2-qwen"),
    ],
)
def test_every_rank_keeps_what_the_closed_form_says(trainer, placement, keys):
    batch = {"train": {"global_batch_size": 2 * placement.dp * 2}}
    training = trainer.train(placement, batch, keys, work=kept_by_engine)
    found = [report.result for report in training.ranks]
    assert found == by_rank(training.config, placement)


def run_and_look(run: Run) -> PersistentBytes:
    run.run()
    assert all(shard.grad is None for shard in run.engine.shards)
    for stage in run.engine.executor.stages.values():
        for name, parameter in stage.module.named_parameters():
            assert hasattr(parameter, "placements"), f"{name} is still gathered"
    return kept_by_engine(run)


def test_a_step_leaves_nothing_more(trainer):
    """Gradients are gone after it, and gathered parameters too."""
    placement = PP2DP2
    training = trainer.train(placement, {"train": {"steps": 2}}, work=run_and_look)
    found = [report.result for report in training.ranks]
    assert found == by_rank(training.config, placement)
