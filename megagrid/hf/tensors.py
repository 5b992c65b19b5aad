"""Our tensors out of theirs, and theirs out of ours: what `Row`s say, on values.

ours (out, in)   wq  wk  wv         theirs (in, 3 out), GPT-2's c_attn
rows             o   o   o    <->   columns  [  wq^T  |  wk^T  |  wv^T  ]
"""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from megagrid.checkpoint.storage import DTYPE_CODES
from megagrid.config.schema import ModelConfig
from megagrid.errors import CheckpointError
from megagrid.grid.grid import Axis
from megagrid.hf.families import Family, Row
from megagrid.hf.weights import Weights
from megagrid.model.decoder import ModelAxes, StageShare
from megagrid.model.zoo import build_stage
from megagrid.nn.layout import Box, parameter_shards

NAMES_LISTED = 16
EMBEDDING = "embedding.weight"

FLOATS = {code: dtype for dtype, code in DTYPE_CODES.items() if dtype.is_floating_point}
"""What weights may be stored as, by a file's name of it: anything else is quantised."""

_ELEMENTS_AT_ONCE = 1 << 24

Shapes = Mapping[str, tuple[int, ...]]


def global_shapes(model: ModelConfig) -> dict[str, tuple[int, ...]]:
    """The tensors of `model` by global name, in its order; nothing is allocated.

    Raises:
        CheckpointError: they are larger than any memory.
    """
    axes = ModelAxes(*(Axis.single(name) for name in ("tp", "kv", "embedding", "cp")))
    share = StageShare(range(model.num_layers), is_first=True, is_last=True)
    try:
        with torch.device("meta"):
            stage = build_stage(model, share, axes)
    except RuntimeError as error:
        raise CheckpointError(f"no such model can be made: {error}") from None
    return {
        piece.name: piece.shape for shard in parameter_shards(stage) for piece, _ in shard.boxes
    }


def rows_of(family: Family, shapes: Shapes) -> dict[str, Row]:
    """The row of each tensor of `shapes`, by its name here."""
    rows = {}
    for row in family.rows:
        if "{n}" not in row.ours:
            rows[row.ours] = row
            continue
        number = 0
        while (numbered := row.of_layer(number)).ours in shapes:
            rows[numbered.ours] = numbered
            number += 1
    return {name: rows[name] for name in shapes}


@dataclass(frozen=True)
class Fused:
    """A tensor of theirs, and the rows of ours that it is made of, in their order."""

    name: str
    shape: tuple[int, ...]
    rows: tuple[Row, ...]


def their_tensors(rows: Mapping[str, Row], shapes: Shapes) -> Iterator[Fused]:
    """All tensors of theirs, in our order."""
    groups: dict[str, list[Row]] = defaultdict(list)
    for row in rows.values():
        groups[row.theirs].append(row)
    for name, parts in groups.items():
        parts.sort(key=lambda row: row.part)
        out, *others = shapes[parts[0].ours]
        shape = (len(parts) * out, *others)
        if parts[0].transposed:
            shape = (*others, len(parts) * out)
        yield Fused(name, shape, tuple(parts))


def fused(tensor: Fused, read: Callable[[str], Tensor], dtype: torch.dtype) -> Tensor:
    """The values of a tensor of theirs.

    Args:
        read: gives a tensor of ours by its name.
    """
    row = tensor.rows[0]
    if len(tensor.rows) == 1 and not row.transposed:
        return read(row.ours).to(dtype)
    whole = torch.empty(tensor.shape, dtype=dtype)
    for part, view in zip(tensor.rows, _parts(whole, row), strict=True):
        view.copy_(read(part.ours))
    return whole


def _parts(theirs: Tensor, row: Row) -> tuple[Tensor, ...]:
    """Views of a tensor of theirs as the tensors of ours that it is fused of."""
    upright = theirs.t() if row.transposed else theirs
    return upright.chunk(row.part[1], dim=0)


