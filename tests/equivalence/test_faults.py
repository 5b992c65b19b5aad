"""Faults that trainers have had, each as the report describes it; the right value stays a test.

AdamW hardly sees a constant factor on its gradients, so what is compared is always norms, and
mostly gradients, too.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from megagrid.grid.placement import Placement
from megagrid.train.metrics import Stopwatch
from megagrid.train.step import compute_gradients
from tests.equivalence.case import GPT, LLAMA, SP, TIED, Case, shape, strategy
from tests.equivalence.trainer import batches_of, engine_of, rank_grid, train

LONG = 20
"""Steps; enough for copies that aren't updated alike to drift apart."""

# ------------------------------------------------------------------------------------------------
# Gradients that ranks have parts of


@pytest.mark.parametrize("variant", [LLAMA, GPT], ids=str)
def test_norm_gradients_are_summed_under_sequence_parallelism(equivalence, variant):
    """Megatron-LM #1446. That the weights of all tp ranks are bit-equal after the last step is
    checked where a run is put together."""
    equivalence.check([Case(replace(variant, steps=LONG), Placement(tp=2), 4, (SP,))])


@pytest.mark.parametrize("keys", [(), (SP,)], ids=["", "sp"])
def test_replicated_parameters_count_once_in_the_norm(equivalence, keys):
    """ROCm/TransformerEngine #715: 1.36 to 1.52 times the norm. Clipping at 0.1 puts a wrong norm
    into every weight."""
    variant = LLAMA.having(("optimizer.clip_grad", 0.1))
    equivalence.check([Case(variant, Placement(tp=2), 4, keys)])


@pytest.mark.parametrize(
    "placement",
    [Placement(pp=2), Placement(pp=4), Placement(dp=2), Placement(pp=2, dp=2)],
    ids=shape,
)
def test_all_ranks_clip_by_the_norm_of_the_whole_model(equivalence, placement):
    """torchtitan #596, pytorch #170862: each stage or shard clipped by its own."""
    variant = LLAMA.having(("optimizer.clip_grad", 0.1))
    (run,) = equivalence.check([Case(variant, placement, 2)])
    assert min(run.grad_norms) > 0.1, "nothing was clipped"


@pytest.mark.slow
@pytest.mark.parametrize("name", ["FULL_SHARD", "NO_SHARD"])
def test_tied_copies_stay_equal_through_sharding_and_pipeline(equivalence, name):
    """Megatron-LM #844, #7227, #656: partial sums added up after the scatter over dp, a copy
    counted twice in the norm, a head that came untied."""
    variant = replace(GPT.having(TIED), steps=LONG)
    equivalence.check([Case(variant, Placement(pp=2, dp=2), 1, (strategy(name),))])


@pytest.mark.parametrize(
    ("variant", "placement", "micro_batch"),
    [
        (LLAMA, Placement(pp=2), 2),
        (LLAMA, Placement(pp=2, dp=2), 1),
        (GPT.having(TIED), Placement(pp=4), 2),
    ],
)
def test_gradients_of_all_microbatches_count(equivalence, variant, placement, micro_batch):
    """Automodel #3530, Fast-LLM #550: only the last microbatch trained, with a fine-looking loss.
    Here the last one has no label."""
    unlabelled = replace(variant, ignored=(5, 6, 7))
    (run,) = equivalence.check([Case(unlabelled, placement, micro_batch)])
    assert min(run.grad_norms) > 0.1


