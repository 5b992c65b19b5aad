"""Measure a training step of several grids, or with several keys, turn by turn.

    megagrid bench step RECIPE --grids tp1 tp2 pp2 dp2 tp2pp2 --steps 12 --warmup 4 --rounds 2
    megagrid bench step RECIPE --grids dp2 --with parallel.sharding_strategy=FULL_SHARD \
                                           --with parallel.sharding_strategy=ZERO1

Each grid trains the recipe for some steps, then the next one does, and the round begins anew:
machines drift, and what is compared must drift alike. The steps after the warm-up count.
"""

from __future__ import annotations

import argparse
import json
import re
import shlex
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from rich.progress import track
from rich.table import Table

from megagrid.config.arguments import add_recipe_arguments, load_recipe
from megagrid.config.load import load
from megagrid.config.rules import check, placement
from megagrid.errors import ConfigError, MegagridError
from megagrid.grid.placement import Placement
from megagrid.terminal import Console
from megagrid.train.metrics import StepRecord, read_records

_AXIS_SIZES = re.compile(r"(?:(?:tp|pp|dp|cp)[1-9]\d*)+")
_KEYS = {
    "tp": "parallel.tensor_parallel_size",
    "pp": "parallel.pipeline_parallel_size",
    "dp": "parallel.data_parallel_size",
    "cp": "parallel.context_parallel_size",
}


@dataclass
class Measurement:
    """What was seen of one grid.

    Attributes:
        grid: its name, as tp2pp2.
        world_size: its ranks.
        rounds: the counted steps of each round.
        keys: overrides that it has to itself.
    """

    grid: str
    world_size: int
    rounds: list[list[StepRecord]] = field(default_factory=list)
    keys: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        """The grid, and what else it has to itself: "dp2 sharding_strategy=ZERO1"."""
        return " ".join([self.grid, *(key.partition(".")[2] for key in self.keys)])

    @property
    def tokens_per_s(self) -> float:
        """Median over all counted steps."""
        return statistics.median(record.tokens_per_s for record in self._records())

    @property
    def step_time_s(self) -> tuple[float, float, float]:
        """Fastest, median and slowest counted step."""
        times = sorted(record.step_time_s for record in self._records())
        return times[0], statistics.median(times), times[-1]

    @property
    def peak_memory_bytes(self) -> int:
        """Of the fullest rank."""
        return max(max(record.peak_memory_bytes) for record in self._records())

    def ratio(self, base: Measurement) -> float:
        """Tokens/s over those of `base`: the median over rounds, each taken in the same round."""
        pairs = zip(self.rounds, base.rounds, strict=True)
        return statistics.median(
            _median_rate(mine) / _median_rate(theirs) for mine, theirs in pairs
        )

    def _records(self) -> Iterator[StepRecord]:
        for records in self.rounds:
            yield from records


def _median_rate(records: Sequence[StepRecord]) -> float:
    return statistics.median(record.tokens_per_s for record in records)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """What `megagrid bench` takes."""
    verbs = parser.add_subparsers(dest="what", required=True, metavar="WHAT")
    step = verbs.add_parser("step", help="tokens/s of a training step, by grid")
    add_recipe_arguments(step)
    step.add_argument(
        "--grids",
        nargs="+",
        metavar="GRID",
        help="such as tp1 tp2 tp2pp2 (axes left out are 1); without it, the recipe's",
    )
    step.add_argument(
        "--with",
        dest="variants",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="measure each grid with this in the recipe; several: each in its turn, the first one "
        'is what the others are compared with. "A=1 B=2" sets two keys',
    )
    step.add_argument("--steps", type=int, default=12, help="steps of a run, warm-up included")
    step.add_argument("--warmup", type=int, default=4, help="first steps, which aren't counted")
    step.add_argument("--rounds", type=int, default=2, help="runs of each grid")
    step.add_argument("--json", type=Path, metavar="FILE", help="write the figures there too")


def run(arguments: argparse.Namespace) -> int:
    """Measure and print."""
    if not 0 <= arguments.warmup < arguments.steps:
        raise ConfigError(
            f"--warmup {arguments.warmup} must be below --steps {arguments.steps}, and not negative"
        )
    if arguments.rounds < 1:
        raise ConfigError(f"--rounds {arguments.rounds} measures nothing; choose at least 1")
    grids = _take_grids(arguments)
    if not grids:
        grids = [_name(placement(load_recipe(arguments)))]
        # The grid says these from here on, and a key is given once.
        sizes = tuple(f"{key}=" for key in _KEYS.values())
        arguments.overrides = [text for text in arguments.overrides if not text.startswith(sizes)]
    variants = [tuple(shlex.split(text)) for text in arguments.variants] or [()]
    measurements = [_prepare(grid, keys, arguments) for grid in grids for keys in variants]
    turns = [m for _ in range(arguments.rounds) for m in measurements]
    console = Console(stderr=True)
    for measurement in track(
        turns, "measuring", console=console, transient=True, disable=not console.is_terminal
    ):
        measurement.rounds.append(_measure(measurement, arguments))
    _print(measurements)
    if arguments.json:
        arguments.json.parent.mkdir(parents=True, exist_ok=True)
        arguments.json.write_text(json.dumps([_figures(m) for m in measurements], indent=1) + "\n")
    return 0


