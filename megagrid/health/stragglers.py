"""Which ranks make the others wait: those that compute for far longer in a step than their equals.

Ranks with the same stages have the same to do. Where a stage has one rank, all ranks are its
equals, as far as the stages are balanced. Imports no torch.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from statistics import median_low

from megagrid.health.beat import Beat, read_beats
from megagrid.health.verdict import of_this_start

LEAST_SHARE = 0.5
"""Of a step that a rank computes, at least, for it to be what the others wait for."""

IN_A_ROW = 3
"""Times that a rank must be found slow, each in other steps, before it is named."""

READ_AT_ONCE = 64
"""Ranks whose beats the first rank reads with each of its own; of more, it reads them less often.
"""


@dataclass(frozen=True)
class Straggler:
    """A slow rank.

    Attributes:
        compute_s: of one of its steps.
        usual_s: of its equals'.
    """

    beat: Beat
    compute_s: float
    usual_s: float

    def __str__(self) -> str:
        usual = "and its equals for next to none"  # too short for any look at them
        if self.usual_s:
            times = self.compute_s / self.usual_s
            usual = f"{times:.1f} times the {self.usual_s:.3g} s of its equals"
        return f"{self.beat.who} computes for {self.compute_s:.3g} s of each step, {usual}"


def find_stragglers(beats: Iterable[Beat], factor: float) -> list[Straggler]:
    """Ranks that compute for more than `factor` times the median of their equals."""
    known = [beat for beat in beats if None not in (beat.compute_s, beat.step_s) and not beat.end]
    stages: dict[int, list[Beat]] = defaultdict(list)
    for beat in known:
        stages[beat.coordinate.pp].append(beat)
    found = []
    for beat in known:
        equals = stages[beat.coordinate.pp]
        usual = median_low([one.compute_s for one in (equals if len(equals) > 1 else known)])
        if beat.compute_s > max(factor * usual, LEAST_SHARE * beat.step_s):
            found.append(Straggler(beat, beat.compute_s, usual))
    return found


class Lookout:
    """Names stragglers, each once, for the first rank.

    Args:
        run: the run's folder.
        factor: see `find_stragglers`.
        say: told of each.
    """

    def __init__(self, run: Path, factor: float, say: Callable[[str], None]) -> None:
        self._run = run
        self._factor = factor
        self._say = say
        self._beats = 0
        self._step = 0
        self._in_a_row: Counter[int] = Counter()
        self._named: set[int] = set()

    def look(self, beat: Beat) -> None:
        """Read all beats, if there was a step since and it is time."""
        self._beats += 1
        is_time = self._beats % max(1, beat.world_size // READ_AT_ONCE) == 0
        if beat.rank != 0 or not is_time or beat.world_size == 1 or beat.step <= self._step:
            return
        self._step = beat.step
        beats = of_this_start(read_beats(self._run)).values()
        slow = {one.beat.rank: one for one in find_stragglers(beats, self._factor)}
        self._in_a_row = Counter({rank: self._in_a_row[rank] + 1 for rank in slow})
        for rank, times in self._in_a_row.items():
            if times >= IN_A_ROW and rank not in self._named:
                self._named.add(rank)
                self._say(f"slow: {slow[rank]}")
