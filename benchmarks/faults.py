"""Random faults, and what becomes of the jobs they hit: `python -m benchmarks.faults`.

Small runs on four ranks of one host, or of two hosts whose network is as slow as it wants to be
(`tools/network_hosts.sh`, which needs root), save every few steps. At random moments of theirs

    kill    SIGKILL to a rank, or to a launcher
    stop    SIGSTOP, after which a process ignores all but SIGKILL
    term    SIGTERM, which asks a run to save and stop
    cut     the cable of a host is pulled: nothing comes through, and nobody is told

hits them, and they are to go on: by themselves, where the launcher can restart ranks, or when they
are started again, where they have ended. Each run meets a few faults and is then let be.

    after each fault  within 60 s after train.timeout_seconds the run makes steps again, or all of
                      its processes have ended, but for a launcher that stands still, which whoever
                      has started it is to kill; no step is lost but those since the last
                      checkpoint, and none where a stop was asked for; a rank or node that has ended
                      or restarted the run is named
    at the end        no process is left, every step's loss, norm, rate and samples and every byte
                      of the last checkpoint are those of a run that was left alone
"""

from __future__ import annotations

import argparse
import contextlib
import os
import random
import re
import signal
import subprocess
import sys
import time
import uuid
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks import reporting
from benchmarks.hosts import NetworkHosts, why_no_hosts
from benchmarks.kills import KillsError, RunFolder, differences
from benchmarks.kills import Setting as KillsSetting
from benchmarks.peers.launch import environment as run_environment
from benchmarks.peers.launch import marked, tail
from benchmarks.peers.spec import Layout
from megagrid.config.dump import dump
from megagrid.exit_codes import STOPPED

GRIDS = tuple(map(Layout.parse, ("tp2xpp2", "pp2xdp2", "tp2xdp2", "dp4", "pp4")))
"""Of four ranks. A tp group lies in one of two hosts of two."""

TIMEOUT_SECONDS = 10.0
"""`train.timeout_seconds` of the runs."""

BOUND_SECONDS = TIMEOUT_SECONDS + 60.0
"""From a fault until the job makes steps again, or has ended."""

SAVE_INTERVAL = 2
ENDLESS = 10**6
"""Steps of a run that is still to meet faults: how many it makes until it has, chance decides."""

PORT = 29500
POLL_SECONDS = 0.02

START = re.compile(r"^(?:no checkpoint yet|resumed from .* at step (\d+))", re.MULTILINE)
STEP_ROW = re.compile(r"^ +\d+ +\d+% ", re.MULTILINE)
"""What the first rank prints when it begins, and for each step."""

SIGNALS = {"kill": signal.SIGKILL, "stop": signal.SIGSTOP, "term": signal.SIGTERM}
KINDS = (*SIGNALS, "cut")


class FaultsError(Exception):
    """A job hung, lost something or left something behind; the message says what."""


@dataclass(frozen=True)
class Fault:
    """One to come. All but the clock is drawn before the run.

    Attributes:
        kind: one of `KINDS`.
        victim: "rank", "launcher" or "host".
        host: its number.
        place: which of a host's ranks, 0 to 1.
        after: steps that are recorded before, from the start of the ranks on.
        delay: seconds after the last of them.
    """

    kind: str
    victim: str
    host: int
    place: float
    after: int
    delay: float


@dataclass(frozen=True)
class Campaign:
    """One run, and the faults that it meets."""

    layout: Layout
    hosts: int
    faults: tuple[Fault, ...]

    @property
    def ranks_per_host(self) -> int:
        return self.layout.world_size // self.hosts

    def __str__(self) -> str:
        return f"{self.layout} on {self.hosts} host{'s' * (self.hosts > 1)}"