def _take_grids(arguments: argparse.Namespace) -> list[str]:
    """The grids of `--grids`, which takes all that follows it: overrides among it go where they
    belong."""
    stated = arguments.grids or []
    arguments.overrides = [*arguments.overrides, *(text for text in stated if "=" in text)]
    return [text for text in stated if "=" not in text]


def _prepare(grid: str, keys: tuple[str, ...], arguments: argparse.Namespace) -> Measurement:
    """Check that the recipe can run on `grid`, before anything is measured."""
    config = load(arguments.recipe, [*keys, *_overrides(grid, arguments, run_dir="unused")])
    world_size = placement(config).world_size
    check(config, world_size)
    return Measurement(grid, world_size, keys=keys)


def _measure(measurement: Measurement, arguments: argparse.Namespace) -> list[StepRecord]:
    """The counted steps of one run."""
    grid, keys = measurement.grid, measurement.keys
    with tempfile.TemporaryDirectory(prefix="megagrid-bench-") as folder:
        command = [sys.executable, "-m", "megagrid", "train", arguments.recipe]
        result = subprocess.run(
            [*command, *keys, *_overrides(grid, arguments, folder)],
            capture_output=True,
            text=True,
        )
        if result.returncode:
            lines = result.stderr.strip().splitlines() or ["no message"]
            raise MegagridError(f"{measurement.name}: {lines[-1].removeprefix('error: ')}")
        return read_records(Path(folder) / "metrics.jsonl")[arguments.warmup :]


def _overrides(grid: str, arguments: argparse.Namespace, run_dir: str) -> list[str]:
    sizes = {axis: 1 for axis in _KEYS} | _sizes(grid)
    return [
        *arguments.overrides,
        *(f"{_KEYS[axis]}={size}" for axis, size in sizes.items()),
        f"train.steps={arguments.steps}",
        "train.tokens=none",
        "evaluation.interval=0",
        "data.valid_fraction=0.0",
        "checkpoint.save_interval=0",
        "checkpoint.save_at_end=false",
        "checkpoint.resume=none",
        "guard.on_nan=end",
        "guard.on_spike=off",
        "lr_schedule.decay_steps=none",
        "logging.wandb=off",
        f"logging.run_dir={json.dumps(run_dir)}",
    ]


def _sizes(grid: str) -> dict[str, int]:
    """tp2pp2 -> {"tp": 2, "pp": 2}."""
    if not _AXIS_SIZES.fullmatch(grid):
        raise ConfigError(
            f'--grids "{grid}" must name sizes of tp, pp, dp and cp, as tp2pp2 or dp4'
        )
    sizes: dict[str, int] = {}
    for axis, size in re.findall(r"(tp|pp|dp|cp)(\d+)", grid):
        if axis in sizes:
            raise ConfigError(f'--grids "{grid}" names {axis} twice; keep one of its sizes')
        sizes[axis] = int(size)
    return sizes


def _name(placed: Placement) -> str:
    sizes = {axis: placed.size(axis) for axis in _KEYS}
    return "".join(f"{axis}{size}" for axis, size in sizes.items() if size > 1) or "tp1"


def _figures(measurement: Measurement) -> dict[str, object]:
    return {
        "grid": measurement.grid,
        "keys": list(measurement.keys),
        "world_size": measurement.world_size,
        "tokens_per_s": measurement.tokens_per_s,
        "step_time_s": measurement.step_time_s,
        "peak_memory_bytes": measurement.peak_memory_bytes,
        "tokens_per_s_by_round": [_median_rate(records) for records in measurement.rounds],
    }


def _print(measurements: Sequence[Measurement]) -> None:
    base = measurements[0]
    table = Table(box=None, pad_edge=False)
    titles = (
        "grid",
        "ranks",
        "tokens/s",
        f"x {'first' if base.keys else base.grid}",
        "step s, fastest",
        "median",
        "slowest",
    )
    for title in (*titles, "memory of a rank"):
        table.add_column(title, justify="left" if title == "grid" else "right")
    for measurement in measurements:
        table.add_row(
            measurement.name,
            str(measurement.world_size),
            f"{measurement.tokens_per_s:,.0f}",
            f"{measurement.ratio(base):.2f}",
            *(f"{seconds:.3f}" for seconds in measurement.step_time_s),
            f"{measurement.peak_memory_bytes / 2**30:.2f} GiB",
        )
    Console(width=104 + max(len(one.name) for one in measurements)).print(table)
