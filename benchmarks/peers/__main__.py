"""`python -m benchmarks.peers`: the comparison, from inputs to table."""

from __future__ import annotations

import argparse
import dataclasses
import os
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks import reporting
from benchmarks.peers import report
from benchmarks.peers.compare import CurvesDifferError, check_curves, largest_gap
from benchmarks.peers.inputs import write_inputs
from benchmarks.peers.launch import Outcome, RunError, execute
from benchmarks.peers.spec import Job, Layout, ModelShape, Recipe
from benchmarks.peers.systems import SYSTEMS, Entry, System

LAYOUTS = ("one", "tp2", "pp2", "dp2", "tp2xpp2")

SMOKE_SHAPE = ModelShape(
    hidden_size=64, num_layers=4, num_heads=8, num_kv_heads=2, ffn_hidden_size=96, vocab_size=256
)
SMOKE_RECIPE = {"seq_length": 32, "steps": 4}


class Comparison:
    """The inputs on disk, and the turns of the systems on them."""

    def __init__(self, options: argparse.Namespace, folder: Path) -> None:
        self.options, self.folder = options, folder
        self.shape = SMOKE_SHAPE if options.smoke else ModelShape()
        self.recipe = Recipe(
            steps=options.steps,
            seq_length=SMOKE_RECIPE["seq_length"] if options.smoke else Recipe.seq_length,
            global_batch_size=options.global_batch_size,
            micro_batch_size=options.micro_batch_size,
            sharding=options.sharding,
            sequence_parallel=options.sequence_parallel,
        )
        self.checkpoint, self.tokens = folder / "checkpoint", folder / "tokens.npy"
        self.runs: list[report.Run] = []
        self._reference: tuple[str, list[dict[str, Any]]] | None = None

    def job(self, system: System, layout: Layout, name: str) -> Job:
        """ValueError if the model doesn't split over the layout."""
        job = Job(
            shape=self.shape,
            layout=Layout() if system.one_process else layout,
            recipe=self.recipe,
            checkpoint=str(self.checkpoint),
            tokens=str(self.tokens),
            run_dir=str(self.folder / name),
        )
        job.check()
        return job

    def threads(self, job: Job) -> int:
        """Every layout gets the whole machine: its cores are shared out among the ranks."""
        cores = len(os.sched_getaffinity(0))
        return self.options.threads or max(1, cores // job.layout.world_size)

    def write_inputs(self) -> None:
        """Weights and tokens, which every layout shares."""
        write_inputs(self.job(SYSTEMS["megagrid"], Layout(), "inputs"))

    def run(self, system: System, layout: Layout, number: int) -> report.Run:
        """One turn. RunError, or CurvesDifferError if it doesn't train as the first run did."""
        name = f"{layout}-{system.name}-{number}"
        job = self.job(system, layout, name)
        threads, load = self.threads(job), os.getloadavg()[0]
        outcome = execute(job, system.entry(job), threads, self.options.time_limit)
        if self._reference is None:
            self._reference = (name, outcome.records)
        check_curves(name, outcome.records, *self._reference)
        run = self._measured(outcome, system, layout, number, job, threads, load)
        self.runs.append(run)
        return run

    def _measured(
        self,
        outcome: Outcome,
        system: System,
        layout: Layout,
        number: int,
        job: Job,
        threads: int,
        load: float,
    ) -> report.Run:
        times = [record["step_time_s"] for record in outcome.records]
        assert self._reference is not None
        return report.Run(
            layout=str(layout),
            system=system.name,
            round=number,
            ranks=job.layout.world_size,
            threads_per_rank=threads,
            load_average=load,
            step_times_s=times,
            tokens_per_s=job.recipe.tokens_per_step / median(times[self.options.warmup :]),
            seconds_to_first_step=outcome.seconds_to_first_step,
            peak_rss_bytes=outcome.peak_rss_bytes,
            losses=[record["loss"] for record in outcome.records],
            grad_norms=[record["grad_norm"] for record in outcome.records],
            largest_loss_gap=largest_gap(outcome.records, self._reference[1]),
        )


def bare_torch_bytes(folder: Path, time_limit_s: float) -> int:
    """Peak resident memory of a process that imports torch and computes nothing."""
    job = Job(ModelShape(), Layout(), Recipe(), "", "", str(folder / "bare"))
    outcome = execute(job, Entry("benchmarks.peers.bare", [str(job.metrics)]), 1, time_limit_s)
    return outcome.peak_rss_bytes[0]


def compare(options: argparse.Namespace, folder: Path) -> None:
    """All rounds, then the table; stops at the first run that fails or trains differently."""
    comparison = Comparison(options, folder)
    systems = [SYSTEMS[name] for name in options.systems]
    for layout in options.layouts:  # all of them are checked before the first one runs
        for system in systems:
            comparison.job(system, layout, "check")
    comparison.write_inputs()
    bare = bare_torch_bytes(folder, options.time_limit)
    # Round by round within a layout, so that what drifts on the machine meets all systems alike.
    for layout in options.layouts:
        for number in range(1, options.rounds + 1):
            for system in systems:
                run = comparison.run(system, layout, number)
                print(
                    f"{run.layout:>8} round {number} {run.system:<13}"
                    f"{run.tokens_per_s:>9,.0f} tokens/s, "
                    f"loss {run.losses[0]:.4f} -> {run.losses[-1]:.4f} "
                    f"(gap {run.largest_loss_gap:.0e}), "
                    f"peak {max(run.peak_rss_bytes) / report.MIB:,.0f} MiB, "
                    f"first step after {run.seconds_to_first_step:.1f} s",
                    flush=True,
                )
    facts = {
        "environment": reporting.environment(),
        "shape": dataclasses.asdict(comparison.shape),
        "recipe": dataclasses.asdict(comparison.recipe),
        "warmup_steps": options.warmup,
        "bare_torch_bytes": bare,
    }
    table = report.markdown(comparison.runs, options.systems, bare, title(comparison, facts))
    print(f"\n{table}")
    if options.smoke and options.out == reporting.RESULTS:
        return  # its numbers say nothing
    name = time.strftime("peers-%Y%m%d-%H%M%S")
    content = facts | {"runs": [dataclasses.asdict(run) for run in comparison.runs]}
    for path in reporting.write(options.out, name, table, content):
        print(path)


def title(comparison: Comparison, facts: dict[str, Any]) -> str:
    """The line above the table: what ran, on what."""
    shape, recipe, where = comparison.shape, comparison.recipe, facts["environment"]
    return (
        f"Llama, hidden {shape.hidden_size}, {shape.num_layers} layers, {shape.num_heads} heads "
        f"({shape.num_kv_heads} KV), ffn {shape.ffn_hidden_size}, vocabulary {shape.vocab_size}; "
        f"{recipe.global_batch_size} × {recipe.seq_length} tokens a step in microbatches of "
        f"{recipe.micro_batch_size}, fp32, {recipe.sharding} over dp. "
        f"{where['cores']} cores ({where['cpu']}), torch {where['torch']}, "
        f"transformers {where['transformers']}, commit {where['commit']}."
    )


def profile(options: argparse.Namespace, folder: Path) -> None:
    """Runs one system on one layout with one step profiled, and prints rank 0's tables."""
    comparison = Comparison(options, folder)
    system, layout = SYSTEMS[options.profile], options.layouts[0]
    job = comparison.job(system, layout, f"profile-{system.name}-{layout}")
    comparison.write_inputs()
    entry = system.entry(job)
    # The step after the warm-up, which must be one of the run's.
    warmup, tables = min(options.warmup, options.steps - 1), Path(job.run_dir, "profile.txt")
    arguments = [str(tables), str(max(warmup, 1)), entry.module, *entry.arguments]
    profiled = Entry("benchmarks.peers.profiled", arguments)
    execute(job, profiled, comparison.threads(job), options.time_limit)
    print(f"{system.name} on {job.layout}, rank 0, one step\n{tables.read_text()}")


def layout(text: str) -> Layout:
    """`Layout.parse` with argparse's kind of error."""
    try:
        return Layout.parse(text)
    except ValueError as problem:
        raise argparse.ArgumentTypeError(str(problem)) from None


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line, checked; exits with a message when it makes no sense."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.peers", description=__doc__)
    add = parser.add_argument
    add(
        "--systems",
        nargs="+",
        choices=SYSTEMS,
        default=list(SYSTEMS),
        metavar="NAME",
        help=f"of {', '.join(SYSTEMS)}; the first is put in relation to the others (default: all)",
    )
    add(
        "--layouts",
        nargs="+",
        type=layout,
        metavar="LAYOUT",
        default=[Layout.parse(text) for text in LAYOUTS],
        help=f"`one` or axes such as tp2xpp2 (default: {' '.join(LAYOUTS)})",
    )
    add("--rounds", type=int, default=3, help="turns of each system on each layout (default 3)")
    add("--steps", type=int, help=f"of a run (default {Recipe.steps})")
    add("--warmup", type=int, default=2, help="first steps that aren't timed (default 2)")
    add("--threads", type=int, help="of a rank (default: cores / ranks, at least 1)")
    add("--global-batch-size", type=int, default=Recipe.global_batch_size)
    add("--micro-batch-size", type=int, default=Recipe.micro_batch_size)
    add("--sharding", choices=("FULL_SHARD", "SHARD_GRAD_OP"), default=Recipe.sharding)
    add("--sequence-parallel", action="store_true")
    add("--time-limit", type=float, default=600.0, help="of one run, in seconds (default 600)")
    reporting.add_arguments(parser, keeps_work=True)
    add("--smoke", action="store_true", help="a tiny model, to see that everything runs")
    add(
        "--profile",
        choices=SYSTEMS,
        metavar="SYSTEM",
        help="profile a step of this system on the first layout instead of comparing",
    )
    options = parser.parse_args(arguments)
    if options.steps is None:
        options.steps = SMOKE_RECIPE["steps"] if options.smoke else Recipe.steps
    if not 0 <= options.warmup < options.steps:
        parser.error(f"--warmup {options.warmup} leaves none of --steps {options.steps} to time")
    return options


def main() -> int:
    """Exit code: 0 when everything ran and agreed."""
    options = parse()
    work = profile if options.profile else compare
    # Ended by a signal, it still ends the ranks: they are in sessions of their own.
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    try:
        with reporting.work_folder(options.work, "peers") as folder:
            work(options, folder)
    except (CurvesDifferError, RunError, ValueError) as problem:
        print(f"error: {problem}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
