"""The folders of a run's checkpoints: their names, and what each name means after a crash.

    step-00000100             a checkpoint, or what a damaged disk left of one
    step-00000100.partial     a save that hasn't ended: rubbish once its run is gone
    step-00000100.replaced    the former step-00000100, until the new one has its name
    step-00000100.deleted     an old one that is being removed
    step-00000100.abandoned   a later step than the one saved after it: the run had gone back to an
                              earlier checkpoint. It stays until the user removes it

So the highest step is the newest. A folder changes its state by a rename, which the disk does
wholly or not at all.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from megagrid.checkpoint.files import remove_tree, rename
from megagrid.checkpoint.manifest import FILE_NAME

PARTIAL, REPLACED, DELETED, ABANDONED = ".partial", ".replaced", ".deleted", ".abandoned"
SUFFIXES = (PARTIAL, REPLACED, DELETED, ABANDONED)
_NAME = re.compile(r"step-(\d{8,})")

CHECKPOINTS = "checkpoints"
"""The folder of them in a run's folder."""


@dataclass(frozen=True)
class StepFolder:
    """A folder that may be a sound checkpoint of `step`."""

    step: int
    path: Path


def step_name(step: int) -> str:
    """The name of the checkpoint after `step`; names sort as steps do."""
    return f"step-{step:08d}"


def is_step_name(name: str) -> bool:
    """Whether megagrid may have given a folder this name, in whatever state."""
    return bool(_NAME.fullmatch(name.removesuffix(Path(name).suffix)))


def newest_first(checkpoints: Path) -> list[StepFolder]:
    """The folders that may be checkpoints, highest step first; none if there is no such folder.

    One that was about to be replaced when its run died counts, if the new one isn't there.
    """
    names = {path.name for path in checkpoints.iterdir()} if checkpoints.is_dir() else set()
    found = []
    for name in names:
        match = _NAME.fullmatch(name.removesuffix(REPLACED))
        if match and (name == match[0] or match[0] not in names):
            found.append(StepFolder(int(match[1]), checkpoints / name))
    return sorted(found, key=lambda folder: folder.step, reverse=True)


def candidates(path: Path) -> list[Path]:
    """The folders that `path` may mean, best first: of a run, its checkpoints, or one of them.

    Empty if it isn't there, or holds nothing like a checkpoint.
    """
    for holder in (path / CHECKPOINTS, path):
        if folders := newest_first(holder):
            return [folder.path for folder in folders]
    is_one = is_step_name(path.name) or (path / FILE_NAME).exists()
    return [path] if path.is_dir() and is_one else []


def publish(partial: Path, final: Path) -> None:
    """Make a whole checkpoint the newest: give it its name, in place of one that has it now."""
    step = int(_NAME.fullmatch(final.name)[1])
    for folder in newest_first(final.parent):
        if folder.step > step:
            _move_aside(folder.path, ABANDONED)
    former = _move_aside(final, REPLACED) if final.exists() else None
    rename(partial, final)
    if former:
        remove_tree(former)


def _move_aside(checkpoint: Path, suffix: str) -> Path:
    aside = checkpoint.with_name(checkpoint.name + suffix)
    if aside.exists():
        remove_tree(aside)
    rename(checkpoint, aside)
    return aside


def remove(checkpoint: Path) -> None:
    """Remove a checkpoint such that half of one never looks like one."""
    remove_tree(_move_aside(checkpoint, DELETED))


def clean(checkpoints: Path) -> None:
    """Settle what a run that died while saving left behind. No other run may be saving here."""
    for path in sorted(checkpoints.iterdir()):
        if not is_step_name(path.name):
            continue
        if path.suffix == REPLACED and not path.with_suffix("").exists():
            rename(path, path.with_suffix(""))
        elif path.suffix in (PARTIAL, REPLACED, DELETED):
            remove_tree(path)
