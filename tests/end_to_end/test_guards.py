"""Steps that aren't made: alike on every rank and every grid, and a resumed run decides the same.

Row A17 of the faults that other trainers have had; what ends a run is in `test_checkpoints`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from unittest.mock import patch

import pytest
import torch

from megagrid.train import step as step_module
from megagrid.train.metrics import GuardRecord, SaveRecord, read_records
from megagrid.train.run import Run
from megagrid.train.state import Progress, RunState
from tests.end_to_end.t0 import (
    ALONE,
    DP2,
    GPT,
    HALF_WAY,
    PP2,
    SAVED_AT,
    SP,
    TP2,
    TP2PP2,
    ZB1P,
    Sections,
    Training,
    assert_parity,
    computed,
    differing,
    merged,
    name_of,
    strategy,
)

FP16 = {"train": {"precision": "fp16"}}
SKIP, ROLL_BACK = {"guard": {"on_nan": "skip"}}, {"guard": {"on_nan": "rollback"}}
EVERY_STEP, EVERY_OTHER = {"checkpoint": {"save_interval": 1}}, {"checkpoint": {"save_interval": 2}}
WARMUP = {"lr_schedule": {"warmup_steps": 6}}

GRIDS = [
    pytest.param(placement, keys, id="-".join([name_of(placement), *words]))
    for placement, keys, words in (
        (TP2, {}, []),
        (TP2PP2, SP, ["sp"]),
        (DP2, strategy("FULL_SHARD"), []),
        (PP2, ZB1P, ["zb1p"]),
    )
]


@dataclass(frozen=True)
class NormIs:
    """Train, while on the last rank the gradients' square sum of some steps is another.

    Attributes:
        value: what it is there.
        calls: in which it is, counted from 1 by this process; those from `since` on too.
    """

    value: float
    calls: tuple[int, ...] = ()
    since: int = 2**31

    def __call__(self, run: Run) -> None:
        with self.planted(run):
            run.run()

    @contextmanager
    def planted(self, run: Run) -> Iterator[None]:
        original, calls = step_module.local_squared_norm, 0
        is_hit = run.grid.rank == run.grid.world.size - 1

        def norm(shards, device):
            nonlocal calls
            calls += 1
            found = original(shards, device)
            here = is_hit and (calls in self.calls or calls >= self.since)
            return torch.full_like(found, self.value) if here else found

        with patch.object(step_module, "local_squared_norm", norm):
            yield


def skipped(training: Training) -> list[int]:
    return [record.step for record in training.records if record.skipped]


def hits(training: Training) -> list[GuardRecord]:
    return read_records(training.folder / "guard.jsonl", GuardRecord)


def assert_frozen(training: Training, steps: list[int]) -> None:
    """That neither weights nor moments nor the learning rate have moved in `steps`, and in others
    they have. All steps must be saved."""
    tensors = {step: training.tensors(step) for step in range(1, 9)}
    lrs = [record.lr for record in training.records]
    for before, after in pairwise(range(1, 9)):
        assert (differing(tensors[before], tensors[after]) == []) == (after in steps), after
        assert (lrs[before - 1] == lrs[after - 1]) == (before in steps), before


# ------------------------------------------------------------------------------------------------
# fp16


TOO_LARGE = {"loss_scale": {"initial": 2.0**40, "backoff_factor": 2.0**-8, "hysteresis": 1}}
"""Nothing but an overflow: even 1e-6, times the scale, is beyond fp16."""


@pytest.fixture(scope="session")
def overflowing(trainer):
    """fp16 with a scale that is far too large, on one process."""
    return trainer.train(ALONE, FP16, TOO_LARGE, WARMUP, EVERY_STEP)


def test_overflows_freeze_weights_moments_and_rate_until_the_scale_fits(overflowing):
    """A17, fp16."""
    assert skipped(overflowing) == [1, 2, 3]
    scales = [record.loss_scale for record in overflowing.records]
    assert scales == [2.0**40, 2.0**32, 2.0**24, *[2.0**16] * 5]
    assert_frozen(overflowing, [1, 2, 3])
    assert [record.skipped_steps for record in overflowing.records] == [1, 2, 3, 3, 3, 3, 3, 3]
    told = [line for line in overflowing.ranks[0].output.splitlines() if line.startswith("skipped")]
    assert told[0] == (
        "skipped step 1: gradients overflow at loss scale 1.09951e+12, which is 4.29497e+09 now"
    )
    assert len(told) == 3
    assert not (overflowing.folder / "guard.jsonl").exists()


@pytest.mark.parametrize(("placement", "keys"), GRIDS)
def test_every_grid_skips_the_same_steps(trainer, overflowing, placement, keys):
    found = trainer.train(placement, FP16, TOO_LARGE, WARMUP, keys)
    for name in ("lr", "loss_scale", "skipped_steps", "skipped", "sample_ids"):
        assert [getattr(record, name) for record in found.records] == [
            getattr(record, name) for record in overflowing.records
        ]


@pytest.mark.parametrize(("placement", "keys"), GRIDS)
def test_an_overflow_on_one_rank_is_everyones(trainer, placement, keys):
    """Of one rank's gradients, in the third step and in the sixth."""
    falling = {"loss_scale": {"initial": 1024.0, "hysteresis": 1, "growth_interval": 3}}
    found = trainer.train(placement, FP16, falling, keys, work=NormIs(math.inf, (3, 6)))
    assert skipped(found) == [3, 6]
    scales = [record.loss_scale for record in found.records]
    assert scales == [1024, 1024, 1024, 512, 512, 512, 256, 256]


