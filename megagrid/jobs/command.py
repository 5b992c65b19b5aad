"""Submit a recipe to SLURM, after its keys and its grid have been checked.

The script that is submitted lies in the run's folder, jobs/NNN/job.sbatch, with a copy of the
recipe, what the job says (NUMBER.out) and each rank's words. A job that is stopped, by preemption
or by its time limit, saves; it is requeued, or followed by the next one of --chain, and goes on
from there.
"""

from __future__ import annotations

import argparse
import shlex
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TextIO

from megagrid.checkpoint.folders import CHECKPOINTS, newest_first
from megagrid.config.arguments import add_recipe_arguments
from megagrid.config.dump import toml_value
from megagrid.config.load import load
from megagrid.config.rules import check, placement
from megagrid.config.schema import Config
from megagrid.errors import CheckpointError, ConfigError, GridError, MegagridError
from megagrid.grid.placement import AXES, Coordinate, Placement, check_tp_inside_nodes
from megagrid.grid.topology import Cluster
from megagrid.jobs import sbatch
from megagrid.jobs.script import Job, Member, Option, script
from megagrid.jobs.sweep import combinations, folder_name
from megagrid.pipeline.partition import stage_layers
from megagrid.pipeline.program import training_program
from megagrid.plan.peak import peak_bytes
from megagrid.terminal import size_text, warn_on_stderr
from megagrid.train.command import check_inputs

JOBS = "jobs"
"""The folder of submissions in a run's folder."""

PASSED_ON = ("partition", "account", "qos", "time", "constraint")
"""Options that sbatch has too, by the same name."""

MADE_HERE = {
    "nodes": "--nodes",
    "ntasks": "--ranks-per-node",
    "ntasks-per-node": "--ranks-per-node",
    "cpus-per-task": "--cpus-per-rank",
    "gpus-per-node": "--gpus-per-node",
    "time": "--time",
    "signal": "--signal-seconds",
    "requeue": "--requeue",
    "no-requeue": "--no-requeue",
    "array": "--array",
    "dependency": "--chain",
    "output": "logging.run_dir, where it lies",
    "chdir": "the folder that it is submitted from",
}
"""Options of sbatch that something else is computed from or goes with, and what to state instead:
stated past it, they would have a grid checked that isn't the one that runs."""

MOST_SIGNAL_SECONDS = 65_535
"""SLURM's own limit."""

MAX_RESTARTS = 3

