"""A node's launcher: torchrun's agent, with a mind of its own about what is worth another try.

    python -m megagrid.launcher.agent LAUNCH     checks devices, meets the other nodes' launchers
      rank 0, 1, …                            `python -m megagrid train RECIPE` with RANK set

torchrun's agent starts the ranks of a round and, round after round, does what it is told here:
`Agent` looks after the ranks and reports how they fare, `Meeting` waits until the council of
`megagrid.launcher.rounds` has decided on a round or on the end.
"""

from __future__ import annotations

import hashlib
import logging
import os
import signal
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from types import FrameType

from torch.distributed import HashStore
from torch.distributed.elastic.agent.server.api import RunResult, Worker, WorkerGroup, WorkerSpec
from torch.distributed.elastic.agent.server.api import WorkerState as State
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, LogsSpecs
from torch.distributed.elastic.rendezvous.api import (
    RendezvousClosedError,
    RendezvousHandler,
    RendezvousInfo,
    RendezvousStoreInfo,
)
from torch.distributed.launcher.api import LaunchConfig

from megagrid.config.dump import dump
from megagrid.config.load import load
from megagrid.config.rules import check, placement
from megagrid.config.schema import Config
from megagrid.errors import GridError, MegagridError
from megagrid.exit_codes import CRASHED, USER_MISTAKE
from megagrid.grid import bootstrap
from megagrid.grid.start import check_devices
from megagrid.health.beat import read_beats, read_starting, write_beat
from megagrid.health.presence import Presence
from megagrid.launcher.launch import BEGUN, Launch
from megagrid.launcher.link import Link, first_word
from megagrid.launcher.rounds import (
    ENDED,
    RUNNING,
    SECONDS_AFTER_A_CRASH,
    WAITING,
    Council,
    Failure,
    NodeWord,
    Terms,
    Verdict,
)
from megagrid.launcher.watch import LOOK_SECONDS, RankWatch

PASSED_ON = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)
"""Signals to the launcher that it sends on to the ranks, after which it waits for their end."""

SECONDS_TO_TELL = 30.0
"""For the other nodes to hear of a mistake on this one."""


class Signals:
    """Those of `PASSED_ON` that the launcher was sent, and hasn't passed on yet."""

    def __init__(self) -> None:
        self._waiting: list[int] = []

    def __iter__(self) -> Iterator[int]:
        while self._waiting:
            yield self._waiting.pop(0)

    @contextmanager
    def noted(self) -> Iterator[None]:
        """Note signals as long as the block runs, and ignore them after it."""

        def note(number: int, frame: FrameType | None) -> None:
            self._waiting.append(number)

        # Under nohup the end of the terminal stays ignored.
        is_kept = signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
        heard = [number for number in PASSED_ON if not (is_kept and number == signal.SIGHUP)]
        for number in heard:
            signal.signal(number, note)
        try:
            yield
        finally:
            for number in heard:
                signal.signal(number, signal.SIG_IGN)


class Meeting(RendezvousHandler):
    """Where launchers meet before a round, as torchrun's agent has it.

    Attributes:
        round: the one that this node takes part in, or took part in last.
    """

    use_agent_store = True

    def __init__(self, link: Link, signals: Signals, presence: Presence) -> None:
        self._link = link
        self._presence = presence
        self._signals = signals
        self.round = 0

    def next_rendezvous(self) -> RendezvousInfo:
        """Wait for a round with this node.

        Raises:
            RendezvousClosedError: there won't be one.
        """
        link = self._link
        link.say(at=WAITING, failures=())
        while True:
            for number in self._signals:
                link.say(signal=number)
            job = link.job
            is_out = link.word.signal and not job.forming and link.node not in job.nodes
            if job.verdict or link.lost or is_out:
                raise RendezvousClosedError
            if not job.forming and job.round > self.round and link.node in job.nodes:
                break
            time.sleep(LOOK_SECONDS / 2)
            link.look()
            self._presence.show()
        self.round = job.round
        link.say(at=RUNNING, round=job.round)
        if job.news and link.node == 0:
            ranks = sum(member.ranks for member in job.members)
            print(f"warning: {job.news}, on {ranks} ranks", file=sys.stderr, flush=True)
        # Agents need no store among them: the council has told them all that they would ask it.
        where = RendezvousStoreInfo(link.where.host, job.port)
        return RendezvousInfo(HashStore(), job.nodes.index(link.node), len(job.members), where)

    def get_backend(self) -> str:
        return "megagrid"

    def get_run_id(self) -> str:
        return self._link.word.agent

    def is_closed(self) -> bool:
        return self._link.job.verdict is not None

    def set_closed(self) -> None:
        """The council closes it."""

    def num_nodes_waiting(self) -> int:
        """None: the council says when a round is over for them."""
        return 0

    def shutdown(self) -> bool:
        return True


