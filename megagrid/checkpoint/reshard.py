"""A checkpoint as another grid would have written it, without the grid.

    ranks in outline        what a save does with them               instead of a rank's memory
    Entry, on no device ->  BoxSavePlanner -> SafetensorsWriter  <-  TensorReader, box after box

What goes into which file, under which name and in which order is decided by what decides it in a
save of a run, rank after rank in this one process. So the two write the same bytes. No more than
one box is in memory at a time.

    OUT.partial     being written; what a killed process leaves of it is cleared away by the next
    OUT             appears by a rename, when all of it is on the disk
"""

from __future__ import annotations

import fcntl
import os
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import torch
from torch.distributed.checkpoint.metadata import MetadataIndex

from megagrid.checkpoint.files import FileRecord, copy_file, rename, sync_folder, write_file
from megagrid.checkpoint.folders import PARTIAL
from megagrid.checkpoint.layout import Entry
from megagrid.checkpoint.manifest import CONFIG, FILE_NAME, Manifest, SavedTensor, find_damage
from megagrid.checkpoint.planner import BoxLoadPlanner, BoxSavePlanner
from megagrid.checkpoint.reader import TensorReader
from megagrid.checkpoint.storage import DTYPES, SafetensorsReader, SafetensorsWriter
from megagrid.errors import CheckpointError

Progress = Callable[[str, int], None]
"""Is told what is being done, and of how many bytes it has been done."""


def reshard(
    source: TensorReader,
    out: Path,
    ranks: Iterable[Sequence[Entry]],
    *,
    config: str,
    progress: Progress = lambda what, done: None,
) -> Manifest:
    """Write the checkpoint `source` to the new folder `out` as `ranks` would have.

    Args:
        ranks: what each rank of the grid holds, in rank order; the tensors' values aren't looked
            at, they may be on the meta device.
        config: the recipe (TOML) of the run that would have written it.

    Returns:
        the manifest that was written.

    Raises:
        CheckpointError: `out` exists or can't be written; `source` is damaged or of another model.
    """
    if out.exists() or out.is_symlink():
        raise CheckpointError(f"{out} exists, and nothing is overwritten; name another folder")
    planners = [_CopyPlanner(entries, source, progress) for entries in ranks]
    _check_model(source, planners)
    _check_files(source, progress)
    try:
        with _partial_folder(out) as partial:
            manifest = _write(source, partial, planners, config)
            rename(partial, out)
    except OSError as error:
        where = f"{error.filename}: " if error.filename else ""
        raise CheckpointError(f"writing {out} failed: {where}{error.strerror}") from None
    return manifest


class _CopyPlanner(BoxSavePlanner):
    """What one rank writes, its values read from a checkpoint when their turn comes."""

    def __init__(self, entries: Sequence[Entry], source: TensorReader, progress: Progress) -> None:
        super().__init__(entries)
        self._source = source
        self._progress = progress

    def lookup_object(self, index: MetadataIndex) -> torch.Tensor:
        entry = self._written[index.fqn, index.offset]
        bits = self._source.read(entry.name, entry.box.offsets, entry.box.sizes)
        saved = DTYPES[self._source.manifest.tensors[entry.name].dtype]
        # By way of bytes: numpy has no bfloat16.
        values = torch.from_numpy(bits.reshape(-1).view(np.uint8)).view(saved).view(bits.shape)
        self._progress("writing", bits.nbytes)
        return values.to(entry.tensor.dtype)


def _check_model(source: TensorReader, planners: Sequence[BoxSavePlanner]) -> None:
    """Whether the checkpoint would load: the names, shapes and dtypes are the grid's model's."""
    entries = [entry for planner in planners for entry in planner.entries]
    check = BoxLoadPlanner(entries, str(source.folder), weights_only=False)
    check.set_up_planner({}, SafetensorsReader(source.folder, source.manifest).read_metadata())
    check.create_global_plan([check.create_local_plan()])


def _check_files(source: TensorReader, progress: Progress) -> None:
    """Whether every file has its checksum."""
    problems = []
    for name, stated in source.manifest.files.items():
        problems += find_damage(source.folder, [(name, stated)], deep=True)
        progress("verifying", stated.size)
    if problems:
        raise CheckpointError(f"{source.folder} is damaged: {'; '.join(problems)}")


def _write(
    source: TensorReader, partial: Path, planners: Sequence[BoxSavePlanner], config: str
) -> Manifest:
    """The files of all ranks, what else the source has beside its tensors, the manifest last."""
    written: list[Manifest] = []

    def commit(shards: Mapping[str, FileRecord], tensors: Mapping[str, SavedTensor]) -> None:
        files = {**shards, CONFIG: write_file(partial / CONFIG, config.encode())}
        for name in _other_files(source.manifest):
            files[name] = copy_file(source.folder / name, partial / name)
        written.append(Manifest(source.manifest.step, files, tensors))
        write_file(partial / FILE_NAME, written[0].to_bytes())
        sync_folder(partial)

    writer = SafetensorsWriter(partial, prepare=lambda: None, commit=commit)
    plans, metadata = planners[0].create_global_plan([p.create_local_plan() for p in planners])
    results = []
    for rank, plan in enumerate(writer.prepare_global_plan(plans)):
        writer.set_up_storage_writer(rank == 0, rank=rank)
        planner = planners[rank]
        results.append(writer.write_data(planner.finish_plan(plan), planner).wait())
    writer.finish(metadata, results)
    return written[0]


def _other_files(manifest: Manifest) -> list[str]:
    """What isn't written anew: the trainer's state, and what a run carries along."""
    anew = {box.file for tensor in manifest.tensors.values() for box in tensor.boxes} | {CONFIG}
    return [name for name in manifest.files if name not in anew]


@contextmanager
def _partial_folder(out: Path) -> Iterator[Path]:
    """OUT.partial, empty and no other process's. If the block fails, it is removed."""
    partial = out.with_name(out.name + PARTIAL)
    partial.mkdir(parents=True, exist_ok=True)
    handle = os.open(partial, os.O_RDONLY)
    try:
        _lock(handle, partial)
        for leftover in partial.iterdir():
            leftover.unlink()
        try:
            yield partial
        except BaseException:
            shutil.rmtree(partial, ignore_errors=True)
            raise
    finally:
        os.close(handle)


def _lock(handle: int, folder: Path) -> None:
    """Keep others out until `handle` is closed, by the system if need be."""
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise CheckpointError(f"{folder} is being written by another process") from None
    except OSError:
        pass  # a file system without locks: better unguarded than not at all