@pytest.mark.parametrize(("placement", "keys"), [(ALONE, {}), (TP2PP2, SP), (DP2, {})])
def test_a_resumed_fp16_run_has_the_scale_and_rate_of_the_uninterrupted_one(
    trainer, placement, keys
):
    growing = {"loss_scale": {**TOO_LARGE["loss_scale"], "growth_interval": 3}}
    parts = (FP16, growing, WARMUP, keys)
    whole = trainer.train(placement, *parts, HALF_WAY)
    rest = trainer.resume(whole, placement, *parts)
    assert computed(rest.records) == computed(whole.records[SAVED_AT:])
    for name in ("loss_scale", "skipped_steps"):
        assert [getattr(record, name) for record in rest.records] == [
            getattr(record, name) for record in whole.records[SAVED_AT:]
        ]
    assert {record.loss_scale for record in rest.records} >= {2.0**16, 2.0**17}
    assert differing(rest.tensors(8), whole.tensors(8)) == []


def test_fp16_learns_like_fp32(trainer):
    assert_parity(
        trainer.train(DP2, FP16).records, trainer.reference().records, loss=5e-3, grad_norm=2e-2
    )


def save_as_before_steps_could_be_skipped(run: Run) -> Progress:
    """Train, and leave the trainer's state of a run that knew of no skips."""
    original = RunState.trainer_state

    def old(state: RunState) -> dict:
        saved = original(state)
        del saved["loss_scale"], saved["guard"], saved["progress"]["updates"]
        return saved

    with patch.object(RunState, "trainer_state", old):
        run.run()
    return run.progress


def progress_of(run: Run) -> Progress:
    return run.progress


def test_checkpoints_of_before_steps_could_be_skipped_load(trainer):
    former = trainer.train(ALONE, HALF_WAY, work=save_as_before_steps_could_be_skipped)
    rest = trainer.resume(former, ALONE, work=progress_of)
    assert rest.ranks[0].result == Progress(4, 32, 1024, updates=4)


# ------------------------------------------------------------------------------------------------
# Skips


@pytest.mark.parametrize(("placement", "keys"), GRIDS)
def test_one_ranks_nan_makes_every_rank_skip_the_step(trainer, placement, keys):
    found = trainer.train(
        placement, keys, SKIP, WARMUP, EVERY_STEP, work=NormIs(math.nan, (3, 6, 7))
    )
    assert skipped(found) == [3, 6, 7]
    assert_frozen(found, [3, 6, 7])
    assert [record.sample_ids[0] for record in found.records] == list(range(0, 64, 8))
    assert [(hit.at_step, hit.action) for hit in hits(found)] == [
        (3, "skip"),
        (6, "skip"),
        (7, "skip"),
    ]


