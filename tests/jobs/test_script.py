"""What is submitted follows from launch/slurm.sbatch."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

from megagrid.jobs.script import Job, Member, script

REPOSITORY = Path(__file__).parents[2]
BY_HAND = (REPOSITORY / "launch/slurm.sbatch").read_text()

MEMBER = Member(("a recipe.toml", "data.paths=['a', \"b\"]", "optimizer.lr=1e-3"), Path("runs/a b"))


def job(*members: Member, options=()) -> Job:
    return Job("recipe.toml", options, "nodes", 8, 3, True, "001", "/usr/bin/python", members)


def settings(text: str, *, task: str = "") -> list[str]:
    """What bash makes of the settings in a script."""
    part = re.search(r"^# --- What to run (?:.*\n)*?\n", text, re.MULTILINE)[0]
    show = 'printf "%s\\n" "$style" "$ranks_per_node" "$requeue" "$submission" "$python" "$run"'
    ran = subprocess.run(
        ["bash", "-euc", f'{part}{show} "${{arguments[@]}}"'],
        env={"SLURM_ARRAY_TASK_ID": task},
        capture_output=True,
        text=True,
        check=True,
    )
    return ran.stdout.splitlines()


def asked(text: str) -> list[str]:
    """What a script asks SLURM for."""
    return re.findall(r"^#SBATCH (.*)$", text, re.MULTILINE)


def test_all_behind_the_settings_is_as_in_the_script_that_is_submitted_by_hand():
    mark = "# --- The ranks' environment"
    text = script(job(MEMBER))
    assert text[text.index(mark) :] == BY_HAND[BY_HAND.index(mark) :]
    assert text.startswith("#!/usr/bin/env bash\n")
    assert subprocess.run(["bash", "-n"], input=text, text=True).returncode == 0


def test_every_setting_of_the_one_is_a_setting_of_the_other():
    names = [
        set(re.findall(r"^ *(\w+)=", text.split("# --- ")[2], re.MULTILINE))
        for text in (BY_HAND, script(job(MEMBER)))
    ]
    assert names[0] == names[1]


def test_arguments_and_folders_reach_bash_as_they_are():
    found = settings(script(job(MEMBER)))
    assert found == ["nodes", "8", "yes", "001", "/usr/bin/python", "runs/a b", *MEMBER.arguments]


def test_each_task_of_an_array_has_a_run_of_its_own():
    other = Member(("recipe.toml", "optimizer.lr=3e-4"), Path("runs/other"))
    text = script(job(MEMBER, other))
    assert settings(text, task="0")[5:] == ["runs/a b", *MEMBER.arguments]
    assert settings(text, task="1")[5:] == ["runs/other", *other.arguments]


@pytest.mark.parametrize(
    ("option", "line", "former"),
    [
        (("output", "a b/%j.out"), "--output='a b/%j.out'", "--output=%x-%j.out"),
        (("no-requeue", None), "--no-requeue", "--requeue"),
        (("signal", "B:USR1@60"), "--signal=B:USR1@60", "--signal=B:USR1@600"),
        (("exclusive", None), "--exclusive", None),
        (("mem", "0"), "--mem=0", None),
    ],
)
def test_an_option_takes_the_place_of_the_one_that_is_there(option, line, former):
    before, after = asked(BY_HAND), asked(script(job(MEMBER, options=(option,))))
    assert former is None or former in before
    assert after == [line if text == former else text for text in before] + (
        [] if former else [line]
    )


def test_an_option_that_is_stated_twice_is_there_once():
    text = script(job(MEMBER, options=(("mem", "0"), ("time", "60"), ("mem", "4G"))))
    assert asked(text)[-2:] == ["--mem=4G", "--time=60"]
