"""What a recipe may say but hardly means."""

from __future__ import annotations

import pytest

from megagrid.cli import main
from megagrid.config.cautions import cautions
from megagrid.config.load import load
from tests.config import recipe

WARMUP = "lr_schedule.warmup_steps"


def cautions_of(folder, *overrides: str) -> list[str]:
    return cautions(load(recipe.write(folder), overrides))


@pytest.mark.parametrize("warmup", [0, 7, 8])
def test_nothing_is_said_of_a_warmup_that_fits(tmp_path, warmup):
    assert cautions_of(tmp_path, f"{WARMUP}={warmup}") == []


@pytest.mark.parametrize(
    "length",
    [["train.steps=8"], ["train.steps=none", f"train.tokens={8 * 8 * 32}"]],
    ids=["steps", "tokens"],
)
def test_a_warmup_longer_than_the_run_is_told_with_both_lengths(tmp_path, length):
    (told,) = cautions_of(tmp_path, f"{WARMUP}=9", *length)
    for words in (f"{WARMUP}=9", "last step is 8", "optimizer.lr=0.001"):
        assert words in told
    assert "\n" not in told


def test_a_caution_is_one_line_on_stderr_and_nothing_stops(tmp_path, capsys):
    path = str(recipe.write(tmp_path))
    assert main(["train", path, f"{WARMUP}=9", "--show-config"]) == 0
    out, err = capsys.readouterr()
    assert err == f"warning: {cautions_of(tmp_path, f'{WARMUP}=9')[0]}\n"
    assert "warning" not in out


def test_a_loss_scale_that_nothing_reads_is_told(tmp_path):
    stated = "loss_scale.initial=1024"
    (told,) = cautions_of(tmp_path, stated)
    assert told.startswith("[loss_scale] isn't read under train.precision=")
    assert cautions_of(tmp_path, stated, "train.precision=fp16") == []
