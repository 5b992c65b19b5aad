"""How a run is, from the files in its folder alone: no ranks are asked, and no torch is needed.

metrics.jsonl       how far it is, and how fast
ranks/*.json        who is there, what they do, how they ended
checkpoints/        what it can go on from
config.toml         of how many steps
"""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import fmean, median
from typing import TypeVar

from megagrid.checkpoint.folders import CHECKPOINTS, newest_first
from megagrid.checkpoint.manifest import find_damage, read_manifest
from megagrid.config.load import load
from megagrid.config.schema import Config
from megagrid.errors import CheckpointError, DataError
from megagrid.exit_codes import CRASHED, STOPPED
from megagrid.grid import bootstrap
from megagrid.health.beat import (
    CRASH,
    DONE,
    EVALUATING,
    FOLDER,
    INTERRUPT,
    LEFT_ALONE,
    MISTAKEN,
    SAVING,
    SETUP,
    STALE_BEATS,
    STOPPED_AND_SAVED,
    Beat,
    is_alive,
    name_ranks,
    read_beats,
    read_known,
    read_starting,
)
from megagrid.health.presence import present_launcher
from megagrid.health.stragglers import find_stragglers
from megagrid.health.verdict import of_this_start, verdict_file
from megagrid.train.metrics import StepRecord, last_records

RUNNING, WAITING, STALLED = "running", "waiting", "stalled"
STOPPED_TO_GO_ON, FAILED = "stopped", "failed"
CODES = {DONE: 0, FAILED: CRASHED, RUNNING: 10, WAITING: 11, STALLED: 12, STOPPED_TO_GO_ON: STOPPED}
"""Health of a run -> exit code of `megagrid status`."""

WORST_FIRST = (FAILED, STALLED, STOPPED_TO_GO_ON, WAITING, RUNNING, DONE)

RECENT = 50
"""Steps that say how fast a run is."""

STALL_STEPS, STALL_S, LONG_PHASE_S = 10, 30.0, 600.0
"""A run is stalled that has made no step for so many times the usual, and so many seconds; or that
has been saving, or evaluating, for so many."""

NAMED = 8
"""Silent ranks that are named, at most."""

CLOCKS_DIFFER_S = 600.0
"""By so much at most: a run whose last beat is older isn't waited for."""

PROCESS_SLACK_S = 60.0
"""That the system's clock may have been set since it has begun to count."""

BEATS_WAITED, MOST_WAITED_S = 1.5, 30.0
"""Intervals, and seconds at most, until a beat must have been followed by another."""


@dataclass(frozen=True)
class SavedStep:
    """The newest checkpoint that is sound, by the sizes of its files.

    Attributes:
        passed_over: newer ones that aren't.
    """

    step: int
    path: str
    age_s: float
    passed_over: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Status:
    """A run.

    Attributes:
        health: one of `CODES`.
        reason: why so, in words.
        step, total_steps: made, and of the run.
        loss, tokens_per_s, step_s: of the last steps.
        seconds_left: at their pace; None unless it runs.
        since_step_s: since the last step was written down.
        ranks, ranks_here: of the grid, and those that beat.
        silent: ranks that should, and don't: each with coordinate and host.
        slow: ranks that make the others wait, in words.
        job, restarts: of the scheduler, and by it and the launcher.
    """

    run: str
    health: str
    reason: str
    step: int = 0
    total_steps: int | None = None
    loss: float | None = None
    tokens_per_s: float | None = None
    step_s: float | None = None
    seconds_left: float | None = None
    since_step_s: float | None = None
    checkpoint: SavedStep | None = None
    ranks: int = 0
    ranks_here: int = 0
    hosts: tuple[str, ...] = ()
    silent: tuple[str, ...] = ()
    slow: tuple[str, ...] = ()
    job: str | None = None
    restarts: int = 0

    @property
    def code(self) -> int:
        """What `megagrid status` ends with."""
        return CODES[self.health]

    def to_json(self) -> dict:
        """As JSON."""
        return asdict(self)


