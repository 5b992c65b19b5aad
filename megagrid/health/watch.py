"""Ends ranks that have waited for each other too long, and says why: in one place, for every
backend alike.

gloo would raise in each rank, NCCL abort each process, and both know of no rank but their own. So
their own time-outs are set a little longer, for what Python can't see, and the heart's thread
watches the clock:

    one rank's heart                            the others'
    ----------------                            -----------
    has waited longer than train.timeout_seconds
    claims RUN/ranks/verdict-START.json         find it claimed: somebody will tell
    reads all beats, and once more              write one every second
    tells the verdict, ends with PEER_LOST      end too, be they hung in whatever

START is what the ranks have agreed on as they met. A rank of another start, such as one whose node
stood still while the run went on without it, has a file of its own: it ends nobody here. Before
they have met, ranks share no name that is theirs alone. Then nothing is claimed and nobody follows:
the rank before the silent one tells, and the launcher ends the others after it.

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
    read_known,
    write_whole,
)
from megagrid.health.heart import WATCH_SECONDS, Heart
from megagrid.health.verdict import Finding, Verdict, judge, verdict_file

GRACE_S = 5.0
"""From a verdict on, until a rank that hasn't ended by itself ends."""

CLAIM_S = 40.0
"""From a claim on, until the other ranks end without a verdict: who was to tell is gone."""

BEATS_BETWEEN, SECONDS_BETWEEN, MOST_BETWEEN = 3, 5.0, 15.0
"""Intervals, and seconds at least and at most, between the two readings of all beats: on a busy
host a thread may have to wait for its turn, and the others wait no longer than CLAIM_S."""


class Watch:
    """Looks at how a rank is.

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
        self._claimed_at: float | None = None
        self._told_at: float | None = None
        self._next_rank: tuple[float, float] | None = None

    def has_told(self, start: str | None) -> bool:
        """Whether any rank of this start of the run has told a verdict."""
        try:
            return start is not None and verdict_file(self._run, start).stat().st_size > 0
        except OSError:  # not claimed, or withdrawn
            return False

    def look(self, heart: Heart, beat: Beat) -> None:
        """End this rank, if it is time."""
        if beat.world_size == 1:
            return
        if beat.start is not None and os.path.exists(verdict_file(self._run, beat.start)):
            self._follow(heart, beat.start)
            return
        self._claimed_at = None
        if limit := self._broken_limit(heart, beat):
            self._give_up(heart, beat, limit)

    def _broken_limit(self, heart: Heart, beat: Beat) -> str | None:
        """The key that says that the rank has waited too long; None: it hasn't."""
        waited = 0.0 if beat.doing.kind == COMPUTING else beat.time - beat.doing.since
        if waited < self._timeout_s / 2:
            self._next_rank = None
            return None
        is_silent = not heart.pulse.is_under_way and self._next_is_silent(beat)
        if waited >= self._timeout_s and (heart.pulse.is_under_way or is_silent):
            return f"train.timeout_seconds={self._timeout_s:g}"
        # A meeting has that limit itself, and knows better who hasn't come.
        if beat.start is not None and waited >= self._setup_timeout_s:
            return f"train.setup_timeout_seconds={self._setup_timeout_s:g}"
        return None

    def _next_is_silent(self, beat: Beat) -> bool:
        """Whether the next rank has written nothing while this one could have seen it. By this
        rank's clock alone: those of hosts may differ."""
        rank = (beat.rank + 1) % beat.world_size
        found = read_known(self._run, beat.start, rank).get(rank)
        if found is None or found.end is not None or found.time < beat.started:
            return False  # gone, which its peers are told, or of a former start and yet to begin
        now = time.monotonic()
        if self._next_rank is None or self._next_rank[0] != found.time:
            self._next_rank = (found.time, now)
        return now - self._next_rank[1] > STALE_BEATS * beat.interval_s

    def _give_up(self, heart: Heart, beat: Beat, limit: str) -> None:
        if beat.start is not None and not self._claim(beat.start):
            return
        before = read_known(self._run, beat.start)
        between_s = min(max(BEATS_BETWEEN * beat.interval_s, self._pause_s), MOST_BETWEEN)
        until = time.monotonic() + between_s
        mine = beat
        while time.monotonic() < until:
            time.sleep(min(WATCH_SECONDS, beat.interval_s))
            mine = heart.speak()
            if (mine.step, mine.doing.since) != (beat.step, beat.doing.since):
                self._withdraw(beat.start)  # it has come through after all
                return
        verdict = judge(
            mine,
            before,
            read_known(self._run, beat.start),
            time.time(),
            limit=limit,
            patience_s=min(self._timeout_s / 2, STALE_BEATS * mine.interval_s) + between_s / 2,
        )
        if beat.start is not None or mine.rank == _before_the_silent(verdict.findings):
            self._tell_and_leave(heart, beat.start, verdict)

    def _tell_and_leave(self, heart: Heart, start: str | None, verdict: Verdict) -> None:
        lines = [verdict.line, *verdict.table()]
        if start is not None:
            path = verdict_file(self._run, start)
            with contextlib.suppress(OSError):
                write_whole(path, verdict.to_json())
            lines.append(f"  {path} has what each rank was doing")
        self._tell(lines)
        heart.end(End(LEFT_ALONE, PEER_LOST, time.time(), verdict.line))
        self._leave(PEER_LOST)

    def _follow(self, heart: Heart, start: str) -> None:
        """End after the one that has told, at the latest."""
        heart.speak()  # who reads all beats twice needs new ones, however rare they are
        now = time.monotonic()
        self._claimed_at = self._claimed_at or now
        if self._told_at is None and self.has_told(start):
            self._told_at = now
        is_over = self._told_at is not None and now - self._told_at >= GRACE_S
        if is_over or now - self._claimed_at >= CLAIM_S:
            line = f"another rank gave up waiting; {verdict_file(self._run, start)} says for whom"
            heart.end(End(LEFT_ALONE, PEER_LOST, time.time(), line))
            self._leave(PEER_LOST)

    def _claim(self, start: str) -> bool:
        """Whether it is this rank that tells. Where nothing can be written each tells."""
        try:
            verdict_file(self._run, start).open("x").close()
        except FileExistsError:
            return False
        except OSError:
            pass
        return True

    def _withdraw(self, start: str | None) -> None:
        if start is not None:
            with contextlib.suppress(OSError):
                verdict_file(self._run, start).unlink()


def _before_the_silent(findings: Sequence[Finding]) -> int | None:
    """The rank that tells of the silent ones before there can be a claim: the first of those whose
    next is silent, and that aren't themselves."""
    silent = {found.rank for found in findings if found.is_silent}
    return min({(rank - 1) % len(findings) for rank in silent} - silent, default=None)


def _tell_on_stderr(lines: Sequence[str]) -> None:
    print("\n".join(lines), file=sys.stderr, flush=True)
