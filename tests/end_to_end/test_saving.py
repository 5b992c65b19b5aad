"""Saving at once and behind the training: the same checkpoints, one at a time, and what a failure
does, on every rank alike. Row C7 of the faults that other trainers have had."""

from __future__ import annotations

import errno
import os
import shutil
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from unittest.mock import patch

import pytest

from megagrid.checkpoint.files import ChecksummedFile
from megagrid.errors import CheckpointError
from megagrid.train import saving
from megagrid.train.metrics import SaveRecord, read_records
from megagrid.train.run import Run
from tests.end_to_end.t0 import (
    ALONE,
    DP2,
    DROPOUT,
    GPT,
    PP2,
    TP2PP2,
    Training,
    computed,
    differing,
    merged,
    name_of,
)

EVERY_STEP = {"checkpoint": {"save_interval": 1}}
ASYNC = {"checkpoint": {"async_save": True}}
MODES = pytest.mark.parametrize("mode", [{}, ASYNC], ids=["at once", "behind"])
SMALL = {"model": {"num_layers": 2}, "train": {"steps": 4}}


def saves(training: Training) -> list[SaveRecord]:
    return read_records(training.folder / "saves.jsonl", SaveRecord)


@contextmanager
def slow_disk() -> Iterator[None]:
    """A file takes its time before it is written, so that saves last longer than steps."""
    init = ChecksummedFile.__init__

    def begin_slowly(file: ChecksummedFile, path: Path) -> None:
        time.sleep(0.05)
        init(file, path)

    with patch.object(ChecksummedFile, "__init__", begin_slowly):
        yield


# ------------------------------------------------------------------------------------------------
# The same checkpoints


def run_on_a_slow_disk(run: Run) -> None:
    with slow_disk():
        run.run()


@pytest.mark.parametrize(
    ("placement", "keys"),
    [(ALONE, {}), (TP2PP2, merged(GPT, DROPOUT))],
    ids=lambda value: name_of(value) if not isinstance(value, dict) else "",
)
def test_a_save_behind_the_training_is_the_one_that_would_have_been_made_at_once(
    trainer, placement, keys
):
    """C7: after every step, while the next ones change weights, moments and AdamW's count."""
    keys = merged(keys, EVERY_STEP, {"train": {"steps": 4}})
    at_once = trainer.train(placement, keys)
    behind = trainer.train(placement, keys, ASYNC, work=run_on_a_slow_disk)
    assert computed(behind.records) == computed(at_once.records)
    assert behind.saved_steps == at_once.saved_steps == [1, 2, 3, 4]
    for step in behind.saved_steps:
        assert differing(behind.tensors(step), at_once.tensors(step)) == []
        states = [t.checkpoint(step) / "trainer.json" for t in (behind, at_once)]
        assert states[0].read_bytes() == states[1].read_bytes()


@pytest.mark.parametrize("read_by", ["every_rank", "first_rank"])
def test_a_run_resumed_from_a_save_behind_it_equals_the_run(trainer, read_by):
    whole = trainer.train(DP2, {"checkpoint": {"save_interval": 4}}, ASYNC)
    rest = trainer.resume(whole, DP2, ASYNC, {"checkpoint": {"read_by": read_by}})
    assert computed(rest.records) == computed(whole.records[4:])
    assert differing(rest.tensors(8), whole.tensors(8)) == []


def test_behind_is_the_default_where_the_device_has_memory_of_its_own(trainer):
    (report,) = trainer.train(ALONE, SMALL, work=is_async).ranks
    assert report.result is False


def is_async(run: Run) -> bool:
    return run.saver.is_async


# ------------------------------------------------------------------------------------------------
# One at a time


def run_and_note_saves(run: Run) -> list[tuple[str, int]]:
    """Begin and end of each save, in order."""
    events: list[tuple[str, int]] = []
    save = saving.save_checkpoint

    def noting(folder: Path, entries: object, state: dict, **keys: object) -> Path:
        events.append(("begin", state["step"]))
        path = save(folder, entries, state, **keys)
        events.append(("end", state["step"]))
        return path

    with patch.object(saving, "save_checkpoint", noting), slow_disk():
        run.run()
    return events


@MODES
def test_saves_never_overlap_and_the_run_waits_for_the_last(trainer, mode):
    training = trainer.train(PP2, SMALL, EVERY_STEP, mode, work=run_and_note_saves)
    for report in training.ranks:
        expected = [(event, step) for step in (1, 2, 3, 4) for event in ("begin", "end")]
        assert report.result == expected
    assert training.saved_steps == [1, 2, 3, 4]


