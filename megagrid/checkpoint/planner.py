"""Which bytes go where: the planning half of torch.distributed.checkpoint, for boxes."""

from __future__ import annotations

import dataclasses
import io
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    LoadPlan,
    LoadPlanner,
    ReadItem,
    SavePlan,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

from megagrid.checkpoint.layout import Entry
from megagrid.checkpoint.manifest import OPTIMIZER_PREFIX, state_kind, weight_of
from megagrid.errors import CheckpointError

NAMES_LISTED = 64
"""Of each kind of difference; a wrong model can differ in thousands of tensors."""


class BoxSavePlanner(DefaultSavePlanner):
    """Each rank writes its boxes as they are. The coordinator proves that they fill every tensor:
    within bounds, without overlap (both by DefaultSavePlanner), and nothing forgotten.

    Args:
        finite_at: step that is saved, after which a NaN or Inf is no value to be written; None: it
            may be.
    """

    def __init__(self, entries: Sequence[Entry], *, finite_at: int | None = None) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self.entries = entries
        self._finite_at = finite_at
        self._written = {
            (entry.name, torch.Size(entry.box.offsets)): entry
            for entry in entries
            if entry.is_written_here and entry.box.numel
        }

    def create_local_plan(self) -> SavePlan:
        """
        Raises:
            CheckpointError: there is one.
        """
        for entry in self._written.values() if self._finite_at is not None else ():
            if not _is_finite(entry.tensor):
                raise CheckpointError(
                    f"after step {self._finite_at} {entry.name} has a NaN or Inf, and nothing is "
                    "saved; go on from an earlier checkpoint, or begin again, with a lower "
                    "optimizer.lr"
                )
        items = [_write_item(entry) for entry in self._written.values()]
        self.plan = SavePlan(items, planner_data={entry.name for entry in self.entries})
        return self.plan

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        names: set[str] = set().union(*(plan.planner_data for plan in all_plans))
        plans, metadata = super().create_global_plan(all_plans)
        if unwritten := sorted(names - metadata.state_dict_metadata.keys()):
            raise AssertionError(f"no rank writes {', '.join(unwritten)}")
        for name, tensor in metadata.state_dict_metadata.items():
            volume = sum(chunk.sizes.numel() for chunk in tensor.chunks)
            if volume != tensor.size.numel():
                raise AssertionError(
                    f"{volume} of the {tensor.size.numel()} values of {name} are written"
                )
        return [dataclasses.replace(plan, planner_data=None) for plan in plans], metadata

    def lookup_object(self, index: MetadataIndex) -> torch.Tensor:
        return self._written[index.fqn, index.offset].tensor


@dataclasses.dataclass(frozen=True)
class Wanted:
    """A global tensor that a rank wants a part of."""

    shape: tuple[int, ...]
    dtype: torch.dtype


class BoxLoadPlanner(LoadPlanner):
    """Fills each entry from the saved boxes that it overlaps, however they were cut.

    What a rank reads is its own affair and isn't sent to the coordinator; the names that it wants
    are, so that a tensor that no rank wants is noticed.

    Args:
        checkpoint: how errors call the checkpoint.
        weights_only: optimizer states in it need not be wanted.
    """

    def __init__(self, entries: Sequence[Entry], checkpoint: str, weights_only: bool) -> None:
        self.entries = entries
        self.checkpoint = checkpoint
        self.weights_only = weights_only

    def set_up_planner(
        self,
        state_dict: dict[str, Any],
        metadata: Metadata | None = None,
        is_coordinator: bool = False,
    ) -> None:
        assert metadata is not None
        self.saved: dict[str, TensorStorageMetadata] = metadata.state_dict_metadata

    def create_local_plan(self) -> LoadPlan:
        wanted = {entry.name: Wanted(entry.shape, entry.tensor.dtype) for entry in self.entries}
        return LoadPlan([], planner_data=wanted)

    def create_global_plan(self, global_plan: list[LoadPlan]) -> list[LoadPlan]:
        """Compare what the ranks want with what there is.

        Raises:
            CheckpointError: they differ; every difference is listed, or that all states are another
                optimizer's.
        """
        wanted: dict[str, Wanted] = {}
        for plan in global_plan:
            wanted.update(plan.planner_data)
        if not self.weights_only:
            _check_optimizer(self.checkpoint, wanted, self.saved)
        ignored = OPTIMIZER_PREFIX if self.weights_only else None
        if differences := _differences(wanted, self.saved, ignored):
            raise CheckpointError(
                f"{self.checkpoint} is of another model (compare [model] with its config.toml): "
                + "; ".join(differences)
            )
        return [LoadPlan([]) for _ in global_plan]

    def finish_plan(self, central_plan: LoadPlan) -> LoadPlan:
        items = []
        for number, entry in enumerate(self.entries):
            reads = create_read_items_for_chunk_list(
                entry.name, self.saved[entry.name], [_chunk(entry)]
            )
            if sum(read.lengths.numel() for read in reads) != entry.box.numel:
                raise CheckpointError(f"{self.checkpoint} doesn't hold all of {entry.name}")
            index = MetadataIndex(entry.name, index=number)
            items += [dataclasses.replace(read, dest_index=index) for read in reads]
        return LoadPlan(items)

    def resolve_tensor(self, read_item: ReadItem) -> torch.Tensor:
        """The part of an entry's tensor that is read into, in place."""
        target = self.entries[read_item.dest_index.index].tensor
        for dim, (offset, length) in enumerate(
            zip(read_item.dest_offsets, read_item.lengths, strict=True)
        ):
            target = target.narrow(dim, offset, length)
        return target

    def commit_tensor(self, read_item: ReadItem, tensor: torch.Tensor) -> None:
        """It was read in place."""

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        raise AssertionError("a checkpoint holds tensors only")


