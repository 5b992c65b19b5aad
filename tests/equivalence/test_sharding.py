"""What is split over which ranks, and when it is gathered, changes nothing: each strategy and each
key of sharding, on grids of two and four ranks."""

from __future__ import annotations

from dataclasses import replace

import pytest

from megagrid.grid.placement import Placement
from tests.equivalence.case import SP, TIED, Case, Keys, Variant, schedule, shape, strategy

LLAMA, GPT = Variant("llama", steps=2), Variant("gpt", steps=2)

HYBRID: Keys = (strategy("HYBRID_SHARD"), ("parallel.shard_size", 2))
ZERO1: Keys = (strategy("ZERO1"),)
OFFLOAD = ("memory.cpu_offload", True)
KEEP_NORMS = ("parallel.unsharded_modules", ["norm", "layers.*_norm", "layers.1.attention"])

KNOBS: dict[str, Keys] = {
    "hybrid": HYBRID,
    "hybrid, held": (*HYBRID, ("parallel.hold_for_step", True)),
    "hybrid of one": (strategy("HYBRID_SHARD"), ("parallel.shard_size", 1)),
    "zero1": ZERO1,
    "two blocks a unit": (("parallel.blocks_per_unit", 2),),
    "three blocks a unit, zero1": (*ZERO1, ("parallel.blocks_per_unit", 3)),
    "ends apart": (("parallel.wrap_embedding", True), ("parallel.wrap_head", True)),
    "kept out": (KEEP_NORMS,),
    "kept out, two blocks, held": (
        strategy("SHARD_GRAD_OP"),
        KEEP_NORMS,
        ("parallel.blocks_per_unit", 2),
    ),
    "kept out of hybrid": (*HYBRID, KEEP_NORMS, ("parallel.wrap_head", True)),
    "no prefetch": (("parallel.forward_prefetch", 0), ("parallel.backward_prefetch", 0)),
    "prefetch by two": (
        ("parallel.forward_prefetch", 2),
        ("parallel.backward_prefetch", 3),
        ("parallel.wrap_head", True),
    ),
    "kept after forward": (("parallel.reshard_after_forward", False),),
    "offload": (OFFLOAD,),
    "offload, zero1": (*ZERO1, OFFLOAD),
}


def knobs(placement: Placement) -> list[Keys]:
    """Those that the grid can have."""
    return [
        keys
        for keys in KNOBS.values()
        if placement.dp % dict(keys).get("parallel.shard_size", 1) == 0
    ]


GRIDS = [Placement(dp=2), Placement(dp=4), Placement(tp=2, dp=2), Placement(pp=2, dp=2)]


