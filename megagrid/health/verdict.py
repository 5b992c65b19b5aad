"""Who is to blame where ranks have waited for each other too long: what the last beats of all tell.

    what a rank's beats say                            what is made of it
    they are of another start of the run               that one goes on, without this one
    none since long ago                                stopped (SIGSTOP), dead, or its host is
    it has ended                                       the others weren't told
    there is none                                      it never began
    it computes, reads, waits for a thread             hung there, since then
    it waits in another collective of the same ranks   the ranks don't run the same program
    all wait in the same one                           messages don't arrive

The first row that holds of any rank is the verdict. Imports no torch.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from megagrid.health.beat import COMPUTING, FOLDER, WAITING, Beat, name_ranks

ROWS = 8
"""Of the table, at most: ranks that do the same share a row."""

NAMED = 3
"""Ranks that the verdict names one by one, at most."""

ATTEMPT_SLACK_S = 30.0
"""Ranks of one start of a run begin within this of each other, and of what they leave behind."""


@dataclass(frozen=True)
class Finding:
    """What is known of one rank.

    Attributes:
        beat: its last; None if there is none.
        is_silent: whether it should have written another since.
        age_s: of the beat, or of the end.
        is_foreign: whether the beat is of another start of the run.
    """

    rank: int
    beat: Beat | None
    is_silent: bool
    age_s: float
    is_foreign: bool = False

    @property
    def has_ended(self) -> bool:
        return self.beat is not None and self.beat.end is not None and not self.is_foreign

    @property
    def is_busy(self) -> bool:
        return self.is_alive and self.beat.doing.kind == COMPUTING

    @property
    def is_alive(self) -> bool:
        """As far as its beats are of this start."""
        return not (self.beat is None or self.is_silent or self.has_ended or self.is_foreign)

    @property
    def who(self) -> str:
        return f"rank {self.rank}" if self.beat is None else self.beat.who

    @property
    def state(self) -> str:
        """What it is doing, in words that ranks which do the same share."""
        beat = self.beat
        if beat is None:
            return "has written no beat: it hasn't begun"
        if self.is_foreign:
            return "beats for another start of the run, which goes on without this one"
        if beat.end is not None:
            return f"has ended: {beat.end.how}" + (f", {beat.end.line}" if beat.end.line else "")
        last = beat.doing.briefly
        if self.is_silent:
            return f"is stopped or dead, without a beat for {self.age_s:.0f} s; before, it {last}"
        return f"{'is alive but ' * self.is_busy}{last}"

    @property
    def for_s(self) -> float | None:
        """How long it has been so, as far as its own clock says."""
        return self.beat.time - self.beat.doing.since if self.is_alive else None


@dataclass(frozen=True)
class Verdict:
    """What is told.

    Attributes:
        line: who waited for what, and whose fault it is.
        blamed: ranks.
        findings: of all ranks.
    """

    line: str
    blamed: tuple[int, ...]
    findings: tuple[Finding, ...]
    time: float

    def table(self) -> list[str]:
        """What every rank was doing: those to blame first, the most that do the same after them."""
        rows: dict[str, list[Finding]] = {}
        for finding in self.findings:
            rows.setdefault(finding.state, []).append(finding)
        order = sorted(
            rows.items(),
            key=lambda row: (not {f.rank for f in row[1]} & set(self.blamed), -len(row[1])),
        )
        lines = [_row(state, found) for state, found in order[:ROWS]]
        return lines + [f"  … and {len(order) - ROWS} rows more"] * (len(order) > ROWS)

    def to_json(self) -> str:
        """All of it."""
        ranks = [
            {
                "rank": finding.rank,
                "state": finding.state,
                "is_silent": finding.is_silent,
                "age_s": round(finding.age_s, 1),
                "beat": None if finding.beat is None else asdict(finding.beat),
            }
            for finding in self.findings
        ]
        told = {"time": self.time, "line": self.line, "blamed": self.blamed, "ranks": ranks}
        return json.dumps(told, indent=1)


def verdict_file(run: Path, start: str) -> Path:
    """Where the verdict on a start of the run lies."""
    return run / FOLDER / f"verdict-{start}.json"


def of_this_start(beats: Mapping[int, Beat]) -> dict[int, Beat]:
    """The beats without those that a former start of the run has left behind."""
    begun = max((beat.started for beat in beats.values()), default=0.0) - ATTEMPT_SLACK_S
    return {
        rank: beat
        for rank, beat in beats.items()
        if (beat.time if beat.end is None else beat.end.time) >= begun
    }


def judge(
    waiting: Beat,
    before: Mapping[int, Beat],
    after: Mapping[int, Beat],
    now: float,
    *,
    limit: str,
    patience_s: float,
) -> Verdict:
    """The verdict.

    Args:
        waiting: the beat of the rank that has waited too long.
        before, after: all beats, and again when each should have written another.
        limit: the key that says how long is too long, and its value.
        patience_s: a beat must be as old, by the clock, to be taken for a last one.
    """
    known = {**of_this_start(after), waiting.rank: waiting}

    def find(rank: int) -> Finding:
        beat, former = known.get(rank), before.get(rank)
        if beat is None:
            return Finding(rank, None, False, 0.0)
        age = now - (beat.time if beat.end is None else beat.end.time)
        if None not in (beat.start, waiting.start) and beat.start != waiting.start:
            return Finding(rank, beat, False, age, is_foreign=True)
        has_moved = former is None or former.time != beat.time or rank == waiting.rank
        is_silent = beat.end is None and not has_moved and age > patience_s
        return Finding(rank, beat, is_silent, age)

    findings = tuple(find(rank) for rank in range(waiting.world_size))
    blamed, why = _blame(waiting, findings)
    waited = waiting.time - waiting.doing.since
    line = f"{waiting.who} {waiting.doing}, for {waited:.0f} s, longer than {limit}: {why}"
    return Verdict(line, blamed, findings, now)


def _blame(waiting: Beat, findings: Sequence[Finding]) -> tuple[tuple[int, ...], str]:
    for is_guilty in _GUILT:
        guilty = [finding for finding in findings if is_guilty(finding)]
        if guilty:
            told = "; ".join(f"{found.who} {_state_since(found)}" for found in guilty[:NAMED])
            more = f"; and {len(guilty) - NAMED} ranks more" if len(guilty) > NAMED else ""
            return tuple(found.rank for found in guilty), told + more
    return _disagreement(waiting, findings)


_GUILT: tuple[Callable[[Finding], bool], ...] = (
    lambda found: found.is_foreign,
    lambda found: found.is_silent,
    lambda found: found.has_ended,
    lambda found: found.beat is None,
    lambda found: found.is_busy,
)
"""What a rank is blamed for, the worst first."""


def _disagreement(waiting: Beat, findings: Sequence[Finding]) -> tuple[tuple[int, ...], str]:
    """What to make of ranks that all wait: whether any two of one group do so in different
    collectives."""
    by_group: dict[tuple[int, ...], list[Beat]] = {}
    for beat in (found.beat for found in findings):
        if beat.doing.kind == WAITING and beat.doing.peers:
            by_group.setdefault(tuple(sorted((beat.rank, *beat.doing.peers))), []).append(beat)
    for beats in by_group.values():
        if len({_opposite(beat.doing.what) for beat in beats}) > 1:
            told = "; ".join(f"{beat.who} {beat.doing}" for beat in beats[:NAMED])
            return tuple(beat.rank for beat in beats), f"the ranks don't do the same: {told}"
    missing = [
        found
        for found in findings
        if found.rank in waiting.doing.peers and waiting.rank not in found.beat.doing.peers
    ]
    if missing:
        told = "; ".join(_elsewhere(found) for found in missing[:NAMED])
        return tuple(found.rank for found in missing), told
    hosts = sorted({found.beat.host for found in findings})
    between = f"between {' and '.join(hosts[:NAMED])}" if len(hosts) > 1 else f"on {hosts[0]}"
    return (), f"all of its peers wait too; messages {between} don't arrive"


def _opposite(collective: str) -> str:
    """A message has two ends, which wait in different calls."""
    return "recv" if collective == "send" else collective


def _state_since(found: Finding) -> str:
    return found.state + (f", for {found.for_s:.0f} s" if found.for_s is not None else "")


def _elsewhere(found: Finding) -> str:
    return f"{found.who} {found.beat.doing}, for {found.for_s:.0f} s"


def _row(state: str, found: Sequence[Finding]) -> str:
    times = [finding.for_s for finding in found if finding.for_s is not None]
    told = state + (f", for {max(times):.0f} s" if times else "")
    if len(found) == 1:
        return f"  {found[0].who}: {told}"
    hosts = sorted({finding.beat.host for finding in found if finding.beat is not None})
    where = f" ({', '.join(hosts[:NAMED])}{', …' if len(hosts) > NAMED else ''})" if hosts else ""
    return f"  {name_ranks(finding.rank for finding in found)}{where}: {told}"
