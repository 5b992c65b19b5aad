"""What carries the words of `megagrid.launcher.rounds` between the launchers of a job's nodes: a
store of torch's, which the first node's launcher holds, and in each launcher a thread that reads
and writes it.

    node 1's thread    node/1 = its word; reads job
    node 0's thread    reads node/*, asks its council, job = what that says

Only the threads wait for the network. Where a wire is cut they may wait for long, so the launcher
counts its own looks between their passes: that time doesn't grow while the whole job is stopped.
"""

from __future__ import annotations

import threading
import time
import uuid
from dataclasses import replace
from datetime import timedelta
from typing import Any

from torch.distributed import TCPStore

from megagrid.errors import GridError
from megagrid.grid import bootstrap
from megagrid.launcher.launch import Rendezvous
from megagrid.launcher.rounds import GONE, Council, JobWord, NodeWord
from megagrid.launcher.watch import LOOK_SECONDS

PASS_SECONDS = 0.1
"""Between passes of a thread."""

SILENCE_SECONDS = 20.0
"""A node from which nothing comes for so long is lost. One that is up passes every `PASS_SECONDS`,
unless its machine has far more to do than it can."""


class Link:
    """This node's end.

    Args:
        node: its number.
        where: the first node's address. With port 0, of a job of one node, the system chooses.
        word: what the node says first.
        council: of the first node.
        patience: seconds in which the first node has to be reached.

    Attributes:
        word: what the node says now.
        job: what was heard of the job.
        lost: why nothing is heard any more; None while something is.

    Raises:
        GridError: the first node can't listen there.
    """

    def __init__(
        self,
        node: int,
        where: Rendezvous,
        word: NodeWord,
        council: Council | None = None,
        patience: float = 600.0,
    ) -> None:
        self.node = node
        self.where = where
        self.word = word
        self.job = JobWord()
        self.lost: str | None = None
        self._council = council
        self._patience = timedelta(seconds=patience)
        self._passes = 0
        self._seen = 0
        self._silent_looks = 0
        self._store: TCPStore | None = _listen(where) if council is not None else None
        self._round_store: TCPStore | None = None
        self._beats: dict[int, tuple[tuple[str, int], int]] = {}
        self._others: dict[int, NodeWord] = {}
        self._is_closed = False
        self._thread = threading.Thread(target=self._work, name="link", daemon=True)
        self._thread.start()

    def say(self, **changes: Any) -> None:
        """Change the node's word. Of the launcher's own thread."""
        self.word = replace(self.word, **changes)

    def look(self) -> None:
        """Count one of the launcher's looks, `LOOK_SECONDS` apart."""
        self._silent_looks = self._silent_looks + 1 if self._passes == self._seen else 0
        self._seen = self._passes
        silent = self._silent_looks * LOOK_SECONDS
        if self._passes and silent > SILENCE_SECONDS:
            self.lost = f"node 0 ({self.where}) is gone: nothing has come from it for "
            self.lost += f"{SILENCE_SECONDS:g} s"
        elif not self._passes and silent > self._patience.total_seconds() + SILENCE_SECONDS:
            # torch waits without end for the first answer of a program that listens and is silent.
            self.lost = self._unreached()

    def close(self, seconds: float = SILENCE_SECONDS, *, everyone: bool = False) -> None:
        """Say goodbye, and let the others hear the last word.

        Args:
            seconds: at most.
            everyone: those too that haven't come yet.
        """
        self.say(at=GONE)
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline and not self._is_alone(everyone):
            time.sleep(PASS_SECONDS / 4)
        self._is_closed = True
        self._thread.join(PASS_SECONDS if self.lost else SILENCE_SECONDS)

    def _is_alone(self, everyone: bool) -> bool:
        """Whether nobody needs this launcher's store any more."""
        if self._council is None or self.lost:
            return True
        others, silent = dict(self._others), self._silent()
        is_full = len(others) == self._council.terms.most - 1
        return (is_full or not everyone) and all(
            word.at == GONE for node, word in others.items() if node not in silent
        )

    # ------------------------------------------------------------------------ the thread

    def _work(self) -> None:
        try:
            if self._store is None:
                self._store = self._join()
            is_last = False
            while not is_last:
                is_last = self._is_closed
                if self._council is None:
                    self._report(self._store)
                else:
                    self._hold_council(self._store, self._council)
                self._passes += 1
                time.sleep(0.0 if self._is_closed else PASS_SECONDS)
        except (RuntimeError, GridError) as error:  # what the store raises is one of the first
            self.lost = self.lost or self._explain(error)

    def _explain(self, error: Exception) -> str:
        if isinstance(error, GridError):
            return str(error)
        if self._passes:
            return f"node 0 ({self.where}) is gone: its launcher has closed the connection"
        return self._unreached()

    def _unreached(self) -> str:
        return (
            f"node 0 can't be reached at --rendezvous {self.where}: no launcher answered there for "
            f"{self._patience.total_seconds():g} s; start `megagrid train --node-rank 0` there"
        )

    def _join(self) -> TCPStore:
        """
        Raises:
            GridError: there is such a node already.
        """
        store = TCPStore(self.where.host, self.where.port, None, False, self._patience)
        store.set_timeout(timedelta(seconds=SILENCE_SECONDS))
        claim, mine = f"agent/{self.node}", self.word.agent
        while (holder := store.compare_set(claim, "", mine).decode()) != mine:
            former = self._former_word(store)
            time.sleep(20 * PASS_SECONDS)
            word = self._former_word(store)
            if word is not None and word != former:
                raise GridError(
                    f"--node-rank {self.node} is taken, by the launcher on {word.host}; give each "
                    "node one of its own"
                )
            store.compare_set(claim, holder, mine)  # that one is gone
        return store

    def _former_word(self, store: TCPStore) -> NodeWord | None:
        """Of whoever has, or had, this node's number."""
        key = f"node/{self.node}"
        return NodeWord.from_json(store.get(key)) if store.check([key]) else None

    def _report(self, store: TCPStore) -> None:
        word = replace(self.word, beat=self._passes)
        store.set(f"node/{self.node}", word.to_json())
        if store.check(["job"]):
            self.job = JobWord.from_json(store.get("job"))

    def _hold_council(self, store: TCPStore, council: Council) -> None:
        keys = {node: f"node/{node}" for node in range(1, council.terms.most)}
        self._others = {
            node: NodeWord.from_json(store.get(key))
            for node, key in keys.items()
            if node in self._others or store.check([key])
        }
        for node, word in self._others.items():
            beat = word.agent, word.beat
            former, since = self._beats.get(node, (None, 0))
            self._beats[node] = beat, since if beat == former else self._passes
        job = council.hear({0: self.word, **self._others}, self._silent())
        if job.round != self.job.round:
            # A store of its own for each round: nothing of the last one's ranks is in it, and its
            # port is one that the system has just given to us.
            self._round_store = _listen(Rendezvous(self.where.host, 0))
        port = self._round_store.port if self._round_store else 0
        self.job = replace(job, port=port)
        store.set("job", self.job.to_json())

    def _silent(self) -> list[int]:
        most = SILENCE_SECONDS / PASS_SECONDS
        beats = dict(self._beats)
        return [node for node, (_, since) in beats.items() if self._passes - since > most]


def first_word(ranks: int, run: str, **more: Any) -> NodeWord:
    """Of a launcher that starts `ranks` of `run`."""
    return NodeWord(uuid.uuid4().hex, bootstrap.host_name(), ranks, run, **more)


def _listen(where: Rendezvous) -> TCPStore:
    """
    Raises:
        GridError: the port is taken.
    """
    try:
        return TCPStore("localhost", where.port, None, True, wait_for_workers=False)
    except RuntimeError as error:
        raise GridError(
            f"--rendezvous {where}: node 0 can't listen at port {where.port} "
            f"({str(error).splitlines()[0]}); choose another port"
        ) from None
