"""Ends ranks that have waited for each other too long, and says why: in one place, for every
backend alike.

gloo would raise in each rank, NCCL abort each process, and both know of no rank but their own. So
their own time-outs are set a little longer, for what Python can't see, and the heart's thread
watches the clock:

    rank 0's heart                              the others'
    --------------                              -----------
    has waited longer than train.timeout_seconds
    claims RUN/ranks/verdict.json               find it claimed: somebody will tell
    reads all beats, and once more
    tells the verdict, ends with PEER_LOST      end too, be they hung in whatever

Before the first step ranks do different things, such as an index that the first rank builds, so
there `train.setup_timeout_seconds` counts; but a rank that has fallen silent isn't waited for: each
looks after the next one. Imports no torch.
"""

from __future__ import annotations

import contextlib
import os
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from megagrid.exit_codes import PEER_LOST
from megagrid.health.beat import (
    COMPUTING,
    LEFT_ALONE,
    STALE_BEATS,
    Beat,
    End,
    beat_file,
    read_beat,
    read_beats,
    write_whole,
)
from megagrid.health.heart import SAMPLE_SECONDS, Heart
from megagrid.health.verdict import judge, verdict_file

GRACE_S = 5.0
"""From a verdict on, until a rank that hasn't ended by itself ends."""

CLAIM_S = 40.0
"""From a claim on, until the other ranks end without a verdict: who was to tell is gone."""

BEATS_BETWEEN, SECONDS_BETWEEN = 3, 5.0
"""Intervals, and seconds at least, between the two readings of all beats: on a busy host a thread
may have to wait for its turn."""


class Watch:
    """Looks at each beat of a rank.

    Args:
        run: the run's folder.
        timeout_s, setup_timeout_s: see `TrainConfig`.
        tell: where the verdict goes, line by line.
        leave: ends the process.
        pause_s: see `SECONDS_BETWEEN`.
    """

    def __init__(
        self,
        run: Path,
        timeout_s: float,
        setup_timeout_s: float,
        *,
        tell: Callable[[Sequence[str]], None] | None = None,
        leave: Callable[[int], object] = os._exit,
        pause_s: float = SECONDS_BETWEEN,
    ) -> None:
        self._run = run
        self._timeout_s = timeout_s
        self._setup_timeout_s = max(timeout_s, setup_timeout_s)
        self._tell = tell or _tell_on_stderr
        self._leave = leave
        self._pause_s = pause_s
        self._old = self._mark()
        self._claimed_at: float | None = None
        self._told_at: float | None = None
        self._next_rank: tuple[float, float] | None = None

    @property
    def is_told(self) -> bool:
        """Whether any rank of this start of the run has told a verdict."""
        try:
            return self._is_claimed and verdict_file(self._run).stat().st_size > 0
        except OSError:  # withdrawn
            return False

    @property
    def _is_claimed(self) -> bool:
        """Whether any has told one, or is about to."""
        mark = self._mark()
        return mark is not None and mark != self._old

    def look(self, heart: Heart, beat: Beat) -> None:
        """End this rank, if it is time."""
        if beat.world_size == 1:
            return
        if self._is_claimed:
            self._follow(heart)
            return
        self._claimed_at = None
        if limit := self._broken_limit(heart, beat):
            self._give_up(heart, beat, limit)

    def _broken_limit(self, heart: Heart, beat: Beat) -> str | None:
        """The key that says that the rank has waited too long; None: it hasn't."""
        waited = 0.0 if beat.doing.kind == COMPUTING else beat.time - beat.doing.since
        if waited < self._timeout_s:
            self._next_rank = None
            return None
        timeout = f"train.timeout_seconds={self._timeout_s:g}"
        if heart.pulse.is_under_way or self._next_is_silent(beat):
            return timeout
        if waited < self._setup_timeout_s:
            return None
        return f"train.setup_timeout_seconds={self._setup_timeout_s:g}"

    def _next_is_silent(self, beat: Beat) -> bool:
        """Whether the next rank has written nothing while this one could have seen it. By this
        rank's clock alone: those of hosts may differ."""
        found = read_beat(beat_file(self._run, (beat.rank + 1) % beat.world_size))
        if found is None or found.end is not None or found.time < beat.started:
            return False  # gone, which its peers are told, or of a former start and yet to begin
        now = time.monotonic()
        if self._next_rank is None or self._next_rank[0] != found.time:
            self._next_rank = (found.time, now)
        return now - self._next_rank[1] > STALE_BEATS * beat.interval_s

    def _give_up(self, heart: Heart, beat: Beat, limit: str) -> None:
        if not self._claim():
            return
        before = read_beats(self._run)
        between_s = max(BEATS_BETWEEN * beat.interval_s, self._pause_s)
        until = time.monotonic() + between_s
        mine = beat
        while time.monotonic() < until:
            time.sleep(SAMPLE_SECONDS)
            mine = heart.beat()
            if (mine.step, mine.doing.since) != (beat.step, beat.doing.since):
                self._withdraw()  # it has come through after all
                return
        verdict = judge(
            mine,
            before,
            read_beats(self._run),
            time.time(),
            limit=limit,
            patience_s=min(self._timeout_s / 2, STALE_BEATS * mine.interval_s) + between_s / 2,
        )
        path = verdict_file(self._run)
        with contextlib.suppress(OSError):
            write_whole(path, verdict.to_json())
        self._tell([verdict.line, *verdict.table(), f"  {path} has what each rank was doing"])
        heart.end(End(LEFT_ALONE, PEER_LOST, time.time(), verdict.line))
        self._leave(PEER_LOST)

    def _follow(self, heart: Heart) -> None:
        """End after the one that has told, at the latest."""
        now = time.monotonic()
        self._claimed_at = self._claimed_at or now
        if self._told_at is None and self.is_told:
            self._told_at = now
        is_over = self._told_at is not None and now - self._told_at >= GRACE_S
        if is_over or now - self._claimed_at >= CLAIM_S:
            line = f"another rank gave up waiting; {verdict_file(self._run)} says for whom"
            heart.end(End(LEFT_ALONE, PEER_LOST, time.time(), line))
            self._leave(PEER_LOST)

    def _claim(self) -> bool:
        """Whether it is this rank that tells. Where nothing can be written each tells."""
        path = verdict_file(self._run)
        try:
            if self._mark() == self._old:
                path.unlink(missing_ok=True)
            path.open("x").close()
        except FileExistsError:
            return False
        except OSError:
            pass
        return True

    def _withdraw(self) -> None:
        with contextlib.suppress(OSError):
            verdict_file(self._run).unlink()

    def _mark(self) -> tuple[int, int] | None:
        """What tells a verdict from another, without reading it."""
        try:
            found = verdict_file(self._run).stat()
        except OSError:
            return None
        return found.st_mtime_ns, found.st_ino


def _tell_on_stderr(lines: Sequence[str]) -> None:
    print("\n".join(lines), file=sys.stderr, flush=True)
