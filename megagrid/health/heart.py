"""The thread that writes a rank's beats, and looks after what they tell.

    phase, step   set by the run, as attributes of a `Pulse`
    stacks        looked at ten times a second: what the rank is doing, and how much of its time
                  goes by in waiting for others
    the watch     asked every second whether the ranks give up
    a beat        written every few seconds

Imports no torch, so that a rank beats while it imports it.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from megagrid.grid.bootstrap import Job
from megagrid.grid.placement import Coordinate
from megagrid.health.beat import (
    COMPUTING,
    STARTING,
    Beat,
    Doing,
    End,
    beat_file,
    end_of,
    is_alive,
    read_beat,
    write_beat,
)

SAMPLE_SECONDS = 0.1
"""Between looks at the stacks; a look takes some 20 microseconds."""

WATCH_SECONDS = 1.0
"""Between looks at whether it is time to give up, however rare beats are."""


class Pulse:
    """What a run says of itself, where the heart can see it.

    Attributes:
        step: steps behind it.
        device: that it computes on.
        owns_folder: whether the run's folder is known to be no other run's.
        is_under_way: whether this process has made a step.
        compute_s: seconds of the last step on an accelerator, where stacks don't show it.
    """

    def __init__(self) -> None:
        self.step = 0
        self.device = ""
        self.owns_folder = False
        self.is_under_way = False
        self.compute_s: float | None = None
        self._phase = (STARTING, time.time())

    @property
    def phase(self) -> tuple[str, float]:
        """What part of the run it is in, and since when."""
        return self._phase

    def enter(self, phase: str) -> None:
        """Go on to the next part of the run."""
        self._phase = (phase, time.time())

    @contextmanager
    def within(self, phase: str) -> Iterator[None]:
        """Call the block `phase`, and what follows what it was called before."""
        before, _ = self._phase
        self.enter(phase)
        try:
            yield
        finally:
            self.enter(before)

    def made(self, step: int) -> None:
        """Take note of a step that has been made or skipped."""
        self.step = step
        self.is_under_way = True


class Looks(Protocol):
    """See `megagrid.health.stacks.StackSampler`."""

    def sample(self) -> None: ...

    def busy(self) -> float | None: ...

    def doing(self, settled_s: float) -> Doing: ...


class Watches(Protocol):
    """See `megagrid.health.watch.Watch`."""

    def has_told(self, start: str | None) -> bool: ...

    def look(self, heart: Heart, beat: Beat) -> None: ...


class LooksOut(Protocol):
    """See `megagrid.health.stragglers.Lookout`."""

    def look(self, beat: Beat) -> None: ...


@dataclass(frozen=True)
class Identity:
    """What doesn't change of a rank once the ranks have met; until then it has no `start`."""

    rank: int
    world_size: int
    coordinate: Coordinate
    host: str
    job: Job
    start: str | None = None


