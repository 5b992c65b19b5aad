"""When each rank ran each action of the pipeline, in the steps that are traced.

    RUN/trace/
      rank-00000.jsonl              a line for each traced step, of each rank in a file of its own
      program-6d3cf9b8a1f0.txt      what the ranks ran, as `megagrid schedule --file` reads it

    {"step": 40, "sizes": {"pp": 2, …}, "coordinate": {"pp": 0, …}, "program": "program-….txt",
     "spans": [["0F0", 1764500000.151203, 1764500000.162117], …]}

Times are seconds since the epoch by the rank's own clock: ranks of one machine share it, clocks of
several agree as well as they are kept. A run may go on on another grid, so each line says what it
was of; the program's name is a digest of it. Imports no torch.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from megagrid.errors import DataError, MegagridError
from megagrid.grid.placement import AXES, Coordinate, Placement
from megagrid.pipeline.schedules import Action, Program, Span, Timeline, load
from megagrid.pipeline.schedules.text import to_text
from megagrid.train.metrics import replace_file

FOLDER = "trace"


@dataclass(frozen=True)
class RankTrace:
    """One rank's part of a traced step.

    Attributes:
        step: number of the step, from 1.
        placement: the grid.
        coordinate: the rank's place in it.
        program: name of the file that holds the program.
        spans: the rank's compute actions in the order in which they ran, in seconds.
    """

    step: int
    placement: Placement
    coordinate: Coordinate
    program: str
    spans: tuple[Span, ...]

    def to_json(self) -> str:
        """One line, without its end."""
        return json.dumps(
            {
                "step": self.step,
                "sizes": {axis: self.placement.size(axis) for axis in AXES},
                "coordinate": self.coordinate._asdict(),
                "program": self.program,
                "spans": [
                    [str(span.action), round(span.start, 6), round(span.end, 6)]
                    for span in self.spans
                ],
            }
        )

    @classmethod
    def from_json(cls, line: str | bytes) -> RankTrace:
        """The trace of a line.

        Raises:
            ValueError, TypeError, KeyError, MegagridError: the line isn't one.
        """
        values = json.loads(line)
        trace = cls(
            step=int(values["step"]),
            placement=Placement(**{axis: int(values["sizes"][axis]) for axis in AXES}),
            coordinate=Coordinate(**{axis: int(values["coordinate"][axis]) for axis in AXES}),
            program=Path(str(values["program"])).name,
            spans=tuple(_span(*span) for span in values["spans"]),
        )
        if not trace.spans:
            raise ValueError("no spans")
        return trace


def _span(token: Any, start: Any, end: Any) -> Span:
    span = Span(Action.parse(str(token)), float(start), float(end))
    if not 0.0 <= span.start <= span.end < float("inf"):
        raise ValueError(f"{token} from {start} to {end}")
    return span


class TraceLog:
    """The writer of one rank's traces.

    Args:
        run: the run's folder.
        interval: steps between traced ones; 0: none is.
        placement, rank: the grid, and this rank's number in it.
        program: what the ranks run in a step.
        resume_step: last step that the run keeps. Traces of later ones are dropped, of ranks that
            no longer are as well.
    """

    def __init__(
        self,
        run: Path,
        *,
        interval: int,
        placement: Placement,
        rank: int,
        program: Program,
        resume_step: int = 0,
    ) -> None:
        self._interval = interval
        self._placement, self._rank = placement, rank
        folder = run / FOLDER
        for path in _rank_files(folder):
            number = int(path.stem.partition("-")[2])
            if number == rank or (rank == 0 and number >= placement.world_size):
                _drop_after(path, resume_step)
        self._path = _rank_file(folder, rank)
        if not interval:
            return
        folder.mkdir(parents=True, exist_ok=True)
        text = to_text(program)
        self._program = f"program-{hashlib.sha256(text.encode()).hexdigest()[:12]}.txt"
        if rank == 0:
            replace_file(folder / self._program, text.encode())
        self._file = self._path.open("a", encoding="utf-8")

    def is_due(self, step: int) -> bool:
        """Whether a step is to be traced."""
        return self._interval > 0 and step % self._interval == 0

    def write(self, step: int, spans: Sequence[Span]) -> None:
        """Add a step's trace; it is on disk when this returns."""
        coordinate = self._placement.coordinate(self._rank)
        trace = RankTrace(step, self._placement, coordinate, self._program, tuple(spans))
        self._file.write(trace.to_json() + "\n")
        self._file.flush()

    def rewind(self, step: int) -> None:
        """Drop the traces of later steps: the run has gone back to `step`."""
        if self._interval:
            self._file.close()
            _drop_after(self._path, step)
            self._file = self._path.open("a", encoding="utf-8")

    def close(self) -> None:
        if self._interval:
            self._file.close()