@dataclass(frozen=True)
class Setting:
    """All runs, and all faults.

    Attributes:
        kinds: of faults that are drawn; a cable can only be pulled between two hosts.
        hosts: numbers of hosts, in turn.
    """

    faults: int = 100
    per_run: int = 5
    seed: int = 1
    grids: tuple[Layout, ...] = GRIDS
    hosts: tuple[int, ...] = (1, 2)
    kinds: tuple[str, ...] = KINDS

    @cached_property
    def campaigns(self) -> list[Campaign]:
        rng = random.Random(self.seed)
        found, left, number = [], self.faults, 0
        while left > 0:
            hosts = self.hosts[number % len(self.hosts)]
            layout = self.grids[(number // len(self.hosts)) % len(self.grids)]
            faults = tuple(self._draw(rng, hosts) for _ in range(min(self.per_run, left)))
            found.append(Campaign(layout, hosts, faults))
            left, number = left - len(faults), number + 1
        return found

    def _draw(self, rng: random.Random, hosts: int) -> Fault:
        kind = rng.choice([kind for kind in self.kinds if hosts > 1 or kind != "cut"])
        victim = "host" if kind == "cut" else rng.choice(("rank", "rank", "launcher"))
        return Fault(
            kind=kind,
            victim=victim,
            host=rng.randrange(hosts),
            place=rng.random(),
            after=rng.randrange(1, 2 * SAVE_INTERVAL + 1),
            delay=0.3 * rng.random(),
        )


class Victim(NamedTuple):
    """What a fault has hit.

    Attributes:
        pid: the process; None for a host.
        name: what the launcher's last word must have of it where it has ended or restarted the
            job; "" where that is of the ranks' or of nobody's.
    """

    pid: int | None
    name: str = ""


@dataclass(frozen=True)
class Outcome:
    """What became of a job that met a fault.

    Attributes:
        how: "restarted" its ranks by itself, "saved" the run and stopped, "ended", or "went on" as
            if nothing were.
        complete_step: of the newest complete checkpoint at the moment of the fault; 0: none.
        resumed_step: of the one that it went on from; the same where it went on.
        steps_lost: that had been recorded and were made again.
        seconds: until it made a step again, or its last process had ended.
        told: why, in the launcher's last line.
    """

    fault: Fault
    how: str
    complete_step: int
    resumed_step: int
    steps_lost: int
    seconds: float
    told: str


# ------------------------------------------------------------------------------------------------
# A job: one start of the command on each host, until all of it has ended


class Job:
    """The launchers of a start, and the ranks that they start.

    Args:
        folder: of the campaign: recipe and outputs.
        hosts: that it runs on; None for this machine alone.
        steps: of the run.
    """

    def __init__(
        self,
        folder: Path,
        run: RunFolder,
        campaign: Campaign,
        hosts: NetworkHosts | None,
        name: str,
        steps: int = ENDLESS,
    ) -> None:
        self.run = run
        self.campaign = campaign
        self.mark = uuid.uuid4().hex
        self.logs = [folder / f"{name}-{host}.log" for host in range(campaign.hosts)]
        self._hosts = hosts
        restarts = str(len(campaign.faults))
        self._command = [sys.executable, "-m", "megagrid", "train", str(folder / "recipe.toml")]
        self._command += [f"logging.run_dir={run.path}", f"train.steps={steps}"]
        self._command += ["--max-restarts", restarts]
        self.launchers = [self._start(host, folder) for host in range(campaign.hosts)]

    def _start(self, host: int, folder: Path) -> subprocess.Popen[bytes]:
        temporary = folder / "temporary"  # what a killed launcher leaves in it goes with the folder
        temporary.mkdir(exist_ok=True)
        variables = run_environment(self.mark, threads=1) | {"TMPDIR": str(temporary)}
        command = self._command
        with self.logs[host].open("wb") as output:
            streams = dict(stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT)
            if self._hosts is None:
                return subprocess.Popen(command, env=variables, start_new_session=True, **streams)
            del variables["GLOO_SOCKET_IFNAME"]  # lo; between hosts ranks find the right one
            command = [
                *command,
                *("--nnodes", str(self.campaign.hosts), "--node-rank", str(host)),
                *("--nproc-per-node", str(self.campaign.ranks_per_host)),
                *("--rendezvous", f"{self._hosts.addresses[0]}:{PORT}"),
            ]
            return self._hosts.popen(self._hosts.names[host], command, env=variables, **streams)

    @property
    def output(self) -> str:
        """Of the first host, which speaks for all."""
        return self.logs[0].read_text(errors="replace")

    @property
    def resumes(self) -> list[int]:
        """The steps that its ranks have said they go on from, start by start; 0: afresh."""
        return [int(match[1] or 0) for match in START.finditer(self.output)]

    @property
    def has_made_steps(self) -> bool:
        """Whether the newest start of its ranks has: there is a row in the console's table."""
        output = self.output
        starts = [match.end() for match in START.finditer(output)]
        return bool(starts) and STEP_ROW.search(output, starts[-1]) is not None

    def ranks(self, host: int) -> list[Victim]:
        """Those of a host, in order."""
        launcher = self.launchers[host].pid
        found = {
            int(variables["RANK"]): pid
            for pid, variables in marked(self.mark)
            if "RANK" in variables and variables.get("MEGAGRID_LAUNCHER") == str(launcher)
            and os.getpgid(pid) == pid
        }  # fmt: skip
        return [Victim(found[rank], f"rank {rank} (") for rank in sorted(found)]

    def pids(self) -> set[int]:
        """All that is left of it, but for what has ended and waits for a stopped parent to look."""
        return {pid for pid, _ in marked(self.mark)}

    @property
    def has_ended(self) -> bool:
        return None not in self.codes() and not self.pids()

    def codes(self) -> list[int | None]:
        return [launcher.poll() for launcher in self.launchers]

    def tail(self) -> str:
        return "\n".join(tail(log, 15) for log in self.logs)

    def kill(self) -> None:
        """End whatever is left of it."""
        while not self.has_ended:
            for pid in self.pids():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(POLL_SECONDS)


def wait_for(event: Callable[[], bool], seconds: float) -> bool:
    """Whether `event` is so within that time."""
    deadline = time.monotonic() + seconds
    while not event():
        if time.monotonic() > deadline:
            return False
        time.sleep(POLL_SECONDS)
    return True


# ------------------------------------------------------------------------------------------------
# A campaign


class Harassment:
    """A run that meets the faults of a campaign, one after the other.

    Args:
        time_limit_s: of each wait that isn't for a fault's consequences.
    """

    def __init__(
        self,
        campaign: Campaign,
        folder: Path,
        hosts: NetworkHosts | None,
        time_limit_s: float,
        say: Callable[[str], None],
    ) -> None:
        self._campaign = campaign
        self._folder = folder
        self._hosts = hosts
        self._time_limit_s = time_limit_s
        self._say = say
        self._run = RunFolder(folder / "run")
        self._jobs = 0
        self._job = self._begin()

    def meet_all(self) -> Iterator[Outcome]:
        """The outcome of each fault; then the run is let be, to its end.

        Raises:
            FaultsError: something was lost, left behind, or never came.
        """
        try:
            for fault in self._campaign.faults:
                yield self._meet(fault)
                if self._job.has_ended:
                    self._job = self._begin()
            self._end()
        except (FaultsError, KillsError) as error:
            raise FaultsError(f"{self._campaign}: {error}\n{self._job.tail()}") from None
        finally:
            self._job.kill()

    def _begin(self, steps: int = ENDLESS) -> Job:
        self._jobs += 1
        name = f"job-{self._jobs}"
        return Job(self._folder, self._run, self._campaign, self._hosts, name, steps)

    def _end(self) -> None:
        """Stop the run, and let it make its last steps in peace."""
        self._wait_for_steps(1)
        self._job.launchers[0].terminate()
        self._expect(STOPPED)
        self._job = self._begin(self._run.complete_step + SAVE_INTERVAL)
        self._expect(0)

    def _expect(self, code: int) -> None:
        if not wait_for(lambda: self._job.has_ended, self._time_limit_s):
            raise FaultsError(f"no end in {self._time_limit_s:g} s")
        if set(self._job.codes()) != {code}:
            raise FaultsError(f"let be, the run ended with {self._job.codes()}, not {code}")

    def _meet(self, fault: Fault) -> Outcome:
        job, run = self._job, self._run
        self._wait_for_steps(fault.after)
        time.sleep(fault.delay)
        starts, complete, steps = len(job.resumes), run.complete_step, len(run.records())
        victim = self._strike(fault)
        began = time.monotonic()
        how = self._wait_for_consequences(fault, victim.pid, starts, steps)
        seconds = time.monotonic() - began
        lost = 0
        resumed = run.sound_step() if how in ("ended", "saved") else job.resumes[-1]
        if how != "went on":
            if resumed < complete:
                raise FaultsError(f"{fault}: step {complete} was saved; it went on from {resumed}")
            lost = max(0, steps - resumed)
        if fault.kind == "term" and (how != "saved" or run.records()[resumed:]):
            raise FaultsError(f"{fault}: asked to stop, it {how} and has saved step {resumed}")
        told = self._told(how)
        if how in ("restarted", "ended") and victim.name not in told:
            raise FaultsError(f'{fault}: "{victim.name}" isn\'t named as the cause: "{told}"')
        return Outcome(fault, how, complete, resumed, lost, seconds, told)

    def _wait_for_steps(self, count: int) -> None:
        """Until the ranks of the newest start have recorded so many."""
        job, run = self._job, self._run

        def is_so() -> bool:
            if job.codes().count(None) < len(job.launchers):
                raise FaultsError(f"ended with {job.codes()} before it met its fault")
            # Records of lost steps are gone before the first is made again.
            return job.has_made_steps and len(run.records()) >= job.resumes[-1] + count

        if not wait_for(is_so, self._time_limit_s):
            raise FaultsError(f"no {count} steps in {self._time_limit_s:g} s")

    def _strike(self, fault: Fault) -> Victim:
        """Let it happen."""
        job = self._job
        if fault.kind == "cut":
            self._hosts.cut(self._hosts.names[fault.host])
            return Victim(None, "node 1 (")  # to the first host the other is gone in any case
        if fault.victim == "rank":
            ranks = job.ranks(fault.host)
            victim = ranks[int(fault.place * len(ranks))]
        else:
            victim = Victim(job.launchers[fault.host].pid, "node 1 (" if fault.host else "")
        os.kill(victim.pid, SIGNALS[fault.kind])
        return victim

    def _wait_for_consequences(
        self, fault: Fault, victim: int | None, starts: int, steps: int
    ) -> str:
        """What becomes of the job. A launcher that was stopped can't end by itself: whoever has
        started it is the one to kill it, once all else has ended."""
        job, run = self._job, self._run
        is_stopped_launcher = fault.kind == "stop" and fault.victim == "launcher"
        how = ""

        def is_so() -> bool:
            nonlocal how
            if job.has_ended:
                how = "saved" if STOPPED in job.codes() else "ended"
            elif is_stopped_launcher and job.pids() == {victim}:
                os.kill(victim, signal.SIGKILL)
            elif len(job.resumes) > starts:
                how = "restarted" if job.has_made_steps else ""
            elif is_stopped_launcher and self._campaign.hosts == 1:
                how = "went on" if len(run.records()) >= steps + 2 else ""
            return bool(how)

        came = wait_for(is_so, BOUND_SECONDS)
        if how == "went on":
            os.kill(victim, signal.SIGCONT)
        if fault.kind == "cut":
            self._hosts.mend(self._hosts.names[fault.host])
        if not came:
            left = [Path(f"/proc/{pid}/cmdline").read_text() for pid in job.pids()]
            commands = "; ".join(command.replace("\0", " ") for command in left)
            raise FaultsError(
                f"{fault}: neither steps nor an end in {BOUND_SECONDS:g} s: {commands}"
            )
        return how

    def _told(self, how: str) -> str:
        """The last line of the launcher's own."""
        found = re.findall(r"^(?:warning|error): (.*)$", self._job.output, re.M)
        return found[-1] if found and how in ("restarted", "ended") else ""


def harass(
    setting: Setting,
    folder: Path,
    time_limit_s: float = 300.0,
    say: Callable[[str], None] = lambda text: None,
) -> list[tuple[Campaign, list[Outcome]]]:
    """Let all campaigns happen, and compare each run with one that was left alone.

    Args:
        folder: an empty one, for all that the runs write.

    Raises:
        FaultsError: something was lost, left behind, or never came.
    """
    found = []
    for number, campaign in enumerate(setting.campaigns, start=1):
        home = folder / f"campaign-{number}"
        home.mkdir()
        write_recipe(campaign, home)
        with contextlib.ExitStack() as stack:
            hosts = (
                stack.enter_context(NetworkHosts(campaign.hosts)) if campaign.hosts > 1 else None
            )
            say(str(campaign))
            outcomes = []
            for outcome in Harassment(campaign, home, hosts, time_limit_s, say).meet_all():
                outcomes.append(outcome)
                say(f"  {line(outcome)}")
        compare(campaign, home, time_limit_s)
        say("  equal to a run that was left alone, bit by bit")
        found.append((campaign, outcomes))
    return found


def write_recipe(campaign: Campaign, folder: Path) -> None:
    """The run of `benchmarks.kills` on the campaign's grid, whatever its length the same."""
    config = KillsSetting(
        layout=campaign.layout, kills=0, save_interval=SAVE_INTERVAL, hidden=64
    ).config
    train = config.train.model_copy(update={"timeout_seconds": TIMEOUT_SECONDS})
    rate = config.lr_schedule.model_copy(update={"kind": "constant", "warmup_steps": 0})
    text = dump(config.model_copy(update={"train": train, "lr_schedule": rate}))
    (folder / "recipe.toml").write_text(text, encoding="utf-8")


def compare(campaign: Campaign, folder: Path, time_limit_s: float) -> None:
    """
    Raises:
        FaultsError: the run isn't the one that it is if it is left alone.
    """
    run, alone = RunFolder(folder / "run"), RunFolder(folder / "undisturbed")
    quiet = Campaign(campaign.layout, 1, ())
    job = Job(folder, alone, quiet, None, "undisturbed", run.complete_step)
    try:
        if not wait_for(lambda: job.has_ended, time_limit_s) or any(job.codes()):
            raise FaultsError(f"left alone, it ended with {job.codes()}\n{job.tail()}")
    finally:
        job.kill()
    if lines := differences(run, alone):
        raise FaultsError(f"{campaign}: not the run that was left alone: {'; '.join(lines)}")


# ------------------------------------------------------------------------------------------------
# What is printed and written


def line(outcome: Outcome) -> str:
    fault = outcome.fault
    where = f"of host {fault.host}" if fault.victim != "host" else str(fault.host)
    told = f": {outcome.told}" if outcome.told else ""
    return (
        f"{fault.kind} {fault.victim} {where}: {outcome.how} in {outcome.seconds:.1f} s, "
        f"{outcome.steps_lost} steps lost, from {outcome.resumed_step}{told}"
    )


def summary(found: Sequence[tuple[Campaign, list[Outcome]]]) -> dict[str, Any]:
    outcomes = [outcome for _, some in found for outcome in some]
    kinds = Counter(f"{one.fault.kind} {one.fault.victim}" for one in outcomes)
    return {
        "faults": len(outcomes),
        "runs": len(found),
        "kinds": dict(sorted(kinds.items())),
        "outcomes": dict(sorted(Counter(one.how for one in outcomes).items())),
        "most_steps_lost": max((one.steps_lost for one in outcomes), default=0),
        "longest_seconds": max((one.seconds for one in outcomes), default=0.0),
        "bound_seconds": BOUND_SECONDS,
    }


def markdown(setting: Setting, found: Sequence[tuple[Campaign, list[Outcome]]]) -> str:
    """The summary, and a row for each fault."""
    facts = summary(found)
    counted = {
        name: ", ".join(f"{key}: {count}" for key, count in facts[name].items())
        for name in ("kinds", "outcomes")
    }
    rows = [
        f"| {campaign} | {one.fault.kind} | {one.fault.victim} {one.fault.host} | {one.how} "
        f"| {one.complete_step} | {one.resumed_step} | {one.steps_lost} | {one.seconds:.1f} |"
        for campaign, some in found
        for one in some
    ]
    return "\n".join(
        [
            f"{facts['faults']} faults of {facts['runs']} runs of four ranks, saved every "
            f"{SAVE_INTERVAL} steps, train.timeout_seconds={TIMEOUT_SECONDS:g}, "
            f"seed {setting.seed}.",
            "",
            f"- faults: {counted['kinds']}",
            f"- outcomes: {counted['outcomes']}",
            f"- steps lost: at most {facts['most_steps_lost']}, none that was in a checkpoint, and "
            "none where a stop was asked for",
            f"- steps again, or the last process gone, after at most "
            f"{facts['longest_seconds']:.1f} s (bound: {BOUND_SECONDS:g})",
            "- each rank or node that ended or restarted a run was named by its first launcher",
            "- a launcher that stood still was killed once all else had ended",
            "- every run: bit by bit, in records and last checkpoint, one that was left alone",
            "",
            "| run | fault | victim, host | outcome | complete | went on from | steps lost | s |",
            "|---|---|---|---|---|---|---|---|",
            *rows,
            "",
        ]
    )


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser("python -m benchmarks.faults", description=__doc__)
    add = parser.add_argument
    add("--faults", type=int, default=Setting.faults)
    add("--per-run", type=int, default=Setting.per_run, help="faults that a run meets (5)")
    add("--seed", type=int, default=Setting.seed, help="of kinds, victims and moments")
    add("--grids", nargs="+", type=Layout.parse, default=list(GRIDS), help="of four ranks, in turn")
    add("--hosts", nargs="+", type=int, choices=(1, 2), help="in turn (1 2; 1 where 2 can't be)")
    add("--kinds", nargs="+", choices=KINDS, default=list(KINDS), help="of faults")
    add("--time-limit", type=float, default=300.0, metavar="S", help="of each start (300)")
    reporting.add_arguments(parser, keeps_work=True)
    return parser.parse_args(arguments)


def main() -> int:
    """Let faults happen, print, write."""
    options = parse()
    hosts = options.hosts or [1, 2]
    if 2 in hosts and (reason := why_no_hosts()):
        print(f"on one host alone: {reason}", file=sys.stderr)
        hosts = [1]
    setting = Setting(
        faults=options.faults,
        per_run=options.per_run,
        seed=options.seed,
        grids=tuple(options.grids),
        hosts=tuple(hosts),
        kinds=tuple(options.kinds),
    )
    load = os.getloadavg()[0]
    with reporting.work_folder(options.work, "faults") as folder:
        try:
            found = harass(
                setting, folder, options.time_limit, lambda text: print(text, flush=True)
            )
        except FaultsError as problem:
            print(f"error: {problem}", file=sys.stderr)
            return 1
    text = markdown(setting, found)
    print(f"\n{text}")
    content = {
        "setting": asdict(setting),
        "load_before": load,
        "summary": summary(found),
        "runs": [
            {"run": str(campaign), "outcomes": [asdict(one) for one in some]}
            for campaign, some in found
        ],
    }
    reporting.write(options.out, "faults", text, content)
    return 0


if __name__ == "__main__":
    sys.exit(main())
