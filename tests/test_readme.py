"""What the README shows is so."""

from __future__ import annotations

import os
import re
import shlex
from pathlib import Path

import pytest

from megagrid.cli import VERBS, main

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()

SESSIONS = re.findall(r"^```console\n\$ (megagrid .+)\n((?:.*\n)*?)^```$", README, re.MULTILINE)
"""(command, output) of each block that shows both."""

TRAININGS = re.findall(r"^megagrid (train \$RECIPE(?:.*\\\n)*.*)$", README, re.MULTILINE)
"""What runs too long to be run again, but whose arguments can be read."""

QUICK = ("grid", "schedule", "train")
"""Verbs whose sessions are run again; those of train are mistakes, which end at once."""


@pytest.mark.parametrize(("command", "output"), SESSIONS, ids=[command for command, _ in SESSIONS])
def test_a_command_prints_what_is_shown_of_it(command, output, monkeypatch, capsys):
    monkeypatch.chdir(ROOT)
    # What would become the agent of the ranks is the process of the tests.
    monkeypatch.setattr(os, "execve", lambda *_: pytest.fail("ranks were started"))
    _, *arguments = shlex.split(command)
    assert arguments[0] in QUICK
    main(arguments)
    assert "".join(capsys.readouterr()) == output


@pytest.mark.parametrize("command", TRAININGS)
def test_a_training_that_is_shown_has_a_recipe_that_may_run(command, monkeypatch, capsys):
    monkeypatch.chdir(ROOT)
    recipe = re.search(r"^RECIPE=(\S+)$", README, re.MULTILINE)[1]
    arguments = shlex.split(command.replace("$RECIPE", recipe).replace("\\\n", " "), comments=True)
    assert main([*arguments, "--show-config"]) == 0
    assert capsys.readouterr().err == ""


def test_every_verb_is_in_the_table_and_no_other():
    assert set(re.findall(r"^\| `megagrid (\w+)", README, re.MULTILINE)) == set(VERBS)


@pytest.mark.parametrize(
    "path", sorted(set(re.findall(r"\.?/?((?:launch|tests|recipes)/[\w./-]+)", README)))
)
def test_every_file_named_is_there(path):
    assert (ROOT / path.rstrip("/.")).exists()


def test_every_folder_is_in_the_map():
    listed = set(re.findall(r"^ *(\w+)/ ", README, re.MULTILINE)) | {"megagrid"}
    package = {
        path.name for path in (ROOT / "megagrid").iterdir() if (path / "__init__.py").exists()
    }
    project = {path.parent.name for path in ROOT.glob("*/*") if path.parent.name[0] != "."}
    made = {"runs", "data", "build", "wandb", "megagrid.egg-info"}  # by programs, see .gitignore
    assert listed == package | (project - made)
