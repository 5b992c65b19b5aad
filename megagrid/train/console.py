"""What a run says while it trains: a row per step on one rank's terminal, or in its log file.

    step  done     loss    valid    norm        lr   tokens/s    MFU  step s     memory     left
     100    5%   6.0512   6.1023    1.52  3.00e-04     12,345  41.2%   0.664   1.20 GiB    21:14

Rows are plain lines of fixed width, printed once and never redrawn, so they read the same in a
terminal, in a file and in a pager; colour is added where there is a terminal.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from rich.text import Text

from megagrid.terminal import Console, size_text
from megagrid.train.metrics import SaveRecord, StepRecord

GIB = 2**30


@dataclass(frozen=True)
class Row:
    """What a column may show.

    Attributes:
        record: the step.
        total_steps: of the run.
        seconds_left: estimate for the steps that remain; None before there is one.
    """

    record: StepRecord
    total_steps: int
    seconds_left: float | None


@dataclass(frozen=True)
class Column:
    """A title, the characters it takes, right-aligned, and what a row shows in it."""

    title: str
    width: int
    show: Callable[[Row], str | None]
    """None leaves the cell blank."""
    style: str = ""


def _percent(fraction: float | None, digits: int) -> str | None:
    return None if fraction is None else f"{fraction:.{digits}%}"


def _loss(loss: float | None) -> str | None:
    return None if loss is None else f"{loss:.4f}"


def _memory(row: Row) -> str | None:
    """The fullest rank's peak: the one that runs out first."""
    peaks = row.record.peak_memory_bytes
    return f"{max(peaks) / GIB:.2f} GiB" if peaks else None


def format_duration(seconds: float) -> str:
    """4:05, 1:02:03 or 2d 03:04."""
    minutes, second = divmod(round(seconds), 60)
    hours, minute = divmod(minutes, 60)
    days, hour = divmod(hours, 24)
    if days:
        return f"{days}d {hour:02}:{minute:02}"
    return f"{hours}:{minute:02}:{second:02}" if hours else f"{minute}:{second:02}"


COLUMNS = (
    Column("step", 8, lambda row: str(row.record.step), "bold"),
    Column("done", 6, lambda row: _percent(row.record.step / row.total_steps, 0)),
    Column("loss", 9, lambda row: _loss(row.record.loss), "green"),
    Column("valid", 9, lambda row: _loss(row.record.valid_loss), "cyan"),
    Column("norm", 8, lambda row: f"{row.record.grad_norm:.3g}"),
    Column("lr", 10, lambda row: f"{row.record.lr:.2e}"),
    Column("tokens/s", 11, lambda row: f"{row.record.tokens_per_s:,.0f}"),
    Column("MFU", 7, lambda row: _percent(row.record.mfu, 1)),
    Column("step s", 8, lambda row: f"{row.record.step_time_s:.3f}"),
    Column("memory", 11, _memory),
    Column(
        "left",
        9,
        lambda row: None if row.seconds_left is None else format_duration(row.seconds_left),
    ),
)


class TimeLeft:
    """Estimate of a run's remaining seconds from its last `window` steps, all that happens between
    them included (evaluations, saves): recent, since the first steps of a run are slow ones."""

    def __init__(self, total_steps: int, clock: Callable[[], float], window: int = 100) -> None:
        self._total_steps = total_steps
        self._clock = clock
        self._marks: deque[tuple[int, float]] = deque(maxlen=window + 1)

    def after(self, record: StepRecord) -> float | None:
        """The estimate at the end of `record`'s step; None where one step is all that is known
        of a run (it compiles, allocates and opens files)."""
        now = self._clock()
        self._marks.append((record.step, now))
        first_step, then = self._marks[0]
        if record.step >= self._total_steps:
            return 0.0
        if record.step == first_step:
            return None
        return (now - then) / (record.step - first_step) * (self._total_steps - record.step)

    def forget(self) -> None:
        """What was known of the steps' times: the run goes on at another step."""
        self._marks.clear()


class ConsoleTable:
    """Prints a header, then a row for every `interval`-th step, the last one, and every step with
    an evaluation.

    Args:
        total_steps: steps of the run.
        interval: steps between rows.
        console: where to print; standard output by default.
        clock: seconds from any origin.
    """

    def __init__(
        self,
        total_steps: int,
        interval: int = 1,
        console: Console | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._total_steps = total_steps
        self._interval = interval
        self._console = console or Console(highlight=False)
        self._time_left = TimeLeft(total_steps, clock)
        self._has_header = False

    def write(self, record: StepRecord) -> None:
        row = Row(record, self._total_steps, self._time_left.after(record))
        is_due = record.step % self._interval == 0 or record.step == self._total_steps
        if not is_due and record.valid_loss is None:
            return
        if not self._has_header:
            self._line([Text(f"{c.title:>{c.width}}", style="bold") for c in COLUMNS])
            self._has_header = True
        self._line([Text(f"{c.show(row) or '':>{c.width}}", style=c.style) for c in COLUMNS])

    def rewind(self, step: int) -> None:
        """Rows of steps that are made again stay above the new ones."""
        self._time_left.forget()

    def close(self) -> None:
        """Nothing is held back."""

    def _line(self, cells: list[Text]) -> None:
        # Without a terminal rich assumes 80 characters and would fold a row in two.
        line = Text.assemble(*cells)
        self._console.print(line, soft_wrap=True, crop=False, overflow="ignore")


def save_line(record: SaveRecord) -> str:
    """What a run says of a checkpoint."""
    return (
        f"saved step {record.step}: {size_text(record.bytes)} in {record.seconds:.2f} s, "
        f"{record.gb_per_s:.3g} GB/s; training paused for {record.pause_s:.3f} s"
    )
