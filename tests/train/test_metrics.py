"""The metrics file is one continuous record per step, whatever happened to the run."""

import errno
import json
import math

import pytest

from megagrid.errors import DataError
from megagrid.train.metrics import (
    MetricsLog,
    SaveRecord,
    StepRecord,
    Stopwatch,
    read_records,
)


def record(step: int, **values) -> StepRecord:
    return StepRecord(
        **{
            "step": step,
            "loss": 4.0 - step / 10,
            "grad_norm": 1.25,
            "lr": 3e-4,
            "valid_tokens": 250,
            "consumed_tokens": 256 * step,
            "consumed_samples": 8 * step,
            "sample_ids": (8 * step - 8, 8 * step - 1),
            "step_time_s": 0.5,
            "tokens_per_s": 500.0,
            "tokens_per_s_per_rank": 125.0,
            "parts_s": {"data": 0.125, "forward": 0.25},
            "peak_memory_bytes": (1 << 30, 2 << 30),
        }
        | values
    )


def write(path, steps, resume_step=0, **values) -> None:
    log = MetricsLog(path, resume_step)
    for step in steps:
        log.write(record(step, **values))
    log.close()


def test_records_are_read_back_as_written(tmp_path):
    path = tmp_path / "run" / "metrics.jsonl"
    write(path, [1, 2], mfu=0.4, valid_loss=3.0)
    assert read_records(path) == [record(step, mfu=0.4, valid_loss=3.0) for step in (1, 2)]


def test_each_line_is_on_disk_once_written(tmp_path):
    log = MetricsLog(tmp_path / "metrics.jsonl")
    log.write(record(1))
    assert read_records(tmp_path / "metrics.jsonl") == [record(1)]
    log.close()


class FullDisk:
    """A file that takes `room` bytes, and more once there is more room."""

    def __init__(self, room: int) -> None:
        self.room = room
        self.content = b""

    def write(self, data: bytes) -> int:
        if not self.room:
            raise OSError(errno.ENOSPC, "No space left on device")
        written = data[: self.room]
        self.room -= len(written)
        self.content += written
        return len(written)

    def close(self) -> None:
        """Nothing waits in it."""


def test_lines_wait_for_a_disk_that_is_full(tmp_path):
    """Not a byte is lost or written twice, and it is told once each time."""
    warnings: list[str] = []
    log = MetricsLog(tmp_path / "metrics.jsonl", warn=warnings.append)
    disk = log._file = FullDisk(room=30)
    for step in (1, 2, 3):
        log.write(record(step))
    assert disk.content == record(1).to_json().encode()[:30]
    disk.room = 10**6
    log.write(record(4))
    expected = [record(step).to_json().encode() for step in (1, 2, 3, 4)]
    assert disk.content.splitlines() == expected
    disk.room = 0
    log.write(record(5))
    log.close()
    path = tmp_path / "metrics.jsonl"
    waits = f"{path}: No space left on device; its lines wait in memory"
    assert warnings == [waits, waits, f"{path}: No space left on device; its last lines are lost"]


def test_saves_are_records_too(tmp_path):
    saves = [
        SaveRecord(step=n, is_async=True, pause_s=0.1, seconds=2.0, bytes=10**9, gb_per_s=0.5)
        for n in (1, 2, 3)
    ]
    path = tmp_path / "saves.jsonl"
    for resume_step, made in ((0, saves), (1, saves[1:])):
        log = MetricsLog(path, resume_step, SaveRecord)
        for save in made:
            log.write(save)
        log.close()
    assert read_records(path, SaveRecord) == saves
    path.write_text("{}\n{}\n")
    with pytest.raises(DataError, match=r"saves.jsonl:1: not a save's record"):
        read_records(path, SaveRecord)


def test_resume_leaves_one_record_per_step(tmp_path):
    """Log to 7, checkpoint at 5, resume to 9."""
    path = tmp_path / "metrics.jsonl"
    write(path, range(1, 8), grad_norm=1.0)
    write(path, range(6, 10), resume_step=5, grad_norm=2.0)
    records = read_records(path)
    assert [r.step for r in records] == list(range(1, 10))
    assert [r.grad_norm for r in records] == [1.0] * 5 + [2.0] * 4


