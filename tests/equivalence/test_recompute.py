"""Backward's second forward changes no bit of a run, on no grid."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from megagrid.grid.placement import Placement
from tests.equivalence.case import SP, TIED, Case, Keys, Variant, schedule, shape, strategy
from tests.equivalence.trainer import Run, train

LLAMA = Variant("llama", steps=2)
GPT = Variant("gpt", steps=2).having(TIED, ("model.dropout", 0.1), ("model.attention_dropout", 0.1))


def recompute(kind: str, interval: int = 1) -> Keys:
    return (("memory.recompute", kind), ("memory.recompute_interval", interval))


OFFLOAD = ("memory.activation_offload", True)

KINDS = [recompute("none"), recompute("selective"), recompute("full"), recompute("full", 2)]

ZBV = (schedule("ZBV"), ("parallel.virtual_pipeline_size", 2))


def assert_same_bits(found: Run, expected: Run) -> None:
    assert (found.losses, found.grad_norms) == (expected.losses, expected.grad_norms)
    for models in ("gradients", "final"):
        mine, theirs = getattr(found, models), getattr(expected, models)
        for name, tensor in theirs.items():
            assert np.array_equal(mine[name], tensor), f"{models}: {name}"


@pytest.mark.parametrize("variant", [LLAMA, GPT], ids=["llama", "gpt with dropout"])
@pytest.mark.parametrize(
    ("placement", "keys"),
    [
        (Placement(), ()),
        (Placement(tp=2), ()),
        (Placement(tp=2), (SP,)),
        (Placement(pp=2), (schedule("1F1B"),)),
        (Placement(pp=2), (schedule("ZB1P"),)),
        (Placement(dp=2), (strategy("FULL_SHARD"),)),
        (Placement(tp=2, pp=2), (SP, *ZBV)),
        (Placement(pp=2, dp=2), (schedule("ZB1P"), strategy("SHARD_GRAD_OP"))),
    ],
    ids=lambda value: shape(value) if isinstance(value, Placement) else None,
)
def test_recomputation_changes_no_bit(equivalence, variant, placement, keys):
    """With dropout too: a second forward draws the first one's masks (OLMo-core #828)."""
    cases = [Case(variant, placement, 2, (*keys, *kind)) for kind in KINDS]
    without, *others = equivalence.check(cases)
    for run in others:
        assert_same_bits(run, without)


@pytest.mark.parametrize(
    ("placement", "keys"),
    [
        (Placement(tp=2), (SP,)),
        (Placement(cp=2), ()),
        (Placement(pp=2), (schedule("ZB1P"),)),
        (Placement(dp=2), (("parallel.blocks_per_unit", 2),)),
        (Placement(tp=2, pp=2), (SP, *ZBV)),
    ],
    ids=lambda value: shape(value) if isinstance(value, Placement) else None,
)
def test_what_lies_on_the_host_meanwhile_changes_no_bit(equivalence, placement, keys):
    """Whatever is recomputed of it; in bf16 too, where parameters are gathered."""
    for variant in (LLAMA, GPT):
        kinds = [KINDS[0], *((*kind, OFFLOAD) for kind in KINDS)]
        without, *others = equivalence.check(
            [Case(variant, placement, 2, (*keys, *kind)) for kind in kinds]
        )
        for run in others:
            assert_same_bits(run, without)


@pytest.mark.parametrize(
    ("placement", "keys"),
    [
        (Placement(tp=2), (SP,)),
        (Placement(dp=2), ()),
        (Placement(pp=2), (schedule("ZB1P"),)),
    ],
    ids=lambda value: shape(value) if isinstance(value, Placement) else None,
)
def test_nor_in_bf16(ranks, placement, keys):
    variant = replace(LLAMA, precision="bf16")
    cases = [Case(variant, placement, 2, (*keys, *kind)) for kind in KINDS]
    without, *others = train(ranks, cases)
    for run in others:
        assert_same_bits(run, without)
