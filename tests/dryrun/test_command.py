"""`megagrid dryrun`: what it prints, and mistakes in a line."""

from __future__ import annotations

import json

import pytest

from megagrid.cli import main

RECIPE = "recipes/tiny-llama-tp2pp2.toml"
SHORT = ("--microbatches", "2")


def test_a_ranks_table_has_its_memory_and_its_messages(capsys):
    assert main(["dryrun", RECIPE, "--rank", "3", *SHORT]) == 0
    out = capsys.readouterr().out
    assert "rank 3, pp1 dp0 cp0 tp1" in out
    for word in ("weights", "activations", "all_gather", "send", "at the peak, in"):
        assert word in out
    assert "host" not in out


def test_json_has_a_rank_of_each_stage_in_bytes(capsys):
    assert main(["dryrun", RECIPE, "--world", "8", "--all-stages", "--json", *SHORT]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["world_size"] == 8
    assert [rank["rank"] for rank in found["ranks"]] == [0, 4]
    for rank in found["ranks"]:
        assert sum(rank["peak_bytes_by_kind"].values()) == rank["peak_bytes"]
        assert sum(rank["resting_bytes"].values()) < rank["peak_bytes"]
        assert {row["axis"] for row in rank["communication"]} == {"tp", "pp", "dp", "world"}


def test_what_the_host_keeps_is_shown_apart(capsys):
    keys = ("memory.cpu_offload=true", "memory.activation_offload=true")
    assert main(["dryrun", RECIPE, *keys, *SHORT]) == 0
    out = capsys.readouterr().out
    assert "host, between steps" in out and "host, at the peak, in" in out
    assert main(["dryrun", RECIPE, *keys, "--all-stages", *SHORT]) == 0
    assert "host" in capsys.readouterr().out
    assert main(["dryrun", RECIPE, *keys, "--json", *SHORT]) == 0
    (rank,) = json.loads(capsys.readouterr().out)["ranks"]
    assert sum(rank["resting_bytes"].values()) == 0
    assert set(rank["host_resting_bytes"]) == {"weights", "optimizer states"}
    kinds = rank["host_peak_bytes_by_kind"]
    assert "activations" in kinds and sum(kinds.values()) == rank["host_peak_bytes"]


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["--rank", "4"], ("--rank 4", "0 to 3")),
        (["--rank", "-1"], ("--rank -1", "0 to 3")),
        (["--world", "6"], ("6 ranks", "multiple of 4")),
        (["--world", "0"], ("--world 0", "between 1 and")),
        (["--microbatches", "0"], ("--microbatches 0", "between 1 and")),
        (["model.num_heads=7"], ("model.num_heads=7",)),
        (["--rank", "1", "--all-stages"], ("--all-stages", "--rank")),
    ],
    ids=" ".join,
)
def test_a_mistake_is_told_in_a_line(arguments, named, capsys):
    assert main(["dryrun", RECIPE, *arguments]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ") and error.count("\n") == 1
    assert all(word in error for word in named)
