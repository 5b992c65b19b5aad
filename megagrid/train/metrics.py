"""What a run records of each step, and the file it lies in.

`metrics.jsonl` holds one JSON object per optimizer step, in order, whatever stopped and resumed the
run in between. One rank writes it; what it says is true of the whole grid.
"""

from __future__ import annotations

import json
import math
import os
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, Protocol

from megagrid.errors import DataError


@dataclass(frozen=True, kw_only=True)
class StepRecord:
    """One optimizer step.

    Attributes:
        step: counted from 1.
        loss: mean over the step's valid tokens, in nats.
        grad_norm: of the whole model, before clipping.
        lr: learning rate that the step was made with.
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
    """

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

    def to_json(self) -> str:
        """One line, without its end."""
        return json.dumps(_name_nonfinite(asdict(self)), allow_nan=False)

    @classmethod
    def from_json(cls, line: str | bytes) -> StepRecord:
        """The record of a line. Keys that aren't known are ignored.

        Raises:
            ValueError, TypeError: where the line isn't a record.
        """
        values = json.loads(line)
        known = {name: _parse_nonfinite(values[name]) for name in _FIELDS if name in values}
        for name in _TUPLES & known.keys():
            known[name] = tuple(known[name])
        return cls(**known)


_FIELDS = tuple(f.name for f in fields(StepRecord))
_TUPLES = {"sample_ids", "peak_memory_bytes"}


def _name_nonfinite(value: Any) -> Any:
    """JSON has no word for NaN, and a diverged run must still be readable by every JSON parser:
    "NaN", "Infinity" and "-Infinity" stand for them, as in protobuf, and float() reads them."""
    if isinstance(value, dict):
        return {key: _name_nonfinite(item) for key, item in value.items()}
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    return value


def _parse_nonfinite(value: Any) -> Any:
    return float(value) if isinstance(value, str) else value


class Sink(Protocol):
    """Where records go. The rank that speaks has several; the others have none."""

    def write(self, record: StepRecord) -> None: ...

    def close(self) -> None: ...


class MetricsLog:
    """The writer of `metrics.jsonl`: appends a line per record and flushes it.

    Args:
        path: the file; made if missing.
        resume_step: last step that the run keeps. Records of later steps were made by weights
            that are gone, and are dropped before the first is written again.
    """

    def __init__(self, path: Path, resume_step: int = 0) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        drop_records_after(path, resume_step)
        self._file = path.open("a", encoding="utf-8")

    def write(self, record: StepRecord) -> None:
        self._file.write(record.to_json() + "\n")
        self._file.flush()

    def close(self) -> None:
        self._file.close()


def read_records(path: Path) -> list[StepRecord]:
    """All records of a `metrics.jsonl`, in order. A last line that a crash has torn is left out.

    Raises:
        DataError: the file is missing, or another line isn't a record.
    """
    if not path.is_file():
        raise DataError(f"{path}: no such file; name the metrics.jsonl of a run's folder")
    return [record for _, record in _records(path)]


def drop_records_after(path: Path, step: int) -> None:
    """Cut the file down to the records of steps up to `step`."""
    if not path.exists():
        return
    kept = b"".join(line + b"\n" for line, record in _records(path) if record.step <= step)
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


def _records(path: Path) -> Iterator[tuple[bytes, StepRecord]]:
    """Each line, without its end, and its record."""
    lines = path.read_bytes().splitlines()
    for number, line in enumerate(lines, start=1):
        try:
            record = StepRecord.from_json(line)
        except (ValueError, TypeError) as error:
            if number == len(lines):
                return
            raise DataError(
                f"{path}:{number}: not a step's record ({error}); delete the line, or move the "
                "file away"
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