Overrides = tuple[str, ...]
"""Of a recipe's keys: section.key=value."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """What `megagrid submit` takes."""
    add_recipe_arguments(parser)
    _add_number(parser, "--nodes", "machines", required=True)
    _add_number(parser, "--gpus-per-node", "of each machine")
    _add_number(
        parser,
        "--ranks-per-node",
        "processes on each; without it one a GPU, or the recipe's grid over the nodes",
    )
    _add_number(parser, "--cpus-per-rank", "cores of each process (1, or all if --exclusive)")
    parser.add_argument(
        "--style",
        choices=("ranks", "nodes"),
        default="ranks",
        help="what srun starts: each rank, or one agent a node, which starts the ranks there",
    )
    _add_number(
        parser,
        "--max-restarts",
        f"of crashed ranks by the agents of --style nodes, before their job ends ({MAX_RESTARTS})",
    )
    for name in PASSED_ON:
        parser.add_argument(f"--{name}", metavar=name.upper(), help="as of sbatch")
    parser.add_argument("--exclusive", action="store_true", help="share no node; as of sbatch")
    parser.add_argument("--job-name", metavar="NAME", help="the recipe's name, unless stated")
    _add_number(
        parser,
        "--signal-seconds",
        "before the time limit, when the run is asked to save and stop; without it as many as that "
        "may take by the recipe, checkpoint.seconds_to_stop",
    )
    parser.add_argument(
        "--requeue",
        action=argparse.BooleanOptionalAction,
        help="whether a job that was stopped starts again; without --chain it does",
    )
    _add_number(parser, "--chain", "as many jobs, one after the other, until it is done", default=1)
    parser.add_argument(
        "--array",
        action="append",
        default=[],
        metavar="section.key=[A,B]",
        help="a run for each value, in a job and a folder of its own; stated twice, for each pair",
    )
    parser.add_argument(
        "--sbatch-option",
        action="append",
        default=[],
        metavar="NAME[=VALUE]",
        help="any other option of sbatch; with dashes in front, write --sbatch-option=--NAME",
    )
    parser.add_argument(
        "--dry-run", action="store_true", help="print the script; write and submit nothing"
    )


def _add_number(parser: argparse.ArgumentParser, name: str, text: str, **how) -> None:
    parser.add_argument(name, type=int, metavar="N", help=text, **how)


def run(arguments: argparse.Namespace) -> int:
    """Check, write the script, submit it."""
    _check_options(arguments)
    base = load(arguments.recipe, arguments.overrides)
    ranks = _ranks_per_node(arguments, base)
    runs = _runs(arguments, base)
    cluster = Cluster.uniform(arguments.nodes, ranks)
    grids = [(config, _check_grid(config, cluster)) for _, config in runs]
    for config, _ in grids:
        _check_name(config.logging.run_dir)
        _check_files(config, arguments.dry_run)
    arguments.signal_seconds = _signal_seconds(arguments, [config for config, _ in grids])
    run_dirs = [Path(base.logging.run_dir), *(Path(config.logging.run_dir) for config, _ in grids)]
    if arguments.dry_run:
        _tell_grids(grids, arguments.nodes, sys.stderr)
        folder = _next_folder(run_dirs)
        print(script(_job(arguments, folder, _members(folder, runs), ranks)), end="")
        return 0
    sbatch.check_is_here()
    _tell_grids(grids, arguments.nodes, sys.stdout)
    folder = _make_folder(run_dirs)
    members = _members(folder, runs)
    _write(Path(arguments.recipe), folder, script(_job(arguments, folder, members, ranks)))
    _tell_jobs(_submit(folder, arguments.chain), folder, members)
    return 0


# --- Checks --------------------------------------------------------------------------------------


def _check_options(arguments: argparse.Namespace) -> None:
    """
    Raises:
        GridError: naming the option.
    """
    for name in ("nodes", "gpus_per_node", "ranks_per_node", "cpus_per_rank", "chain"):
        number = getattr(arguments, name)
        if number is not None and number < 1:
            raise GridError(f"--{name.replace('_', '-')} {number} must be at least 1")
    if arguments.chain > 1 and arguments.array:
        raise GridError(
            "--chain and --array don't go together; submit each run's chain, or rely on --requeue"
        )
    if not 0 <= (arguments.signal_seconds or 0) <= MOST_SIGNAL_SECONDS:
        raise GridError(
            f"--signal-seconds {arguments.signal_seconds} must be from 0 to {MOST_SIGNAL_SECONDS}"
        )
    _check_restarts(arguments)
    texts = [getattr(arguments, name) or "" for name in (*PASSED_ON, "job_name")]
    for text in (*texts, *arguments.sbatch_option):
        if "\n" in text:
            raise GridError(f"{text!r} has more than one line; sbatch's options have one")
    for text in arguments.sbatch_option:
        _check_sbatch_option(text)


def _signal_seconds(arguments: argparse.Namespace, runs: Sequence[Config]) -> int:
    """How long before the time limit all `runs` are asked to stop: as long as they may take.

    Raises:
        GridError: the time limit is shorter.
    """
    most = max(config.checkpoint.seconds_to_stop for config in runs)
    stated = arguments.signal_seconds
    seconds = min(most, MOST_SIGNAL_SECONDS) if stated is None else stated
    if arguments.time is not None and sbatch.seconds(arguments.time) <= seconds:
        raise GridError(
            f"--time {arguments.time} is over before --signal-seconds {seconds}: "
            "the run would be asked to stop as it starts; raise the one or lower the other"
        )
    if seconds < most:
        warn_on_stderr(
            f"--signal-seconds {seconds} is less than checkpoint.seconds_to_stop={most}: a save "
            "that isn't whole at the time limit is lost, and SLURM doesn't requeue such a job"
        )
    return seconds


def _check_restarts(arguments: argparse.Namespace) -> None:
    restarts = arguments.max_restarts
    if restarts is not None and restarts < 0:
        raise GridError(f"--max-restarts {restarts} must be at least 0")
    if restarts is not None and arguments.style != "nodes":
        raise GridError(
            f"--max-restarts {restarts} is of the agents of --style nodes; with --style ranks a "
            "crash ends the job, and --requeue starts it again"
        )


def _check_sbatch_option(text: str) -> None:
    name, _ = _sbatch_option(text)
    if len(name) < 2 or (text.startswith("-") and not text.startswith("--")):
        raise GridError(f"--sbatch-option {text!r} must name an option of sbatch in full")
    if name in MADE_HERE:
        raise GridError(f"--sbatch-option {text!r} is stated by {MADE_HERE[name]}")


def _sbatch_option(text: str) -> Option:
    name, equals, value = text.lstrip("-").partition("=")
    return name.strip(), value if equals else None


def _ranks_per_node(arguments: argparse.Namespace, config: Config) -> int:
    """As stated, or one a GPU, or the recipe's grid evenly over the nodes."""
    if arguments.ranks_per_node is not None:
        gpus = arguments.gpus_per_node
        if gpus is not None and arguments.ranks_per_node > gpus and config.train.device != "cpu":
            raise GridError(
                f"--ranks-per-node {arguments.ranks_per_node} is more than --gpus-per-node {gpus}; "
                "a rank has a GPU to itself"
            )
        return arguments.ranks_per_node
    if arguments.gpus_per_node is not None:
        return arguments.gpus_per_node
    world_size = placement(config).world_size
    if world_size % arguments.nodes:
        raise GridError(
            f"the recipe's grid of {world_size} ranks can't be divided over --nodes "
            f"{arguments.nodes}; state --ranks-per-node, and parallel.* sizes to go with it"
        )
    return world_size // arguments.nodes