def test_too_many_skips_in_a_row_end_the_run_on_every_rank(trainer):
    twice = {"guard": {"on_nan": "skip", "max_skips": 2}}
    ended = trainer.attempt(DP2, twice, work=NormIs(math.nan, since=4))
    (error,) = ended.errors
    assert error.startswith("MegagridError: step 6: loss ")
    assert "guard.max_skips=2 steps in a row were skipped before" in error
    assert skipped(ended) == [4, 5]
    assert ended.saved_steps == []


SPIKES = {"guard": {"on_spike": "skip", "window": 4}}


@pytest.mark.parametrize("placement", [ALONE, TP2PP2, DP2], ids=name_of)
def test_a_resumed_run_knows_a_spike_by_the_window_of_the_uninterrupted_one(trainer, placement):
    whole = trainer.train(placement, SPIKES, HALF_WAY, work=NormIs(1e6, (6,)))
    rest = trainer.resume(whole, placement, SPIKES, work=NormIs(1e6, (2,)))
    assert skipped(whole) == skipped(rest) == [6]
    assert "gradient norm 1000 is above" in hits(rest)[0].reason or placement.world_size > 1
    assert computed(rest.records) == computed(whole.records[SAVED_AT:])
    assert differing(rest.tensors(8), whole.tensors(8)) == []


# ------------------------------------------------------------------------------------------------
# Rollbacks


def go_on_with_sample_48(run: Run) -> None:
    """Train from where the run is, but with later data."""
    run.progress.consumed_samples, run.progress.consumed_tokens = 48, 48 * 32
    run.run()


@pytest.mark.parametrize(
    ("placement", "keys", "is_async"),
    [
        pytest.param(ALONE, {}, True, id="alone-behind"),
        pytest.param(TP2PP2, SP, False, id="tp2pp2-sp"),
        pytest.param(DP2, {}, True, id="dp2-behind"),
        pytest.param(PP2, ZB1P, False, id="pp2-zb1p"),
    ],
)
def test_a_rollback_is_a_resume_with_the_data_after_the_bad_step(
    trainer, placement, keys, is_async
):
    """Step 6 goes wrong, the last checkpoint is of step 4: steps 5 and 6 are made again, with the
    samples from 48 on."""
    saving = merged(EVERY_OTHER, {"checkpoint": {"async_save": is_async}})
    parts = (keys, ROLL_BACK, saving, {"logging": {"trace_interval": 1}})
    found = trainer.train(placement, *parts, work=NormIs(math.nan, (6,)))
    assert [record.step for record in found.records] == list(range(1, 9))
    firsts = [record.sample_ids[0] for record in found.records]
    assert firsts == [0, 8, 16, 24, 48, 56, 64, 72]
    assert [record.rollbacks for record in found.records] == [0] * 4 + [1] * 4
    assert [record.consumed_samples for record in found.records][-1] == 80
    (hit,) = hits(found)
    assert (hit.step, hit.at_step, hit.action, hit.sample_ids) == (4, 6, "rollback", (40, 47))
    assert "rolled back to" in found.ranks[0].output
    saves = read_records(found.folder / "saves.jsonl", SaveRecord)
    assert [save.step for save in saves] == [2, 4, 6, 8]
    for file in (found.folder / "trace").glob("rank-*.jsonl"):
        assert len(file.read_text().splitlines()) == 8

    rest = trainer.resume(found, placement, keys, work=go_on_with_sample_48)
    assert computed(rest.records) == computed(found.records[SAVED_AT:])
    assert differing(rest.tensors(8), found.tensors(8)) == []


def test_a_spike_rolls_back_too_and_the_window_with_it(trainer):
    guard = {"guard": {"on_spike": "rollback", "window": 4}}
    found = trainer.train(DP2, guard, EVERY_OTHER, work=NormIs(1e6, (6, 8)))
    assert [(hit.at_step, hit.step) for hit in hits(found)] == [(6, 4), (6, 4)]
    assert [record.sample_ids[0] for record in found.records][4:] == [64, 72, 80, 88]


