"""Models of Llama's kind with all that sets them apart: biases of queries, keys and values (Qwen2),
norms of heads (Qwen3), heads of their own width, scaled rotations, a tied head."""

from __future__ import annotations

from dataclasses import replace

import pytest

from megagrid.grid.placement import Placement
from tests.equivalence.case import SP, TIED, Case, Keys, Variant, schedule, shape, strategy

ALL = Variant("llama", steps=3).having(
    TIED,
    ("model.qkv_bias", True),
    ("model.qk_norm", True),
    ("model.head_dim", 6),
    ("model.rope_scaling", "llama3"),
    ("model.rope_scaling_factor", 4.0),
    ("model.rope_low_freq_factor", 1.0),
    ("model.rope_high_freq_factor", 2.0),
    ("model.rope_original_max_seq_length", 8),
)
"""Together, which no published model has: what one of them spoils, it spoils here too."""

GRIDS: list[tuple[Placement, Keys]] = [
    # A key/value head on two ranks: its norm and its bias have gradients of several sums.
    (Placement(tp=4), ()),
    (Placement(tp=4), (SP,)),
    (Placement(tp=2, pp=2), (SP, schedule("ZB1P"))),
    (Placement(tp=2, dp=2), (strategy("FULL_SHARD"),)),
    (Placement(pp=2, dp=2), (strategy("NO_SHARD"),)),
]


@pytest.mark.parametrize(
    ("placement", "keys"),
    GRIDS,
    ids=lambda value: shape(value) if isinstance(value, Placement) else "",
)
def test_families_train_alike_on_every_grid(equivalence, placement, keys):
    equivalence.check([Case(ALL, placement, 2 if placement.dp == 1 else 1, keys)])


@pytest.mark.parametrize("placement", [Placement(tp=4), Placement(tp=2, pp=2)], ids=shape)
def test_deviations_of_families_vanish_in_fp64(equivalence, placement):
    """A norm of few channels divides by what may be small: its roundings are large, but no more."""
    equivalence.check([Case(replace(ALL, precision="fp64"), placement, 2)])
