"""What a run writes about itself is true of the whole grid.

Rows F5 and G1 to G5 of the faults that other trainers have had.
"""

from __future__ import annotations

import json
import sys

import pytest

from megagrid.errors import ConfigError
from megagrid.plan.flops import token_flops
from megagrid.train.run import Run
from tests.end_to_end.t0 import (
    ALL_AXES,
    ALONE,
    DP2,
    DP4,
    PP2,
    PP2DP2,
    PP4,
    SP,
    TIED,
    TP2,
    TP2DP2,
    TP2PP2,
    TP4,
    Training,
    assert_parity,
    merged,
    name_of,
    strategy,
    t0,
)
from tests.train.test_tracking import FakeWandb

LAYOUTS = [
    (ALONE, {}),
    (TP2, SP),
    (PP2, {"parallel": {"pipeline_schedule": "GPipe"}}),
    (DP2, strategy("SHARD_GRAD_OP")),
    (TP4, {}),
    (PP4, TIED),
    (DP4, strategy("NO_SHARD")),
    (TP2PP2, merged(SP, TIED)),
    (TP2DP2, {}),
    (PP2DP2, {}),
    pytest.param(ALL_AXES, SP, marks=pytest.mark.slow),
]


@pytest.mark.parametrize(
    ("placement", "keys"),
    LAYOUTS,
    ids=lambda value: "" if isinstance(value, dict) else name_of(value),
)
def test_records_are_one_a_step_and_right_in_every_layout(trainer, placement, keys):
    """G1: 8 steps of 8 samples of 32 tokens are 2048, whatever shares or splits them."""
    training = trainer.train(placement, keys)
    records = training.records
    assert [record.step for record in records] == list(range(1, 9))
    assert [record.consumed_tokens for record in records] == list(range(256, 2049, 256))
    assert [record.consumed_samples for record in records] == list(range(8, 65, 8))
    assert [record.sample_ids for record in records] == [(i, i + 7) for i in range(0, 64, 8)]
    for record in records:
        assert record.valid_tokens == 256
        assert record.tokens_per_s * record.step_time_s == pytest.approx(256)
        assert record.tokens_per_s_per_rank * placement.world_size == pytest.approx(
            record.tokens_per_s
        )
        assert sum(record.parts_s.values()) <= record.step_time_s
        assert len(record.peak_memory_bytes) == placement.world_size
        assert all(2**24 < peak < 2**40 for peak in record.peak_memory_bytes)
        assert (record.mfu, record.hfu, record.valid_loss) == (None, None, None)
    tied = {"model": keys["model"]} if "model" in keys else {}
    assert_parity(records, trainer.reference(tied).records)


@pytest.mark.parametrize("placement", [ALONE, DP2, TP2PP2], ids=name_of)
def test_mfu_is_of_the_peak_of_all_ranks(trainer, placement):
    """G2."""
    training = trainer.train(placement, {"logging": {"peak_tflops": 1.0}, "train": {"steps": 2}})
    model, world = training.config.model, placement.world_size
    # By hand, a forward's multiply-adds per token: qkv, scores and their sum, out, mlp; head.
    layer = 32 * (32 + 2 * 8) + 2 * 32 * 32 + 32 * 32 + 3 * 32 * 64
    by_hand = 3 * 2 * (4 * layer + 32 * 61)
    assert token_flops(model, 32).model == by_hand
    for record in training.records:
        assert record.mfu == pytest.approx(record.tokens_per_s * by_hand / (world * 1e12))
        assert record.hfu == record.mfu


@pytest.mark.parametrize("call", ["init", "log", "finish"])
def test_a_wandb_that_fails_is_one_warning_and_exit_0(cli, monkeypatch, call):
    """G3."""
    fake = FakeWandb(**{call: RuntimeError("no network")})
    monkeypatch.setitem(sys.modules, "wandb", fake)
    ended = cli.train({"logging": {"wandb": "offline"}, "train": {"steps": 3}})
    assert ended.code == 0
    (warning,) = ended.err.splitlines()
    assert warning.startswith("warning: wandb: RuntimeError: no network")
    assert len((cli.run_folder / "metrics.jsonl").read_text().splitlines()) == 3