@MODES
def test_the_newest_are_kept_and_only_whole_ones_count(trainer, mode):
    keep = {"checkpoint": {"save_interval": 1, "keep_last": 1, "keep_every": 2}}
    training = trainer.train(DP2, {"train": {"steps": 5}}, keep, mode, work=run_on_a_slow_disk)
    assert training.saved_steps == [2, 4, 5]


# ------------------------------------------------------------------------------------------------
# What is said of them


@MODES
def test_each_save_is_recorded_and_told_in_a_line(trainer, mode):
    training = trainer.train(DP2, SMALL, {"checkpoint": {"save_interval": 3}}, mode)
    records = saves(training)
    assert [record.step for record in records] == [3, 4]
    lines = [line for line in training.ranks[0].output.splitlines() if line.startswith("saved")]
    assert [line.split()[2] for line in lines] == ["3:", "4:"]
    assert "saved" not in training.ranks[1].output
    for record in records:
        files = training.checkpoint(record.step).iterdir()
        assert record.bytes == sum(file.stat().st_size for file in files)
        assert record.gb_per_s == pytest.approx(record.bytes / record.seconds / 1e9)
        assert record.is_async == bool(mode)
        assert record.is_async or record.pause_s >= record.seconds


def test_a_resume_leaves_one_record_per_save(trainer):
    former = trainer.train(ALONE, SMALL, EVERY_STEP)
    shutil.rmtree(former.checkpoint(4))
    folder = {"logging": {"run_dir": str(former.folder)}}
    again = trainer.train(ALONE, SMALL, EVERY_STEP, folder, {"checkpoint": {"resume": "latest"}})
    assert [record.step for record in saves(again)] == [1, 2, 3, 4]


# ------------------------------------------------------------------------------------------------
# A disk that fails


@contextmanager
def full_disk(run: Run, steps: set[int]) -> Iterator[None]:
    """The last rank's disk is full while it saves one of `steps`; what it writes of it is torn."""
    write = ChecksummedFile.write
    is_hit = run.grid.rank == run.grid.world.size - 1

    def fail(file: ChecksummedFile, data: bytes | memoryview) -> None:
        step = int(file.path.parent.name.split("-")[1].split(".")[0])
        if is_hit and step in steps:
            write(file, data[: len(data) // 2])
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(file.path))
        write(file, data)

    with patch.object(ChecksummedFile, "write", fail):
        yield


def run_with_step_3_unsaved(run: Run) -> None:
    with full_disk(run, {3}):
        run.run()


def run_with_steps_2_and_3_unsaved(run: Run) -> None:
    with full_disk(run, {2, 3}):
        run.run()


def run_with_the_last_unsaved(run: Run) -> None:
    with full_disk(run, {4}):
        run.run()


GRIDS = pytest.mark.parametrize("placement", [ALONE, TP2PP2], ids=name_of)


def told(training: Training, step: int) -> str:
    """What the save of `step` fails with."""
    rank = len(training.ranks) - 1
    folder = training.checkpoint(step)
    file = folder.with_suffix(".partial") / f"model-shard-{rank:05}.safetensors"
    return f"saving {folder} failed on rank {rank}: {file}: No space left on device"


def folders(training: Training) -> list[str]:
    return sorted(path.name for path in (training.folder / "checkpoints").iterdir())


@MODES
@GRIDS
def test_a_full_disk_ends_the_run_on_every_rank_and_keeps_what_was_saved(trainer, placement, mode):
    keys = merged(SMALL, {"train": {"steps": 50}}, EVERY_STEP)
    ended = trainer.attempt(placement, keys, mode, work=run_with_step_3_unsaved)
    assert ended.errors == {f"CheckpointError: {told(ended, 3)}"}
    assert ended.saved_steps == [1, 2]
    assert folders(ended) == ["step-00000001", "step-00000002"]
    # At the end of the step whose save failed or, behind the training, when all have heard of it.
    assert 3 <= len(ended.records) < 50
    assert mode or len(ended.records) == 3


@MODES
@GRIDS
def test_a_full_disk_is_a_warning_for_each_save_where_the_run_shall_go_on(trainer, placement, mode):
    keys = merged({"train": {"steps": 5}}, EVERY_STEP)
    keys["checkpoint"]["on_failed_save"] = "continue"
    ended = trainer.train(placement, keys, mode, work=run_with_steps_2_and_3_unsaved)
    assert folders(ended) == [f"step-{step:08}" for step in (1, 4, 5)]
    assert [record.step for record in saves(ended)] == [1, 4, 5]
    warnings = [line for line in ended.ranks[0].output.splitlines() if line.startswith("warning")]
    goes_on = 'the run goes on, as checkpoint.on_failed_save="continue" says'
    assert warnings == [f"warning: {told(ended, step)}; {goes_on}" for step in (2, 3)]
    assert len(ended.records) == 5


@MODES
@pytest.mark.parametrize("policy", ["end", "continue"])
def test_a_run_whose_last_save_fails_never_ends_well(trainer, policy, mode):
    settings = {"checkpoint": {"save_interval": 2, "on_failed_save": policy}}
    ended = trainer.attempt(DP2, SMALL, settings, mode, work=run_with_the_last_unsaved)
    assert ended.errors == {f"CheckpointError: {told(ended, 4)}"}
    assert folders(ended) == ["step-00000002"]
    assert "warning" not in ended.ranks[0].output
    assert len(ended.records) == 4


def run_with_a_fault_in_a_save(run: Run) -> str:
    """Not the disk's: no policy forgives it."""

    def fail(*args: object, **keys: object) -> None:
        raise ZeroDivisionError

    with patch.object(saving, "save_checkpoint", fail), pytest.raises(ZeroDivisionError):
        run.run()
    return "raised"


@MODES
def test_a_fault_of_the_program_in_a_save_is_never_forgiven(trainer, mode):
    forgiving = {"checkpoint": {"on_failed_save": "continue", "save_interval": 2}}
    training = trainer.train(DP2, SMALL, forgiving, mode, work=run_with_a_fault_in_a_save)
    assert [report.result for report in training.ranks] == ["raised"] * 2


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 1.2 MB."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=1200k", "tmpfs", str(folder)]
    try:
        mounted = subprocess.run(mount, capture_output=True).returncode == 0
    except FileNotFoundError:
        mounted = False
    if not mounted:
        pytest.skip("mounting a file system needs a privilege")
    yield folder
    subprocess.run(["umount", "--lazy", str(folder)], check=True)


