"""Pipeline schedules against each other: `python -m benchmarks.schedules`.

One run on two ranks holds an engine for each schedule, all of the same model. In turns, round after
round, each makes some steps:   GPipe 1F1B … ZBV GPipe 1F1B … ZBV …   What drifts on a machine meets
all of them alike, and ratios are taken within a round.

    parent process     starts the ranks through torchrun, prints and writes what they found
      rank 0, 1, …     this module again: `measure`
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from fractions import Fraction
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks import reporting
from megagrid.config.rules import check
from megagrid.config.schema import Config
from megagrid.grid.placement import Placement
from megagrid.pipeline.program import training_program
from megagrid.pipeline.schedules import GENERATORS, Costs, Occupancy, Simulation, Span, simulate
from megagrid.train.report_command import mean_costs

PAIRS = (("1F1B", "GPipe"), ("Interleaved1F1B", "1F1B"), ("ZB1P", "1F1B"), ("ZBV", "1F1B"))
"""What is put in relation to what."""


@dataclass(frozen=True)
class Setting:
    """What is measured.

    Attributes:
        ranks, microbatches: of the pipeline; a microbatch is one sample.
        layers: a multiple of twice the ranks, so that all stages have equally many.
        hidden, sequence: sizes of the model. Its head is small, so that no stage is dearer.
        rounds: turns of each schedule.
        steps, warmup: of a turn; first steps that don't count.
    """

    ranks: int = 2
    microbatches: int = 8
    layers: int = 8
    hidden: int = 384
    sequence: int = 256
    rounds: int = 5
    steps: int = 4
    warmup: int = 1

    def config(self, schedule: str) -> Config:
        """The recipe under a schedule."""
        row = GENERATORS[schedule]
        config = Config(
            model={
                "num_layers": self.layers,
                "hidden_size": self.hidden,
                "ffn_hidden_size": self.hidden * 8 // 3,
                "num_heads": 8,
                "num_kv_heads": 8,
                "head_dim": self.hidden // 8,
                "vocab_size": 128,
                "max_seq_length": self.sequence,
            },
            parallel={
                "pipeline_parallel_size": self.ranks,
                "pipeline_schedule": schedule,
                "virtual_pipeline_size": row.min_chunks,
                "layers_per_stage": [self.layers // (self.ranks * row.min_chunks)]
                * (self.ranks * row.min_chunks),
            },
            train={
                "seq_length": self.sequence,
                "micro_batch_size": 1,
                "global_batch_size": self.microbatches,
                "steps": 1,
                "device": "cpu",
            },
            data={"paths": ["synthetic"]},
            logging={"run_dir": "unused"},
        )
        check(config, self.ranks)
        return config

    def simulation(self, schedule: str, costs: Costs | None = None) -> Simulation:
        """Of a step; None: F, I and W of all layers of a rank take 1 each."""
        program = training_program(self.config(schedule), Placement(pp=self.ranks))
        share = Fraction(self.ranks, program.num_stages)
        return simulate(program, costs or Costs.of(program.num_stages, share, share, share))


@dataclass
class Measurement:
    """What was seen of one schedule.

    Attributes:
        step_s: seconds of each counted step, by round.
        pipeline_s: of it, from the first action to the last one, on any rank.
        bubble: idle part of the ranks' time in that, mean over the steps.
        costs: mean seconds of F, I and W of each stage; for a whole backward half of it each.
    """

    step_s: list[list[float]] = field(default_factory=list)
    pipeline_s: list[list[float]] = field(default_factory=list)
    bubble: float = 0.0
    costs: dict[str, list[float]] = field(default_factory=dict)

    def ratio(self, base: Measurement, times: str) -> list[float]:
        """Of the medians of `times`, round by round."""
        pairs = zip(getattr(self, times), getattr(base, times), strict=True)
        return [statistics.median(mine) / statistics.median(theirs) for mine, theirs in pairs]


# ------------------------------------------------------------------------------------------------
# On the ranks


def measure(setting: Setting, output: Path) -> None:
    """Make all turns; rank 0 writes what they took."""
    import torch.distributed as dist

    from megagrid.grid import bootstrap
    from megagrid.grid.start import meeting, running_grid
    from megagrid.train.build import build_engine

    config = setting.config("GPipe")
    with meeting(config, bootstrap.read()) as met, running_grid(config, met) as grid:
        engines = {name: build_engine(setting.config(name), grid) for name in GENERATORS}
        found = {name: Measurement() for name in engines}
        rows: dict[str, list[list[list[Span]]]] = {name: [] for name in engines}
        for _ in range(setting.rounds):
            for name, engine in engines.items():
                turn = list(_turn(engine, setting))
                found[name].step_s.append([seconds for seconds, _ in turn])
                rows[name].append([spans for _, spans in turn])
        gathered = [None] * setting.ranks
        dist.all_gather_object(gathered, rows)
    if grid.rank == 0:
        for name, measurement in found.items():
            _add_spans(measurement, [of_rank[name] for of_rank in gathered])
        content = {name: asdict(measurement) for name, measurement in found.items()}
        output.write_text(json.dumps(content))


def _turn(engine: Any, setting: Setting) -> Iterator[tuple[float, list[Span]]]:
    """Seconds and spans of each counted step. A step begins and ends for all ranks together."""
    import torch.distributed as dist

    from megagrid.data import Loader, Sampler, SyntheticDataset
    from megagrid.train.metrics import Stopwatch
    from megagrid.train.step import apply_gradients, compute_gradients

    data = SyntheticDataset(engine.config.model.vocab_size, setting.sequence, seed=1)
    loader = Loader(data, Sampler(setting.microbatches, 1, 1), dp_rank=0)
    batches = loader.step(0)
    for step in range(setting.steps):
        spans: list[Span] = []
        dist.barrier()
        start = time.perf_counter()
        result = compute_gradients(engine, batches, 1, Stopwatch(), spans)
        apply_gradients(engine, result.grad_norm, lr=1e-4)
        dist.barrier()
        if step >= setting.warmup:
            yield time.perf_counter() - start, spans


def _add_spans(measurement: Measurement, ranks: Sequence[list[list[list[Span]]]]) -> None:
    """Work out what the spans of all ranks, by round and step, say."""
    bubbles = []
    for turns in zip(*ranks, strict=True):
        occupancies = [Occupancy(tuple(map(tuple, rows))) for rows in zip(*turns, strict=True)]
        measurement.pipeline_s.append([occupancy.makespan for occupancy in occupancies])
        bubbles += [occupancy.bubble_rate for occupancy in occupancies]
    measurement.bubble = statistics.fmean(bubbles)
    everything = tuple(
        tuple(span for turn in turns for step in turn for span in step) for turns in ranks
    )
    num_stages = 1 + max(span.action.stage for row in everything for span in row)
    costs = mean_costs(everything, num_stages)
    measurement.costs = {
        "forward": list(costs.forward),
        "input_grad": list(costs.input_grad),
        "weight_grad": list(costs.weight_grad),
    }


# ------------------------------------------------------------------------------------------------
# Around them


def start(
    setting: Setting, arguments: Sequence[str], time_limit_s: float
) -> dict[str, Measurement]:
    """Run the ranks to their end; what they measured, by schedule."""
    threads = max(1, (os.cpu_count() or 1) // setting.ranks)
    with tempfile.TemporaryDirectory(prefix="schedules-") as folder:
        output = Path(folder) / "found.json"
        torchrun = ["torch.distributed.run", "--standalone", "--local-addr=127.0.0.1"]
        run = ["-m", "benchmarks.schedules", *arguments, "--on-rank", str(output)]
        subprocess.run(
            [sys.executable, "-m", *torchrun, f"--nproc-per-node={setting.ranks}", *run],
            env=os.environ | {"OMP_NUM_THREADS": str(threads), "GLOO_SOCKET_IFNAME": "lo"},
            check=True,
            timeout=time_limit_s,
        )
        found = json.loads(output.read_text())
    return {name: Measurement(**values) for name, values in found.items()}


def simulated(setting: Setting, found: dict[str, Measurement]) -> dict[str, Simulation]:
    """Each schedule where every action takes its measured mean, and messages nothing."""
    return {
        name: setting.simulation(name, Costs.of(len(m.costs["forward"]), **m.costs))
        for name, m in found.items()
    }


def ratios(setting: Setting, found: dict[str, Measurement]) -> list[dict[str, Any]]:
    """A row for each of `PAIRS`."""
    at_means = simulated(setting, found)
    at_units = {name: setting.simulation(name) for name in found}
    return [
        {
            "of": name,
            "to": base,
            "step": found[name].ratio(found[base], "step_s"),
            "pipeline": found[name].ratio(found[base], "pipeline_s"),
            "simulated": at_means[name].makespan / at_means[base].makespan,
            "unit_costs": float(at_units[name].makespan / at_units[base].makespan),
        }
        for name, base in PAIRS
    ]


def tables(setting: Setting, found: dict[str, Measurement]) -> Iterator[Table]:
    """What is printed: each schedule, then ratios."""
    at_means = simulated(setting, found)
    table = _table("schedule", "step s", "pipeline s", "bubble", "simulated", "unit costs")
    for name, measurement in found.items():
        table.add_row(
            name,
            f"{_median(measurement.step_s):.3f}",
            f"{_median(measurement.pipeline_s):.3f}",
            f"{measurement.bubble:.1%}",
            f"{float(at_means[name].bubble_rate):.1%}",
            f"{float(setting.simulation(name).bubble_rate):.1%}",
        )
    yield table
    table = _table("ratio", "step", "of rounds", "pipeline", "simulated", "unit costs")
    for row in ratios(setting, found):
        table.add_row(
            f"{row['of']} / {row['to']}",
            f"{statistics.median(row['step']):.3f}",
            f"{min(row['step']):.3f} … {max(row['step']):.3f}",
            f"{statistics.median(row['pipeline']):.3f}",
            f"{row['simulated']:.3f}",
            f"{row['unit_costs']:.3f}",
        )
    yield table


def rendered(setting: Setting, found: dict[str, Measurement]) -> str:
    """Both tables, and below them what was measured."""
    console = Console(width=100)
    with console.capture() as capture:
        for table in tables(setting, found):
            console.print(table, "")
    sizes = ", ".join(f"{key} {value}" for key, value in asdict(setting).items())
    lines = (line.rstrip() for line in capture.get().splitlines())
    return "\n".join([*lines, sizes])


def _table(first: str, *others: str) -> Table:
    table = Table(box=None, pad_edge=False)
    table.add_column(first)
    for title in others:
        table.add_column(title, justify="right")
    return table


def _median(rounds: Sequence[Sequence[float]]) -> float:
    return statistics.median(value for values in rounds for value in values)


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser("python -m benchmarks.schedules", description=__doc__)
    add = parser.add_argument
    add("--ranks", type=int, default=Setting.ranks)
    add("--microbatches", type=int, default=Setting.microbatches)
    add("--layers", type=int, default=Setting.layers, help="a multiple of 2 x ranks")
    add("--hidden", type=int, default=Setting.hidden, help="hidden size, a multiple of 24")
    add("--sequence", type=int, default=Setting.sequence)
    add("--rounds", type=int, default=Setting.rounds, help="turns of each schedule")
    add("--steps", type=int, default=Setting.steps, help="of a turn, warm-up included")
    add("--warmup", type=int, default=Setting.warmup, help="first steps, which don't count")
    add("--time-limit", type=float, default=1800.0, metavar="S", help="of everything (1800)")
    reporting.add_arguments(parser)
    add("--smoke", action="store_true", help="a tiny model, to see that everything runs")
    add("--on-rank", type=Path, metavar="FILE", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.layers % (2 * options.ranks):
        parser.error(f"--layers {options.layers} must be a multiple of {2 * options.ranks}")
    if not 0 <= options.warmup < options.steps:
        parser.error(f"--warmup {options.warmup} leaves none of --steps {options.steps} to time")
    return options


def setting_of(options: argparse.Namespace) -> Setting:
    """What the command line asks for."""
    names = ("ranks", "microbatches", "layers", "hidden", "sequence", "rounds", "steps", "warmup")
    setting = Setting(**{name: getattr(options, name) for name in names})
    if options.smoke:
        setting = Setting(setting.ranks, 4, 2 * setting.ranks, 48, 16, rounds=2, steps=2)
    return setting


def main() -> int:
    """Measure, print, write."""
    options = parse()
    setting = setting_of(options)
    if options.on_rank:
        measure(setting, options.on_rank)
        return 0
    load = os.getloadavg()[0]
    try:
        found = start(setting, sys.argv[1:], options.time_limit)
    except (subprocess.CalledProcessError, subprocess.TimeoutExpired) as problem:
        print(f"error: {problem}", file=sys.stderr)
        return 1
    text = rendered(setting, found)
    print(text)
    content = {
        "setting": asdict(setting),
        "load_before": load,
        "ratios": ratios(setting, found),
        "schedules": {name: asdict(measurement) for name, measurement in found.items()},
    }
    reporting.write(options.out, "schedules", f"```\n{text}\n```\n", content)
    return 0


if __name__ == "__main__":
    sys.exit(main())