class Agent(LocalElasticAgent):
    """torchrun's agent of a node. Its loop starts ranks, looks after them each `LOOK_SECONDS`, and
    starts them again, or ends, as its looks say."""

    def __init__(
        self,
        spec: WorkerSpec,
        logs_specs: LogsSpecs,
        link: Link,
        signals: Signals,
        config: Config,
        presence: Presence,
    ) -> None:
        super().__init__(spec, logs_specs)
        self._presence = presence
        self._link = link
        self._signals = signals
        self._config = config
        self._watch: RankWatch | None = None
        self._begun: Path | None = None

    def _assign_worker_ranks(
        self, store: object, group_rank: int, group_world_size: int, spec: WorkerSpec
    ) -> list[Worker]:
        sizes = [member.ranks for member in self._link.job.members]
        first, world = sum(sizes[:group_rank]), sum(sizes)
        ranks = range(first, first + sizes[group_rank])
        return [Worker(rank - first, rank, rank, world, world) for rank in ranks]

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, int]:
        # Of these two torchrun's agent makes the number of the start that it tells the ranks.
        self._remaining_restarts = worker_group.spec.max_restarts - self._link.word.round + 1
        pids = super()._start_workers(worker_group)
        workers = worker_group.workers
        run = Path(self._config.logging.run_dir)
        self._watch = RankWatch(
            {w.global_rank: self._pcontext.subprocess_handlers[w.local_rank].proc for w in workers},
            {w.global_rank: self._pcontext.error_files[w.local_rank] for w in workers},
            beats=lambda: [*read_beats(run).values(), *read_starting(run).values()],
            leave=partial(write_beat, run),
            who=partial(self._who, world_size=workers[0].world_size),
            patience=self._config.train.timeout_seconds,
        )
        self._begun = Path(self._pcontext.error_files[0]).with_name(BEGUN)
        return pids

    def _who(self, rank: int, world_size: int) -> str:
        """A rank that hasn't beaten yet, by the number that it was started with."""
        coordinate = placement(self._config, world_size).coordinate(rank)
        return f"rank {rank} ({coordinate}, {self._link.word.host})"

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        """Look after the ranks, and tell the loop what to do: HEALTHY, to go on; FAILED, to meet
        the others again or, with no restarts left, to end."""
        link, watch = self._link, self._watch
        link.look()
        self._presence.show()
        job, is_mine = link.job, link.job.round == link.word.round
        for number in self._signals:
            watch.stop(number, self._config.checkpoint.seconds_to_stop)
            link.say(signal=number)
        watch.look()
        if link.lost or not is_mine:
            watch.end(SECONDS_AFTER_A_CRASH, asks=True)
        elif job.over is not None:
            watch.end(job.over, asks=job.asks)
        link.say(
            at=ENDED if watch.is_over else RUNNING,
            failures=tuple(watch.failures),
            has_begun=link.word.has_begun or self._begun.exists(),
        )
        if not watch.is_over:
            return RunResult(State.HEALTHY)
        is_last = bool(link.lost or job.verdict)
        if not is_last and is_mine and not job.forming:
            return RunResult(State.HEALTHY)  # its ranks have ended; the others' may not have
        self._remaining_restarts = 0 if is_last else 1
        return RunResult(State.FAILED)

    def _exit_barrier(self) -> None:
        """Nobody to wait for: the verdict is everyone's."""


# ------------------------------------------------------------------------------------------------
# The process


