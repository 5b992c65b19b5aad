"""What ranks write of themselves can be read again, and says who they are and how they ended."""

from __future__ import annotations

import errno
from dataclasses import replace
from pathlib import Path

import pytest

from megagrid.errors import DataError, PeerError
from megagrid.exit_codes import INTERRUPTED, PEER_LOST, STOPPED, USER_MISTAKE
from megagrid.grid.bootstrap import Job
from megagrid.health.beat import (
    CRASH,
    DONE,
    INTERRUPT,
    LEFT_ALONE,
    MISTAKEN,
    STOPPED_AND_SAVED,
    Beat,
    End,
    beat_file,
    end_of,
    forget,
    name_ranks,
    read_beats,
    read_known,
    write_beat,
    write_whole,
)
from tests.health.beats import NOW, beat, waiting


def test_a_beat_is_read_as_it_was_written():
    written = beat(
        3, doing=waiting("all_reduce", "tp", 2), job=Job("17_2", 1), end=End(DONE, 0, NOW, "")
    )
    assert Beat.from_json(written.to_json()) == written


def test_what_is_no_beat_is_passed_over(tmp_path):
    for rank, text in ((0, beat(0).to_json()), (1, ""), (2, "{}"), (3, beat(3).to_json()[:-9])):
        beat_file(tmp_path, rank).parent.mkdir(exist_ok=True)
        write_whole(beat_file(tmp_path, rank), text)
    assert list(read_beats(tmp_path)) == [0]


def test_a_smaller_grid_leaves_no_beats_of_the_larger_one(tmp_path):
    (tmp_path / "ranks").mkdir()
    for rank in range(4):
        write_whole(beat_file(tmp_path, rank), beat(rank).to_json())
    forget(tmp_path, 2)
    assert sorted(path.name for path in (tmp_path / "ranks").iterdir()) == [
        "rank-00000.json",
        "rank-00001.json",
    ]


def test_a_rank_is_silent_after_five_beats_it_should_have_made():
    late = beat(0, time=NOW - 10)
    assert not late.is_silent(NOW)
    assert late.is_silent(NOW + 0.1)
    assert not replace(late, end=End(DONE, 0, NOW)).is_silent(NOW + 100)


@pytest.mark.parametrize(
    ("how", "end"),
    [
        (0, (DONE, 0, "")),
        (STOPPED, (STOPPED_AND_SAVED, STOPPED, "")),
        (DataError("data.paths[0] is\ngone"), (MISTAKEN, USER_MISTAKE, "data.paths[0] is gone")),
        (PeerError("rank 0 lost"), (LEFT_ALONE, PEER_LOST, "rank 0 lost")),
        (KeyboardInterrupt(), (INTERRUPT, INTERRUPTED, "")),
        (RuntimeError("shapes\n\ndiffer"), (CRASH, 1, "RuntimeError: shapes")),
        (AssertionError(), (CRASH, 1, "AssertionError: ")),
    ],
)
def test_an_end_says_how(how, end):
    found = end_of(how, NOW)
    assert (found.how, found.code, found.line) == end


@pytest.mark.parametrize(
    ("ranks", "text"), [([3], "rank 3"), ([0, 1], "ranks 0-1"), ([6, 0, 2, 1], "ranks 0-2,6")]
)
def test_ranks_are_named_in_runs(ranks, text):
    assert name_ranks(ranks) == text


def test_on_a_full_disk_a_beat_is_written_over_the_last_one(tmp_path, monkeypatch):
    write_beat(tmp_path, beat(0, step=1234567))

    def full(self: Path, *content: object, **how: object) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Path, "write_text", full)
    write_beat(tmp_path, beat(0, step=8))
    assert read_beats(tmp_path)[0].step == 8
    write_beat(tmp_path, beat(0, step=9, end=End(MISTAKEN, 2, NOW, "no space left")))
    assert read_beats(tmp_path)[0].end.line == "no space left"
    write_beat(tmp_path, beat(0, end=End(CRASH, 1, NOW, "x" * 99999)))  # no room: the last stays
    assert read_beats(tmp_path)[0].step == 9


def test_a_rank_sees_those_of_its_start_whether_they_have_the_folder_yet_or_not(tmp_path):
    write_beat(tmp_path, beat(0, start="a"))
    write_beat(tmp_path, beat(1, start="old", time=NOW - 99))
    write_beat(tmp_path, beat(1, start="a", has_folder=False))
    write_beat(tmp_path, beat(2, start="b", has_folder=False))
    assert {rank: one.start for rank, one in read_known(tmp_path, "a").items()} == {0: "a", 1: "a"}
    assert list(read_known(tmp_path, "a", rank=1)) == [1]
    assert list(read_known(tmp_path, None)) == [1, 2]
