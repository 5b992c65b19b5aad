"""Beats: what each rank writes of itself every few seconds, and how its run ended.

    RUN/ranks/
      rank-00003.json          the last beat of rank 3; a file is replaced whole, while it can be
      starting/rank-00003.json the same of a start that hasn't the run's folder yet, and may never:
                               it speaks in no run's name
      verdict-1f3a9c2e.json    why the ranks of that start of the run gave up waiting for each other

A rank that is stopped, dead, or holds the interpreter's lock writes none, so the age of its last is
a finding too. Times are seconds since the epoch by the clock of the rank's host. Imports no torch.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from megagrid.errors import MegagridError, PeerError
from megagrid.exit_codes import CRASHED, INTERRUPTED, PEER_LOST, STOPPED, UNAVAILABLE, USER_MISTAKE
from megagrid.grid.bootstrap import Job
from megagrid.grid.placement import Coordinate

FOLDER = "ranks"
STARTING_FOLDER = "starting"
"""In a run's folder, and in that one."""

STALE_BEATS = 5
"""Intervals without a beat after which a rank counts as silent."""

MOST_RANKS, ETERNITY_S = 1 << 24, 1e12
"""What is more is no beat's."""

BLOCK_BYTES = 512
"""Of `st_blocks`."""

STARTING, JOINING, LOADING = "starting", "joining", "loading"
TRAINING, SAVING, EVALUATING, ENDING = "training", "saving", "evaluating", "ending"
SETUP = (STARTING, JOINING, LOADING)
"""Phases of a rank; those before its first step."""

COMPUTING, WAITING, DEVICE = "computing", "waiting", "waiting for its device"
"""What a rank may be doing: at work in a function, in a collective, or until its accelerator has
done what it was given, messages among it."""

DONE, STOPPED_AND_SAVED, MISTAKEN = "done", "stopped", "mistake"
CRASH, LEFT_ALONE, INTERRUPT = "crash", "left alone", "interrupted"
"""How a rank may end."""

HOW = {
    0: DONE,
    STOPPED: STOPPED_AND_SAVED,
    USER_MISTAKE: MISTAKEN,
    UNAVAILABLE: CRASH,
    CRASHED: CRASH,
    PEER_LOST: LEFT_ALONE,
    INTERRUPTED: INTERRUPT,
}
"""By exit code."""


@dataclass(frozen=True)
class Doing:
    """What a rank is doing.

    Attributes:
        kind: COMPUTING, WAITING or DEVICE.
        what: the collective; else the function.
        where: file and line.
        since: when it was first seen there.
        axis: along which it communicates.
        peers: the other ranks of that; of a message, the one at its other end.
    """

    kind: str
    what: str
    where: str = ""
    since: float = 0.0
    axis: str | None = None
    peers: tuple[int, ...] = ()

    def __str__(self) -> str:
        return self.briefly + (f" with {name_ranks(self.peers)}" if self.peers else "")

    @property
    def briefly(self) -> str:
        """The same without the peers."""
        if self.kind == COMPUTING:
            return f"is in {self.what}" + (f" ({self.where})" if self.where else "")
        if self.kind == DEVICE:
            return f"waits for its device in {self.what} ({self.where})"
        return f"waits in {self.what}" + (f" along {self.axis}" if self.axis else "")


def name_ranks(ranks: Iterable[int]) -> str:
    """ "rank 3", or "ranks 0-3,6"."""
    spans: list[list[int]] = []
    for rank in sorted(ranks):
        if spans and rank == spans[-1][1] + 1:
            spans[-1][1] = rank
        else:
            spans.append([rank, rank])
    text = ",".join(f"{a}" if a == b else f"{a}-{b}" for a, b in spans)
    return f"rank{'s' if len(spans) > 1 or spans[0][0] != spans[0][1] else ''} {text}"


