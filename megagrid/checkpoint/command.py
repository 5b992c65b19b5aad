"""Look into checkpoints, compare them, and cut them for another grid. No ranks needed.

    megagrid ckpt list runs/tiny
    megagrid ckpt verify runs/tiny
    megagrid ckpt inspect runs/tiny/checkpoints/step-00000100
    megagrid ckpt diff runs/tiny runs/tiny-tp2
    megagrid ckpt reshard runs/tiny resharded parallel.tensor_parallel_size=2

Where a checkpoint is asked for, the folder of a run means its newest one.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from megagrid.checkpoint.folders import (
    ABANDONED,
    CHECKPOINTS,
    DELETED,
    PARTIAL,
    REPLACED,
    candidates,
    is_step_name,
)
from megagrid.checkpoint.manifest import (
    CONFIG,
    OPTIMIZER_PREFIX,
    TRAINER_STATE,
    Manifest,
    find_damage,
    read_manifest,
    read_trainer_state,
)
from megagrid.config.arguments import add_overrides, path_argument
from megagrid.errors import CheckpointError, ConfigError
from megagrid.grid.placement import AXES
from megagrid.terminal import ProgressBar, size_text

DIFFERENT = 1

GRID_KEYS = ("parallel.", "train.micro_batch_size=", "train.global_batch_size=")
"""How the overrides begin that a grid is made with: its sizes, and batches that it divides."""

STATES = {
    PARTIAL: "a save that didn't end, or hasn't yet",
    REPLACED: "replaced by a later save of this step",
    DELETED: "being removed",
    ABANDONED: "sizes are right; the run went on from an earlier step",
    "": "sizes are right",
}


@dataclass(frozen=True)
class Verb:
    """A subverb.

    Attributes:
        text: one line of help; `more` follows it in the help of the verb itself.
        add_arguments: to its parser.
        run: do it; returns the exit code.
    """

    text: str
    add_arguments: Callable[[argparse.ArgumentParser], None]
    run: Callable[[argparse.Namespace], int]
    more: str = ""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The subverbs."""
    parser.formatter_class = argparse.RawDescriptionHelpFormatter  # keeps the lines of examples
    verbs = parser.add_subparsers(dest="ckpt_verb", required=True, metavar="VERB")
    for name, verb in VERBS.items():
        subparser = verbs.add_parser(
            name, help=verb.text, description=f"{verb.text[0].upper()}{verb.text[1:]}. {verb.more}"
        )
        verb.add_arguments(subparser)


def run(arguments: argparse.Namespace) -> int:
    """Do what the subverb says; returns the exit code."""
    try:
        return VERBS[arguments.ckpt_verb].run(arguments)
    except OSError as error:
        if error.filename is None:  # no file of the user's: a closed pipe, or a fault of megagrid
            raise
        raise CheckpointError(f"{error.filename}: {error.strerror}") from None


# --- list, verify, inspect -----------------------------------------------------------------------