@pytest.mark.parametrize("name", ["FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD"])
@pytest.mark.parametrize("dp", [2, 4])
def test_gradients_are_summed_over_dp_not_averaged_nor_summed_twice(equivalence, dp, name):
    """pytorch #162338: an average that was a sum."""
    variant = replace(LLAMA, steps=2)
    equivalence.check([Case(variant, Placement(dp=dp), 8 // dp, (strategy(name),))])


@pytest.mark.parametrize("name", ["FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD"])
def test_accumulated_gradients_are_reduced(equivalence, name):
    """build-nanogpt #30: the flag for synchronisation was set too late. Four microbatches a rank;
    replicas that weren't reduced would differ."""
    equivalence.check([Case(LLAMA, Placement(dp=2), 1, (strategy(name),))])


@pytest.mark.parametrize(
    "placement", [Placement(tp=2), Placement(pp=2), Placement(dp=2)], ids=shape
)
def test_ranks_with_other_numbers_of_labels_weigh_tokens_alike(equivalence, placement):
    """A mean of the ranks' or microbatches' means. Samples 1 to 5 of eight have no label, so that
    the microbatches of two differ, and the dp ranks."""
    variant = replace(LLAMA, ignored=(1, 2, 3, 4, 5))
    equivalence.check([Case(variant, placement, 2)])


# ------------------------------------------------------------------------------------------------
# Dropout


@pytest.mark.parametrize("keys", [(), (SP,)], ids=["", "sp"])
def test_dropout_keeps_replicas_equal_and_repeats_itself(equivalence, keys):
    """PaddleFleetX #1005, Megatron-LM #206: ranks drew other masks where they hold the same, or the
    same where they hold others."""
    variant = replace(GPT.having(("model.dropout", 0.5)), steps=LONG)
    case = Case(variant, Placement(tp=2), 4, keys)
    (run,) = equivalence.check([case])
    (again,) = train(equivalence.ranks, [case])
    assert again.losses == run.losses
    assert all(np.array_equal(again.final[name], values) for name, values in run.final.items())


# ------------------------------------------------------------------------------------------------
# Optimizer


@pytest.mark.parametrize("placement", [Placement(), Placement(tp=2), Placement(dp=2)], ids=shape)
@pytest.mark.parametrize("variant", [LLAMA, GPT.having(TIED)], ids=str)
def test_norms_and_biases_are_not_decayed(ranks, variant, placement):
    """epfLLM/Megatron-LLM #33. Between no decay and 0.5, one step differs by lr decay w."""
    cases = [
        Case(
            replace(variant, steps=1).having(("optimizer.weight_decay", decay)),
            placement,
            8 // placement.dp,
        )
        for decay in (0.0, 0.5)
    ]
    plain, decayed = train(ranks, cases)
    lr = cases[0].config.optimizer.lr
    for name, w in plain.updated.items():
        moved = w.astype(np.float64) - decayed.updated[name]
        if "norm" in name or name.endswith("bias"):
            assert not moved.any(), name
        else:
            expected = lr * 0.5 * plain.initial[name].astype(np.float64)
            # Roundings of weights below 1.
            np.testing.assert_allclose(moved, expected, rtol=0, atol=2.0**-23, err_msg=name)


# ------------------------------------------------------------------------------------------------
# bf16


def repeated_on_rank(case: Case) -> float:
    """The gradient norm of the one sample of which all microbatches consist."""
    engine = engine_of(case, rank_grid(case.placement, case.config.model.num_kv_heads))
    single = batches_of(engine, 1)[0]
    samples = np.zeros(1, dtype=np.int64)
    single = replace(
        single,
        tokens=(np.arange(32, dtype=np.int64) * 7 % 61)[None],
        labels=(np.arange(1, 33, dtype=np.int64) * 7 % 61)[None],
        sample_ids=samples,
    )
    train = case.config.train
    times = train.global_batch_size // (train.micro_batch_size * case.placement.dp)
    return compute_gradients(engine, [single] * times, 1, Stopwatch()).grad_norm


@pytest.mark.parametrize(
    ("placement", "keys"),
    [
        (Placement(), ()),
        (Placement(dp=2), (strategy("FULL_SHARD"),)),
        (Placement(dp=2), (strategy("NO_SHARD"),)),
    ],
)
def test_bf16_gradients_accumulate_in_fp32(ranks, placement, keys):
    """pytorch #106395: in bf16, 256 + 1 = 256. A microbatch 64 times has the gradient of once."""
    norms = []
    for times in (1, 64):
        variant = replace(LLAMA, precision="bf16").having(
            ("train.global_batch_size", times * placement.dp)
        )
        case = Case(variant, placement, 1, keys)
        norms.append(ranks.run(repeated_on_rank, case, world_size=placement.world_size))
    for once, often in zip(*norms, strict=True):
        assert often == pytest.approx(once, rel=1e-3)
