"""Show a traced step of a run: bubbles and Gantt chart, measured beside simulated.

    megagrid report runs/first --step 40 --svg step40.svg

The simulated step runs the same program where every action takes what it took on average in its
stage, and messages take no time: what the measured one lost to messages, waiting and uneven
actions is the difference. The unit column is the schedule's own bubble: F, I and W take 1 each.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterator, Sequence
from statistics import fmean

from megagrid.config.arguments import path_argument
from megagrid.errors import DataError
from megagrid.pipeline.schedules import (
    Action,
    Costs,
    Kind,
    Occupancy,
    Timeline,
    render_charts,
    render_text,
    simulate,
)
from megagrid.pipeline.schedules.picture import add_picture_options, write_pictures
from megagrid.pipeline.schedules.timing import inputs_of
from megagrid.train.trace import PipelineTrace, read_trace

KINDS = (Kind.F, Kind.B, Kind.I, Kind.W)

LEAST_SECONDS = 1e-9
"""An action's cost where the clock saw it take no time: the simulator wants costs above zero."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """What `megagrid report` takes."""
    add = parser.add_argument
    add(
        "run",
        type=path_argument,
        metavar="RUN",
        help="a run's folder, trained with logging.trace_interval",
    )
    add("--step", type=int, metavar="N", help="the last one traced, unless stated")
    add_picture_options(parser, "both steps")
    add(
        "--pipeline",
        type=_coordinates,
        default=(0, 0),
        metavar="DP,TP",
        help="which of the grid's pipelines: dp and tp coordinate of its ranks (0,0)",
    )


def run(arguments: argparse.Namespace) -> int:
    """Print the report."""
    if not arguments.run.is_dir():
        raise DataError(f"{arguments.run}: no such folder; name a run's, its logging.run_dir")
    dp, tp = arguments.pipeline
    trace = read_trace(arguments.run, step=arguments.step, dp=dp, tp=tp)
    measured = Occupancy(trace.timeline)
    simulated = simulate(trace.program, mean_costs(trace.timeline, trace.program.num_stages))
    unit = simulate(trace.program)
    print(f"{_title(trace)}, pipeline dp {dp} tp {tp} of {arguments.run}")
    print("\n".join(_figures(measured, simulated, unit)))
    print("\n".join(_means(trace)))
    for line in _clocks_that_differ(trace):
        print(line)
    charts = {
        f"measured, {_seconds(measured.makespan)}": measured.timeline,
        f"simulated, {_seconds(simulated.makespan)}": simulated.timeline,
    }
    column = min(_mean_seconds(trace.timeline).values())
    for title, timeline in charts.items():
        print(f"\n{title}\n{render_text(timeline, column)}")
    named = [(f"{_title(trace)}; {title}", timeline) for title, timeline in charts.items()]
    write_pictures(arguments, lambda: render_charts(named))
    return 0


def mean_costs(timeline: Timeline, num_stages: int) -> Costs:
    """What each stage's actions took on average, in seconds; messages take nothing.

    Where a stage has whole backwards alone, half of one stands for each of its halves.
    """
    means = _mean_seconds(timeline)

    def cost(stage: int, kind: Kind) -> float:
        half = means.get((stage, Kind.B), 0.0) / 2
        return max(means.get((stage, kind), half), LEAST_SECONDS)

    forward, input_grad, weight_grad = (
        [cost(stage, kind) for stage in range(num_stages)] for kind in (Kind.F, Kind.I, Kind.W)
    )
    return Costs.of(num_stages, forward, input_grad, weight_grad)


def _mean_seconds(timeline: Timeline) -> dict[tuple[int, Kind], float]:
    """By stage and kind of action."""
    seconds: dict[tuple[int, Kind], list[float]] = {}
    for row in timeline:
        for span in row:
            key = span.action.stage, span.action.kind
            seconds.setdefault(key, []).append(span.end - span.start)
    return {key: fmean(values) for key, values in sorted(seconds.items())}


def _figures(measured: Occupancy, simulated: Occupancy, unit: Occupancy) -> Iterator[str]:
    """The table of bubbles and lengths."""
    columns = (measured, simulated, unit)
    yield _row("", "measured", "simulated", "unit costs")
    yield _row("bubble", *(f"{float(each.bubble_rate):.1%}" for each in columns))
    for rank in range(len(measured.timeline)):
        rates = (f"{float(each.bubble_rates[rank]):.1%}" for each in columns)
        yield _row(f"  rank {rank}", *rates)
    yield _row("first start to last end", *_lengths([each.makespan for each in columns]))
    yield _row("longest of one rank", *_lengths([each.step_time for each in columns]))


def _lengths(times: Sequence[float]) -> Iterator[str]:
    *seconds, units = times
    yield from map(_seconds, seconds)
    yield f"{float(units):g}"


def _means(trace: PipelineTrace) -> Iterator[str]:
    """The table of what actions took, by stage."""
    means = _mean_seconds(trace.timeline)
    kinds = [kind for kind in KINDS if any(key[1] is kind for key in means)]
    yield _row("mean of a stage's", *kinds)
    for stage in range(trace.program.num_stages):
        cells = (means.get((stage, kind)) for kind in kinds)
        rank = trace.program.rank_of_stage(stage)
        yield _row(
            f"  stage {stage} (rank {rank})",
            *("" if cell is None else _seconds(cell) for cell in cells),
        )


def _clocks_that_differ(trace: PipelineTrace) -> Iterator[str]:
    """A warning for each rank that began an action before what it needs had ended on another."""
    ends = {span.action: span.end for row in trace.timeline for span in row}
    for rank, row in enumerate(trace.timeline):
        worst: tuple[float, Action, Action] | None = None
        for span in row:
            for makers in inputs_of(trace.program, span.action):
                maker = next(action for action in makers if action in ends)
                early = ends[maker] - span.start
                if early > 0 and (worst is None or early > worst[0]):
                    worst = early, span.action, maker
        if worst is not None:
            early, action, maker = worst
            yield (
                f"warning: rank {rank} began {action} {_seconds(early)} before {maker} had ended: "
                "the clocks of the ranks differ, and what is said of several ranks is off by that"
            )


def _title(trace: PipelineTrace) -> str:
    program = trace.program
    return (
        f"step {trace.step}: {program.name}, {program.num_stages} stages on "
        f"{program.num_ranks} ranks, {program.num_microbatches} microbatches"
    )


def _row(name: str, *cells: str) -> str:
    return f"  {name:<26}{''.join(f'{cell:>12}' for cell in cells)}".rstrip()


def _seconds(seconds: float) -> str:
    """Three digits, in s or ms."""
    return f"{seconds:.3g} s" if seconds >= 1 else f"{seconds * 1e3:.3g} ms"


def _coordinates(text: str) -> tuple[int, int]:
    match = re.fullmatch(r"(\d+),(\d+)", text)
    if match is None:
        raise argparse.ArgumentTypeError(f"{text!r} must be two coordinates, such as 0,1")
    return int(match[1]), int(match[2])
