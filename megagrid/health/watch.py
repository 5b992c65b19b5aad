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
from megagrid.health.heart import Heart
from megagrid.health.verdict import judge, verdict_file

GRACE_S = 5.0
"""From a verdict on, until a rank that hasn't ended by itself ends."""

BEATS_BETWEEN = 3
"""Intervals between the two readings of all beats."""


class Watch:
    """Looks at each beat of a rank.

    Args:
        run: the run's folder.
        timeout_s, setup_timeout_s: see `TrainConfig`.
        tell: where the verdict goes, line by line.
        leave: ends the process.
    """

    def __init__(
        self,
        run: Path,
        timeout_s: float,
        setup_timeout_s: float,
        *,
        tell: Callable[[Sequence[str]], None] | None = None,
        leave: Callable[[int], object] = os._exit,
    ) -> None:
        self._run = run
        self._timeout_s = timeout_s
        self._setup_timeout_s = max(timeout_s, setup_timeout_s)
        self._tell = tell or _tell_on_stderr
        self._leave = leave
        self._old = self._mark()
        self._told_at: float | None = None
        self._next_rank: tuple[float, float] | None = None

    @property
    def is_told(self) -> bool:
        """Whether any rank of this start of the run has a verdict, or is about to."""
        mark = self._mark()
        return mark is not None and mark != self._old

    def look(self, heart: Heart, beat: Beat) -> None:
        """End this rank, if it is time."""
        if beat.world_size == 1:
            return
        if self.is_told:
            self._follow(heart)
        elif limit := self._broken_limit(heart, beat):
            self._give_up(heart, limit)

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
        if found is None or found.end is not None:
            return found is not None
        now = time.monotonic()
        if self._next_rank is None or self._next_rank[0] != found.time:
            self._next_rank = (found.time, now)
        return now - self._next_rank[1] > STALE_BEATS * beat.interval_s

    def _give_up(self, heart: Heart, limit: str) -> None:
        if not self._claim():
            return
        first = heart.beat()
        before = read_beats(self._run)
        time.sleep(BEATS_BETWEEN * first.interval_s)
        mine = heart.beat()
        if (mine.doing.kind, mine.doing.since) != (first.doing.kind, first.doing.since):
            self._withdraw()  # it has come through after all
            return
        verdict = judge(
            mine,
            before,
            read_beats(self._run),
            time.time(),
            limit=limit,
            patience_s=min(self._timeout_s / 2, STALE_BEATS * mine.interval_s),
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
        if self._told_at is None:
            self._told_at = now
        if now - self._told_at >= GRACE_S:
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
