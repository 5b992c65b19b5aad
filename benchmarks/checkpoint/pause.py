"""What a save costs the training: made at once, and made behind it, in turns.

    train, saving at once | train, saving behind | train, saving at once | …

All figures are what the trainer itself reports, in saves.jsonl and metrics.jsonl.
"""

from __future__ import annotations

import os
import shutil
import statistics
import subprocess
import sys
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.checkpoint import throughput
from benchmarks.peers.launch import environment as run_environment
from megagrid.config.dump import dump
from megagrid.config.schema import Config
from megagrid.train.metrics import SaveRecord, read_records

MODES = {"at once": False, "behind": True}
"""Way of saving -> checkpoint.async_save."""


@dataclass(frozen=True)
class Setting:
    """The runs.

    Attributes:
        model: what is trained and saved, on so many ranks.
        steps, interval: of a run, and between its saves. The last one doesn't count: nothing is
            left to be held up.
        rounds: turns of each mode.
    """

    model: throughput.Setting
    steps: int = 24
    interval: int = 6
    rounds: int = 2

    def recipe(self, run: Path, mode: str) -> Config:
        """The run in `run`."""
        config = self.model.config
        return config.model_copy(
            update={
                "train": config.train.model_copy(update={"steps": self.steps}),
                "checkpoint": config.checkpoint.model_copy(
                    update={
                        "save_interval": self.interval,
                        "keep_last": 1,
                        "async_save": MODES[mode],
                    }
                ),
                "logging": config.logging.model_copy(update={"run_dir": str(run)}),
            }
        )


@dataclass(frozen=True)
class Turn:
    """One run.

    Attributes:
        pause_s, save_s: of each save, what it cost the training and how long it took.
        step_s: of each step, without the pauses.
        load_before: load average over the minute before.
    """

    mode: str
    round: int
    bytes: int
    pause_s: list[float]
    save_s: list[float]
    step_s: list[float]
    load_before: float

    @property
    def training_s(self) -> float:
        """Steps, and what saves held them up."""
        return sum(self.step_s) + sum(self.pause_s)


def take_turns(setting: Setting, disk: Path, time_limit_s: float) -> list[Turn]:
    """Make all runs.

    Raises:
        subprocess.SubprocessError: one failed, or took too long.
    """
    return [
        _turn(setting, disk / f"{mode.replace(' ', '-')}-{number}", mode, number, time_limit_s)
        for number in range(setting.rounds)
        for mode in MODES
    ]


def _turn(setting: Setting, run: Path, mode: str, number: int, time_limit_s: float) -> Turn:
    load = os.getloadavg()[0]
    recipe = run.with_suffix(".toml")
    recipe.write_text(dump(setting.recipe(run, mode)), encoding="utf-8")
    threads = max(1, (os.cpu_count() or 1) // setting.model.ranks)
    subprocess.run(
        [sys.executable, "-m", "megagrid", "train", str(recipe)],
        env=run_environment(uuid.uuid4().hex, threads),
        stdout=subprocess.DEVNULL,
        check=True,
        timeout=time_limit_s,
    )
    saves = [
        save for save in read_records(run / "saves.jsonl", SaveRecord) if save.step < setting.steps
    ]
    turn = Turn(
        mode=mode,
        round=number,
        bytes=saves[0].bytes,
        pause_s=[save.pause_s for save in saves],
        save_s=[save.seconds for save in saves],
        step_s=[record.step_time_s for record in read_records(run / "metrics.jsonl")],
        load_before=load,
    )
    shutil.rmtree(run)
    return turn


def ratios(turns: Sequence[Turn], of: str) -> list[float]:
    """Behind over at once, round by round: of the median pause, or of the whole training."""
    values = {
        (turn.mode, turn.round): statistics.median(turn.pause_s)
        if of == "pause"
        else turn.training_s
        for turn in turns
    }
    rounds = sorted({turn.round for turn in turns})
    return [values["behind", number] / values["at once", number] for number in rounds]


def markdown(turns: Sequence[Turn]) -> str:
    """A row for each mode, and below them the ratios."""
    lines = [
        "| saved | MB | pause, s (range) | save, s | step, s | steps and pauses, s, by round |",
        "|---|---|---|---|---|---|",
    ]
    for mode in MODES:
        mine = [turn for turn in turns if turn.mode == mode]
        pauses = [pause for turn in mine for pause in turn.pause_s]
        cells = [
            mode,
            f"{mine[0].bytes / 1e6:.0f}",
            f"{statistics.median(pauses):.3f} ({min(pauses):.3f}–{max(pauses):.3f})",
            f"{statistics.median(s for turn in mine for s in turn.save_s):.2f}",
            f"{statistics.median(s for turn in mine for s in turn.step_s):.3f}",
            " ".join(f"{turn.training_s:.1f}" for turn in mine),
        ]
        lines.append("| " + " | ".join(cells) + " |")
    for of, what in (("pause", "pause"), ("training", "steps and pauses")):
        found = " ".join(f"{value:.3f}" for value in ratios(turns, of))
        lines += ["", f"{what}, behind / at once, by round: {found}"]
    return "\n".join(lines) + "\n"
