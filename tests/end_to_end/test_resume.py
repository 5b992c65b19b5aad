"""A run that was stopped and goes on computes what it would have computed without the stop.

Rows C4, C5, C6 and C9 of the faults that other trainers have had. Going on on another grid is
tested in `test_any_grid`.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from megagrid.grid.placement import Placement
from megagrid.train.run import Run
from tests.end_to_end.t0 import (
    ALL_AXES,
    ALONE,
    BF16,
    DP2,
    DROPOUT,
    GPT,
    HALF_WAY,
    INTERLEAVED,
    PP2,
    PP2DP2,
    SAVED_AT,
    SP,
    TIED,
    TP2,
    TP2DP2,
    TP2PP2,
    TP4,
    ZBV,
    Sections,
    assert_parity,
    computed,
    differing,
    layers_per_stage,
    merged,
    name_of,
    run_and_note_samples,
    strategy,
)

GPT_DROPOUT = merged(GPT, DROPOUT)
ROUNDED = {"optimizer": {"state_dtype": "bf16"}}


def restarted(placement: Placement, *parts: Sections, name: str, slow: bool = False):
    """A row of the table below."""
    marks = [pytest.mark.slow] if slow else []
    return pytest.param(placement, merged(*parts), id=f"{name_of(placement)}-{name}", marks=marks)


@pytest.mark.parametrize(
    ("placement", "keys"),
    [
        restarted(ALONE, name="llama"),
        restarted(ALONE, GPT_DROPOUT, name="gpt-dropout"),
        restarted(TP2, SP, GPT_DROPOUT, name="sp-gpt-dropout"),
        restarted(PP2, TIED, name="tied"),
        restarted(DP2, strategy("FULL_SHARD"), name="full_shard"),
        restarted(DP2, strategy("SHARD_GRAD_OP"), name="shard_grad_op"),
        restarted(DP2, strategy("NO_SHARD"), GPT_DROPOUT, name="no_shard-gpt-dropout"),
        restarted(DP2, BF16, name="bf16"),
        restarted(TP2PP2, ROUNDED, SP, name="rounded-moments"),
        restarted(TP2PP2, GPT_DROPOUT, name="gpt-dropout"),  # C6
        restarted(TP4, SP, name="sp-tp-above-kv-heads"),
        restarted(PP2, ZBV, TIED, name="zbv-tied"),
        restarted(PP2DP2, INTERLEAVED, layers_per_stage(1, 2, 0, 1), BF16, name="interleaved-bf16"),
        restarted(ALL_AXES, SP, TIED, GPT_DROPOUT, name="sp-tied-gpt-dropout", slow=True),
    ],
)
def test_four_and_four_steps_equal_eight_bit_by_bit(trainer, placement, keys):
    whole = trainer.train(placement, keys, HALF_WAY)
    rest = trainer.resume(whole, placement, keys)
    assert computed(rest.records) == computed(whole.records[SAVED_AT:])
    assert differing(rest.tensors(8), whole.tensors(8)) == []


@pytest.mark.parametrize("placement", [ALONE, DP2, TP2DP2], ids=name_of)
@pytest.mark.parametrize("batch", [8, 4, 16])
def test_a_resumed_run_begins_with_the_next_unseen_sample(trainer, placement, batch):
    """C4, and any global batch: the position is a number of samples."""
    former = trainer.reference()
    train = {"train": {"global_batch_size": batch, "steps": 6}}
    rest = trainer.resume(former, placement, train, work=run_and_note_samples)
    for step in (0, 1):
        first = 32 + step * batch
        fed = {sample for report in rest.ranks for sample in report.result[step]}
        assert fed == set(range(first, first + batch))
        assert rest.records[step].sample_ids == (first, first + batch - 1)
        assert rest.records[step].consumed_samples == first + batch
        assert rest.records[step].consumed_tokens == (first + batch) * 32


@pytest.mark.parametrize("kind", ["cosine", "linear", "wsd"])
def test_the_learning_rate_goes_on_where_it_was(trainer, kind):
    """C5."""
    keys = {
        "model": {"num_layers": 1},
        "train": {"steps": 20, "global_batch_size": 2},
        "lr_schedule": {"kind": kind, "warmup_steps": 9},
    }
    whole = trainer.train(ALONE, keys, {"checkpoint": {"save_interval": 7}})
    rest = trainer.resume(whole, ALONE, keys, step=7)
    assert [record.step for record in rest.records] == list(range(8, 21))
    assert [record.lr for record in rest.records] == [record.lr for record in whole.records[7:]]


def groups_after_run(run: Run) -> list[dict[str, Any]]:
    """The optimizer's groups, without their parameters."""
    run.run()
    groups = run.engine.optimizer._adamw.param_groups
    return [{name: value for name, value in group.items() if name != "params"} for group in groups]