def test_wandb_is_told_what_the_records_say(cli, monkeypatch):
    fake = FakeWandb()
    monkeypatch.setitem(sys.modules, "wandb", fake)
    assert cli.train({"logging": {"wandb": "offline"}, "train": {"steps": 3}}).err == ""
    records = map(json.loads, (cli.run_folder / "metrics.jsonl").read_text().splitlines())
    assert [logged["loss"] for logged in fake.logged] == [record["loss"] for record in records]
    assert fake.options["config"]["train"]["steps"] == 3
    assert fake.is_finished


@pytest.mark.parametrize("placement", [ALONE, PP2], ids=name_of)
def test_steps_after_the_checkpoint_are_recorded_once(trainer, placement):
    """G4: logged up to step 7, saved at 5, resumed: one record per step, the newer one."""
    constant = {"lr_schedule": {"kind": "constant"}}
    first = trainer.train(
        placement,
        constant,
        {"train": {"steps": 7}, "checkpoint": {"save_interval": 5, "save_at_end": False}},
    )
    assert [record.step for record in first.records] == list(range(1, 8))
    times = [record.step_time_s for record in first.records]
    second = trainer.train(
        placement,
        constant,
        {"logging": {"run_dir": str(first.folder)}, "checkpoint": {"resume": "latest"}},
    )
    assert [record.step for record in second.records] == list(range(1, 9))
    assert [record.step_time_s for record in second.records][:5] == times[:5]
    assert [record.step_time_s for record in second.records][5:7] != times[5:]
    assert_parity(second.records, trainer.reference(constant).records)


def table(training: Training, rank: int = 0) -> list[dict[str, str]]:
    """The rows that a rank printed, without what was measured."""
    lines = training.ranks[rank].output.splitlines()
    header, *rows = (line.split() for line in lines if not line.startswith("saved step "))
    assert header[:3] == ["step", "done", "loss"]
    return [dict(zip(header[:3], row, strict=False)) for row in rows]


@pytest.mark.parametrize("placement", [PP2, TP2, DP2], ids=name_of)
def test_the_console_shows_the_loss_of_one_process_on_one_rank(trainer, placement):
    """G5."""
    reference = trainer.reference()
    training = trainer.train(placement)
    shown = table(training)
    assert [row["step"] for row in shown] == [str(step) for step in range(1, 9)]
    for row, record in zip(shown, reference.records, strict=True):
        assert float(row["loss"]) == pytest.approx(record.loss, abs=0.5e-4 + 1e-5)
    assert [report.output for report in training.ranks[1:]] == [""] * (placement.world_size - 1)


def updates_made(run: Run) -> int:
    """Run, and count the optimizer's updates by its own state."""
    run.run()
    (count,) = {int(state["step"]) for state in run.engine.optimizer._adamw.state.values()}
    return count


@pytest.mark.parametrize("placement", [ALONE, DP2], ids=name_of)
def test_three_steps_of_four_microbatches_are_three_updates(trainer, placement):
    """F5: a step is an update, however many microbatches it takes."""
    train = {"train": {"steps": 3, "micro_batch_size": 2 // placement.dp}}
    training = trainer.train(placement, train, work=updates_made)
    assert [report.result for report in training.ranks] == [3] * placement.world_size
    assert [record.consumed_samples for record in training.records] == [8, 16, 24]
    assert training.saved_steps == [3]


@pytest.mark.parametrize(
    ("placement", "batch", "micro"), [(ALONE, 2, 4), (DP4, 6, 1)], ids=["micro4", "dp4"]
)
def test_a_batch_that_microbatches_do_not_fill_is_refused(placement, batch, micro):
    """F5: accumulation never becomes 0, nor is a sample dropped."""
    train = {"train": {"global_batch_size": batch, "micro_batch_size": micro}}
    with pytest.raises(ConfigError, match=f"train.global_batch_size={batch} must be a multiple"):
        t0("unused", placement, train)


def test_a_run_of_tokens_has_the_steps_that_they_fill(trainer):
    training = trainer.train(DP2, {"train": {"steps": None, "tokens": 257}})
    assert [record.consumed_tokens for record in training.records] == [256, 512]
