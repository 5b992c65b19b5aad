"""Processes that end, stop or don't, as the launcher of a node sees them."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from megagrid.errors import CheckpointError
from megagrid.exit_codes import PEER_LOST
from megagrid.grid import bootstrap
from megagrid.grid.placement import Coordinate
from megagrid.health.beat import COMPUTING, Beat, Doing, End
from megagrid.launcher.launch import record_mistake
from megagrid.launcher.rounds import STOOD_STILL
from megagrid.launcher.watch import LOOK_SECONDS, LOOKS_AT_STATES, RankWatch

SLEEP = ["sleep", "60"]
STUBBORN = [sys.executable, "-c", "import signal; signal.signal(15, signal.SIG_IGN); input()"]


class Watched:
    """Processes in place of ranks."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.processes: list[subprocess.Popen] = []

    def start(self, *commands: list[str], patience: float = 60.0) -> RankWatch:
        for command in commands:
            process = subprocess.Popen(command, stdin=subprocess.PIPE, start_new_session=True)
            self.processes.append(process)
        self.now = 0.0
        self.beats: list[Beat] = []
        self.left: list[Beat] = []
        return RankWatch(
            dict(enumerate(self.processes)),
            {rank: str(self.folder / f"{rank}.json") for rank in range(len(commands))},
            beats=lambda: self.beats,
            leave=self.left.append,
            who=lambda rank: f"rank {rank}",
            patience=patience,
            clock=lambda: self.now,
        )


@pytest.fixture
def watched(tmp_path: Path) -> Iterator[Watched]:
    found = Watched(tmp_path)
    yield found
    for process in found.processes:
        process.kill()
        process.wait()


def look_until(watch: RankWatch, seconds: float = 20.0) -> None:
    deadline = time.monotonic() + seconds
    while not watch.is_over:
        assert time.monotonic() < deadline
        watch.look()
        time.sleep(0.01)


def told(watch: RankWatch) -> list[tuple[int, int, str]]:
    return [(failure.rank, failure.code, failure.text) for failure in watch.failures]


@pytest.mark.parametrize(
    ("script", "code", "text"),
    [
        ("exit 0", 0, None),
        ("exit 1", 1, "ended with exit code 1; its traceback is above"),
        ("exit 3", 3, "was left alone, as it says above"),
        ("kill -9 $$", -9, "was ended by SIGKILL"),
        ("exit 2", 2, "rank 0 ended with exit code 2"),
    ],
)
def test_how_a_rank_ended_is_told_in_words(watched, script, code, text):
    watch = watched.start(["sh", "-c", script])
    look_until(watch)
    assert told(watch) == ([(0, code, text)] if code else [])


def test_a_mistake_is_told_as_the_rank_has_recorded_it(watched):
    record_mistake(CheckpointError("the disk\nis full"), str(watched.folder / "0.json"))
    (watched.folder / "1.json").write_text('{"message": {"mess')
    watch = watched.start(["sh", "-c", "exit 2"], ["sh", "-c", "exit 2"])
    look_until(watch)
    assert sorted(told(watch)) == [
        (0, 2, "the disk is full"),
        (1, 2, "rank 1 ended with exit code 2"),
    ]


def test_a_rank_goes_by_the_number_that_it_beats_with_and_says_whom_it_waited_for(watched):
    watch = watched.start(["sh", "-c", "kill -9 $$"], ["sh", "-c", "exit 3"])
    where = dict(world_size=2, host=bootstrap.host_name(), device="cpu", interval_s=1.0, step=1)
    when = dict(started=0.0, time=0.0, phase="training", phase_since=0.0)
    doing = Doing(COMPUTING, "", since=0.0)
    ends = (None, End("left alone", PEER_LOST, 0.0, "rank 0 waits for rank 1"))
    watched.beats = [
        Beat(rank=1 - number, coordinate=Coordinate(0, 0, 0, 1 - number), pid=process.pid,
             doing=doing, end=ends[number], **where, **when)
        for number, process in enumerate(watched.processes)
    ]  # fmt: skip
    look_until(watch)
    found = {failure.code: (failure.who, failure.text) for failure in watch.failures}
    who = f"rank 1 (pp0 dp0 cp0 tp1, {bootstrap.host_name()})"
    assert found == {
        -9: (who, "was ended by SIGKILL"),
        PEER_LOST: ("", "rank 0 waits for rank 1"),
    }
    (left,) = watched.left  # in the name of the one that couldn't
    assert (left.rank, left.end.code, left.end.line) == (1, -9, "was ended by SIGKILL")


def test_ranks_that_do_not_end_when_asked_are_killed_after_a_while_and_are_no_reason(watched):
    watch = watched.start(["sh", "-c", "exit 1"], SLEEP, STUBBORN)
    time.sleep(0.5)  # for the last one to have begun
    watch.look()
    watch.end(5.0, asks=True)
    watched.processes[1].wait(10)
    watch.look()
    assert not watch.is_over
    watched.now = 6.0
    look_until(watch)
    assert [process.returncode for process in watched.processes] == [1, -15, -9]
    assert [failure.rank for failure in watch.failures] == [0]


def test_a_rank_that_stands_still_when_others_end_is_the_reason(watched):
    watch = watched.start(SLEEP, SLEEP)
    os.kill(watched.processes[1].pid, signal.SIGSTOP)
    while Path(f"/proc/{watched.processes[1].pid}/stat").read_text().split()[2] != "T":
        time.sleep(0.01)
    watch.end(0.0, asks=True)
    watched.now = 1.0
    look_until(watch)
    assert told(watch) == [(1, STOOD_STILL, "stood still: a signal has stopped it (SIGSTOP)")]


def test_a_rank_may_stand_still_for_a_while_and_no_longer(watched):
    """In looks of the launcher, which may itself have stood still."""
    patience = 3 * LOOKS_AT_STATES * LOOK_SECONDS
    watch = watched.start(SLEEP, SLEEP, patience=patience)
    os.kill(watched.processes[0].pid, signal.SIGSTOP)
    while Path(f"/proc/{watched.processes[0].pid}/stat").read_text().split()[2] != "T":
        time.sleep(0.01)
    for _ in range(3 * LOOKS_AT_STATES):
        watch.look()
    assert not watch.failures
    for _ in range(LOOKS_AT_STATES):
        watch.look()
    assert [failure.code for failure in watch.failures] == [STOOD_STILL]
    watched.now = 1.0
    look_until(watch)


def test_a_rank_that_the_system_killed_for_memory_is_told_so(watched, monkeypatch):
    counts = iter([4, 5])
    monkeypatch.setattr(bootstrap, "out_of_memory_kills", lambda: next(counts))
    watch = watched.start(["sh", "-c", "kill -9 $$"])
    look_until(watch)
    assert told(watch) == [
        (
            0,
            -9,
            "was killed by the system, for the memory was full (SIGKILL; oom_kill of its control "
            "group went from 4 to 5)",
        )
    ]