def test_decayed_and_undecayed_weights_keep_their_settings(trainer):
    """C9: both groups have lr, betas and weight decay after a resume, and act on them."""
    optimizer = {"optimizer": {"weight_decay": 0.5, "beta1": 0.8, "beta2": 0.9, "eps": 1e-7}}
    whole = trainer.train(DP2, optimizer, HALF_WAY, work=groups_after_run)
    rest = trainer.resume(whole, DP2, optimizer, work=groups_after_run)
    decayed, undecayed = rest.ranks[0].result
    assert (decayed["weight_decay"], undecayed["weight_decay"]) == (0.5, 0.0)
    assert decayed["lr"] == undecayed["lr"] == rest.records[-1].lr
    assert rest.ranks[0].result == whole.ranks[0].result
    assert differing(rest.tensors(8), whole.tensors(8)) == []


@pytest.mark.parametrize("reader", ["every_rank", "first_rank"])
@pytest.mark.parametrize(("before", "after"), [({}, ROUNDED), (ROUNDED, {})])
def test_moments_of_either_dtype_go_on_as_the_other(trainer, before, after, reader):
    """Rounded as they are read, or exact; weights don't change."""
    dtypes = {"fp32": torch.float32, "bf16": torch.bfloat16}
    former = trainer.train(DP2, before, {"train": {"steps": 4}})
    rest = trainer.resume(
        former, TP2, after, {"checkpoint": {"read_by": reader}}, work=save_at_once
    )
    one, other = former.tensors(4), rest.tensors(4)
    assert one.keys() == other.keys()
    moments = {name for name in one if name.startswith("optimizer.")}
    found = dtypes[rest.config.optimizer.state_dtype]
    assert {other[name].dtype for name in moments} == {found}
    assert {one[name].dtype for name in moments} == {dtypes[former.config.optimizer.state_dtype]}
    assert differing(other, {name: t.to(other[name].dtype) for name, t in one.items()}) == []


def save_at_once(run: Run) -> None:
    """Save what was loaded, as it is."""
    run.save(is_last=True)
    run.saver.finish()


def test_a_longer_run_goes_on_from_the_end_of_a_shorter_one(trainer):
    """Under a constant rate, which is all that the length of the run has a say in."""
    constant = {"lr_schedule": {"kind": "constant"}}
    whole = trainer.reference(constant)
    shorter = trainer.train(TP2, constant, {"train": {"steps": 4}})
    folder = {"logging": {"run_dir": str(shorter.folder)}}
    longer = trainer.train(DP2, constant, folder, {"checkpoint": {"resume": "latest"}})
    assert [record.step for record in longer.records] == list(range(1, 9))
    assert_parity(longer.records, whole.records)


def test_a_finished_run_has_nothing_left_to_do(trainer):
    done = trainer.train(TP2)
    before = (done.folder / "metrics.jsonl").read_bytes()
    folder = {"logging": {"run_dir": str(done.folder)}}
    again = trainer.train(TP2, folder, {"checkpoint": {"resume": "latest"}})
    assert (again.folder / "metrics.jsonl").read_bytes() == before
    assert "at step 8" in again.ranks[0].output
    assert again.ranks[1].output == ""


def test_a_compiled_run_is_resumed_uncompiled_on_another_grid_and_back(trainer):
    """Names, states and numbers are the same."""
    compiled = {"train": {"compile": True, "compile_backend": "aot_eager"}}
    reference = trainer.reference()
    first = trainer.train(TP2, compiled, HALF_WAY)
    assert_parity(first.records, reference.records)
    assert first.tensors(8).keys() == reference.tensors(8).keys()
    for training in (
        trainer.resume(first, DP2),
        trainer.resume(reference, TP2, compiled),
    ):
        assert_parity(training.records, reference.records)
