from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

from megagrid import __version__, cli
from megagrid.errors import ConfigError, DataError
from tests.config import recipe

REPOSITORY = Path(__file__).parents[1]

TOLD_WITHOUT_TORCH = (
    "",
    "--help",
    "--version",
    "train --help",
    "train recipe.toml --show-config",
    "grid recipe.toml --gpus-per-node 2",
    "data --help",
    "data prepare --help",
    "schedule ZBV --draw --tied",
    "ckpt --help",
    "ckpt reshard --help",
)

WITHOUT_TORCH = """\
import contextlib, io, json, sys
sys.modules["torch"] = None  # importing it raises ImportError
from megagrid.cli import main
for line in json.loads(sys.argv[1]):
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            code = main(line.split())
        except SystemExit as end:  # of --help
            code = end.code
    if code or err.getvalue() or not out.getvalue():
        print(f"megagrid {line}: {code} {err.getvalue()}")
"""


@pytest.fixture
def verb(monkeypatch):
    """Gives the command line one verb, `do`, that runs a function of the test's."""

    def make(function, add_arguments=lambda parser: None):
        module = ModuleType("a_verb")
        module.run = function
        module.add_arguments = add_arguments
        monkeypatch.setitem(sys.modules, "a_verb", module)
        monkeypatch.setattr(cli, "VERBS", {"do": ("a_verb", "what it does")})

    return make


def test_what_only_tells_needs_no_torch(tmp_path):
    """All in one process that can't import it: a fresh one each would take most of the time."""
    recipe.write(tmp_path)
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_TORCH, json.dumps(TOLD_WITHOUT_TORCH)],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(REPOSITORY)},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_help_names_every_verb(capsys):
    assert cli.main([]) == 0
    out = capsys.readouterr().out
    assert all(f"  {verb} " in out for verb in cli.VERBS)


def test_the_version_is_the_packages(capsys):
    with pytest.raises(SystemExit):
        cli.main(["--version"])
    assert capsys.readouterr().out == f"megagrid {__version__}\n"


def test_the_exit_code_is_the_verbs(verb):
    verb(lambda arguments: 7)
    assert cli.main(["do"]) == 7


@pytest.mark.parametrize("error", [ConfigError("a=1\nis wrong"), DataError("a=1 is wrong")])
def test_a_users_mistake_is_one_line_and_exit_2(verb, capsys, error):
    def fail(arguments):
        raise error

    verb(fail)
    assert cli.main(["do"]) == 2
    assert capsys.readouterr().err == "error: a=1 is wrong\n"


def test_a_fault_of_the_program_keeps_its_traceback(verb):
    def fail(arguments):
        raise ZeroDivisionError

    verb(fail)
    with pytest.raises(ZeroDivisionError):
        cli.main(["do"])


def test_an_interrupt_is_quiet_and_exits_130(verb, capsys):
    def interrupt(arguments):
        raise KeyboardInterrupt

    verb(interrupt)
    assert cli.main(["do"]) == 130
    assert capsys.readouterr().err == ""


def test_a_reader_that_leaves_early_is_no_error(tmp_path):
    """`megagrid grid … | head -1`: writing goes on until the pipe is known to be closed."""
    recipe.write(tmp_path)
    shell = (
        f"{sys.executable} -m megagrid grid recipe.toml train.global_batch_size=4096 "
        "--nodes 512 --gpus-per-node 8 | head -1; exit ${PIPESTATUS[0]}"
    )
    done = subprocess.run(
        ["bash", "-c", shell],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(REPOSITORY)},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.stderr == ""
    assert done.returncode == 141
    assert done.stdout.startswith("4096 ranks = ")


def test_options_may_stand_between_overrides(verb):
    seen = []

    def add_arguments(parser):
        parser.add_argument("recipe")
        parser.add_argument("overrides", nargs="*", default=[])
        parser.add_argument("--flag", action="store_true")

    verb(lambda arguments: seen.append(arguments) or 0, add_arguments)
    assert cli.main(["do", "r.toml", "a.b=1", "--flag", "c.d=2"]) == 0
    assert seen[0].overrides == ["a.b=1", "c.d=2"]
    assert seen[0].flag


def test_a_verb_may_have_verbs_of_its_own(verb, capsys):
    def add_arguments(parser):
        verbs = parser.add_subparsers(dest="verb", required=True)
        verbs.add_parser("this").add_argument("--size", type=int)

    verb(lambda arguments: arguments.size, add_arguments)
    assert cli.main(["do", "this", "--size", "3"]) == 3
    assert cli.main(["do", "this", "--size", "x"]) == 2
    assert cli.main(["do", "that"]) == 2
    errors = capsys.readouterr().err.splitlines()
    assert len(errors) == 2
    assert all(line.startswith("error: argument ") for line in errors)


def test_what_a_subverb_takes_may_come_in_any_order_too(verb):
    def add_arguments(parser):
        this = parser.add_subparsers(dest="verb", required=True).add_parser("this")
        this.add_argument("recipe")
        this.add_argument("overrides", nargs="*", default=[])
        this.add_argument("--size", type=int)

    verb(lambda arguments: seen.append(arguments) or 0, add_arguments)
    seen = []
    assert cli.main(["do", "this", "--size", "3", "r.toml", "a.b=1"]) == 0
    assert cli.main(["do", "this", "r.toml", "a.b=1", "--size", "3", "c.d=2"]) == 0
    assert [(one.verb, one.size, one.overrides) for one in seen] == [
        ("this", 3, ["a.b=1"]),
        ("this", 3, ["a.b=1", "c.d=2"]),
    ]


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["ckpt", "list", "a\0b"], "has a NUL character in it"),
        (["report", ""], 'argument RUN: "" names nothing'),
        (["data", "inspect", ""], 'argument PREFIX: "" names nothing'),
        (["data", "inspect", "nope"], "--output nope`, or name another prefix"),
    ],
)
def test_a_path_that_is_none_is_one_line(arguments, reason, capsys):
    assert cli.main(arguments) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert reason in line


@pytest.mark.parametrize("module", [module for module, _ in cli.VERBS.values()])
def test_every_verb_leads_to_a_module(module):
    path = REPOSITORY / Path(*module.split(".")).with_suffix(".py")
    source = path.read_text(encoding="utf-8")
    assert "\ndef add_arguments(" in source
    assert "\ndef run(" in source


@pytest.mark.parametrize("verb", ["status", "train"])
def test_a_name_that_no_file_can_have_is_a_mistake(capsys, verb):
    name = "x" * 500
    arguments = (
        [name] if verb == "status" else ["recipes/quickstart.toml", f"logging.run_dir={name}"]
    )
    assert cli.main([verb, *arguments]) == 2
    assert capsys.readouterr().err.splitlines()[-1].startswith("error: ")