@MODES
def test_a_disk_that_is_really_full(trainer, small_disk, mode):
    """Weights and moments of T0 take some 500 kB: two checkpoints fit, the third doesn't."""
    folder = {"logging": {"run_dir": str(small_disk / "run")}}
    ended = trainer.attempt(PP2, EVERY_STEP, folder, mode)
    (error,) = ended.errors
    assert error.startswith(f"CheckpointError: saving {ended.checkpoint(3)} failed on rank ")
    assert error.count("No space left on device") >= 1
    assert folders(ended) == ["step-00000001", "step-00000002"]
    assert [record.step for record in ended.records][:3] == [1, 2, 3]
    rest = trainer.resume(ended, ALONE, {"train": {"steps": 4}}, step=2)
    assert [record.step for record in rest.records] == [3, 4]


# ------------------------------------------------------------------------------------------------
# A run that ends otherwise


def fail_at_step_3(run: Run) -> None:
    """While the save of step 2 is under way."""
    make = run.maker.make

    def fail(*args, **keys):
        if run.progress.step == 2:
            raise CheckpointError("something else")
        return make(*args, **keys)

    with patch.object(run.maker, "make", fail), slow_disk():
        run.run()


def test_a_save_under_way_becomes_whole_when_the_run_fails(trainer):
    """And what the run failed with is what is told."""
    ended = trainer.attempt(DP2, SMALL, EVERY_STEP, ASYNC, work=fail_at_step_3)
    assert ended.errors == {"CheckpointError: something else"}
    assert ended.saved_steps == [1, 2]


def lose_a_peer_at_step_3(run: Run) -> bool:
    """While a save waits for its part; returns whether the run has waited for that."""
    arrival = threading.Event()
    make, save = run.maker.make, saving.save_checkpoint

    def lose(*args, **keys):
        if run.progress.step == 2:
            raise RuntimeError("[gloo/pair.cc:1] Connection closed by peer")
        return make(*args, **keys)

    def wait_and_save(*args, **keys):
        arrival.wait(60)
        return save(*args, **keys)

    with (
        patch.object(run.maker, "make", lose),
        patch.object(saving, "save_checkpoint", wait_and_save),
        pytest.raises(RuntimeError, match="closed by peer"),
    ):
        began = time.monotonic()
        run.run()
    has_waited = time.monotonic() - began >= 60
    arrival.set()
    return has_waited


def test_a_rank_that_lost_a_peer_waits_for_no_save_that_needs_it(trainer):
    """Its own end is what tells the others, whose saves may wait for it in turn."""
    keys = {"checkpoint": {"save_interval": 2}}
    (report,) = trainer.train(ALONE, SMALL, keys, ASYNC, work=lose_a_peer_at_step_3).ranks
    assert report.result is False
