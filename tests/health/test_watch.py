"""One of the ranks that have waited too long tells why, all end, and no sooner than they should."""

from __future__ import annotations

import json
import os
import time
from dataclasses import replace
from pathlib import Path

import pytest

from megagrid.exit_codes import PEER_LOST
from megagrid.health import watch as watch_module
from megagrid.health.beat import Beat, Doing, beat_file, write_whole
from megagrid.health.heart import Pulse
from megagrid.health.verdict import verdict_file
from megagrid.health.watch import Watch
from tests.health.beats import beat, waiting


class StillHeart:
    """A rank that waits along tp since `waited` seconds, and has made a step or not."""

    def __init__(self, waited: float, *, is_under_way: bool = True) -> None:
        self.pulse = Pulse()
        self.pulse.is_under_way = is_under_way
        self.since = time.time() - waited
        self.ends: list[str] = []

    def beat(self) -> Beat:
        doing = waiting("all_reduce", "tp", 1, since=self.since)
        now = time.time()
        return beat(0, started=now - 3600, time=now, interval_s=0.01, doing=doing)

    def end(self, how) -> None:
        self.ends.append(how.line)


class Watched:
    """A watch over a run of which rank 1 has written its last beat a minute ago."""

    def __init__(self, run: Path) -> None:
        (run / "ranks").mkdir(exist_ok=True)
        now = time.time()
        for rank, age in ((1, 60), (2, 0), (3, 0)):
            one = beat(rank, started=now - 3600, time=now - age, interval_s=0.01)
            write_whole(beat_file(run, rank), one.to_json())
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
    assert json.loads(verdict_file(tmp_path).read_text())["line"] == line


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
    verdict_file(tmp_path).write_text("{}")
    watched.look(heart)
    assert (watched.lines, watched.codes) == ([], [])
    monkeypatch.setattr(watch_module, "GRACE_S", 0.0)
    watched.look(heart)
    assert (watched.lines, watched.codes) == ([], [PEER_LOST])


def test_a_claim_is_waited_for_until_its_rank_must_be_gone(tmp_path, monkeypatch):
    monkeypatch.setattr(watch_module, "GRACE_S", 0.0)
    watched, heart = Watched(tmp_path), StillHeart(6.0)
    verdict_file(tmp_path).touch()
    watched.look(heart)
    assert (watched.lines, watched.codes, watched.watch.is_told) == ([], [], False)
    monkeypatch.setattr(watch_module, "CLAIM_S", 0.0)
    watched.look(heart)
    assert watched.codes == [PEER_LOST]


def test_a_rank_that_hangs_ends_after_a_verdict_too(tmp_path, monkeypatch):
    monkeypatch.setattr(watch_module, "GRACE_S", 0.0)
    watched = Watched(tmp_path)
    verdict_file(tmp_path).write_text("{}")
    watched.watch.look(StillHeart(0.0), replace(beat(0), doing=Doing("computing", "spin")))
    assert watched.codes == [PEER_LOST]


def test_the_verdict_of_a_former_start_is_none(tmp_path):
    (tmp_path / "ranks").mkdir()
    verdict_file(tmp_path).write_text("{}")
    os.utime(verdict_file(tmp_path), (1.0, 1.0))
    watched = Watched(tmp_path)
    assert not watched.watch.is_told
    watched.look(StillHeart(6.0))
    assert watched.codes == [PEER_LOST]
    assert watched.watch.is_told


def test_a_message_that_arrives_while_beats_are_read_saves_the_run(tmp_path):
    watched, heart = Watched(tmp_path), StillHeart(6.0)
    late = heart.beat()
    heart.beat = lambda: replace(late, doing=Doing("computing", "f"))
    watched.watch.look(heart, late)
    assert (watched.codes, watched.watch.is_told) == ([], False)


def test_a_run_of_one_rank_waits_for_nobody(tmp_path):
    watched = Watched(tmp_path)
    watched.watch.look(StillHeart(9.0), replace(StillHeart(9.0).beat(), world_size=1))
    assert watched.codes == []
