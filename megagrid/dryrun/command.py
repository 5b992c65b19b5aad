"""Run one rank's step without its peers and without memory: how much of it the rank would need at
once, of what kinds, and all that it would communicate.

    megagrid dryrun RECIPE                     # rank 0 of as many ranks as the recipe states
    megagrid dryrun RECIPE --world 64 --rank 17
    megagrid dryrun RECIPE --all-stages        # one rank of each pipeline rank
    megagrid dryrun RECIPE --microbatches 8    # of a step that has more: sooner, and the same peak
                                               # if they fill the pipeline

Storages of tensors count, of the operators that torch runs on a CPU; CUDA has one kernel for an
RMSNorm, which keeps less. What kernels take within themselves, an allocator's fragments,
communicators' own buffers and a device's context come on top. What `[memory]` has the host keep is
shown apart.
"""

from __future__ import annotations

import argparse
import json
from typing import TYPE_CHECKING, Any

from rich import box
from rich.table import Table

from megagrid.config.arguments import add_recipe_arguments, load_recipe
from megagrid.config.rules import check, placement
from megagrid.config.schema import Config
from megagrid.errors import GridError
from megagrid.grid.placement import Placement
from megagrid.pipeline.partition import stage_layers
from megagrid.pipeline.program import microbatches, training_schedule
from megagrid.terminal import Console

if TYPE_CHECKING:
    from megagrid.dryrun.rank import DryRun

KINDS = (
    "weights",
    "optimizer states",
    "gathered parameters",
    "gradients",
    "activations",
    "communication",
    "inputs",
    "temporary",
)


MOST = 100_000
"""Of ranks or microbatches: more is a typing mistake."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """What `megagrid dryrun` takes."""
    add_recipe_arguments(parser)
    parser.add_argument(
        "--world", type=int, metavar="N", help="ranks of the run (default: as the recipe states)"
    )
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--rank", type=int, default=0, metavar="R", help="whose step (default 0)")
    which.add_argument(
        "--all-stages", action="store_true", help="the first rank of each pipeline rank"
    )
    parser.add_argument("--microbatches", type=int, metavar="M", help="make a step of so many only")
    parser.add_argument("--json", action="store_true", help="print JSON, in bytes")


def run(arguments: argparse.Namespace) -> int:
    """Dry-run the ranks that are asked for, and print what was found."""
    config = load_recipe(arguments)
    for option in ("world", "microbatches"):
        if (value := getattr(arguments, option)) is not None and not 1 <= value <= MOST:
            raise GridError(f"--{option} {value} must be between 1 and {MOST}")
    grid = placement(config, arguments.world)
    check(config, grid.world_size)
    config = _shortened(config, grid, arguments.microbatches)
    ranks = [arguments.rank]
    if arguments.all_stages:
        ranks = list(grid.groups("pp")[0])
    if not 0 <= ranks[0] < grid.world_size:
        raise GridError(
            f"--rank {ranks[0]} isn't one of {grid.world_size} ranks; choose 0 to "
            f"{grid.world_size - 1}"
        )
    from megagrid.dryrun.rank import dry_run  # imports torch, which a mistake needn't wait for

    runs = [dry_run(config, grid, rank) for rank in ranks]
    if arguments.json:
        print(json.dumps(_figures(config, grid, runs), indent=1))
        return 0
    console = Console(highlight=False, width=120)
    console.print(_title(config, grid))
    if arguments.all_stages:
        console.print(_stages_table(config, grid, runs))
    else:
        _print_rank(console, config, grid, runs[0])
    return 0


def _shortened(config: Config, grid: Placement, number: int | None) -> Config:
    """The same run with steps of `number` microbatches, if it has more."""
    if number is None or number >= microbatches(config, grid):
        return config
    batch = number * config.train.micro_batch_size * grid.dp
    train = config.train.model_copy(update={"global_batch_size": batch})
    config = config.model_copy(update={"train": train})
    check(config, grid.world_size)
    return config


def _title(config: Config, grid: Placement) -> str:
    train, model = config.train, config.model
    return (
        f"{model.preset or model.family} on {grid.world_size} ranks: tp {grid.tp} x cp {grid.cp} x "
        f"dp {grid.dp} x pp {grid.pp}, {config.parallel.sharding_strategy}, {train.precision}; "
        f"{microbatches(config, grid)} microbatches of {train.micro_batch_size} x "
        f"{train.seq_length} tokens, {config.parallel.pipeline_schedule}"
    )


def _layers(config: Config, grid: Placement, rank: int) -> str:
    """The rank's layers, stage by stage: "0-19"."""
    schedule = training_schedule(config, grid)
    layers = stage_layers(config, grid, schedule.placement)
    stages = [layers[stage] for stage in schedule.stages_of_rank(grid.coordinate(rank).pp)]
    return ", ".join(f"{r.start}-{r.stop - 1}" if r else "none" for r in stages)


