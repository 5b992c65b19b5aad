"""Which checkpoint a run resumes from: the newest sound one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from megagrid.checkpoint.folders import candidates, newest_first
from megagrid.checkpoint.manifest import Manifest, find_damage, read_manifest
from megagrid.checkpoint.together import ALONE, gather, on_first_rank
from megagrid.errors import CheckpointError
from megagrid.grid.grid import Axis

LATEST = "latest"
RESUME_KEY = "checkpoint.resume"


@dataclass(frozen=True)
class Found:
    """A sound checkpoint, and the newer ones that were passed over.

    Attributes:
        path: its folder.
        skipped: one line for each newer checkpoint: which, and why not.
    """

    path: Path
    skipped: tuple[str, ...] = ()


def find_checkpoint(
    resume: str,
    checkpoints: Path,
    world: Axis = ALONE,
    *,
    key: str = RESUME_KEY,
    by_first_rank: bool = False,
) -> Found | None:
    """The newest sound checkpoint that `resume` means; None only for "latest" without any.

    All ranks of `world` call it together.

    Args:
        resume: the folder of a checkpoint, the folder of a run, or "latest".
        checkpoints: where this run's checkpoints lie, for "latest".
        key: what errors call `resume`: the recipe's key, or an argument of the command line.
        by_first_rank: no other rank opens a file; otherwise each verifies a share of them.

    Raises:
        CheckpointError: `resume` is a path without a sound checkpoint, or "latest" finds some but
            none is sound. To train from scratch instead would throw work away unasked.
    """
    folders = on_first_rank(lambda: _folders(resume, checkpoints, key), world)
    found, skipped = first_sound(folders, world, by_first_rank=by_first_rank)
    if found is not None:
        return Found(found, skipped)
    if skipped:
        # Where it is, a run isn't begun anew: there are its checkpoints.
        from_scratch = (
            ", or train from scratch in another logging.run_dir" if key == RESUME_KEY else ""
        )
        raise CheckpointError(
            f'{key}="{resume}" has no sound checkpoint: {"; ".join(skipped)}; name another'
            f"{from_scratch}"
        )
    return None


def first_sound(
    folders: Sequence[Path], world: Axis = ALONE, *, by_first_rank: bool = False
) -> tuple[Path | None, tuple[str, ...]]:
    """The first of `folders` that is a sound checkpoint, and a line for each before it: why not.

    All ranks of `world` call it together.
    """
    skipped: list[str] = []
    for path in folders:
        try:
            manifest = on_first_rank(lambda path=path: read_manifest(path), world)
            problems = verify(path, manifest, world, by_first_rank=by_first_rank)
        except CheckpointError as error:
            skipped.append(str(error))
            continue
        if not problems:
            return path, tuple(skipped)
        skipped.append(f"{path} is damaged: {'; '.join(problems)}")
    return None, tuple(skipped)


def verify(
    checkpoint: Path,
    manifest: Manifest,
    world: Axis = ALONE,
    *,
    deep: bool = True,
    by_first_rank: bool = False,
) -> list[str]:
    """One line for each damaged file, the same on all ranks of `world`.

    Args:
        deep: compare checksums, otherwise sizes alone.
        by_first_rank: it reads all of them; otherwise the ranks share the reading.
    """
    if by_first_rank:
        return on_first_rank(lambda: verify(checkpoint, manifest, deep=deep), world)
    # Dealt out by size, so that the few large files don't all fall to one rank.
    by_size = sorted(manifest.files.items(), key=lambda file: (-file[1].size, file[0]))
    mine = by_size[world.rank :: world.size]
    shares = gather(find_damage(checkpoint, mine, deep=deep), world)
    return sorted(problem for share in shares for problem in share)


def _folders(resume: str, checkpoints: Path, key: str) -> list[Path]:
    """Folders that `resume` may mean, best first."""
    if resume == LATEST:
        return [folder.path for folder in newest_first(checkpoints)]
    path = Path(resume)
    if found := candidates(path):
        return found
    is_there = "is a file" if path.is_file() else "doesn't exist"
    reason = "holds no checkpoint" if path.is_dir() else is_there
    or_latest = f', or "{LATEST}"' if key == RESUME_KEY else ""
    raise CheckpointError(
        f'{key}="{resume}" {reason}; name the folder of a checkpoint or of a run{or_latest}'
    )
