"""A save killed at any moment costs at most that save; a disk that fails costs nothing saved."""

from __future__ import annotations

import os
import resource
import signal
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from megagrid.checkpoint import Entry, find_checkpoint, load, save
from megagrid.checkpoint.files import ChecksummedFile
from megagrid.errors import CheckpointError
from megagrid.grid.grid import Axis
from megagrid.nn.layout import Box


def whole(values: torch.Tensor) -> list[Entry]:
    return [
        Entry(name, (16,), Box((0,), (16,)), values, True) for name in ("w", "optimizer.exp_avg.w")
    ]


def save_step(folder: Path, step: int, value: float, keep_last: int = 0) -> Path:
    return save(folder, whole(torch.full((16,), value)), {"step": step}, keep_last=keep_last)


def newest(folder: Path) -> tuple[int, float] | None:
    """Step and content of what a run would resume from."""
    found = find_checkpoint("latest", folder)
    if found is None:
        return None
    values = torch.zeros(16)
    load(found.path, whole(values))
    return int(found.path.name[5:13]), values[0].item()


def die_at(act: int) -> None:
    """Kill this process just before its `act`-th act on the disk; a write is left half done."""
    acts = 0

    def count() -> bool:
        nonlocal acts
        acts += 1
        return acts == act

    def mortal(function: Callable) -> Callable:
        def call(*args, **kwargs):
            if count():
                os.kill(os.getpid(), signal.SIGKILL)
            return function(*args, **kwargs)

        return call

    write = ChecksummedFile.write

    def mortal_write(file: ChecksummedFile, data: bytes | memoryview) -> None:
        if count():
            write(file, data[: len(data) // 2])
            os.kill(os.getpid(), signal.SIGKILL)
        write(file, data)

    for name in ("fsync", "rename", "mkdir", "unlink", "rmdir"):
        setattr(os, name, mortal(getattr(os, name)))
    ChecksummedFile.write = mortal_write


def killed_at(act: int, work: Callable[[], object]) -> bool:
    """Do `work` in a child that dies at its `act`-th act; whether there was such an act."""
    child = os.fork()
    if child == 0:
        try:
            die_at(act)
            work()
        finally:
            os._exit(0)
    return os.WIFSIGNALED(os.waitpid(child, 0)[1])


FORMER = {
    "first save": [],
    "later save": [(1, 1.0)],
    "the same step again": [(1, 1.0), (2, -2.0)],
    "after going back": [(1, 1.0), (3, -3.0)],
    "keep the last one": [(1, 1.0)],
}


# torch's thread pool doesn't survive a fork; a save starts no thread.
@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
@pytest.mark.parametrize("case", FORMER)
def test_a_save_killed_at_any_act_leaves_the_former_or_the_new_one(
    case: str, tmp_path: Path
) -> None:
    keep_last = 1 if case == "keep the last one" else 0
    seen = set()
    act = 1
    while True:
        folder = tmp_path / str(act)
        for step, value in FORMER[case]:
            save_step(folder, step, value)
        former = newest(folder)
        lives = not killed_at(act, lambda folder=folder: save_step(folder, 2, 2.0, keep_last))
        found = newest(folder)
        went_back = case == "after going back" and found == (1, 1.0)
        assert found in (former, (2, 2.0)) or went_back
        seen.add(found)
        # The next save clears up what was left, and is found.
        save_step(folder, 4, 4.0)
        assert newest(folder) == (4, 4.0)
        assert not [path for path in folder.iterdir() if path.suffix in (".partial", ".deleted")]
        if lives:
            break
        act += 1
    assert act > 10 and (2, 2.0) in seen and former in seen


def save_on_a_rank_without_room(folder: Path) -> str:
    """Rank 1 may write no file beyond 4 KiB. Every rank reports what it was told."""
    rank = dist.get_rank()
    world = Axis("world", (0, 1), rank, dist.group.WORLD)
    rows = 1024
    boxes = [
        Entry("w", (2 * rows,), Box((rank * rows,), (rows,)), torch.full((rows,), 7.0), True),
    ]
    save(folder, boxes, {"step": 1}, world=world)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    if rank == 1:
        resource.setrlimit(resource.RLIMIT_FSIZE, (4096, limits[1]))
    try:
        save(folder, boxes, {"step": 2}, world=world)
    except CheckpointError as error:
        told = str(error)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    save(folder, boxes, {"step": 3}, world=world)  # the run has lived on
    return told


def test_a_rank_that_cannot_write_fails_the_save_on_all_ranks(tmp_path: Path, ranks) -> None:
    told = ranks.run(save_on_a_rank_without_room, tmp_path, world_size=2)
    partial = tmp_path / "step-00000002.partial" / "model-shard-00001.safetensors"
    assert (
        told == [f"saving {tmp_path}/step-00000002 failed on rank 1: {partial}: File too large"] * 2
    )
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-00000001", "step-00000003"]


def test_a_folder_that_cannot_be_written_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(CheckpointError, match=r"file: File exists|file.*Not a directory"):
        save_step(tmp_path / "file", 1, 1.0)


def save_on_two_disks(folder: Path) -> str:
    """Each rank has a folder of its own, as on two machines without a shared file system."""
    rank = dist.get_rank()
    world = Axis("world", (0, 1), rank, dist.group.WORLD)
    boxes = [Entry("w", (2,), Box((rank,), (1,)), torch.ones(1), True)]
    with pytest.raises(CheckpointError) as error:
        save(folder / str(rank), boxes, {"step": 1}, world=world)
    return str(error.value)


def test_ranks_that_share_no_disk_are_told_so(tmp_path: Path, ranks) -> None:
    told = ranks.run(save_on_two_disks, tmp_path, world_size=2)
    assert all("isn't visible to rank 1: the run folder must lie on" in text for text in told)
