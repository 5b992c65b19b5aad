"""Every grid begins with the same model, no two tensors of which are the same."""

from __future__ import annotations

from dataclasses import replace
from itertools import combinations

import numpy as np
import pytest

from megagrid.grid.placement import Placement
from tests.equivalence.case import GPT, LLAMA, TIED, Case, shape, strategy


def initial(equivalence, variant):
    return equivalence.one_process(replace(variant, steps=1)).initial


@pytest.mark.parametrize("name", ["FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD"])
def test_data_parallel_ranks_begin_with_one_model(equivalence, name):
    """torchtitan #166: DP ranks started from different weights."""
    case = Case(replace(LLAMA, steps=1), Placement(dp=4), 1, (strategy(name),))
    (run,) = equivalence.check_steps([case])
    for tensor, values in initial(equivalence, LLAMA).items():
        assert np.array_equal(run.initial[tensor], values), tensor


@pytest.mark.parametrize(
    "placement",
    [Placement(tp=2), Placement(tp=4), Placement(pp=4), Placement(tp=2, pp=2)],
    ids=shape,
)
@pytest.mark.parametrize("variant", [LLAMA, GPT.having(TIED)], ids=str)
def test_any_grid_begins_with_the_model_of_one_process(equivalence, variant, placement):
    """torchtitan #1750, #1363: sharded before initialised, or stages with one seed."""
    (run,) = equivalence.check_steps([Case(replace(variant, steps=1), placement, 2)])
    expected = initial(equivalence, variant)
    assert run.initial.keys() == expected.keys()
    for tensor, values in expected.items():
        assert np.array_equal(run.initial[tensor], values), tensor


@pytest.mark.parametrize("variant", [LLAMA, GPT.having(TIED)], ids=str)
def test_no_two_layers_or_shards_begin_alike(equivalence, variant):
    """Nor do a layer's matrices: whatever cuts of theirs have one shape differ everywhere."""
    pieces = [
        (f"{name}, {part} of {parts}", cut)
        for name, values in initial(equivalence, variant).items()
        if values.ndim == 2
        for parts in (1, 2, 4)
        for part, cut in enumerate(np.array_split(values, parts))
    ]
    for (one, a), (other, b) in combinations(pieces, 2):
        if a.shape == b.shape:
            # Of 48 random bits each, rounded to float32's 24, a few may be equal.
            assert (a == b).mean() < 0.01, f"{one} begins like {other}"


def test_tied_ends_begin_as_one_table(equivalence):
    """Both ends are compared bit by bit where a run is put together."""
    case = Case(replace(LLAMA.having(TIED), steps=1), Placement(pp=4), 2)
    (run,) = equivalence.check_steps([case])
    assert "head.weight" not in run.initial
