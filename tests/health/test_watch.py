"""One of the ranks that have waited too long tells why, all end, and no sooner than they should.
Ranks of another start of the run have no part in it."""

from __future__ import annotations

import json
import time
from dataclasses import replace
from pathlib import Path

import pytest

from megagrid.exit_codes import PEER_LOST
from megagrid.health import watch as watch_module
from megagrid.health.beat import Beat, Doing, beat_file, write_beat, write_whole
from megagrid.health.heart import Pulse
from megagrid.health.verdict import verdict_file
from megagrid.health.watch import Watch
from tests.health.beats import beat, waiting

START, OTHER = "1f3a9c2e", "77d0e1b4"


class StillHeart:
    """A rank that waits along tp since `waited` seconds, and has made a step or not.

    Attributes:
        spoken: how often it has beaten out of turn.
    """

    def __init__(self, waited: float, *, is_under_way: bool = True, **keys: object) -> None:
        self.pulse = Pulse()
        self.pulse.is_under_way = is_under_way
        self.since = time.time() - waited
        self.ends: list[str] = []
        self.spoken = 0
        self._keys = {"interval_s": 0.01, "start": START, **keys}

    def beat(self) -> Beat:
        doing = waiting("all_reduce", "tp", 1, since=self.since)
        now = time.time()
        return replace(beat(0, started=now - 3600, time=now, doing=doing), **self._keys)

    def speak(self) -> Beat:
        self.spoken += 1
        return self.beat()

    def end(self, how) -> None:
        self.ends.append(how.line)


class Watched:
    """A watch over a run of which rank 1 has written its last beat a minute ago."""

    def __init__(self, run: Path) -> None:
        (run / "ranks").mkdir(exist_ok=True)
        now = time.time()
        for rank, age in ((1, 60), (2, 0), (3, 0)):
            times = {"started": now - 3600, "time": now - age, "interval_s": 0.01}
            write_whole(beat_file(run, rank), beat(rank, start=START, **times).to_json())
        self.lines: list[str] = []
        self.codes: list[int] = []
        self.watch = Watch(
            run, 5.0, 50.0, tell=self.lines.extend, leave=self.codes.append, pause_s=0.0
        )

    def look(self, heart: StillHeart) -> None:
        self.watch.look(heart, heart.beat())


def test_a_rank_that_waits_longer_than_it_may_tells_and_ends(tmp_path):
    watched, heart = Watched(tmp_path), StillHeart(6.0)
    watched.look(heart)
    assert watched.codes == [PEER_LOST]
    line = watched.lines[0]
    assert "for 6 s, longer than train.timeout_seconds=5: rank 1 (" in line
    assert heart.ends == [line]
    assert json.loads(verdict_file(tmp_path, START).read_text())["line"] == line


def test_a_rank_that_waits_no_longer_or_computes_goes_on(tmp_path):
    watched = Watched(tmp_path)
    watched.look(StillHeart(4.0))
    computing = StillHeart(0.0)
    watched.watch.look(computing, replace(beat(0), doing=Doing("computing", "f", since=0.0)))
    assert (watched.codes, watched.lines) == ([], [])


@pytest.mark.parametrize(("waited", "ends"), [(6.0, False), (51.0, True)])
def test_before_its_first_step_a_rank_waits_longer(tmp_path, waited, ends):
    watched = Watched(tmp_path)
    alive = beat(1, started=time.time() - 3600, time=time.time(), interval_s=0.01)
    write_whole(beat_file(tmp_path, 1), alive.to_json())
    watched.look(StillHeart(waited, is_under_way=False))
    assert bool(watched.codes) == ends
    assert not ends or "train.setup_timeout_seconds=50" in watched.lines[0]


def test_but_not_for_one_that_has_fallen_silent(tmp_path):
    watched, heart = Watched(tmp_path), StillHeart(6.0, is_under_way=False)
    watched.look(heart)
    assert watched.codes == []  # the beat may just have been written
    time.sleep(0.1)
    watched.look(heart)
    assert watched.codes == [PEER_LOST]
    assert "longer than train.timeout_seconds=5" in watched.lines[0]


