"""Draws a timeline (for the terminal, as SVG) and the steps of a broken program."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from html import escape

from megagrid.pipeline.schedules.action import Action, Kind, Step
from megagrid.pipeline.schedules.timing import Span, Time, Timeline, ratio

_MAX_COLUMNS = 200  # of the text grid, however short the shortest action of a measured run
_TITLE_HEIGHT, _ROW_HEIGHT = 34, 26  # of a chart, in pixels
_STEPS_AROUND = 5  # the marked one, in the drawing of a broken program

_COLOURS = {Kind.F: "#7fa8d9", Kind.B: "#74b98a", Kind.I: "#8fcfb4", Kind.W: "#e8b565"}
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


def render_svg(timeline: Timeline, title: str = "") -> str:
    """The same as a picture: an SVG document, colours by kind, a legend below."""
    return render_charts([(title, timeline)])


def render_charts(charts: Sequence[tuple[str, Timeline]]) -> str:
    """Titled timelines one above the other, at one scale of time, with one legend: an SVG document.

    Each begins at 0.
    """
    left, wide = 64, 1200
    scale = float(wide / max(row[-1].end for _, timeline in charts for row in timeline if row))
    body: list[str] = []
    y = 0
    for title, timeline in charts:
        body += _svg_chart(title, timeline, y, left, wide, scale)
        y += _TITLE_HEIGHT + len(timeline) * _ROW_HEIGHT + 8
    for index, kind in enumerate(_kinds(timeline for _, timeline in charts)):
        x = left + index * 140
        body.append(f'<rect x="{x}" y="{y}" width="14" height="14" fill="{_COLOURS[kind]}"/>')
        label = f"{kind} {_MEANINGS[kind]}"
        body.append(f'<text x="{x + 20}" y="{y + 12}" font-size="12">{label}</text>')
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{left + wide + 16}" height="{y + 28}" '
        f'font-family="sans-serif">\n' + "\n".join(body) + "\n</svg>\n"
    )


def _svg_chart(
    title: str, timeline: Timeline, top: int, left: int, wide: int, scale: float
) -> list[str]:
    """The elements of one chart, whose title begins at `top`."""
    body = []
    if title:
        body.append(f'<text x="{left}" y="{top + 20}" font-size="14">{escape(title)}</text>')
    token, height = _tokens(timeline), _ROW_HEIGHT - 4
    for rank, row in enumerate(timeline):
        y = top + _TITLE_HEIGHT + rank * _ROW_HEIGHT
        body.append(f'<text x="8" y="{y + 16}" font-size="12">rank {rank}</text>')
        body.append(f'<rect x="{left}" y="{y}" width="{wide}" height="{height}" fill="#f2f2f2"/>')
        body += [_svg_box(span, token(span.action), left, y, height, scale) for span in row]
    return body


def _svg_box(span: Span, label: str, left: int, y: int, height: int, scale: float) -> str:
    x, width = left + float(span.start) * scale, float(span.end - span.start) * scale
    box = (
        f'<rect x="{x:.2f}" y="{y}" width="{width:.2f}" height="{height}" '
        f'fill="{_COLOURS[span.action.kind]}" stroke="#fff"><title>{span.action}: '
        f"{float(span.start):g} … {float(span.end):g}</title></rect>"
    )
    if width < 7 * len(label):
        return box
    text = f'<text x="{x + width / 2:.2f}" y="{y + 15}" font-size="10" text-anchor="middle">'
    return f"{box}{text}{label}</text>"


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
