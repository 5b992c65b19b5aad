"""`megagrid schedule NAME`: write, check, time and draw a pipeline schedule."""

from __future__ import annotations

import argparse
from fractions import Fraction
from pathlib import Path

from megagrid.pipeline.schedules.action import ScheduleError
from megagrid.pipeline.schedules.generators import GENERATORS, generate
from megagrid.pipeline.schedules.lowering import lower
from megagrid.pipeline.schedules.render import render_svg, render_text
from megagrid.pipeline.schedules.schedule import Program
from megagrid.pipeline.schedules.simulate import Simulation, simulate
from megagrid.pipeline.schedules.text import load, save
from megagrid.pipeline.schedules.timing import Costs, Time
from megagrid.pipeline.schedules.verify import VerifyReport, verify


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command's arguments."""
    names = ", ".join(GENERATORS)
    parser.add_argument("name", nargs="?", help=f"{names}; left out with --file")
    parser.add_argument("--stages", "--ranks", dest="ranks", type=int, default=4, metavar="P",
                        help="ranks along the pipeline; each holds --virtual stages (default 4)")
    parser.add_argument("--microbatches", type=int, default=8, metavar="M", help="(default 8)")
    parser.add_argument("--virtual", type=int, default=1, metavar="V",
                        help="stages a rank, for Interleaved1F1B")
    parser.add_argument("--tied", action="store_true", help="first and last stage share weights")
    parser.add_argument("--cost", type=Fraction, nargs=4, metavar=("F", "I", "W", "P2P"),
                        help="time of each action and of a message (default 1 1 1 0)")
    parser.add_argument("--draw", action="store_true", help="draw ranks x time")
    parser.add_argument("--svg", type=Path, metavar="FILE", help="the same as a picture")
    parser.add_argument("--file", type=Path, metavar="FILE", help="take the schedule from a file")
    parser.add_argument("--save", type=Path, metavar="FILE", help="write the schedule to a file")


def run(args: argparse.Namespace) -> int:
    """Prints what is known of the schedule; 0 if it holds.

    Raises:
        ScheduleError: it can't be built, or breaks a rule.
    """
    if (args.name is None) == (args.file is None):
        raise ScheduleError(f"state a schedule ({', '.join(GENERATORS)}) or --file, one of them")
    source = load(args.file) if args.file else generate(
        args.name, args.ranks, args.microbatches, args.virtual
    )
    program = source if isinstance(source, Program) else lower(source, tied=args.tied)
    report = verify(program)
    simulation = simulate(program, _costs(program, args.cost))
    print(_summary(program, report, simulation))
    if args.draw:
        print(render_text(simulation.timeline))
    if args.svg:
        args.svg.write_text(render_svg(simulation.timeline, title=_title(program)))
    if args.save:
        save(source, args.save)
    return 0

def _costs(program: Program, cost: list[Fraction] | None) -> Costs:
    forward, input_grad, weight_grad, p2p = cost or (1, 1, 1, 0)
    return Costs.of(program.num_stages, forward, input_grad, weight_grad, p2p)


def _title(program: Program) -> str:
    return (
        f"{program.name}: {program.num_stages} stages on {program.num_ranks} ranks, "
        f"{program.num_microbatches} microbatches"
    )


def _summary(program: Program, report: VerifyReport, simulation: Simulation) -> str:
    return "\n".join(
        (
            _title(program),
            f"  in flight, per rank      {_row(report.in_flight)}"
            f"   (until the input gradient: {_row(report.in_flight_for_input)})",
            f"  messages                 {report.messages}, in batches per rank"
            f" {_row(report.batches)}",
            f"  makespan                 {_number(simulation.makespan)}"
            f"   (one rank, start to end: {_number(simulation.step_time)})",
            f"  bubble                   {_percent(simulation.bubble_rate)}"
            f"   per rank {' '.join(map(_percent, simulation.bubble_rates))}"
            f"   (of a rank's start to end: {_percent(simulation.step_bubble_rate)})",
        )
    )


def _row(numbers: tuple[int, ...]) -> str:
    return " ".join(map(str, numbers))


def _number(time: Time) -> str:
    return f"{float(time):g}"


def _percent(rate: Time) -> str:
    return f"{float(rate):.1%}"
