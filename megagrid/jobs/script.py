"""The batch script of a submission: launch/slurm.sbatch with its first parts filled in. Pure.

#!/usr/bin/env bash, usage         the command that has made it, in place of the usage
# --- What SLURM is asked for -    #SBATCH lines: an option that is there has its line replaced
# --- What to run ------------     replaced
# --- The ranks' environment -     as it is, from here to the end
"""

from __future__ import annotations

import re
import shlex
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path

PARTS = re.compile(
    r"(?P<shebang>.*\n)(?P<usage>(?:#.*\n)+\n)"
    r"(?P<asked># --- What SLURM is asked for -+\n(?:#.*\n)+)\n"
    r"(?P<run># --- What to run -+\n)(?:.+\n)+\n"
    r"(?P<rest># --- (?:.*\n)+)"
)

Option = tuple[str, str | None]
"""One of sbatch's: ("nodes", "2"), ("exclusive", None)."""


@dataclass(frozen=True)
class Member:
    """One run of a submission; an array has several.

    Attributes:
        arguments: of `megagrid train`.
        run_dir: its folder.
    """

    arguments: tuple[str, ...]
    run_dir: Path


@dataclass(frozen=True)
class Job:
    """What a batch script is made of.

    Attributes:
        recipe: that it was made for.
        options: of sbatch.
        style: "ranks" or "nodes": what srun starts, see launch/slurm.sbatch.
        restarts: of crashed ranks, by the agents of "nodes".
        requeue: whether the script has itself requeued when it was stopped.
        submission: name of the folder in `jobs` of a run's folder that is this submission's.
        python: that megagrid is installed for.
    """

    recipe: str
    options: tuple[Option, ...]
    style: str
    ranks_per_node: int
    restarts: int
    requeue: bool
    submission: str
    python: str
    members: tuple[Member, ...]


def script(job: Job) -> str:
    """The text that sbatch is given."""
    template = (files("megagrid.jobs") / "slurm.sbatch").read_text(encoding="utf-8")
    parts = PARTS.fullmatch(template)
    asked = parts["asked"]
    for option in job.options:
        asked = _with_option(asked, option)
    return "\n".join(
        [
            f"{parts['shebang']}# Written by `megagrid submit {job.recipe}`.\n",
            asked,
            f"{parts['run']}{_settings(job)}",
            parts["rest"],
        ]
    )


def _with_option(asked: str, option: Option) -> str:
    """`asked` with one more option, in place of what it says of it, if anything."""
    name, value = option
    line = f"#SBATCH --{name}" + ("" if value is None else f"={shlex.quote(value)}")
    former = rf"^#SBATCH --(?:no-)?{re.escape(name.removeprefix('no-'))}(?:=.*)?$"
    if re.search(former, asked, re.MULTILINE):
        return re.sub(former, lambda _: line, asked, count=1, flags=re.MULTILINE)
    return f"{asked}{line}\n"


def _settings(job: Job) -> str:
    lines = [
        f"style={job.style}",
        f"ranks_per_node={job.ranks_per_node}",
        f"python={shlex.quote(job.python)}",
        f"requeue={'yes' if job.requeue else 'no'}",
        f"restarts={job.restarts}",
        f"submission={job.submission}",
    ]
    if len(job.members) == 1:
        lines += _member(job.members[0])
    else:
        lines.append("case $SLURM_ARRAY_TASK_ID in")
        for index, member in enumerate(job.members):
            lines += [f"{index})", *(f"    {line}" for line in _member(member)), "    ;;"]
        lines.append("esac")
    return "".join(f"{line}\n" for line in lines)


def _member(member: Member) -> list[str]:
    return [
        f"arguments=({shlex.join(member.arguments)})",
        f"run={shlex.quote(str(member.run_dir))}",
    ]