def _print_rank(console: Console, config: Config, grid: Placement, run: DryRun) -> None:
    found = run.found
    places = [("", found.resting, found.peak)]
    if found.host_peak.bytes:
        places.append(("host, ", found.host_resting, found.host_peak))
    console.print(
        f"rank {run.rank}, {grid.coordinate(run.rank)}: layers {_layers(config, grid, run.rank)}"
    )
    table = Table("memory", box=box.SIMPLE)
    columns = []
    for place, resting, peak in places:
        table.add_column(f"{place}between steps", justify="right")
        table.add_column(f"{place}at the peak, in {peak.where}", justify="right")
        columns += [resting, peak.by_kind()]
    for kind in KINDS:
        table.add_row(kind, *(_size(sizes.get(kind, 0)) for sizes in columns))
    table.add_section()
    table.add_row("all", *(_size(sum(sizes.values())) for sizes in columns))
    console.print(table)
    table = Table("axis", "collective", box=box.SIMPLE)
    for title in ("calls", "bytes of one", "all"):
        table.add_column(title, justify="right")
    for call, times in sorted(run.found.calls.items()):
        size = call.bytes
        table.add_row(call.axis, call.collective, f"{times:,}", f"{size:,}", _size(times * size))
    console.print(table)
    console.print(f"found in {run.seconds:.1f} s")


def _stages_table(config: Config, grid: Placement, runs: list[DryRun]) -> Table:
    table = Table("rank", "coordinate", "layers", box=box.SIMPLE)
    has_host = any(run.found.host_peak.bytes for run in runs)
    for title in ("between steps", "peak", "in", *KINDS[2:], *["host"] * has_host):
        table.add_column(title, justify="right")
    for run in runs:
        peak = run.found.peak
        at_peak = peak.by_kind()
        table.add_row(
            str(run.rank),
            str(grid.coordinate(run.rank)),
            _layers(config, grid, run.rank),
            _size(sum(run.found.resting.values())),
            _size(peak.bytes),
            peak.where,
            *(_size(at_peak.get(kind, 0)) for kind in KINDS[2:]),
            *[_size(run.found.host_peak.bytes)] * has_host,
        )
    return table


def _figures(config: Config, grid: Placement, runs: list[DryRun]) -> dict[str, Any]:
    return {
        "config": config.model_dump(),
        "world_size": grid.world_size,
        "ranks": [
            {
                "rank": run.rank,
                "coordinate": grid.coordinate(run.rank)._asdict(),
                "resting_bytes": run.found.resting,
                "peak_bytes": run.found.peak.bytes,
                "peak_in": run.found.peak.where,
                "peak_bytes_by_kind": run.found.peak.by_kind(),
                "host_resting_bytes": run.found.host_resting,
                "host_peak_bytes": run.found.host_peak.bytes,
                "host_peak_in": run.found.host_peak.where,
                "host_peak_bytes_by_kind": run.found.host_peak.by_kind(),
                "communication": [
                    {**call._asdict(), "calls": times}
                    for call, times in sorted(run.found.calls.items())
                ],
                "seconds": run.seconds,
            }
            for run in runs
        ],
    }


def _size(size: int) -> str:
    """In GiB, or a smaller unit where that would show nothing."""
    for unit, power in (("GiB", 30), ("MiB", 20), ("KiB", 10)):
        if size >= 2**power:
            return f"{size / 2**power:,.2f} {unit}"
    return f"{size} B" if size else ""
