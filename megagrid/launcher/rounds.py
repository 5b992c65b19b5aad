"""Rounds of a job: which nodes take part, when one is over, and what comes after it. No torch.

In a round each of its nodes has started its ranks once. Every node says in a `NodeWord` how its
ranks fare; the first node's `Council` hears all of them and says in a `JobWord` what is to become
of the job:

    node 0   waiting   running   running  running, left alone   ended     waiting   running
    node 1   waiting   running   running, one killed   ended    waiting             running
    job      forming   round 1             over                 forming             round 2

What ended a round decides whether there is another: a crash is worth another try, a mistake would
only be made again, and who has asked for a stop doesn't want one.
"""

from __future__ import annotations

import json
import signal
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import asdict, dataclass, replace
from typing import NamedTuple, Self

from megagrid.exit_codes import (
    CRASHED,
    INTERRUPTED,
    PEER_LOST,
    STOPPED,
    UNAVAILABLE,
    USER_MISTAKE,
)

LAST_CALL_SECONDS = 30.0
"""For nodes that may come, once those are there that must."""

SECONDS_AFTER_A_CRASH = 5.0
"""Until the other ranks are killed: their step can't end, and they have nothing to save."""

STOOD_STILL = -signal.SIGSTOP
"""In place of an exit code: the rank never ended."""

_CONSEQUENCES = {UNAVAILABLE: 1, PEER_LOST: 2, STOPPED: 2}
"""Exit codes that something else may be the reason of, and how likely."""

WAITING, RUNNING, ENDED, GONE = "waiting", "running", "ended", "gone"
"""What a node is at: no ranks, and ready for some; ranks; ranks that have all ended; done."""


@dataclass(frozen=True)
class Failure:
    """How a rank ended that hasn't ended well.

    Attributes:
        who: its number, coordinate and host; "" where the text tells of it.
        code: exit code, or a signal's number below zero.
        at: when, in seconds since the epoch.
        text: the mistake that it has recorded, or what is known of its end.
    """

    rank: int
    who: str
    code: int
    at: float
    text: str


@dataclass(frozen=True)
class NodeWord:
    """What a node says.

    Attributes:
        agent: stands for this very agent: another one in its place has another.
        host: its name.
        ranks: that it starts.
        run: what the ranks are to do, and in how many: the same on all nodes.
        at: one of `WAITING` …
        round: the newest one that its ranks were started for; 0 before.
        failures: of that round's ranks, or of the node itself before.
        has_begun: whether a rank of it has ever made a step.
        signal: that the agent was sent to stop the run; 0: none.
        beat: grows as long as the agent runs.
    """

    agent: str
    host: str
    ranks: int
    run: str
    at: str = WAITING
    round: int = 0
    failures: tuple[Failure, ...] = ()
    has_begun: bool = False
    signal: int = 0
    beat: int = 0

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str | bytes) -> Self:
        values = json.loads(text)
        return cls(**values | {"failures": tuple(Failure(**f) for f in values["failures"])})


class Member(NamedTuple):
    """A node of a round, with its ranks: they are counted from the first member's on."""

    node: int
    ranks: int


class Verdict(NamedTuple):
    """How a job ends: the exit code, and the line that tells why; "" where ranks have told."""

    code: int
    text: str = ""


@dataclass(frozen=True)
class JobWord:
    """What is to become of the job.

    Attributes:
        round: the newest one; 0: none yet.
        members: its nodes.
        port: of the first node, at which the round's ranks find each other.
        restarts: rounds that were made for a crash.
        news: a line on why there is another round.
        over: seconds that the round's ranks have left to end; None: it goes on.
        asks: whether they are to be asked to save and stop, not left to end by themselves.
        forming: the next round is being made: whoever may take part, wait for it.
        verdict: how the job has ended.
    """

    round: int = 0
    members: tuple[Member, ...] = ()
    port: int = 0
    restarts: int = 0
    news: str = ""
    over: float | None = None
    asks: bool = False
    forming: bool = True
    verdict: Verdict | None = None

    @property
    def nodes(self) -> list[int]:
        return [member.node for member in self.members]

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str | bytes) -> Self:
        values = json.loads(text)
        verdict = values["verdict"] and Verdict(*values["verdict"])
        members = tuple(Member(*member) for member in values["members"])
        return cls(**values | {"members": members, "verdict": verdict})


