"""Draws a timeline (for the terminal, as a picture) and the steps of a broken program."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence

from megagrid.pipeline.schedules.action import Action, Kind, Step
from megagrid.pipeline.schedules.picture import Box, Label, Picture
from megagrid.pipeline.schedules.timing import Time, Timeline, ratio

_MAX_COLUMNS = 200  # of the text grid, however short the shortest action of a measured run
_LEFT, _WIDTH = 64, 1200  # of the rows of a chart, in pixels
_TITLE_HEIGHT, _ROW_HEIGHT = 34, 26
_STEPS_AROUND = 5  # the marked one, in the drawing of a broken program

_COLOURS = {Kind.F: "#7fa8d9", Kind.B: "#74b98a", Kind.I: "#8fcfb4", Kind.W: "#e8b565"}
_IDLE_COLOUR = "#f2f2f2"
_MEANINGS = {
    Kind.F: "forward",
    Kind.B: "backward",
    Kind.I: "input gradient",
    Kind.W: "weight gradient",
}


def render_text(timeline: Timeline, unit: Time | None = None) -> str:
    """A grid of ranks × time, one column for each unit of time.

        rank 0  F0 F1 .  .  B0--- B1---
        rank 1  .  F0 B0--- F1 B1---

    Times are rounded to units; `.` is idle, `-` goes on.

    Args:
        unit: the time of a column, longer where the grid would have too many of them; None: what
            the shortest action takes.
    """
    token = _tokens(timeline)
    unit = _unit(timeline, unit)
    width = max(len(token(span.action)) for row in timeline for span in row) + 1
    last = max(_column(row[-1].end, unit) for row in timeline if row)
    lines = []
    for rank, row in enumerate(timeline):
        cells, column = [], 0
        for span in row:
            start = max(_column(span.start, unit), column)
            end = max(_column(span.end, unit), start + 1)
            cells += [".".ljust(width)] * (start - column)
            fill = "-" if end - start > 1 else " "
            cells.append(token(span.action).ljust(width * (end - start) - 1, fill) + " ")
            column = end
        cells += [".".ljust(width)] * (last - column)
        lines.append(f"rank {rank:<{len(str(len(timeline) - 1))}}  {''.join(cells)}".rstrip())
    return "\n".join(lines)


def render_charts(charts: Sequence[tuple[str, Timeline]]) -> Picture:
    """Titled timelines one above the other, at one scale of time, with one legend of the colours.

    Each begins at 0.
    """
    scale = float(_WIDTH / max(row[-1].end for _, timeline in charts for row in timeline if row))
    shapes: list[Box | Label] = []
    y = 0
    for title, timeline in charts:
        shapes += _chart(title, timeline, y, scale)
        y += _TITLE_HEIGHT + len(timeline) * _ROW_HEIGHT + 8
    for index, kind in enumerate(_kinds(timeline for _, timeline in charts)):
        x = _LEFT + index * 140
        shapes.append(Box(x, y, 14, 14, _COLOURS[kind]))
        shapes.append(Label(x + 20, y + 12, f"{kind} {_MEANINGS[kind]}", size=12))
    return Picture(_LEFT + _WIDTH + 16, y + 28, shapes)


def _chart(title: str, timeline: Timeline, top: int, scale: float) -> Iterator[Box | Label]:
    """One chart, whose title begins at `top`."""
    if title:
        yield Label(_LEFT, top + 20, title, size=14)
    token, height = _tokens(timeline), _ROW_HEIGHT - 4
    for rank, row in enumerate(timeline):
        y = top + _TITLE_HEIGHT + rank * _ROW_HEIGHT
        yield Label(8, y + 16, f"rank {rank}", size=12)
        yield Box(_LEFT, y, _WIDTH, height, _IDLE_COLOUR)
        for span in row:
            x, width = _LEFT + float(span.start) * scale, float(span.end - span.start) * scale
            note = f"{span.action}: {float(span.start):g} … {float(span.end):g}"
            yield Box(x, y, width, height, _COLOURS[span.action.kind], note, has_edge=True)
            text = token(span.action)
            if width >= 6.5 * len(text):  # else it would run into the next
                yield Label(x + width / 2, y + 15, text, size=10, is_centred=True)


def render_steps(steps: Sequence[Sequence[Step]], marked_rank: int, marked: int | None) -> str:
    """Ranks × steps around a marked one, `▶2B0◀`.

    Args:
        steps: per rank.
        marked_rank: the marked step's rank.
        marked: its index; None for the end of the rank, where something is missing.
    """
    marked = len(steps[marked_rank]) if marked is None else marked
    first = max(marked - _STEPS_AROUND, 0)
    columns = range(first, marked + _STEPS_AROUND + 1)

    def cell(rank: int, index: int) -> str:
        text = str(steps[rank][index]) if index < len(steps[rank]) else ""
        return f"▶{text or '?'}◀" if (rank, index) == (marked_rank, marked) else text

    grid = [[cell(rank, index) for index in columns] for rank in range(len(steps))]
    widths = [max(map(len, column)) for column in zip(*grid, strict=True)]
    lines = []
    for rank, row in enumerate(grid):
        before = "… " if first else ""
        cells = "  ".join(text.ljust(width) for text, width in zip(row, widths, strict=True))
        after = " …" if len(steps[rank]) > columns.stop else ""
        lines.append(f"  rank {rank}: {before}{cells.rstrip()}{after}")
    return "\n".join(lines)


def _tokens(timeline: Timeline) -> Callable[[Action], str]:
    """How to write an action: without its stage where each rank has only one."""
    stages = [{span.action.stage for span in row} for row in timeline]
    if max(map(len, stages)) > 1:
        return str
    return lambda action: f"{action.kind}{action.microbatch}"


def _kinds(timelines: Iterable[Timeline]) -> list[Kind]:
    present = {span.action.kind for timeline in timelines for row in timeline for span in row}
    return [kind for kind in _COLOURS if kind in present]


def _unit(timeline: Timeline, wanted: Time | None) -> Time:
    spans = [span for row in timeline for span in row]
    if wanted is None:
        wanted = min(span.end - span.start for span in spans)
    return max(wanted, ratio(max(span.end for span in spans), _MAX_COLUMNS))


def _column(time: Time, unit: Time) -> int:
    return round(time / unit)
