"""kill -9 at random moments, and what it costs: `python -m benchmarks.kills`.

A small run on local ranks saves every few steps. SIGKILL hits a rank, all ranks, the launcher or
everything at a random moment, most often inside a save; the run is started again with
checkpoint.resume=latest, until it has been killed often enough and may end:

    start … 2 4 [6 X   start … 6 [8 X   start … X   start … 6 8 10 … end
                 kill             kill          kill
    number  a step that was saved         [  a save began         X  SIGKILL

    after each kill   every process of the run ends without help; the newest checkpoint is sound and
                      no older than the one that was complete before the kill
    at the end        every step's loss, norm, rate and samples, and every byte of the last
                      checkpoint, are those of a run that was left alone
"""

from __future__ import annotations

import argparse
import contextlib
import os
import random
import re
import signal
import statistics
import subprocess
import sys
import time
import uuid
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from benchmarks import reporting
from benchmarks.peers.launch import environment as run_environment
from benchmarks.peers.launch import has_line, marked, stop, tail
from benchmarks.peers.spec import Layout
from megagrid.checkpoint import CHECKPOINTS, find_checkpoint
from megagrid.checkpoint.folders import PARTIAL, is_step_name
from megagrid.config.dump import dump
from megagrid.config.rules import check
from megagrid.config.schema import Config
from megagrid.errors import MegagridError
from megagrid.train.metrics import read_records

POLL_SECONDS = 0.001
"""A save of so small a model takes some tens of milliseconds."""

PATIENCE_SECONDS = 120.0
"""In which every process of a killed run has to be gone. Far beyond the 30 s that torchrun gives
ranks to end before it kills them."""

LAYOUT = Layout(pp=2, dp=2)

MODES = {
    "at once": ("checkpoint.async_save=false",),
    "behind": ("checkpoint.async_save=true",),
}
"""Way of saving -> what it adds to the command."""

COMPUTED = (
    "step",
    "loss",
    "grad_norm",
    "lr",
    "valid_tokens",
    "consumed_tokens",
    "consumed_samples",
    "sample_ids",
    "valid_loss",
)
"""Keys of a step's record that no clock has a say in."""

OF_THE_FOLDER = ("config.toml", "manifest.json")
"""Files of a checkpoint that name the run's folder, or sum up one that does."""


class KillsError(Exception):
    """Something was lost, left behind or never came; the message says what."""


@dataclass(frozen=True)
class Strike:
    """A kill to come. All but the clock is drawn before the run.

    Attributes:
        moment, victim, mode: names in `MOMENTS`, `VICTIMS` and `MODES`.
        after: saves that the life completes before.
        fraction: how far into the moment, 0 to 1.
        rank: which one, if it is one.
    """

    moment: str
    victim: str
    mode: str
    after: int
    fraction: float
    rank: int