def _add_run(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", type=path_argument, metavar="RUN", help="its folder")


def _add_checkpoint(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "checkpoint", type=path_argument, metavar="CHECKPOINT", help="its folder, or a run's"
    )


def _list(arguments: argparse.Namespace) -> int:
    """Print a line for each folder of checkpoints, newest first, with what its sizes say."""
    folder = arguments.run
    if (folder / CHECKPOINTS).is_dir():
        folder = folder / CHECKPOINTS
    names = [path.name for path in folder.iterdir()] if folder.is_dir() else []
    paths = [folder / name for name in sorted(names, reverse=True) if is_step_name(name)]
    if not paths:
        raise _nothing_in(arguments.run, "the folder of a run")
    for path in paths:
        print(f"{path.name:<24}{_summary(path)}")
    return 0


def _summary(checkpoint: Path) -> str:
    if checkpoint.suffix in (PARTIAL, DELETED):
        return f"{'':>12}   {STATES[checkpoint.suffix]}"
    try:
        manifest = read_manifest(checkpoint)
    except CheckpointError as error:
        return f"{'':>12}   not sound: {error}"
    problems = find_damage(checkpoint, manifest.files.items(), deep=False)
    state = f"not sound: {problems[0]}" if problems else STATES[checkpoint.suffix]
    return f"{_size(manifest):>12}   {state}"


def _verify(arguments: argparse.Namespace) -> int:
    """Verify one checkpoint, or each of a run, newest first."""
    folders = candidates(arguments.checkpoint)
    if not folders:
        raise _nothing_in(arguments.checkpoint)
    damaged = []
    for folder in folders:
        try:
            print(verify_checkpoint(folder), flush=True)
        except CheckpointError as error:
            damaged.append(str(error))
    if damaged:
        raise CheckpointError("; ".join(damaged))
    return 0


def verify_checkpoint(checkpoint: Path) -> str:
    """Compare every file with its checksum.

    Raises:
        CheckpointError: that names the damaged files.
    """
    manifest = read_manifest(checkpoint)
    if problems := _wrong_checksums(checkpoint, manifest):
        raise CheckpointError(f"{checkpoint} is damaged: {'; '.join(problems)}")
    return f"{checkpoint} is sound: {len(manifest.files)} files, {_size(manifest)}"


def _wrong_checksums(checkpoint: Path, manifest: Manifest) -> list[str]:
    """One line for each damaged file; all of them are read."""
    problems = []
    with ProgressBar(_bytes(manifest), vanishes=True) as progress:
        for file in manifest.files.items():
            problems += find_damage(checkpoint, [file], deep=True)
            progress("verifying", file[1].size)
    return problems


def _inspect(arguments: argparse.Namespace) -> int:
    """Print the trainer's state, then a line per weight: shape, dtype, and number of boxes."""
    from megagrid.checkpoint.diff import model_order, shape_text

    folder, manifest = _choose(arguments.checkpoint)
    names = [name for name in manifest.tensors if not name.startswith(OPTIMIZER_PREFIX)]
    parameters = sum(math.prod(manifest.tensors[name].shape) for name in names)
    print(f"step {manifest.step}, written by megagrid {manifest.version}")
    print(f"{len(manifest.files)} files, {_size(manifest)}")
    for problem in find_damage(folder, manifest.files.items(), deep=False):
        print(f"not sound: {problem}")
    print(
        f"{len(names)} weights of {parameters:,} parameters, "
        f"{len(manifest.tensors) - len(names)} optimizer states"
    )
    if TRAINER_STATE in manifest.files:
        print()
        for key, value in read_trainer_state(folder).items():
            print(f"{key:<24}{json.dumps(value)}")
    print()
    width = max(map(len, names), default=0) + 2
    for name in sorted(names, key=model_order):
        tensor = manifest.tensors[name]
        boxes = f"{len(tensor.boxes)} box{'es' if len(tensor.boxes) != 1 else ''}"
        print(f"{name:<{width}}{tensor.dtype:<10}{shape_text(tensor.shape):<20}{boxes}")
    return 0


# --- diff ----------------------------------------------------------------------------------------


def _add_diff(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    for name in ("a", "b"):
        add(name, type=path_argument, metavar=name.upper(), help="a checkpoint, or a run")
    add(
        "--tolerance",
        type=float,
        default=0.0,
        metavar="T",
        help="values are equal that are at most T times their tensor's largest apart (0: bit by "
        "bit)",
    )
    add(
        "--weights-only",
        action="store_true",
        help="leave out the optimizer's and the trainer's state",
    )
    add(
        "--limit",
        type=int,
        default=10,
        metavar="N",
        help="tensors to show of those that differ (10)",
    )


def _diff(arguments: argparse.Namespace) -> int:
    from megagrid.checkpoint.diff import compare, report
    from megagrid.checkpoint.reader import TensorReader

    if not 0 <= arguments.tolerance < math.inf:
        raise ConfigError(f"--tolerance {arguments.tolerance} must be 0 or more, as 1e-6")
    if arguments.limit < 0:
        raise ConfigError(f"--limit {arguments.limit} must be 0 or more")
    # A flipped bit must not pass for a difference of two trainings.
    a, b = (
        TensorReader(*_first_that(_wrong_checksums, path)) for path in (arguments.a, arguments.b)
    )
    print(f"A  {a.folder}\nB  {b.folder}", flush=True)
    with ProgressBar(_bytes(a.manifest) + _bytes(b.manifest), vanishes=True) as progress:
        found = compare(
            a,
            b,
            tolerance=arguments.tolerance,
            weights_only=arguments.weights_only,
            progress=progress,
        )
    for line in report(found, arguments.limit):
        print(line)
    return 0 if found.is_equal else DIFFERENT


# --- reshard -------------------------------------------------------------------------------------


def _add_reshard(parser: argparse.ArgumentParser) -> None:
    _add_checkpoint(parser)
    parser.add_argument("out", type=path_argument, metavar="OUT", help="a new folder")
    add_overrides(parser)
    parser.add_argument(
        "--recipe",
        type=path_argument,
        metavar="FILE",
        help="the recipe of the run on the other grid; without it the checkpoint's own",
    )


def _reshard(arguments: argparse.Namespace) -> int:
    from megagrid.checkpoint.reader import TensorReader
    from megagrid.config.dump import dump
    from megagrid.config.load import load
    from megagrid.config.rules import check, placement

    folder, manifest = _choose_whole(arguments.checkpoint)
    if arguments.recipe is None and CONFIG not in manifest.files:
        raise CheckpointError(f"{folder} holds no {CONFIG}; name a recipe with --recipe")
    config = load(arguments.recipe or folder / CONFIG, arguments.overrides)
    if others := [text for text in arguments.overrides if not text.startswith(GRID_KEYS)]:
        raise ConfigError(
            f"command line: {others[0]} is no matter of the grid, which is all that a reshard "
            "changes; leave it out, and state it when the checkpoint is resumed"
        )
    grid = placement(config)
    check(config, grid.world_size)

    from megagrid.checkpoint.reshard import reshard  # torch: after what needs none
    from megagrid.train.build import outline

    source = TensorReader(folder, manifest)
    has_states = any(name.startswith(OPTIMIZER_PREFIX) for name in manifest.tensors)
    with ProgressBar(_bytes(manifest), vanishes=True) as progress:
        written = reshard(
            source,
            arguments.out,
            outline(config, grid, with_optimizer=has_states),
            config=dump(config),
            progress=progress,
        )
    sizes = " x ".join(f"{axis} {grid.size(axis)}" for axis in reversed(AXES))
    print(f"{arguments.out}: {len(written.files)} files, {_size(written)}, for {sizes}")
    return 0


# --- Which checkpoint a path means ---------------------------------------------------------------


def _choose(path: Path) -> tuple[Path, Manifest]:
    """The checkpoint that `path` is, or the newest of the run that it is, if files are damaged or
    not; those without a manifest are passed over, and told."""
    return _first_that(lambda folder, manifest: [], path)


def _choose_whole(path: Path) -> tuple[Path, Manifest]:
    """The same, of those whose files are all there with their sizes."""
    return _first_that(
        lambda folder, manifest: find_damage(folder, manifest.files.items(), deep=False), path
    )


def _first_that(
    problems_of: Callable[[Path, Manifest], list[str]], path: Path
) -> tuple[Path, Manifest]:
    passed_over = []
    for folder in candidates(path):
        try:
            manifest = read_manifest(folder)
        except CheckpointError as error:
            passed_over.append(str(error))
            continue
        if problems := problems_of(folder, manifest):
            passed_over.append(f"{folder} is damaged: {'; '.join(problems)}")
            continue
        for line in passed_over:
            print(f"passed over: {line}", file=sys.stderr)
        return folder, manifest
    if passed_over:
        raise CheckpointError("; ".join(passed_over))
    raise _nothing_in(path)


def _nothing_in(
    path: Path, wanted: str = "the folder of a checkpoint or of a run"
) -> CheckpointError:
    """There is no checkpoint in `path`: what there is instead."""
    if not path.exists():
        return CheckpointError(f"{path} doesn't exist; name {wanted}")
    if not path.is_dir():
        return CheckpointError(f"{path} is a file; name {wanted}")
    if candidates(path):
        return CheckpointError(f"{path} is a checkpoint; name {wanted}")
    return CheckpointError(f"{path} holds no checkpoint; name {wanted}")


def _bytes(manifest: Manifest) -> int:
    return sum(file.size for file in manifest.files.values())


def _size(manifest: Manifest) -> str:
    return size_text(_bytes(manifest), is_binary=True)


VERBS = {
    "list": Verb("the checkpoints of a run, newest first", _add_run, _list),
    "verify": Verb(
        "read every file and compare checksums",
        _add_checkpoint,
        _verify,
        "Of a run, each checkpoint is verified. Exit codes: 0 sound, 2 damaged.",
    ),
    "inspect": Verb("steps, sizes and tensors of a checkpoint", _add_checkpoint, _inspect),
    "diff": Verb(
        "compare two checkpoints, whatever grids wrote them",
        _add_diff,
        _diff,
        "Recipes are compared too, but on another grid they differ, so that doesn't count. "
        "Exit codes: 0 equal, 1 different, 2 a mistake.",
    ),
    "reshard": Verb(
        "write a checkpoint as another grid would have",
        _add_reshard,
        _reshard,
        "The grid is what the recipe says; the new folder is a checkpoint like any other.",
    ),
}
