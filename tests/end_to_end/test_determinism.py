"""Two runs of a recipe are bit by bit the same."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from unittest.mock import patch

import pytest
import torch

from megagrid.config.dump import dump
from megagrid.grid.bootstrap import DETERMINISTIC, make_deterministic
from megagrid.train.determinism import deterministic_kernels
from megagrid.train.run import Run
from tests.end_to_end.t0 import (
    ALONE,
    DP2,
    DROPOUT,
    GPT,
    PP2,
    SP,
    TP2,
    TP2PP2,
    ZB1P,
    computed,
    differing,
    merged,
    read_tensors,
    strategy,
    t0,
)

DETERMINISTIC_RUN = {"train": {"deterministic": True}}


def run_as_stated(run: Run) -> bool:
    """Train as `megagrid train` does; whether torch's mode is as before."""
    before = torch.are_deterministic_algorithms_enabled()
    with deterministic_kernels(run.config.train.deterministic):
        assert torch.are_deterministic_algorithms_enabled()
        run.run()
    return torch.are_deterministic_algorithms_enabled() == before


@pytest.mark.parametrize(
    ("placement", "keys"),
    [
        (TP2, {}),
        (TP2PP2, merged(SP, GPT, DROPOUT)),
        (DP2, strategy("FULL_SHARD")),
        (PP2, merged(ZB1P, {"train": {"precision": "fp16"}})),
    ],
)
def test_two_runs_are_equal_bit_by_bit_and_read_no_memory_that_nobody_wrote(
    trainer, placement, keys
):
    """torch fills what is allocated with NaN in this mode."""
    one, other = (
        trainer.train(placement, DETERMINISTIC_RUN, keys, work=run_as_stated) for _ in range(2)
    )
    assert all(report.result for report in one.ranks)
    assert computed(one.records) == computed(other.records)
    assert differing(one.tensors(8), other.tensors(8)) == []


def test_libraries_are_told_before_they_start_and_what_is_stated_wins():
    stated = {name: "stated" for name in list(DETERMINISTIC)[:1]}
    with patch.dict(os.environ, stated, clear=True):
        make_deterministic()
        assert dict(os.environ) == DETERMINISTIC | stated


@pytest.mark.gpu
def test_two_runs_on_an_accelerator_are_equal_bit_by_bit(tmp_path):
    """bf16, fused attention and its backward, by the command, whose environment it is about."""
    runs = []
    for name in ("one", "other"):
        folder = tmp_path / name
        config = t0(
            folder,
            ALONE,
            {
                "train": {"deterministic": True, "precision": "bf16", "seq_length": 256},
                "model": {"max_seq_length": 256, "hidden_size": 256, "head_dim": 32},
            },
        )
        recipe = tmp_path / f"{name}.toml"
        recipe.write_text(dump(config).replace('device = "cpu"', 'device = "auto"'))
        subprocess.run([sys.executable, "-m", "megagrid", "train", str(recipe)], check=True)
        lines = (folder / "metrics.jsonl").read_text().splitlines()
        numbers = [(json.loads(line)["loss"], json.loads(line)["grad_norm"]) for line in lines]
        runs.append((numbers, read_tensors(Path(folder / "checkpoints/step-00000008"))))
    (numbers, tensors), (other_numbers, other_tensors) = runs
    assert numbers == other_numbers
    assert differing(tensors, other_tensors) == []
