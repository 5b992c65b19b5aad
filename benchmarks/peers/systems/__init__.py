"""The systems under comparison: one row each.

A system is started as `python -m module *arguments` on each rank, with RANK, WORLD_SIZE, … set when
there is more than one, and writes one JSON line a step to `job.metrics`. Everything else (what
starts the ranks, what is timed, how memory is watched) is the same code for all.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from benchmarks.peers.spec import Job
from benchmarks.peers.systems.megagrid_recipe import write_recipe


@dataclass(frozen=True)
class Entry:
    """What a rank runs: `python -m module *arguments`."""

    module: str
    arguments: list[str]


def _worker(system: str) -> Callable[[Job], Entry]:
    """A system without a command line of its own: its trainer in the step loop of `worker.py`."""

    def entry(job: Job) -> Entry:
        return Entry("benchmarks.peers.worker", [system, str(job.save())])

    return entry


def _megagrid(job: Job) -> Entry:
    return Entry("megagrid", ["train", str(write_recipe(job))])


@dataclass(frozen=True)
class System:
    """A row of the comparison."""

    name: str
    entry: Callable[[Job], Entry]
    """Prepares the run's folder and says what each rank runs."""
    one_process: bool = False
    """It has no grid: every layout meets it as one process that has all the cores."""


SYSTEMS = {
    system.name: system
    for system in (
        System("megagrid", _megagrid),
        System("transformers", _worker("transformers"), one_process=True),
        System("native", _worker("native")),
    )
}
