"""Schedules and programs as text files that people can read and edit.

    # Lines that begin with # and empty lines don't count.
    schedule: 1F1B
    microbatches: 2
    placement: 0 1              # the rank of stage 0, of stage 1, …
    max_in_flight: 2 1          # optional: a promise per rank that `verify` holds it to
    forward_only: no            # optional

    rank 0: 0F0 0F1 0B0 0B1
    rank 1: 1F0 1B0 1F1
        1B1                     # an indented line continues the one before

A program begins with `program:`, may say `tied: yes`, and holds communication, the messages of a
batch joined by `+`: `rank 0: 0F0 0SEND_F0 0F1 0SEND_F1+0RECV_B0 …`.
"""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from megagrid.pipeline.schedules.action import ScheduleError, Step
from megagrid.pipeline.schedules.schedule import Program, Schedule, compute_steps

_T = TypeVar("_T")
_YES_NO = {"yes": True, "no": False}


def save(saved: Schedule | Program, path: Path) -> None:
    """Writes a schedule or a program; `load` gives it back equal."""
    write(path, to_text(saved))


def to_text(saved: Schedule | Program) -> str:
    """What `save` writes."""
    is_program = isinstance(saved, Program)
    lines = [
        f"{'program' if is_program else 'schedule'}: {saved.name}",
        f"microbatches: {saved.num_microbatches}",
        f"placement: {' '.join(map(str, saved.placement))}",
        f"max_in_flight: {' '.join(map(str, saved.max_in_flight))}",
        f"forward_only: {'yes' if saved.forward_only else 'no'}",
    ]
    if is_program:
        lines.append(f"tied: {'yes' if saved.tied else 'no'}")
    lines.append("")
    for rank, row in enumerate(saved.steps if is_program else saved.orders):
        line = f"rank {rank}: {' '.join(map(str, row))}"
        lines.append(textwrap.fill(line, 100, subsequent_indent="    ", break_long_words=False))
    return "\n".join(lines) + "\n"


def write(path: Path, content: str | bytes) -> None:
    """Writes a file.

    Raises:
        ScheduleError: it can't be written.
    """
    try:
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
    except OSError as error:
        raise ScheduleError(f"{path}: can't be written ({error.strerror})") from None


def load(path: Path) -> Schedule | Program:
    """Reads what `save` wrote or somebody typed.

    Raises:
        ScheduleError: names file, line, and what was expected.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it isn't UTF-8 text"
        raise ScheduleError(f"{path}: can't be read as a schedule ({reason})") from None
    fields, rows = _split(text, path)
    return _build(_Reader(fields, path), rows)


@dataclass(frozen=True)
class _Line:
    number: int
    text: str


def _split(text: str, path: Path) -> tuple[dict[str, _Line], dict[int, list[_Line]]]:
    """The file's `key: value` fields, and the lines of each rank's row."""
    fields: dict[str, _Line] = {}
    rows: dict[int, list[_Line]] = {}
    current: list[_Line] | None = None
    for number, raw in enumerate(text.splitlines(), start=1):
        line = raw.split("#")[0].rstrip()
        if not line:
            continue
        if line[0].isspace():
            if current is None:
                raise ScheduleError(f"{path}:{number}: an indented line must continue a rank's")
            current.append(_Line(number, line))
            continue
        key, colon, value = line.partition(":")
        word, _, rank = key.partition(" ")
        if not colon:
            raise ScheduleError(f"{path}:{number}: {line!r} is no `key: value`")
        if word == "rank" and rank.strip().isdecimal():
            if int(rank) in rows:
                raise ScheduleError(f"{path}:{number}: rank {int(rank)} comes twice")
            current = rows[int(rank)] = [_Line(number, value)]
            continue
        if key in fields:
            raise ScheduleError(f"{path}:{number}: {key} comes twice")
        fields[key], current = _Line(number, value.strip()), None
    return fields, rows


class _Reader:
    """Takes fields out of a file one by one, so that what is left over can be refused."""

    def __init__(self, fields: dict[str, _Line], path: Path) -> None:
        self._fields = dict(fields)
        self.path = path

    def has(self, key: str) -> bool:
        return key in self._fields

    def take(self, key: str, parse: Callable[[str], _T], wanted: str) -> _T:
        if key not in self._fields:
            raise ScheduleError(f"{self.path}: lacks `{key}:`, which is {wanted}")
        line = self._fields.pop(key)
        try:
            return parse(line.text)
        except (ValueError, KeyError):
            raise ScheduleError(
                f"{self.path}:{line.number}: {key}: {line.text!r} must be {wanted}"
            ) from None

    def refuse_rest(self) -> None:
        for key, line in self._fields.items():
            raise ScheduleError(f"{self.path}:{line.number}: {key!r} is no field of this file")


def _numbers(text: str) -> tuple[int, ...]:
    if not text:
        raise ValueError
    return tuple(int(word) for word in text.split())


def _build(reader: _Reader, rows: dict[int, list[_Line]]) -> Schedule | Program:
    is_program = reader.has("program")
    name = reader.take("program" if is_program else "schedule", str, "its name")
    microbatches = reader.take("microbatches", int, "a number")
    placement = reader.take("placement", _numbers, "the rank of each stage")
    if sorted(rows) != sorted(set(placement)):
        raise ScheduleError(
            f"{reader.path}: has orders for the ranks {_listed(rows)}, but its placement names"
            f" {_listed(set(placement))}"
        )
    num_ranks = len(rows)
    bounds = tuple(placement.count(rank) * microbatches for rank in range(num_ranks))
    if reader.has("max_in_flight"):
        bounds = reader.take("max_in_flight", _numbers, "a number per rank")
    shared = {"name": name, "num_ranks": num_ranks, "num_microbatches": microbatches}
    shared |= {"placement": placement, "max_in_flight": bounds}
    if reader.has("forward_only"):
        shared["forward_only"] = reader.take("forward_only", _YES_NO.__getitem__, "yes or no")
    if is_program and reader.has("tied"):
        shared["tied"] = reader.take("tied", _YES_NO.__getitem__, "yes or no")
    reader.refuse_rest()
    steps = tuple(_steps(rows[rank], reader.path, is_program) for rank in sorted(rows))
    try:
        if is_program:
            return Program(**shared, steps=steps)
        orders = tuple(tuple(step.action for step in row) for row in steps)
        return Schedule(**shared, orders=orders)
    except ScheduleError as error:
        raise ScheduleError(f"{reader.path}: {error}") from None


def _listed(ranks: Iterable[int]) -> str:
    return ", ".join(str(rank) for rank in sorted(ranks)) or "none"


def _steps(lines: list[_Line], path: Path, is_program: bool) -> tuple[Step, ...]:
    steps = []
    for line in lines:
        for word in line.text.split():
            try:
                step = Step.parse(word)
                if not is_program:
                    compute_steps(step.actions)
            except ScheduleError as error:
                raise ScheduleError(f"{path}:{line.number}: {error}") from None
            steps.append(step)
    return tuple(steps)