def test_one_rank_tells_and_the_others_end_after_a_while(tmp_path, monkeypatch):
    watched, heart = Watched(tmp_path), StillHeart(6.0)
    verdict_file(tmp_path, START).write_text("{}")
    watched.look(heart)
    assert (watched.lines, watched.codes, heart.spoken) == ([], [], 1)
    monkeypatch.setattr(watch_module, "GRACE_S", 0.0)
    watched.look(heart)
    assert (watched.lines, watched.codes) == ([], [PEER_LOST])


def test_a_claim_is_waited_for_until_its_rank_must_be_gone(tmp_path, monkeypatch):
    monkeypatch.setattr(watch_module, "GRACE_S", 0.0)
    watched, heart = Watched(tmp_path), StillHeart(6.0)
    verdict_file(tmp_path, START).touch()
    watched.look(heart)
    assert (watched.lines, watched.codes, watched.watch.has_told(START)) == ([], [], False)
    monkeypatch.setattr(watch_module, "CLAIM_S", 0.0)
    watched.look(heart)
    assert watched.codes == [PEER_LOST]


def test_a_rank_that_hangs_ends_after_a_verdict_too(tmp_path, monkeypatch):
    monkeypatch.setattr(watch_module, "GRACE_S", 0.0)
    watched = Watched(tmp_path)
    verdict_file(tmp_path, START).write_text("{}")
    watched.look(StillHeart(0.0, doing=Doing("computing", "spin")))
    assert watched.codes == [PEER_LOST]


@pytest.mark.parametrize("told", ["", "{}"])
@pytest.mark.parametrize("start", [START, None])
def test_no_claim_and_no_verdict_of_another_start_ends_a_rank(tmp_path, monkeypatch, told, start):
    monkeypatch.setattr(watch_module, "GRACE_S", 0.0)
    monkeypatch.setattr(watch_module, "CLAIM_S", 0.0)
    watched = Watched(tmp_path)
    verdict_file(tmp_path, OTHER).write_text(told)
    watched.look(StillHeart(0.0, start=start, doing=Doing("computing", "f")))
    watched.look(StillHeart(4.0, start=start))
    assert (watched.codes, watched.watch.has_told(start)) == ([], False)


def test_a_rank_whose_node_stood_still_leaves_those_that_went_on_their_verdict(tmp_path):
    gone_on, woken = Watched(tmp_path), Watched(tmp_path)
    gone_on.look(StillHeart(6.0))
    theirs = verdict_file(tmp_path, START).read_text()
    woken.look(StillHeart(900.0, start=OTHER))
    assert woken.codes == [PEER_LOST]
    assert "beats for another start of the run, which goes on without this one" in woken.lines[0]
    assert verdict_file(tmp_path, START).read_text() == theirs
    late = StillHeart(900.0, start=OTHER)
    verdict_file(tmp_path, OTHER).unlink()
    _comes_through(late)
    woken.watch.look(late, StillHeart(900.0, start=OTHER).beat())
    assert not verdict_file(tmp_path, OTHER).exists()
    assert verdict_file(tmp_path, START).read_text() == theirs


def test_of_ranks_that_give_up_at_once_one_tells(tmp_path):
    """Be there a verdict on a former start."""
    verdict_file(tmp_path, OTHER).parent.mkdir()
    verdict_file(tmp_path, OTHER).write_text("{}")
    first, second = Watched(tmp_path), Watched(tmp_path)
    other = StillHeart(6.0)
    speak = other.speak

    def look_meanwhile() -> Beat:
        second.look(StillHeart(6.0))
        return speak()

    other.speak = look_meanwhile
    first.watch = Watch(
        tmp_path, 5.0, 50.0, tell=first.lines.extend, leave=first.codes.append, pause_s=0.1
    )
    first.look(other)
    assert (first.codes, len(first.lines) > 1) == ([PEER_LOST], True)
    assert (second.codes, second.lines) == ([], [])