@dataclass(frozen=True)
class Terms:
    """What a job is started with.

    Attributes:
        fewest, most: nodes that it may have.
        max_restarts: after crashes.
        seconds_to_meet: longest that nodes may take to come.
        seconds_to_stop: longest that ranks may take to end a step and save it.
        refuses: of a count of ranks, why the recipe doesn't go with it; None if it does.
    """

    fewest: int = 1
    most: int = 1
    max_restarts: int = 0
    seconds_to_meet: float = 600.0
    seconds_to_stop: float = 600.0
    refuses: Callable[[int], str | None] = lambda ranks: None


class Council:
    """Decides on rounds, by the words of all nodes. Only the first node has one.

    Attributes:
        terms: those of the job.
        job: what it has decided so far.
    """

    def __init__(self, terms: Terms, clock: Callable[[], float] = time.monotonic) -> None:
        self.job = JobWord()
        self.terms = terms
        self._clock = clock
        self._began = clock()
        self._quorum_since: float | None = None
        self._has_begun = False
        self._grows = False
        self._agents: dict[int, str] = {}
        self._causes: list[str] = []

    def hear(self, words: Mapping[int, NodeWord], lost: Collection[int]) -> JobWord:
        """Decide anew.

        Args:
            words: the last one of each node that has come.
            lost: nodes from which nothing comes any more.
        """
        self._has_begun |= any(word.has_begun for word in words.values())
        if self.job.verdict is None:
            if self.job.forming:
                self._form(words, lost)
            elif self.job.over is None:
                self._look(words, lost)
            elif self._is_settled(words, lost):
                self._judge(words, lost)
        return self.job

    # ------------------------------------------------------------------------ before a round

    def _form(self, words: Mapping[int, NodeWord], lost: Collection[int]) -> None:
        """Begin a round with all nodes that are ready, or with as many as the recipe goes with."""
        there = {node: word for node, word in sorted(words.items()) if node not in lost}
        if verdict := self._objection(there):
            self._decide(verdict=verdict)
            return
        ready = [
            Member(node, word.ranks)
            for node, word in there.items()
            if word.at == WAITING and word.run == words[0].run
        ]
        nodes = {member.node for member in ready}
        if any(node in there and node not in nodes for node in self.job.nodes):
            return  # its ranks have ended, and it will be ready at once
        if not self.job.round and not self._is_quorum(len(ready)):
            return
        refusals = []
        for count in range(len(ready), self.terms.fewest - 1, -1):
            members = tuple(ready[:count])
            refusal = self.terms.refuses(sum(member.ranks for member in members))
            if refusal is None:
                self._grows = False
                self._agents = {node: words[node].agent for node, _ in members}
                self._decide(
                    round=self.job.round + 1, members=members, over=None, asks=False, forming=False
                )
                return
            refusals.append(refusal)
        fewest = f"{len(ready)} of at least {self.terms.fewest} nodes are left"
        reasons = [*self._causes[-1:], refusals[0] if refusals else fewest]
        self._decide(verdict=Verdict(CRASHED, "; ".join(reasons)))

    def _objection(self, there: Mapping[int, NodeWord]) -> Verdict | None:
        """Why there won't be a round."""
        first = there[0]
        for node, word in there.items():
            if self.job.round and node not in self.job.nodes:
                continue  # it may have come late, or wrong, but the job goes on without it
            if word.signal:
                return Verdict(128 + word.signal)
            if word.round == 0 and word.failures:
                return Verdict(USER_MISTAKE, word.failures[0].text)
            if word.run != first.run:
                return Verdict(
                    USER_MISTAKE,
                    f"node {node} ({word.host}) was started with another recipe, other overrides "
                    f"or other options than node 0 ({first.host}); start all nodes alike",
                )
        return None

    def _is_quorum(self, ready: int) -> bool:
        """Whether the first round can begin: nobody is missing, or nobody came at the last call."""
        now = self._clock()
        if ready == self.terms.most:
            return True
        if ready < self.terms.fewest:
            self._quorum_since = None
            if now - self._began > self.terms.seconds_to_meet:
                text = (
                    f"{ready} of {self.terms.fewest} nodes have come in "
                    f"{self.terms.seconds_to_meet:g} s; start `megagrid train` on each of them, "
                    "with a --node-rank of its own"
                )
                self._decide(verdict=Verdict(UNAVAILABLE, text))
            return False
        self._quorum_since = self._quorum_since or now
        return now - self._quorum_since > LAST_CALL_SECONDS

    # ------------------------------------------------------------------------ in a round

    def _look(self, words: Mapping[int, NodeWord], lost: Collection[int]) -> None:
        """Whether the round is over."""
        failures = self._failures(words)
        if failures or self._left(words, lost):
            is_stop = bool(failures) and all(f.code in (STOPPED, INTERRUPTED) for f in failures)
            seconds = self.terms.seconds_to_stop if is_stop else SECONDS_AFTER_A_CRASH
            self._decide(over=seconds, asks=not is_stop)
        elif all(self._has_ended(words[node]) for node in self.job.nodes):
            self._decide(verdict=Verdict(0))
        elif newcomers := self._newcomers(words, lost):
            self._grows = True
            self._decide(over=self.terms.seconds_to_stop, asks=True, news=f"{newcomers} takes part")

    def _newcomers(self, words: Mapping[int, NodeWord], lost: Collection[int]) -> str | None:
        """Names of nodes that wait and would make the grid larger."""
        waiting = {
            node: word
            for node, word in words.items()
            if node not in lost and node not in self.job.nodes and word.at == WAITING
        }
        if not waiting or not self._has_begun or len(self.job.members) >= self.terms.most:
            return None
        run = words[0].run
        ranks = sum(member.ranks for member in self.job.members)
        ranks += sum(word.ranks for word in waiting.values())
        if any(word.run != run for word in waiting.values()) or self.terms.refuses(ranks):
            return None
        return ", ".join(f"node {node} ({word.host})" for node, word in sorted(waiting.items()))

    def _has_ended(self, word: NodeWord) -> bool:
        return word.round == self.job.round and word.at == ENDED

    def _is_settled(self, words: Mapping[int, NodeWord], lost: Collection[int]) -> bool:
        left = self._left(words, lost)
        return all(node in left or self._has_ended(words[node]) for node in self.job.nodes)

    def _left(self, words: Mapping[int, NodeWord], lost: Collection[int]) -> list[int]:
        """Nodes of the round that are no longer in it."""
        return [
            node
            for node in self.job.nodes
            if node in lost
            or words[node].at == GONE
            or words[node].agent != self._agents[node]  # the launcher was started anew
        ]

    def _failures(self, words: Mapping[int, NodeWord]) -> list[Failure]:
        """Of the round's ranks, that of the first rank first."""
        mine = [words[node] for node in self.job.nodes]
        found = [f for word in mine if word.round == self.job.round for f in word.failures]
        return sorted(found, key=lambda failure: failure.rank)

    # ------------------------------------------------------------------------ after a round

    def _judge(self, words: Mapping[int, NodeWord], lost: Collection[int]) -> None:
        """All ranks have ended, or their nodes are lost: what now?"""
        failures, left = self._failures(words), self._left(words, lost)
        codes = {failure.code for failure in failures}
        signals = [words[node].signal for node in self.job.nodes if words[node].signal]
        stops = [code for code in (STOPPED, INTERRUPTED) if code in codes]
        if USER_MISTAKE in codes:
            # First of all: a rank that waited for the one that met it fails as well.
            text = next(failure.text for failure in failures if failure.code == USER_MISTAKE)
            self._decide(verdict=Verdict(USER_MISTAKE, text))
        elif signals and failures:
            # The save is everyone's, whatever they met after it.
            self._decide(verdict=Verdict(stops[0] if stops else 128 + signals[0]))
        elif self._grows and codes <= {STOPPED} and not left:
            self._decide(forming=True)
        elif stops and not left:
            self._decide(verdict=Verdict(stops[0]))
        elif failures or left:
            self._try_again(*self._cause(words, failures, left))
        else:
            self._decide(verdict=Verdict(0))

    def _cause(
        self, words: Mapping[int, NodeWord], failures: list[Failure], left: list[int]
    ) -> tuple[str, int]:
        """What has ended the round, and the exit code if it ends the job.

        A rank that was left alone or waited in vain isn't the reason, unless there is no other; and
        one that stood still is, though the others were the first to end.
        """
        for node in left:
            text = f"node {node} ({words[node].host}) is gone: nothing comes from its launcher"
            return text, CRASHED
        first = min(
            failures,
            key=lambda f: (f.code != STOOD_STILL, _CONSEQUENCES.get(f.code, 0), f.at),
        )
        code = UNAVAILABLE if first.code == UNAVAILABLE else CRASHED
        return f"{first.who} {first.text}".strip(), code

    def _try_again(self, cause: str, code: int) -> None:
        self._causes.append(cause)
        restarts, most = self.job.restarts, self.terms.max_restarts
        if restarts < most and self._has_begun:
            self._decide(
                forming=True,
                restarts=restarts + 1,
                news=f"{cause}; restart {restarts + 1} of {most}",
            )
        else:
            self._decide(verdict=Verdict(code, cause))

    def _decide(self, **changes: object) -> None:
        self.job = replace(self.job, **changes)