def test_fresh_start_drops_every_former_record(tmp_path):
    path = tmp_path / "metrics.jsonl"
    write(path, [1, 2, 3])
    write(path, [1])
    assert [r.step for r in read_records(path)] == [1]


@pytest.mark.parametrize("torn", [b'{"step": 4, "lo', b"\0\0\0", b'{"step": 4}\n', b"[]"])
def test_torn_last_line_is_left_out_and_overwritten(tmp_path, torn):
    path = tmp_path / "metrics.jsonl"
    write(path, [1, 2, 3])
    with path.open("ab") as file:
        file.write(torn)
    assert [r.step for r in read_records(path)] == [1, 2, 3]
    write(path, [4, 5], resume_step=3)
    assert [r.step for r in read_records(path)] == [1, 2, 3, 4, 5]


def test_whole_last_line_without_its_end_is_kept(tmp_path):
    path = tmp_path / "metrics.jsonl"
    write(path, [1, 2])
    path.write_bytes(path.read_bytes()[:-1])
    write(path, [3], resume_step=2)
    assert [r.step for r in read_records(path)] == [1, 2, 3]


def test_damage_before_the_last_line_is_named(tmp_path):
    path = tmp_path / "metrics.jsonl"
    write(path, [1, 2])
    path.write_bytes(b"garbage\n" + path.read_bytes())
    with pytest.raises(DataError, match=r"metrics.jsonl:1: not a step's record .*; delete"):
        read_records(path)


def test_missing_file_is_named(tmp_path):
    with pytest.raises(DataError, match="no such file"):
        read_records(tmp_path / "metrics.jsonl")


def test_rewriting_leaves_no_other_file(tmp_path):
    write(tmp_path / "metrics.jsonl", [1, 2, 3])
    write(tmp_path / "metrics.jsonl", [2], resume_step=1)
    assert [path.name for path in tmp_path.iterdir()] == ["metrics.jsonl"]


@pytest.mark.parametrize("loss", [math.nan, math.inf, -math.inf])
def test_diverged_loss_stays_strict_json_and_is_read_back(tmp_path, loss):
    path = tmp_path / "metrics.jsonl"
    write(path, [1], loss=loss)

    def refuse(constant):
        raise AssertionError(f"{constant} isn't JSON")

    json.loads(path.read_text(), parse_constant=refuse)
    assert str(read_records(path)[0].loss) == str(loss)


def test_keys_of_a_newer_version_are_ignored():
    line = json.dumps(json.loads(record(1).to_json()) | {"moon_phase": 3})
    assert StepRecord.from_json(line) == record(1)


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def test_stopwatch_counts_each_second_in_the_innermost_part():
    clock = Clock()
    watch = Stopwatch(clock)
    with watch.part("forward"):
        clock.now += 5
        with watch.part("communication"):
            clock.now += 9
        clock.now += 4
    clock.now += 1
    assert watch.lap() == (19.0, {"forward": 9.0, "communication": 9.0})


def test_stopwatch_adds_up_parts_and_starts_each_lap_at_zero():
    clock = Clock()
    watch = Stopwatch(clock)
    for seconds in (1, 2):
        with watch.part("forward"):
            clock.now += seconds
    assert watch.lap() == (3.0, {"forward": 3.0})
    clock.now += 2
    assert watch.lap() == (2.0, {})


def test_stopwatch_lap_inside_a_part_gives_each_lap_its_share():
    clock = Clock()
    watch = Stopwatch(clock)
    with watch.part("data"):
        clock.now += 1
        assert watch.lap() == (1.0, {"data": 1.0})
        clock.now += 2
    assert watch.lap() == (2.0, {"data": 2.0})


def test_stopwatch_counts_a_part_that_raises():
    clock = Clock()
    watch = Stopwatch(clock)
    with pytest.raises(KeyError), watch.part("data"):
        clock.now += 1
        raise KeyError
    assert watch.lap() == (1.0, {"data": 1.0})


def test_stopwatch_lets_queued_work_finish_before_it_reads_the_clock():
    clock = Clock()

    def finish_queued_work():
        clock.now += 3

    watch = Stopwatch(clock, settle=finish_queued_work)
    with watch.part("forward"):
        pass
    assert watch.lap()[1] == {"forward": 3.0}
