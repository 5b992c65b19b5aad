"""A heart beats by itself, says how it ended, and never in another run's name."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

from megagrid.errors import DataError
from megagrid.grid.bootstrap import Job
from megagrid.health import heart as heart_module
from megagrid.health.beat import (
    COMPUTING,
    DONE,
    MISTAKEN,
    SAVING,
    STARTING,
    TRAINING,
    Beat,
    Doing,
    End,
    beat_file,
    read_beat,
    read_beats,
    read_starting,
    write_beat,
    write_whole,
)
from megagrid.health.heart import Heart, Identity, Pulse
from tests.health.beats import GRID, beat


class Looks:
    """Sees a rank that computes three quarters of its time."""

    def sample(self) -> None:
        pass

    def busy(self) -> float:
        return 0.75

    def doing(self, settled_s: float) -> Doing:
        return Doing(COMPUTING, "Linear.forward", "nn/linear.py:88", 1.0)


def heart(run: Path, rank: int = 3) -> Heart:
    identity = Identity(rank, GRID.world_size, GRID.coordinate(rank), "here", Job("17", 2))
    return Heart(run, identity, 0.02, Pulse())


def starting_file(run: Path) -> Path:
    """Of rank 3."""
    return beat_file(run, 3, has_folder=False)


def next_beat(run: Path, since: float) -> Beat:
    """The first that is written after `since`."""
    deadline = time.monotonic() + 30
    while (found := read_beat(starting_file(run))) is None or found.time <= since:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    return found


def test_a_rank_beats_before_it_has_anything_to_tell(tmp_path):
    beats = heart(tmp_path / "run")
    with beats.beating():
        first = next_beat(tmp_path / "run", 0.0)
        assert (first.rank, first.coordinate, first.pid) == (3, GRID.coordinate(3), os.getpid())
        assert (first.phase, first.doing.what, first.step) == (STARTING, STARTING, 0)
        assert first.job == Job("17", 2)
        assert next_beat(tmp_path / "run", first.time).started == first.started


def test_phases_and_steps_are_told_as_the_run_goes_on(tmp_path):
    beats = heart(tmp_path)
    with beats.beating():
        beats.look_with(Looks())
        beats.pulse.enter(TRAINING)
        beats.pulse.made(1)
        next_beat(tmp_path, time.time())
        with beats.pulse.within(SAVING):
            saving = next_beat(tmp_path, time.time())
        beats.pulse.made(5)
        later = next_beat(tmp_path, next_beat(tmp_path, time.time()).time)
    assert (saving.phase, saving.step) == (SAVING, 1)
    assert (later.phase, later.step, later.doing.what) == (TRAINING, 5, "Linear.forward")
    assert later.compute_s == pytest.approx(0.75 * later.step_s)


class Counts:
    """A watch that has nothing to do."""

    def __init__(self) -> None:
        self.steps: list[int] = []

    def has_told(self, start: str | None) -> bool:
        return start == "a"

    def look(self, heart: Heart, beat: Beat) -> None:
        self.steps.append(beat.step)


def test_the_watch_looks_however_rare_beats_are(tmp_path, monkeypatch):
    monkeypatch.setattr(heart_module, "WATCH_SECONDS", 0.0)
    identity = Identity(3, GRID.world_size, GRID.coordinate(3), "here", Job())
    beats = Heart(tmp_path, identity, 3600.0, Pulse(), watch := Counts())
    with beats.beating():
        first = next_beat(tmp_path, 0.0)
        beats.pulse.made(8)
        deadline = time.monotonic() + 30
        while 8 not in watch.steps:
            assert time.monotonic() < deadline
            time.sleep(0.01)
        assert read_beat(starting_file(tmp_path)) == first


def test_a_rank_is_of_a_start_once_the_ranks_have_met(tmp_path):
    identity = Identity(3, GRID.world_size, GRID.coordinate(3), "here", Job())
    beats = Heart(tmp_path, identity, 3600.0, Pulse(), Counts())
    assert (beats.speak().start, beats.is_told) == (None, False)
    beats.identify(replace(identity, start="a"))
    assert (beats.speak().start, beats.is_told) == ("a", True)
    assert read_beat(starting_file(tmp_path)).start == "a"


class BadLooks(Looks):
    """Meets something in a stack that it can't make anything of."""

    def doing(self, settled_s: float) -> Doing:
        raise KeyError("group")