@dataclass(frozen=True)
class Setting:
    """The run and its kills."""

    layout: Layout = LAYOUT
    kills: int = 25
    seed: int = 1
    save_interval: int = 2
    modes: tuple[str, ...] = tuple(MODES)
    hidden: int = 128

    @cached_property
    def strikes(self) -> list[Strike]:
        """Saves are hit most, and what ends a rank most often ends one."""
        rng = random.Random(self.seed)
        return [
            Strike(
                moment=rng.choices(list(MOMENTS), [moment.weight for moment in MOMENTS.values()])[
                    0
                ],
                victim=rng.choice(list(VICTIMS)),
                mode=rng.choice(self.modes),
                after=rng.choice((0, 1, 1, 2)),
                fraction=rng.random(),
                rank=rng.randrange(self.layout.world_size),
            )
            for _ in range(self.kills)
        ]

    @property
    def steps(self) -> int:
        """Enough for the run not to end before its last kill: but for a few, a life completes at
        most one save more than it waits for."""
        return self.save_interval * (4 + sum(strike.after + 1 for strike in self.strikes))

    @property
    def config(self) -> Config:
        """The recipe: with keep_last, so that kills hit the removal of old checkpoints too."""
        config = Config(
            model={
                "num_layers": 4,
                "hidden_size": self.hidden,
                "ffn_hidden_size": 2 * self.hidden,
                "num_heads": 8,
                "num_kv_heads": 2,
                "head_dim": self.hidden // 8,
                "vocab_size": 1021,
                "max_seq_length": 32,
            },
            parallel={
                "tensor_parallel_size": self.layout.tp,
                "pipeline_parallel_size": self.layout.pp,
                "data_parallel_size": self.layout.dp,
            },
            train={
                "seq_length": 32,
                "micro_batch_size": 1,
                "global_batch_size": self.layout.pp * self.layout.dp,
                "steps": self.steps,
                "device": "cpu",
            },
            data={"paths": ["synthetic"], "valid_fraction": 0.0},
            checkpoint={
                "save_interval": self.save_interval,
                "keep_last": 2,
                "resume": "latest",
            },
            logging={"run_dir": "stated by the command"},
        )
        check(config, self.layout.world_size)
        return config


@dataclass(frozen=True)
class Kill:
    """What a strike has done.

    Attributes:
        victim: that of the strike, or the launcher where it had started no rank yet.
        during_save: a save was going on at the moment of the kill.
        left: folders of unfinished saves and removals that the dead run has left.
        complete_step: of the newest complete checkpoint at the moment of the kill; 0: none.
        found_step: of the sound one that the next life begins with; 0: none.
        steps_lost: that had been recorded in this life and have to be made again.
        seconds_to_end: from the kill to the end of the last process.
    """

    strike: Strike
    victim: str
    during_save: bool
    left: list[str]
    complete_step: int
    found_step: int
    steps_lost: int
    seconds_to_end: float


# ------------------------------------------------------------------------------------------------
# A run's folder


@dataclass(frozen=True)
class RunFolder:
    """What a run leaves on the disk, dead or alive."""

    path: Path

    @property
    def metrics(self) -> Path:
        return self.path / "metrics.jsonl"

    @property
    def checkpoints(self) -> Path:
        return self.path / CHECKPOINTS

    def names(self) -> list[str]:
        try:
            return sorted(os.listdir(self.checkpoints))
        except FileNotFoundError:
            return []

    @property
    def complete_step(self) -> int:
        """Of the newest checkpoint that has its final name; 0 without one."""
        steps = [int(found[1]) for name in self.names() if (found := re.fullmatch(STEP, name))]
        return max(steps, default=0)

    def unfinished(self) -> set[tuple[str, int]]:
        """Folders of checkpoints that are on their way in or out: name, and when it last changed.

        What a dead run has left lies there, unchanged, until the next save.
        """
        found = set()
        for name in self.names():
            if is_step_name(name) and Path(name).suffix:
                with contextlib.suppress(FileNotFoundError):
                    found.add((name, (self.checkpoints / name).stat().st_ctime_ns))
        return found

    def sound_step(self) -> int:
        """Of the checkpoint that a run would go on from; 0 without one.

        Raises:
            KillsError: a newer one isn't sound, which a killed process is no excuse for.
        """
        try:
            found = find_checkpoint("latest", self.checkpoints)
        except MegagridError as error:
            raise KillsError(f"nothing to go on from: {error}") from None
        if found is None:
            return 0
        if found.skipped:
            raise KillsError(f"torn: {'; '.join(found.skipped)}")
        return int(re.match(STEP, found.path.name)[1])

    def records(self) -> list[dict[str, Any]]:
        """What was computed in each step."""
        if not self.metrics.exists():
            return []
        return [{key: getattr(r, key) for key in COMPUTED} for r in read_records(self.metrics)]

    def written_at(self) -> int:
        """When the records last changed, in the file system's nanoseconds."""
        return self.metrics.stat().st_mtime_ns if self.metrics.exists() else 0