def test_too_many_rollbacks_end_the_run(trainer):
    twice = {"guard": {"on_nan": "rollback", "max_rollbacks": 2}}
    ended = trainer.attempt(TP2, twice, EVERY_OTHER, work=NormIs(math.nan, since=3))
    (error,) = ended.errors
    assert error.startswith("MegagridError: step 3: loss ")
    assert "rolled back guard.max_rollbacks=2 times" in error
    assert [hit.action for hit in hits(ended)] == ["rollback", "rollback", "end"]
    assert ended.saved_steps == [2]


def test_a_run_without_a_checkpoint_yet_says_so(trainer):
    ended = trainer.attempt(DP2, ROLL_BACK, HALF_WAY, work=NormIs(math.nan, (2,)))
    (error,) = ended.errors
    assert "no checkpoint to roll back to yet; lower checkpoint.save_interval=4" in error
    assert "--find-nan says where" in error
    assert [(hit.at_step, hit.action) for hit in hits(ended)] == [(2, "end")]


def test_what_ends_a_run_is_told_with_what_would_help(trainer):
    floor = {"loss_scale": {"initial": 2.0**40, "min": 2.0**40}}
    ended = trainer.attempt(ALONE, FP16, floor)
    (error,) = ended.errors
    assert "Begin again with a lower loss_scale.min=1.09951e+12; guard.on_nan=" in error
    saved = trainer.attempt(
        ALONE, SKIP, EVERY_STEP, {"guard": {"max_skips": 1}}, work=NormIs(math.nan, since=3)
    )
    (error,) = saved.errors
    assert "Resume from the last checkpoint with a lower optimizer.lr=" in error
    assert 'guard.on_nan="skip"' not in error


def test_a_run_that_was_resumed_elsewhere_is_rolled_back_to_where_it_began(trainer):
    """And not to what lies in its own folder of a run that went another way."""
    former = trainer.reference()
    rest = trainer.resume(former, DP2, ROLL_BACK, EVERY_STEP, work=NormIs(math.nan, (1,)))
    assert hits(rest)[0].step == SAVED_AT
    assert [record.sample_ids[0] for record in rest.records] == [40, 48, 56, 64]


def test_a_damaged_checkpoint_is_passed_over_by_a_rollback(trainer):
    found = trainer.train(TP2, ROLL_BACK, EVERY_OTHER, work=damage_step_4_and_go_wrong_in_6)
    assert "passed over" in found.ranks[0].output
    assert hits(found)[0].step == 2
    assert [record.step for record in found.records] == list(range(1, 9))
    saves = read_records(found.folder / "saves.jsonl", SaveRecord)
    assert [save.step for save in saves] == [2, 4, 6, 8]


def damage_step_4_and_go_wrong_in_6(run: Run) -> None:
    saved = run.past.saved

    def damaging(step: int) -> None:
        if step == 4 and run.speaks:
            next((run.checkpoints / "step-00000004").glob("model-*")).write_bytes(b"")
        saved(step)

    with patch.object(run.past, "saved", damaging):
        NormIs(math.nan, (6,))(run)


def test_data_that_ends_before_the_rolled_back_run_does_ends_it(trainer):
    data = {"data": {"paths": ["synthetic:64"], "repeat": False}}
    ended = trainer.attempt(DP2, ROLL_BACK, EVERY_OTHER, data, work=NormIs(math.nan, (6,)))
    (error,) = ended.errors
    assert error.startswith("DataError: the data fills 6 steps")


# ------------------------------------------------------------------------------------------------
# Checkpoints hold numbers


def train_with_a_nan_that_nothing_reads(run: Run) -> None:
    """In the table of positions, behind the last one that there is a token at."""
    has_last_rows = run.grid.dp.rank == run.grid.dp.size - 1
    for shard in run.engine.shards:
        if shard.name == "position_embedding.weight" and has_last_rows:
            shard.tensor[-1, 0] = torch.nan
    run.run()


