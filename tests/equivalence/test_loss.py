"""Losses in chunks of tokens, and with a z-loss, are those of one process, on every grid."""

from __future__ import annotations

from dataclasses import replace

import pytest

from megagrid.grid.placement import Placement
from tests.equivalence.case import SP, TIED, Case, Keys, Variant, schedule, shape, strategy
from tests.equivalence.trainer import train

VARIANTS = [
    Variant("llama", steps=3).having(("train.z_loss", 0.01)),
    Variant("gpt", steps=3).having(TIED, ("train.z_loss", 0.01)),
]


def chunks(tokens: int) -> Keys:
    return (("train.loss_chunk_tokens", tokens),)


GRIDS = [
    (Placement(), ()),
    (Placement(tp=2), ()),
    (Placement(tp=2), (SP,)),
    (Placement(pp=2), (schedule("1F1B"),)),
    (Placement(pp=2), (schedule("ZB1P"),)),
    (Placement(dp=2), (strategy("FULL_SHARD"), ("parallel.wrap_head", True))),
    (Placement(dp=2), (strategy("SHARD_GRAD_OP"),)),
    (Placement(tp=2, pp=2), (SP, schedule("ZB1P"))),
]


@pytest.mark.parametrize(
    ("placement", "keys"),
    GRIDS,
    ids=lambda value: shape(value) if isinstance(value, Placement) else None,
)
def test_chunks_and_z_loss_change_nothing(equivalence, placement, keys):
    """64 tokens a microbatch: in one piece, in chunks with a rest, in one chunk."""
    equivalence.check(
        [
            Case(variant, placement, 2, (*keys, *chunks(tokens)))
            for variant in VARIANTS
            for tokens in (0, 24, 100)
        ]
    )


def test_chunks_in_bf16_stay_within_its_roundings(equivalence):
    variants = [replace(variant, precision="bf16") for variant in VARIANTS]
    equivalence.check([Case(v, Placement(dp=2), 2, chunks(24)) for v in variants])


def test_a_z_loss_changes_gradients_and_no_loss_of_the_first_step(ranks):
    """What is reported is the cross-entropy."""
    with_z, without = train(ranks, [Case(v) for v in (VARIANTS[0], Variant("llama", steps=3))])
    assert with_z.losses[0] == without.losses[0]
    assert with_z.grad_norms[0] != without.grad_norms[0]
    assert with_z.losses[1:] != without.losses[1:]