class Source:
    """A folder's weights by our names, whole or in boxes.

    Args:
        described_by: what errors call the place that `model` stands in.

    Raises:
        CheckpointError: they aren't all the tensors of `model` and no others; all differences are
            listed.
    """

    def __init__(
        self,
        weights: Weights,
        family: Family,
        model: ModelConfig,
        described_by: str = "its config.json",
    ) -> None:
        self.weights = weights
        if model.num_layers > len(weights.stored):  # don't build a model out of a typing error
            raise CheckpointError(
                f"{weights.folder} holds {len(weights.stored)} tensors, {described_by} describes a "
                f"model of {model.num_layers} layers"
            )
        self.shapes = global_shapes(model)
        self._rows = rows_of(family, self.shapes)
        self._names = {
            tensor.name: self._stored_name(tensor.name, family)
            for tensor in their_tensors(self._rows, self.shapes)
        }
        self._check(family, model, described_by)

    def dtype(self, name: str) -> torch.dtype:
        """Of our tensor `name`, as it is stored."""
        return FLOATS[self.weights.stored[self._names[self._rows[name].theirs]].code]

    def read(self, name: str, box: Box | None = None) -> Tensor:
        """Our tensor `name`, or a box of it; no more is read."""
        row, shape = self._rows[name], self.shapes[name]
        box = box or Box((0,) * len(shape), shape)
        starts = list(box.offsets)
        starts[0] += row.part[0] * shape[0]
        rectangle = tuple(
            slice(start, start + size) for start, size in zip(starts, box.sizes, strict=True)
        )
        if row.transposed:
            return self.weights.read(self._names[row.theirs], rectangle[::-1]).t()
        return self.weights.read(self._names[row.theirs], rectangle)

    def _stored_name(self, name: str, family: Family) -> str:
        """Some files leave the prefix of the inner model out."""
        bare = name.removeprefix(family.prefix)
        return bare if name not in self.weights.stored and bare in self.weights.stored else name

    def _check(self, family: Family, model: ModelConfig, described_by: str) -> None:
        stored = self.weights.stored
        wanted = {
            self._names[tensor.name]: tensor.shape
            for tensor in their_tensors(self._rows, self.shapes)
        }
        missing = [name for name in wanted if name not in stored]
        besides = [
            name
            for name in stored.keys() - wanted.keys()
            if not re.fullmatch(family.buffers, name) and not self._is_tied_copy(name, model)
        ]
        wrong = [
            f"{name} {stored[name].shape} instead of {shape}"
            for name, shape in wanted.items()
            if name in stored and stored[name].shape != shape
        ]
        others = [
            f"{name} {stored[name].code} instead of one of {', '.join(FLOATS)}"
            for name in wanted
            if name in stored and stored[name].code not in FLOATS
        ]
        kinds = {
            "it lacks": missing,
            "it has besides": sorted(besides),
            "it has other shapes": wrong,
            "it has other dtypes": others,
        }
        problems = [f"{kind} {_listed(names)}" for kind, names in kinds.items() if names]
        if problems:
            raise CheckpointError(
                f"{self.weights.folder} doesn't hold the model that {described_by} describes: "
                + "; ".join(problems)
            )

    def _is_tied_copy(self, name: str, model: ModelConfig) -> bool:
        """Whether it is the head's matrix, stored although it is the embedding's.

        Raises:
            CheckpointError: it isn't the embedding's.
        """
        if name != "lm_head.weight" or not model.tied_embeddings:
            return False
        embedding = self._names[self._rows[EMBEDDING].theirs]
        if not _are_equal(self.weights, name, embedding):
            raise CheckpointError(
                f"{self.weights.folder}: {name} isn't {embedding}, although tie_word_embeddings is "
                "true; set it to false in config.json, or take one of them out"
            )
        return True


def _are_equal(weights: Weights, a: str, b: str) -> bool:
    """Compared some rows at a time."""
    one, other = weights.stored[a], weights.stored.get(b)
    if other is None or one.shape != other.shape:
        return False
    rows, *others = one.shape
    at_once = max(1, _ELEMENTS_AT_ONCE // max(1, math.prod(others)))
    return all(
        torch.equal(weights.read(a, some), weights.read(b, some))
        for some in ((slice(first, first + at_once),) for first in range(0, rows, at_once))
    )


def _listed(names: list[str]) -> str:
    more = f" and {len(names) - NAMES_LISTED} more" if len(names) > NAMES_LISTED else ""
    return ", ".join(names[:NAMES_LISTED]) + more
