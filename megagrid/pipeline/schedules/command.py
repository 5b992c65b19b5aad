"""`megagrid schedule NAME`: write, check, time and draw a pipeline schedule."""

from __future__ import annotations

import argparse
from fractions import Fraction
from pathlib import Path

from megagrid.pipeline.schedules.action import ScheduleError
from megagrid.pipeline.schedules.generators import GENERATORS, generate
from megagrid.pipeline.schedules.lowering import lower
from megagrid.pipeline.schedules.picture import add_picture_options, write_pictures
from megagrid.pipeline.schedules.render import render_charts, render_text
from megagrid.pipeline.schedules.schedule import Program, Schedule
from megagrid.pipeline.schedules.simulate import Simulation, simulate
from megagrid.pipeline.schedules.text import load, save
from megagrid.pipeline.schedules.timing import Costs, Time
from megagrid.pipeline.schedules.verify import VerifyReport, verify

_SIZES = {"ranks": 4, "microbatches": 8, "virtual": 1}
_MAX_FORWARDS = 100_000  # seconds of work; more is a typing error


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command's arguments."""
    add = parser.add_argument
    add("name", nargs="?", metavar="NAME", help=f"{', '.join(GENERATORS)}; or give --file")
    add("--stages", "--ranks", dest="ranks", type=int, metavar="P", help="pipeline ranks (4)")
    add("--microbatches", type=int, metavar="M", help="microbatches of a step (8)")
    add("--virtual", type=int, metavar="V", help="stages a rank, for Interleaved1F1B (1)")
    add("--file", type=Path, metavar="FILE", help="check a schedule or a program from a file")
    add("--tied", action="store_true", help="first and last stage share the embedding")
    add(
        "--cost",
        type=_cost,
        nargs=4,
        metavar=("F", "I", "W", "P2P"),
        help="time of forward, input gradient, weight gradient and message (1 1 1 0)",
    )
    add("--draw", action="store_true", help="draw ranks x time")
    add_picture_options(parser, "it")
    add("--save", type=Path, metavar="FILE", help="write the schedule to a file, for --file")


def run(args: argparse.Namespace) -> int:
    """Prints what is known of the schedule; 0 if it holds.

    Raises:
        ScheduleError: it can't be built, or breaks a rule; where, is drawn in its note.
    """
    source = _source(args)
    program = source if isinstance(source, Program) else lower(source, tied=args.tied)
    report = verify(program)
    simulation = simulate(program, Costs.of(program.num_stages, *(args.cost or ())))
    print(_summary(program, report, simulation))
    if args.draw:
        print(render_text(simulation.timeline))
    write_pictures(args, lambda: render_charts([(_title(program), simulation.timeline)]))
    if args.save:
        save(source, args.save)
    return 0


def _source(args: argparse.Namespace) -> Schedule | Program:
    if (args.name is None) == (args.file is None):
        raise ScheduleError(f"state a schedule ({', '.join(GENERATORS)}) or --file, one of the two")
    stated = {key: getattr(args, key) for key in _SIZES if getattr(args, key) is not None}
    if args.file is None:
        sizes = _SIZES | stated
        forwards = sizes["ranks"] * sizes["microbatches"] * sizes["virtual"]
        if forwards > _MAX_FORWARDS:
            raise ScheduleError(
                f"{sizes['ranks']} ranks x {sizes['microbatches']} microbatches x"
                f" {sizes['virtual']} stages a rank are {forwards} forwards;"
                f" stay within {_MAX_FORWARDS}"
            )
        return generate(args.name, sizes["ranks"], sizes["microbatches"], sizes["virtual"])
    source = load(args.file)
    if stated or (args.tied and isinstance(source, Program)):
        raise ScheduleError(f"{args.file} says its sizes and what is tied itself; edit them there")
    return source


def _cost(text: str) -> Fraction:
    try:
        return Fraction(text)
    except (ValueError, ZeroDivisionError):
        raise argparse.ArgumentTypeError(f"{text!r} is no number such as 2, 0.5 or 1/3") from None


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
            f"   (until the input gradient: {_row(report.in_flight_until_input_grad)})",
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
