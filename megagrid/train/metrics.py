"""What a run records of each step and of each save, and the files these lie in.

`metrics.jsonl` holds one JSON object per step, in order, whatever stopped and resumed the run in
between; `saves.jsonl` holds one per checkpoint. A run that goes back to a checkpoint, resumed or
rolled back, drops what it has written of later steps and writes them again as it makes them again:
after a rollback with other samples. `guard.jsonl`, there once a step wasn't made for its numbers,
has one for each of those and only grows. One rank writes them; what they say is true of the whole
grid.
"""

from __future__ import annotations

import json
import math
import os
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, ClassVar, Generic, Protocol, Self, TypeVar

from megagrid.errors import DataError
from megagrid.terminal import warn_on_stderr

_TAIL_BYTES = 1 << 16

EVERY_STEP = sys.maxsize
"""For a log that keeps the records of steps that the run has gone back from."""


class Record:
    """A line of a file of records: a dataclass with a `step`.

    Attributes:
        of: what it tells of.
    """

    of: ClassVar[str]
    step: int

    def to_json(self) -> str:
        """One line, without its end."""
        return json.dumps(_name_nonfinite(asdict(self)), allow_nan=False)

    @classmethod
    def from_json(cls, line: str | bytes) -> Self:
        """The record of a line. Keys that aren't known are ignored.

        Raises:
            ValueError, TypeError: where the line isn't a record.
        """
        values = json.loads(line)
        names = (f.name for f in fields(cls))
        return cls(**{name: _parse(values[name]) for name in names if name in values})


R = TypeVar("R", bound=Record)


@dataclass(frozen=True, kw_only=True)
class StepRecord(Record):
    """One step.

    Attributes:
        step: counted from 1.
        loss: mean cross-entropy over the step's valid tokens, in nats.
        z_loss: the same of what is added to it, see `train.z_loss`; None without.
        grad_norm: of the whole model, before clipping.
        lr: learning rate that the step was made with, or would have been.
        valid_tokens: labels of the step that count in the loss.
        consumed_tokens, consumed_samples: what the run has been fed up to and with this step. Not
            multiplied by ranks that share a sample (tp, pp).
        sample_ids: positions of the step's first and last sample in the order of samples.
        step_time_s: wall-clock seconds of the step on the rank that writes.
        parts_s: seconds of that rank by part of the step ("data", "forward", …), each second in
            one part.
        tokens_per_s, tokens_per_s_per_rank: valid tokens over `step_time_s`.
        mfu, hfu: see `megagrid.plan.flops`; None where the device's peak isn't known.
        peak_memory_bytes: of each rank.
        valid_loss: mean over the valid tokens of the validation samples, with the step's new
            weights; None at steps without an evaluation.
        skipped: whether the step wasn't made: no weight has moved.
        skipped_steps, rollbacks: of the run, up to and with this step.
        loss_scale: that its gradients were computed with; 1 but under fp16.
    """

    of: ClassVar[str] = "step"
    step: int
    loss: float
    grad_norm: float
    lr: float
    valid_tokens: int
    consumed_tokens: int
    consumed_samples: int
    sample_ids: tuple[int, int]
    step_time_s: float
    tokens_per_s: float
    tokens_per_s_per_rank: float
    parts_s: dict[str, float] = field(default_factory=dict)
    mfu: float | None = None
    hfu: float | None = None
    peak_memory_bytes: tuple[int, ...] = ()
    valid_loss: float | None = None
    z_loss: float | None = None
    skipped: bool = False
    skipped_steps: int = 0
    rollbacks: int = 0
    loss_scale: float = 1.0


@dataclass(frozen=True, kw_only=True)
class GuardRecord(Record):
    """A step that wasn't made for its numbers.

    Attributes:
        step: that the run went on after: the one not made, or that of the checkpoint which it was
            rolled back to.
        at_step: the one not made.
        action: "skip", "rollback" or "end".
        reason: in words.
        loss, grad_norm: of the step.
        sample_ids: positions of its first and last sample in the order of samples.
    """

    of: ClassVar[str] = "guard"
    step: int
    at_step: int
    action: str
    reason: str
    loss: float
    grad_norm: float
    sample_ids: tuple[int, int]


@dataclass(frozen=True, kw_only=True)
class SaveRecord(Record):
    """One checkpoint.

    Attributes:
        step: that it was saved after.
        is_async: whether the training went on meanwhile.
        pause_s: seconds that the training stood still: for all of the save or, if it went on, until
            the former save had ended and the boxes were copied.
        seconds: of the save itself, from the first copy to the removal of older checkpoints.
        bytes: of all its files.
        gb_per_s: 10^9 `bytes` by `seconds`.
    """

    of: ClassVar[str] = "save"
    step: int
    is_async: bool
    pause_s: float
    seconds: float
    bytes: int
    gb_per_s: float


NONFINITE = ("NaN", "Infinity", "-Infinity")
"""JSON has no word for NaN, and a diverged run must still be readable by every JSON parser: these
stand for them, as in protobuf, and float() reads them."""


