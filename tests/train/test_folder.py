"""Two runs that want one folder, on one host or on two, at once or one after the other."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import platform
import threading
import time
from pathlib import Path

import pytest

from megagrid.errors import MegagridError, UnavailableError
from megagrid.grid.bootstrap import Job
from megagrid.grid.placement import Coordinate
from megagrid.health.beat import COMPUTING, DONE, TRAINING, Beat, Doing, End, beat_file, write_whole
from megagrid.train.folder import LOCK, lock_folder

AGAIN = Job(id="55", restarts=1)


def take(folder: Path, job: Job | None = None, patience_s: float = 0.5) -> tuple[object, list[str]]:
    """The lock, and what was said meanwhile."""
    said: list[str] = []
    return lock_folder(folder, job, patience_s, said.append), said


def leave_beat(folder: Path, host: str = "elsewhere", **changes) -> None:
    """By the first rank of a run; in another container it may well have our own number."""
    now = time.time()
    values = dict(time=now, interval_s=0.1, pid=os.getpid()) | changes
    beat = Beat(
        rank=0,
        world_size=1,
        coordinate=Coordinate(0, 0, 0, 0),
        host=host,
        device="cpu",
        started=now,
        step=1,
        phase=TRAINING,
        phase_since=now,
        doing=Doing(COMPUTING, "step"),
        **values,
    )
    path = beat_file(folder, 0)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_whole(path, beat.to_json())


def without_locks(handle, operation) -> None:
    raise OSError(errno.ENOSYS, "Function not implemented")


def test_who_has_the_folder_is_named_to_who_may_not(tmp_path):
    lock, said = take(tmp_path, Job(id="55"))
    assert said == []
    signature = json.loads((tmp_path / LOCK).read_text())
    assert (signature["host"], signature["job"]) == (platform.node(), "55")
    with pytest.raises(MegagridError, match=r"still going on \(process \d+ of job 55 on ") as error:
        take(tmp_path)
    assert error.value.exit_code == 2  # nobody starts it again
    assert "\n" not in str(error.value)
    assert json.loads((tmp_path / LOCK).read_text()) == signature  # who may not leaves no word
    lock.close()
    take(tmp_path)


def test_a_job_that_starts_again_waits_for_the_one_before_it(tmp_path):
    lock, _ = take(tmp_path, Job(id="55"))
    threading.Timer(0.4, lock.close).start()
    start = time.monotonic()
    _, said = take(tmp_path, AGAIN, patience_s=60.0)
    assert 0.3 < time.monotonic() - start < 30
    (line,) = said
    assert "waiting for the run that has" in line and "of job 55" in line


def test_but_not_for_ever(tmp_path):
    lock, _ = take(tmp_path)
    with pytest.raises(UnavailableError, match="after 1 s"):
        take(tmp_path, AGAIN, patience_s=1.2)
    lock.close()


@pytest.mark.parametrize("has_locks", [True, False])
def test_a_run_of_another_host_that_beats_has_the_folder_whatever_locks_say(
    tmp_path, monkeypatch, has_locks
):
    """A lock of that host may be one that only that host sees."""
    if not has_locks:
        monkeypatch.setattr(fcntl, "flock", without_locks)
    ends = threading.Event()

    def live() -> None:
        while not ends.wait(0.05):
            leave_beat(tmp_path)

    leave_beat(tmp_path)
    other = threading.Thread(target=live)
    other.start()
    try:
        with pytest.raises(
            MegagridError, match=rf"process {os.getpid()} on elsewhere, whose heart beats"
        ):
            take(tmp_path)
    finally:
        ends.set()
        other.join()


@pytest.mark.parametrize("ahead_s", [0.0, 3600.0])
def test_a_beat_that_nobody_follows_up_is_of_a_run_that_is_dead(tmp_path, ahead_s):
    """Whatever the clock of its host was."""
    leave_beat(tmp_path, time=time.time() + ahead_s)
    _, said = take(tmp_path)
    assert len(said) == 1


@pytest.mark.parametrize(
    "changes", [{"time": 0.0}, {"end": End(DONE, 0, 0.0)}, {"host": platform.node()}]
)
def test_a_run_that_is_over_holds_nothing(tmp_path, changes):
    leave_beat(tmp_path, **changes)
    assert take(tmp_path)[1] == []


def test_a_file_system_without_locks_is_told_of(tmp_path, monkeypatch):
    monkeypatch.setattr(fcntl, "flock", without_locks)
    _, (line,) = take(tmp_path)
    assert f'logging.run_dir="{tmp_path}" is on a file system without locks' in line