def _check_grid(config: Config, cluster: Cluster) -> Placement:
    """The grid, if it can run."""
    check(config, cluster.world_size)
    grid = placement(config, cluster.world_size)
    if not config.parallel.allow_tp_across_nodes:
        check_tp_inside_nodes(grid, cluster)
    stage_layers(config, grid, training_program(config, grid).placement)
    return grid


def _check_name(run_dir: str) -> None:
    """Whether SLURM can have output files there."""
    if "\\" in run_dir or not run_dir.isprintable():
        raise ConfigError(
            f"logging.run_dir={toml_value(run_dir)} has a backslash or a control character, which "
            "SLURM can't have in the name of a job's output; name another folder"
        )


def _check_files(config: Config, is_dry: bool) -> None:
    """Whether what the run reads is there, and what it would refuse to write over isn't; a dry run,
    which may be far from the cluster's disks, only warns."""
    try:
        check_inputs(config)
        folder = Path(config.logging.run_dir)
        saved = newest_first(folder / CHECKPOINTS)
        if config.checkpoint.resume is None and saved:
            raise CheckpointError(
                f'logging.run_dir="{folder}" has a run at step {saved[0].step}; go on from there '
                "with checkpoint.resume=latest, or name another folder"
            )
    except MegagridError as error:
        if not is_dry:
            raise
        warn_on_stderr(str(error))


# --- What is submitted ---------------------------------------------------------------------------


def _runs(arguments: argparse.Namespace, base: Config) -> list[tuple[Overrides, Config]]:
    """The overrides of each run, and what comes of them."""
    stated = tuple(arguments.overrides)
    if not arguments.array:
        return [(stated, base)]
    # Each has a folder in that of the recipe, which it therefore states anew.
    stated = tuple(text for text in stated if not text.startswith("logging.run_dir="))
    runs = []
    for extra in combinations(arguments.array):
        folder = Path(base.logging.run_dir) / folder_name(extra)
        overrides = (*stated, *extra, f"logging.run_dir={folder}")
        runs.append((overrides, load(arguments.recipe, overrides)))
    return runs


def _next_folder(run_dirs: Sequence[Path]) -> Path:
    """The folder of this submission in the first of `run_dirs`; its name is new in all of them."""
    names = [path.name for run_dir in run_dirs for path in (run_dir / JOBS).glob("[0-9]*")]
    number = 1 + max((int(name) for name in names if name.isdigit()), default=0)
    return run_dirs[0] / JOBS / f"{number:03}"


def _make_folder(run_dirs: Sequence[Path]) -> Path:
    """`_next_folder`, which then is this submission's alone, of all at one moment."""
    while True:
        folder = _next_folder(run_dirs)
        try:
            folder.mkdir(parents=True)
            return folder
        except OSError as error:
            if not folder.is_dir():
                raise _unwritable(folder, error) from None


def _members(folder: Path, runs: Sequence[tuple[Overrides, Config]]) -> tuple[Member, ...]:
    return tuple(
        Member((str(folder / "recipe.toml"), *overrides), Path(config.logging.run_dir))
        for overrides, config in runs
    )


def _job(
    arguments: argparse.Namespace, folder: Path, members: tuple[Member, ...], ranks: int
) -> Job:
    requeue = arguments.chain == 1 if arguments.requeue is None else arguments.requeue
    return Job(
        recipe=arguments.recipe,
        options=tuple(_options(arguments, folder, len(members), ranks, requeue)),
        style=arguments.style,
        ranks_per_node=ranks,
        restarts=MAX_RESTARTS if arguments.max_restarts is None else arguments.max_restarts,
        requeue=requeue,
        submission=folder.name,
        python=sys.executable,
        members=members,
    )


