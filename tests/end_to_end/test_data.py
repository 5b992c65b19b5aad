"""Training on data that doesn't fit, ends, or is read ahead.

Rows D13 and D15 of the faults that other trainers have had.
"""

from __future__ import annotations

import pytest

from tests.data.files import write_tokens
from tests.end_to_end.t0 import ALONE, DP2, PP2, TP2, TP2DP2, computed, has_begun, merged, name_of


def ends_after(samples: int, steps: int) -> dict[str, dict[str, object]]:
    return {
        "data": {"paths": [f"synthetic:{samples}"], "repeat": False},
        "train": {"global_batch_size": 4, "steps": steps},
    }


def test_an_id_beyond_the_vocabulary_is_refused_before_the_first_step(cli, tmp_path):
    """D13: naming the id, and the vocabulary."""
    write_tokens(tmp_path / "corpus", [[1, 2, 64, 0] * 50], vocab_size=65)
    keys = {"data": {"paths": [str(tmp_path / "corpus")], "valid_fraction": 0.0}}
    line = cli.mistake("train", cli.recipe(ALONE, keys))
    assert "token id 64" in line
    assert "model.vocab_size=61" in line
    assert "set model.vocab_size=65" in line
    assert not has_begun(cli.run_folder)


def test_a_vocabulary_larger_than_the_data_needs_is_fine(cli, tmp_path):
    write_tokens(tmp_path / "corpus", [[1, 2, 60, 0] * 200], vocab_size=61)
    keys = {"data": {"paths": [str(tmp_path / "corpus")]}, "train": {"steps": 1}}
    assert cli.train(keys, {"model": {"vocab_size": 70}}).code == 0


@pytest.mark.parametrize("placement", [ALONE, DP2, PP2], ids=name_of)
def test_a_run_that_the_data_fills_ends_on_all_ranks(trainer, placement):
    """D15: 13 samples are 3 steps of 4; no rank leaves before the others."""
    training = trainer.train(placement, ends_after(13, steps=3))
    assert [record.sample_ids for record in training.records] == [(0, 3), (4, 7), (8, 11)]
    assert training.saved_steps == [3]


def test_a_run_that_the_data_does_not_fill_is_refused(trainer, cli):
    """D15: not begun, on any rank, rather than a success after fewer steps."""
    line = cli.mistake("train", cli.recipe(ALONE, ends_after(13, steps=4)))
    assert "the data fills 3 steps of train.global_batch_size=4, the run has 4" in line
    refused = trainer.attempt(TP2DP2, ends_after(13, steps=4))
    (error,) = refused.errors
    assert error.startswith("DataError: the data fills 3 steps")
    assert not refused.has_begun


def test_a_resumed_run_counts_what_is_left_of_the_data(trainer):
    former = trainer.train(DP2, ends_after(13, steps=2))
    rest = trainer.resume(former, TP2, ends_after(13, steps=3), step=2)
    assert [record.sample_ids for record in rest.records] == [(8, 11)]
    again = {"checkpoint": {"resume": str(former.checkpoint(2))}}
    refused = trainer.attempt(TP2, ends_after(13, steps=4), again)
    (error,) = refused.errors
    assert error.startswith("DataError: the data fills 3 steps")


def test_data_that_repeats_goes_on_with_its_first_samples(trainer):
    repeated = {"data": {"paths": ["synthetic:4"]}, "optimizer": {"lr": 1e-30}}
    steps = {"train": {"global_batch_size": 4, "steps": 2}}
    first, second = trainer.train(ALONE, repeated, steps).records
    assert (first.sample_ids, second.sample_ids) == ((0, 3), (4, 7))
    assert first.loss == second.loss


@pytest.mark.parametrize("placement", [ALONE, DP2], ids=name_of)
def test_reading_ahead_changes_nothing(trainer, tmp_path, placement):
    """Batches come in the order of the steps, over the end of an epoch too."""
    corpus = tmp_path / "corpus"
    write_tokens(corpus, [[*range(1 + i % 20, 30 + i % 30), 0] for i in range(40)], vocab_size=61)
    keys = {"data": {"paths": [str(corpus)]}}  # some 30 samples; the run takes 64
    found = [
        computed(trainer.train(placement, merged(keys, {"data": {"prefetch": depth}})).records)
        for depth in (0, 1, 2)
    ]
    assert found[0] == found[1] == found[2]