class NotMet(Watched):
    """A rank that waits in the meeting of four, some of which have fallen silent."""

    def __init__(self, run: Path, rank: int, silent: set[int], waited: float = 6.0) -> None:
        super().__init__(run)
        self._run, self._silent, self._began = run, silent, time.time()
        heart = StillHeart(waited, is_under_way=False, start=None, rank=rank)
        speak, heart.speak = heart.speak, lambda: self._others_beat() or speak()
        for _ in range(2):
            self._others_beat()
            self.look(heart)
            time.sleep(0.1)

    def _others_beat(self) -> None:
        now = time.time()
        for rank in range(4):
            last = self._began - 60 if rank in self._silent else now
            times = {"started": now - 3600, "time": last, "interval_s": 0.01}
            write_beat(self._run, beat(rank, has_folder=False, **times))


@pytest.mark.parametrize(
    ("silent", "teller"), [({1}, 0), ({1, 3}, 0), ({0, 3}, 2), ({0}, 3), ({1, 2}, 0)]
)
def test_before_ranks_have_met_one_tells_of_the_silent_and_claims_nothing(tmp_path, silent, teller):
    told = {rank: NotMet(tmp_path, rank, silent) for rank in {0, 1, 2, 3} - silent}
    assert [rank for rank, watched in told.items() if watched.lines] == [teller]
    assert [rank for rank, watched in told.items() if watched.codes == [PEER_LOST]] == [teller]
    assert list((tmp_path / "ranks").glob("verdict*")) == []


def test_a_meeting_that_takes_too_long_is_left_to_end_by_itself(tmp_path):
    watched = NotMet(tmp_path, 0, set(), waited=51.0)
    assert (watched.codes, watched.lines) == ([], [])


class Clock:
    """Goes on when somebody sleeps."""

    def __init__(self) -> None:
        self.now = time.time()

    def time(self) -> float:
        return self.now

    monotonic = time

    def sleep(self, seconds: float) -> None:
        self.now += seconds


@pytest.mark.parametrize("interval_s", [0.3, 5.0, 20.0, 60.0])
def test_a_verdict_comes_before_the_others_leave_however_rare_beats_are(
    tmp_path, monkeypatch, interval_s
):
    lines = []
    watched = Watched(tmp_path)
    monkeypatch.setattr(watch_module, "time", clock := Clock())
    watch = Watch(tmp_path, 600.0, 600.0, tell=lines.extend, leave=watched.codes.append)
    heart = StillHeart(601.0, interval_s=interval_s)
    begun = clock.now
    watch.look(heart, heart.beat())
    assert lines
    assert watched.codes == [PEER_LOST]
    assert clock.now - begun <= watch_module.CLAIM_S / 2


def test_a_silent_rank_is_known_when_the_time_is_over_however_rare_beats_are(tmp_path, monkeypatch):
    watched = Watched(tmp_path)
    monkeypatch.setattr(watch_module, "time", clock := Clock())
    heart = StillHeart(0.0, is_under_way=False, interval_s=0.5)
    heart.beat = lambda made=heart.beat: replace(made(), time=clock.now)
    while not watched.codes and clock.now - heart.since < 60:
        watched.look(heart)
        clock.sleep(0.1)
    assert watched.codes == [PEER_LOST]
    assert clock.now - heart.since < 5.0 + 4 * 0.5


def test_a_message_that_arrives_while_beats_are_read_saves_the_run(tmp_path):
    watched, heart = Watched(tmp_path), StillHeart(6.0)
    late = heart.beat()
    _comes_through(heart)
    watched.watch.look(heart, late)
    assert watched.codes == []
    assert not verdict_file(tmp_path, START).exists()


def _comes_through(heart: StillHeart) -> None:
    came = replace(heart.beat(), doing=Doing("computing", "f"))
    heart.speak = lambda: came


def test_a_run_of_one_rank_waits_for_nobody(tmp_path):
    watched = Watched(tmp_path)
    watched.watch.look(StillHeart(9.0), replace(StillHeart(9.0).beat(), world_size=1))
    assert watched.codes == []