STEP = r"step-(\d+)"


def differences(found: RunFolder, expected: RunFolder) -> list[str]:
    """One line for each way in which a run isn't, bit by bit, the other one."""
    ours, theirs = found.records(), expected.records()
    lines = [f"records of {len(ours)} steps, not {len(theirs)}"] if len(ours) != len(theirs) else []
    for our, their in zip(ours, theirs, strict=False):
        if our != their:
            lines.append(f"step {their['step']}: {our}, not {their}")
            break  # those after it follow from it
    return lines + _different_files(found, expected)


def _different_files(found: RunFolder, expected: RunFolder) -> list[str]:
    """The same of the files in the last checkpoint."""
    last = f"step-{expected.complete_step:08}"
    ours, theirs = found.checkpoints / last, expected.checkpoints / last
    names = {path.name for folder in (ours, theirs) for path in folder.glob("*")}
    return [
        f"{last}/{name} is another file"
        for name in sorted(names - set(OF_THE_FOLDER))
        if _content(ours / name) != _content(theirs / name)
    ]


def _content(path: Path) -> bytes | None:
    return path.read_bytes() if path.exists() else None


# ------------------------------------------------------------------------------------------------
# A life: one start of the command, until it ends


class Life:
    """The processes of one start of the run.

    Args:
        folder: of the benchmark: recipe, outputs, temporary files.
        mode: see `MODES`.
    """

    def __init__(self, folder: Path, run: RunFolder, mode: str, name: str) -> None:
        self.run = run
        self.log = folder / f"{name}.log"
        self.mark = uuid.uuid4().hex
        self.first_step = run.complete_step
        self._left_by_others = run.unfinished()
        self.records_at = run.written_at()
        temporary = folder / "temporary"  # what a killed launcher leaves in it goes with the folder
        temporary.mkdir(exist_ok=True)
        recipe = [str(folder / "recipe.toml"), f"logging.run_dir={run.path}"]
        self.began = time.monotonic()
        with self.log.open("w") as output:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "megagrid", "train", *recipe, *MODES[mode]],
                env=run_environment(self.mark, threads=1) | {"TMPDIR": str(temporary)},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def unfinished(self) -> list[str]:
        """Folders that this life has begun to write, or to remove."""
        return sorted(name for name, _ in self.run.unfinished() - self._left_by_others)

    @property
    def is_saving(self) -> bool:
        return any(name.endswith(PARTIAL) for name in self.unfinished())

    def pids(self) -> list[int]:
        """All processes of this life: each carries its mark."""
        return [pid for pid, _ in marked(self.mark)]

    def ranks(self) -> list[int]:
        """Process ids of the ranks that there are, with what they may have started."""
        return [pid for pid, variables in marked(self.mark) if "RANK" in variables]

    def wait(self, event: Callable[[], bool], time_limit_s: float) -> None:
        """Until `event` is so.

        Raises:
            KillsError: the run has ended before, or the time has.
        """
        deadline = time.monotonic() + time_limit_s
        while not event():
            if self.process.poll() is not None:
                code = self.process.returncode
                raise KillsError(f"ended with {code} before it was killed\n{tail(self.log)}")
            if time.monotonic() > deadline:
                raise KillsError(f"nothing came in {time_limit_s:g} s\n{tail(self.log)}")
            time.sleep(POLL_SECONDS)

    def wait_for_end(self, time_limit_s: float) -> float:
        """Until no process of it is left; the seconds that took.

        Raises:
            KillsError: some are left.
        """
        asked = time.monotonic()
        while self.process.poll() is None or self.pids():
            if time.monotonic() - asked > time_limit_s:
                left = [Path(f"/proc/{pid}/cmdline").read_text() for pid in self.pids()]
                commands = "; ".join(command.replace("\0", " ") for command in left)
                raise KillsError(f"left behind {time_limit_s:g} s after the kill: {commands}")
            time.sleep(0.05)
        return time.monotonic() - asked

    def resumed_step(self) -> int | None:
        """The step that it said it goes on from; 0 for a fresh start, None before it has spoken.

        Raises:
            KillsError: it has passed a checkpoint over.
        """
        output = self.log.read_text(errors="replace")
        if passed_over := re.search(r"^passed over: .*", output, re.MULTILINE):
            raise KillsError(passed_over[0])
        if "no checkpoint yet" in output:
            return 0
        found = re.search(r"^resumed from .* at step (\d+)", output, re.MULTILINE)
        return int(found[1]) if found else None

    def close(self) -> None:
        """End whatever is left of it."""
        stop(self.process, self.mark)


