"""Every grid computes what one process computes: losses, norms, every gradient, every weight."""

from __future__ import annotations

from dataclasses import replace

import pytest

from megagrid.grid.placement import Placement
from tests.equivalence.case import (
    GLOBAL_BATCH,
    GPT,
    GRIDS,
    LARGEST_WORLD,
    LLAMA,
    SP,
    TIED,
    Case,
    Variant,
    schedule,
    shape,
)

VARIANTS = [LLAMA, LLAMA.having(TIED), GPT, GPT.having(TIED)]


def cases(variant: Variant, placement: Placement) -> list[Case]:
    """The variant on the grid in all ways: with and without sequence parallelism, each schedule.
    Eight ranks take their time, and make fewer steps."""
    if placement.world_size == LARGEST_WORLD:
        variant = replace(variant, steps=3)
    return [
        Case(variant, placement, micro_batch(placement), (*sequence_parallel, *pipelined))
        for sequence_parallel in ([(), (SP,)] if placement.tp > 1 else [()])
        for pipelined in ([(schedule("1F1B"),), (schedule("GPipe"),)] if placement.pp > 1 else [()])
    ]


def micro_batch(placement: Placement) -> int:
    """Samples of a microbatch: twice as many microbatches as stages, as many on eight ranks."""
    microbatches = placement.pp * (1 if placement.world_size == LARGEST_WORLD else 2)
    return GLOBAL_BATCH // min(microbatches * placement.dp, GLOBAL_BATCH)


@pytest.mark.parametrize("variant", VARIANTS, ids=str)
@pytest.mark.parametrize(
    "placement",
    [
        pytest.param(p, marks=[pytest.mark.slow] if p.world_size == LARGEST_WORLD else [])
        for p in sorted(GRIDS, key=lambda p: p.world_size)
    ],
    ids=shape,
)
def test_grid_trains_like_one_process(equivalence, placement, variant):
    equivalence.check(cases(variant, placement))


@pytest.mark.parametrize("variant", [LLAMA, GPT.having(TIED)], ids=str)
@pytest.mark.parametrize(
    "placement",
    [
        Placement(tp=2),
        Placement(pp=2),
        Placement(dp=2),
        Placement(tp=2, pp=2),
    ],
    ids=shape,
)
def test_deviations_vanish_in_fp64(equivalence, placement, variant):
    """What is left of them is 2^-29 of fp32's: they are roundings, and nothing else."""
    equivalence.check(cases(replace(variant, precision="fp64"), placement))