class Heart:
    """Beats for one rank, until `end`.

    Args:
        run: the run's folder.
        interval_s: between beats.
        pulse: of the run.
        watch: looks at how the rank is, in the heart's thread; `lookout` at each beat.
    """

    def __init__(
        self,
        run: Path,
        identity: Identity,
        interval_s: float,
        pulse: Pulse,
        watch: Watches | None = None,
        lookout: LooksOut | None = None,
    ) -> None:
        self.pulse = pulse
        self._run = run
        self._identity = identity
        self._interval_s = interval_s
        self._watch, self._lookout = watch, lookout
        self._looks: Looks | None = None
        self._started = time.time()
        self._work = _Work()
        self._stop = threading.Event()
        self._writing = threading.Lock()
        self._is_settled = False
        self._end: End | None = None
        self._thread = threading.Thread(target=self._live, name="heart", daemon=True)

    @property
    def is_told(self) -> bool:
        """Whether a rank has said why the ranks give up."""
        return self._watch is not None and self._watch.has_told(self._identity.start)

    def identify(self, identity: Identity) -> None:
        """Beat so from now on: once ranks have met, they have a start and maybe other numbers."""
        self._identity = identity

    def start(self) -> None:
        """Begin to beat."""
        self._thread.start()

    def look_with(self, looks: Looks) -> None:
        """From now on say what the rank is doing, not only in which phase it is."""
        self._looks = looks

    def beat(self) -> Beat:
        """How the rank is now."""
        phase, since = self.pulse.phase
        doing = Doing(COMPUTING, phase, since=since)
        if self._looks is not None and self._end is None:
            # Stacks change while they are looked at, and hold what isn't megagrid's to know. What
            # can't be told of them must not cost the beats.
            with contextlib.suppress(Exception):
                doing = self._looks.doing(self._interval_s)
        one = self._identity
        return Beat(
            rank=one.rank,
            world_size=one.world_size,
            coordinate=one.coordinate,
            host=one.host,
            pid=os.getpid(),
            device=self.pulse.device,
            started=self._started,
            time=time.time(),
            interval_s=self._interval_s,
            step=self.pulse.step,
            phase=phase,
            phase_since=since,
            doing=doing,
            step_s=self._work.step_s,
            compute_s=self._work.compute_s,
            job=one.job,
            start=one.start,
            has_folder=self.pulse.owns_folder,
            end=self._end,
        )

    def speak(self) -> Beat:
        """Write a beat out of turn."""
        beat = self.beat()
        self._write(beat)
        return beat

    def end(self, how: int | BaseException | End) -> None:
        """Write the last beat, which says how the rank has ended; the first word counts."""
        if self._end is None:
            self._end = how if isinstance(how, End) else end_of(how, time.time())
            self._stop.set()
            self._write(self.beat())

    @contextmanager
    def beating(self) -> Iterator[None]:
        """Beat while the block runs; an exception that leaves it is the rank's end."""
        self.start()
        try:
            yield
        except BaseException as error:
            self.end(error)
            raise
        finally:
            self._stop.set()

    def _live(self) -> None:
        beat_at = watch_at = time.monotonic()
        while not self._stop.is_set():
            now = time.monotonic()
            if self._looks is not None:
                with contextlib.suppress(Exception):
                    self._looks.sample()
            if now >= beat_at:
                beat_at = now + self._interval_s
                self._work.note(self.pulse, self._looks)
                beat = self.speak()
                if self._lookout is not None:
                    self._lookout.look(beat)
            if self._watch is not None and now >= watch_at:
                watch_at = now + min(WATCH_SECONDS, self._interval_s)
                self._watch.look(self, self.beat())
            self._stop.wait(SAMPLE_SECONDS)

    def _write(self, beat: Beat) -> None:
        with self._writing:
            if beat.end is None and self._end is not None:
                return  # a beat that was begun before the last one
            starting = beat_file(self._run, beat.rank, has_folder=False)
            if beat.has_folder or self._may_write(starting):
                write_beat(self._run, beat)
            if beat.has_folder and not self._is_settled:
                self._is_settled = True
                with contextlib.suppress(OSError):
                    starting.unlink(missing_ok=True)

    def _may_write(self, path: Path) -> bool:
        """Whether to write before the run's folder is locked: not over the beats of another start
        that is at it, and not where nobody waits for this rank, which needn't make a folder that it
        may be refused."""
        found = read_beat(path)
        if found is None or found.end is not None:
            return self._identity.world_size > 1
        if found.host == self._identity.host:
            return found.pid == os.getpid() or not is_alive(found.pid)
        return found.is_silent(time.time())


class _Work:
    """How long steps take, and how much of that isn't waiting.

    Attributes:
        step_s, compute_s: of the steps between the last beats that had some; None before.
    """

    def __init__(self) -> None:
        self.step_s: float | None = None
        self.compute_s: float | None = None
        self._step = 0
        self._time: float | None = None

    def note(self, pulse: Pulse, looks: Looks | None) -> None:
        """Look at what has been done since the last step that was seen."""
        now, step = time.monotonic(), pulse.step
        if not pulse.is_under_way or looks is None:
            return
        if self._time is None or step < self._step:
            looks.busy()
            self._step, self._time = step, now
        elif step > self._step:
            busy = looks.busy()
            self.step_s = (now - self._time) / (step - self._step)
            if pulse.compute_s is not None:
                self.compute_s = pulse.compute_s
            elif busy is not None:
                self.compute_s = busy * self.step_s
            self._step, self._time = step, now