def victims(life: Life, strike: Strike) -> tuple[str, list[int]]:
    """Whom the strike hits: the name in `VICTIMS`, and processes."""
    if strike.victim != "launcher" and (chosen := VICTIMS[strike.victim](life, strike)):
        return strike.victim, chosen
    return "launcher", VICTIMS["launcher"](life, strike)


VICTIMS: dict[str, Callable[[Life, Strike], list[int]]] = {
    "one rank": lambda life, strike: sorted(life.ranks())[strike.rank :][:1],
    "all ranks": lambda life, strike: life.ranks(),
    "launcher": lambda life, strike: [life.process.pid],
    "everything": lambda life, strike: life.pids(),
}


# ------------------------------------------------------------------------------------------------
# When


@dataclass(frozen=True)
class Pace:
    """Seconds that a run takes when it is left alone: to its first record, for a step, for a save.

    Attributes:
        save_s: from the first look at which a save had begun to one at which it had ended.
    """

    start_s: float
    step_s: float
    save_s: float


@dataclass(frozen=True)
class Moment:
    """A kind of moment.

    Attributes:
        weight: of all kills, how often.
        begins: whether the moment has begun, of a life and the saves that it completes before.
        seconds: how long it lasts, of the pace and the steps between saves.
    """

    weight: float
    begins: Callable[[Life, int], bool]
    seconds: Callable[[Pace, int], float]


MOMENTS = {
    # A little longer than a save lasts, for the renames and removals at its end.
    "save": Moment(
        0.65,
        lambda life, target: life.run.complete_step >= target and life.is_saving,
        lambda pace, interval: 1.2 * pace.save_s,
    ),
    "steps": Moment(
        0.2,
        lambda life, target: life.run.complete_step >= target,
        lambda pace, interval: interval * pace.step_s,
    ),
    "start": Moment(
        0.15,
        lambda life, target: True,
        lambda pace, interval: pace.start_s,
    ),
}


# ------------------------------------------------------------------------------------------------
# The whole of it


@dataclass(frozen=True)
class Outcome:
    """What has been seen of all kills; that nothing was lost is why there is one."""

    paces: dict[str, Pace]
    kills: list[Kill]

    @property
    def summary(self) -> dict[str, Any]:
        lost = Counter(kill.steps_lost for kill in self.kills)
        return {
            "kills": len(self.kills),
            "during_a_save": sum(kill.during_save for kill in self.kills),
            "left_unfinished": sum(bool(kill.left) for kill in self.kills),
            "steps_lost": {str(steps): lost[steps] for steps in sorted(lost)},
            "longest_seconds_to_end": max(kill.seconds_to_end for kill in self.kills),
        }