def _check_optimizer(checkpoint: str, wanted: Iterable[str], saved: Iterable[str]) -> None:
    """Raises:
    CheckpointError: the states are another optimizer's than those that are wanted.
    """
    ours, theirs = (
        sorted({state_kind(name) for name in names if name.startswith(OPTIMIZER_PREFIX)})
        for names in (wanted, saved)
    )
    if ours and theirs and ours != theirs:
        raise CheckpointError(
            f"{checkpoint} has the states of another optimizer: {', '.join(theirs)}, where "
            f"{', '.join(ours)} is wanted; set optimizer.name as in its config.toml, or begin "
            "with its weights by checkpoint.initialize_from"
        )


def _differences(
    wanted: dict[str, Wanted], saved: dict[str, TensorStorageMetadata], ignored: str | None
) -> list[str]:
    """One phrase for each kind of difference between the model and the checkpoint."""
    unwanted = saved.keys() - wanted.keys()
    if ignored is not None:
        unwanted = {name for name in unwanted if not name.startswith(ignored)}
    both = wanted.keys() & saved.keys()
    shapes = {
        name: f"{name} {tuple(saved[name].size)} instead of {wanted[name].shape}"
        for name in both
        if tuple(saved[name].size) != wanted[name].shape
    }
    # A wider dtype holds every value of a narrower one; the other way round values are lost, which
    # is what an optimizer asks for whose states are rounded after each step.
    dtypes = {
        name: f"{name} {saved[name].properties.dtype} instead of {wanted[name].dtype}"
        for name in both
        if torch.promote_types(saved[name].properties.dtype, wanted[name].dtype)
        != wanted[name].dtype
        and not (name.startswith(OPTIMIZER_PREFIX) and wanted[name].dtype == torch.bfloat16)
    }
    kinds = {
        "it lacks": {name: name for name in wanted.keys() - saved.keys()},
        "it has besides": {name: name for name in unwanted},
        "it has other shapes": shapes,
        "it has wider dtypes": dtypes,
    }
    return [f"{kind} {_listed(phrases)}" for kind, phrases in kinds.items() if phrases]


def _listed(phrases: Mapping[str, str]) -> str:
    """The phrases by name; optimizer states aren't named where their weight is."""
    weights = {name for name in phrases if not name.startswith(OPTIMIZER_PREFIX)}
    alone = {name for name in phrases.keys() - weights if weight_of(name) not in weights}
    named = sorted(weights) + sorted(alone)
    text = ", ".join(phrases[name] for name in named[:NAMES_LISTED])
    if len(named) > NAMES_LISTED:
        text += f" and {len(named) - NAMES_LISTED} more"
    return text + (" (and their optimizer states)" if len(named) < len(phrases) else "")


def _is_finite(values: torch.Tensor) -> bool:
    """Whether no value is NaN or Inf. These show in the sum, which needs no memory; only if it
    isn't finite, as that of very large values isn't, each is looked at."""
    return bool(torch.isfinite(values.sum())) or bool(torch.isfinite(values).all())


def _chunk(entry: Entry) -> ChunkStorageMetadata:
    return ChunkStorageMetadata(torch.Size(entry.box.offsets), torch.Size(entry.box.sizes))


def _write_item(entry: Entry) -> WriteItem:
    return WriteItem(
        index=MetadataIndex(entry.name, torch.Size(entry.box.offsets)),
        type=WriteItemType.SHARD,
        tensor_data=TensorWriteData(
            chunk=_chunk(entry),
            properties=TensorProperties(entry.tensor.dtype),
            size=torch.Size(entry.shape),
        ),
    )