def test_a_stack_that_cannot_be_read_costs_no_beats(tmp_path):
    beats = heart(tmp_path)
    with beats.beating():
        beats.look_with(BadLooks())
        beats.pulse.enter(TRAINING)
        found = next_beat(tmp_path, next_beat(tmp_path, time.time()).time)
    assert found.doing.what == TRAINING


@pytest.mark.parametrize("how", [0, DataError("data.paths is wrong")])
def test_the_last_beat_says_how_the_rank_ended(tmp_path, how):
    beats = heart(tmp_path)
    try:
        with beats.beating():
            if isinstance(how, Exception):
                raise how
            beats.end(how)
    except DataError:
        pass
    time.sleep(0.2)
    end = read_beat(starting_file(tmp_path)).end
    assert (end.how, end.line) == ((MISTAKEN, str(how)) if how else (DONE, ""))


def test_the_first_word_on_an_end_counts(tmp_path):
    beats = heart(tmp_path)
    beats.end(0)
    beats.end(RuntimeError("at exit"))
    assert read_beat(starting_file(tmp_path)).end.how == DONE


@pytest.mark.parametrize("end", [None, End(DONE, 0, 5.0)])
def test_a_start_that_is_refused_the_folder_leaves_no_word_on_the_run_in_there(tmp_path, end):
    theirs = beat(3, host="here", end=end)
    write_beat(tmp_path, theirs)
    beats = heart(tmp_path)
    with pytest.raises(DataError), beats.beating():
        next_beat(tmp_path, 0.0)
        raise DataError("the folder has a run")
    assert read_beats(tmp_path) == {3: theirs}
    assert read_starting(tmp_path)[3].end.how == MISTAKEN


def test_a_rank_whose_start_has_the_folder_is_the_run_s(tmp_path):
    beats = heart(tmp_path)
    beats.speak()
    beats.pulse.owns_folder = True
    beats.speak()
    assert list(read_beats(tmp_path)) == [3]
    assert read_starting(tmp_path) == {}


def test_a_start_that_has_no_folder_yet_spares_the_beats_of_another_that_goes_on(tmp_path):
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as other:
        theirs = beat(3, host="here", pid=other.pid)
        starting_file(tmp_path).parent.mkdir(parents=True)
        write_whole(starting_file(tmp_path), theirs.to_json())
        heart(tmp_path).end(DataError("the folder belongs to a run that is still going on"))
        assert read_beat(starting_file(tmp_path)) == theirs
        other.stdin.close()
    heart(tmp_path).end(0)  # it is gone now
    assert read_beat(starting_file(tmp_path)).end.how == DONE


@pytest.mark.parametrize("age", [1.0, 60.0])
def test_on_another_host_a_beat_speaks_for_its_rank_as_long_as_it_is_fresh(tmp_path, age):
    theirs = beat(3, host="elsewhere", time=time.time() - age)
    starting_file(tmp_path).parent.mkdir(parents=True)
    write_whole(starting_file(tmp_path), theirs.to_json())
    heart(tmp_path).end(0)
    assert (read_beat(starting_file(tmp_path)) == theirs) == (age < 10)


def test_a_folder_that_is_locked_is_written_to_whatever_lies_there(tmp_path):
    former = beat(3, host="elsewhere", time=time.time())
    beat_file(tmp_path, 3).parent.mkdir()
    write_whole(beat_file(tmp_path, 3), former.to_json())
    beats = heart(tmp_path)
    beats.pulse.owns_folder = True
    beats.end(End(DONE, 0, 5.0))
    assert replace(read_beat(beat_file(tmp_path, 3)), host="") != replace(former, host="")


def test_a_disk_that_takes_no_beats_ends_nothing(tmp_path):
    (tmp_path / "run").write_text("a file")
    beats = heart(tmp_path / "run")
    with beats.beating():
        time.sleep(0.1)
    beats.end(0)
