import re

import pytest

from megagrid.pipeline.schedules import (
    GENERATORS,
    ScheduleError,
    forward_only,
    generate,
    load,
    lower,
    save,
    verify,
)


@pytest.mark.parametrize("name", GENERATORS)
def test_schedule_and_program_are_loaded_as_they_were_saved(name, tmp_path):
    schedule = generate(name, 3, 20, 2 if name == "Interleaved1F1B" else 1)
    for saved in (schedule, lower(schedule, tied=True)):
        save(saved, tmp_path / "file")
        assert load(tmp_path / "file") == saved
    assert max(map(len, (tmp_path / "file").read_text().splitlines())) <= 100


def test_an_evaluation_is_loaded_as_it_was_saved(tmp_path):
    save(forward_only(3, 2), tmp_path / "file")
    assert load(tmp_path / "file") == forward_only(3, 2)


BY_HAND = """\
# two ranks
schedule: by hand
microbatches: 2
placement: 0 1

rank 0: 0F0 0F1   # comments end a line
    0B0 0B1
rank 1: 1F0 1I0 1W0 1F1 1B1
"""


def test_a_file_typed_by_hand_is_verified_and_promises_nothing(tmp_path):
    path = tmp_path / "file"
    path.write_text(BY_HAND)
    schedule = load(path)
    assert schedule.max_in_flight == (2, 2)
    assert verify(lower(schedule)).in_flight == (2, 1)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (("0B0 0B1", "0B0 0X1"), ":7: '0X1' is no action"),
        (("0B0 0B1", "0B0 0SEND_F1"), ":7: 0SEND_F1 is no compute action"),
        (("0B0 0B1", "0B0+0B1"), ":7: step '0B0.0B1': only SEND and RECV"),
        (("schedule: by hand\n", ""), ": lacks `schedule:`"),
        (("microbatches: 2", "microbatches: two"), ":3: microbatches: 'two' must be a number"),
        (("microbatches: 2", "microbatches: 0"), ": microbatches=0 must be 1 or more"),
        (("microbatches", "micobatches"), ": lacks `microbatches:`"),
        (("placement: 0 1", "placement: 0 2"), ": has orders for the ranks 0, 1, but .* 0, 2"),
        (("placement: 0 1", "placement:"), ":4: placement: '' must be the rank of each stage"),
        (("placement: 0 1", "placement: 0 1\nbound: 3"), ":5: 'bound' is no field"),
        (
            ("placement: 0 1", "placement: 0 1\nmax_in_flight: 3"),
            ": max_in_flight 3 must state one",
        ),
        (
            ("placement: 0 1", "placement: 0 1\nforward_only: 1"),
            ":5: forward_only: '1' must be yes",
        ),
        (("placement: 0 1", "placement: 0 1\ntied: yes"), ":5: 'tied' is no field"),
        (("rank 1:", "rank 0:"), ":8: rank 0 comes twice"),
        (("rank 1:", "rank 1"), ":8: .* is no `key: value`"),
        (("placement: 0 1", "    0F0"), ":4: an indented line must continue a rank's"),
        (("microbatches: 2", "microbatches: 2\nmicrobatches: 2"), ":4: microbatches comes twice"),
    ],
)
def test_a_mistake_is_named_with_file_and_line(change, message, tmp_path):
    path = tmp_path / "mine.txt"
    path.write_text(BY_HAND.replace(*change))
    with pytest.raises(ScheduleError, match=f"^{re.escape(str(path))}{message}"):
        load(path)


def test_a_missing_or_unreadable_file_is_named(tmp_path):
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00")
    told = {"missing": "No such file", "binary": "it isn't UTF-8", ".": "Is a directory"}
    for name, reason in told.items():
        with pytest.raises(ScheduleError, match=rf"can't be read as a schedule \({reason}"):
            load(tmp_path / name)
    with pytest.raises(ScheduleError, match="can't be written"):
        save(generate("GPipe", 1, 1), tmp_path / "missing" / "file")