def look_at(
    runs: Sequence[Path], clock: Callable[[], float], sleep: Callable[[float], object]
) -> list[Status]:
    """How runs are. One whose ranks all seem silent, but only by the clock of a machine that isn't
    theirs, is looked at again after a beat: ranks that have written another live.

    Raises:
        DataError: a folder isn't a run's.
    """
    now = clock()
    seen = {run: last for run in runs if (last := _last_if_doubtful(run, now)) is not None}
    if seen:
        longest = max(beat.interval_s for beat in seen.values())
        sleep(min(BEATS_WAITED * longest, MOST_WAITED_S))
        now = clock()
    return [status_of(run, now, seen.get(run)) for run in runs]


def status_of(run: Path, now: float, seen: Beat | None = None) -> Status:
    """How a run is at `now`, in seconds since the epoch.

    Args:
        seen: the last beat that was there when the run was looked at before.

    Raises:
        DataError: the folder isn't a run's.
    """
    beats = _beats(run, now)
    now = _by_their_clocks(beats, now, seen)
    ranks = _Ranks(beats, now)
    records = _recent(run / "metrics.jsonl")
    config = _config(run)
    saved = _or_none(lambda: newest_sound(run, now))
    if not (ranks.beats or records or config or saved):
        raise DataError(f"{run}: no run in here; name the folder that is its logging.run_dir")
    total = config.train.total_steps if config is not None else None
    step = max([record.step for record in records[-1:]], default=saved.step if saved else 0)
    step_s = fmean(record.step_time_s for record in records) if records else None
    since = max(0.0, now - (run / "metrics.jsonl").stat().st_mtime) if records else None
    health, reason = _health(run, ranks, step, total, records, since)
    is_going_on = health == RUNNING and step_s is not None and total is not None
    newest = max(ranks.beats.values(), key=lambda beat: beat.started, default=None)
    factor = config.logging.straggler_factor if config is not None else 0.0
    return Status(
        run=str(run),
        health=health,
        reason=reason,
        step=step,
        total_steps=total,
        loss=records[-1].loss if records else None,
        tokens_per_s=fmean(record.tokens_per_s for record in records) if records else None,
        step_s=step_s,
        seconds_left=max(0, total - step) * step_s if is_going_on else None,
        since_step_s=since,
        checkpoint=saved,
        ranks=ranks.expected,
        ranks_here=len(ranks.alive),
        hosts=tuple(sorted({beat.host for beat in ranks.beats.values()})),
        silent=tuple(beat.who for beat in ranks.silent) if ranks.alive else (),
        slow=tuple(map(str, find_stragglers(ranks.alive, factor))) if config is not None else (),
        job=newest.job.id if newest else None,
        restarts=newest.job.restarts if newest else 0,
    )


def _beats(run: Path, now: float) -> dict[int, Beat]:
    """Of the ranks that are the run's; of a start that hasn't its folder yet only while that beats
    and the run doesn't, or where there is nothing else."""
    mine = of_this_start(read_beats(run))
    newest = max(mine.values(), key=lambda beat: beat.started, default=None)
    if newest is not None and newest.start is not None:
        mine = of_this_start(read_known(run, newest.start))
    starting = of_this_start(read_starting(run))
    is_starting = bool(_Ranks(starting, now).alive) and not _Ranks(mine, now).alive
    return starting if is_starting or not mine else mine


def _last(beats: Mapping[int, Beat]) -> Beat | None:
    """The last beat of ranks that haven't said that they end."""
    going_on = (beat for beat in beats.values() if beat.end is None)
    return max(going_on, key=lambda beat: beat.time, default=None)


def _last_if_doubtful(run: Path, now: float) -> Beat | None:
    """The last beat of a run, if it is overdue by so little that it may be a clock that differs."""
    last = _last(_beats(run, now))
    if last is None or last.host == bootstrap.host_name() or not last.is_silent(now):
        return None
    return last if now - last.time <= CLOCKS_DIFFER_S else None


def _by_their_clocks(beats: Mapping[int, Beat], now: float, seen: Beat | None) -> float:
    """`now`, no later than a rank that lives will beat again."""
    last = _last(beats)
    if last is None or (last.is_silent(now) and (seen is None or seen.time == last.time)):
        return now
    return min(now, last.time + last.interval_s)


