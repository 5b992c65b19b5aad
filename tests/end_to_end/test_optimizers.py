"""Runs with other optimizers than AdamW: saved, gone on with on other grids, compared."""

from __future__ import annotations

import pytest

from megagrid.checkpoint.manifest import state_kind, weight_of
from megagrid.cli import main
from megagrid.plan.memory import persistent_bytes
from megagrid.train.digest_records import FILE_NAME, StepDigests
from megagrid.train.metrics import read_records
from tests.end_to_end.t0 import (
    ALONE,
    DP2,
    HALF_WAY,
    SP,
    TIED,
    TP2,
    TP2DP2,
    TP2PP2,
    assert_parity,
    computed,
    differing,
    merged,
)
from tests.end_to_end.test_memory import kept_by_engine

SGD = {"optimizer": {"name": "sgd", "lr": 0.1}}
MUON = {"optimizer": {"name": "muon", "adamw_lr": 2e-3}}
DIGESTS = {"logging": {"digest_interval": 2}}


@pytest.mark.parametrize("keys", [SGD, MUON], ids=["sgd", "muon"])
def test_a_run_goes_on_on_other_grids_and_bit_by_bit_on_its_own(trainer, keys):
    whole = trainer.train(TP2DP2, keys, SP, HALF_WAY)
    rest = trainer.resume(whole, TP2DP2, keys, SP)
    assert computed(rest.records) == computed(whole.records[4:])
    assert differing(rest.tensors(8), whole.tensors(8)) == []
    reference = trainer.reference(keys)
    assert_parity(whole.records, reference.records)
    for placement in (ALONE, TP2PP2):
        assert_parity(trainer.resume(whole, placement, keys).records, reference.records)


def test_a_checkpoint_has_the_states_of_what_updates_each_weight(trainer):
    states = trainer.train(TP2DP2, merged(MUON, TIED), {"train": {"steps": 2}}).tensors(2)
    kinds: dict[str, set[str]] = {}
    for name in states:
        if name.startswith("optimizer."):
            kinds.setdefault(weight_of(name), set()).add(state_kind(name))
    assert kinds["layers.0.attention.wk.weight"] == kinds["layers.3.mlp.down.weight"]
    assert kinds["layers.0.attention.wk.weight"] == {"momentum"}
    assert kinds["embedding.weight"] == kinds["norm.weight"] == {"exp_avg", "exp_avg_sq"}


@pytest.mark.parametrize("keys", [SGD, MUON], ids=["sgd", "muon"])
def test_every_rank_keeps_what_the_closed_form_says(trainer, keys):
    training = trainer.train(TP2DP2, keys, {"train": {"steps": 1}}, work=kept_by_engine)
    for rank, report in enumerate(training.ranks):
        coordinate = TP2DP2.coordinate(rank)
        assert report.result == persistent_bytes(training.config, TP2DP2, coordinate)


def test_another_optimizers_checkpoint_is_refused_in_a_line(trainer):
    former = trainer.reference(SGD)
    resume = {"checkpoint": {"resume": str(former.checkpoint(4))}}
    (error,) = trainer.attempt(DP2, resume).errors
    assert "has the states of another optimizer: momentum" in error and "\n" not in error
    assert "set optimizer.name as in its config.toml" in error


def test_runs_on_two_grids_compare_equal_and_with_another_rate_part_at_the_update(trainer, capsys):
    one = trainer.train(TP2, DIGESTS, SP, HALF_WAY)
    other = trainer.train(DP2, DIGESTS)
    rates = trainer.train(DP2, DIGESTS, {"optimizer": {"lr": 2e-3}})
    assert [r.step for r in read_records(one.folder / FILE_NAME, StepDigests)] == [1, 3, 5, 7]
    assert main(["compare", str(one.folder), str(other.folder)]) == 0
    assert "A and B are equal in 4 steps, within 0.0001" in capsys.readouterr().out
    assert main(["compare", str(one.folder), str(rates.folder)]) == 1
    told = capsys.readouterr().out
    assert "  optimizer.lr  0.001  0.002" in told
    assert "part in step 1 in the pass update" in told and "at learning rate" in told
    # A resumed run's digests are those of the uninterrupted one.
    rest = trainer.resume(one, DP2, DIGESTS)
    assert main(["compare", str(one.folder), str(rest.folder)]) == 0
    assert "A and B are equal in 2 steps" in capsys.readouterr().out
