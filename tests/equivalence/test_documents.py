"""Documents that see nothing of each other: every grid computes what one process does, and what
comes of a document depends on no other (nanoVLM #204)."""

from __future__ import annotations

from dataclasses import replace

import pytest

from megagrid.grid.placement import Placement
from tests.equivalence.case import GPT, LLAMA, SP, Case, exchange, schedule, shape

MASK = ("data.document_mask", True)
RESET = ("data.reset_positions", False)
VARIANTS = [
    replace(LLAMA.having(MASK), steps=3),
    replace(GPT.having(MASK), steps=3),
]
EXCHANGES = [exchange(name) for name in ("all_gather", "ring", "ulysses")]


@pytest.mark.parametrize(
    ("placement", "keys"),
    [
        (Placement(tp=2), (SP,)),
        (Placement(pp=2), (schedule("ZB1P"),)),
        (Placement(dp=2), ()),
    ],
    ids=lambda value: shape(value) if isinstance(value, Placement) else "",
)
def test_documents_are_masked_the_same_on_every_grid(equivalence, placement, keys):
    equivalence.check([Case(variant, placement, 4, keys) for variant in VARIANTS])


@pytest.mark.parametrize(
    ("placement", "keys"),
    [
        (Placement(cp=2), ()),
        pytest.param(Placement(cp=4), (), marks=pytest.mark.slow),
        (Placement(tp=2, cp=2), (SP,)),
        (Placement(pp=2, cp=2), ()),
    ],
    ids=lambda value: shape(value) if isinstance(value, Placement) else "",
)
def test_documents_over_ranks_are_masked_the_same(equivalence, placement, keys):
    llama, gpt = VARIANTS
    cases = [Case(llama, placement, 4, (*keys, way)) for way in EXCHANGES]
    equivalence.check([*cases, Case(gpt.having(RESET), placement, 4, (*keys, EXCHANGES[1]))])


def test_masked_documents_deviate_by_roundings_alone(equivalence):
    variant = replace(VARIANTS[0], precision="fp64", steps=1)
    equivalence.check([Case(variant, Placement(cp=2), 4, (way,)) for way in EXCHANGES])


def test_dropout_drops_the_same_in_documents(equivalence):
    variant = VARIANTS[1].having(("model.attention_dropout", 0.2))
    equivalence.check([Case(variant, Placement(cp=2), 4, (EXCHANGES[way],)) for way in (0, 2)])