@dataclass
class _Ranks:
    """The ranks of a run's last start, by what has become of them.

    Attributes:
        alive: those that beat; `silent`: those that should.
        ended: those that have said how.
        absent: numbers of those that have yet to begin.
    """

    beats: dict[int, Beat]
    now: float
    alive: list[Beat] = field(init=False)
    silent: list[Beat] = field(init=False)
    ended: list[Beat] = field(init=False)
    expected: int = field(init=False)
    absent: list[int] = field(init=False)

    def __post_init__(self) -> None:
        all_of_them = self.beats.values()
        self.ended = [beat for beat in all_of_them if beat.end is not None]
        going_on = [beat for beat in all_of_them if beat.end is None]
        self.silent = [beat for beat in going_on if beat.is_silent(self.now) or _is_gone(beat)]
        self.alive = [beat for beat in going_on if beat not in self.silent]
        self.expected = max((beat.world_size for beat in all_of_them), default=0)
        self.absent = [rank for rank in range(self.expected) if rank not in self.beats]

    def first_that(self, *how: str) -> Beat | None:
        """The first that has ended so."""
        found = [beat for beat in self.ended if beat.end.how in how]
        return min(found, key=lambda beat: beat.end.time, default=None)


def _is_gone(beat: Beat) -> bool:
    """Whether this is the rank's host, and its process is no more."""
    return beat.host == bootstrap.host_name() and not _has_process(beat)


def _has_process(beat: Beat) -> bool:
    """Whether this machine has the rank's process: no zombie, nor a later one of the same number.
    Where the system has no /proc any process of the number will do."""
    try:
        state, *numbers = Path(f"/proc/{beat.pid}/stat").read_text().rpartition(")")[2].split()
        booted = re.search(r"^btime (\d+)", Path("/proc/stat").read_text(), re.MULTILINE)
        begun = int(booted[1]) + int(numbers[18]) / os.sysconf("SC_CLK_TCK")
    except (OSError, ValueError, TypeError, IndexError):
        return is_alive(beat.pid)
    return state not in "ZX" and begun <= beat.started + PROCESS_SLACK_S


def _health(
    run: Path,
    ranks: _Ranks,
    step: int,
    total: int | None,
    records: Sequence[StepRecord],
    since_step_s: float | None,
) -> tuple[str, str]:
    """One of `CODES`, and why."""
    if ranks.alive:
        return _health_of_living(ranks, records, since_step_s)
    health, why = _health_of_ended(run, ranks, step, total, since_step_s)
    launcher = present_launcher(run, ranks.now) if health in (FAILED, STOPPED_TO_GO_ON) else None
    if launcher is None:
        return health, why
    return (
        WAITING,
        f"{why}; the launcher on {launcher.host} has yet to start ranks again, or to end",
    )


def _health_of_ended(
    run: Path, ranks: _Ranks, step: int, total: int | None, since_step_s: float | None
) -> tuple[str, str]:
    alone = ranks.first_that(LEFT_ALONE)
    if alone and (told := _verdict(run, alone.start)):
        return FAILED, told
    if wrong := ranks.first_that(MISTAKEN) or ranks.first_that(CRASH):
        return FAILED, f"{wrong.who}: {wrong.end.line or wrong.end.how}"
    if ranks.silent and not ranks.first_that(STOPPED_AND_SAVED, DONE):
        return _health_of_silent(run, ranks, since_step_s)
    if alone:
        return FAILED, alone.end.line
    if ranks.first_that(INTERRUPT):
        return FAILED, "interrupted; nothing was saved after its last checkpoint"
    if ranks.first_that(STOPPED_AND_SAVED):
        return STOPPED_TO_GO_ON, "by a signal, and saved; go on with checkpoint.resume=latest"
    if ranks.first_that(DONE) or (total is not None and step >= total):
        return DONE, ""
    return WAITING, "no rank has begun"