def harass(
    setting: Setting,
    folder: Path,
    time_limit_s: float = 600.0,
    say: Callable[[str], None] = lambda text: None,
) -> Outcome:
    """Let runs be, kill one again and again, and compare.

    Args:
        folder: an empty one, for all that the runs write.
        time_limit_s: of each life.

    Raises:
        KillsError: something was lost.
    """
    (folder / "recipe.toml").write_text(dump(setting.config), encoding="utf-8")
    paces: dict[str, Pace] = {}
    undisturbed = {
        mode: RunFolder(folder / f"undisturbed-{mode.replace(' ', '-')}") for mode in setting.modes
    }
    for mode, run in undisturbed.items():
        paces[mode] = leave_alone(folder, run, mode, time_limit_s)
        say(f"undisturbed, {mode}: {setting.steps} steps, {_phrase(paces[mode])}")
    expected = undisturbed[setting.modes[0]]
    run = RunFolder(folder / "killed")
    kills: list[Kill] = []
    for number, strike in enumerate(setting.strikes, start=1):
        with _life(folder, run, strike.mode, f"life-{number}") as life:
            kills.append(_kill(life, strike, paces[strike.mode], setting, time_limit_s))
        say(f"{number:>3}: {_line(kills[-1])}")
    leave_alone(folder, run, setting.modes[-1], time_limit_s)
    for other in (run, *undisturbed.values()):
        if lines := differences(other, expected):
            raise KillsError(f"{other.path.name} isn't {expected.path.name}: {'; '.join(lines)}")
    return Outcome(paces, kills)


@contextlib.contextmanager
def _life(folder: Path, run: RunFolder, mode: str, name: str) -> Iterator[Life]:
    life = Life(folder, run, mode, name)
    try:
        yield life
        resumed = life.resumed_step()
        if resumed not in (None, life.first_step):
            raise KillsError(f"resumed at step {resumed} instead of {life.first_step}")
    except KillsError as error:
        raise KillsError(f"{name}: {error}") from None
    finally:
        life.close()


def leave_alone(folder: Path, run: RunFolder, mode: str, time_limit_s: float) -> Pace:
    """Let the run go on to its end; its pace.

    Raises:
        KillsError: it doesn't end well.
    """
    saves: list[float] = []
    first_record = began = None
    with _life(folder, run, mode, f"{run.path.name}-to-the-end") as life:
        while life.process.poll() is None:
            now = time.monotonic()
            if first_record is None and has_line(run.metrics):
                first_record = now - life.began
            if life.is_saving:
                began = began or now
            elif began:
                saves.append(now - began)
                began = None
            if now - life.began > time_limit_s:
                raise KillsError(f"no end in {time_limit_s:g} s\n{tail(life.log)}")
            time.sleep(POLL_SECONDS)
        if life.process.returncode:
            raise KillsError(f"ended with {life.process.returncode}\n{tail(life.log)}")
        life.wait_for_end(PATIENCE_SECONDS)
    steps = [record.step_time_s for record in read_records(run.metrics)]
    return Pace(first_record or 0.0, statistics.median(steps), statistics.median(saves or [0.0]))


def _kill(life: Life, strike: Strike, pace: Pace, setting: Setting, time_limit_s: float) -> Kill:
    """Wait for the moment, kill, and look at what is left."""
    moment = MOMENTS[strike.moment]
    target = life.first_step + strike.after * setting.save_interval
    life.wait(lambda: moment.begins(life, target), time_limit_s)
    time.sleep(strike.fraction * moment.seconds(pace, setting.save_interval))
    name, pids = victims(life, strike)
    during_save, complete_step = life.is_saving, life.run.complete_step
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    seconds = life.wait_for_end(PATIENCE_SECONDS)
    found_step = life.run.sound_step()
    if found_step < complete_step:
        raise KillsError(f"step {complete_step} was saved, and only {found_step} is left")
    return Kill(
        strike=strike,
        victim=name,
        during_save=during_save,
        left=life.unfinished(),
        complete_step=complete_step,
        found_step=found_step,
        steps_lost=_steps_lost(life, found_step),
        seconds_to_end=seconds,
    )


def _steps_lost(life: Life, found_step: int) -> int:
    """Steps of this life that have to be made again."""
    if life.run.written_at() == life.records_at:
        return 0  # it has made none: what is recorded was lost by an earlier life
    return max(0, len(life.run.records()) - found_step)