@pytest.mark.parametrize("placement", GRIDS, ids=shape)
def test_every_way_to_shard_trains_like_one_process(equivalence, placement):
    """Two microbatches a rank or more, so that gradients accumulate before they are reduced, and
    gathered weights meet other passes."""
    sequence = (SP,) if placement.tp > 1 else ()
    equivalence.check(
        [
            Case(variant, placement, 8 // (2 * placement.dp), (*sequence, *keys))
            for keys, variant in zip(knobs(placement), [LLAMA, GPT.having(TIED)] * 20, strict=False)
        ]
    )


RESHARD = ("parallel.reshard_after_forward", 2)


@pytest.mark.parametrize(
    ("keys", "variant"),
    [
        ((RESHARD,), LLAMA),
        ((RESHARD, ("parallel.blocks_per_unit", 2), KEEP_NORMS), LLAMA),
        ((RESHARD, OFFLOAD), GPT.having(TIED)),
    ],
)
def test_weights_split_over_neighbours_between_passes_change_nothing(equivalence, keys, variant):
    """Gathered again from two ranks of four; 61 rows are 16 on each of four, padded."""
    equivalence.check([Case(variant, Placement(dp=4), micro, keys) for micro in (2, 1)])


SCHEDULES: list[Keys] = [
    (schedule("ZB1P"),),
    (schedule("ZBV"), ("parallel.virtual_pipeline_size", 2)),
    (schedule("Interleaved1F1B"), ("parallel.virtual_pipeline_size", 2)),
]


@pytest.mark.parametrize("pipeline", SCHEDULES, ids=lambda keys: keys[0][1])
def test_split_backwards_reduce_under_each_strategy(equivalence, pipeline):
    """Gradients that come after their backward are taken in by hand."""
    variants = [LLAMA, GPT.having(TIED)]
    ways: list[Keys] = [
        HYBRID,
        ZERO1,
        (("parallel.reshard_after_forward", False),),
        (("parallel.wrap_embedding", True), ("parallel.wrap_head", True)),
        (KEEP_NORMS, ("parallel.blocks_per_unit", 2)),
        (*ZERO1, OFFLOAD),
    ]
    equivalence.check(
        [
            Case(variants[i % 2], Placement(pp=2, dp=2), 1, (*pipeline, *keys))
            for i, keys in enumerate(ways)
        ]
    )


def test_one_process_trains_the_same_from_host_memory(equivalence):
    equivalence.check([Case(v, Placement(), 2, (OFFLOAD,)) for v in (LLAMA, GPT.having(TIED))])


@pytest.mark.parametrize("dp", [3])
@pytest.mark.parametrize("keys", [ZERO1, (KEEP_NORMS,), (*ZERO1, OFFLOAD)], ids=["a", "b", "c"])
def test_rows_that_ranks_share_unevenly_change_nothing(equivalence, dp, keys):
    """32 rows over 3 ranks are 11, 11 and 10."""
    variant = LLAMA.having(("train.global_batch_size", 6))
    equivalence.check([Case(variant, Placement(dp=dp), 1, keys)])


@pytest.mark.parametrize("placement", [Placement(dp=4), Placement(pp=2, dp=2)], ids=shape)
@pytest.mark.parametrize("keys", [HYBRID, ZERO1], ids=["hybrid", "zero1"])
def test_norm_counts_each_element_once_under_repeated_shards(equivalence, keys, placement):
    """Clipping at 0.1 puts a norm of replicas counted twice, or of rows left out, into every
    weight."""
    variant = LLAMA.having(("optimizer.clip_grad", 0.1))
    (run,) = equivalence.check([Case(variant, placement, 1, keys)])
    assert min(run.grad_norms) > 0.1, "nothing was clipped"


def test_ranks_that_share_samples_shard_with_those_that_dont(equivalence):
    """Over dp x cp: HYBRID_SHARD's pairs are those of a sample."""
    ways = [HYBRID, ZERO1, (KEEP_NORMS, OFFLOAD), (RESHARD,)]
    equivalence.check([Case(LLAMA, Placement(dp=2, cp=2), 2, keys) for keys in ways])


@pytest.mark.slow
def test_bf16_computes_the_same_up_to_its_roundings(equivalence):
    variant = replace(LLAMA, precision="bf16", steps=3)
    ways = [HYBRID, ZERO1, (KEEP_NORMS,), (RESHARD,), (OFFLOAD,)]
    equivalence.check([Case(variant, Placement(dp=4), 1, keys) for keys in ways])


def recompute(kind: str, interval: int = 1) -> Keys:
    return (("memory.recompute", kind), ("memory.recompute_interval", interval))


@pytest.mark.parametrize("placement", [Placement(dp=4), Placement(pp=2, dp=2)], ids=shape)
def test_recomputed_units_are_gathered_as_others_are(equivalence, placement):
    """Some layers of a unit run again in its backward, when it is whole."""
    two_blocks = ("parallel.blocks_per_unit", 2)
    ways: list[Keys] = [
        (*HYBRID, *recompute("full"), two_blocks),
        (*ZERO1, *recompute("selective"), OFFLOAD),
        (KEEP_NORMS, *recompute("full", 2), two_blocks),
        (("parallel.reshard_after_forward", False), *recompute("full", 2), two_blocks),
    ]
    equivalence.check([Case(LLAMA, placement, 1, keys) for keys in ways])


@pytest.mark.slow
@pytest.mark.parametrize("keys", [HYBRID, ZERO1, (OFFLOAD,)], ids=["hybrid", "zero1", "offload"])
def test_fp16_and_muon_train_alike_under_each_strategy(equivalence, keys):
    """What scales, clips and exchanges gradients takes them as they are split."""
    muon = (("optimizer.name", "muon"), ("optimizer.adamw_lr", 2e-3))
    fp16 = replace(LLAMA, precision="fp16")
    cases = [
        Case(LLAMA.having(*muon), Placement(dp=4), 1, keys),
        Case(fp16, Placement(dp=4), 1, keys),
    ]
    equivalence.check(cases)
