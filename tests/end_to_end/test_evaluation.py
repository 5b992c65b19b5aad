"""Evaluation in the loop looks on and changes nothing."""

from __future__ import annotations

import pytest

from tests.end_to_end.t0 import (
    ALONE,
    DP2,
    DROPOUT,
    GPT,
    PP2,
    PP2DP2,
    TP2,
    TP2PP2,
    computed,
    differing,
    merged,
    name_of,
    strategy,
)

SMALL = {"model": {"num_layers": 2}, "train": {"steps": 4}}
EVERY_STEP = {
    "data": {"valid_fraction": 0.1},
    "evaluation": {"interval": 1, "batches": 2},
}


@pytest.mark.parametrize(
    ("placement", "keys"),
    [
        pytest.param(placement, keys, id=f"{name_of(placement)}-{name}")
        for placement, keys, name in (
            (ALONE, {}, "llama"),
            (DP2, strategy("FULL_SHARD"), "full_shard"),
            (DP2, strategy("SHARD_GRAD_OP"), "shard_grad_op"),
            (DP2, strategy("NO_SHARD"), "no_shard"),
            (DP2, merged(strategy("SHARD_GRAD_OP"), GPT, DROPOUT), "shard_grad_op-dropout"),
            (DP2, merged(strategy("NO_SHARD"), {"train": {"precision": "bf16"}}), "no_shard-bf16"),
            (PP2DP2, strategy("SHARD_GRAD_OP"), "shard_grad_op"),
            (TP2PP2, merged(GPT, DROPOUT), "dropout"),
        )
    ],
)
def test_training_is_the_same_with_and_without_evaluation(trainer, placement, keys):
    """Bit by bit. Parameters that a forward alone had left gathered would be stale in the next
    step, and the losses those of older weights."""
    with_it = trainer.train(placement, SMALL, keys, EVERY_STEP)
    without = trainer.train(placement, SMALL, keys)
    assert all(record.valid_loss is not None for record in with_it.records)
    assert computed(without.records) == [
        step | {"valid_loss": None} for step in computed(with_it.records)
    ]
    assert differing(with_it.tensors(4), without.tensors(4)) == []


@pytest.mark.parametrize(
    ("placement", "keys"),
    [
        (TP2, {}),
        (PP2, {}),
        (DP2, strategy("FULL_SHARD")),
        (DP2, strategy("SHARD_GRAD_OP")),
        (DP2, strategy("NO_SHARD")),
    ],
    ids=["tp2", "pp2", "dp2-full_shard", "dp2-shard_grad_op", "dp2-no_shard"],
)
def test_the_validation_loss_is_of_the_new_weights_on_every_grid(trainer, placement, keys):
    expected = trainer.reference(SMALL, EVERY_STEP).records
    found = trainer.train(placement, SMALL, keys, EVERY_STEP).records
    for record, other in zip(found, expected, strict=True):
        assert record.valid_loss == pytest.approx(other.valid_loss, abs=1e-5)
    losses = [record.valid_loss for record in expected]
    assert len(set(losses)) == len(losses), "an evaluation with old weights repeats the former one"


@pytest.mark.parametrize(("interval", "steps"), [(0, [8]), (3, [3, 6, 8]), (4, [4, 8]), (100, [8])])
def test_evaluations_are_due_at_each_interval_and_at_the_end(trainer, interval, steps):
    keys = {"evaluation": {"interval": interval, "batches": 1}, "data": {"valid_fraction": 0.1}}
    records = trainer.train(ALONE, keys, {"model": {"num_layers": 1}}).records
    assert [record.step for record in records if record.valid_loss is not None] == steps
