"""Ranks that share each sample's tokens compute what one process does, whichever way they attend
(Megatron-LM #1464, #560: wrong gradients and positions under context parallelism)."""

from __future__ import annotations

from dataclasses import replace

import pytest

from megagrid.grid.placement import Placement
from tests.equivalence.case import (
    GPT,
    LLAMA,
    SP,
    TIED,
    Case,
    exchange,
    schedule,
    shape,
    strategy,
)

EXCHANGES = [exchange(name) for name in ("all_gather", "ring", "ulysses")]
VARIANTS = [LLAMA, GPT.having(TIED)]
SHORT = [replace(variant, steps=3) for variant in VARIANTS]


@pytest.mark.parametrize(
    ("cp", "variant"),
    [
        (2, LLAMA),
        (2, VARIANTS[1]),
        (4, LLAMA),
        pytest.param(4, VARIANTS[1], marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_ranks_that_share_samples_have_the_same_losses(equivalence, cp, variant):
    """All eight steps."""
    equivalence.check([Case(variant, Placement(cp=cp), 8, (way,)) for way in EXCHANGES])


@pytest.mark.parametrize(
    ("placement", "keys"),
    [
        pytest.param(Placement(tp=2, cp=2), (), marks=pytest.mark.slow),
        (Placement(tp=2, cp=2), (SP,)),
        pytest.param(Placement(pp=2, cp=2), (schedule("1F1B"),), marks=pytest.mark.slow),
        (Placement(pp=2, cp=2), (schedule("ZB1P"),)),
        (Placement(dp=2, cp=2), ()),
        (Placement(dp=2, cp=2), (strategy("NO_SHARD"),)),
    ],
    ids=lambda value: shape(value) if isinstance(value, Placement) else "-".join(dict(value)),
)
def test_sharing_samples_goes_with_the_other_axes(equivalence, placement, keys):
    llama, gpt = SHORT
    ways = [Case(llama, placement, 4 // placement.dp, (*keys, way)) for way in EXCHANGES]
    ring_of_gpt = Case(gpt, placement, 4 // placement.dp, (*keys, EXCHANGES[1]))
    equivalence.check([*ways, ring_of_gpt])


@pytest.mark.slow
@pytest.mark.parametrize("way", EXCHANGES[:2], ids=lambda way: way[1])
@pytest.mark.parametrize(
    ("placement", "keys"),
    [
        (Placement(tp=2, pp=2, cp=2), (SP,)),
        (Placement(cp=2, dp=2, pp=2), (strategy("SHARD_GRAD_OP"),)),
    ],
    ids=lambda value: shape(value) if isinstance(value, Placement) else "-".join(dict(value)),
)
def test_sharing_samples_goes_with_two_more_axes(equivalence, placement, keys, way):
    equivalence.check([Case(SHORT[0], placement, 2, (*keys, way))])


@pytest.mark.parametrize("placement", [Placement(cp=2), Placement(tp=2, cp=2)], ids=shape)
def test_deviations_vanish_in_fp64(equivalence, placement):
    sequence_parallel = (SP,) if placement.tp > 1 else ()
    equivalence.check(
        [
            Case(replace(variant, precision="fp64"), placement, 4, (*sequence_parallel, way))
            for variant in [replace(variant, steps=1) for variant in SHORT]
            for way in EXCHANGES
        ]
    )


def test_fewer_key_heads_than_ranks_change_nothing(equivalence):
    """On each of cp ranks a copy goes to each that has queries of it; on tp ranks it is copied
    already."""
    variant = SHORT[0].having(("model.num_kv_heads", 1), ("model.qk_norm", True))
    placements = (Placement(cp=4), Placement(tp=2, cp=2))
    equivalence.check([Case(variant, p, 8, (way,)) for p in placements for way in EXCHANGES])


def test_dropout_drops_the_same(equivalence):
    variant = SHORT[1].having(("model.dropout", 0.3), ("model.attention_dropout", 0.2))
    ways = [exchange("all_gather"), exchange("ulysses")]
    for placement, keys in ((Placement(cp=2), ()), (Placement(tp=2, cp=2), (SP,))):
        equivalence.check([Case(variant, placement, 4, (*keys, way)) for way in ways])
