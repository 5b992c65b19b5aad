"""Pipeline schedules as data, without torch.

    generate ──> Schedule ──lower──> Program ──┬── verify    proves that it runs, or says why not
    load ──────┘ (compute order)     (steps)   ├── simulate  times it
                                               ├── render_*  draws the simulated or a measured run
                                               └── the executor, which knows no schedule by name

`action` has the words, `lowering` the rule that places communication, `rendezvous` the transport
that verify and simulate think of.
"""

from megagrid.pipeline.schedules.action import Action, Kind, ScheduleError, Step
from megagrid.pipeline.schedules.generators import (
    GENERATORS,
    forward_only,
    generate,
    stages_per_rank,
)
from megagrid.pipeline.schedules.lowering import lower
from megagrid.pipeline.schedules.render import render_charts, render_text
from megagrid.pipeline.schedules.schedule import Program, Schedule, loop_placement, v_placement
from megagrid.pipeline.schedules.simulate import Occupancy, Simulation, simulate
from megagrid.pipeline.schedules.text import load, save
from megagrid.pipeline.schedules.timing import Costs, Span, Timeline
from megagrid.pipeline.schedules.verify import VerifyReport, verify

__all__ = [
    "GENERATORS",
    "Action",
    "Costs",
    "Kind",
    "Occupancy",
    "Program",
    "Schedule",
    "ScheduleError",
    "Simulation",
    "Span",
    "Step",
    "Timeline",
    "VerifyReport",
    "forward_only",
    "generate",
    "load",
    "loop_placement",
    "lower",
    "render_charts",
    "render_text",
    "save",
    "simulate",
    "stages_per_rank",
    "v_placement",
    "verify",
]