def _options(
    arguments: argparse.Namespace, folder: Path, members: int, ranks: int, requeue: bool
) -> list[Option]:
    """Of sbatch; those that the user names stand last, and win."""
    is_array = members > 1
    tasks = ranks if arguments.style == "ranks" else 1
    said = str(folder).replace("%", "%%")  # what follows a single one SLURM fills in
    options: list[Option] = [
        ("job-name", arguments.job_name or Path(arguments.recipe).stem),
        ("output", f"{said}/{'%A_%a.out' if is_array else '%j.out'}"),
        ("requeue" if requeue else "no-requeue", None),
        ("signal", f"B:USR1@{arguments.signal_seconds}"),
        ("nodes", str(arguments.nodes)),
        ("ntasks-per-node", str(tasks)),
    ]
    # With nothing stated, SLURM gives each task one core, or the script all that there are.
    if arguments.cpus_per_rank is not None or (tasks < ranks and not arguments.exclusive):
        cores = (arguments.cpus_per_rank or 1) * ranks // tasks
        options.append(("cpus-per-task", str(cores)))
    if arguments.gpus_per_node is not None:
        options.append(("gpus-per-node", str(arguments.gpus_per_node)))
    options += [(name, text) for name in PASSED_ON if (text := getattr(arguments, name))]
    if arguments.exclusive:
        options.append(("exclusive", None))
    if is_array:
        options.append(("array", f"0-{members - 1}"))
    return options + [_sbatch_option(text) for text in arguments.sbatch_option]


def _write(recipe: Path, folder: Path, text: str) -> None:
    """The script, and the recipe as it is now: a job that starts again next week runs the same."""
    try:
        shutil.copyfile(recipe, folder / "recipe.toml")
        (folder / "job.sbatch").write_text(text, encoding="utf-8")
    except OSError as error:
        raise _unwritable(folder, error) from None


def _unwritable(folder: Path, error: OSError) -> GridError:
    return GridError(
        f"{folder} can't be written to ({error.strerror}); name another logging.run_dir"
    )


def _submit(folder: Path, chain: int) -> list[str]:
    """The jobs' numbers.

    Raises:
        GridError: sbatch refuses one; names those that are there already.
    """
    numbers: list[str] = []
    for _ in range(chain):
        after = [f"--dependency=afterany:{numbers[-1]}"] if numbers else []
        try:
            numbers.append(sbatch.submit(folder / "job.sbatch", after))
        except GridError as error:
            if not numbers:
                raise
            raise GridError(
                f"{error}; of --chain {chain}, {len(numbers)} are submitted: let them run, or "
                f"scancel {' '.join(numbers)}"
            ) from None
    return numbers


# --- What the user is told -----------------------------------------------------------------------


def _tell_grids(runs: Sequence[tuple[Config, Placement]], nodes: int, where: TextIO) -> None:
    """A line for each grid of the runs', with the most that a rank of any of them takes."""
    peaks: dict[str, int] = {}
    for config, grid in runs:
        sizes = " x ".join(f"{axis} {grid.size(axis)}" for axis in reversed(AXES))
        told = f"{grid.world_size} ranks = {sizes} (innermost first) on {nodes} nodes"
        peaks[told] = max(peaks.get(told, 0), _peak(config, grid))
    for told, peak in peaks.items():
        size = size_text(peak, is_binary=True)
        print(f"{told}; a rank's tensors take {size} at most, by estimate", file=where)


def _peak(config: Config, grid: Placement) -> int:
    """Bytes of the rank that has most."""
    is_fused = config.train.device != "cpu"
    return max(
        peak_bytes(config, grid, Coordinate(pp, 0, 0, 0), fused_norms=is_fused).total
        for pp in range(grid.pp)
    )


def _tell_jobs(numbers: Sequence[str], folder: Path, members: Sequence[Member]) -> None:
    jobs = " ".join(numbers)
    says = "_*" if len(members) > 1 else ""
    rows = {
        "script": folder / "job.sbatch",
        "status": f"megagrid status {members[0].run_dir}",
        "state": f"squeue --job {','.join(numbers)}",
        "says": f"tail -F {folder / numbers[0]}{says}.out",
        "ranks say": f"{members[0].run_dir / JOBS / folder.name}/*/*.log",
        "stop": f"scancel {jobs}",
    }
    print(f"submitted job{'s' if len(numbers) > 1 else ''} {jobs}")
    for name, text in rows.items():
        print(f"  {name:<10}{text}")
    for index, member in enumerate(members if len(members) > 1 else ()):
        print(f"  {f'{numbers[0]}_{index}':<10}{shlex.quote(str(member.run_dir))}")
