"""What else may not change the result: sharding strategies, uneven cuts, shared heads, dropout,
padding, precision. Pipeline schedules have a file of their own."""

from __future__ import annotations

import importlib.util
from dataclasses import replace
from itertools import groupby

import pytest

from megagrid.grid.placement import Placement
from tests.equivalence.case import SP, TIED, Case, Keys, Variant, schedule, shape, strategy

LLAMA, GPT = Variant("llama", steps=3), Variant("gpt", steps=3)

STRATEGIES = ("FULL_SHARD", "SHARD_GRAD_OP", "ZERO1", "NO_SHARD")


@pytest.mark.parametrize(
    ("placement", "keys"),
    [
        pytest.param(Placement(tp=2, dp=2), (SP,), marks=pytest.mark.slow),
        (Placement(pp=2, dp=2), ()),
    ],
    ids=lambda value: shape(value) if isinstance(value, Placement) else "",
)
def test_sharding_strategy_changes_nothing(equivalence, placement, keys):
    """With two microbatches a rank, so that gradients accumulate before they are reduced."""
    equivalence.check(
        [
            Case(variant, placement, 8 // (2 * placement.dp), (*keys, strategy(name)))
            for variant in (LLAMA, GPT.having(TIED))
            for name in STRATEGIES
        ]
    )


def test_shards_of_uneven_size_change_nothing(equivalence):
    """32 rows over 3 ranks are 11, 11 and 10; 62 are 21, 21 and 20."""
    variant = LLAMA.having(("train.global_batch_size", 6))
    equivalence.check([Case(variant, Placement(dp=3), 1, (strategy(s),)) for s in STRATEGIES])


@pytest.mark.slow
def test_shards_without_rows_change_nothing(equivalence):
    """Norms of 4 numbers over 8 ranks: some own none."""
    variant = LLAMA.having(("model.hidden_size", 4), ("model.head_dim", 2), ("model.vocab_size", 9))
    equivalence.check([Case(variant, Placement(dp=8), 1, (strategy("FULL_SHARD"),))])


@pytest.mark.parametrize(
    ("kv_heads", "placement", "keys"),
    [
        (1, Placement(tp=2), ()),
        (1, Placement(tp=2), (SP,)),
        (1, Placement(tp=4), (SP,)),
        (2, Placement(tp=4), ()),
        (2, Placement(tp=4), (SP,)),
        (8, Placement(tp=4), (SP,)),
        (1, Placement(tp=2, dp=2), (strategy("FULL_SHARD"),)),
    ],
)
def test_shared_key_value_heads_change_nothing(equivalence, kv_heads, placement, keys):
    """Fewer than tp ranks: each is on several ranks, which have summands of its gradient
    (bigcode Megatron-LM #37; torchtitan #2574)."""
    variant = LLAMA.having(("model.num_kv_heads", kv_heads))
    equivalence.check([Case(variant, placement, 4, keys)])


@pytest.mark.parametrize(
    "placement",
    [
        Placement(tp=2),
        Placement(pp=2),
        Placement(dp=2),
        Placement(tp=4),
        Placement(tp=2, pp=2),
        pytest.param(Placement(tp=2, pp=2, dp=2), marks=pytest.mark.slow),
    ],
    ids=shape,
)
def test_dropout_drops_the_same_on_every_grid(equivalence, placement):
    variant = GPT.having(("model.dropout", 0.3), ("model.attention_dropout", 0.2))
    sequence_parallel: list[Keys] = [(), (SP,)] if placement.tp > 1 else [()]
    cases = [Case(variant, placement, 4 // placement.dp, keys) for keys in sequence_parallel]
    equivalence.check(cases)


PIPELINES = [
    # Fewer microbatches than stages.
    Case(LLAMA, Placement(pp=4), 4, (schedule("1F1B"),)),
    Case(LLAMA, Placement(pp=4), 8, (schedule("GPipe"),)),
    # Layers in uneven shares, and stages without any.
    Case(LLAMA, Placement(pp=2), 2, (("parallel.layers_per_stage", [1, 4]),)),
    Case(LLAMA.having(TIED), Placement(pp=2), 2, (("parallel.layers_per_stage", [0, 5]),)),
    Case(GPT.having(TIED), Placement(pp=2), 2, (("parallel.layers_per_stage", [5, 0]),)),
    Case(GPT, Placement(pp=4), 2, (("parallel.layers_per_stage", [2, 0, 1, 2]),)),
    Case(LLAMA, Placement(pp=3, dp=2), 1, (("parallel.layers_per_stage", [2, 0, 3]),)),
]


@pytest.mark.parametrize(
    "cases",
    [
        pytest.param(list(group), id=shape(placement))
        for placement, group in groupby(
            sorted(PIPELINES, key=lambda case: shape(case.placement)), lambda c: c.placement
        )
    ],
)
def test_pipelines_of_any_form_change_nothing(equivalence, cases):
    equivalence.check(cases)


def test_ranks_without_vocabulary_change_nothing(equivalence):
    """61 ids padded to 256 or 512: all are the first rank's."""
    variant = LLAMA.having(TIED, ("model.make_vocab_size_divisible_by", 128))
    equivalence.check([Case(variant, Placement(tp=2), 4, keys) for keys in ((), (SP,))])
    equivalence.check([Case(variant, Placement(tp=4), 4, (SP,))])


def test_sequences_shorter_than_the_positions_change_nothing(equivalence):
    """Positions that no token has get no gradient, and ranks share out 12, not 32."""
    variant = GPT.having(("train.seq_length", 12))
    equivalence.check([Case(variant, Placement(tp=2), 4, keys) for keys in ((), (SP,))])


@pytest.mark.parametrize(
    ("placement", "keys"),
    [
        (Placement(tp=2), (SP,)),
        (Placement(pp=2), (schedule("ZB1P"),)),
        (Placement(dp=2), (strategy("FULL_SHARD"),)),
        (Placement(dp=2), (strategy("NO_SHARD"),)),
        pytest.param(Placement(tp=2, pp=2), (SP, schedule("ZB1P")), marks=pytest.mark.slow),
    ],
    ids=lambda value: shape(value) if isinstance(value, Placement) else "",
)
def test_fp16_computes_the_same_up_to_its_roundings(equivalence, placement, keys):
    """Gradients are of the loss times 2^16; norms, clipping and weights know nothing of it."""
    variant = replace(LLAMA, precision="fp16", steps=2)
    equivalence.check([Case(variant, placement, 8 // (2 * placement.dp), keys)])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("placement", "keys"),
    [
        (Placement(tp=2), ()),
        (Placement(tp=2), (SP,)),
        (Placement(dp=2), (strategy("FULL_SHARD"),)),
        (Placement(dp=2), (strategy("NO_SHARD"),)),
        (Placement(tp=2, pp=2), (SP,)),
    ],
    ids=lambda value: shape(value) if isinstance(value, Placement) else "",
)
def test_bf16_computes_the_same_up_to_its_roundings(equivalence, placement, keys):
    """Weights and reductions are fp32: they begin bit-equal and stay within fp32's step."""
    variants = [replace(v, precision="bf16") for v in (LLAMA, GPT.having(TIED))]
    equivalence.check([Case(v, placement, 8 // (2 * placement.dp), keys) for v in variants])


@pytest.mark.skipif(
    importlib.util.find_spec("torchao") is None, reason='needs pip install "megagrid[float8]"'
)
@pytest.mark.parametrize(
    ("placement", "keys"),
    [
        (Placement(pp=2), ()),
        (Placement(dp=2), (strategy("FULL_SHARD"),)),
        (Placement(tp=2), (SP,)),
        (Placement(tp=2, pp=2), (SP,)),
    ],
    ids=lambda value: shape(value) if isinstance(value, Placement) else "",
)
def test_float8_computes_the_same_up_to_its_roundings(equivalence, placement, keys):
    """Scales are of what a rank multiplies at once, so that those of grids differ."""
    variant = replace(LLAMA, precision="bf16", steps=2).having(("train.float8", "emulated"))
    equivalence.check([Case(variant, placement, 8 // (2 * placement.dp), keys)])