def _health_of_silent(run: Path, ranks: _Ranks, since_step_s: float | None) -> tuple[str, str]:
    """Of ranks of which none beats, and some haven't said that they end."""
    last = max(ranks.silent, key=lambda beat: beat.time)
    ago = f"{max(0.0, ranks.now - last.time):.0f} s ago"
    there = [beat for beat in ranks.silent if not _is_gone(beat)]
    makes_steps = since_step_s is not None and since_step_s <= STALE_BEATS * last.interval_s
    if there and makes_steps:
        mute = f"it makes steps, but ranks can't write to {run / FOLDER}, the last {ago}"
        return RUNNING, f"{mute}; make room there"
    who = "; ".join(beat.who for beat in ranks.silent[:NAMED])
    if any(beat.host == bootstrap.host_name() for beat in there):
        what = "their processes are there, stopped by a signal or hung"
        return STALLED, f"without a word since {ago}: {who}; {what}"
    return FAILED, f"without a word since {ago}: {who}; killed, or the host is down"


def _health_of_living(
    ranks: _Ranks, records: Sequence[StepRecord], since_step_s: float | None
) -> tuple[str, str]:
    first = min(ranks.alive, key=lambda beat: beat.rank)
    in_phase_s = max(0.0, ranks.now - first.phase_since)
    phase = f"{first.phase}, for {in_phase_s:.0f} s"
    missing = [*ranks.absent, *(beat.rank for beat in ranks.silent)]
    if first.phase in SETUP:
        if missing:
            return WAITING, f"{phase}; {name_ranks(missing)} of {ranks.expected} still to come"
        return RUNNING, phase
    if first.phase in (SAVING, EVALUATING):
        return (STALLED if in_phase_s > LONG_PHASE_S else RUNNING), phase
    without_s = min(in_phase_s, in_phase_s if since_step_s is None else since_step_s)
    usual_s = median(record.step_time_s for record in records) if records else LONG_PHASE_S
    if without_s > max(STALL_STEPS * usual_s, STALL_S):
        usually = f" (usually {usual_s:.3g} s)" if records else ""
        return STALLED, f"no step for {without_s:.0f} s{usually}"
    return RUNNING, ""


def newest_sound(run: Path, now: float) -> SavedStep | None:
    """The newest checkpoint whose files have the sizes that its manifest states."""
    passed_over = []
    for folder in newest_first(run / CHECKPOINTS):
        try:
            manifest = read_manifest(folder.path)
            problems = find_damage(folder.path, manifest.files.items(), deep=False)
            age_s = max(0.0, now - folder.path.stat().st_mtime)
        except (CheckpointError, OSError, ValueError, TypeError, AttributeError) as error:
            problems = [str(error)]
        if not problems:
            return SavedStep(folder.step, str(folder.path), age_s, tuple(passed_over))
        passed_over.append(f"{folder.path.name}: {problems[0]}")
    return None


def _recent(path: Path) -> list[StepRecord]:
    """The last records, as far as they can be read while one is being written."""
    records = _or_none(lambda: last_records(path, RECENT)) or []
    return records if all(map(_is_sound, records)) else []


def _is_sound(record: StepRecord) -> bool:
    """Whether it has numbers where a step has them."""
    times = record.step_time_s, record.tokens_per_s
    are_numbers = all(isinstance(value, int | float) for value in (*times, record.loss))
    return isinstance(record.step, int) and are_numbers and all(map(math.isfinite, times))


def _config(run: Path) -> Config | None:
    path = run / "config.toml"  # may be of another version
    return _or_none(lambda: load(str(path)) if path.is_file() else None)


T = TypeVar("T")


def _or_none(read: Callable[[], T]) -> T | None:
    """What can be read; None where anything else lies, for a run's folder may hold whatever."""
    try:
        return read()
    except Exception:
        return None


def _verdict(run: Path, start: str | None) -> str:
    """What the ranks of `start` that gave up waiting have said; "" if none has."""
    if start is None:
        return ""
    line = _or_none(lambda: json.loads(verdict_file(run, start).read_bytes())["line"])
    return line if isinstance(line, str) else ""


def is_run(path: Path) -> bool:
    """Whether a folder looks like a run's."""
    names = ("config.toml", "metrics.jsonl", "ranks", CHECKPOINTS)
    return path.is_dir() and any(os.path.exists(path / name) for name in names)