# ------------------------------------------------------------------------------------------------
# What is printed and written


def _phrase(pace: Pace) -> str:
    return (
        f"first one after {pace.start_s:.1f} s, {pace.step_s * 1000:.0f} ms each, "
        f"{pace.save_s * 1000:.0f} ms a save"
    )


def _line(kill: Kill) -> str:
    left = f", left {', '.join(kill.left)}" if kill.left else ""
    return (
        f"{kill.victim}, {'in a save' if kill.during_save else 'outside saves'}"
        f" ({kill.strike.mode}){left}; {kill.steps_lost} steps lost, goes on from "
        f"{kill.found_step}, all gone in {kill.seconds_to_end:.1f} s"
    )


def markdown(setting: Setting, outcome: Outcome) -> str:
    """The summary, and a row for each kill."""
    summary = outcome.summary
    lost = ", ".join(f"{steps}: {count}" for steps, count in summary["steps_lost"].items())
    lines = [
        f"{summary['kills']} kills of a run of {setting.steps} steps on {setting.layout}, saved "
        f"every {setting.save_interval} steps ({', '.join(setting.modes)}), seed {setting.seed}.",
        "",
        f"- during a save: {summary['during_a_save']}; left something unfinished: "
        f"{summary['left_unfinished']}",
        f"- steps lost: kills: {lost}",
        f"- last process gone after at most {summary['longest_seconds_to_end']:.1f} s",
        "- every record and the last checkpoint: bit by bit those of a run that was left alone",
        "",
        "| kill | aimed at | victim | saves | during a save | left unfinished "
        "| complete | resumed from | steps lost | all gone, s |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for number, kill in enumerate(outcome.kills, start=1):
        lines.append(
            f"| {number} | {kill.strike.moment} | {kill.victim} | {kill.strike.mode} "
            f"| {'yes' if kill.during_save else 'no'} | {', '.join(kill.left) or '–'} "
            f"| {kill.complete_step} | {kill.found_step} | {kill.steps_lost} "
            f"| {kill.seconds_to_end:.1f} |"
        )
    return "\n".join(lines) + "\n"


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser("python -m benchmarks.kills", description=__doc__)
    add = parser.add_argument
    add("--kills", type=int, default=Setting.kills)
    add("--seed", type=int, default=Setting.seed, help="of moments and victims")
    add("--layout", type=Layout.parse, default=LAYOUT, help="of the ranks (pp2xdp2)")
    add("--save-interval", type=int, default=Setting.save_interval, metavar="STEPS")
    add("--modes", nargs="+", choices=MODES, default=list(MODES), help="ways of saving, drawn")
    add("--time-limit", type=float, default=600.0, metavar="S", help="of each life (600)")
    reporting.add_arguments(parser, keeps_work=True)
    return parser.parse_args(arguments)


def main() -> int:
    """Kill, print, write."""
    options = parse()
    setting = Setting(
        layout=options.layout,
        kills=options.kills,
        seed=options.seed,
        save_interval=options.save_interval,
        modes=tuple(options.modes),
    )
    load = os.getloadavg()[0]
    with reporting.work_folder(options.work, "kills") as folder:
        try:
            outcome = harass(
                setting, folder, options.time_limit, lambda text: print(text, flush=True)
            )
        except KillsError as problem:
            print(f"error: {problem}", file=sys.stderr)
            return 1
    text = markdown(setting, outcome)
    print(f"\n{text}")
    content = {
        "setting": asdict(setting) | {"steps": setting.steps},
        "load_before": load,
        "summary": outcome.summary,
        "paces": {mode: asdict(pace) for mode, pace in outcome.paces.items()},
        "kills": [asdict(kill) for kill in outcome.kills],
    }
    reporting.write(options.out, "kills", text, content)
    return 0


if __name__ == "__main__":
    sys.exit(main())