@pytest.mark.parametrize("placement", [ALONE, TP2, PP2, DP2], ids=name_of)
def test_a_nan_that_no_loss_shows_is_never_saved(trainer, placement):
    """A17: no NaN checkpoint becomes latest, and the last sound one stays."""
    gpt = merged(GPT, {"model": {"max_seq_length": 64}})
    former = trainer.train(placement, gpt, HALF_WAY)
    folder = {"logging": {"run_dir": str(former.folder)}}
    latest = {"checkpoint": {"resume": "latest", "save_interval": 1}, "train": {"steps": 10}}
    ended = trainer.attempt(
        placement, gpt, folder, latest, work=train_with_a_nan_that_nothing_reads
    )
    (error,) = ended.errors
    assert (
        "position_embedding.weight has a NaN or Inf, and nothing is saved; go on from an earlier"
        in error
    )
    assert ended.saved_steps == [4, 8]


# ------------------------------------------------------------------------------------------------
# Where it comes from

FIND = {"guard": {"find_nan": True}}
RECOMPUTED = {"memory": {"recompute": "full"}}


def nan_in_a_weight(run: Run) -> None:
    for shard in run.engine.shards:
        if shard.name == "layers.2.mlp.down.weight":
            shard.tensor[-1, 1] = torch.nan
    run.run()


@dataclass(frozen=True)
class Planted:
    """Train, while a module of one rank makes a NaN.

    Attributes:
        module: its name.
        is_backward: in the gradient of its output, not in the output itself.
    """

    module: str
    is_backward: bool

    def __call__(self, run: Run) -> None:
        is_hit = run.grid.rank == run.grid.world.size - 1
        hooks = [
            module.register_forward_hook(self._spoil)
            for stage in run.engine.executor.stages.values()
            for name, module in stage.module.named_modules()
            if is_hit and name == self.module
        ]
        try:
            run.run()
        finally:
            for hook in hooks:
                hook.remove()

    def _spoil(self, module, inputs, output):
        if not self.is_backward:
            return output.index_fill(0, torch.tensor([3]), torch.nan)
        output.register_hook(lambda gradient: gradient * math.inf)
        return output


def found_by(trainer, placement, keys: Sections, work: Callable) -> str:
    """What the run that went wrong says of where that began."""
    ended = trainer.attempt(placement, FIND, keys, work=work)
    (error,) = ended.errors
    assert error.startswith("MegagridError: step 1: loss ")
    return error.partition("find-nan: ")[2].partition("; the weights")[0]


@pytest.mark.parametrize(("placement", "keys"), [(ALONE, {}), *GRIDS])
def test_find_nan_names_the_weight_that_has_one(trainer, placement, keys):
    found = found_by(trainer, placement, keys, nan_in_a_weight)
    assert found.startswith("step 1, parameter layers.2.mlp.down.weight: NaN at [")
    assert ", on rank " in found


@pytest.mark.parametrize(
    ("placement", "keys"), [(ALONE, {}), *GRIDS, pytest.param(TP2, RECOMPUTED, id="tp2-recomputed")]
)
def test_find_nan_names_the_module_that_makes_one_forward(trainer, placement, keys):
    found = found_by(trainer, placement, keys, Planted("layers.3.attention.qkv", False))
    last = placement.world_size - 1
    assert found == (
        "step 1, microbatch 0, forward: activation, output of layers.3.attention.qkv: NaN, on rank "
        f"{last} ({placement.coordinate(last)})"
    )


@pytest.mark.parametrize(
    ("placement", "keys"), [(ALONE, {}), *GRIDS, pytest.param(TP2, RECOMPUTED, id="tp2-recomputed")]
)
def test_find_nan_names_the_gradient_that_is_the_first(trainer, placement, keys):
    found = found_by(trainer, placement, keys, Planted("layers.3.mlp_norm", True))
    last = placement.world_size - 1
    assert found.startswith(
        "step 1, microbatch 0, backward: gradient of the output of layers.3.mlp_norm: "
    )
    assert found.endswith(f"on rank {last} ({placement.coordinate(last)})")


def test_find_nan_says_so_if_the_step_is_finite_the_second_time(trainer):
    assert found_by(trainer, DP2, {}, NormIs(math.nan, (1,))).startswith("made again, the step was")