def main(argv: Sequence[str]) -> int:
    """Run this node's ranks to the end of the job, and return one exit code for all of them."""
    launch = Launch.from_json(argv[0])
    bootstrap.become_launcher()
    # Failures are told below, once and in a line; torchrun's own report is a page.
    logging.disable(logging.ERROR)
    signals = Signals()
    with signals.noted():
        try:
            verdict = _run(launch, signals)
        except GridError as error:
            verdict = Verdict(USER_MISTAKE, str(error))
    if verdict.text:
        print("error:", " ".join(verdict.text.splitlines()), file=sys.stderr)
    return verdict.code


def _run(launch: Launch, signals: Signals) -> Verdict:
    """What this node ends with.

    Raises:
        GridError: the nodes can't meet as they were told to.
    """
    mistake = launch.mistake
    if mistake is None:
        config = load(launch.recipe, launch.overrides)
        try:
            check_devices(config.train.device, launch.ranks)
        except GridError as error:
            mistake = str(error)
    if mistake is not None:
        return _tell(launch, mistake)
    terms = Terms(
        fewest=launch.fewest,
        most=launch.most,
        max_restarts=launch.max_restarts,
        seconds_to_meet=max(config.train.setup_timeout_seconds, config.train.timeout_seconds),
        seconds_to_stop=config.checkpoint.seconds_to_stop,
        refuses=lambda ranks: _refusal(config, ranks),
    )
    link = _link(launch, terms, first_word(launch.ranks, _fingerprint(launch, config)))
    _work(launch, link, signals, config)
    verdict = link.job.verdict
    link.close()
    if verdict is None:
        number = link.word.signal
        return Verdict(CRASHED, link.lost) if link.lost else Verdict(128 + number)
    if launch.node == 0 or not verdict.text:
        return verdict
    return Verdict(verdict.code, f"node 0 has ended the job: {verdict.text}")


def _work(launch: Launch, link: Link, signals: Signals, config: Config) -> None:
    """Run round after round, to the last."""
    # torchrun leaves its folder for what ranks record behind, wherever it is, so it gets a passing
    # one.
    presence = Presence(Path(config.logging.run_dir), launch.node)
    with tempfile.TemporaryDirectory(prefix="megagrid-") as folder:
        logs = DefaultLogsSpecs(folder)
        spec = WorkerSpec(
            role="megagrid",
            local_world_size=launch.ranks,
            rdzv_handler=Meeting(link, signals, presence),
            entrypoint=sys.executable,
            args=("-m", "megagrid", "train", launch.recipe, *launch.overrides),
            max_restarts=launch.max_restarts,
            monitor_interval=LOOK_SECONDS,
            # As torchrun binds ranks to the memory next to their devices.
            numa_options=LaunchConfig(1, 1, launch.ranks, logs_specs=logs).numa_options,
        )
        try:
            with suppress(RendezvousClosedError):
                Agent(spec, logs, link, signals, config, presence).run()
        finally:
            presence.withdraw()


def _tell(launch: Launch, mistake: str) -> Verdict:
    """Let the other nodes hear of a mistake that this one has met before it had ranks."""
    if launch.most > 1:
        failure = Failure(-1, "", USER_MISTAKE, time.time(), mistake)
        link = _link(
            launch,
            Terms(fewest=launch.most, most=launch.most),
            first_word(launch.ranks, "", failures=(failure,)),
            patience=SECONDS_TO_TELL,
        )
        link.close(SECONDS_TO_TELL, everyone=True)
    return Verdict(USER_MISTAKE, mistake)


def _link(launch: Launch, terms: Terms, word: NodeWord, patience: float | None = None) -> Link:
    council = Council(terms) if launch.node == 0 else None
    patience = terms.seconds_to_meet if patience is None else patience
    return Link(launch.node, launch.rendezvous, word, council, patience)


def _refusal(config: Config, ranks: int) -> str | None:
    """Why the recipe doesn't go with so many."""
    try:
        check(config, ranks)
    except MegagridError as error:
        return str(error)
    return None


def _fingerprint(launch: Launch, config: Config) -> str:
    """Of all that has to be the same on every node."""
    options = f"{launch.fewest}:{launch.most} {launch.max_restarts}"
    return hashlib.sha256(f"{options}\n{dump(config)}".encode()).hexdigest()


if __name__ == "__main__":
    code = main(sys.argv[1:])
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # the link's thread may be waiting for a wire that is cut