@dataclass(frozen=True)
class End:
    """How a rank has ended.

    Attributes:
        how: DONE, STOPPED_AND_SAVED, MISTAKEN, CRASH, LEFT_ALONE or INTERRUPT.
        code: its exit code.
        line: of the error, if one has ended it.
    """

    how: str
    code: int
    time: float
    line: str = ""


@dataclass(frozen=True, kw_only=True)
class Beat:
    """One rank at one moment.

    Attributes:
        coordinate: its place in the grid.
        host, pid, device: where it runs.
        started: when its process began to beat.
        time: of the beat.
        interval_s: until the next.
        step: steps of the run behind it.
        phase: what part of the run it is in, and `phase_since`, since when.
        doing: what it is doing in there.
        step_s: mean of its last steps.
        compute_s: of those, what it wasn't waiting for others; None where nothing is known.
        start: names the start of the run that it is of, once the ranks have met; see `Meeting`.
        has_folder: whether that start has the run's folder, and is the run by that.
        end: how it has ended.
    """

    rank: int
    world_size: int
    coordinate: Coordinate
    host: str
    pid: int
    device: str
    started: float
    time: float
    interval_s: float
    step: int
    phase: str
    phase_since: float
    doing: Doing
    step_s: float | None = None
    compute_s: float | None = None
    job: Job = field(default_factory=Job)
    start: str | None = None
    has_folder: bool = True
    end: End | None = None

    @property
    def who(self) -> str:
        """The rank, as errors name it."""
        return f"rank {self.rank} ({self.coordinate}, {self.host})"

    def is_silent(self, now: float) -> bool:
        """Whether a beat is long overdue, and no word of an end."""
        return self.end is None and now - self.time > STALE_BEATS * self.interval_s

    def to_json(self) -> str:
        """One object, indented."""
        return json.dumps({**asdict(self), "coordinate": self.coordinate._asdict()}, indent=1)

    @classmethod
    def from_json(cls, text: str | bytes) -> Beat:
        """
        Raises:
            ValueError, TypeError, KeyError: the text isn't a beat.
        """
        try:
            values: dict[str, Any] = json.loads(text)
        except RecursionError as error:
            raise ValueError("too deep for a beat") from error
        doing, end = values["doing"], values.get("end")
        parsed = {
            "coordinate": Coordinate(**values["coordinate"]),
            "doing": Doing(**{**doing, "peers": tuple(doing["peers"])}),
            "job": Job(**values["job"]),
            "end": None if end is None else End(**end),
        }
        beat = cls(**{**values, **parsed})
        beat._check()
        return beat

    def _check(self) -> None:
        """
        Raises:
            ValueError: it isn't of the types that a beat has, or is of no rank.
        """
        end = self.end or End(DONE, 0, self.time)
        texts = (self.host, self.phase, self.doing.kind, self.doing.what, end.how, end.line)
        counts = (self.rank, self.world_size, self.pid, self.step, self.job.restarts)
        times = (self.started, self.time, self.interval_s, self.phase_since, end.time)
        times += (self.doing.since, *(t for t in (self.step_s, self.compute_s) if t is not None))
        if not (
            all(isinstance(text, str) for text in texts)
            and all(isinstance(count, int) for count in (*counts, *self.coordinate))
            and all(isinstance(time, int | float) and abs(time) < ETERNITY_S for time in times)
            and all(isinstance(name, str | None) for name in (self.start, self.job.id))
            and 0 <= self.rank < self.world_size <= MOST_RANKS
        ):
            raise ValueError("not a beat")


def beat_file(run: Path, rank: int, *, has_folder: bool = True) -> Path:
    """Where a rank's beats lie."""
    folder = run / FOLDER if has_folder else run / FOLDER / STARTING_FOLDER
    return folder / f"rank-{rank:05d}.json"


def read_beat(path: Path) -> Beat | None:
    """The beat in a file; None if there is none."""
    try:
        return Beat.from_json(path.read_bytes())
    except (OSError, ValueError, TypeError, KeyError):
        return None


