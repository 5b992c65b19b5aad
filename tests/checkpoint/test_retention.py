"""When a run saves, and what it keeps."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from megagrid.checkpoint import Entry, find_checkpoint, save, should_save
from megagrid.checkpoint.retention import keep_newest
from megagrid.nn.layout import Box

WHOLE = [Entry("w", (8,), Box((0,), (8,)), torch.ones(8), True)]


@pytest.mark.parametrize(
    ("steps", "interval", "at_end", "saved"),
    [
        (7, 3, True, [3, 6, 7]),
        (7, 3, False, [3, 6]),
        (6, 3, True, [3, 6]),
        (5, 0, True, [5]),
        (5, 0, False, []),
        (2, 3, True, [2]),
    ],
)
def test_steps_that_are_saved(steps: int, interval: int, at_end: bool, saved: list[int]) -> None:
    assert [s for s in range(1, steps + 1) if should_save(s, steps, interval, at_end)] == saved


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_the_newest_are_kept(tmp_path: Path) -> None:
    for step in range(1, 6):
        save(tmp_path, WHOLE, {"step": step}, keep_last=2)
    assert names(tmp_path) == ["step-00000004", "step-00000005"]
    assert find_checkpoint("latest", tmp_path).skipped == ()


def test_the_last_of_a_run_that_keeps_one_loads(tmp_path: Path) -> None:
    for step in range(1, 7):
        if should_save(step, 6, 3, True):
            save(tmp_path, WHOLE, {"step": step}, keep_last=1)
    assert names(tmp_path) == ["step-00000006"]
    assert find_checkpoint("latest", tmp_path).path.name == "step-00000006"


def test_a_damaged_one_counts_for_nothing(tmp_path: Path) -> None:
    for step in (1, 2):
        save(tmp_path, WHOLE, {"step": step})
    (tmp_path / "step-00000002" / "trainer.json").unlink()
    save(tmp_path, WHOLE, {"step": 3}, keep_last=2)
    assert names(tmp_path) == ["step-00000001", "step-00000002", "step-00000003"]
    save(tmp_path, WHOLE, {"step": 4}, keep_last=2)
    assert names(tmp_path) == ["step-00000003", "step-00000004"]


@pytest.mark.parametrize(
    ("last", "every", "kept"),
    [
        (0, 0, [2, 4, 6, 8, 10, 11]),
        (1, 0, [11]),
        (1, 4, [4, 8, 11]),
        (2, 4, [4, 8, 10, 11]),
        (3, 10, [8, 10, 11]),
        (1, 11, [11]),
        (1, 100, [11]),
    ],
)
def test_multiples_are_kept_beside_the_newest(tmp_path, last, every, kept) -> None:
    for step in range(1, 12):
        if should_save(step, 11, 2, True):
            save(tmp_path, WHOLE, {"step": step}, keep_last=last, keep_every=every)
    assert names(tmp_path) == [f"step-{step:08}" for step in kept]


@pytest.mark.parametrize("every", [0, 2])
def test_the_only_sound_one_is_never_removed(tmp_path: Path, every: int) -> None:
    """Newer ones that are damaged, multiples or not, count for nothing."""
    save(tmp_path, WHOLE, {"step": 1})
    for step in (2, 3, 4):
        damaged = save(tmp_path, WHOLE, {"step": step})
        (damaged / "trainer.json").unlink()
    keep_newest(tmp_path, 1, every)
    keep_newest(tmp_path, 2, every)
    assert len(names(tmp_path)) == 4
    assert find_checkpoint("latest", tmp_path).path.name == "step-00000001"


def test_what_is_no_checkpoint_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "notes").mkdir()
    (tmp_path / "best-step-00000001.partial").mkdir()
    for step in (1, 2):
        save(tmp_path, WHOLE, {"step": step}, keep_last=1)
    assert names(tmp_path) == ["best-step-00000001.partial", "notes", "step-00000002"]


def test_extra_files_and_the_recipe_come_along(tmp_path: Path) -> None:
    tokenizer = tmp_path / "tokenizer.json"
    tokenizer.write_text("{}")
    checkpoint = save(
        tmp_path / "run", WHOLE, {"step": 1}, config="[model]\n", extra_files=[tokenizer]
    )
    assert (checkpoint / "tokenizer.json").read_text() == "{}"
    assert (checkpoint / "config.toml").read_text() == "[model]\n"


def test_the_same_state_gives_the_same_bytes(tmp_path: Path) -> None:
    first, second = (save(tmp_path / name, WHOLE, {"step": 1}) for name in ("a", "b"))
    assert names(first) == names(second)
    assert all((first / name).read_bytes() == (second / name).read_bytes() for name in names(first))