def _name_nonfinite(value: Any) -> Any:
    """`value` in JSON's terms."""
    if isinstance(value, dict):
        return {key: _name_nonfinite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_name_nonfinite(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    return value


def _parse(value: Any) -> Any:
    """The inverse of `_name_nonfinite`, and tuples in place of lists."""
    if isinstance(value, list):
        return tuple(value)
    return float(value) if value in NONFINITE else value


class Sink(Protocol):
    """Where records go. The rank that speaks has several; the others have none."""

    def write(self, record: StepRecord) -> None: ...

    def rewind(self, step: int) -> None:
        """The run has gone back to `step`: what follows is the step after it."""

    def close(self) -> None: ...


class MetricsLog(Generic[R]):
    """The writer of a file of records: appends a line per record and flushes it.

    A disk that is full for a while doesn't end a run that may outlive it: what can't be written
    waits in memory for the next record.

    Args:
        path: the file; made if missing.
        resume_step: last step that the run keeps. Records of later steps were made by weights
            that are gone, and are dropped before the first is written again.
        kind: of records.
        warn: told when the disk begins to fail, and of what is lost at the end.
    """

    def __init__(
        self,
        path: Path,
        resume_step: int = 0,
        kind: type[R] = StepRecord,
        warn: Callable[[str], None] = warn_on_stderr,
    ) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._path = path
        self._kind = kind
        self._waiting = b""
        self._warn = warn
        self._open(resume_step)

    def write(self, record: R) -> None:
        failed_before = bool(self._waiting)
        self._waiting += record.to_json().encode() + b"\n"
        if (failure := self._flush()) and not failed_before:
            self._warn(f"{self._path}: {failure}; its lines wait in memory")

    def rewind(self, step: int) -> None:
        """Drop the records of later steps."""
        self.close()
        self._open(step)

    def close(self) -> None:
        if failure := self._flush():
            self._warn(f"{self._path}: {failure}; its last lines are lost")
        self._file.close()

    def _open(self, resume_step: int) -> None:
        drop_records_after(self._path, resume_step, self._kind)
        self._file = self._path.open("ab", buffering=0)

    def _flush(self) -> str | None:
        """Write what waits; why it can't be."""
        try:
            while self._waiting:
                self._waiting = self._waiting[self._file.write(self._waiting) :]
        except OSError as error:
            return error.strerror
        return None


def read_records(path: Path, kind: type[R] = StepRecord) -> list[R]:
    """All records of a file, in order. A last line that a crash has torn is left out.

    Raises:
        DataError: the file is missing, or another line isn't a record.
    """
    if not path.is_file():
        raise DataError(f"{path}: no such file; name the {path.name} of a run's folder")
    return [record for _, record in _records(path, kind)]


def last_records(path: Path, count: int, kind: type[R] = StepRecord) -> list[R]:
    """The last `count` records of a file, as many as there are, without reading the others.

    Raises:
        DataError: a line among them isn't a record.
    """
    if not path.is_file():
        return []
    with path.open("rb") as file:
        end = file.seek(0, os.SEEK_END)
        start, tail = end, b""
        while start > 0 and tail.count(b"\n") <= count:
            start = max(0, start - _TAIL_BYTES)
            file.seek(start)
            tail = file.read(end - start)
    whole = tail if start == 0 else tail.partition(b"\n")[2]
    return [record for _, record in _parsed(path, whole.splitlines(), kind)][-count:]


def drop_records_after(path: Path, step: int, kind: type[R] = StepRecord) -> None:
    """Cut the file down to the records of steps up to `step`."""
    if not path.exists():
        return
    kept = b"".join(line + b"\n" for line, record in _records(path, kind) if record.step <= step)
    if len(kept) != path.stat().st_size:
        replace_file(path, kept)


def replace_file(path: Path, content: bytes) -> None:
    """Write a file anew. A reader sees it as it was or as it becomes, nothing between, even if the
    machine stops midway."""
    partial = path.with_name(path.name + ".partial")
    with partial.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    partial.replace(path)


def _records(path: Path, kind: type[R]) -> Iterator[tuple[bytes, R]]:
    """Each line, without its end, and its record."""
    return _parsed(path, path.read_bytes().splitlines(), kind)


def _parsed(path: Path, lines: list[bytes], kind: type[R]) -> Iterator[tuple[bytes, R]]:
    for number, line in enumerate(lines, start=1):
        try:
            record = kind.from_json(line)
        except (ValueError, TypeError) as error:
            if number == len(lines):
                return
            raise DataError(
                f"{path}:{number}: not a {kind.of}'s record ({error}); delete the line, or move "
                "the file away"
            ) from error
        yield line, record


class Stopwatch:
    """Where the seconds of a step go.

    Parts may nest; a second counts in the innermost only, so the parts of a step add up to no
    more than the step:

        forward      |=====|         |====|        forward 9
        communication      |=========|             communication 9

    Args:
        clock: seconds from any origin.
        settle: called before each reading of the clock. Work on an accelerator is only queued
            when a call returns; where a part's own time is wanted, wait for the device here.
    """

    def __init__(
        self,
        clock: Callable[[], float] = time.perf_counter,
        settle: Callable[[], None] = lambda: None,
    ) -> None:
        self._clock = clock
        self._settle = settle
        self._running: list[str] = []
        self._parts: defaultdict[str, float] = defaultdict(float)
        self._start = self._mark = clock()

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        """Count the time of the block under `name`."""
        self._charge()
        self._running.append(name)
        try:
            yield
        finally:
            self._charge()
            self._running.pop()

    def lap(self) -> tuple[float, dict[str, float]]:
        """Seconds since the last lap, whole and by part; the next lap begins."""
        self._charge()
        whole, parts = self._mark - self._start, dict(self._parts)
        self._start = self._mark
        self._parts.clear()
        return whole, parts

    def _charge(self) -> None:
        """Give the time since the last mark to the part that was running."""
        self._settle()
        now = self._clock()
        if self._running:
            self._parts[self._running[-1]] += now - self._mark
        self._mark = now