def read_beats(run: Path) -> dict[int, Beat]:
    """The last beat of each rank of the run that has left one."""
    return _read(run / FOLDER)


def read_starting(run: Path) -> dict[int, Beat]:
    """The same of a start that hasn't, or hadn't, the run's folder."""
    return _read(run / FOLDER / STARTING_FOLDER)


def read_known(run: Path, start: str | None, rank: int | None = None) -> dict[int, Beat]:
    """What a rank of `start` sees of the others: all, or of one. Before ranks have met they share
    no name, but no other start's ranks begin as they do, and none of theirs has the folder."""
    starting = _read(run / FOLDER / STARTING_FOLDER, rank)
    if start is None:
        return starting
    known = _read(run / FOLDER, rank)
    for beat in starting.values():
        if beat.start == start and (beat.rank not in known or known[beat.rank].time <= beat.time):
            known[beat.rank] = beat
    return known


def _read(folder: Path, rank: int | None = None) -> dict[int, Beat]:
    files = folder.glob(f"rank-{'*' if rank is None else f'{rank:05d}'}.json")
    beats = (read_beat(path) for path in sorted(files))
    return {beat.rank: beat for beat in beats if beat is not None}


def write_beat(run: Path, beat: Beat) -> None:
    """Write one in place of the rank's last; a disk that is full or away is no reason to fail."""
    path = beat_file(run, beat.rank, has_folder=beat.has_folder)
    text = beat.to_json()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, text)
    except OSError:
        with contextlib.suppress(OSError):
            _write_over(path, text)


def _write_over(path: Path, text: str) -> None:
    """Write into a file, in the room that it has on its disk: where the disk is full, or the folder
    takes no new files, the rank would seem dead. Whoever reads meanwhile may find no beat.

    Raises:
        OSError: there is no such file, or no room in it.
    """
    data = text.encode()
    with path.open("r+b", buffering=0) as file:
        there = os.fstat(file.fileno())
        if len(data) > max(there.st_size, there.st_blocks * BLOCK_BYTES):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        file.write(data.ljust(there.st_size))  # JSON may end in blanks


def is_alive(pid: int) -> bool:
    """Whether this host has the process."""
    try:
        os.kill(pid, 0)
    except (ProcessLookupError, OverflowError):
        return False
    except PermissionError:
        return True
    return True


def write_whole(path: Path, text: str) -> None:
    """Replace a file. Nothing is synced: what a crash of the machine loses is a moment's word.

    Raises:
        OSError: it can't be written.
    """
    partial = path.with_name(f"{path.name}.{os.getpid()}.partial")
    try:
        partial.write_text(text, encoding="utf-8")
        partial.replace(path)
    except OSError:
        with contextlib.suppress(OSError):
            partial.unlink(missing_ok=True)
        raise


def forget(run: Path, world_size: int) -> None:
    """Remove the beats of ranks that a former start of the run had, and this one hasn't; verdicts
    stay, for each names its start. For who has the folder to itself."""
    for path in (run / FOLDER).glob("rank-*.json"):
        number = path.stem.partition("-")[2]
        if number.isdecimal() and int(number) >= world_size:
            with contextlib.suppress(OSError):
                path.unlink()


def end_of(code: int | BaseException, now: float) -> End:
    """How a rank has ended: with an exit code, or by an exception."""
    if isinstance(code, int):
        return End(HOW.get(code, CRASH), code, now)
    if isinstance(code, KeyboardInterrupt):
        return End(INTERRUPT, INTERRUPTED, now)
    if isinstance(code, MegagridError):
        return End(HOW[code.exit_code], code.exit_code, now, " ".join(str(code).splitlines()))
    if isinstance(code, PeerError):
        return End(LEFT_ALONE, PEER_LOST, now, str(code))
    (first, *_) = str(code).splitlines() or [""]
    return End(CRASH, CRASHED, now, f"{type(code).__name__}: {first}"[:500])
