"""The console's rows say what the records say, one plain line each, with or without a terminal."""

import io

import pytest
from rich.console import Console

from megagrid.train.console import ConsoleTable, TimeLeft, format_duration, save_line
from megagrid.train.metrics import SaveRecord
from tests.train.test_metrics import Clock, record


def printed(records, total_steps, clock=None, seconds=10.0, terminal=False, **options) -> list[str]:
    """Lines of a table whose records are `seconds` apart."""
    clock = clock or Clock()
    output = io.StringIO()
    console = Console(file=output, force_terminal=terminal, width=40)
    table = ConsoleTable(total_steps, console=console, clock=clock, **options)
    for item in records:
        clock.now += seconds
        table.write(item)
    table.close()
    return output.getvalue().splitlines()


def test_header_once_then_a_row_per_interval_the_last_step_and_each_evaluation():
    records = [record(step, valid_loss=3.5 if step == 12 else None) for step in range(1, 24)]
    lines = printed(records, 23, interval=5)
    assert lines[0].split()[:3] == ["step", "done", "loss"]
    assert [line.split()[0] for line in lines[1:]] == ["5", "10", "12", "15", "20", "23"]


def test_row_shows_the_record_progress_and_time_left():
    records = [record(100), record(101, mfu=0.4125, valid_loss=3.25, loss=4.5)]
    expected = "101 5% 4.5000 3.2500 1.25 3.00e-04 500 41.2% 0.500 2.00 GiB 5:19:50"
    assert " ".join(printed(records, 2020)[-1].split()) == expected


def test_cells_line_up_with_the_header_whatever_is_missing():
    full = record(100, mfu=0.4125, valid_loss=3.25)
    bare = record(101, mfu=None, valid_loss=None, peak_memory_bytes=())
    header, *rows = printed([full, bare], 1_000)
    assert len(header) <= 100
    assert {len(row) for row in rows} == {len(header)}
    assert all(row.index("3.00e-04") + 8 == header.index("lr") + 2 for row in rows)


@pytest.mark.parametrize("loss", [float("nan"), float("inf")])
def test_diverged_step_is_shown(loss):
    assert printed([record(1, loss=loss, grad_norm=loss)], 10)[1].split()[2] == str(loss)


def test_only_a_terminal_gets_colours():
    assert "\x1b" not in "".join(printed([record(1)], 10))
    assert "\x1b" in "".join(printed([record(1)], 10, terminal=True))


def test_time_left_follows_the_recent_steps_pauses_between_them_included():
    clock = Clock()
    time_left = TimeLeft(100, clock, window=4)
    assert time_left.after(record(11)) is None
    for step in range(12, 21):
        clock.now += 50.0 if step < 16 else 2.0
        estimate = time_left.after(record(step))
    assert estimate == 80 * 2.0
    clock.now += 6.0
    assert time_left.after(record(21)) == 79 * 3.0
    assert time_left.after(record(100)) == 0.0


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0, "0:00"),
        (59.6, "1:00"),
        (245, "4:05"),
        (3723, "1:02:03"),
        (86399, "23:59:59"),
        (2 * 86400 + 3 * 3600 + 240, "2d 03:04"),
    ],
)
def test_durations_read_at_a_glance(seconds, text):
    assert format_duration(seconds) == text


@pytest.mark.parametrize(
    ("size", "text"),
    [
        (999, "999 B"),
        (999_600, "1 MB"),
        (1_234_567, "1.23 MB"),
        (840 * 10**9, "840 GB"),
        (2 * 10**13, "20 TB"),
    ],
)
def test_a_save_is_told_in_one_line(size, text):
    save = SaveRecord(step=7, is_async=True, pause_s=0.25, seconds=2.0, bytes=size, gb_per_s=0.5)
    expected = f"saved step 7: {text} in 2.00 s, 0.5 GB/s; training paused for 0.250 s"
    assert save_line(save) == expected
