"""Find where two runs part: the first step, pass and module.

    megagrid compare runs/a runs/b
    megagrid compare RECIPE --b parallel.tensor_parallel_size=2
    megagrid compare old.toml new.toml train.precision=fp64 --steps 5

A and B are folders of runs that were made with logging.digest_interval, whatever their grids and
versions of megagrid, or recipes, which are run here for a few steps; of B's that isn't given, A's.
Exit codes: 0 they are equal, 1 they part, 2 a mistake.
"""

from __future__ import annotations

import argparse
import math
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from megagrid.config.arguments import add_overrides
from megagrid.config.dump import toml_value
from megagrid.config.load import load
from megagrid.config.rules import check, placement
from megagrid.errors import ConfigError, DataError
from megagrid.train.command import check_inputs
from megagrid.train.compare import compare, default_tolerance, report
from megagrid.train.digest_records import FILE_NAME, StepDigests
from megagrid.train.metrics import read_records

DIFFERENT = 1


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """What `megagrid compare` takes."""
    parser.formatter_class = argparse.RawDescriptionHelpFormatter  # keeps the lines of examples
    add = parser.add_argument
    add("a", metavar="A", help="a run's folder, or a recipe")
    add("b", metavar="B", nargs="?", help="the other; without it the recipe A once more")
    add_overrides(parser)
    for side in ("a", "b"):
        add(
            f"--{side}",
            dest=f"only_{side}",
            action="append",
            default=[],
            metavar="section.key=value",
            help=f"a key of {side.upper()}'s recipe alone; may be repeated",
        )
    add("--steps", type=int, default=2, metavar="N", help="of each recipe to run (2)")
    add(
        "--tolerance",
        type=float,
        metavar="T",
        help="largest relative distance of two tensors that agree; without it as the precision "
        "has it: fp64 1e-11, fp32 1e-4, fp16 0.02, bf16 0.1",
    )


def run(arguments: argparse.Namespace) -> int:
    """Compare, running what has to be run first."""
    tolerance = arguments.tolerance
    if tolerance is not None and not 0 <= tolerance < math.inf:
        raise ConfigError(f"--tolerance {tolerance} must be 0 or more, as 1e-5")
    if arguments.steps < 1:
        raise ConfigError(f"--steps {arguments.steps} compares nothing; choose at least 1")
    with tempfile.TemporaryDirectory(prefix="megagrid-compare-") as folder:
        sides = []
        for name, path, only in _sides(arguments):
            overrides = [*arguments.overrides, *only]
            if not Path(path).is_dir():
                overrides = _checked(path, overrides, arguments.steps, Path(folder) / name)
            sides.append((name, path, overrides))
        a, b = [_digests(*side, Path(folder)) for side in sides]
    if tolerance is None:
        tolerance = default_tolerance(a, b)
    found = compare(a, b, tolerance)
    for line in report(found, tolerance):
        print(line)
    return DIFFERENT if found.parting or found.only else 0


def _sides(arguments: argparse.Namespace) -> list[tuple[str, str, list[str]]]:
    """Name, path and own overrides of each side. What stands where B may is an override if it
    looks like one."""
    other = arguments.b
    if other is not None and "=" in other and not Path(other).exists():
        arguments.overrides.insert(0, other)
        other = None
    if other is None and Path(arguments.a).is_dir():
        raise ConfigError(f"{arguments.a} is a run: name another to compare it with")
    return [("A", arguments.a, arguments.only_a), ("B", other or arguments.a, arguments.only_b)]


def _digests(name: str, path: str, overrides: Sequence[str], folder: Path) -> list[StepDigests]:
    """Those of a run's folder; or of a recipe, which is run in a folder of its own in `folder`."""
    if Path(path).is_dir():
        if overrides:
            raise ConfigError(f"{overrides[0]} is for a recipe, and {name} is the run {path}")
        file = Path(path) / FILE_NAME
        if not file.exists():
            raise DataError(
                f"{path} has no {FILE_NAME}; train with logging.digest_interval=N, which digests "
                "every N-th step"
            )
    else:
        file = _run_recipe(name, path, overrides, folder / name)
    found = read_records(file, StepDigests)
    if not found:
        raise DataError(f"{file} holds no digest of any step")
    settings = found[0].settings
    keys = ("grid", "train.precision", "megagrid")
    print(f"{name}  {path}: {', '.join(str(settings.get(key, '?')) for key in keys)}", flush=True)
    return found


def _checked(path: str, overrides: Sequence[str], steps: int, run_dir: Path) -> list[str]:
    """The overrides that make a few digested steps of a recipe, in `run_dir`. Both recipes are
    checked before one of them is run.

    Raises:
        MegagridError: it can't be run.
    """
    config = load(path, overrides)
    stated = [
        f"train.steps={steps}",
        "train.tokens=none",
        "evaluation.interval=0",
        "checkpoint.save_interval=0",
        "checkpoint.save_at_end=false",
        "checkpoint.export_hf=none",
        "logging.wandb=off",
        "logging.trace_interval=0",
        "logging.digest_interval=1",
        f"logging.run_dir={toml_value(str(run_dir))}",
    ]
    # What acts on a whole run has nothing to act on in a few steps of it.
    is_long_decay = (config.lr_schedule.decay_steps or 0) > steps
    idle = {
        "checkpoint.resume=none": config.checkpoint.resume == "latest",
        "guard.on_nan=end": config.guard.on_nan == "rollback",
        "guard.on_spike=off": config.guard.on_spike != "off",
        "lr_schedule.decay_steps=none": config.lr_schedule.kind == "wsd" and is_long_decay,
    }
    stated += [text for text, applies in idle.items() if applies]
    replaced = tuple(text.partition("=")[0] + "=" for text, applies in idle.items() if applies)
    found = [*(text for text in overrides if not text.startswith(replaced)), *stated]
    config = load(path, found)
    check(config, placement(config).world_size)
    check_inputs(config)
    return found


def _run_recipe(name: str, path: str, overrides: Sequence[str], run_dir: Path) -> Path:
    """Train a recipe on ranks of this machine; the file of its digests.

    Raises:
        ConfigError: it can't be run; what `megagrid train` has said is on stderr.
    """
    command = [sys.executable, "-m", "megagrid", "train", path, *overrides]
    done = subprocess.run(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    if done.returncode:
        *_, last = done.stderr.strip().splitlines() or ["it said nothing"]
        raise ConfigError(f"{name}, {path}: {last.removeprefix('error: ')}")
    return run_dir / FILE_NAME
