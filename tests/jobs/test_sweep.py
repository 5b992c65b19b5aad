from __future__ import annotations

import pytest

from megagrid.errors import ConfigError
from megagrid.jobs.sweep import combinations, folder_name


@pytest.mark.parametrize(
    ("arrays", "runs"),
    [
        ([], [()]),
        (["optimizer.lr=[1e-3,3e-4]"], [("optimizer.lr=0.001",), ("optimizer.lr=0.0003",)]),
        (
            ['optimizer.name=["adamw", "sgd"]'],
            [('optimizer.name="adamw"',), ('optimizer.name="sgd"',)],
        ),
        (["optimizer.name=[adamw, sgd]"], [("optimizer.name=adamw",), ("optimizer.name=sgd",)]),
        (["data.paths=[['a'],['b']]"], [('data.paths=["a"]',), ('data.paths=["b"]',)]),
        (
            ["train.seed=[1,2]", "train.steps=[3,4]"],
            [(f"train.seed={a}", f"train.steps={b}") for a in (1, 2) for b in (3, 4)],
        ),
    ],
)
def test_a_run_for_each_combination_of_values(arrays, runs):
    assert combinations(arrays) == runs


@pytest.mark.parametrize(
    ("arrays", "says"),
    [
        (["optimizer.lr=1e-3"], "must be a key with a list of values"),
        (["optimizer.lr"], "must be a key with a list of values"),
        (["optimizer.lr=[]"], "must be a key with a list of values"),
        (["optimizer.lr=[1e-3,0.001]"], "has a value twice"),
        (["train.seed=[1]", "train.seed=[2]"], "states a key twice"),
        (["logging.run_dir=[a,b]"], "gives each run a folder in logging.run_dir"),
        ([f"train.seed={list(range(1001))}"], "makes 1001 runs"),
    ],
)
def test_what_is_no_sweep_is_refused(arrays, says):
    with pytest.raises(ConfigError, match=says):
        combinations(arrays)


def test_runs_have_folders_with_names_that_a_file_system_takes():
    assert folder_name(["optimizer.lr=0.001", "train.seed=1"]) == "optimizer.lr=0.001,train.seed=1"
    assert folder_name(['data.paths=["/a/b c"]']) == "data.paths=_a_b_c"
