"""The ranks of one node, as their launcher sees them: processes. No torch.

A rank that ends well needs no look. When one ends otherwise, or the launcher is told that one has
elsewhere, the others get a while to end by themselves and are killed after it, stopped ones too.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

from megagrid.exit_codes import CRASHED, INTERRUPTED, PEER_LOST, STOPPED, UNAVAILABLE, USER_MISTAKE
from megagrid.grid import bootstrap
from megagrid.health.beat import CRASH, Beat, End
from megagrid.launcher.rounds import STOOD_STILL, Failure

LOOK_SECONDS = 0.1
"""Between looks at the ranks."""

LOOKS_AT_STATES = 10
"""Looks between those at whether a rank stands still."""


class Process(Protocol):
    """What is used of a subprocess."""

    pid: int

    def poll(self) -> int | None: ...


class RankWatch:
    """Looks after the ranks that a launcher has started for a round.

    Args:
        processes: by global rank; each leads a process group.
        error_files: where each of them records why it ends.
        beats: the last one of each rank of the run: by its process, a rank's own is found, whatever
            number it goes by since the ranks have met.
        leave: takes the last beat of a rank that couldn't say itself how it ended.
        who: of a rank that hasn't beaten yet: number, coordinate, host.
        patience: seconds that a rank may stand still, stopped by a signal.
        clock: seconds that don't go back.

    Attributes:
        failures: of ranks that have ended by themselves, but not well; in order.
    """

    def __init__(
        self,
        processes: Mapping[int, Process],
        error_files: Mapping[int, str],
        beats: Callable[[], Iterable[Beat]],
        leave: Callable[[Beat], None],
        who: Callable[[int], str],
        patience: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.failures: list[Failure] = []
        self._processes = dict(processes)
        self._error_files = error_files
        self._beats = beats
        self._leave = leave
        self._who = who
        self._patience = patience
        self._clock = clock
        self._host = bootstrap.host_name()
        self._kills = bootstrap.out_of_memory_kills()
        self._left = dict(processes)
        self._deadline: float | None = None
        self._is_ending = False
        self._looks = 0
        self._still: dict[int, int] = {}

    @property
    def is_over(self) -> bool:
        """Whether all have ended."""
        return not self._left

    def look(self) -> None:
        """Take note of who has ended, and kill those who should have."""
        self._looks += 1
        for rank, process in list(self._left.items()):
            code = process.poll()
            if code is None:
                continue
            del self._left[rank]
            if code and (not self._is_ending or self._is_news(rank, code)):
                self._note(rank, code, self._end_of(rank, code))
        if self._looks % LOOKS_AT_STATES == 0:
            self._look_at_states()
        if self._deadline is not None and self._clock() > self._deadline:
            self.send(signal.SIGKILL)

    def send(self, number: int) -> None:
        """A signal to all that are left, and to what they have started."""
        for process in self._left.values():
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, number)

    def stop(self, number: int, seconds: float) -> None:
        """Pass on a signal that has asked the launcher to stop."""
        self.send(number)
        self._end_by(seconds)

    def end(self, seconds: float, *, asks: bool) -> None:
        """See to it that all have ended in `seconds`, for a failure here or elsewhere.

        What they end with from now on is no reason of its own.
        """
        if self._is_ending:
            return
        self._is_ending = True
        for rank in self._left:
            if self._is_still(rank):
                self._note(rank, STOOD_STILL, "stood still: a signal has stopped it (SIGSTOP)")
        if asks:
            self.send(signal.SIGTERM)
        self._end_by(seconds)

    def _end_by(self, seconds: float) -> None:
        deadline = self._clock() + seconds
        self._deadline = deadline if self._deadline is None else min(deadline, self._deadline)

    def _note(self, rank: int, code: int, text: str) -> None:
        beat = self._beat(rank)
        who = beat.who if beat else self._who(rank)
        if code == PEER_LOST and beat and beat.end and beat.end.line:
            who, text = "", beat.end.line  # of whom it was waiting for, and what that one does
        if code == UNAVAILABLE:
            who = ""  # the text tells
        self.failures.append(Failure(rank, who, code, time.time(), text))
        if beat and beat.end is None:
            self._leave(replace(beat, end=End(CRASH, code or CRASHED, time.time(), text)))

    def _beat(self, rank: int) -> Beat | None:
        """The last one of the very process."""
        mine = self._processes[rank].pid, self._host
        return next((beat for beat in self._beats() if (beat.pid, beat.host) == mine), None)

    def _is_news(self, rank: int, code: int) -> bool:
        """Whether an end that was asked for still tells something: a mistake, or a run saved."""
        return code in (STOPPED, INTERRUPTED) or (
            code == USER_MISTAKE and self._recorded(rank) is not None
        )

    # ------------------------------------------------------------------------ why

    def _end_of(self, rank: int, code: int) -> str:
        """In words, to follow the name of the rank; of a mistake, or of what was missing, what the
        rank has recorded alone."""
        if code in (USER_MISTAKE, UNAVAILABLE):
            return self._recorded(rank) or f"{self._who(rank)} ended with exit code {code}"
        if code == -signal.SIGKILL and (kills := self._memory_kills()):
            return f"was killed by the system, for the memory was full (SIGKILL; {kills})"
        if code < 0:
            return f"was ended by {signal.Signals(-code).name}"
        if code == PEER_LOST:
            return "was left alone, as it says above"
        return f"ended with exit code {code}; its traceback is above"

    def _recorded(self, rank: int) -> str | None:
        """The mistake that a rank has left word of."""
        try:
            content = json.loads(Path(self._error_files[rank]).read_text(encoding="utf-8"))
        except (OSError, ValueError):  # none, or of a rank that was killed as it wrote
            return None
        message: dict[str, Any] | str = content["message"]
        text = message["message"] if isinstance(message, dict) else message
        return " ".join(text.partition(": ")[2].splitlines())

    def _memory_kills(self) -> str:
        """What the control group has counted since the ranks were started; "" for nothing."""
        now = bootstrap.out_of_memory_kills()
        if self._kills is None or now is None or now <= self._kills:
            return ""
        return f"oom_kill of its control group went from {self._kills} to {now}"

    # ------------------------------------------------------------------------ stopped ones

    def _look_at_states(self) -> None:
        """End all when one has stood still too long. Counted in looks: time in which the launcher
        is stopped as well, with the whole job, doesn't count."""
        for rank in self._left:
            self._still[rank] = self._still.get(rank, 0) + 1 if self._is_still(rank) else 0
        longest = max(self._still.values(), default=0) * LOOKS_AT_STATES * LOOK_SECONDS
        if longest > self._patience:
            self.end(0.0, asks=False)

    def _is_still(self, rank: int) -> bool:
        """Whether a signal has stopped it; one that a debugger holds has a state of its own."""
        with contextlib.suppress(OSError):
            stat = Path(f"/proc/{self._left[rank].pid}/stat").read_text()
            return stat.rpartition(")")[2].split()[0] == "T"
        return False
