"""Each optimizer gives the same updates on every grid."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from unittest.mock import patch

import pytest
from torch import Tensor

from megagrid.grid.placement import Placement
from megagrid.optim.muon import Muon
from megagrid.train.build import Engine
from tests.equivalence.case import SP, TIED, Case, Variant, strategy

LLAMA, GPT = Variant("llama", steps=3), Variant("gpt", steps=3)

MUON = (("optimizer.name", "muon"), ("optimizer.adamw_lr", 2e-3))

MUP = (("model.mup_base_width", 8), ("model.mup_base_head_dim", 2))

OPTIMIZERS = {
    "muP": MUP,
    "adamw with rounded moments": (("optimizer.state_dtype", "bf16"),),
    "muon": MUON,
    "muon as first published": (
        ("optimizer.name", "muon"),
        ("optimizer.muon_scale", "original"),
        ("optimizer.nesterov", False),
    ),
    "sgd": (("optimizer.name", "sgd"), ("optimizer.lr", 0.1)),
    "sgd without Nesterov": (
        ("optimizer.name", "sgd"),
        ("optimizer.nesterov", False),
        ("optimizer.momentum", 0.5),
    ),
}


def grids(variant: Variant) -> dict[int, list[Case]]:
    """The variant on grids of two and of four ranks."""
    tied = variant.having(TIED)
    return {
        2: [
            Case(variant, Placement(tp=2), 4),
            Case(variant, Placement(tp=2), 4, (SP,)),
            Case(variant, Placement(dp=2), 2),
            Case(variant, Placement(dp=2), 4, (strategy("NO_SHARD"),)),
            Case(variant, Placement(cp=2), 4),
            Case(tied, Placement(pp=2), 4),
        ],
        4: [
            Case(variant, Placement(tp=4), 8),
            Case(variant, Placement(tp=2, pp=2), 4, (SP,)),
            Case(variant, Placement(tp=2, dp=2), 4),
        ],
    }


@pytest.mark.parametrize("world_size", [2, 4])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_updates_are_those_of_one_process(equivalence, name, world_size):
    equivalence.check(grids(LLAMA.having(*OPTIMIZERS[name]))[world_size])


@contextmanager
def a_row_a_thousandth_off(engine: Engine) -> Iterator[None]:
    """Of what the second rank makes of its matrices."""
    original = Muon._orthogonal

    def orthogonal(muon: Muon, matrix: Tensor) -> Tensor:
        result = original(muon, matrix).clone()
        result[0] *= 1.001 if engine.grid.rank == 1 else 1.0
        return result

    with patch.object(Muon, "_orthogonal", orthogonal):
        yield


def test_an_update_that_is_a_thousandth_off_is_found(equivalence):
    """The bound is far below what a matrix cut the wrong way would be off by."""
    case = Case(replace(LLAMA, steps=1).having(*MUON), Placement(tp=2), 4)
    with pytest.raises(AssertionError, match=r"weight off by .*, layers\.\d\.(mlp|attention)"):
        equivalence.check([case], a_row_a_thousandth_off)


@pytest.mark.parametrize("family", [LLAMA, GPT], ids=str)
@pytest.mark.parametrize("name", ["sgd", "muon", "muP"])
def test_updates_agree_in_float64_to_its_roundings(equivalence, name, family):
    variant = replace(family, precision="fp64").having(*OPTIMIZERS[name])
    equivalence.check([Case(variant, Placement(tp=2, dp=2), 4, (SP,))])