def _rank_file(folder: Path, rank: int) -> Path:
    return folder / f"rank-{rank:05d}.jsonl"


def _rank_files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.glob("rank-*.jsonl") if path.stem[5:].isdecimal())


def _drop_after(path: Path, step: int) -> None:
    content = path.read_bytes()
    kept = b"".join(line + b"\n" for line, trace in _traces(path, content) if trace.step <= step)
    if kept != content:
        replace_file(path, kept)


def _traces(path: Path, content: bytes) -> Iterator[tuple[bytes, RankTrace]]:
    """Each line, without its end, and its trace. A last line that a crash has torn is left out.

    Raises:
        DataError: another line isn't a trace.
    """
    lines = content.splitlines()
    for number, line in enumerate(lines, start=1):
        try:
            trace = RankTrace.from_json(line)
        except (ValueError, TypeError, KeyError, MegagridError) as error:
            if number == len(lines) and not content.endswith(b"\n"):
                return
            raise DataError(
                f"{path}:{number}: not a step's trace ({error}); delete the line, or move the "
                "file away"
            ) from None
        yield line, trace


# ------------------------------------------------------------------------------------------------
# Reading


@dataclass(frozen=True)
class PipelineTrace:
    """A traced step of one pipeline.

    Attributes:
        step: number of the step.
        placement: the grid that ran it.
        program: what its ranks ran.
        timeline: when; in seconds, from the first action's start.
    """

    step: int
    placement: Placement
    program: Program
    timeline: Timeline


def read_trace(run: Path, *, step: int | None, dp: int, tp: int) -> PipelineTrace:
    """A traced step of the pipeline whose ranks are at (dp, tp).

    Args:
        run: the run's folder.
        step: its number; None: the last one that all of the pipeline's ranks have finished.

    Raises:
        DataError: there is none, or not of that step or pipeline, or its files are damaged.
    """
    folder = run / FOLDER

    @cache
    def traces_of(rank: int) -> dict[int, RankTrace]:
        return _read(_rank_file(folder, rank))

    if not _rank_files(folder):
        raise DataError(
            f"{folder}: no traces; train with logging.trace_interval=N, which makes one every N "
            "steps"
        )
    known = traces_of(0)
    if step is not None and step not in known:
        raise DataError(f"{folder} has no step {step}; it has {_listed(known)}")
    for number in [step] if step is not None else sorted(known, reverse=True):
        placement = known[number].placement
        parts = [traces_of(rank).get(number) for rank in _pipeline(placement, dp, tp)]
        if None not in parts:
            return _together(folder, number, placement, parts)
    raise DataError(f"{folder} has no step of which every rank's trace is there")


def _read(path: Path) -> dict[int, RankTrace]:
    """The traces of one rank by step."""
    try:
        content = path.read_bytes()
    except OSError as error:
        raise DataError(f"{path}: can't be read ({error.strerror})") from None
    return {trace.step: trace for _, trace in _traces(path, content)}


def _listed(steps: Sequence[int]) -> str:
    if not steps:
        return "none"
    shown = [str(step) for step in sorted(steps)]
    return ", ".join(shown if len(shown) <= 8 else [*shown[:3], "…", *shown[-3:]])


def _pipeline(placement: Placement, dp: int, tp: int) -> list[int]:
    """The ranks of a pipeline, first to last."""
    if not (0 <= dp < placement.dp and 0 <= tp < placement.tp):
        raise DataError(
            f"pipeline {dp},{tp} isn't in a grid of dp {placement.dp} and tp {placement.tp}; they "
            f"are 0,0 to {placement.dp - 1},{placement.tp - 1}"
        )
    return [placement.rank(Coordinate(pp=pp, dp=dp, cp=0, tp=tp)) for pp in range(placement.pp)]


def _together(
    folder: Path, step: int, placement: Placement, parts: Sequence[RankTrace]
) -> PipelineTrace:
    if len({(part.program, part.placement) for part in parts}) > 1:
        raise DataError(f"{folder}: the ranks' traces of step {step} are of different runs")
    program = load(folder / parts[0].program)
    if not isinstance(program, Program) or program.num_ranks != len(parts):
        raise DataError(f"{folder / parts[0].program}: not the program of {len(parts)} ranks")
    for rank, part in enumerate(parts):
        if tuple(span.action for span in part.spans) != program.compute_order(rank):
            raise DataError(
                f"{folder}: step {step} of {part.coordinate} isn't what {part.program} says it runs"
            )
    first = min(part.spans[0].start for part in parts)
    timeline = tuple(
        tuple(Span(span.action, span.start - first, span.end - first) for span in part.spans)
        for part in parts
    )
    return PipelineTrace(step, placement, program, timeline)
